#include "runner.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace generate {

sequence_runner::sequence_runner(const llama_model& model, kv_cache cache, kv_seq sequence,
                                 trace_recorder* recorder, std::size_t chunk,
                                 std::size_t most_logits)
    : cache_(std::move(cache)),
      sequence_(sequence),
      recorder_(recorder),
      pass_(model, std::max(chunk, most_logits)),
      chunk_(chunk),
      vocabulary_(model.config.vocabulary),
      logits_(most_logits * vocabulary_),
      rows_(most_logits) {
    std::iota(rows_.begin(), rows_.end(), 0u);
}

outcome<nothing> sequence_runner::read(std::span<const token_id> tokens) {
    while (!tokens.empty()) {
        const std::size_t count = std::min(chunk_, tokens.size());
        const auto last_row = static_cast<std::uint32_t>(count - 1);
        const bool wants_logits = count == tokens.size();
        auto done = run(tokens.first(count), std::span(&last_row, wants_logits ? 1 : 0));
        if (!done) {
            return done;
        }
        if (auto ended = end(count); !ended) {
            return ended;
        }
        tokens = tokens.subspan(count);
    }
    return nothing{};
}

outcome<nothing> sequence_runner::try_tokens(std::span<const token_id> tokens) {
    return run(tokens, std::span(rows_).first(tokens.size()));
}

outcome<nothing> sequence_runner::accept(std::size_t count) {
    if (auto done = cache_.accept(sequence_, count); !done) {
        return done;
    }
    return end(count);
}

outcome<nothing> sequence_runner::run(std::span<const token_id> tokens,
                                      std::span<const std::uint32_t> logits_rows) {
    const kv_cache::item item = {sequence_, tokens};
    const auto positions = cache_.begin({&item, 1});
    if (!positions) {
        return positions.failure();
    }
    attention_cache* attention = &cache_;
    if (recorder_ != nullptr) {
        recorder_->begin_turn(tokens);
        attention = recorder_;
    }
    return pass_.run({tokens, *positions, logits_rows}, *attention,
                     std::span(logits_).first(logits_rows.size() * vocabulary_));
}

outcome<nothing> sequence_runner::end(std::size_t accepted) {
    if (recorder_ != nullptr) {
        recorder_->end_turn(accepted);
    }
    const auto ended = cache_.end();
    if (!ended) {
        return ended.failure();
    }
    return nothing{};
}

}  // namespace generate
