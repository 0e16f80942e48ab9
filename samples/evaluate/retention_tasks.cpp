#include "evaluate/retention_tasks.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "evaluate/metrics.hpp"
#include "sampler.hpp"

namespace evaluate {

namespace {

using generate::token_id;

// An answer: the logits of row `first` are of its first token.
struct asked_answer {
    const probe* asked;
    std::size_t first;
};

// What one fork reads to answer.
struct question {
    std::vector<token_id> tokens;
    std::vector<asked_answer> answers;
    bool together = false;

    void read(std::span<const token_id> more) {
        tokens.insert(tokens.end(), more.begin(), more.end());
    }
    void read_answer(const probe& one) {
        answers.push_back({&one, tokens.size() - 1});
        read(one.answer);
    }
};

// What is read with the context where the question is seen.
std::vector<std::span<const token_id>> cues_of(const task_context& context, bool together) {
    std::vector<std::span<const token_id>> cues;
    for (const probe& one : context.probes) {
        cues.push_back(one.cue);
    }
    if (together) {
        cues.push_back(context.joint_cue);
    }
    return cues;
}

// A question for each cue, of which the last token is read at least; what answers nothing any more
// is not read.
std::vector<question> questions_of(const task_context& context, bool together, bool whole_cue) {
    std::vector<question> all;
    for (const auto cue : cues_of(context, together)) {
        question made;
        made.read(whole_cue ? cue : cue.last(1));
        made.together = all.size() == context.probes.size();
        if (!made.together) {
            made.read_answer(context.probes[all.size()]);
        }
        for (const probe& one : context.probes) {
            if (made.together && one.kind == task::needle) {
                made.read(one.cue);
                made.read_answer(one);
            }
        }
        made.tokens.pop_back();
        all.push_back(std::move(made));
    }
    return all;
}

class context_reader {
  public:
    context_reader(const generate::llama_model& model, retention_caches& caches,
                   std::span<const contender> contenders, const retention_options& options,
                   std::size_t most_rows)
        : caches_(caches),
          contenders_(contenders),
          chunk_(options.chunk),
          together_(options.together),
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
        const auto questions = questions_of(context, together_, true);
        for (std::size_t i = 0; i < contenders_.size(); ++i) {
            const auto left = compress(contenders_[i], context, members, seed);
            if (!left) {
                return left.failure();
            }
            const auto forks = caches_.all()[left->cache].fork(left->sequence, questions.size());
            if (!forks) {
                return forks.failure();
            }
            std::vector<cached_sequence> asked;
            for (const kv_seq fork : *forks) {
                asked.push_back({left->cache, fork});
            }
            if (auto done = ask(asked, questions, scores_[i].unseen, scores_[i].unseen_together);
                !done) {
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
        for (const auto cue : cues_of(context, together_)) {
            auto members_here = caches_.fork(members);
            if (!members_here) {
                return members_here.failure();
            }
            if (auto done = read_in_chunks(reader_, members_here->full(), members_here->others(),
                                           cue.first(cue.size() - 1), chunk_);
                !done) {
                return done;
            }
            with_questions.push_back(std::move(*members_here));
        }
        const auto questions = questions_of(context, together_, false);
        for (std::size_t i = 0; i < contenders_.size(); ++i) {
            std::vector<cached_sequence> asked;
            for (const family& one : with_questions) {
                const auto left = compress(contenders_[i], context, one, seed);
                if (!left) {
                    return left.failure();
                }
                asked.push_back(*left);
            }
            if (auto done = ask(asked, questions, scores_[i].seen, scores_[i].seen_together);
                !done) {
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
                         std::span<const question> questions, task_answers& alone,
                         task_answers& together) {
        std::vector<batch_item> items;
        for (std::size_t i = 0; i < questions.size(); ++i) {
            const question& one = questions[i];
            items.push_back(
                {sequences[i], {}, one.tokens, one.answers.front().first, one.tokens.size()});
        }
        auto done = read_all(reader_, items,
                             [&](std::size_t first, std::size_t count,
                                 std::span<const float> logits) -> outcome<nothing> {
                                 for (const question& one : questions.subspan(first, count)) {
                                     const std::size_t rows =
                                         one.tokens.size() - one.answers.front().first;
                                     judge(one, logits.first(rows * reader_.vocabulary()),
                                           one.together ? together : alone);
                                     logits = logits.subspan(rows * reader_.vocabulary());
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

    // `logits` are of the rows from the first answer's on.
    void judge(const question& one, std::span<const float> logits, task_answers& answers) const {
        const std::size_t vocabulary = reader_.vocabulary();
        for (const asked_answer& answer : one.answers) {
            std::vector<token_id> likeliest;
            for (std::size_t k = 0; k < answer.asked->answer.size(); ++k) {
                const std::size_t row = answer.first - one.answers.front().first + k;
                const auto told = logits.subspan(row * vocabulary, vocabulary);
                likeliest.push_back(generate::greedy_token(told));
                answers.loss += log_sum_exp(told) - double{told[answer.asked->answer[k]]};
                ++answers.tokens;
            }
            answers.scores.add(*answer.asked, likeliest);
        }
    }

    retention_caches& caches_;
    std::span<const contender> contenders_;
    std::size_t chunk_;
    bool together_;
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
        }
        if (options.together && context.joint_cue.empty()) {
            return error{"a task asks for all needles without a word"};
        }
        for (const question& one : questions_of(context, options.together, true)) {
            longest = std::max(longest, one.tokens.size() + 1);
        }
        most_probes = std::max(most_probes, cues_of(context, options.together).size());
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
    context_reader reader(model, *caches, contenders, options, room.rows);
    for (std::size_t i = 0; i < contexts.size(); ++i) {
        if (auto done = reader.read(contexts[i], 1 + i); !done) {
            return done.failure();
        }
        observe(i + 1, contexts.size());
    }
    return reader.finish();
}

}  // namespace evaluate
