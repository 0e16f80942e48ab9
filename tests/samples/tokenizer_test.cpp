// The tokenizer against another implementation, on the real vocabulary; and on a small one by hand.
#include "tokenizer.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>

#include "gguf_builder.hpp"
#include "golden.hpp"
#include "real_model.hpp"
#include "unicode.hpp"

using generate::gguf_file;
using generate::special_tokens;
using generate::token_id;
using generate::tokenizer;

namespace {

const tokenizer& real_tokenizer() { return real_model().words; }

gguf_builder small_vocabulary(const std::vector<std::string>& merges,
                              std::string_view pre = "gpt-2") {
    gguf_builder built;
    built.header(0, 6)
        .key_text("tokenizer.ggml.model", "gpt2")
        .key_text("tokenizer.ggml.pre", pre)
        .key_texts("tokenizer.ggml.tokens", {"a", "b", "c", "ab", "bc", "abc", "<end>", "Ġ", "Ġa"})
        .key_i32s("tokenizer.ggml.token_type", {1, 1, 1, 1, 1, 1, 3, 1, 1})
        .key_texts("tokenizer.ggml.merges", merges)
        .key_u32("tokenizer.ggml.eos_token_id", 6);
    return built;
}

std::string failure(const gguf_builder& built) {
    auto file = gguf_file::parse(built.bytes());
    REQUIRE(file);
    auto made = tokenizer::from_gguf(*file);
    REQUIRE_FALSE(made);
    return made.message();
}

std::vector<std::string> words(std::string_view text, bool single_digits = true) {
    std::vector<std::string> found;
    for (const std::string_view word : generate::split_into_words(text, single_digits)) {
        found.emplace_back(word);
    }
    return found;
}

using strings = std::vector<std::string>;

}  // namespace

TEST_CASE("tokenizer: ids agree with another implementation") {
    const auto lines = golden::read_lines("tokenizer.txt");
    REQUIRE(lines.size() >= 30);
    for (std::size_t i = 0; i + 1 < lines.size(); i += 2) {
        const std::string text = golden::from_hex(lines[i].content);
        CAPTURE(text);
        CHECK(real_tokenizer().encode(text, special_tokens::recognised) ==
              golden::numbers(lines[i + 1].content));
    }
}

TEST_CASE("tokenizer: text comes back") {
    std::mt19937 random(3);
    const std::string alphabet = "abcXYZ 019'.,\n\t-_(){}éß中🙂";
    std::vector<std::string> characters;
    for (std::size_t offset = 0; offset < alphabet.size();) {
        const std::size_t length = generate::decode_utf8(alphabet, offset).length;
        characters.push_back(alphabet.substr(offset, length));
        offset += length;
    }
    for (int round = 0; round < 500; ++round) {
        std::string text;
        for (std::size_t i = random() % 80; i > 0; --i) {
            text += characters[random() % characters.size()];
        }
        const auto tokens = real_tokenizer().encode(text, special_tokens::as_text);
        CAPTURE(text);
        REQUIRE(real_tokenizer().decode(tokens) == text);
    }
}

TEST_CASE("tokenizer: special tokens only where they are asked for") {
    const auto end = real_tokenizer().find_special("<|im_end|>");
    REQUIRE(end);
    const std::string text = "a<|im_end|>b";
    const auto recognised = real_tokenizer().encode(text, special_tokens::recognised);
    const auto plain = real_tokenizer().encode(text, special_tokens::as_text);
    CHECK(std::count(recognised.begin(), recognised.end(), *end) == 1);
    CHECK(std::count(plain.begin(), plain.end(), *end) == 0);
    CHECK(real_tokenizer().decode(recognised) == text);
    CHECK(real_tokenizer().decode(plain) == text);
    CHECK(real_tokenizer().end_of_text() == end);
}

TEST_CASE("tokenizer: words of the GPT-2 expression") {
    CHECK(words("") == strings{});
    CHECK(words("Hello, world!") == strings{"Hello", ",", " world", "!"});
    CHECK(words("it's  they'll") == strings{"it", "'s", " ", " they", "'ll"});
    CHECK(words("'S") == strings{"'", "S"});
    CHECK(words("a   b") == strings{"a", "  ", " b"});
    CHECK(words("a\n\nb") == strings{"a", "\n", "\n", "b"});
    CHECK(words("end  ") == strings{"end", "  "});
    CHECK(words("in 1969") == strings{"in", " ", "1", "9", "6", "9"});
    CHECK(words("in 1969", false) == strings{"in", " 1969"});
    CHECK(words("x²y", false) == strings{"x", "²", "y"});
    CHECK(words("\xff\xfe") == strings{"\xff\xfe"});
}

TEST_CASE("tokenizer: the pair of the lowest rank merges first") {
    const auto encode = [](const std::vector<std::string>& merges, std::string_view text) {
        const gguf_builder built = small_vocabulary(merges);
        auto file = gguf_file::parse(built.bytes());
        REQUIRE(file);
        auto made = tokenizer::from_gguf(*file);
        REQUIRE(made);
        return made->encode(text, special_tokens::recognised);
    };
    using ids = std::vector<token_id>;
    CHECK(encode({"a b", "b c"}, "abc") == ids{3, 2});
    CHECK(encode({"b c", "a b"}, "abc") == ids{0, 4});
    CHECK(encode({"b c", "a bc"}, "abc") == ids{5});
    CHECK(encode({"a b"}, "ababb<end> a") == ids{3, 3, 1, 6, 7, 0});
    CHECK(encode({"Ġ a"}, "a a") == ids{0, 8});
    CHECK(encode({}, "axb") == ids{0, 1});  // no token for x: dropped
}

TEST_CASE("tokenizer: a very long word takes reasonable time") {
    const std::string word(200000, 'a');
    const auto tokens = real_tokenizer().encode(word, special_tokens::as_text);
    CHECK(real_tokenizer().decode(tokens) == word);
}

TEST_CASE("tokenizer: files it cannot use") {
    const auto has = [](const std::string& message, std::string_view part) {
        return message.find(part) != std::string::npos;
    };
    CHECK(has(failure(small_vocabulary({}, "qwen2")), "'qwen2' is not supported"));
    CHECK(has(failure(small_vocabulary({"ab"})), "merge 0 is not two tokens"));
    CHECK(has(failure(small_vocabulary({"a b", "a "})), "merge 1 is not two tokens"));
    CHECK(has(failure(small_vocabulary({"a c"})), "merge 0 names a token"));

    gguf_builder other;
    other.header(0, 1).key_text("tokenizer.ggml.model", "llama");
    CHECK(has(failure(other), "only 'gpt2'"));

    gguf_builder uneven;
    uneven.header(0, 3)
        .key_text("tokenizer.ggml.model", "gpt2")
        .key_texts("tokenizer.ggml.tokens", {"a", "b"})
        .key_i32s("tokenizer.ggml.token_type", {1});
    CHECK(has(failure(uneven), "one integer for each token"));

    gguf_builder outside;
    outside.header(0, 5)
        .key_text("tokenizer.ggml.model", "gpt2")
        .key_texts("tokenizer.ggml.tokens", {"a", "b"})
        .key_i32s("tokenizer.ggml.token_type", {1, 1})
        .key_texts("tokenizer.ggml.merges", {})
        .key_u32("tokenizer.ggml.eos_token_id", 2);
    CHECK(has(failure(outside), "eos_token_id' is 2, allowed are -1 to 1"));
}

TEST_CASE("unicode: damaged UTF-8 becomes replacement characters") {
    const std::string mark = "\xef\xbf\xbd";
    CHECK(generate::valid_utf8("plain é 🙂") == "plain é 🙂");
    CHECK(generate::valid_utf8("a\xff"
                               "b") == "a" + mark + "b");
    CHECK(generate::valid_utf8("\xe4\xb8") == mark + mark);             // cut off
    CHECK(generate::valid_utf8("\xc0\xaf") == mark + mark);             // overlong
    CHECK(generate::valid_utf8("\xed\xa0\x80") == mark + mark + mark);  // surrogate
    CHECK(generate::valid_utf8("\xf4\x90\x80\x80") == mark + mark + mark + mark);
}

TEST_CASE("unicode: classes") {
    CHECK(generate::is_letter(U'a'));
    CHECK(generate::is_letter(U'ß'));
    CHECK(generate::is_letter(U'中'));
    CHECK_FALSE(generate::is_letter(U'1'));
    CHECK(generate::is_number(U'²'));
    CHECK(generate::is_number(U'Ⅷ'));
    CHECK_FALSE(generate::is_number(U'x'));
    CHECK(generate::is_space(U'\u3000'));
    CHECK_FALSE(generate::is_space(U'\u200b'));
}
