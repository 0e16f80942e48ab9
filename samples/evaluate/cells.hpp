// Numbers and tables as results show them.
#pragma once

#include <string>
#include <vector>

namespace evaluate {

// "null" where it is not finite.
std::string json_number(double value);

// Three significant digits: divergences lie orders of magnitude apart.
std::string short_number(double value);

// "12.34 %" of 0.1234
std::string percent(double share, int digits = 2);

// In Markdown, columns as wide as they need to be. The first row is the heading; `left` columns are
// aligned to the left, those behind them to the right.
std::string markdown_table(const std::vector<std::vector<std::string>>& rows, std::size_t left);

}  // namespace evaluate
