// Text under a budget: what each contender predicts, token by token, beside the f16 cache that
// forgets nothing.
//
// A window is read in chunks. When it exceeds a contender's budget, a round brings it back to it,
// and so after every chunk from then on: no more than budget + chunk is ever held. What is
// predicted after the first round is scored. Up to it all contenders read the same, once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "evaluate/metrics.hpp"
#include "evaluate/retention_family.hpp"
#include "evaluate/text_run.hpp"

namespace evaluate {

struct text_window {
    std::vector<generate::token_id> tokens;
    std::uint32_t prompt = 0;  // so many of them are not scored, and worth protecting
};

// Of one contender.
struct retained_text {
    score_sums sums;
    score_sums reference;  // of the same tokens, by the f16 cache
    // Shares of the bytes of the f16 cache with all of a window, the mean over windows: after the
    // last round, and the most that were held at once after the first.
    double steady_bytes = 0;
    double peak_bytes = 0;
};

// One a contender.
outcome<std::vector<retained_text>> score_windows(const generate::llama_model& model,
                                                  std::span<const text_window> windows,
                                                  std::span<const contender> contenders,
                                                  const retention_options& options,
                                                  const observe_windows& observe);

}  // namespace evaluate
