// Tasks under a budget: things hidden in a text that is compressed before it is asked for.
//
// A context is read whole, then compressed to the budget, once. With the question unseen, that
// comes before it: whatever may be asked must have stayed. With the question seen, all of it but
// its last token has been read with the context, which observed attention profits from. Every token
// of an answer is told from what was left. Needles may be asked for together, too: all names first,
// then each needle's beginning, behind the right answers to those before.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "evaluate/retention_family.hpp"
#include "evaluate/tasks.hpp"

namespace evaluate {

struct task_answers {
    task_scores scores;
    // -log p of the answers' tokens: tells contenders apart where none gets an answer right.
    double loss = 0;
    std::uint64_t tokens = 0;

    double mean_loss() const { return tokens == 0 ? 0 : loss / static_cast<double>(tokens); }
};

// Of one contender.
struct retained_tasks {
    task_answers unseen;
    task_answers seen;
    task_answers unseen_together;  // needles alone
    task_answers seen_together;
};

// Called after each context.
using observe_contexts = std::function<void(std::size_t done, std::size_t contexts)>;

// One a contender. Budgets are percents of a context's own length.
outcome<std::vector<retained_tasks>> run_tasks(const generate::llama_model& model,
                                               std::span<const task_context> contexts,
                                               std::span<const contender> contenders,
                                               const retention_options& options,
                                               const observe_contexts& observe);

}  // namespace evaluate
