// Asking: the context is read once, every probe reads its cue and its answer on a fork.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "evaluate/tasks.hpp"
#include "kv_cache.hpp"
#include "sampler.hpp"

namespace evaluate {

namespace {

using generate::kv_cache;
using generate::token_id;

// What is asked of one fork, and what came of it so far.
struct fork_state {
    kv_seq sequence = 0;
    const probe* asked = nullptr;
    std::vector<token_id> likeliest;
};

class task_reader {
  public:
    task_reader(const generate::llama_model& model, kv_cache& cache, std::size_t most_rows,
                std::size_t most_logits)
        : vocabulary_(model.config.vocabulary),
          most_rows_(most_rows),
          pass_(model, most_rows),
          cache_(cache),
          logits_(most_logits * vocabulary_) {}

    outcome<nothing> read_context(kv_seq sequence, std::span<const token_id> tokens) {
        while (!tokens.empty()) {
            const kv_cache::item item = {sequence,
                                         tokens.first(std::min(most_rows_, tokens.size()))};
            if (auto done = step({&item, 1}, {}); !done) {
                return done;
            }
            tokens = tokens.subspan(item.tokens.size());
        }
        return nothing{};
    }

    // All forks at once: their cues, then their answers token by token. A fork whose answer is
    // complete takes no part any more.
    outcome<nothing> ask(std::span<fork_state> forks) {
        std::vector<kv_cache::item> items;
        std::vector<fork_state*> asked;
        for (fork_state& fork : forks) {
            items.push_back({fork.sequence, fork.asked->cue});
            asked.push_back(&fork);
        }
        while (!items.empty()) {
            if (auto done = predict(items, asked); !done) {
                return done;
            }
            items.clear();
            std::erase_if(asked, [](const fork_state* fork) {
                return fork->likeliest.size() == fork->asked->answer.size();
            });
            for (const fork_state* fork : asked) {
                const std::size_t next = fork->likeliest.size() - 1;
                items.push_back({fork->sequence, std::span(fork->asked->answer).subspan(next, 1)});
            }
        }
        return nothing{};
    }

  private:
    // One step; each fork learns the likeliest token behind its item.
    outcome<nothing> predict(std::span<const kv_cache::item> items,
                             std::span<fork_state* const> forks) {
        std::vector<std::uint32_t> last_rows;
        std::uint32_t rows = 0;
        for (const kv_cache::item& item : items) {
            rows += static_cast<std::uint32_t>(item.tokens.size());
            last_rows.push_back(rows - 1);
        }
        if (auto done = step(items, last_rows); !done) {
            return done;
        }
        for (std::size_t i = 0; i < forks.size(); ++i) {
            forks[i]->likeliest.push_back(
                generate::greedy_token(std::span(logits_).subspan(i * vocabulary_, vocabulary_)));
        }
        return nothing{};
    }

    outcome<nothing> step(std::span<const kv_cache::item> items,
                          std::span<const std::uint32_t> logits_rows) {
        tokens_.clear();
        for (const kv_cache::item& item : items) {
            tokens_.insert(tokens_.end(), item.tokens.begin(), item.tokens.end());
        }
        const auto positions = cache_.begin(items);
        if (!positions) {
            return positions.failure();
        }
        auto done = pass_.run({tokens_, *positions, logits_rows}, cache_,
                              std::span(logits_).first(logits_rows.size() * vocabulary_));
        if (!done) {
            return done;
        }
        const auto ended = cache_.end();
        return ended ? outcome<nothing>(nothing{}) : ended.failure();
    }

    std::size_t vocabulary_;
    std::size_t most_rows_;
    generate::forward_pass pass_;
    kv_cache& cache_;
    std::vector<float> logits_;  // [items, vocabulary]
    std::vector<token_id> tokens_;
};

outcome<nothing> run_context(task_reader& reader, kv_cache& cache, const task_context& context,
                             task_scores& scores) {
    const auto parent = cache.create_sequence(nullptr);
    if (!parent) {
        return parent.failure();
    }
    if (auto done = reader.read_context(*parent, context.tokens); !done) {
        return done;
    }
    const auto children = cache.fork(*parent, context.probes.size());
    if (!children) {
        return children.failure();
    }
    std::vector<fork_state> forks;
    for (std::size_t i = 0; i < children->size(); ++i) {
        forks.push_back({(*children)[i], &context.probes[i], {}});
    }
    if (auto done = reader.ask(forks); !done) {
        return done;
    }
    for (const fork_state& fork : forks) {
        scores.add(*fork.asked, fork.likeliest);
        if (auto done = cache.release_sequence(fork.sequence); !done) {
            return done;
        }
    }
    return cache.release_sequence(*parent);
}

}  // namespace

outcome<task_scores> run_tasks(const generate::llama_model& model,
                               std::span<const task_context> contexts, const configuration& one,
                               const task_options& options) {
    std::size_t longest = 0;
    std::size_t most_probes = 0;
    std::size_t most_cue_rows = 0;
    for (const task_context& context : contexts) {
        std::size_t longest_probe = 0;
        std::size_t cue_rows = 0;
        for (const probe& asked : context.probes) {
            longest_probe = std::max(longest_probe, asked.cue.size() + asked.answer.size());
            cue_rows += asked.cue.size();
        }
        longest = std::max(longest, context.tokens.size() + longest_probe);
        most_probes = std::max(most_probes, context.probes.size());
        most_cue_rows = std::max(most_cue_rows, cue_rows);
    }
    if (longest > model.config.context) {
        return error{
            fmt::format("a task takes {} tokens, the model {}", longest, model.config.context)};
    }
    const std::size_t most_rows = std::max<std::size_t>(options.chunk, most_cue_rows);

    generate::cache_options room;
    room.storage = storage_of_layers(one, model.config.layers);
    room.key_channels = options.key_channels;
    room.most_sequences = static_cast<std::uint32_t>(most_probes + 1);
    room.most_tokens = static_cast<std::uint32_t>(longest);
    room.most_step_rows = static_cast<std::uint32_t>(most_rows);
    room.threads = options.threads;
    auto cache = kv_cache::create(model.config, room);
    if (!cache) {
        return error{fmt::format("configuration '{}': {}", one.name, cache.message())};
    }
    generate::set_matrix_threads(static_cast<int>(options.threads));
    task_reader reader(model, *cache, most_rows, most_probes);
    task_scores scores;
    for (const task_context& context : contexts) {
        if (auto done = run_context(reader, *cache, context, scores); !done) {
            return error{fmt::format("configuration '{}': {}", one.name, done.message())};
        }
    }
    return scores;
}

}  // namespace evaluate
