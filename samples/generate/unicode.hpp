// UTF-8 and the three character classes that GPT-2's pre-tokenizer asks for.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace generate {

bool is_letter(char32_t code_point);  // general category L
bool is_number(char32_t code_point);  // general category N
bool is_space(char32_t code_point);   // property White_Space

struct decoded_character {
    char32_t code_point;
    std::size_t length;  // in bytes, at least 1
    bool valid;
};

// Decodes the character that begins at `offset` < text.size(). A byte that begins none is an
// invalid character of length 1 with that byte's value.
decoded_character decode_utf8(std::string_view text, std::size_t offset);

void append_utf8(std::string& text, char32_t code_point);

// The text with each invalid byte replaced by U+FFFD.
std::string valid_utf8(std::string_view text);

}  // namespace generate
