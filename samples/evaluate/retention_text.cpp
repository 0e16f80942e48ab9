#include "evaluate/retention_text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

namespace evaluate {

namespace {

using generate::token_id;

// Sequences go through the model together, up to so many rows.
constexpr std::size_t most_rows = 1024;

// A contender in the present window.
struct reading {
    std::uint32_t budget = 0;
    std::uint32_t retained = 0;           // tokens that take the budget's bytes
    bool is_over = false;                 // its budget has been exceeded
    std::optional<cached_sequence> fork;  // from then on; none of the full cache
    std::uint64_t peak = 0;
};

class window_reader {
  public:
    window_reader(const generate::llama_model& model, retention_caches& caches,
                  std::span<const contender> contenders, std::size_t chunk)
        : caches_(caches),
          contenders_(contenders),
          chunk_(chunk),
          reader_(model, caches.all(), std::max(most_rows, 2 * chunk)),
          reference_(model.config.vocabulary),
          scores_(contenders.size()) {}

    outcome<nothing> read(const text_window& window, std::uint64_t seed) {
        const auto members = caches_.create_family();
        if (!members) {
            return members.failure();
        }
        readings_.assign(contenders_.size(), {});
        for (std::size_t i = 0; i < contenders_.size(); ++i) {
            readings_[i].budget = contenders_[i].budget(window.tokens.size());
            readings_[i].retained = caches_.tokens_of(contenders_[i], window.tokens.size());
        }
        for (std::size_t start = 0; start < window.tokens.size(); start += chunk_) {
            const std::size_t end = std::min(start + chunk_, window.tokens.size());
            if (auto done = read_chunk(window, start, end, *members); !done) {
                return done;
            }
            if (auto done = begin_contenders(window, end, *members, seed); !done) {
                return done;
            }
        }
        if (auto done = add_bytes(*members); !done) {
            return done;
        }
        return release(*members);
    }

    std::vector<retained_text> finish(std::size_t windows) {
        for (retained_text& one : scores_) {
            one.steady_bytes /= static_cast<double>(windows);
            one.peak_bytes /= static_cast<double>(windows);
        }
        return std::move(scores_);
    }

  private:
    // Rows that are scored predict the token behind them.
    outcome<nothing> read_chunk(const text_window& window, std::size_t start, std::size_t end,
                                const family& members) {
        const auto tokens = std::span(window.tokens).subspan(start, end - start);
        const auto is_over = [](const reading& one) { return one.is_over; };
        const bool scored = std::any_of(readings_.begin(), readings_.end(), is_over);
        const bool followed = !std::all_of(readings_.begin(), readings_.end(), is_over);
        const std::size_t most = scored ? std::min(end, window.tokens.size() - 1) - start : 0;
        const std::size_t least =
            std::min<std::size_t>(most, window.prompt > start + 1 ? window.prompt - 1 - start : 0);
        next_tokens_ = std::span(window.tokens).subspan(start + least + 1, most - least);

        std::vector<batch_item> items = {{members.reference, {}, tokens, least, most}};
        if (!caches_.is_reference()) {
            items.push_back({members.full(), {}, tokens, least, most});
        }
        if (followed) {
            items.back().beside = members.others();
        }
        const auto logits = reader_.read(items);
        if (!logits) {
            return logits.failure();
        }
        assign_reference(*logits);
        for (std::size_t i = 0; i < readings_.size(); ++i) {
            if (readings_[i].is_over && contenders_[i].method->keeps_all()) {
                readings_[i].peak = reader_.reserved_bytes().back();
                add_rows(i, full_rows_);
            }
        }
        return read_forks(tokens, least, most);
    }

    // The reference's rows, and those of the full cache as it is stored.
    void assign_reference(std::span<const float> logits) {
        const std::size_t rows = next_tokens_.size();
        const std::size_t size = rows * reader_.vocabulary();
        expected_.assign(logits.begin(), logits.begin() + static_cast<std::ptrdiff_t>(size));
        reference_.assign(expected_);
        reference_rows_ = compare(expected_);
        full_rows_ = caches_.is_reference() ? reference_rows_ : compare(logits.subspan(size));
    }

    outcome<nothing> read_forks(std::span<const token_id> tokens, std::size_t least,
                                std::size_t most) {
        std::vector<batch_item> items;
        std::vector<std::size_t> owners;
        for (std::size_t i = 0; i < readings_.size(); ++i) {
            if (readings_[i].fork) {
                items.push_back({*readings_[i].fork, {}, tokens, least, most});
                owners.push_back(i);
            }
        }
        const std::size_t size = (most - least) * reader_.vocabulary();
        return read_all(reader_, items,
                        [&](std::size_t first, std::size_t count,
                            std::span<const float> logits) -> outcome<nothing> {
                            for (std::size_t i = 0; i < count; ++i) {
                                const std::size_t owner = owners[first + i];
                                readings_[owner].peak =
                                    std::max(readings_[owner].peak, reader_.reserved_bytes()[i]);
                                add_rows(owner, compare(logits.subspan(i * size, size)));
                            }
                            return nothing{};
                        });
    }

    std::vector<row_scores> compare(std::span<const float> logits) const {
        std::vector<row_scores> rows;
        for (std::size_t row = 0; row < next_tokens_.size(); ++row) {
            rows.push_back(reference_.compare(
                row, logits.subspan(row * reader_.vocabulary(), reader_.vocabulary()),
                next_tokens_[row]));
        }
        return rows;
    }

    void add_rows(std::size_t owner, std::span<const row_scores> rows) {
        for (std::size_t row = 0; row < rows.size(); ++row) {
            scores_[owner].sums.add(rows[row]);
            scores_[owner].reference.add(reference_rows_[row]);
        }
    }

    outcome<nothing> begin_contenders(const text_window& window, std::size_t end,
                                      const family& members, std::uint64_t seed) {
        for (std::size_t i = 0; i < readings_.size(); ++i) {
            reading& one = readings_[i];
            if (one.is_over || end <= one.budget) {
                continue;
            }
            one.is_over = true;
            const retention_method& method = *contenders_[i].method;
            if (method.keeps_all()) {
                continue;
            }
            auto fork = caches_.fork(members.parent_of(method),
                                     policy_of(method, one.retained, window.prompt, 1, seed), true);
            if (!fork) {
                return error{fmt::format("{}: {}", method.name, fork.message())};
            }
            one.fork = *fork;
        }
        return nothing{};
    }

    outcome<nothing> add_bytes(const family& members) {
        const auto bytes_of = [&](const cached_sequence& one) -> outcome<double> {
            const auto info = caches_.all()[one.cache].info(one.sequence);
            if (!info) {
                return info.failure();
            }
            return static_cast<double>(info->bytes);
        };
        const auto whole = bytes_of(members.reference);
        if (!whole) {
            return whole.failure();
        }
        for (std::size_t i = 0; i < readings_.size(); ++i) {
            const reading& one = readings_[i];
            const auto held = bytes_of(one.fork.value_or(members.full()));
            if (!held) {
                return held.failure();
            }
            scores_[i].steady_bytes += *held / *whole;
            scores_[i].peak_bytes += std::max(static_cast<double>(one.peak), *held) / *whole;
        }
        return nothing{};
    }

    outcome<nothing> release(const family& members) {
        for (const reading& one : readings_) {
            if (one.fork) {
                if (auto done = caches_.release(*one.fork); !done) {
                    return done;
                }
            }
        }
        return caches_.release(members);
    }

    retention_caches& caches_;
    std::span<const contender> contenders_;
    std::size_t chunk_;
    batch_reader reader_;
    reference_rows reference_;
    std::vector<float> expected_;            // [rows, vocabulary]: the reference's logits
    std::span<const token_id> next_tokens_;  // what the present rows predict
    std::vector<row_scores> reference_rows_;
    std::vector<row_scores> full_rows_;
    std::vector<reading> readings_;
    std::vector<retained_text> scores_;
};

}  // namespace

outcome<std::vector<retained_text>> score_windows(const generate::llama_model& model,
                                                  std::span<const text_window> windows,
                                                  std::span<const contender> contenders,
                                                  const retention_options& options,
                                                  const observe_windows& observe) {
    retention_room room;
    for (const text_window& one : windows) {
        room.tokens = std::max(room.tokens, one.tokens.size());
        if (one.tokens.size() < 2 || one.tokens.size() > model.config.context) {
            return error{fmt::format("a window of {} tokens, this model takes 2 to {}",
                                     one.tokens.size(), model.config.context)};
        }
    }
    room.forks = contenders.size();
    room.rows = std::max<std::size_t>(most_rows, 2 * std::size_t{options.chunk});
    auto caches = retention_caches::create(model, contenders, options, room);
    if (!caches) {
        return caches.failure();
    }
    generate::set_matrix_threads(static_cast<int>(options.threads));
    window_reader reader(model, *caches, contenders, options.chunk);
    for (std::size_t i = 0; i < windows.size(); ++i) {
        if (auto done = reader.read(windows[i], 1 + i); !done) {
            return done.failure();
        }
        observe(i + 1, windows.size());
    }
    return reader.finish(windows.size());
}

}  // namespace evaluate
