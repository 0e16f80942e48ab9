#include "writer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "drafts.hpp"
#include "kv_cache.hpp"
#include "runner.hpp"
#include "sampler.hpp"

namespace generate {

namespace {

constexpr std::uint32_t recent_share = 8;  // an eighth of the budget is for the newest tokens
constexpr std::uint32_t sink_tokens = 4;

std::uint32_t most_step_rows(const writing_options& options) {
    return std::max(options.chunk, 1 + options.drafts);
}

// The policy of a name; `scorer` NONE stands for a full cache. The prompt stays, unless the options
// say otherwise.
kv_policy policy_of(const writing_options& options, std::size_t prompt_size) {
    kv_policy policy = KV_INIT(kv_policy);
    policy.flags = options.evict_prompt ? 0u : std::uint32_t{KV_POLICY_PROTECT_PROMPT};
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

std::uint32_t preset_of(const std::string& name) {
    if (name == "near-lossless") {
        return KV_PRESET_NEAR_LOSSLESS;
    }
    if (name == "balanced") {
        return KV_PRESET_BALANCED;
    }
    return name == "smallest" ? KV_PRESET_SMALLEST : 0;
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

// The most tokens that are in the cache at once, of `given` ones and those to write.
std::size_t most_retained(const writing_options& options, const kv_policy& policy,
                          std::size_t given) {
    const std::size_t all = given + options.tokens;
    if (policy.scorer == KV_SCORER_NONE) {
        return all;
    }
    const std::size_t guarded =
        (options.evict_prompt ? sink_tokens : policy.prompt_tokens) + std::size_t{policy.recent};
    return std::min(all, std::max<std::size_t>(policy.budget, guarded) + policy.every +
                             most_step_rows(options));
}

// What has to fit into the model's context: all of the text, or what is retained of it.
outcome<nothing> check_lengths(const llama_model& model, const tokenizer& words, std::size_t given,
                               std::size_t length) {
    if (given == 0 || length > model.config.context) {
        return error{fmt::format(
            "a prompt of {} tokens and those to write take {} places, the model has {}: "
            "ask for fewer with --tokens, or for a policy and --cache-positions",
            given, length, model.config.context)};
    }
    if (words.size() > model.config.vocabulary) {
        return error{fmt::format("the tokenizer has {} tokens, the model knows {}", words.size(),
                                 model.config.vocabulary)};
    }
    return nothing{};
}

// One text in the making.
class text_writer {
  public:
    text_writer(const llama_model& model, const tokenizer& words, kv_cache cache, kv_seq sequence,
                const writing_options& options, trace_recorder* recorder)
        : words_(words),
          options_(options),
          runner_(model, std::move(cache), sequence, recorder, options.chunk, 1 + options.drafts),
          chooser_(sampling_of(options)),
          markers_(marker_tokens(words)) {
        result_.policy = options.policy;
        result_.format = options.preset == "none" ? options.format : options.preset;
    }

    // The whole text. Tokens are picked one after the other, each from the logits behind the one
    // before, whether or not those came as a draft's.
    outcome<nothing> write(std::span<const token_id> prompt,
                           const std::function<void(const writing_progress&)>& observe) {
        if (auto done = read(prompt); !done) {
            return done;
        }
        auto token = pick(0);
        while (token && result_.generated_tokens < options_.tokens) {
            if (!is_marker(*token)) {
                token = write_from(*token, observe);
                continue;
            }
            if (turns_ == options_.follow_ups.size()) {
                break;
            }
            const turn& next = options_.follow_ups[turns_++];
            result_.text.append("\n\n> " + next.text + "\n\n");
            if (auto done = read(next.tokens); !done) {
                return done;
            }
            token = pick(0);
        }
        if (!token) {
            return token.failure();
        }
        result_.tokens_per_second = seconds_ > 0 ? result_.generated_tokens / seconds_ : 0;
        return nothing{};
    }

    kv_cache& cache() { return runner_.cache(); }
    writing_result& result() { return result_; }

  private:
    static sampler_options sampling_of(const writing_options& options) {
        sampler_options sampling;
        sampling.temperature = options.temperature;
        sampling.top_p = options.top_p;
        sampling.repeat_penalty = options.repeat_penalty;
        sampling.seed = options.seed;
        return sampling;
    }

    outcome<nothing> read(std::span<const token_id> tokens) {
        history_.insert(history_.end(), tokens.begin(), tokens.end());
        result_.prompt_tokens += static_cast<std::uint32_t>(tokens.size());
        return runner_.read(tokens);
    }

    // The token to come behind the one whose logits lie in `row`, the last of the history.
    outcome<token_id> pick(std::size_t row) {
        if (!options_.stop_at_end && turns_ == options_.follow_ups.size()) {
            chooser_.ban(markers_);
        }
        return chooser_.pick(runner_.logits(row), history_);
    }

    bool is_marker(token_id token) const {
        return std::find(markers_.begin(), markers_.end(), token) != markers_.end();
    }

    // One step: writes a token, and of the drafts behind it those that are picked. Returns the pick
    // that follows.
    outcome<token_id> write_from(token_id token,
                                 const std::function<void(const writing_progress&)>& observe) {
        const auto start = std::chrono::steady_clock::now();
        history_.push_back(token);
        const std::size_t room = options_.tokens - result_.generated_tokens - 1;
        std::vector<token_id> tried =
            look_up_drafts(history_, std::min<std::size_t>(options_.drafts, room));
        tried.insert(tried.begin(), token);
        if (auto done = runner_.try_tokens(tried); !done) {
            return done.failure();
        }
        std::size_t accepted = 1;
        auto next = pick(0);
        while (next && accepted < tried.size() && *next == tried[accepted] && !is_marker(*next)) {
            history_.push_back(*next);
            next = pick(accepted++);
        }
        if (!next) {
            return next;
        }
        if (auto done = runner_.accept(accepted); !done) {
            return done.failure();
        }
        result_.drafted_tokens += static_cast<std::uint32_t>(tried.size() - 1);
        result_.accepted_drafts += static_cast<std::uint32_t>(accepted - 1);
        seconds_ += seconds_since(start);
        for (const token_id written : std::span(tried).first(accepted)) {
            if (auto done = note_written(written, observe); !done) {
                return done.failure();
            }
        }
        return next;
    }

    outcome<nothing> note_written(token_id token,
                                  const std::function<void(const writing_progress&)>& observe) {
        ++result_.generated_tokens;
        result_.text.append(words_.bytes_of(token));
        if (!observe) {
            return nothing{};
        }
        const auto now = cache().statistics();
        if (!now) {
            return now.failure();
        }
        observe({result_.generated_tokens, options_.tokens, result_.generated_tokens / seconds_,
                 now->live_bytes, words_.bytes_of(token)});
        return nothing{};
    }

    const tokenizer& words_;
    const writing_options& options_;
    sequence_runner runner_;
    sampler chooser_;
    std::vector<token_id> markers_;
    std::vector<token_id> history_;  // all that was read and written
    std::size_t turns_ = 0;          // follow-ups that were read
    double seconds_ = 0;             // of writing alone
    writing_result result_;
};

}  // namespace

outcome<writing_result> write_text(const llama_model& model, const tokenizer& words,
                                   std::span<const token_id> prompt, const writing_options& options,
                                   const std::function<void(const writing_progress&)>& observe,
                                   trace_recorder* recorder) {
    std::size_t given = prompt.size();
    for (const turn& follow_up : options.follow_ups) {
        given += follow_up.tokens.size();
    }
    const kv_policy policy = policy_of(options, prompt.size());
    const std::size_t retained = most_retained(options, policy, given);
    const std::size_t length = options.cache_positions ? retained : given + options.tokens;
    if (auto checked = check_lengths(model, words, given, length); !checked) {
        return checked.failure();
    }
    cache_options room;
    const operand_storage stored = {format_of(options.format)};
    room.storage = {{stored, stored}};
    room.preset = preset_of(options.preset);
    room.most_tokens = static_cast<std::uint32_t>(retained);
    room.most_step_rows = most_step_rows(options);
    room.cache_positions = options.cache_positions;
    room.on_gpu = options.device == "cuda";
    room.threads = options.threads;
    auto cache = kv_cache::create(model.config, room);
    if (!cache) {
        return cache.failure();
    }
    const auto sequence =
        cache->create_sequence(policy.scorer == KV_SCORER_NONE ? nullptr : &policy);
    if (!sequence) {
        return sequence.failure();
    }
    set_matrix_threads(static_cast<int>(options.threads));
    text_writer writer(model, words, std::move(*cache), *sequence, options, recorder);
    if (recorder != nullptr) {
        recorder->begin_request(writer.cache(), policy, stored.format);
    }
    if (auto done = writer.write(prompt, observe); !done) {
        return done.failure();
    }
    auto done = read_cache(writer.cache(), *sequence, model.config.layers, writer.result());
    if (!done) {
        return done.failure();
    }
    if (recorder != nullptr) {
        if (auto ended = recorder->end_request(*sequence); !ended) {
            return ended.failure();
        }
    }
    if (auto released = writer.cache().release_sequence(*sequence); !released) {
        return released.failure();
    }
    return std::move(writer.result());
}

}  // namespace generate
