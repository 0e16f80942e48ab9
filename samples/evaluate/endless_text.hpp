// Text without an end under one budget: a text is read over and over as a single sequence that
// keeps its first tokens and its newest ones (StreamingLLM, arXiv 2309.17453), far beyond what the
// model was trained for.
//
// Once the text begins again and nothing else is left in the cache, a model that does not drift
// predicts of each token what it predicted in the first pass. So the first pass is the reference of
// all later ones, token by token.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "evaluate/configuration.hpp"
#include "llama.hpp"

namespace evaluate {

struct endless_options {
    std::uint64_t tokens = 0;  // to be read, in whole chunks
    std::uint32_t budget = 1024;
    std::uint32_t sinks = 4;
    std::uint32_t chunk = 128;
    std::uint32_t score_every = 4;  // of so many chunks the first is scored
    std::uint64_t stretch = 0;      // tokens that scores are summed over, whole chunks
    bool cache_positions = true;    // rotated by places in the cache, else by places in the text
    std::uint32_t threads = 0;      // 0: one per processor
};

// Scores of the tokens that one stretch predicts.
struct endless_stretch {
    std::uint64_t end = 0;  // tokens read when it was over
    std::uint64_t scored = 0;
    double loss = 0;  // nats, summed
    // Of those, what has a reference in the first pass.
    std::uint64_t compared = 0;
    double compared_loss = 0;
    double first_loss = 0;         // of the same tokens in the first pass
    double difference = 0;         // |loss - first_loss|, token by token, summed
    std::uint64_t most_bytes = 0;  // that the sequence held at once, its steps open
};

struct endless_scores {
    std::uint64_t pass_tokens = 0;  // of the text, in whole scored rounds of chunks
    std::vector<endless_stretch> stretches;
    std::uint64_t blocks_returned = 0;  // by compaction
    std::uint64_t bytes_returned = 0;
};

// Called after each stretch.
using observe_stretches = std::function<void(const endless_stretch&)>;

// `text` is one pass; what is left behind its last `score_every` whole chunks is not read.
outcome<endless_scores> read_endlessly(const generate::llama_model& model,
                                       std::span<const generate::token_id> text,
                                       const endless_options& options,
                                       const observe_stretches& observe);

}  // namespace evaluate
