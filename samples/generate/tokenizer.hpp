// Byte-level byte-pair encoding as GPT-2 made it, from the vocabulary and merges in a GGUF file.
//
// Text goes three ways in a row: special tokens are cut out (where the caller asks for it), the
// rest is cut into words by the pre-tokenizer, and each word's bytes are merged, the pair of the
// lowest rank first. Bytes map to printable characters, so that every token is a readable string; a
// byte that the vocabulary does not hold is dropped, as other engines do.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "gguf.hpp"
#include "outcome.hpp"

namespace generate {

using token_id = std::uint32_t;

enum class special_tokens {
    as_text,     // for text from users: "<|im_end|>" is ten characters
    recognised,  // for templates: it is the token
};

// Cuts text into words. With `single_digits`, every number character is a word of its own.
std::vector<std::string_view> split_into_words(std::string_view text, bool single_digits);

class tokenizer {
  public:
    static outcome<tokenizer> from_gguf(const gguf_file& file);

    std::vector<token_id> encode(std::string_view text, special_tokens treatment) const;
    std::string decode(std::span<const token_id> tokens) const;

    // The bytes that a token stands for; empty for an id outside the vocabulary. They may end
    // inside a UTF-8 character.
    std::string_view bytes_of(token_id token) const;

    std::size_t size() const { return bytes_.size(); }
    std::optional<token_id> find_special(std::string_view text) const;
    std::optional<token_id> end_of_text() const { return end_of_text_; }
    std::optional<token_id> begin_of_text() const { return begin_of_text_; }
    bool begins_with_marker() const { return begins_with_marker_; }

  private:
    struct merge {
        std::uint32_t rank;
        token_id token;
    };

    outcome<nothing> read_vocabulary(const gguf_file& file);
    outcome<nothing> read_merges(const gguf_file& file);
    void encode_plain(std::string_view text, std::vector<token_id>& tokens) const;
    void encode_word(std::string_view word, std::vector<token_id>& tokens) const;
    const merge* find_merge(token_id left, token_id right) const;

    std::vector<std::string> bytes_;
    std::unordered_map<std::string, token_id> vocabulary_;  // by printable form
    std::unordered_map<std::string, token_id> specials_;
    std::vector<std::string> specials_longest_first_;
    std::unordered_map<std::uint64_t, merge> merges_;  // by left << 32 | right
    std::optional<token_id> byte_tokens_[256];
    std::optional<token_id> end_of_text_;
    std::optional<token_id> begin_of_text_;
    bool begins_with_marker_ = false;
    bool single_digits_ = false;
};

}  // namespace generate
