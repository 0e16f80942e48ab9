#include "evaluate/svg.hpp"

#include <fmt/format.h>

#include <cmath>

#include "unicode.hpp"

namespace evaluate {

namespace {

std::string escaped(std::string_view text) {
    std::string safe;
    for (const char character : generate::valid_utf8(text)) {
        switch (character) {
            case '&':
                safe += "&amp;";
                break;
            case '<':
                safe += "&lt;";
                break;
            case '>':
                safe += "&gt;";
                break;
            default:
                safe += static_cast<unsigned char>(character) < 0x20 ? ' ' : character;
        }
    }
    return safe;
}

}  // namespace

double axis::place(double value) const {
    return from + (to - from) * std::log(value / low) / std::log(high / low);
}

std::string svg_begin(double width, double height) {
    return fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
        "height=\"{1}\" font-family=\"sans-serif\" font-size=\"11\">\n"
        "<rect width=\"{0}\" height=\"{1}\" fill=\"#ffffff\"/>\n",
        width, height);
}

std::string text_at(double x, double y, const char* anchor, std::string_view words,
                    std::string_view more) {
    return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\"{}>{}</text>\n", x, y,
                       anchor, more, escaped(words));
}

std::string line_between(double x0, double y0, double x1, double y1, const char* style) {
    return fmt::format("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" {}/>\n", x0,
                       y0, x1, y1, style);
}

}  // namespace evaluate
