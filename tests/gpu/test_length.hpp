// How long the tests for a GPU are: whole, or, where every kernel is emulated, as long as it takes
// to see that they would find something.
#pragma once

namespace kvrt::cuda {

/// False with --quick. Set by main.
bool whole_length();

}  // namespace kvrt::cuda
