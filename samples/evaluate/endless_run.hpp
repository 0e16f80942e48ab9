// The evaluation behind --endless, from the command line's wishes to the table.
#pragma once

#include "evaluate/endless_command.hpp"

namespace evaluate {

outcome<nothing> run_endless(const endless_command& wanted);

}  // namespace evaluate
