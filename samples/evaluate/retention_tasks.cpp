#include "evaluate/retention_tasks.hpp"

#include <algorithm>

#include "evaluate/metrics.hpp"
#include "sampler.hpp"
#include "text.hpp"

namespace evaluate {

namespace {

using generate::token_id;

// What one fork reads to answer, of which the last rows tell the answer.
struct question {
    const probe* asked = nullptr;
    std::vector<token_id> tokens;
};

// The cue's tokens from `first` on, and the answer but for its last token.
std::vector<question> questions_of(const task_context& context, bool whole_cue) {
    std::vector<question> all;
    for (const probe& one : context.probes) {
        question made = {&one, one.cue};
        if (!whole_cue) {
            made.tokens.erase(made.tokens.begin(), made.tokens.end() - 1);
        }
        made.tokens.insert(made.tokens.end(), one.answer.begin(), one.answer.end() - 1);
        all.push_back(std::move(made));
    }
    return all;
}

class context_reader {
  public:
    context_reader(const generate::llama_model& model, retention_caches& caches,
                   std::span<const contender> contenders, std::size_t chunk, std::size_t most_rows)
        : caches_(caches),
          contenders_(contenders),
          chunk_(chunk),
          reader_(model, caches.all(), most_rows),
          scores_(contenders.size()) {}

    outcome<nothing> read(const task_context& context, std::uint64_t seed) {
        const auto members = caches_.create_family();
        if (!members) {
            return members.failure();
        }
        if (auto done =
                read_in_chunks(reader_, members->full(), members->others(), context.tokens, chunk_);
            !done) {
            return done;
        }
        if (auto done = ask_unseen(context, *members, seed); !done) {
            return done;
        }
        if (auto done = ask_seen(context, *members, seed); !done) {
            return done;
        }
        return caches_.release(*members);
    }

    std::vector<retained_tasks> finish() { return std::move(scores_); }

  private:
    outcome<cached_sequence> compress(const contender& one, const task_context& context,
                                      const family& members, std::uint64_t seed) {
        const retention_method& method = *one.method;
        const cached_sequence& parent = members.parent_of(method);
        if (method.keeps_all()) {
            const auto child = caches_.all()[parent.cache].fork(parent.sequence, 1);
            return child ? outcome<cached_sequence>(cached_sequence{parent.cache, child->front()})
                         : child.failure();
        }
        const auto prompt = static_cast<std::uint32_t>(context.tokens.size());
        auto fork = caches_.fork(parent,
                                 policy_of(method, caches_.tokens_of(one, context.tokens.size()),
                                           std::min(prompt, protected_beginning), 0, seed),
                                 true);
        return fork ? fork : error{fmt::format("{}: {}", method.name, fork.message())};
    }

    outcome<nothing> ask_unseen(const task_context& context, const family& members,
                                std::uint64_t seed) {
        const auto questions = questions_of(context, true);
        for (std::size_t i = 0; i < contenders_.size(); ++i) {
            const auto left = compress(contenders_[i], context, members, seed);
            if (!left) {
                return left.failure();
            }
            const auto forks =
                caches_.all()[left->cache].fork(left->sequence, context.probes.size());
            if (!forks) {
                return forks.failure();
            }
            std::vector<cached_sequence> asked;
            for (const kv_seq fork : *forks) {
                asked.push_back({left->cache, fork});
            }
            if (auto done = ask(asked, questions, scores_[i].unseen); !done) {
                return done;
            }
            if (auto done = caches_.release(*left); !done) {
                return done;
            }
        }
        return nothing{};
    }

    outcome<nothing> ask_seen(const task_context& context, const family& members,
                              std::uint64_t seed) {
        std::vector<family> with_questions;
        for (const probe& one : context.probes) {
            auto members_here = caches_.fork(members);
            if (!members_here) {
                return members_here.failure();
            }
            const auto seen = std::span(one.cue).first(one.cue.size() - 1);
            if (auto done = read_in_chunks(reader_, members_here->full(), members_here->others(),
                                           seen, chunk_);
                !done) {
                return done;
            }
            with_questions.push_back(std::move(*members_here));
        }
        const auto questions = questions_of(context, false);
        for (std::size_t i = 0; i < contenders_.size(); ++i) {
            std::vector<cached_sequence> asked;
            for (const family& one : with_questions) {
                const auto left = compress(contenders_[i], context, one, seed);
                if (!left) {
                    return left.failure();
                }
                asked.push_back(*left);
            }
            if (auto done = ask(asked, questions, scores_[i].seen); !done) {
                return done;
            }
        }
        for (const family& one : with_questions) {
            if (auto done = caches_.release(one); !done) {
                return done;
            }
        }
        return nothing{};
    }

    // Reads each question on its sequence, which is released.
    outcome<nothing> ask(std::span<const cached_sequence> sequences,
                         std::span<const question> questions, task_answers& answers) {
        std::vector<batch_item> items;
        for (std::size_t i = 0; i < questions.size(); ++i) {
            const std::size_t rows = questions[i].tokens.size();
            items.push_back({sequences[i],
                             {},
                             questions[i].tokens,
                             rows - questions[i].asked->answer.size(),
                             rows});
        }
        const std::size_t vocabulary = reader_.vocabulary();
        auto done = read_all(reader_, items,
                             [&](std::size_t first, std::size_t count,
                                 std::span<const float> logits) -> outcome<nothing> {
                                 for (const question& one : questions.subspan(first, count)) {
                                     std::vector<token_id> likeliest;
                                     for (std::size_t k = 0; k < one.asked->answer.size(); ++k) {
                                         const auto row = logits.first(vocabulary);
                                         likeliest.push_back(generate::greedy_token(row));
                                         answers.loss +=
                                             log_sum_exp(row) - double{row[one.asked->answer[k]]};
                                         ++answers.tokens;
                                         logits = logits.subspan(vocabulary);
                                     }
                                     answers.scores.add(*one.asked, likeliest);
                                 }
                                 return nothing{};
                             });
        if (!done) {
            return done;
        }
        for (const cached_sequence& one : sequences) {
            if (auto released = caches_.release(one); !released) {
                return released;
            }
        }
        return nothing{};
    }

    retention_caches& caches_;
    std::span<const contender> contenders_;
    std::size_t chunk_;
    batch_reader reader_;
    std::vector<retained_tasks> scores_;
};

}  // namespace

outcome<std::vector<retained_tasks>> run_tasks(const generate::llama_model& model,
                                               std::span<const task_context> contexts,
                                               std::span<const contender> contenders,
                                               const retention_options& options,
                                               const observe_contexts& observe) {
    std::size_t most_probes = 0;
    retention_room room;
    for (const task_context& context : contexts) {
        std::size_t longest = 0;
        for (const probe& one : context.probes) {
            if (one.cue.empty() || one.answer.empty()) {
                return error{"a task asks without a word, or for none"};
            }
            longest = std::max(longest, one.cue.size() + one.answer.size());
        }
        most_probes = std::max(most_probes, context.probes.size());
        room.tokens = std::max(room.tokens, context.tokens.size() + longest);
        room.rows = std::max({room.rows, longest, std::size_t{512}, std::size_t{options.chunk}});
    }
    if (room.tokens > model.config.context) {
        return error{fmt::format("a task takes {} tokens, the model {}: make contexts shorter",
                                 room.tokens, model.config.context)};
    }
    room.forks = most_probes * (1 + family_size(contenders)) + 1;
    auto caches = retention_caches::create(model, contenders, options, room);
    if (!caches) {
        return caches.failure();
    }
    generate::set_matrix_threads(static_cast<int>(options.threads));
    context_reader reader(model, *caches, contenders, options.chunk, room.rows);
    for (std::size_t i = 0; i < contexts.size(); ++i) {
        if (auto done = reader.read(contexts[i], 1 + i); !done) {
            return done.failure();
        }
        observe(i + 1, contexts.size());
    }
    return reader.finish();
}

}  // namespace evaluate
