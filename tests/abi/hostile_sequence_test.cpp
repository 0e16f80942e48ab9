// Wrong input to the calls on pools, sequences and statistics.
#include "abi/hostile_sequence.hpp"

#include <cmath>
#include <limits>

using namespace abi;

namespace {

TEST_CASE("kv_pool_pass_fence, kv_pool_check") {
    REFUSES(target{}, KV_INVALID, "pool", kv_pool_pass_fence(nullptr, 1));
    REFUSES(target{}, KV_INVALID, "pool", kv_pool_check(nullptr));
    const populated plain;
    REFUSES(plain.attacked, KV_INVALID, "KV_POOL_HOST_FENCES", kv_pool_pass_fence(plain.pool, 1));
    const populated fenced(small_config(KV_POOL_HOST_FENCES));
    REFUSES(fenced.attacked, KV_INVALID, "fence", kv_pool_pass_fence(fenced.pool, 0));
    REFUSES(fenced.attacked, KV_INVALID, "fence", kv_pool_pass_fence(fenced.pool, 2));
    REFUSES(fenced.attacked, KV_INVALID, "fence", kv_pool_pass_fence(fenced.pool, UINT64_MAX));
    kv_step* step = fenced.pool.begin();
    REFUSES(fenced.attacked, KV_INVALID, "fence", kv_pool_pass_fence(fenced.pool, 2));
    ACCEPTS(kv_pool_pass_fence(fenced.pool, 1));
    ACCEPTS(kv_pool_pass_fence(fenced.pool, 1));
    CHECK(kv_step_cancel(step) == KV_OK);
}

TEST_CASE("kv_seq_create") {
    const populated w;
    kv_seq seq = 77;
    REFUSES(target{}, KV_INVALID, "pool", kv_seq_create(nullptr, nullptr, &seq));
    CHECK(seq == 0);
    REFUSES(w.attacked, KV_INVALID, "out_seq", kv_seq_create(w.pool, nullptr, nullptr));
    refuses_wrong_headers(w.attacked, "config", KV_INIT(kv_seq_config),
                          [&](const kv_seq_config* wrong) {
                              seq = 77;
                              const kv_status verdict = kv_seq_create(w.pool, wrong, &seq);
                              CHECK(seq == 0);
                              return verdict;
                          });
    refuses_wrong_headers(w.attacked, "policy", good_policy(), [&](const kv_policy* wrong) {
        kv_seq_config config = KV_INIT(kv_seq_config);
        config.policy = wrong;
        return kv_seq_create(w.pool, &config, &seq);
    });
    for (int i = 0; i < 6; ++i) ACCEPTS(kv_seq_create(w.pool, nullptr, &seq));
    REFUSES(w.attacked, KV_LIMIT, "max_sequences", kv_seq_create(w.pool, nullptr, &seq));
    CHECK(seq == 0);
}

TEST_CASE("kv_seq_release is idempotent and knows what never was a handle") {
    const populated w;
    REFUSES(target{}, KV_INVALID, "pool", kv_seq_release(nullptr, w.full));
    const snapshot before(w.pool, w.attacked.sequences);
    ACCEPTS(kv_seq_release(w.pool, w.stale));
    ACCEPTS(kv_seq_release(w.pool, w.stale));
    CHECK(snapshot(w.pool, w.attacked.sequences) == before);
    REFUSES(w.attacked, KV_INVALID, "seq", kv_seq_release(w.pool, 0));
    REFUSES(w.attacked, KV_INVALID, "seq", kv_seq_release(w.pool, absent_index | kv_seq{1} << 32));
}

TEST_CASE("kv_seq_fork") {
    const populated w;
    kv_seq children[16] = {1, 2, 3};
    REFUSES(target{}, KV_INVALID, "pool", kv_seq_fork(nullptr, w.full, 1, children));
    w.refuses_handles([&](kv_seq seq) { return kv_seq_fork(w.pool, seq, 1, children); });
    REFUSES(w.attacked, KV_INVALID, "count", kv_seq_fork(w.pool, w.full, 0, children));
    REFUSES(w.attacked, KV_INVALID, "out_children", kv_seq_fork(w.pool, w.full, 1, nullptr));
    REFUSES(w.attacked, KV_LIMIT, "max_sequences", kv_seq_fork(w.pool, w.full, 7, children));
    REFUSES(w.attacked, KV_LIMIT, "max_sequences",
            kv_seq_fork(w.pool, w.full, UINT32_MAX, children));
    CHECK(children[0] == 1);
    ACCEPTS(kv_seq_fork(w.pool, w.full, 6, children));
}

TEST_CASE("kv_seq_truncate") {
    const populated w;
    REFUSES(target{}, KV_INVALID, "pool", kv_seq_truncate(nullptr, w.full, 0));
    w.refuses_handles([&](kv_seq seq) { return kv_seq_truncate(w.pool, seq, 0); });
    REFUSES(w.attacked, KV_INVALID, "tokens_seen", kv_seq_truncate(w.pool, w.full, 41));
    REFUSES(w.attacked, KV_INVALID, "tokens_seen", kv_seq_truncate(w.pool, w.full, UINT64_MAX));
    REFUSES(w.attacked, KV_INVALID, "tokens_seen", kv_seq_truncate(w.pool, w.empty, 1));
    ACCEPTS(kv_seq_truncate(w.pool, w.full, 40));
    kv_step* step = w.pool.reserve(w.full, 1);
    REFUSES(w.attacked, KV_INVALID, "step", kv_seq_truncate(w.pool, w.full, 10));
    CHECK(kv_step_cancel(step) == KV_OK);
    // Layer 1 sees 32 positions and its sinks: at 100 what a query at 50 needs is gone.
    w.pool.append(w.full, 60);
    REFUSES(w.attacked, KV_NO_SNAPSHOT, "layer 1", kv_seq_truncate(w.pool, w.full, 50));
    ACCEPTS(kv_seq_truncate(w.pool, w.full, 99));
}

TEST_CASE("kv_seq_pin, kv_seq_unpin") {
    const populated w;
    REFUSES(target{}, KV_INVALID, "pool", kv_seq_pin(nullptr, w.full, 0, 1));
    REFUSES(target{}, KV_INVALID, "pool", kv_seq_unpin(nullptr, w.full));
    w.refuses_handles([&](kv_seq seq) { return kv_seq_pin(w.pool, seq, 0, 1); });
    w.refuses_handles([&](kv_seq seq) { return kv_seq_unpin(w.pool, seq); });
    REFUSES(w.attacked, KV_INVALID, "count", kv_seq_pin(w.pool, w.full, 3, 0));
    ACCEPTS(kv_seq_pin(w.pool, w.full, UINT64_MAX, UINT64_MAX));
    for (int i = 1; i < 16; ++i) ACCEPTS(kv_seq_pin(w.pool, w.full, 0, UINT64_MAX));
    REFUSES(w.attacked, KV_LIMIT, "16", kv_seq_pin(w.pool, w.full, 0, 1));
    ACCEPTS(kv_seq_unpin(w.pool, w.full));
    ACCEPTS(kv_seq_unpin(w.pool, w.full));
    ACCEPTS(kv_seq_pin(w.pool, w.full, 0, 1));
}

TEST_CASE("pins that reach beyond 2^64 protect what they name") {
    const populated w;
    kv_policy policy = good_policy();
    policy.budget = 8;
    REQUIRE(kv_seq_set_policy(w.pool, w.full, &policy) == KV_OK);
    ACCEPTS(kv_seq_pin(w.pool, w.full, 5, UINT64_MAX));
    REQUIRE(kv_compress(w.pool, w.full, nullptr, nullptr) == KV_OK);
    uint32_t positions[64];
    uint64_t count = 0;
    REQUIRE(kv_seq_get_positions(w.pool, w.full, 0, 1, 64, positions, &count) == KV_OK);
    REQUIRE(count == 35);
    for (uint32_t i = 0; i < 35; ++i) CHECK(positions[i] == i + 5);
}

TEST_CASE("kv_seq_get_info, kv_seq_get_layer_info, kv_seq_get_positions") {
    const populated w;
    kv_seq_info info = KV_INIT(kv_seq_info);
    REFUSES(target{}, KV_INVALID, "pool", kv_seq_get_info(nullptr, w.full, &info));
    REFUSES(w.attacked, KV_INVALID, "out_info", kv_seq_get_info(w.pool, w.full, nullptr));
    w.refuses_handles([&](kv_seq seq) { return kv_seq_get_info(w.pool, seq, &info); });
    refuses_wrong_headers(w.attacked, "out_info", info, [&](kv_seq_info* wrong) {
        return kv_seq_get_info(w.pool, w.full, wrong);
    });

    kv_seq_layer_info layer = KV_INIT(kv_seq_layer_info);
    REFUSES(target{}, KV_INVALID, "pool", kv_seq_get_layer_info(nullptr, w.full, 0, &layer));
    REFUSES(w.attacked, KV_INVALID, "out_info", kv_seq_get_layer_info(w.pool, w.full, 0, nullptr));
    w.refuses_handles([&](kv_seq seq) { return kv_seq_get_layer_info(w.pool, seq, 0, &layer); });
    refuses_wrong_headers(w.attacked, "out_info", layer, [&](kv_seq_layer_info* wrong) {
        return kv_seq_get_layer_info(w.pool, w.full, 0, wrong);
    });
    for (const uint32_t wrong : {3u, 1024u, UINT32_MAX}) {
        REFUSES(w.attacked, KV_INVALID, "layer",
                kv_seq_get_layer_info(w.pool, w.full, wrong, &layer));
    }

    uint32_t positions[64] = {};
    uint64_t count = 0;
    const auto get = [&](kv_pool* pool, kv_seq seq, uint32_t of_layer, uint32_t head, uint64_t room,
                         uint32_t* out, uint64_t* out_count) {
        return kv_seq_get_positions(pool, seq, of_layer, head, room, out, out_count);
    };
    REFUSES(target{}, KV_INVALID, "pool", get(nullptr, w.full, 0, 0, 64, positions, &count));
    w.refuses_handles([&](kv_seq seq) { return get(w.pool, seq, 0, 0, 64, positions, &count); });
    REFUSES(w.attacked, KV_INVALID, "layer", get(w.pool, w.full, 3, 0, 64, positions, &count));
    REFUSES(w.attacked, KV_INVALID, "kv_head", get(w.pool, w.full, 0, 2, 64, positions, &count));
    REFUSES(w.attacked, KV_INVALID, "kv_head",
            get(w.pool, w.full, 0, UINT32_MAX, 64, positions, &count));
    REFUSES(w.attacked, KV_INVALID, "out_positions", get(w.pool, w.full, 0, 0, 1, nullptr, &count));
    REFUSES(w.attacked, KV_INVALID, "out_count", get(w.pool, w.full, 0, 0, 64, positions, nullptr));
    ACCEPTS(get(w.pool, w.full, 0, 0, 0, nullptr, &count));
    CHECK(count == 40);
    positions[3] = 99;
    ACCEPTS(get(w.pool, w.full, 0, 0, 3, positions, &count));
    CHECK(count == 40);
    CHECK(positions[2] == 2);
    CHECK(positions[3] == 99);
    ACCEPTS(get(w.pool, w.full, 2, 0, UINT64_MAX, positions, &count));
    CHECK(positions[39] == 39);
}

TEST_CASE("kv_compress") {
    const populated w;
    kv_compress_options options = KV_INIT(kv_compress_options);
    kv_compress_report report = KV_INIT(kv_compress_report);
    const kv_policy good = good_policy();
    options.policy = &good;
    REFUSES(target{}, KV_INVALID, "pool", kv_compress(nullptr, w.full, &options, &report));
    w.refuses_handles([&](kv_seq seq) { return kv_compress(w.pool, seq, &options, &report); });
    REFUSES(w.attacked, KV_INVALID, "policy", kv_compress(w.pool, w.full, nullptr, &report));
    refuses_wrong_headers(w.attacked, "options", options, [&](const kv_compress_options* wrong) {
        return kv_compress(w.pool, w.full, wrong, &report);
    });
    refuses_wrong_headers(w.attacked, "report", report, [&](kv_compress_report* wrong) {
        return kv_compress(w.pool, w.full, &options, wrong);
    });
    refuses_wrong_headers(w.attacked, "options.policy", good, [&](const kv_policy* wrong) {
        kv_compress_options other = options;
        other.policy = wrong;
        return kv_compress(w.pool, w.full, &other, &report);
    });
    ACCEPTS(kv_compress(w.pool, w.empty, &options, &report));
    CHECK(report.outcome == KV_COMPRESS_NOTHING);
    ACCEPTS(kv_compress(w.pool, w.full, &options, nullptr));
}

/// Statistics of layer 0: [4 query heads, 32 bands].
struct statistics_arrays {
    std::vector<float> numbers = std::vector<float>(3 * 4 * 32, 0.5f);
    kv_query_statistics statistics = KV_INIT(kv_query_statistics);

    statistics_arrays() {
        statistics.query_heads = query_heads;
        statistics.bands = key_dim / 2;
        statistics.tokens = 10;
        statistics.mean_real = numbers.data();
        statistics.mean_imaginary = numbers.data() + 4 * 32;
        statistics.mean_magnitude = numbers.data() + 2 * 4 * 32;
    }
};

TEST_CASE("kv_pool_set_statistics, kv_seq_get_statistics") {
    const populated w;
    statistics_arrays arrays;
    kv_query_statistics& good = arrays.statistics;
    REFUSES(target{}, KV_INVALID, "pool", kv_pool_set_statistics(nullptr, &good));
    REFUSES(target{}, KV_INVALID, "pool", kv_seq_get_statistics(nullptr, w.full, &good));
    REFUSES(w.attacked, KV_INVALID, "statistics", kv_pool_set_statistics(w.pool, nullptr));
    REFUSES(w.attacked, KV_INVALID, "statistics", kv_seq_get_statistics(w.pool, w.full, nullptr));
    w.refuses_handles([&](kv_seq seq) { return kv_seq_get_statistics(w.pool, seq, &good); });
    refuses_wrong_headers(w.attacked, "statistics", good, [&](kv_query_statistics* wrong) {
        return kv_pool_set_statistics(w.pool, wrong);
    });
    refuses_wrong_headers(w.attacked, "statistics", good, [&](kv_query_statistics* wrong) {
        return kv_seq_get_statistics(w.pool, w.full, wrong);
    });
    struct attack {
        const char* word;
        void (*change)(kv_query_statistics&);
    };
    using q = kv_query_statistics;
    const attack attacks[] = {
        {"layer", [](q& o) { o.layer = 3; }},
        {"layer", [](q& o) { o.layer = UINT32_MAX; }},
        {"layer 1", [](q& o) { o.layer = 1; }},  // a window
        {"layer 2", [](q& o) { o.layer = 2; }},  // shares layer 0's cache
        {"statistics", [](q& o) { o.query_heads = 0; }},
        {"statistics", [](q& o) { o.query_heads = UINT32_MAX; }},
        {"statistics", [](q& o) { o.bands = 31; }},
        {"statistics", [](q& o) { o.bands = UINT32_MAX; }},
        {"mean_real", [](q& o) { o.mean_real = nullptr; }},
        {"mean_imaginary", [](q& o) { o.mean_imaginary = nullptr; }},
        {"mean_magnitude", [](q& o) { o.mean_magnitude = nullptr; }},
        {"all or none", [](q& o) { o.variance_real = o.mean_real; }},
        {"all or none", [](q& o) { o.variance_imaginary = o.covariance = o.mean_real; }},
    };
    for (const attack& a : attacks) {
        kv_query_statistics wrong = good;
        a.change(wrong);
        REFUSES(w.attacked, KV_INVALID, a.word, kv_pool_set_statistics(w.pool, &wrong));
        REFUSES(w.attacked, KV_INVALID, a.word, kv_seq_get_statistics(w.pool, w.full, &wrong));
    }
    kv_query_statistics none = good;
    none.tokens = 0;
    REFUSES(w.attacked, KV_INVALID, "tokens", kv_pool_set_statistics(w.pool, &none));
    for (const std::size_t at : {std::size_t{0}, std::size_t{200}, arrays.numbers.size() - 1}) {
        arrays.numbers[at] = at == 200 ? std::numeric_limits<float>::infinity() : NAN;
        REFUSES(w.attacked, KV_INVALID, "finite", kv_pool_set_statistics(w.pool, &good));
        arrays.numbers[at] = 0.5f;
    }
    ACCEPTS(kv_pool_set_statistics(w.pool, &good));
    ACCEPTS(kv_seq_get_statistics(w.pool, w.full, &good));
    CHECK(good.tokens == 0);
    CHECK(arrays.numbers.front() == 0.0f);
}

TEST_CASE("kv_seq_fit_affine") {
    const populated w;
    std::vector<float> numbers(2 * kv_heads * key_dim, 7.0f);
    kv_affine_fit good = KV_INIT(kv_affine_fit);
    good.kv_heads = kv_heads;
    good.key_dim = key_dim;
    good.channel_means = numbers.data();
    good.channel_scales = numbers.data() + kv_heads * key_dim;
    REFUSES(target{}, KV_INVALID, "pool", kv_seq_fit_affine(nullptr, w.full, &good));
    REFUSES(w.attacked, KV_INVALID, "fit", kv_seq_fit_affine(w.pool, w.full, nullptr));
    w.refuses_handles([&](kv_seq seq) { return kv_seq_fit_affine(w.pool, seq, &good); });
    refuses_wrong_headers(w.attacked, "fit", good, [&](kv_affine_fit* wrong) {
        return kv_seq_fit_affine(w.pool, w.full, wrong);
    });
    struct attack {
        kv_status expected;
        const char* word;
        void (*change)(kv_affine_fit&);
    };
    using f = kv_affine_fit;
    const attack attacks[] = {
        {KV_INVALID, "layer", [](f& o) { o.layer = 3; }},
        {KV_INVALID, "layer", [](f& o) { o.layer = UINT32_MAX; }},
        {KV_INVALID, "[0, 64]", [](f& o) { o.kv_heads = 0; }},
        {KV_INVALID, "[4294967295, 64]", [](f& o) { o.kv_heads = UINT32_MAX; }},
        {KV_INVALID, "[2, 63]", [](f& o) { o.key_dim = 63; }},
        {KV_INVALID, "channel_means", [](f& o) { o.channel_means = nullptr; }},
        {KV_INVALID, "channel_scales", [](f& o) { o.channel_scales = nullptr; }},
        {KV_UNSUPPORTED, "reserved0", [](f& o) { o.reserved0 = 1; }},
        {KV_LIMIT, "63", [](f& o) { o.tokens = 63; }},
        {KV_LIMIT, "0 such", [](f& o) { o.first_position = UINT64_MAX; }},
        {KV_LIMIT, "0 such",
         [](f& o) {
             o.first_position = UINT64_MAX;
             o.tokens = UINT64_MAX;
         }},
    };
    live_pool pool;
    const kv_seq seq = pool.create_sequence();
    pool.append(seq, 100);
    const target attacked{pool, {seq}};
    for (const attack& a : attacks) {
        CAPTURE(a.word);
        kv_affine_fit wrong = good;
        a.change(wrong);
        REFUSES(attacked, a.expected, a.word, kv_seq_fit_affine(pool, seq, &wrong));
        CHECK(numbers == std::vector<float>(numbers.size(), 7.0f));
    }
    for (const uint32_t layer : {0u, 2u}) {  // 2 shares layer 0's cache
        good.layer = layer;
        good.tokens = layer == 0 ? 64 : UINT64_MAX;
        ACCEPTS(kv_seq_fit_affine(pool, seq, &good));
        CHECK(good.tokens_used == (layer == 0 ? 64 : 100));
        CHECK(good.identity != 0);
        for (const float number : numbers) CHECK(std::isfinite(number));
    }
    tensors flawed(1);
    flawed.numbers[3] = NAN;
    kv_step* step = pool.reserve(seq, 1);
    REQUIRE(kv_write(step, 0, &flawed.keys, &flawed.values) == KV_OK);
    REQUIRE(kv_write(step, 1, &flawed.keys, &flawed.values) == KV_OK);
    REQUIRE(kv_step_end(step, nullptr) == KV_OK);
    REFUSES(attacked, KV_INVALID, "finite", kv_seq_fit_affine(pool, seq, &good));
}

TEST_CASE("kv_seq_save_statistics, kv_pool_load_statistics") {
    const populated w;
    REFUSES(target{}, KV_INVALID, "pool", kv_seq_save_statistics(nullptr, w.full, "/tmp/x"));
    REFUSES(target{}, KV_INVALID, "pool", kv_pool_load_statistics(nullptr, "/tmp/x"));
    w.refuses_handles([&](kv_seq seq) { return kv_seq_save_statistics(w.pool, seq, "/tmp/x"); });
    REFUSES(w.attacked, KV_INVALID, "path", kv_seq_save_statistics(w.pool, w.full, nullptr));
    REFUSES(w.attacked, KV_INVALID, "path", kv_pool_load_statistics(w.pool, nullptr));
    REFUSES(w.attacked, KV_INVALID, "gathered",
            kv_seq_save_statistics(w.pool, w.full, "/tmp/kvrt-unused"));
    REFUSES(w.attacked, KV_IO, "/nonexistent/file",
            kv_pool_load_statistics(w.pool, "/nonexistent/file"));
    REFUSES(w.attacked, KV_IO, "/", kv_pool_load_statistics(w.pool, "/"));
    REFUSES(w.attacked, KV_CORRUPT, "statistics file",
            kv_pool_load_statistics(w.pool, "/dev/null"));
    REFUSES(w.attacked, KV_IO, "", kv_pool_load_statistics(w.pool, ""));
}

TEST_CASE("kv_pool_get_stats, kv_pool_get_class_stats") {
    const populated w;
    kv_pool_stats stats = KV_INIT(kv_pool_stats);
    kv_class_stats one = KV_INIT(kv_class_stats);
    REFUSES(target{}, KV_INVALID, "pool", kv_pool_get_stats(nullptr, &stats));
    REFUSES(target{}, KV_INVALID, "pool", kv_pool_get_class_stats(nullptr, 0, &one));
    REFUSES(w.attacked, KV_INVALID, "out_stats", kv_pool_get_stats(w.pool, nullptr));
    REFUSES(w.attacked, KV_INVALID, "out_stats", kv_pool_get_class_stats(w.pool, 0, nullptr));
    refuses_wrong_headers(w.attacked, "out_stats", stats,
                          [&](kv_pool_stats* wrong) { return kv_pool_get_stats(w.pool, wrong); });
    refuses_wrong_headers(w.attacked, "out_stats", one, [&](kv_class_stats* wrong) {
        return kv_pool_get_class_stats(w.pool, 0, wrong);
    });
    for (const uint32_t wrong : {1u, 16u, 17u, UINT32_MAX}) {
        REFUSES(w.attacked, KV_INVALID, "class_index",
                kv_pool_get_class_stats(w.pool, wrong, &one));
    }
}

TEST_CASE("kv_pool_get_layer_stats") {
    const populated w;
    uint64_t keys[3] = {7, 7, 7}, values[3] = {7, 7, 7};
    kv_layer_stats stats = KV_INIT(kv_layer_stats);
    stats.head_capacity = 2;
    stats.saturated_keys = keys;
    stats.saturated_values = values;
    REFUSES(target{}, KV_INVALID, "pool", kv_pool_get_layer_stats(nullptr, &stats));
    REFUSES(w.attacked, KV_INVALID, "stats", kv_pool_get_layer_stats(w.pool, nullptr));
    refuses_wrong_headers(w.attacked, "stats", stats, [&](kv_layer_stats* wrong) {
        return kv_pool_get_layer_stats(w.pool, wrong);
    });
    for (const uint32_t layer : {3u, UINT32_MAX}) {
        kv_layer_stats wrong = stats;
        wrong.layer = layer;
        REFUSES(w.attacked, KV_INVALID, "layer", kv_pool_get_layer_stats(w.pool, &wrong));
    }
    kv_layer_stats small = stats;
    small.head_capacity = 1;
    REFUSES(w.attacked, KV_LIMIT, "head_capacity", kv_pool_get_layer_stats(w.pool, &small));
    CHECK(small.kv_heads == 2);
    CHECK(keys[0] == 7);
    stats.layer = 2;  // shares layer 0's cache
    ACCEPTS(kv_pool_get_layer_stats(w.pool, &stats));
    CHECK(stats.kv_heads == 2);
    for (const uint64_t* counts : {keys, values}) {
        CHECK(counts[0] == 0);
        CHECK(counts[1] == 0);
        CHECK(counts[2] == 7);
    }
}

TEST_CASE("a sequence of one pool means nothing to another") {
    const live_pool one, two, three;
    const live_pool* pools[] = {&one, &two, &three};
    kv_seq seqs[3];
    for (int i = 0; i < 3; ++i) {
        seqs[i] = pools[i]->create_sequence();
        pools[i]->append(seqs[i], 20);
    }
    for (int own = 0; own < 3; ++own) {
        for (int other = 0; other < 3; ++other) {
            if (own == other) continue;
            const target attacked = {*pools[own], {seqs[own]}};
            kv_seq_info info = KV_INIT(kv_seq_info);
            REFUSES(attacked, KV_STALE, "another pool",
                    kv_seq_get_info(*pools[own], seqs[other], &info));
            // Releasing what is gone is no error, and must not hit the pool's own sequence.
            CHECK(kv_seq_release(*pools[own], seqs[other]) == KV_OK);
            CHECK(pools[own]->info(seqs[own]).accepted == 20);
        }
    }
}

}  // namespace
