// Needles and lists: how contexts are made, and how answers are scored.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <sstream>

#include "evaluate/tasks.hpp"
#include "gguf_builder.hpp"

using evaluate::probe;
using evaluate::task;
using evaluate::task_context;
using evaluate::task_scores;
using generate::token_id;

namespace {

using tokens = std::vector<token_id>;

// Every printable ASCII character is a token, and so is a line's end.
const generate::tokenizer& characters() {
    static const generate::tokenizer made = [] {
        std::vector<std::string> texts = {"Ġ", "Ċ"};
        for (char character = '!'; character <= '~'; ++character) {
            texts.emplace_back(1, character);
        }
        gguf_builder built;
        built.header(0, 5)
            .key_text("tokenizer.ggml.model", "gpt2")
            .key_text("tokenizer.ggml.pre", "gpt-2")
            .key_texts("tokenizer.ggml.tokens", texts)
            .key_i32s("tokenizer.ggml.token_type", std::vector<std::int32_t>(texts.size(), 1))
            .key_texts("tokenizer.ggml.merges", {});
        auto file = generate::gguf_file::parse(built.bytes());
        REQUIRE(file);
        auto words = generate::tokenizer::from_gguf(*file);
        REQUIRE_MESSAGE(words, (words ? std::string() : words.message()));
        return std::move(*words);
    }();
    return made;
}

// Lines of 50 characters that tell where they come from.
std::string numbered_lines(int count) {
    std::string text;
    for (int i = 0; i < count; ++i) {
        std::string line = "line " + std::to_string(1000 + i) + " ";
        line.resize(49, '-');
        text += line + "\n";
    }
    return text;
}

task_context make(std::string_view text, std::size_t offset, std::uint64_t seed) {
    auto made = evaluate::make_context(characters(), text, offset, 4000, seed);
    REQUIRE_MESSAGE(made, (made ? std::string() : made.message()));
    return *made;
}

std::string decoded(const tokens& some) { return characters().decode(some); }

}  // namespace

TEST_CASE("tasks: every depth has a needle and a list, and they lie there") {
    const task_context made = make(numbered_lines(200), 0, 1);
    CHECK(made.tokens.size() >= 4000);
    CHECK(made.tokens.size() < 4000 + 50);
    REQUIRE(made.probes.size() == 2 * evaluate::depths.size());
    const std::string text = decoded(made.tokens);
    for (std::size_t i = 0; i < made.probes.size(); ++i) {
        const probe& one = made.probes[i];
        CAPTURE(i);
        CHECK(one.kind == (i % 2 == 0 ? task::needle : task::copy));
        CHECK(one.depth == i / 2);
        const std::string passage = decoded(one.cue) + decoded(one.answer) + ".\n";
        const std::size_t at = text.find(passage);
        REQUIRE(at != std::string::npos);
        CHECK(text.find(decoded(one.cue), at + 1) == std::string::npos);
        // At the depth, or a line and a passage later.
        const auto wanted = 40 * std::size_t{evaluate::depths[one.depth]};
        CHECK(at >= wanted);
        CHECK(at < wanted + 50 + 70);
    }
    const std::string joint = decoded(made.joint_cue);
    CHECK(joint.starts_with("Remember the secret numbers of "));
    for (std::size_t i = 0; i < made.probes.size(); i += 2) {
        const std::string cue = decoded(made.probes[i].cue);
        CHECK(joint.find(
                  cue.substr(std::strlen("Remember the secret number of "),
                             cue.size() - 1 - std::strlen("Remember the secret number of "))) !=
              std::string::npos);
    }
    // Around the passages, the text's lines follow each other.
    CHECK(text.starts_with("line 1000 -"));
    for (int i = 0; i < 40; ++i) {
        CHECK(text.find("line " + std::to_string(1000 + i)) != std::string::npos);
    }
}

TEST_CASE("tasks: needles are numbers of five digits, lists are words that come once") {
    std::set<std::string> numbers;
    for (std::uint64_t seed = 1; seed <= 5; ++seed) {
        const task_context made = make(numbered_lines(200), 0, seed);
        std::set<std::string> words;
        for (const probe& one : made.probes) {
            const std::string answer = decoded(one.answer);
            if (one.kind == task::needle) {
                CHECK(answer.size() == 6);
                CHECK(answer[0] == ' ');
                CHECK(std::all_of(answer.begin() + 1, answer.end(),
                                  [](char c) { return c >= '0' && c <= '9'; }));
                numbers.insert(answer);
            } else {
                std::istringstream list(decoded(one.cue).substr(decoded(one.cue).find(':') + 1) +
                                        answer);
                int count = 0;
                for (std::string word; list >> word; ++count) {
                    CHECK(words.insert(word).second);
                }
                CHECK(count == 10);
            }
        }
    }
    CHECK(numbers.size() > 20);
}

TEST_CASE("tasks: the same seed makes the same context, and the text begins where asked") {
    const std::string text = numbered_lines(300);
    CHECK(make(text, 0, 7).tokens == make(text, 0, 7).tokens);
    CHECK(make(text, 0, 7).tokens != make(text, 0, 8).tokens);
    CHECK(decoded(make(text, 500, 7).tokens).starts_with("line 1010"));
    CHECK(decoded(make(text, 501, 7).tokens).starts_with("line 1011"));  // the next whole line
    CHECK(decoded(make(text, 549, 7).tokens).starts_with("line 1011"));
}

TEST_CASE("tasks: a text that ends too early is an error") {
    for (const std::size_t offset : {0u, 40u, 490u, 500u}) {
        auto refused = evaluate::make_context(characters(), numbered_lines(10), offset, 4000, 1);
        REQUIRE_FALSE(refused);
        CHECK(refused.message().find("give a longer text") != std::string::npos);
    }
    CHECK_FALSE(evaluate::make_context(characters(), "", 0, 4000, 1));
    CHECK_FALSE(evaluate::make_context(characters(), "", 5, 4000, 1));
}

TEST_CASE("tasks: a needle is told whole or not, copied tokens count one by one") {
    task_scores scores;
    const probe needle = {task::needle, 1, {9}, {1, 2, 3}};
    const probe list = {task::copy, 3, {9}, {4, 5, 6, 7}};
    scores.add(needle, tokens{1, 2, 3});
    scores.add(needle, tokens{1, 2, 4});
    scores.add(needle, tokens{1, 2});
    scores.add(list, tokens{4, 0, 6, 7});
    scores.add(list, tokens{4});
    CHECK(scores.needle[1].right == 1);
    CHECK(scores.needle[1].all == 3);
    CHECK(scores.copy[3].right == 4);
    CHECK(scores.copy[3].all == 8);
    CHECK(scores.needle[0].all == 0);
    CHECK(scores.copy[1].all == 0);
    scores.add({task::needle, 0, {}, {1}}, tokens{1});
    CHECK(scores.all_needles().right == 2);
    CHECK(scores.all_needles().all == 4);
    CHECK(scores.all_needles().share() == 0.5);
    CHECK(scores.all_copied().share() == 0.5);
    CHECK(task_scores().all_needles().share() == 0);
}
