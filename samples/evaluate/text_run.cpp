#include "evaluate/text_run.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace evaluate {

namespace {

using generate::kv_cache;
using generate::token_id;

// So many configurations go through the model side by side: each has its own cache, the matrices
// are read once for all of them.
constexpr std::size_t most_lanes_together = 8;

// One configuration's cache.
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

// Rows of several lanes one behind the other, as many of each.
class lane_group : public generate::attention_cache {
  public:
    lane_group(std::span<lane> lanes, std::size_t rows_each, std::size_t query_width)
        : lanes_(lanes), rows_each_(rows_each), query_width_(query_width) {}

    outcome<nothing> attend(std::uint32_t layer, const generate::attention_rows& rows) override {
        for (std::size_t i = 0; i < lanes_.size(); ++i) {
            generate::attention_rows part = rows;
            const std::size_t first = i * rows_each_;
            part.rows = rows_each_;
            part.queries += first * rows.row_stride;
            part.keys += first * rows.row_stride;
            part.values += first * rows.row_stride;
            part.out += first * query_width_;
            if (auto done = lanes_[i].cache.attend(layer, part); !done) {
                return done;
            }
        }
        return nothing{};
    }

  private:
    std::span<lane> lanes_;
    std::size_t rows_each_;
    std::size_t query_width_;
};

class text_reader {
  public:
    text_reader(const generate::llama_model& model, const text_options& options)
        : options_(options),
          vocabulary_(model.config.vocabulary),
          query_width_(std::size_t{model.config.query_heads} * model.config.head_dim),
          pass_(model, options.chunk * most_lanes_together),
          reference_(vocabulary_),
          expected_(options.chunk * vocabulary_),
          logits_(options.chunk * vocabulary_ * most_lanes_together) {}

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
        const std::size_t scored = last - first;
        for (std::size_t at = 0; at < lanes.size(); at += most_lanes_together) {
            const auto group = lanes.subspan(at, std::min(most_lanes_together, lanes.size() - at));
            const auto begun = std::chrono::steady_clock::now();
            const auto logits = std::span(logits_).first(group.size() * scored * vocabulary_);
            if (auto done =
                    run(group, tokens.subspan(start, end - start), first - start, scored, logits);
                !done) {
                return done;
            }
            if (at == 0) {
                const auto of_reference = logits.first(scored * vocabulary_);
                std::copy(of_reference.begin(), of_reference.end(), expected_.begin());
                reference_.assign(std::span(expected_).first(scored * vocabulary_));
            }
            for (std::size_t i = 0; i < group.size(); ++i) {
                for (std::size_t row = 0; row < scored; ++row) {
                    const auto of_row = std::span<const float>(logits).subspan(
                        (i * scored + row) * vocabulary_, vocabulary_);
                    group[i].scores.sums.add(
                        reference_.compare(row, of_row, tokens[first + row + 1]));
                }
            }
            const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begun;
            for (lane& one : group) {
                one.scores.seconds += passed.count() / static_cast<double>(group.size());
            }
        }
        return nothing{};
    }

    // Logits of rows [first, first + scored) of each lane, one lane behind the other.
    outcome<nothing> run(std::span<lane> group, std::span<const token_id> tokens, std::size_t first,
                         std::size_t scored, std::span<float> logits) {
        tokens_.clear();
        positions_.clear();
        rows_.clear();
        for (lane& one : group) {
            const kv_cache::item item = {one.sequence, tokens};
            const auto positions = one.cache.begin({&item, 1});
            if (!positions) {
                return positions.failure();
            }
            const auto row = static_cast<std::uint32_t>(tokens_.size() + first);
            for (std::uint32_t i = 0; i < scored; ++i) {
                rows_.push_back(row + i);
            }
            tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
            positions_.insert(positions_.end(), positions->begin(), positions->end());
        }
        lane_group caches(group, tokens.size(), query_width_);
        if (auto done = pass_.run({tokens_, positions_, rows_}, caches, logits); !done) {
            return done;
        }
        for (lane& one : group) {
            if (const auto ended = one.cache.end(); !ended) {
                return ended.failure();
            }
        }
        return nothing{};
    }

    const text_options& options_;
    std::size_t vocabulary_;
    std::size_t query_width_;
    generate::forward_pass pass_;
    reference_rows reference_;
    std::vector<float> expected_;  // [chunk, vocabulary]: the reference's logits
    std::vector<float> logits_;    // [lanes, chunk, vocabulary]: those that run
    // Of the rows of a pass.
    std::vector<token_id> tokens_;
    std::vector<std::uint32_t> positions_;
    std::vector<std::uint32_t> rows_;
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
