// The model over one sequence: a forward pass and a cache, one step of the library a pass. Prompts
// go in by chunks; a token with drafts behind it leaves its step open until it is known how many
// stay.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv_cache.hpp"
#include "llama.hpp"
#include "outcome.hpp"
#include "recorder.hpp"
#include "tokenizer.hpp"

namespace generate {

class sequence_runner {
  public:
    // The model must outlive the object, and so must the recorder, which may be NULL. `chunk` rows
    // go into a step at most, and logits of `most_logits` rows are kept.
    sequence_runner(const llama_model& model, kv_cache cache, kv_seq sequence,
                    trace_recorder* recorder, std::size_t chunk, std::size_t most_logits);

    // Reads tokens, a chunk a step. Afterwards logits(0) are those of the last one.
    outcome<nothing> read(std::span<const token_id> tokens);

    // Runs over a token and drafts behind it. Afterwards logits(i) are those of tokens[i].
    outcome<nothing> try_tokens(std::span<const token_id> tokens);
    // Ends the step of try_tokens: its first `count` tokens stay.
    outcome<nothing> accept(std::size_t count);

    std::span<const float> logits(std::size_t row) const {
        return std::span(logits_).subspan(row * vocabulary_, vocabulary_);
    }
    kv_cache& cache() { return cache_; }

  private:
    outcome<nothing> run(std::span<const token_id> tokens,
                         std::span<const std::uint32_t> logits_rows);
    outcome<nothing> end(std::size_t accepted);

    kv_cache cache_;
    kv_seq sequence_;
    trace_recorder* recorder_;
    forward_pass pass_;
    std::size_t chunk_;
    std::size_t vocabulary_;
    std::vector<float> logits_;        // [most_logits, vocabulary]
    std::vector<std::uint32_t> rows_;  // 0, 1, 2, ...
};

}  // namespace generate
