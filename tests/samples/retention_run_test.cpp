// Whole evaluations of methods of eviction, on a small model with made-up weights: against
// attention without a library that is told which tokens are left, and against themselves in other
// company.
#include <doctest/doctest.h>

#include <cmath>
#include <string>

#include "evaluate/retention_tasks.hpp"
#include "evaluate/retention_text.hpp"
#include "evaluate/retention_writing.hpp"
#include "sampler.hpp"
#include "small_llama.hpp"

using namespace evaluate;
using generate::token_id;
using small_llama::dense_logits;
using small_llama::loss_of;
using small_llama::model_of_two_heads;
using small_llama::some_tokens;
using small_llama::vocabulary;

namespace {

std::vector<contender> contenders(std::string_view methods, std::string_view budgets) {
    const auto named = parse_methods(methods);
    const auto percents = parse_budgets(budgets);
    REQUIRE(named);
    REQUIRE(percents);
    return contenders_of(*named, *percents);
}

std::size_t index_of(std::span<const contender> all, std::string_view method, double percent) {
    for (std::size_t i = 0; i < all.size(); ++i) {
        if (all[i].method->name == method && all[i].percent == percent) {
            return i;
        }
    }
    FAIL("no such contender");
    return 0;
}

retention_options options_of(std::string_view format, std::uint32_t chunk) {
    retention_options options;
    auto stored = parse_configuration(format);
    REQUIRE(stored);
    options.stored = *stored;
    options.chunk = chunk;
    options.threads = 1;
    return options;
}

std::vector<retained_text> score(std::span<const text_window> windows,
                                 std::span<const contender> all, const retention_options& options) {
    auto scores =
        score_windows(model_of_two_heads(), windows, all, options, [](std::size_t, std::size_t) {});
    REQUIRE_MESSAGE(scores, (scores ? std::string() : scores.message()));
    return std::move(*scores);
}

void check_same(const score_sums& one, const score_sums& other) {
    CHECK(one.count() == other.count());
    CHECK(one.perplexity() == doctest::Approx(other.perplexity()).epsilon(1e-6));
    CHECK(one.mean_divergence() == doctest::Approx(other.mean_divergence()).epsilon(1e-4));
    CHECK(one.agreement() == other.agreement());
}

// What streaming leaves of a text that is read in chunks: the first four tokens, and of those
// before the chunk the last of the budget.
visibility streaming(std::size_t budget, std::size_t chunk) {
    return [=](std::size_t query, std::size_t key) {
        const std::size_t start = query / chunk * chunk;
        return start <= budget || key < 4 || key + budget - 4 >= start;
    };
}

}  // namespace

TEST_CASE("retention: the full cache is the reference, and its rows are those behind the budget") {
    const auto tokens = some_tokens(200);
    const std::vector<text_window> windows = {{{tokens.begin(), tokens.begin() + 96}, 8},
                                              {{tokens.begin() + 96, tokens.end()}, 8}};
    const auto all = contenders("snapkv", "50,25");
    const auto scores = score(windows, all, options_of("f16", 16));
    for (const double percent : {50.0, 25.0}) {
        const retained_text& full = scores[index_of(all, "full", percent)];
        CHECK(full.sums.mean_divergence() == 0);
        CHECK(full.sums.percentile_divergence(1) == 0);
        CHECK(full.sums.agreement() == 1);
        CHECK(full.sums.perplexity() == full.reference.perplexity());
        CHECK(full.steady_bytes == 1);
        CHECK(full.peak_bytes == 1);
    }
    // Budgets of 48 and 52 tokens are exceeded by chunks that end at 64: rows 64 to 94 and 64 to
    // 102 have a next token. Those of 24 and 26 are by chunks that end at 32.
    CHECK(scores[index_of(all, "full", 50)].sums.count() == 31 + 39);
    CHECK(scores[index_of(all, "full", 25)].sums.count() == 63 + 71);
    CHECK(scores[index_of(all, "snapkv", 25)].sums.count() == 63 + 71);
    CHECK(scores[index_of(all, "snapkv", 25)].reference.perplexity() ==
          scores[index_of(all, "full", 25)].sums.perplexity());
    CHECK(scores[index_of(all, "snapkv", 25)].sums.mean_divergence() > 0);

    // f32 instead, beside the f16 reference.
    const auto stored = score(windows, all, options_of("f32", 16));
    const retained_text& full = stored[index_of(all, "full", 25)];
    CHECK(full.sums.count() == 63 + 71);
    CHECK(full.sums.mean_divergence() > 0);
    CHECK(full.sums.mean_divergence() < 1e-6);
    CHECK(full.steady_bytes == doctest::Approx(2));
}

TEST_CASE("retention: streaming predicts what a model does that sees those tokens alone") {
    const auto tokens = some_tokens(160);
    const std::vector<text_window> windows = {{tokens, 0}};
    const auto all = contenders("streaming", "25,12.5");  // 40 and 20 tokens
    for (const std::uint32_t chunk : {8u, 32u}) {
        CAPTURE(chunk);
        const auto scores = score(windows, all, options_of("f32", chunk));
        for (const std::size_t budget : {40u, 20u}) {
            CAPTURE(budget);
            const auto& found = scores[index_of(all, "streaming", budget == 40 ? 25 : 12.5)];
            const auto logits =
                dense_logits(tokens, model_of_two_heads(), streaming(budget, chunk));
            const auto whole = dense_logits(tokens, model_of_two_heads());
            const std::size_t first = (budget / chunk + 1) * chunk;
            double loss = 0, divergence = 0;
            for (std::size_t row = first; row + 1 < tokens.size(); ++row) {
                const auto of = [&](const std::vector<float>& from) {
                    return std::span(from).subspan(row * vocabulary, vocabulary);
                };
                loss += loss_of(of(logits), tokens[row + 1]);
                for (token_id token = 0; token < vocabulary; ++token) {
                    const double expected = -loss_of(of(whole), token);
                    divergence += std::exp(expected) * (expected + loss_of(of(logits), token));
                }
            }
            const auto rows = static_cast<double>(tokens.size() - 1 - first);
            CHECK(found.sums.count() == tokens.size() - 1 - first);
            CHECK(found.sums.perplexity() == doctest::Approx(std::exp(loss / rows)).epsilon(1e-5));
            CHECK(divergence / rows > 1e-6);
            CHECK(found.sums.mean_divergence() ==
                  doctest::Approx(divergence / rows).epsilon(0.02));  // the reference is in f16
        }
    }
}

TEST_CASE("retention: bytes are those of budget and chunk, in whole blocks") {
    const auto tokens = some_tokens(256);
    const std::vector<text_window> windows = {{tokens, 0}};
    const auto all = contenders("streaming,h2o,snapkv_adaptive", "25");  // 64 tokens: four blocks
    const auto scores = score(windows, all, options_of("f16", 32));
    for (const char* method : {"streaming", "h2o", "random_pp"}) {
        CAPTURE(method);
        const retained_text& one = scores[index_of(all, method, 25)];
        CHECK(one.steady_bytes == doctest::Approx(64.0 / 256));
        CHECK(one.peak_bytes == doctest::Approx(96.0 / 256));
    }
    // Each head rounds up by itself; the sum of what the two of a layer keep does not shrink.
    const retained_text& adaptive = scores[index_of(all, "snapkv_adaptive", 25)];
    CHECK(adaptive.steady_bytes >= 64.0 / 256);
    CHECK(adaptive.steady_bytes <= 72.0 / 256);
}

TEST_CASE("retention: what demotes holds more tokens in the bytes of its budget") {
    const auto tokens = some_tokens(512);
    const std::vector<text_window> windows = {{tokens, 0}};
    const auto all = contenders("blend,blend_int8,blend_int4", "50,25,12.5");
    const auto scores = score(windows, all, options_of("f16", 32));
    for (const double percent : {50.0, 25.0, 12.5}) {
        CAPTURE(percent);
        const retained_text& plain = scores[index_of(all, "blend", percent)];
        const retained_text& int8 = scores[index_of(all, "blend_int8", percent)];
        const retained_text& int4 = scores[index_of(all, "blend_int4", percent)];
        CHECK(plain.steady_bytes == doctest::Approx(percent / 100));
        // In whole blocks, of which those of int4 are smaller.
        CHECK(int8.steady_bytes <= percent / 100 + 16.0 / 512);
        CHECK(int4.steady_bytes <= percent / 100 + 16.0 / 512);
        if (percent < 50) CHECK(int8.steady_bytes >= percent / 100 - 32.0 / 512);
        if (percent < 25) CHECK(int4.steady_bytes >= percent / 100 - 32.0 / 512);
        CHECK(int8.sums.mean_divergence() < plain.sums.mean_divergence());
    }
    // By hand: of 128 tokens 48 are counted as f16, and 80 tokens' bytes hold 80 / share others.
    CHECK(tokens_for(128, 0.5) == 48 + 160);
    CHECK(tokens_for(128, 0.28125) == 48 + 284);
    CHECK(tokens_for(40, 0.25) == 40);
}

TEST_CASE("retention: numbers do not depend on what else is evaluated") {
    const auto tokens = some_tokens(220);
    const std::vector<text_window> windows = {{{tokens.begin(), tokens.begin() + 120}, 8},
                                              {{tokens.begin() + 100, tokens.end()}, 8}};
    const std::vector<double> budgets = {50, 25, 12.5, 6};
    for (const char* format : {"f16", "int8_token+rotate"}) {
        CAPTURE(format);
        const auto methods = methods_stored_as(*parse_configuration(format), *parse_methods("all"));
        const bool coded = std::string_view(format) != "f16";
        CHECK(methods.size() == retention_methods().size() - (coded ? 2 : 0));
        const auto all = contenders_of(methods, budgets);
        const auto together = score(windows, all, options_of(format, 16));
        for (const retention_method* method : methods) {
            const retention_method& one = *method;
            CAPTURE(one.name);
            const auto few = contenders(one.name, "12.5");
            const auto alone = score(windows, few, options_of(format, 16));
            const auto& here = together[index_of(all, one.name, 12.5)];
            const auto& there = alone[index_of(few, one.name, 12.5)];
            check_same(here.sums, there.sums);
            check_same(here.reference, there.reference);
            CHECK(here.steady_bytes == there.steady_bytes);
            CHECK(here.peak_bytes == there.peak_bytes);
        }
    }
}

TEST_CASE("retention: windows that do not fit the model are errors") {
    const auto all = contenders("full", "50");
    const std::vector<text_window> windows = {{some_tokens(513), 0}};
    auto scores = score_windows(model_of_two_heads(), windows, all, options_of("f16", 16),
                                [](std::size_t, std::size_t) {});
    REQUIRE_FALSE(scores);
    CHECK(scores.message().find("a window of 513 tokens, this model takes 2 to 512") !=
          std::string::npos);
}

TEST_CASE("retention: tasks are answered from what was left of the context") {
    const auto tokens = some_tokens(140);
    const auto part = [&](std::size_t first, std::size_t count) {
        return std::vector<token_id>(tokens.begin() + static_cast<std::ptrdiff_t>(first),
                                     tokens.begin() + static_cast<std::ptrdiff_t>(first + count));
    };
    task_context context;
    context.tokens = part(0, 80);
    context.probes = {{task::needle, 0, part(100, 3), {}}, {task::copy, 1, part(105, 9), {}}};
    // Right is what the model says by itself that sees all; or, below, the sinks and the last of
    // 20 tokens, of the context or of context and question.
    const auto answer = [&](const visibility& sees) {
        for (probe& one : context.probes) {
            one.answer.clear();
            auto read = context.tokens;
            read.insert(read.end(), one.cue.begin(), one.cue.end());
            for (int i = 0; i < 4; ++i) {
                const auto logits = dense_logits(read, model_of_two_heads(), sees);
                one.answer.push_back(generate::greedy_token(std::span(logits).last(vocabulary)));
                read.push_back(one.answer.back());
            }
        }
    };
    const auto all = contenders("streaming,snapkv_adaptive,h2o", "25");
    const auto run = [&] {
        auto scores = run_tasks(model_of_two_heads(), {&context, 1}, all, options_of("f32", 16),
                                [](std::size_t, std::size_t) {});
        REQUIRE_MESSAGE(scores, (scores ? std::string() : scores.message()));
        return std::move(*scores);
    };
    answer(nullptr);
    const auto whole = run();
    double loss = 0;
    for (const probe& one : context.probes) {
        auto read = context.tokens;
        read.insert(read.end(), one.cue.begin(), one.cue.end());
        for (const token_id token : one.answer) {
            const auto logits = dense_logits(read, model_of_two_heads());
            loss += loss_of(std::span(logits).last(vocabulary), token);
            read.push_back(token);
        }
    }
    for (const bool seen : {false, true}) {
        const retained_tasks& full = whole[index_of(all, "full", 25)];
        const task_answers& answers = seen ? full.seen : full.unseen;
        CHECK(answers.tokens == 8);
        CHECK(answers.loss == doctest::Approx(loss).epsilon(1e-5));
    }
    for (const bool seen : {false, true}) {
        const retained_tasks& full = whole[index_of(all, "full", 25)];
        const task_scores& scores = (seen ? full.seen : full.unseen).scores;
        CHECK(scores.needle[0].right == 1);
        CHECK(scores.needle[0].all == 1);
        CHECK(scores.copy[1].right == 4);
        CHECK(scores.copy[1].all == 4);
    }
    for (const bool seen : {false, true}) {
        CAPTURE(seen);
        for (std::size_t i = 0; i < 2; ++i) {
            const std::size_t before = 80 + (seen ? context.probes[i].cue.size() - 1 : 0);
            answer([=](std::size_t query, std::size_t key) {
                return query < before || key < 4 || key + 16 >= before;
            });
            const auto found = run()[index_of(all, "streaming", 25)];
            const task_scores& scores = (seen ? found.seen : found.unseen).scores;
            if (i == 0) {
                CHECK(scores.needle[0].right == 1);
            } else {
                CHECK(scores.copy[1].right == 4);
            }
        }
    }
}

TEST_CASE("retention: needles are asked for together behind the right answers to those before") {
    const auto tokens = some_tokens(140);
    const auto part = [&](std::size_t first, std::size_t count) {
        return std::vector<token_id>(tokens.begin() + static_cast<std::ptrdiff_t>(first),
                                     tokens.begin() + static_cast<std::ptrdiff_t>(first + count));
    };
    task_context context;
    context.tokens = part(0, 80);
    context.joint_cue = part(115, 6);
    context.probes = {{task::needle, 0, part(100, 3), {}},
                      {task::copy, 1, part(103, 2), part(125, 3)},
                      {task::needle, 2, part(105, 5), {}}};
    const auto all = contenders("streaming", "25");
    auto options = options_of("f32", 16);
    options.together = true;
    for (const bool seen : {false, true}) {
        for (const bool evicts : {false, true}) {
            CAPTURE(seen);
            CAPTURE(evicts);
            // What was read before the round: of that, 4 sinks and the last 16 stay.
            const std::size_t before = 80 + (seen ? context.joint_cue.size() - 1 : 0);
            auto read = context.tokens;
            read.insert(read.end(), context.joint_cue.begin(), context.joint_cue.end());
            for (probe& one : context.probes) {
                if (one.kind != task::needle) {
                    continue;
                }
                one.answer.clear();
                read.insert(read.end(), one.cue.begin(), one.cue.end());
                for (int i = 0; i < 4; ++i) {
                    const auto logits = dense_logits(
                        read, model_of_two_heads(), [&](std::size_t query, std::size_t key) {
                            return !evicts || query < before || key < 4 || key + 16 >= before;
                        });
                    one.answer.push_back(
                        generate::greedy_token(std::span(logits).last(vocabulary)));
                    read.push_back(one.answer.back());
                }
            }
            auto scores = run_tasks(model_of_two_heads(), {&context, 1}, all, options,
                                    [](std::size_t, std::size_t) {});
            REQUIRE_MESSAGE(scores, (scores ? std::string() : scores.message()));
            const retained_tasks& found =
                (*scores)[index_of(all, evicts ? "streaming" : "full", 25)];
            const task_answers& answers = seen ? found.seen_together : found.unseen_together;
            CHECK(answers.tokens == 8);
            for (const std::size_t depth : {0, 2}) {
                CHECK(answers.scores.needle[depth].right == 1);
                CHECK(answers.scores.needle[depth].all == 1);
            }
            CHECK(answers.scores.all_copied().all == 0);
        }
    }
    context.joint_cue.clear();
    CHECK_FALSE(run_tasks(model_of_two_heads(), {&context, 1}, all, options,
                          [](std::size_t, std::size_t) {}));
}

TEST_CASE("retention: the full cache writes what the model does, and streaming what is left") {
    const std::vector<std::vector<token_id>> prompts = {some_tokens(9), some_tokens(30)};
    const auto all = contenders("streaming,tova", "50");
    auto texts = write_texts(model_of_two_heads(), prompts, 50, std::nullopt, all,
                             options_of("f32", 16), [](std::size_t, std::size_t) {});
    REQUIRE_MESSAGE(texts, (texts ? std::string() : texts.message()));
    REQUIRE(texts->size() == all.size());
    for (std::size_t i = 0; i < 2; ++i) {
        CAPTURE(i);
        for (const bool evicts : {false, true}) {
            CAPTURE(evicts);
            const std::size_t prompt = prompts[i].size();
            const std::size_t budget = contender{&full_cache(), 50}.budget(prompt + 50);
            // The first round comes when the budget is exceeded, the others sixteen tokens apart.
            std::vector<std::size_t> first_seen;  // by position: the first of the recent ones
            std::size_t first = 4, since = 0;
            for (std::size_t position = 0; position < prompt + 50; ++position) {
                first_seen.push_back(first);
                const std::size_t left = position + 1 - first;
                if (++since >= writing_interval && left + 4 > budget) {
                    first = position + 1 - (budget - 4);
                    since = 0;
                }
            }
            auto read = prompts[i];
            for (int k = 0; k < 50; ++k) {
                const auto logits = dense_logits(
                    read, model_of_two_heads(), [&](std::size_t query, std::size_t key) {
                        return !evicts || key < 4 || key >= first_seen[query];
                    });
                read.push_back(generate::greedy_token(std::span(logits).last(vocabulary)));
            }
            const auto& written =
                (*texts)[index_of(all, evicts ? "streaming" : "full", 50)][i].tokens;
            CHECK(written == std::vector<token_id>(
                                 read.begin() + static_cast<std::ptrdiff_t>(prompt), read.end()));
        }
    }
    // A token that would end a text is never written.
    const token_id banned = (*texts)[0][0].tokens[3];
    auto without = write_texts(model_of_two_heads(), prompts, 50, banned, all,
                               options_of("f32", 16), [](std::size_t, std::size_t) {});
    REQUIRE(without);
    for (const auto& of_contender : *without) {
        for (const written_text& text : of_contender) {
            CHECK(text.tokens.size() == 50);
            CHECK(std::count(text.tokens.begin(), text.tokens.end(), banned) == 0);
        }
    }
}

TEST_CASE("retention: how much of a text has been there before") {
    CHECK(repeated_share(std::vector<token_id>{}, 4) == 0);
    CHECK(repeated_share(std::vector<token_id>{1, 2, 3}, 4) == 0);
    CHECK(repeated_share(std::vector<token_id>{1, 2, 3, 4, 5}, 4) == 0);
    // 1234 2341 3412 4123 1234: one of five.
    CHECK(repeated_share(std::vector<token_id>{1, 2, 3, 4, 1, 2, 3, 4}, 4) == 0.2);
    // The same pair over and over: nine runs, of which two are new.
    CHECK(repeated_share(std::vector<token_id>{7, 8, 7, 8, 7, 8, 7, 8, 7, 8, 7, 8}, 4) ==
          doctest::Approx(7.0 / 9));
    CHECK(repeated_share(std::vector<token_id>{5, 5, 5}, 1) == doctest::Approx(2.0 / 3));
}
