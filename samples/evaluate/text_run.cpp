#include "evaluate/text_run.hpp"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "text.hpp"

namespace evaluate {

namespace {

using generate::kv_cache;
using generate::token_id;

// The model with one configuration's cache. Workspaces are shared: only one runs at a time.
struct lane {
    kv_cache cache;
    kv_seq sequence = 0;
    text_scores scores;
};

outcome<lane> make_lane(const generate::llama_config& model, const configuration& one,
                        const text_options& options) {
    generate::cache_options room;
    room.storage = storage_of_layers(one, model.layers);
    room.key_channels = options.key_channels;
    room.most_tokens = options.window;
    room.most_step_rows = options.chunk;
    room.threads = options.threads;
    auto cache = kv_cache::create(model, room);
    if (!cache) {
        return error{fmt::format("configuration '{}': {}", one.name, cache.message())};
    }
    return lane{std::move(*cache), 0, {}};
}

class text_reader {
  public:
    text_reader(const generate::llama_model& model, const text_options& options)
        : options_(options),
          vocabulary_(model.config.vocabulary),
          pass_(model, options.chunk),
          reference_(vocabulary_),
          expected_(options.chunk * vocabulary_),
          logits_(options.chunk * vocabulary_),
          rows_(options.chunk) {
        std::iota(rows_.begin(), rows_.end(), 0u);
    }

    // One window with all lanes, of which the first is the reference.
    outcome<nothing> read_window(std::span<lane> lanes, std::span<const token_id> tokens) {
        for (lane& one : lanes) {
            auto sequence = one.cache.create_sequence(nullptr);
            if (!sequence) {
                return sequence.failure();
            }
            one.sequence = *sequence;
        }
        for (std::size_t start = 0; start < tokens.size(); start += options_.chunk) {
            if (auto done = read_chunk(lanes, tokens, start); !done) {
                return done;
            }
        }
        for (lane& one : lanes) {
            const auto info = one.cache.info(one.sequence);
            if (!info) {
                return info.failure();
            }
            one.scores.bytes_per_token =
                static_cast<double>(info->bytes) / static_cast<double>(tokens.size());
            if (auto done = one.cache.release_sequence(one.sequence); !done) {
                return done;
            }
        }
        return nothing{};
    }

  private:
    // The chunk that begins at `start`. A row predicts the token behind it: those rows have a score
    // whose token lies in the second half of the window.
    outcome<nothing> read_chunk(std::span<lane> lanes, std::span<const token_id> tokens,
                                std::size_t start) {
        const std::size_t end = std::min(start + options_.chunk, tokens.size());
        const std::size_t first = std::clamp(tokens.size() / 2 - 1, start, end);
        const std::size_t last = std::max(first, std::min(end, tokens.size() - 1));
        const auto scored =
            std::span<const std::uint32_t>(rows_).subspan(first - start, last - first);

        for (lane& one : lanes) {
            const bool is_reference = &one == lanes.data();
            const auto begun = std::chrono::steady_clock::now();
            const auto logits =
                std::span(is_reference ? expected_ : logits_).first(scored.size() * vocabulary_);
            auto done = run(one, tokens.subspan(start, end - start), scored, logits);
            if (!done) {
                return done;
            }
            if (is_reference) {
                reference_.assign(logits);
            }
            for (std::size_t row = 0; row < scored.size(); ++row) {
                const auto of_row =
                    std::span<const float>(logits).subspan(row * vocabulary_, vocabulary_);
                one.scores.sums.add(reference_.compare(row, of_row, tokens[first + row + 1]));
            }
            one.scores.seconds +=
                std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
        }
        return nothing{};
    }

    outcome<nothing> run(lane& one, std::span<const token_id> tokens,
                         std::span<const std::uint32_t> scored, std::span<float> logits) {
        const kv_cache::item item = {one.sequence, tokens};
        const auto positions = one.cache.begin({&item, 1});
        if (!positions) {
            return positions.failure();
        }
        if (auto done = pass_.run({tokens, *positions, scored}, one.cache, logits); !done) {
            return done;
        }
        const auto ended = one.cache.end();
        return ended ? outcome<nothing>(nothing{}) : ended.failure();
    }

    const text_options& options_;
    std::size_t vocabulary_;
    generate::forward_pass pass_;
    reference_rows reference_;
    std::vector<float> expected_;      // [chunk, vocabulary]: the reference's logits
    std::vector<float> logits_;        // [chunk, vocabulary]: those of the lane that runs
    std::vector<std::uint32_t> rows_;  // 0, 1, 2, ...
};

outcome<nothing> check(const generate::llama_model& model, std::span<const token_id> tokens,
                       const text_options& options) {
    if (options.window < 4 || options.window > model.config.context) {
        return error{fmt::format("a window of {} tokens, this model takes 4 to {}", options.window,
                                 model.config.context)};
    }
    if (tokens.size() < options.window) {
        return error{fmt::format("the text has {} tokens, a window takes {}: give a longer text",
                                 tokens.size(), options.window)};
    }
    return nothing{};
}

}  // namespace

outcome<text_scores_of_all> score_text(const generate::llama_model& model,
                                       std::span<const token_id> tokens,
                                       std::span<const configuration> configurations,
                                       const text_options& options,
                                       const observe_windows& observe) {
    if (auto checked = check(model, tokens, options); !checked) {
        return checked.failure();
    }
    generate::set_matrix_threads(static_cast<int>(options.threads));
    std::vector<lane> lanes;
    lanes.reserve(configurations.size() + 1);
    for (std::size_t i = 0; i < configurations.size() + 1; ++i) {
        const configuration one = i == 0 ? reference_configuration() : configurations[i - 1];
        auto made = make_lane(model.config, one, options);
        if (!made) {
            return made.failure();
        }
        lanes.push_back(std::move(*made));
    }

    text_reader reader(model, options);
    const std::size_t windows = tokens.size() / options.window;
    for (std::size_t i = 0; i < windows; ++i) {
        const auto part = tokens.subspan(i * options.window, options.window);
        std::vector<token_id> window(part.begin(), part.end());
        window.front() = options.marker.value_or(window.front());
        if (auto done = reader.read_window(lanes, window); !done) {
            return done.failure();
        }
        observe(i + 1, windows);
    }

    text_scores_of_all scores;
    scores.reference = std::move(lanes.front().scores);
    for (lane& one : std::span(lanes).subspan(1)) {
        scores.others.push_back(std::move(one.scores));
    }
    return scores;
}

}  // namespace evaluate
