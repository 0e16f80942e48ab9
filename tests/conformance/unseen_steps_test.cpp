// Steps that are not observed, since no round of the policy counts their query: what stays is the
// same, and rounds that come early keep what nobody has seen.
#include "tracker.hpp"

using namespace conformance;

namespace {

pool_shape shape_of() {
    layer_shape layer;
    layer.kv_heads = 2;
    layer.query_heads = 6;
    layer.key_dim = layer.value_dim = 32;
    layer.key_format = layer.value_format = KV_FORMAT_F32;
    pool_shape shape;
    shape.layers = {layer, layer};
    shape.slabs = 8;
    shape.max_tokens = 512;
    shape.max_observed_sequences = 3;
    return shape;
}

kv_compress_report compressed(engine& host, kv_seq sequence) {
    kv_compress_report report = KV_INIT(kv_compress_report);
    require_ok(kv_compress(host.pool(), sequence, nullptr, &report));
    return report;
}

}  // namespace

TEST_CASE("observations: steps whose query the next round does not count are left out") {
    // Beside each sequence one that nothing is left out of, since it calls for its rounds itself:
    // the same tokens stay, round after round.
    struct method {
        uint32_t scorer, window;
        void (*change)(kv_policy&);
    };
    const method methods[] = {
        {KV_SCORER_TOVA, 0, [](kv_policy& p) { p.every = 16; }},
        {KV_SCORER_SNAPKV, 8, [](kv_policy& p) { p.every = 16; }},
        {KV_SCORER_SCISSORHANDS, 8, [](kv_policy& p) { p.every = 24; }},
        {KV_SCORER_RKV, 4, [](kv_policy& p) { p.every = 16; }},
        {KV_SCORER_SNAPKV, 8, [](kv_policy& p) { p.every = 40; }},
        {KV_SCORER_TOVA, 0, [](kv_policy& p) { p.slack = 11; }},
    };
    for (const method& m : methods) {
        CAPTURE(m.scorer);
        engine host(shape_of());
        kv_policy policy = policy_of(m.scorer, 50);
        policy.window = m.window;
        policy.recent = 5;
        kv_policy by_hand = policy;
        m.change(policy);
        const kv_seq automatic = host.create(&policy), all = host.create(&by_hand);
        host.run({{automatic, 3, 60}});
        host.run({{all, 3, 60}});
        require_ok(kv_compress(host.pool(), automatic, nullptr, nullptr));
        require_ok(kv_compress(host.pool(), all, nullptr, nullptr));
        uint32_t rounds = 0, unlike = 0;
        uint64_t since = 0;
        for (uint32_t step = 0; step < 130; ++step) {
            const uint64_t before = host.info(automatic).compactions;
            // Drafts now and then, far from rounds, that end where windows may.
            const uint32_t rows = since == 3 && m.window != 4 ? 2 : 1;
            host.run({{automatic, 3, rows}});
            host.run({{all, 3, rows}});
            since += rows;
            unlike += host.scores(automatic, 1, 0) != host.scores(all, 1, 0) ? 1 : 0;
            if (host.info(automatic).compactions == before) continue;
            since = 0;
            ++rounds;
            // The window of `all` is exact in steps that are a multiple of it behind a round.
            require_ok(kv_compress(host.pool(), all, nullptr, nullptr));
            for (uint32_t head = 0; head < 2; ++head) {
                CHECK(host.positions(automatic, 1, head) == host.positions(all, 1, head));
            }
        }
        CHECK(rounds >= 3);
        CHECK(unlike > 20);
    }
}

TEST_CASE("observations: a round that the host asks for keeps what came in steps left out") {
    engine host(shape_of());
    kv_policy policy = policy_of(KV_SCORER_SNAPKV, 20);
    policy.window = 4;
    policy.recent = 2;
    policy.every = 128;
    const kv_seq sequence = host.create(&policy);
    host.run({{sequence, 3, 50}});
    for (int i = 0; i < 12; ++i) host.run({{sequence, 3, 1}});
    const kv_compress_report report = compressed(host, sequence);
    CHECK(report.outcome == KV_COMPRESS_DONE);
    const std::vector<uint32_t> kept = host.positions(sequence, 1, 0);
    CHECK(kept.size() == 20);
    for (uint32_t i = 0; i < 12; ++i) CHECK(kept[kept.size() - 12 + i] == 50 + i);
    // 30 more have a budget of 20 hold no less than they are.
    for (int i = 0; i < 30; ++i) host.run({{sequence, 3, 1}});
    compressed(host, sequence);
    const std::vector<uint32_t> late = host.positions(sequence, 1, 0);
    CHECK(late.size() == 42);
    CHECK(late.front() == 50);
    // Nothing is left out where the host alone asks for rounds.
    policy.every = 0;
    const kv_seq by_hand = host.create(&policy);
    host.run({{by_hand, 3, 50}});
    for (int i = 0; i < 12; ++i) host.run({{by_hand, 3, 1}});
    const std::vector<float> before = host.scores(by_hand, 1, 0);
    host.run({{by_hand, 3, 1}});
    CHECK(host.scores(by_hand, 1, 0)[0] != before[0]);
    compressed(host, by_hand);
    CHECK(host.positions(by_hand, 1, 0).size() == 20);
}
