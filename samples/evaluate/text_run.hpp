// Real text, read with every configuration in lockstep: what each predicts beside the f16 cache.
//
// The text is cut into windows, each a sequence of its own. The first half of a window is context,
// each token of the second half is scored. A window is read in chunks, and every chunk attends over
// what the chunks before it and itself have left in the cache, as it is stored there.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "evaluate/configuration.hpp"
#include "evaluate/metrics.hpp"
#include "llama.hpp"

namespace evaluate {

struct text_options {
    std::uint32_t window = 2048;
    std::uint32_t chunk = 128;
    std::uint32_t threads = 0;  // 0: one per processor
    // What each window begins with, in place of the text's token there, if the model wants it.
    std::optional<generate::token_id> marker;
    std::vector<generate::channel_constants> key_channels;  // one a layer, where keys take them
};

// Of one configuration.
struct text_scores {
    score_sums sums;
    double bytes_per_token = 0;  // of a full window in the cache, all layers
    double seconds = 0;
};

struct text_scores_of_all {
    text_scores reference;
    std::vector<text_scores> others;  // one a configuration
};

// Called after each window.
using observe_windows = std::function<void(std::size_t done, std::size_t windows)>;

// As many whole windows as `tokens` hold, at least one.
outcome<text_scores_of_all> score_text(const generate::llama_model& model,
                                       std::span<const generate::token_id> tokens,
                                       std::span<const configuration> configurations,
                                       const text_options& options, const observe_windows& observe);

}  // namespace evaluate
