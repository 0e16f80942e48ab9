// The evaluation behind --retention, from the command line's wishes to the table.
#pragma once

#include <span>

#include "evaluate/configuration.hpp"
#include "evaluate/retention_command.hpp"

namespace evaluate {

outcome<nothing> run_retention(const retention_command& wanted);

// `words` are those behind --retention. Returns the program's exit status.
int retention_main(std::span<const char* const> words);

}  // namespace evaluate
