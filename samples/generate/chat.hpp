// A conversation of one question, in the form that the model was trained on.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "gguf.hpp"
#include "outcome.hpp"
#include "tokenizer.hpp"

namespace generate {

enum class prompt_style {
    chat,  // as the file's chat template says
    raw,   // the text as it is, to be continued
};

// Tokens of the prompt. A chat template is code in a language of its own; this engine knows the one
// family it needs, ChatML, and recognises it by its markers. The user's text is encoded without
// special tokens: nobody can end their own turn by writing a marker.
outcome<std::vector<token_id>> prompt_tokens(const gguf_file& file, const tokenizer& words,
                                             std::string_view text, prompt_style style);

// Tokens of a further question, which also end the model's answer before it. Only where
// prompt_tokens has made a chat.
std::vector<token_id> follow_up_tokens(const tokenizer& words, std::string_view text);

}  // namespace generate
