// Prompt lookup: drafts for speculative decoding out of the text itself. Where the newest tokens
// stood before, what followed them then is guessed to follow again.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "tokenizer.hpp"

namespace generate {

// At most `most` tokens that may come behind `text`: what followed the latest earlier place of its
// last three tokens, or else of its last two. Empty where they are new.
std::vector<token_id> look_up_drafts(std::span<const token_id> text, std::size_t most);

}  // namespace generate
