// The table of methods, how it becomes policies, and the command line that asks for them.
#include "evaluate/retention_methods.hpp"

#include <doctest/doctest.h>

#include <set>
#include <string>
#include <vector>

#include "evaluate/retention_command.hpp"

using namespace evaluate;

namespace {

const retention_method& method(std::string_view name) {
    for (const retention_method& one : retention_methods()) {
        if (one.name == name) {
            return one;
        }
    }
    FAIL("no such method");
    return full_cache();
}

std::string names(const std::vector<const retention_method*>& methods) {
    std::string all;
    for (const retention_method* one : methods) {
        all += std::string(all.empty() ? "" : " ") + std::string(one->name);
    }
    return all;
}

outcome<retention_command> parsed(std::vector<const char*> words) {
    words.insert(words.end(), {"--model", "m", "--text", "t"});
    return parse_retention(words);
}

}  // namespace

TEST_CASE("retention: the table has every scorer of the library but the host's") {
    kv_capabilities_report can = KV_INIT(kv_capabilities_report);
    REQUIRE(kv_capabilities(&can) == KV_OK);
    std::uint64_t scorers = 0;
    std::set<std::string_view> seen;
    for (const retention_method& one : retention_methods()) {
        CAPTURE(one.name);
        CHECK(seen.insert(one.name).second);
        CHECK(method_names().find(one.name) != std::string::npos);
        scorers |= one.keeps_all() ? 0 : std::uint64_t{1} << one.scorer;
    }
    CHECK(scorers == (can.scorers & ~(std::uint64_t{1} << KV_SCORER_HOST)));
    CHECK(full_cache().name == "full");
    CHECK(full_cache().keeps_all());
    CHECK(method("snapkv_adaptive").lane_per_head());
    CHECK_FALSE(method("snapkv").lane_per_head());
}

TEST_CASE("retention: lists of methods always have what they are judged by") {
    auto some = parse_methods("tova,streaming");
    REQUIRE(some);
    CHECK(names(*some) == "full random_pp streaming tova");
    CHECK(names(*parse_methods("full")) == "full random_pp");
    CHECK(parse_methods("all")->size() == retention_methods().size());
    for (const char* wrong : {"", "snapkv,", "snap", "all,snapkv"}) {
        CAPTURE(wrong);
        CHECK_FALSE(parse_methods(wrong));
    }
}

TEST_CASE("retention: budgets are percents, from the largest") {
    auto budgets = parse_budgets("6,50,12.5,50");
    REQUIRE(budgets);
    CHECK(*budgets == std::vector<double>{50, 12.5, 6});
    for (const char* wrong : {"", "0", "101", "25,", "25 %", "nan", "-5"}) {
        CAPTURE(wrong);
        CHECK_FALSE(parse_budgets(wrong));
    }
    CHECK(contender{&full_cache(), 12.5}.budget(2048) == 256);
    CHECK(contender{&full_cache(), 6}.budget(2048) == 123);  // 122.88
    CHECK(contender{&full_cache(), 0.1}.budget(100) == 1);

    const std::vector<const retention_method*> two = {&method("full"), &method("h2o")};
    const auto all = contenders_of(two, *budgets);
    REQUIRE(all.size() == 6);
    CHECK(all[2].method->name == "full");
    CHECK(all[3].method->name == "h2o");
    CHECK(all[3].percent == 12.5);
}

TEST_CASE("retention: guards leave a score something to decide") {
    // SnapKV keeps its window of 64, or half of a budget that is smaller.
    CHECK(policy_of(method("snapkv"), 512, 64, 1, 0).recent == 64);
    CHECK(policy_of(method("snapkv"), 61, 64, 1, 0).recent == 30);
    CHECK(policy_of(method("h2o"), 512, 64, 1, 0).recent == 256);

    // Of the prompt at most half a budget, then half of what is left.
    const kv_policy roomy = policy_of(method("random_pp"), 512, 64, 16, 7);
    CHECK(roomy.prompt_tokens == 64);
    CHECK(roomy.recent == 64);
    CHECK(roomy.every == 16);
    CHECK(roomy.seed == 7);
    CHECK(roomy.scorer == KV_SCORER_RANDOM);
    CHECK(roomy.flags == KV_POLICY_PROTECT_PROMPT);
    const kv_policy narrow = policy_of(method("random_pp"), 61, 64, 16, 7);
    CHECK(narrow.prompt_tokens == 30);
    CHECK(narrow.recent == 15);
    CHECK(policy_of(method("random_pp"), 61, 0, 16, 7).flags == 0);  // the library wants a prompt

    CHECK(policy_of(method("blend"), 512, 64, 1, 0).value_reserve == 0);
    const retention_method* both[] = {&full_cache(), &method("blend")};
    const auto reserving = with_value_reserve(both, 12);
    CHECK(reserving[0].value_reserve == 0);
    CHECK(policy_of(reserving[1], 512, 64, 1, 0).value_reserve == 61);  // 61.44
    CHECK(policy_of(reserving[1], 512, 64, 1, 0).recent == 64);
    const kv_policy tiny = policy_of(method("expected_attention"), 3, 64, 1, 0);
    CHECK(tiny.sinks == 3);
    CHECK(tiny.recent == 0);
    CHECK(policy_of(method("key_norm"), 100, 64, 1, 0).skip_layers == 2);
}

TEST_CASE("retention: the command line") {
    auto plain = parsed({});
    REQUIRE(plain);
    CHECK(plain->methods.size() == retention_methods().size());
    CHECK(plain->budgets == std::vector<double>{50, 25, 12.5, 6});
    CHECK(plain->stored.name == "f16");

    auto chosen = parsed({"--methods", "snapkv", "--budgets", "25", "--format",
                          "int8_token+rotate/int4_token+rotate@2", "--tokens", "0", "--contexts",
                          "2", "--context-tokens", "512,4096", "--prompts", "0", "--threads", "2",
                          "--value-reserve", "25"});
    REQUIRE_MESSAGE(chosen, (chosen ? std::string() : chosen.message()));
    CHECK(names(chosen->methods) == "full random_pp snapkv");
    CHECK(chosen->stored.storage.values.format == KV_FORMAT_INT4_TOKEN);
    CHECK(chosen->stored.edge_layers == 2);
    CHECK(chosen->tokens == 0);
    CHECK(chosen->contexts == 2);
    CHECK(chosen->context_tokens == std::vector<std::uint32_t>{512, 4096});
    CHECK(chosen->prompts == 0);
    CHECK(chosen->threads == 2);
    CHECK(chosen->value_reserve == 25);

    const auto refused = [&](std::vector<const char*> words, std::string_view part) {
        auto read = parsed(std::move(words));
        REQUIRE_FALSE(read);
        CAPTURE(read.message());
        return read.message().find(part) != std::string::npos;
    };
    CHECK(refused({"--methods", "snapkv,lru"}, "'lru' is no method, there are: full"));
    CHECK(refused({"--budgets", "0"}, "--budgets: budget '0'"));
    CHECK(refused({"--value-reserve", "101"}, "--value-reserve"));
    CHECK(refused({"--format", "int3"}, "--format: configuration 'int3'"));
    CHECK(refused({"--tokens", "100"}, "--tokens is 100, less than a --window of 2048"));
    CHECK(refused({"--tokens", "0", "--contexts", "0", "--prompts", "0"}, "nothing is left"));
    CHECK(refused({"--context-tokens", "512,"}, "--context-tokens is ''"));
    CHECK(refused({"--tasks", "1"}, "'--tasks' is not an option beside --retention"));
    CHECK_FALSE(parse_retention(std::vector<const char*>{"--model", "m"}));
    CHECK(parse_retention(std::vector<const char*>{"--help"})->help);
    CHECK(retention_usage().find("snapkv_adaptive") != std::string::npos);
}
