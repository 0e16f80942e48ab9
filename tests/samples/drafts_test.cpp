// Speculative decoding: what is guessed, and that the text does not depend on it.
#include "drafts.hpp"

#include <doctest/doctest.h>

#include "chat.hpp"
#include "real_model.hpp"
#include "writer.hpp"

using generate::look_up_drafts;
using generate::token_id;

namespace {

using tokens = std::vector<token_id>;

generate::writing_result write(const tokens& prompt, std::uint32_t drafts,
                               generate::writing_options options) {
    options.drafts = drafts;
    options.threads = 1;
    auto result = generate::write_text(real_model().model, real_model().words, prompt, options, {});
    REQUIRE_MESSAGE(result, (result ? std::string() : result.message()));
    return *result;
}

tokens prompt_of(std::string_view text, generate::prompt_style style) {
    auto prompt = generate::prompt_tokens(real_model().file, real_model().words, text, style);
    REQUIRE(prompt);
    return *prompt;
}

}  // namespace

TEST_CASE("drafts: what followed the newest tokens before is guessed to follow again") {
    CHECK(look_up_drafts(tokens{1, 2, 3, 4, 5, 1, 2, 3}, 2) == tokens{4, 5});
    CHECK(look_up_drafts(tokens{1, 2, 3, 4, 5, 1, 2, 3}, 9) == tokens{4, 5, 1, 2, 3});
    CHECK(look_up_drafts(tokens{1, 2, 3, 4, 5, 1, 2, 3}, 0).empty());
    // The latest earlier place counts, and three tokens more than two.
    CHECK(look_up_drafts(tokens{1, 2, 7, 1, 2, 8, 1, 2}, 1) == tokens{8});
    CHECK(look_up_drafts(tokens{9, 1, 2, 7, 1, 2, 8, 9, 1, 2}, 1) == tokens{7});
    // A place may reach into the newest tokens themselves.
    CHECK(look_up_drafts(tokens{5, 5, 5}, 4) == tokens{5});
    CHECK(look_up_drafts(tokens{1, 2, 1, 2, 1, 2}, 4) == tokens{1, 2});
    // One token that was there before is too little.
    CHECK(look_up_drafts(tokens{1, 2, 3, 1}, 4).empty());
    CHECK(look_up_drafts(tokens{1, 2, 3, 4}, 4).empty());
    for (const tokens& few : {tokens{}, tokens{1}, tokens{1, 1}}) {
        CHECK(look_up_drafts(few, 4).empty());
    }
}

// A pass over several rows rounds otherwise than one over a single row, so that two tokens that are
// almost equally likely may change places. With f32 that needs a tie in the last bits; with f16 a
// difference of a thousandth is enough, and the second prompt leaves no such choice.
TEST_CASE("drafts: the text is the same, whatever is guessed") {
    generate::writing_options options;
    options.tokens = 60;
    options.format = "f32";
    const tokens story =
        prompt_of("Write a story about a cat, a dog and a cat.", generate::prompt_style::chat);
    const generate::writing_result plain = write(story, 0, options);
    CHECK(plain.drafted_tokens == 0);
    for (const std::uint32_t drafts : {4u, 15u}) {
        CAPTURE(drafts);
        const generate::writing_result result = write(story, drafts, options);
        CHECK(result.text == plain.text);
        CHECK(result.generated_tokens == 60);
        CHECK(result.prompt_tokens == plain.prompt_tokens);
        CHECK(result.retained == plain.retained);  // what was wrong was rolled back
        CHECK(result.final_blocks == plain.final_blocks);
        CHECK(result.accepted_drafts > 0);
        CHECK(result.accepted_drafts < result.drafted_tokens);
    }

    options.format = "f16";
    options.tokens = 60;
    const tokens code = prompt_of("def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
                                  generate::prompt_style::raw);
    const generate::writing_result slow = write(code, 0, options);
    const generate::writing_result fast = write(code, 6, options);
    CHECK(fast.text == slow.text);
    CHECK(fast.retained == slow.retained);
    CHECK(fast.accepted_drafts > 15);
}

TEST_CASE("drafts: a seeded draw makes the same choices, and stops where it would") {
    generate::writing_options options;
    options.format = "f32";
    options.temperature = 0.7;
    options.repeat_penalty = 1.05;
    options.seed = 11;
    const tokens list = prompt_of("one two three four, one two three four, one two three",
                                  generate::prompt_style::raw);
    for (const std::uint32_t count : {1u, 2u, 37u}) {
        CAPTURE(count);
        options.tokens = count;
        const generate::writing_result plain = write(list, 0, options);
        const generate::writing_result result = write(list, 5, options);
        CHECK(result.text == plain.text);
        CHECK(result.generated_tokens == count);
        CHECK(result.retained == plain.retained);
    }
}

// The same question once more, behind its answer: the end of that answer is guessed, with what came
// behind it, and the model picks the end. It must stay the end.
TEST_CASE("drafts: an answer ends where the model ends it") {
    generate::writing_options options;
    options.format = "f32";
    options.tokens = 60;
    const char* question = "What is the capital of France? Answer with one word.";
    tokens asked = prompt_of(question, generate::prompt_style::chat);
    const std::string answer = write(asked, 0, options).text;
    for (const tokens& more : {real_model().words.encode(answer, generate::special_tokens::as_text),
                               generate::follow_up_tokens(real_model().words, question)}) {
        asked.insert(asked.end(), more.begin(), more.end());
    }
    const generate::writing_result plain = write(asked, 0, options);
    REQUIRE(plain.text == answer);  // so that the guesses were right
    REQUIRE(plain.generated_tokens < 60);
    const generate::writing_result result = write(asked, 8, options);
    CHECK(result.text == plain.text);
    CHECK(result.generated_tokens == plain.generated_tokens);
    CHECK(result.retained == plain.retained);
    CHECK(result.accepted_drafts > 0);
}
