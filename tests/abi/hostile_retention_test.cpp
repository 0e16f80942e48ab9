// Wrong input to kv_pool_policy_footprint and kv_seq_get_retention, and the largest that is right.
#include "abi/world.hpp"

using namespace abi;

namespace {

kv_policy good_policy() {
    kv_policy policy = KV_INIT(kv_policy);
    policy.scorer = KV_SCORER_STREAMING;
    policy.budget = 16;
    policy.every = 8;
    return policy;
}

TEST_CASE("kv_pool_policy_footprint") {
    const live_pool pool;
    const kv_seq seq = pool.create_sequence();
    const target attacked = {pool, {seq}};
    const kv_policy policy = good_policy();
    kv_policy_footprint footprint = KV_INIT(kv_policy_footprint);
    REFUSES(target{}, KV_INVALID, "pool", kv_pool_policy_footprint(nullptr, &policy, &footprint));
    REFUSES(attacked, KV_INVALID, "policy", kv_pool_policy_footprint(pool, nullptr, &footprint));
    REFUSES(attacked, KV_INVALID, "footprint", kv_pool_policy_footprint(pool, &policy, nullptr));
    refuses_wrong_headers(attacked, "policy", policy, [&](const kv_policy* wrong) {
        return kv_pool_policy_footprint(pool, wrong, &footprint);
    });
    refuses_wrong_headers(attacked, "footprint", footprint, [&](kv_policy_footprint* wrong) {
        return kv_pool_policy_footprint(pool, &policy, wrong);
    });
    // Nothing was written by all of these.
    const kv_policy_footprint untouched = KV_INIT(kv_policy_footprint);
    CHECK(std::memcmp(&footprint, &untouched, sizeof footprint) == 0);

    using change = void (*)(kv_policy&);
    struct attack {
        kv_status expected;
        const char* word;
        change apply;
    };
    const attack attacks[] = {
        {KV_INVALID, "every", [](kv_policy& p) { p.every = 0; }},
        {KV_INVALID, "budget", [](kv_policy& p) { p.budget = 0; }},
        {KV_UNSUPPORTED, "scorer", [](kv_policy& p) { p.scorer = UINT32_MAX; }},
        {KV_UNSUPPORTED, "selection", [](kv_policy& p) { p.selection = 5; }},
        {KV_UNSUPPORTED, "allocator", [](kv_policy& p) { p.allocator = 5; }},
        {KV_UNSUPPORTED, "LANE_PER_HEAD", [](kv_policy& p) { p.allocator = KV_ALLOCATE_ADAPTIVE; }},
        {KV_UNSUPPORTED, "reserved1", [](kv_policy& p) { p.reserved1 = 1; }},
    };
    for (const attack& a : attacks) {
        kv_policy wrong = policy;
        a.apply(wrong);
        refuses(attacked, a.expected, a.word, "policy",
                [&] { return kv_pool_policy_footprint(pool, &wrong, &footprint); });
    }
    for (const uint64_t wrong : {uint64_t{1} << 31, uint64_t{UINT32_MAX}, UINT64_MAX}) {
        CAPTURE(wrong);
        kv_policy_footprint asked = KV_INIT(kv_policy_footprint);
        asked.step_tokens = wrong;
        REFUSES(attacked, KV_TOO_LARGE, "step_tokens",
                kv_pool_policy_footprint(pool, &policy, &asked));
        asked.step_tokens = 0;
        asked.tokens = wrong;
        REFUSES(attacked, KV_TOO_LARGE, "tokens", kv_pool_policy_footprint(pool, &policy, &asked));
    }
    // Results of before are no input.
    footprint.tokens_after_round = footprint.tokens_steady = UINT64_MAX;
    footprint.blocks_steady = footprint.bytes_steady = UINT64_MAX;
    ACCEPTS(kv_pool_policy_footprint(pool, &policy, &footprint));
    CHECK(footprint.tokens_after_round == 16);
    CHECK(footprint.tokens_steady == 16 + 7 + 1);
    CHECK(footprint.blocks_steady == 2 + 4);
}

TEST_CASE("kv_pool_policy_footprint: the largest numbers add up in 64 bits, and are too large") {
    const live_pool pool;
    const kv_seq seq = pool.create_sequence();
    const target attacked = {pool, {seq}};
    kv_policy policy = good_policy();
    policy.flags = KV_POLICY_PROTECT_PROMPT | KV_POLICY_PROMPT_ON_TOP;
    policy.budget = policy.every = policy.slack = UINT32_MAX;
    policy.prompt_tokens = policy.sinks = policy.recent = UINT32_MAX;
    for (const uint32_t allocator :
         {KV_ALLOCATE_UNIFORM, KV_ALLOCATE_PYRAMID, KV_ALLOCATE_THRESHOLD}) {
        CAPTURE(allocator);
        policy.allocator = allocator;
        policy.steepness = allocator == KV_ALLOCATE_PYRAMID ? 4096 : 0;
        kv_policy_footprint footprint = KV_INIT(kv_policy_footprint);
        footprint.step_tokens = footprint.tokens = (uint64_t{1} << 31) - 1;
        REFUSES(attacked, KV_TOO_LARGE,
                "8589934590 tokens after a round, 4294967294 before the next one and 2147483647 of "
                "a step",
                kv_pool_policy_footprint(pool, &policy, &footprint));
    }
}

TEST_CASE("kv_seq_get_retention") {
    const live_pool pool;
    const kv_seq seq = pool.create_sequence();
    const kv_seq stale = pool.create_sequence();
    REQUIRE(kv_seq_release(pool, stale) == KV_OK);
    pool.append(seq, 40);
    const target attacked = {pool, {seq}};
    kv_retention_info info = KV_INIT(kv_retention_info);
    REFUSES(target{}, KV_INVALID, "pool", kv_seq_get_retention(nullptr, seq, &info));
    REFUSES(attacked, KV_INVALID, "info", kv_seq_get_retention(pool, seq, nullptr));
    REFUSES(attacked, KV_STALE, "seq", kv_seq_get_retention(pool, stale, &info));
    REFUSES(attacked, KV_INVALID, "seq", kv_seq_get_retention(pool, 0, &info));
    REFUSES(attacked, KV_INVALID, "seq", kv_seq_get_retention(pool, UINT64_MAX, &info));
    refuses_wrong_headers(attacked, "info", info, [&](kv_retention_info* wrong) {
        return kv_seq_get_retention(pool, seq, wrong);
    });
    for (const uint32_t wrong : {3u, 1024u, UINT32_MAX}) {
        info.layer = wrong;
        REFUSES(attacked, KV_INVALID, "layer", kv_seq_get_retention(pool, seq, &info));
        info.layer = 0;
        info.kv_head = wrong;
        REFUSES(attacked, KV_INVALID, "KV head", kv_seq_get_retention(pool, seq, &info));
    }
    info.kv_head = 2;
    REFUSES(attacked, KV_INVALID, "KV head 2", kv_seq_get_retention(pool, seq, &info));
    CHECK(info.rounds == 0);
    info.kv_head = 1;
    for (const uint32_t layer : {0u, 1u, 2u}) {  // full, with a window, sharing
        info.layer = layer;
        info.rounds = info.tokens_removed = info.blocks_returned = 99;
        ACCEPTS(kv_seq_get_retention(pool, seq, &info));
        CHECK(info.rounds == 0);
        CHECK(info.tokens_removed == 0);
        CHECK(info.blocks_returned == 0);
        CHECK(info.layer == layer);
        CHECK(info.kv_head == 1);
    }
}

}  // namespace
