#include "evaluate/endless_text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "evaluate/metrics.hpp"
#include "evaluate/retention_batch.hpp"
#include "kv_cache.hpp"

namespace evaluate {

namespace {

using generate::kv_cache;
using generate::token_id;

kv_policy streaming_policy(const endless_options& options) {
    kv_policy policy = KV_INIT(kv_policy);
    policy.scorer = KV_SCORER_STREAMING;
    policy.budget = options.budget;
    policy.sinks = options.sinks;
    policy.every = 1;
    return policy;
}

// Whole multiples, so that chunks, rounds and scored rows fall on the same tokens in every pass.
std::uint64_t pass_of(std::size_t text, const endless_options& options) {
    const std::uint64_t round = std::uint64_t{options.chunk} * options.score_every;
    return round == 0 ? 0 : text / round * round;
}

outcome<nothing> check(const generate::llama_model& model, std::uint64_t pass,
                       const endless_options& options) {
    if (options.chunk == 0 || options.score_every == 0 || options.tokens < options.chunk ||
        options.stretch == 0 || options.stretch % options.chunk != 0) {
        return error{
            fmt::format("{} tokens in chunks of {} and stretches of {}: chunks must be 1 "
                        "token or more, tokens a chunk or more, stretches whole chunks",
                        options.tokens, options.chunk, options.stretch)};
    }
    // Before the second pass has evicted all of the first, there is nothing to compare.
    const std::uint64_t least = std::uint64_t{options.budget} + 2 * options.chunk;
    if (pass < least) {
        return error{
            fmt::format("a pass of the text has {} tokens in whole scored rounds of chunks; with a "
                        "budget of {} and chunks of {} it takes {}: give a longer text or a "
                        "smaller budget",
                        pass, options.budget, options.chunk, least)};
    }
    if (options.budget + options.chunk > model.config.context) {
        return error{fmt::format("budget and chunk are {} tokens, this model was made for {}",
                                 options.budget + options.chunk, model.config.context)};
    }
    if (options.sinks >= options.budget) {
        return error{
            fmt::format("{} sinks leave nothing of a budget of {}", options.sinks, options.budget)};
    }
    return nothing{};
}

class endless_reader {
  public:
    endless_reader(const generate::llama_model& model, std::span<const token_id> pass,
                   std::span<kv_cache> cache, kv_seq sequence, const endless_options& options)
        : pass_(pass),
          sequence_{0, sequence},
          options_(options),
          reader_(model, cache, options.chunk),
          first_losses_(pass.size(), std::numeric_limits<double>::quiet_NaN()) {}

    outcome<nothing> read(const observe_stretches& observe, std::vector<endless_stretch>& into) {
        const std::uint64_t chunks = options_.tokens / options_.chunk;
        for (std::uint64_t i = 0; i < chunks; ++i) {
            if (auto done = read_chunk(i); !done) {
                return done;
            }
            stretch_.end = (i + 1) * options_.chunk;
            if (stretch_.end % options_.stretch == 0 || i + 1 == chunks) {
                into.push_back(stretch_);
                observe(stretch_);
                stretch_ = {};
            }
        }
        return nothing{};
    }

  private:
    // Passes are whole chunks, so that none begins in one.
    outcome<nothing> read_chunk(std::uint64_t index) {
        const std::uint64_t start = index * options_.chunk;
        const auto tokens = pass_.subspan(start % pass_.size(), options_.chunk);
        const bool scored = index % options_.score_every == 0;
        const batch_item item = {sequence_, {}, tokens, 0, scored ? tokens.size() : 0};
        const auto logits = reader_.read({&item, 1});
        if (!logits) {
            return logits.failure();
        }
        stretch_.most_bytes = std::max(stretch_.most_bytes, reader_.reserved_bytes().front());
        const std::size_t size = reader_.vocabulary();
        for (std::size_t row = 0; row * size < logits->size(); ++row) {
            score(start + row, logits->subspan(row * size, size));
        }
        return nothing{};
    }

    // Logits behind the token at `position` predict the next one.
    void score(std::uint64_t position, std::span<const float> logits) {
        const token_id next = pass_[(position + 1) % pass_.size()];
        const double loss = log_sum_exp(logits) - static_cast<double>(logits[next]);
        stretch_.scored += 1;
        stretch_.loss += loss;
        const std::uint64_t offset = position % pass_.size();
        if (position < pass_.size()) {
            first_losses_[offset] = loss;
        } else if (offset >= std::uint64_t{options_.budget} + options_.chunk) {
            // Before that, the end of the pass before is in the cache, which the first had not.
            stretch_.compared += 1;
            stretch_.compared_loss += loss;
            stretch_.first_loss += first_losses_[offset];
            stretch_.difference += std::abs(loss - first_losses_[offset]);
        }
    }

    std::span<const token_id> pass_;
    cached_sequence sequence_;
    const endless_options& options_;
    batch_reader reader_;
    std::vector<double> first_losses_;  // by offset in the pass, where scored
    endless_stretch stretch_;
};

}  // namespace

outcome<endless_scores> read_endlessly(const generate::llama_model& model,
                                       std::span<const token_id> text,
                                       const endless_options& options,
                                       const observe_stretches& observe) {
    endless_scores scores;
    scores.pass_tokens = pass_of(text.size(), options);
    if (auto checked = check(model, scores.pass_tokens, options); !checked) {
        return checked.failure();
    }
    generate::cache_options wanted;
    wanted.most_tokens = options.budget + options.chunk;
    wanted.most_step_rows = options.chunk;
    wanted.threads = options.threads;
    wanted.cache_positions = options.cache_positions;
    auto cache = kv_cache::create(model.config, wanted);
    if (!cache) {
        return cache.failure();
    }
    const kv_policy policy = streaming_policy(options);
    const auto sequence = cache->create_sequence(&policy);
    if (!sequence) {
        return sequence.failure();
    }
    generate::set_matrix_threads(static_cast<int>(options.threads));
    endless_reader reader(model, text.first(scores.pass_tokens), {&*cache, 1}, *sequence, options);
    if (auto done = reader.read(observe, scores.stretches); !done) {
        return done.failure();
    }
    const auto statistics = cache->statistics();
    if (!statistics) {
        return statistics.failure();
    }
    scores.blocks_returned = statistics->blocks_returned_by_compaction;
    scores.bytes_returned = statistics->bytes_returned_by_compaction;
    return scores;
}

}  // namespace evaluate
