#include "evaluate/cells.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace evaluate {

std::string json_number(double value) {
    return std::isfinite(value) ? fmt::format("{}", value) : "null";
}

std::string short_number(double value) {
    if (value == 0 || !std::isfinite(value)) {
        return fmt::format("{}", value);
    }
    return value < 1e-3 ? fmt::format("{:.2e}", value) : fmt::format("{:#.3g}", value);
}

std::string percent(double share, int digits) {
    return fmt::format("{:.{}f} %", 100 * share, digits);
}

std::string markdown_table(const std::vector<std::vector<std::string>>& rows, std::size_t left) {
    std::string text;
    for (std::size_t row = 0; row < rows.size(); ++row) {
        std::string line = "|";
        std::string rule = "|";
        for (std::size_t column = 0; column < rows[row].size(); ++column) {
            std::size_t width = 0;
            for (const auto& other : rows) {
                width = std::max(width, other[column].size());
            }
            const bool at_left = column < left;
            line += at_left ? fmt::format(" {:<{}} |", rows[row][column], width)
                            : fmt::format(" {:>{}} |", rows[row][column], width);
            rule += at_left ? fmt::format(" {:-<{}} |", "", width)
                            : fmt::format(" {:-<{}}: |", "", width - 1);
        }
        text += line + "\n" + (row == 0 ? rule + "\n" : "");
    }
    return text;
}

}  // namespace evaluate
