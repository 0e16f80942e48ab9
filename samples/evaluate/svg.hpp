// Parts of a drawing in SVG. Places are in pixels.
#pragma once

#include <string>
#include <string_view>

namespace evaluate {

// A logarithmic axis: values between `low` and `high` lie between `from` and `to`.
struct axis {
    double low, high, from, to;

    double place(double value) const;
};

// What a drawing begins with; it ends with </svg>.
std::string svg_begin(double width, double height);

// `anchor` as in SVG: start, middle, end. `more` are further attributes, a space before each.
std::string text_at(double x, double y, const char* anchor, std::string_view words,
                    std::string_view more = "");

std::string line_between(double x0, double y0, double x1, double y1, const char* style);

}  // namespace evaluate
