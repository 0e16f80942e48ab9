// The evaluation behind --retention, from the command line's wishes to the table.
#pragma once

#include "evaluate/configuration.hpp"
#include "evaluate/retention_command.hpp"

namespace evaluate {

outcome<nothing> run_retention(const retention_command& wanted);

}  // namespace evaluate
