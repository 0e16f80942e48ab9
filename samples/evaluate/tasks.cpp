#include "evaluate/tasks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace evaluate {

namespace {

using generate::token_id;
using generate::tokenizer;

constexpr std::string_view names[] = {"Oliver", "Martha", "Hector", "Ingrid", "Samuel",
                                      "Judith", "Walter", "Louise", "Victor", "Sylvia"};
constexpr std::string_view nouns[] = {
    "river",  "stone",   "apple",   "window", "garden",  "horse",  "bridge", "candle", "forest",
    "island", "letter",  "mirror",  "orange", "pocket",  "rabbit", "silver", "table",  "valley",
    "winter", "summer",  "basket",  "button", "castle",  "dinner", "engine", "finger", "guitar",
    "hammer", "jacket",  "kitchen", "lemon",  "market",  "needle", "ocean",  "paper",  "queen",
    "road",   "school",  "tiger",   "uncle",  "village", "water",  "yard",   "bread",  "cloud",
    "desert", "feather", "ladder",  "pencil", "teacher"};
constexpr std::size_t nouns_of_list = 10;
constexpr std::size_t nouns_of_cue = 2;
static_assert(std::size(names) >= depths.size());
static_assert(std::size(nouns) >= depths.size() * nouns_of_list);

// A sentence of the context: cue and answer, and what ends the line.
struct passage {
    task kind;
    std::string cue;
    std::string answer;
};

// Draws are by the generator's own numbers: every standard library makes the same ones.
template <class value_type>
void shuffle(std::vector<value_type>& values, std::mt19937_64& random) {
    for (std::size_t left = values.size(); left > 1; --left) {
        std::swap(values[left - 1], values[random() % left]);
    }
}

passage make_needle(std::string_view name, std::mt19937_64& random) {
    return {task::needle, fmt::format("Remember the secret number of {}:", name),
            fmt::format(" {}", 10000 + random() % 90000)};
}

std::string joined(std::span<const std::string_view> words) {
    std::string text;
    for (const std::string_view word : words) {
        text += fmt::format(" {}", word);
    }
    return text;
}

passage make_list(std::span<const std::string_view> drawn) {
    return {task::copy, "Remember this list:" + joined(drawn.first(nouns_of_cue)),
            joined(drawn.subspan(nouns_of_cue))};
}

void append(std::vector<token_id>& tokens, std::span<const token_id> more) {
    tokens.insert(tokens.end(), more.begin(), more.end());
}

std::vector<token_id> encode(const tokenizer& words, std::string_view text) {
    return words.encode(text, generate::special_tokens::as_text);
}

// Cue and answer are encoded apart in the passage and in the probe, so that both are the same
// tokens in both.
void add_passage(const tokenizer& words, const passage& hidden, std::size_t depth,
                 task_context& context) {
    probe asked = {hidden.kind, depth, encode(words, hidden.cue), encode(words, hidden.answer)};
    append(context.tokens, asked.cue);
    append(context.tokens, asked.answer);
    append(context.tokens, encode(words, ".\n"));
    context.probes.push_back(std::move(asked));
}

// The text's line at `offset`, its end included; empty behind the last.
std::string_view line_at(std::string_view text, std::size_t offset) {
    const std::size_t end = text.find('\n', offset);
    return text.substr(offset, end == std::string_view::npos ? end : end + 1 - offset);
}

}  // namespace

outcome<task_context> make_context(const tokenizer& words, std::string_view text,
                                   std::size_t offset, std::size_t length, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<std::string_view> people(std::begin(names), std::end(names));
    shuffle(people, random);
    std::vector<std::string_view> things(std::begin(nouns), std::end(nouns));
    shuffle(things, random);

    task_context context;
    if (words.begins_with_marker() && words.begin_of_text()) {
        context.tokens.push_back(*words.begin_of_text());
    }
    if (offset > 0) {
        offset = std::min(text.find('\n', offset - 1), text.size() - 1) + 1;
    }
    std::size_t placed = 0;
    while (context.tokens.size() < length || placed < depths.size()) {
        if (placed < depths.size() && context.tokens.size() * 100 >= length * depths[placed]) {
            const auto listed = std::span(things).subspan(placed * nouns_of_list, nouns_of_list);
            add_passage(words, make_needle(people[placed], random), placed, context);
            add_passage(words, make_list(listed), placed, context);
            ++placed;
            continue;
        }
        const std::string_view line = line_at(text, offset);
        if (line.empty()) {
            return error{
                fmt::format("the text ends after {} of the {} tokens of a context: give a "
                            "longer text",
                            context.tokens.size(), length)};
        }
        append(context.tokens, encode(words, line));
        offset += line.size();
    }
    const auto asked = std::span(people).first(placed);
    context.joint_cue =
        encode(words, fmt::format("Remember the secret numbers of {} and {}.\n",
                                  fmt::join(asked.first(placed - 1), ", "), asked.back()));
    return context;
}

double task_scores::ratio::share() const {
    return all == 0 ? 0 : static_cast<double>(right) / static_cast<double>(all);
}

namespace {

task_scores::ratio sum_of(std::span<const task_scores::ratio> parts) {
    return std::accumulate(
        parts.begin(), parts.end(), task_scores::ratio{},
        [](task_scores::ratio sum, const task_scores::ratio& part) {
            return task_scores::ratio{sum.right + part.right, sum.all + part.all};
        });
}

}  // namespace

task_scores::ratio task_scores::all_needles() const { return sum_of(needle); }
task_scores::ratio task_scores::all_copied() const { return sum_of(copy); }

void task_scores::add(const probe& asked, std::span<const token_id> likeliest) {
    std::uint64_t right = 0;
    for (std::size_t i = 0; i < asked.answer.size(); ++i) {
        right += i < likeliest.size() && likeliest[i] == asked.answer[i] ? 1 : 0;
    }
    const std::uint64_t all = asked.answer.size();
    ratio& score = asked.kind == task::needle ? needle[asked.depth] : copy[asked.depth];
    score.right += asked.kind == task::needle ? (right == all ? 1 : 0) : right;
    score.all += asked.kind == task::needle ? 1 : all;
}

}  // namespace evaluate
