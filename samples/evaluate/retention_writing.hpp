// Long generation under a budget: what contenders write by themselves, the likeliest token each
// time, and how often they repeat themselves.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "evaluate/retention_family.hpp"

namespace evaluate {

// While writing, a round comes after so many tokens.
inline constexpr std::uint32_t writing_interval = 16;

struct written_text {
    std::vector<generate::token_id> tokens;  // behind the prompt
    double repeated = 0;                     // repeated_share of them
};

// Which share of the runs of `length` tokens has been there before. 0 of none.
double repeated_share(std::span<const generate::token_id> tokens, std::size_t length);

// Called now and then.
using observe_writing = std::function<void(std::size_t written, std::size_t tokens)>;

// Texts of `length` tokens, [contenders][prompts]. Budgets are percents of prompt and text. `end`
// would end a text, and is not written.
outcome<std::vector<std::vector<written_text>>> write_texts(
    const generate::llama_model& model, std::span<const std::vector<generate::token_id>> prompts,
    std::size_t length, std::optional<generate::token_id> end,
    std::span<const contender> contenders, const retention_options& options,
    const observe_writing& observe);

}  // namespace evaluate
