#include "tokenizer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <queue>
#include <utility>

#include "unicode.hpp"

namespace generate {

namespace {

constexpr std::size_t most_tokens = 1u << 21;

// Token types of the file format.
constexpr std::int64_t control_token = 3;
constexpr std::int64_t user_defined_token = 4;

// GPT-2's printable stand-ins: bytes that print stand for themselves, the others for U+0100
// upwards.
std::array<char32_t, 256> printable_bytes() {
    std::array<char32_t, 256> characters = {};
    char32_t next = 0x100;
    for (char32_t byte = 0; byte < 256; ++byte) {
        const bool prints = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) ||
                            (byte >= 0xae && byte <= 0xff);
        characters[byte] = prints ? byte : next++;
    }
    return characters;
}

// The bytes behind a printable token. Characters that stand for no byte are kept as they are.
std::string bytes_of_printable(std::string_view printable) {
    static const std::array<int, 0x200> byte_of = [] {
        std::array<int, 0x200> bytes = {};
        bytes.fill(-1);
        const auto characters = printable_bytes();
        for (int byte = 0; byte < 256; ++byte) {
            bytes[characters[static_cast<std::size_t>(byte)]] = byte;
        }
        return bytes;
    }();
    std::string bytes;
    for (std::size_t offset = 0; offset < printable.size();) {
        const decoded_character character = decode_utf8(printable, offset);
        const char32_t code_point = character.code_point;
        if (character.valid && code_point < byte_of.size() && byte_of[code_point] >= 0) {
            bytes.push_back(static_cast<char>(byte_of[code_point]));
        } else {
            bytes.append(printable.substr(offset, character.length));
        }
        offset += character.length;
    }
    return bytes;
}

struct placed_character {
    char32_t code_point;
    std::size_t offset;
};

// How many characters the contraction at `text` takes: 's 't 're 've 'm 'll 'd, or none.
std::size_t contraction_length(std::span<const placed_character> text) {
    const auto at = [&](std::size_t i) { return i < text.size() ? text[i].code_point : 0; };
    if (at(0) != U'\'') {
        return 0;
    }
    const char32_t first = at(1);
    const char32_t second = at(2);
    if (first == U's' || first == U't' || first == U'm' || first == U'd') {
        return 2;
    }
    const bool pair = (first == U'r' && second == U'e') || (first == U'v' && second == U'e') ||
                      (first == U'l' && second == U'l');
    return pair ? 3 : 0;
}

enum class character_class { letter, number, space, other };

character_class class_of(char32_t code_point) {
    if (is_letter(code_point)) {
        return character_class::letter;
    }
    if (is_number(code_point)) {
        return character_class::number;
    }
    return is_space(code_point) ? character_class::space : character_class::other;
}

// GPT-2's expression, alternative by alternative, at the start of `text` (not empty):
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
std::size_t word_length(std::span<const placed_character> text) {
    if (const std::size_t length = contraction_length(text); length != 0) {
        return length;
    }
    const auto run_of = [&](std::size_t from, character_class wanted) {
        std::size_t end = from;
        while (end < text.size() && class_of(text[end].code_point) == wanted) {
            ++end;
        }
        return end;
    };
    const std::size_t start = text[0].code_point == U' ' ? 1 : 0;
    if (start < text.size()) {
        const character_class next = class_of(text[start].code_point);
        if (next != character_class::space) {
            return run_of(start, next);
        }
    }
    const std::size_t end = run_of(0, character_class::space);
    // The last space before a word belongs to the word, unless it is the only one here.
    return end == text.size() || end == 1 ? end : end - 1;
}

}  // namespace

std::vector<std::string_view> split_into_words(std::string_view text, bool single_digits) {
    std::vector<placed_character> characters;
    for (std::size_t offset = 0; offset < text.size();) {
        const decoded_character character = decode_utf8(text, offset);
        // An invalid byte must not pass for the letter of the same number.
        characters.push_back({character.valid ? character.code_point : 0xfffd, offset});
        offset += character.length;
    }
    std::vector<std::string_view> words;
    const auto offset_of = [&](std::size_t i) {
        return i < characters.size() ? characters[i].offset : text.size();
    };
    const auto is_cut = [&](std::size_t i) {
        return single_digits && is_number(characters[i].code_point);
    };
    for (std::size_t begin = 0; begin < characters.size();) {
        std::size_t end = begin + 1;
        if (!is_cut(begin)) {
            while (end < characters.size() && !is_cut(end)) {
                ++end;
            }
        }
        while (begin < end) {
            const std::size_t length =
                word_length(std::span(characters).subspan(begin, end - begin));
            words.push_back(
                text.substr(offset_of(begin), offset_of(begin + length) - offset_of(begin)));
            begin += length;
        }
    }
    return words;
}

outcome<tokenizer> tokenizer::from_gguf(const gguf_file& file) {
    const auto model = file.text("tokenizer.ggml.model");
    if (!model) {
        return model.failure();
    }
    if (*model != "gpt2") {
        return error{
            fmt::format("the tokenizer is of kind '{}', only 'gpt2' (byte-level BPE) is "
                        "supported",
                        *model)};
    }
    const auto splitter = file.text("tokenizer.ggml.pre", "gpt-2");
    if (!splitter) {
        return splitter.failure();
    }
    tokenizer made;
    if (*splitter == "smollm" || *splitter == "starcoder") {
        made.single_digits_ = true;
    } else if (*splitter != "gpt-2") {
        return error{
            fmt::format("the pre-tokenizer '{}' is not supported, only 'smollm', "
                        "'starcoder' and 'gpt-2' are",
                        *splitter)};
    }
    if (auto read = made.read_vocabulary(file); !read) {
        return read.failure();
    }
    if (auto read = made.read_merges(file); !read) {
        return read.failure();
    }
    const auto marker = file.flag("tokenizer.ggml.add_bos_token", false);
    if (!marker) {
        return marker.failure();
    }
    made.begins_with_marker_ = *marker;
    const std::pair<const char*, std::optional<token_id>*> markers[] = {
        {"tokenizer.ggml.eos_token_id", &made.end_of_text_},
        {"tokenizer.ggml.bos_token_id", &made.begin_of_text_},
    };
    for (const auto& [key, target] : markers) {
        const auto id = file.integer(key, -1, static_cast<std::int64_t>(made.size()) - 1, -1);
        if (!id) {
            return id.failure();
        }
        if (*id >= 0) {
            *target = static_cast<token_id>(*id);
        }
    }
    return made;
}

outcome<nothing> tokenizer::read_vocabulary(const gguf_file& file) {
    const auto texts = file.texts("tokenizer.ggml.tokens");
    if (!texts) {
        return texts.failure();
    }
    if (texts->empty() || texts->size() > most_tokens) {
        return error{fmt::format("the vocabulary has {} tokens, 1 to {} are allowed", texts->size(),
                                 most_tokens)};
    }
    const gguf_value* types_value = file.find("tokenizer.ggml.token_type");
    const auto* types =
        types_value == nullptr ? nullptr : std::get_if<std::vector<std::int64_t>>(types_value);
    if (types == nullptr || types->size() != texts->size()) {
        return error{"tokenizer.ggml.token_type is not one integer for each token"};
    }
    for (std::size_t i = 0; i < texts->size(); ++i) {
        const std::string& text = (*texts)[i];
        const auto id = static_cast<token_id>(i);
        const std::int64_t type = (*types)[i];
        if (type == control_token || type == user_defined_token) {
            bytes_.push_back(text);
            if (!text.empty() && specials_.emplace(text, id).second) {
                specials_longest_first_.push_back(text);
            }
        } else {
            bytes_.push_back(bytes_of_printable(text));
            vocabulary_.emplace(text, id);
        }
    }
    std::stable_sort(specials_longest_first_.begin(), specials_longest_first_.end(),
                     [](const auto& a, const auto& b) { return a.size() > b.size(); });
    const auto characters = printable_bytes();
    for (std::size_t byte = 0; byte < 256; ++byte) {
        std::string printable;
        append_utf8(printable, characters[byte]);
        if (const auto found = vocabulary_.find(printable); found != vocabulary_.end()) {
            byte_tokens_[byte] = found->second;
        }
    }
    return nothing{};
}

outcome<nothing> tokenizer::read_merges(const gguf_file& file) {
    const auto lines = file.texts("tokenizer.ggml.merges");
    if (!lines) {
        return lines.failure();
    }
    for (std::size_t rank = 0; rank < lines->size(); ++rank) {
        const std::string& line = (*lines)[rank];
        const std::size_t cut = line.find(' ', 1);
        if (cut == std::string::npos || cut + 1 == line.size()) {
            return error{fmt::format("merge {} is not two tokens with a space between", rank)};
        }
        const std::string left = line.substr(0, cut);
        const std::string right = line.substr(cut + 1);
        const auto left_found = vocabulary_.find(left);
        const auto right_found = vocabulary_.find(right);
        const auto both_found = vocabulary_.find(left + right);
        if (left_found == vocabulary_.end() || right_found == vocabulary_.end() ||
            both_found == vocabulary_.end()) {
            return error{
                fmt::format("merge {} names a token that the vocabulary does not hold", rank)};
        }
        const std::uint64_t key =
            static_cast<std::uint64_t>(left_found->second) << 32 | right_found->second;
        merges_.emplace(key, merge{static_cast<std::uint32_t>(rank), both_found->second});
    }
    return nothing{};
}

const tokenizer::merge* tokenizer::find_merge(token_id left, token_id right) const {
    const auto found = merges_.find(static_cast<std::uint64_t>(left) << 32 | right);
    return found == merges_.end() ? nullptr : &found->second;
}

std::vector<token_id> tokenizer::encode(std::string_view text, special_tokens treatment) const {
    std::vector<token_id> tokens;
    if (treatment == special_tokens::as_text) {
        encode_plain(text, tokens);
        return tokens;
    }
    std::size_t plain_start = 0;
    for (std::size_t offset = 0; offset < text.size();) {
        const auto special =
            std::find_if(specials_longest_first_.begin(), specials_longest_first_.end(),
                         [&](const std::string& candidate) {
                             return text.substr(offset).starts_with(candidate);
                         });
        if (special == specials_longest_first_.end()) {
            ++offset;
            continue;
        }
        encode_plain(text.substr(plain_start, offset - plain_start), tokens);
        tokens.push_back(specials_.at(*special));
        offset += special->size();
        plain_start = offset;
    }
    encode_plain(text.substr(plain_start), tokens);
    return tokens;
}

void tokenizer::encode_plain(std::string_view text, std::vector<token_id>& tokens) const {
    for (const std::string_view word : split_into_words(text, single_digits_)) {
        encode_word(word, tokens);
    }
}

// Symbols form a linked list; a heap holds the mergeable pairs, lowest rank and then leftmost
// first. An entry is out of date when one of its symbols has changed since. O(n log n) in the
// word's length.
void tokenizer::encode_word(std::string_view word, std::vector<token_id>& tokens) const {
    constexpr std::size_t none = std::numeric_limits<std::size_t>::max();
    struct symbol {
        token_id token;
        std::size_t previous;
        std::size_t next;
        bool merged_away;
    };
    struct candidate {
        std::uint32_t rank;
        std::size_t left;
        std::size_t right;
        token_id left_token;
        token_id right_token;
        token_id result;
        bool operator>(const candidate& other) const {
            return rank != other.rank ? rank > other.rank : left > other.left;
        }
    };
    std::vector<symbol> symbols;
    for (const char byte : word) {
        if (const auto token = byte_tokens_[static_cast<std::uint8_t>(byte)]) {
            const std::size_t i = symbols.size();
            symbols.push_back({*token, i == 0 ? none : i - 1, i + 1, false});
        }
    }
    if (symbols.empty()) {
        return;
    }
    symbols.back().next = none;

    std::priority_queue<candidate, std::vector<candidate>, std::greater<>> queue;
    const auto offer = [&](std::size_t left) {
        const std::size_t right = left == none ? none : symbols[left].next;
        if (right == none) {
            return;
        }
        const token_id left_token = symbols[left].token;
        const token_id right_token = symbols[right].token;
        if (const merge* found = find_merge(left_token, right_token)) {
            queue.push({found->rank, left, right, left_token, right_token, found->token});
        }
    };
    for (std::size_t i = 0; i + 1 < symbols.size(); ++i) {
        offer(i);
    }
    while (!queue.empty()) {
        const candidate best = queue.top();
        queue.pop();
        symbol& left = symbols[best.left];
        symbol& right = symbols[best.right];
        if (left.merged_away || right.merged_away || left.next != best.right ||
            left.token != best.left_token || right.token != best.right_token) {
            continue;
        }
        left.token = best.result;
        left.next = right.next;
        right.merged_away = true;
        if (left.next != none) {
            symbols[left.next].previous = best.left;
        }
        offer(left.previous);
        offer(best.left);
    }
    for (std::size_t i = 0; i != none; i = symbols[i].next) {
        tokens.push_back(symbols[i].token);
    }
}

std::string_view tokenizer::bytes_of(token_id token) const {
    return token < bytes_.size() ? std::string_view(bytes_[token]) : std::string_view();
}

std::string tokenizer::decode(std::span<const token_id> tokens) const {
    std::string text;
    for (const token_id token : tokens) {
        text.append(bytes_of(token));
    }
    return text;
}

std::optional<token_id> tokenizer::find_special(std::string_view text) const {
    const auto found = specials_.find(std::string(text));
    return found == specials_.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace generate
