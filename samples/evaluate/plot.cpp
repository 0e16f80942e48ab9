#include "evaluate/plot.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "evaluate/svg.hpp"

namespace evaluate {

namespace {

// In pixels.
constexpr double width = 1000;
constexpr double height = 680;
constexpr double left = 80;
constexpr double right = 20;
constexpr double top = 60;
constexpr double bottom = 70;
constexpr double dot = 4;
constexpr double letter = 6.3;  // of a label: mean width, generously
constexpr double line = 13;

struct rectangle {
    double x0, y0, x1, y1;

    bool meets(const rectangle& other) const {
        return x0 < other.x1 && other.x0 < x1 && y0 < other.y1 && other.y0 < y1;
    }
};

struct point {
    const result* shown;
    double x, y;
    rectangle box() const { return {x - dot, y - dot, x + dot, y + dot}; }
};

struct group {
    const char* name;
    const char* colour;
};
constexpr group groups[] = {{"one format", "#1f5fa8"},
                            {"rotated", "#c2570c"},
                            {"keys and values apart", "#2f7d32"},
                            {"outermost layers in f16", "#7b3fa0"}};

const group& group_of(const std::string& name) {
    const bool edges = name.find('@') != std::string::npos;
    const bool apart = name.find('/') != std::string::npos;
    const bool rotated = name.find('+') != std::string::npos;
    return groups[edges ? 3 : apart ? 2 : rotated ? 1 : 0];
}

bool has_place(const evaluation& done, const result& one) {
    return std::isfinite(one.mean_divergence) && one.mean_divergence > 0 &&
           one.bytes_per_token > 0 && one.bytes_per_token <= done.reference.bytes_per_token;
}

std::string grid(const evaluation& done, const axis& x, const axis& y) {
    constexpr const char* thin = "stroke=\"#dddddd\"";
    std::string svg;
    for (const double share : {0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.75, 1.0}) {
        const double bytes = share * done.reference.bytes_per_token;
        if (bytes < x.low || bytes > x.high) {
            continue;
        }
        const double place = x.place(bytes);
        svg += line_between(place, y.from, place, y.to, thin);
        svg += text_at(place, y.from + 18, "middle", fmt::format("{:.0f}", bytes));
        svg += text_at(place, y.from + 32, "middle", fmt::format("{:g} of f16", share));
    }
    for (double decade = y.low; decade <= y.high * 1.001; decade *= 10) {
        const double place = y.place(decade);
        svg += line_between(x.from, place, x.to, place, thin);
        svg += text_at(x.from - 8, place + 4, "end", fmt::format("{:.0e}", decade));
    }
    svg += fmt::format(
        "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"none\" "
        "stroke=\"#888888\"/>\n",
        x.from, y.to, x.to - x.from, y.from - y.to);
    svg += text_at((x.from + x.to) / 2, height - 14, "middle", "bytes per token, all layers");
    const double middle = (y.from + y.to) / 2;
    svg += text_at(22, middle, "middle", "mean KL divergence from the f16 cache, nats per token",
                   fmt::format(" transform=\"rotate(-90 22 {:.1f})\"", middle));
    return svg;
}

// Those that none beats in both respects, from the smallest cache to the largest.
std::string frontier(std::vector<point> points) {
    std::sort(points.begin(), points.end(),
              [](const point& a, const point& b) { return a.x != b.x ? a.x < b.x : a.y > b.y; });
    std::string corners;
    double lowest = 0;  // on the page: the largest y
    for (const point& one : points) {
        if (corners.empty() || one.y > lowest) {
            corners += fmt::format(" {:.1f},{:.1f}", one.x, one.y);
            lowest = one.y;
        }
    }
    return fmt::format(
        "<polyline points=\"{}\" fill=\"none\" stroke=\"#aaaaaa\" "
        "stroke-dasharray=\"5 4\"/>\n",
        corners.empty() ? "" : corners.substr(1));
}

// Beside its point where there is room; else a little higher or lower, with a line to it.
std::string label(const point& one, const axis& x, const axis& y, std::vector<rectangle>& taken) {
    const std::string& name = one.shown->configuration;
    const double length = letter * static_cast<double>(name.size());
    const auto box_at = [&](bool after, double shift) {
        const double start = after ? one.x + 9 : one.x - 9 - length;
        return rectangle{start, one.y + shift - line / 2, start + length, one.y + shift + line / 2};
    };
    const auto is_free = [&](const rectangle& box) {
        const bool inside = box.x0 > x.from && box.x1 < x.to && box.y0 > y.to && box.y1 < y.from;
        return inside && std::none_of(taken.begin(), taken.end(),
                                      [&](const rectangle& other) { return box.meets(other); });
    };
    bool after = true;
    double shift = 0;
    rectangle box = box_at(after, shift);
    for (int attempt = 0; attempt < 120 && !is_free(box); ++attempt) {
        after = attempt % 2 == 0;
        shift = (attempt / 4) * 4.0 * (attempt / 2 % 2 == 0 ? 1 : -1);
        box = box_at(after, shift);
    }
    taken.push_back(box);
    std::string svg;
    if (std::fabs(shift) > 6) {
        svg += line_between(one.x, one.y, after ? box.x0 - 1 : box.x1 + 1, one.y + shift,
                            "stroke=\"#bbbbbb\"");
    }
    return svg + text_at(after ? box.x0 : box.x1, one.y + shift + 4, after ? "start" : "end", name,
                         fmt::format(" fill=\"{}\"", group_of(name).colour));
}

std::string legend() {
    std::string svg;
    double x = left;
    for (const group& one : groups) {
        svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"44\" r=\"{}\" fill=\"{}\"/>\n", x + 5, dot,
                           one.colour);
        svg += text_at(x + 14, 48, "start", one.name);
        x += 40 + letter * static_cast<double>(std::string_view(one.name).size());
    }
    return svg;
}

}  // namespace

std::string plot(const evaluation& done) {
    axis x = {done.reference.bytes_per_token, done.reference.bytes_per_token, left, width - right};
    axis y = {1e-3, 1e-2, height - bottom, top};
    for (const result& one : done.results) {
        if (has_place(done, one)) {
            x.low = std::min(x.low, one.bytes_per_token);
            x.high = std::max(x.high, one.bytes_per_token);
            y.low = std::min(y.low, std::pow(10, std::floor(std::log10(one.mean_divergence))));
            y.high = std::max(y.high, std::pow(10, std::ceil(std::log10(one.mean_divergence))));
        }
    }
    x.low /= 1.15;
    x.high *= 1.15;

    std::vector<point> points;
    std::vector<rectangle> taken;
    for (const result& one : done.results) {
        if (has_place(done, one)) {
            points.push_back({&one, x.place(one.bytes_per_token), y.place(one.mean_divergence)});
            taken.push_back(points.back().box());
        }
    }
    std::sort(points.begin(), points.end(),
              [](const point& a, const point& b) { return a.y < b.y; });

    std::string svg = svg_begin(width, height);
    svg += text_at(left, 24, "start",
                   fmt::format("{}, {} tokens of {}: lower and further left is better", done.model,
                               done.tokens, done.text),
                   " font-size=\"14\"");
    svg += legend() + grid(done, x, y) + frontier(points);
    for (const point& one : points) {
        svg += label(one, x, y, taken);
    }
    for (const point& one : points) {
        svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{}\" fill=\"{}\"/>\n", one.x,
                           one.y, dot, group_of(one.shown->configuration).colour);
    }
    return svg + "</svg>\n";
}

}  // namespace evaluate
