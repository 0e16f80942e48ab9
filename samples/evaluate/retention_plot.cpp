// A chart per measure, a line per method: quality against budget.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <vector>

#include "evaluate/retention_results.hpp"
#include "evaluate/svg.hpp"

namespace evaluate {

namespace {

// In pixels.
constexpr double panel_width = 430;
constexpr double panel_height = 300;
constexpr double margin_left = 60;
constexpr double margin_right = 20;
constexpr double margin_top = 30;
constexpr double margin_bottom = 40;
constexpr double title = 40;
constexpr double legend_width = 170;
constexpr double line = 18;

// What a panel shows. On the logarithmic axis lower is better, on that of shares higher.
struct measure {
    const char* name;
    bool is_divergence;
    double (*value)(const contender_found& one);
};

std::vector<measure> measures_of(const retention_found& found) {
    std::vector<measure> all;
    if (found.windows != 0) {
        all.push_back({"text: mean KL divergence, nats per token", true,
                       [](const contender_found& one) { return one.text->mean_divergence; }});
    }
    if (found.prompts != 0) {
        all.push_back({"drift: the same, on what the full cache wrote", true,
                       [](const contender_found& one) { return one.drift->mean_divergence; }});
    }
    if (found.contexts != 0) {
        all.push_back({"copied, question unseen", false,
                       [](const contender_found& one) { return one.copied(false).share(); }});
        all.push_back({"copied, question seen", false,
                       [](const contender_found& one) { return one.copied(true).share(); }});
        all.push_back({"nats per token of an answer, question unseen", true,
                       [](const contender_found& one) { return one.answer_loss(false); }});
        all.push_back({"nats per token of an answer, question seen", true,
                       [](const contender_found& one) { return one.answer_loss(true); }});
        all.push_back({"needles, question unseen", false,
                       [](const contender_found& one) { return one.needles(false).share(); }});
        all.push_back({"needles, question seen", false,
                       [](const contender_found& one) { return one.needles(true).share(); }});
    }
    return all;
}

std::vector<std::string_view> methods_of(const retention_found& found) {
    std::vector<std::string_view> names;
    for (const contender_found& one : found.contenders) {
        if (std::find(names.begin(), names.end(), one.method) == names.end()) {
            names.push_back(one.method);
        }
    }
    return names;
}

std::vector<double> budgets_of(const retention_found& found) {
    std::vector<double> budgets;
    for (const contender_found& one : found.contenders) {
        if (budgets.empty() || budgets.back() != one.percent) {
            budgets.push_back(one.percent);
        }
    }
    return budgets;
}

// The two that all are measured against are black and grey, the others go round the colours, every
// other one dashed.
std::string style_of(std::size_t method, std::size_t methods) {
    if (method < 2) {
        return fmt::format("stroke=\"{}\" stroke-width=\"2.5\" fill=\"none\"",
                           method == 0 ? "#000000" : "#999999");
    }
    const double hue = 360.0 * static_cast<double>(method - 2) /
                       static_cast<double>(std::max<std::size_t>(methods - 2, 1));
    return fmt::format("stroke=\"hsl({:.0f},70%,42%)\" stroke-width=\"1.5\" fill=\"none\"{}", hue,
                       method % 2 == 0 ? "" : " stroke-dasharray=\"6 3\"");
}

// The vertical axis of a panel.
struct scale {
    bool is_divergence;
    axis divergences;
    double from, to;

    double place(double value) const {
        return is_divergence ? divergences.place(value) : from + (to - from) * value;
    }
    bool has_place(double value) const {
        return std::isfinite(value) && (!is_divergence || value > 0);
    }
};

scale scale_of(const retention_found& found, const measure& shown, double from, double to) {
    double low = 1, high = 1e-3;
    for (const contender_found& one : found.contenders) {
        const double value = shown.value(one);
        if (shown.is_divergence && std::isfinite(value) && value > 0) {
            low = std::min(low, value);
            high = std::max(high, value);
        }
    }
    const axis decades = {std::pow(10, std::floor(std::log10(low))),
                          std::pow(10, std::ceil(std::log10(high) + 1e-9)), from, to};
    return {shown.is_divergence, decades, from, to};
}

std::string grid(const axis& x, const scale& y, const std::vector<double>& budgets) {
    constexpr const char* thin = "stroke=\"#dddddd\"";
    std::string svg;
    for (const double budget : budgets) {
        svg += line_between(x.place(budget), y.from, x.place(budget), y.to, thin);
        svg += text_at(x.place(budget), y.from + 16, "middle", fmt::format("{:g} %", budget));
    }
    std::vector<double> marks = {0, 0.25, 0.5, 0.75, 1};
    if (y.is_divergence) {
        marks.clear();
        for (double mark = y.divergences.low; mark <= y.divergences.high * 1.001; mark *= 10) {
            marks.push_back(mark);
        }
    }
    for (const double mark : marks) {
        svg += line_between(x.from, y.place(mark), x.to, y.place(mark), thin);
        svg += text_at(x.from - 6, y.place(mark) + 4, "end", fmt::format("{:g}", mark));
    }
    return svg;
}

std::string panel(const retention_found& found, const measure& shown, double left, double top,
                  const std::vector<std::string_view>& methods,
                  const std::vector<double>& budgets) {
    // One budget alone needs an axis too.
    const axis x = {budgets.back() / 1.1, budgets.front() * 1.1, left + margin_left,
                    left + panel_width - margin_right};
    const scale y = scale_of(found, shown, top + panel_height - margin_bottom, top + margin_top);
    std::string svg =
        text_at(left + margin_left, top + margin_top - 8, "start", shown.name, " font-size=\"12\"");
    svg += grid(x, y, budgets);
    for (std::size_t i = 0; i < methods.size(); ++i) {
        std::string corners;
        for (const contender_found& one : found.contenders) {
            const double value = shown.value(one);
            if (one.method == methods[i] && y.has_place(value)) {
                corners += fmt::format("{}{:.1f},{:.1f}", corners.empty() ? "" : " ",
                                       x.place(one.percent), y.place(value));
            }
        }
        svg += fmt::format("<polyline points=\"{}\" {}/>\n", corners, style_of(i, methods.size()));
    }
    return svg;
}

}  // namespace

std::string plot(const retention_found& found) {
    const auto measures = measures_of(found);
    const auto methods = methods_of(found);
    const auto budgets = budgets_of(found);
    const double rows = std::ceil(static_cast<double>(measures.size()) / 2);
    const double width = 2 * panel_width + legend_width;
    const double legend_height = line * static_cast<double>(methods.size() + 1);
    const double height = title + std::max(rows * panel_height, legend_height);
    std::string svg = svg_begin(width, height);
    svg += text_at(margin_left, 24, "start",
                   fmt::format("{}, stored as {}: quality by budget, in percent of the context",
                               found.model, found.stored),
                   " font-size=\"14\"");
    for (std::size_t i = 0; i < measures.size(); ++i) {
        svg += panel(found, measures[i], static_cast<double>(i % 2) * panel_width,
                     title + static_cast<double>(i / 2) * panel_height, methods, budgets);
    }
    for (std::size_t i = 0; i < methods.size(); ++i) {
        const double place = title + line * static_cast<double>(i + 1);
        svg += line_between(2 * panel_width + 4, place, 2 * panel_width + 34, place,
                            style_of(i, methods.size()).c_str());
        svg += text_at(2 * panel_width + 40, place + 4, "start", methods[i]);
    }
    return svg + "</svg>\n";
}

}  // namespace evaluate
