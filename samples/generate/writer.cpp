#include "writer.hpp"

#include <algorithm>
#include <chrono>

#include "kv_cache.hpp"
#include "sampler.hpp"
#include "text.hpp"

namespace generate {

namespace {

constexpr std::size_t prefill_chunk = 128;
constexpr std::uint32_t recent_share = 8;  // an eighth of the budget is for the newest tokens
constexpr std::uint32_t sink_tokens = 4;

// The policy of a name; `scorer` NONE stands for a full cache. The prompt always stays, within the
// budget.
kv_policy policy_of(const writing_options& options, std::size_t prompt_size) {
    kv_policy policy = KV_INIT(kv_policy);
    policy.flags = KV_POLICY_PROTECT_PROMPT;
    policy.budget = options.budget;
    policy.every = options.every;
    policy.prompt_tokens = static_cast<std::uint32_t>(prompt_size);
    policy.sinks = sink_tokens;
    policy.recent = options.budget / recent_share;
    policy.seed = options.seed;
    if (options.policy == "triattention") {
        policy.scorer = KV_SCORER_TRIATTENTION;
        policy.flags |= KV_POLICY_STATISTICS_ONLINE;
    } else if (options.policy == "streaming") {
        policy.scorer = KV_SCORER_STREAMING;
    } else if (options.policy == "key-norm") {
        policy.scorer = KV_SCORER_KEY_NORM;
    } else if (options.policy == "random") {
        policy.scorer = KV_SCORER_RANDOM;
    }
    return policy;
}

std::uint32_t format_of(const std::string& name) {
    if (name == "f32") {
        return KV_FORMAT_F32;
    }
    return name == "bf16" ? KV_FORMAT_BF16 : KV_FORMAT_F16;
}

// Tokens that end a text, or structure a conversation: a text that goes on holds none of them.
std::vector<token_id> marker_tokens(const tokenizer& words) {
    std::vector<token_id> markers;
    if (words.end_of_text()) {
        markers.push_back(*words.end_of_text());
    }
    for (const char* name : {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}) {
        if (const auto token = words.find_special(name)) {
            markers.push_back(*token);
        }
    }
    return markers;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// One text being written: a cache with one sequence, and what the model expects next.
class text_writer {
  public:
    text_writer(const llama_model& model, kv_cache cache, kv_seq sequence)
        : cache_(std::move(cache)),
          sequence_(sequence),
          pass_(model, prefill_chunk),
          logits_(model.config.vocabulary) {}

    // Lets the model read tokens, a chunk a step. Afterwards the logits are those of the last one.
    outcome<nothing> read(std::span<const token_id> tokens) {
        history_.insert(history_.end(), tokens.begin(), tokens.end());
        while (!tokens.empty()) {
            const std::size_t count = std::min(prefill_chunk, tokens.size());
            if (auto done = run_step(tokens.first(count), count == tokens.size()); !done) {
                return done;
            }
            tokens = tokens.subspan(count);
        }
        return nothing{};
    }

    std::span<const float> logits() const { return logits_; }
    std::span<const token_id> history() const { return history_; }
    kv_cache& cache() { return cache_; }

  private:
    outcome<nothing> run_step(std::span<const token_id> tokens, bool wants_logits) {
        const kv_cache::item item = {sequence_, tokens};
        const auto positions = cache_.begin({&item, 1});
        if (!positions) {
            return positions.failure();
        }
        const auto last_row = static_cast<std::uint32_t>(tokens.size() - 1);
        batch rows;
        rows.tokens = tokens;
        rows.positions = *positions;
        rows.logits_rows = std::span(&last_row, wants_logits ? 1 : 0);
        auto done =
            pass_.run(rows, cache_, std::span(logits_).first(wants_logits ? logits_.size() : 0));
        if (!done) {
            return done;
        }
        const auto ended = cache_.end();
        if (!ended) {
            return ended.failure();
        }
        return nothing{};
    }

    kv_cache cache_;
    kv_seq sequence_;
    forward_pass pass_;
    std::vector<float> logits_;
    std::vector<token_id> history_;
};

// What the cache held and gave back, for the report.
outcome<nothing> read_cache(kv_cache& cache, kv_seq sequence, std::uint32_t layers,
                            writing_result& result) {
    const auto stats = cache.statistics();
    if (!stats) {
        return stats.failure();
    }
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
        const auto count = cache.retained(sequence, layer);
        if (!count) {
            return count.failure();
        }
        result.retained.push_back(*count);
    }
    result.peak_blocks = stats->peak_live_blocks;
    result.final_blocks = stats->live_blocks;
    result.final_bytes = stats->live_bytes;
    result.blocks_returned = stats->blocks_returned;
    result.bytes_returned = stats->bytes_returned;
    return nothing{};
}

outcome<nothing> check_lengths(const llama_model& model, const tokenizer& words, std::size_t given,
                               std::uint32_t wanted) {
    if (given == 0 || given + wanted > model.config.context) {
        return error{
            fmt::format("a prompt of {} tokens and {} to write are {}, the model takes 2 "
                        "to {}: ask for fewer with --tokens",
                        given, wanted, given + wanted, model.config.context)};
    }
    if (words.size() > model.config.vocabulary) {
        return error{fmt::format("the tokenizer has {} tokens, the model knows {}", words.size(),
                                 model.config.vocabulary)};
    }
    return nothing{};
}

}  // namespace

outcome<writing_result> write_text(const llama_model& model, const tokenizer& words,
                                   std::span<const token_id> prompt, const writing_options& options,
                                   const std::function<void(const writing_progress&)>& observe) {
    std::size_t given = prompt.size();
    for (const turn& follow_up : options.follow_ups) {
        given += follow_up.tokens.size();
    }
    if (auto checked = check_lengths(model, words, given, options.tokens); !checked) {
        return checked.failure();
    }
    cache_options room;
    room.format = format_of(options.format);
    room.most_tokens = static_cast<std::uint32_t>(given + options.tokens);
    room.most_step_rows = prefill_chunk;
    room.threads = options.threads;
    auto cache = kv_cache::create(model.config, room);
    if (!cache) {
        return cache.failure();
    }
    const kv_policy policy = policy_of(options, prompt.size());
    const auto sequence =
        cache->create_sequence(policy.scorer == KV_SCORER_NONE ? nullptr : &policy);
    if (!sequence) {
        return sequence.failure();
    }
    set_matrix_threads(static_cast<int>(options.threads));
    text_writer writer(model, std::move(*cache), *sequence);
    if (auto done = writer.read(prompt); !done) {
        return done.failure();
    }

    sampler_options sampling;
    sampling.temperature = options.temperature;
    sampling.top_p = options.top_p;
    sampling.repeat_penalty = options.repeat_penalty;
    sampling.seed = options.seed;
    sampler chooser(sampling);
    const std::vector<token_id> markers = marker_tokens(words);

    writing_result result;
    result.policy = options.policy;
    result.format = options.format;
    std::size_t turns = 0;
    double seconds = 0;  // of writing alone
    while (result.generated_tokens < options.tokens) {
        if (!options.stop_at_end && turns == options.follow_ups.size()) {
            chooser.ban(markers);
        }
        auto start = std::chrono::steady_clock::now();
        const auto token = chooser.pick(writer.logits(), writer.history());
        if (!token) {
            return token.failure();
        }
        if (std::find(markers.begin(), markers.end(), *token) != markers.end()) {
            if (turns == options.follow_ups.size()) {
                break;
            }
            const turn& next = options.follow_ups[turns++];
            result.text.append("\n\n> " + next.text + "\n\n");
            if (auto done = writer.read(next.tokens); !done) {
                return done.failure();
            }
            continue;
        }
        if (auto done = writer.read({&*token, 1}); !done) {
            return done.failure();
        }
        ++result.generated_tokens;
        result.text.append(words.bytes_of(*token));
        seconds += seconds_since(start);
        if (observe) {
            const auto now = writer.cache().statistics();
            if (!now) {
                return now.failure();
            }
            observe({result.generated_tokens, options.tokens, result.generated_tokens / seconds,
                     now->live_bytes, words.bytes_of(*token)});
        }
    }
    result.prompt_tokens =
        static_cast<std::uint32_t>(writer.history().size() - result.generated_tokens);
    result.tokens_per_second = seconds > 0 ? result.generated_tokens / seconds : 0;
    if (auto done = read_cache(writer.cache(), *sequence, model.config.layers, result); !done) {
        return done.failure();
    }
    if (auto released = writer.cache().release_sequence(*sequence); !released) {
        return released.failure();
    }
    return result;
}

}  // namespace generate
