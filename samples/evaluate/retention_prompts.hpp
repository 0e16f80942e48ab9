// What is answered at length. Each asks for a text that does not end soon.
#pragma once

#include <array>
#include <string_view>

namespace evaluate {

inline constexpr std::array<std::string_view, 6> prompts_at_length = {
    "Write a long story about a lighthouse keeper who finds a letter in a bottle. Tell what "
    "happens on each day of the week that follows.",
    "Explain in detail how a house is built, step by step, from the empty ground to the day "
    "somebody moves in.",
    "Describe the history of bread, from the first farmers to the bakery of today, with examples "
    "from many countries.",
    "Write a conversation between a teacher and a student about why the sky is blue, why the sea "
    "is salty, and how birds find their way.",
    "List thirty useful things to know before crossing a desert on foot, and explain each in a few "
    "sentences.",
    "Tell the life of an imaginary painter, chapter by chapter, from childhood to old age.",
};
inline constexpr unsigned writing_prompts = prompts_at_length.size();

}  // namespace evaluate
