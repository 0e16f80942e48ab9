#include "unicode.hpp"

#include <cstdint>

namespace generate {

bool is_space(char32_t code_point) {
    return (code_point >= 0x9 && code_point <= 0xd) || code_point == 0x20 || code_point == 0x85 ||
           code_point == 0xa0 || code_point == 0x1680 ||
           (code_point >= 0x2000 && code_point <= 0x200a) || code_point == 0x2028 ||
           code_point == 0x2029 || code_point == 0x202f || code_point == 0x205f ||
           code_point == 0x3000;
}

decoded_character decode_utf8(std::string_view text, std::size_t offset) {
    const auto byte_at = [&](std::size_t i) {
        return static_cast<char32_t>(static_cast<std::uint8_t>(text[i]));
    };
    const char32_t first = byte_at(offset);
    if (first < 0x80) {
        return {first, 1, true};
    }
    const decoded_character invalid = {first, 1, false};
    std::size_t length = 0;
    char32_t code_point = 0;
    char32_t least = 0;  // smaller values have a shorter form
    if (first >= 0xc2 && first <= 0xdf) {
        length = 2;
        code_point = first & 0x1f;
        least = 0x80;
    } else if (first >= 0xe0 && first <= 0xef) {
        length = 3;
        code_point = first & 0x0f;
        least = 0x800;
    } else if (first >= 0xf0 && first <= 0xf4) {
        length = 4;
        code_point = first & 0x07;
        least = 0x10000;
    } else {
        return invalid;
    }
    if (length > text.size() - offset) {
        return invalid;
    }
    for (std::size_t i = 1; i < length; ++i) {
        const char32_t next = byte_at(offset + i);
        if ((next & 0xc0) != 0x80) {
            return invalid;
        }
        code_point = (code_point << 6) | (next & 0x3f);
    }
    const bool surrogate = code_point >= 0xd800 && code_point <= 0xdfff;
    if (code_point < least || code_point > 0x10ffff || surrogate) {
        return invalid;
    }
    return {code_point, length, true};
}

void append_utf8(std::string& text, char32_t code_point) {
    const auto append = [&](char32_t byte) { text.push_back(static_cast<char>(byte)); };
    if (code_point < 0x80) {
        append(code_point);
    } else if (code_point < 0x800) {
        append(0xc0 | (code_point >> 6));
        append(0x80 | (code_point & 0x3f));
    } else if (code_point < 0x10000) {
        append(0xe0 | (code_point >> 12));
        append(0x80 | ((code_point >> 6) & 0x3f));
        append(0x80 | (code_point & 0x3f));
    } else {
        append(0xf0 | (code_point >> 18));
        append(0x80 | ((code_point >> 12) & 0x3f));
        append(0x80 | ((code_point >> 6) & 0x3f));
        append(0x80 | (code_point & 0x3f));
    }
}

std::string valid_utf8(std::string_view text) {
    std::string valid;
    valid.reserve(text.size());
    for (std::size_t offset = 0; offset < text.size();) {
        const decoded_character character = decode_utf8(text, offset);
        if (character.valid) {
            valid.append(text.substr(offset, character.length));
        } else {
            append_utf8(valid, 0xfffd);
        }
        offset += character.length;
    }
    return valid;
}

}  // namespace generate
