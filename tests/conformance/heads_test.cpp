// A layer whose KV heads have lanes of their own beside the same layer with one lane: as long as
// the lanes hold the same tokens, all that comes out has the same bits.
#include <filesystem>
#include <random>

#include "engine.hpp"

using namespace conformance;

namespace {

constexpr uint32_t kv_heads = 4, dim = 64;

struct storage_case {
    const char* name;
    uint32_t key_format, value_format;
    uint32_t storage_flags = 0;
    bool static_scales = false;
};

const storage_case storages[] = {
    {"f16", KV_FORMAT_F16, KV_FORMAT_F16},
    {"f32 and bf16", KV_FORMAT_F32, KV_FORMAT_BF16},
    {"int8_token", KV_FORMAT_INT8_TOKEN, KV_FORMAT_INT8_TOKEN},
    {"int8_token and int4_token, rotated", KV_FORMAT_INT8_TOKEN, KV_FORMAT_INT4_TOKEN,
     KV_STORAGE_ROTATE},
    {"fp8 with a scale per head", KV_FORMAT_FP8_E4M3, KV_FORMAT_FP8_E4M3, 0, true},
    {"kivi4", KV_FORMAT_KIVI4, KV_FORMAT_KIVI4},
    {"kvarn4", KV_FORMAT_KVARN4, KV_FORMAT_KVARN2},
    {"affine4", KV_FORMAT_AFFINE4, KV_FORMAT_INT4_TOKEN},
};

/// A layer, one with all biases, one with a window, and one that shares the first's cache.
pool_shape shape_of(const storage_case& storage, uint32_t layout, bool lane_per_head) {
    layer_shape plain;
    plain.query_heads = 8;
    plain.kv_heads = kv_heads;
    plain.key_dim = plain.value_dim = dim;
    plain.key_format = storage.key_format;
    plain.value_format = storage.value_format;
    plain.storage_flags = storage.storage_flags;
    plain.lane_per_head = lane_per_head;
    plain.outlier_head = 3;
    for (uint32_t head = 0; head < kv_heads; ++head) {
        const float size = static_cast<float>(head + 1);
        if (storage.static_scales) plain.scales.push_back(0.001f * size);
        for (uint32_t i = 0; storage.key_format == KV_FORMAT_AFFINE4 && i < dim; ++i) {
            plain.channel_means.push_back(drawn(1, head, i, 0, 0, 0));
            plain.channel_scales.push_back(0.5f * size + static_cast<float>(i % 32 % 5));
        }
    }
    layer_shape biased = plain;
    biased.softcap = 30.0f;
    for (uint32_t head = 0; head < biased.query_heads; ++head) {
        biased.sink_logits.push_back(0.25f * static_cast<float>(head) - 1.0f);
        biased.alibi_slopes.push_back(std::ldexp(1.0f, -3 - static_cast<int>(head)));
    }
    layer_shape windowed = plain;
    windowed.window = 200;
    windowed.window_sinks = 5;
    layer_shape sharing = biased;
    sharing.lane_per_head = false;
    sharing.shared_layer = 0;
    sharing.query_heads = 4;
    sharing.sink_logits.resize(4);
    sharing.alibi_slopes.clear();
    pool_shape shape;
    shape.layers = {plain, biased, windowed, sharing};
    shape.layout = layout;
    shape.block_tokens = 64;
    shape.slabs = 24;
    shape.threads = lane_per_head ? 2 : 1;
    return shape;
}

using outputs = std::vector<std::vector<float>>;

void compress(engine& host, kv_seq sequence, uint32_t scorer, uint32_t selection, outputs& all) {
    kv_policy policy = policy_of(scorer, 150);
    policy.selection = selection;
    policy.recent = 7;
    policy.sinks = 3;
    policy.seed = 11;
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = &policy;
    kv_compress_report report = KV_INIT(kv_compress_report);
    require_ok(kv_compress(host.pool(), sequence, &options, &report));
    REQUIRE(report.outcome == KV_COMPRESS_DONE);
    CHECK(report.layers == 2);
    all.push_back({static_cast<float>(report.tokens_after), static_cast<float>(report.recoded_rows),
                   static_cast<float>(report.recoding_error)});
}

void note_positions(const engine& host, kv_seq sequence, outputs& all) {
    for (uint32_t layer = 0; layer < host.shape().layers.size(); ++layer) {
        for (uint32_t head = 0; head < kv_heads; ++head) {
            const std::vector<uint32_t> kept = host.positions(sequence, layer, head);
            all.emplace_back(kept.begin(), kept.end());
        }
    }
}

/// A life with prefill, decode, drafts, a fork, going back, and rounds of every scorer.
outputs live(const pool_shape& shape) {
    engine host(shape);
    const kv_seq a = host.create(nullptr, true), b = host.create(nullptr, true);
    outputs all;
    const auto run = [&](const std::vector<part>& parts) {
        for (std::vector<float>& layer : host.run(parts)) all.push_back(std::move(layer));
    };
    run({{a, 1, 640}});
    run({{a, 1, 1}, {b, 2, 70}});
    run({{a, 1, 4}, {b, 2, 1}});
    for (uint32_t scorer = KV_SCORER_TRIATTENTION; scorer <= KV_SCORER_RANDOM; ++scorer) {
        for (uint32_t selection = 1; selection <= KV_SELECT_UNION; ++selection) {
            CAPTURE(scorer);
            CAPTURE(selection);
            kv_seq child = 0;
            require_ok(kv_seq_fork(host.pool(), a, 1, &child));
            compress(host, child, scorer, selection, all);
            note_positions(host, child, all);
            run({{child, 1, 1}, {b, 2, 1}});
            run({{child, 1, 21}});
            note_positions(host, child, all);
            require_ok(kv_pool_check(host.pool()));
            require_ok(kv_seq_release(host.pool(), child));
        }
    }
    require_ok(kv_seq_truncate(host.pool(), a, 620));
    run({{a, 1, 1}});
    run({{a, 1, 80}, {b, 2, 1}});
    for (uint32_t layer = 0; layer < 3; ++layer) {
        uint64_t keys[kv_heads] = {}, values[kv_heads] = {};
        kv_layer_stats stats = KV_INIT(kv_layer_stats);
        stats.layer = layer;
        stats.head_capacity = kv_heads;
        stats.saturated_keys = keys;
        stats.saturated_values = values;
        require_ok(kv_pool_get_layer_stats(host.pool(), &stats));
        REQUIRE(stats.kv_heads == kv_heads);
        all.emplace_back(keys, keys + kv_heads);
        all.emplace_back(values, values + kv_heads);
        all.push_back({static_cast<float>(stats.recoded_rows)});
    }
    require_ok(kv_pool_check(host.pool()));
    return all;
}

void same_bits(const outputs& a, const outputs& b) {
    REQUIRE(a.size() == b.size());
    for (std::size_t i = 0; i < a.size(); ++i) {
        CAPTURE(i);
        REQUIRE(a[i].size() == b[i].size());
        CHECK(std::memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(float)) == 0);
    }
}

kv_plan_report plan_of(const pool_shape& shape, uint32_t tokens) {
    kv_plan_report report = KV_INIT(kv_plan_report);
    report.sequences = 1;
    report.tokens_per_sequence = tokens;
    engine::describe(shape, [&](const kv_pool_config& config, const kv_model& model) {
        require_ok(kv_plan(&config, &model, &report));
    });
    return report;
}

}  // namespace

TEST_CASE("lanes per head: the bits of a layer with one lane, in every format") {
    for (const storage_case& storage : storages) {
        for (const uint32_t layout : {KV_LAYOUT_NATIVE, KV_LAYOUT_HND}) {
            CAPTURE(storage.name);
            CAPTURE(layout);
            const outputs one = live(shape_of(storage, layout, false));
            const outputs each = live(shape_of(storage, layout, true));
            same_bits(one, each);
        }
    }
}

TEST_CASE("lanes per head: round by round, heads that compete keep their budgets' sum") {
    engine host(shape_of(storages[0], KV_LAYOUT_NATIVE, true));
    kv_policy policy = policy_of(KV_SCORER_RANDOM, 100);
    policy.allocator = KV_ALLOCATE_ADAPTIVE;
    policy.recent = 10;
    policy.every = 1;
    const kv_seq sequence = host.create(&policy);
    host.run({{sequence, 1, 150}});
    bool below = false;
    for (int round = 0; round < 20; ++round) {
        CAPTURE(round);
        for (const uint32_t layer : {0u, 1u}) {
            std::size_t sum = 0;
            for (uint32_t head = 0; head < kv_heads; ++head) {
                const std::size_t kept = host.positions(sequence, layer, head).size();
                below = below || kept + 8 < 100;  // less than its budget, also after the next step
                sum += kept;
            }
            CHECK(sum == kv_heads * 100);
        }
        host.run({{sequence, 1, 8}});
    }
    CHECK(below);
    require_ok(kv_pool_check(host.pool()));
}

TEST_CASE("lanes per head: a plan counts blocks by lane, bytes as before") {
    const kv_plan_report whole = plan_of(shape_of(storages[0], KV_LAYOUT_NATIVE, false), 1000);
    const kv_plan_report parts = plan_of(shape_of(storages[0], KV_LAYOUT_NATIVE, true), 1000);
    CHECK(parts.bytes_per_token == whole.bytes_per_token);
    CHECK(parts.bytes_per_block == whole.bytes_per_block);
    CHECK(parts.full_bytes_per_token == whole.full_bytes_per_token);
    CHECK(parts.bytes_per_sequence == whole.bytes_per_sequence);
    CHECK(parts.layer_bytes_per_block == whole.layer_bytes_per_block);
    CHECK(parts.layer_bytes_per_sequence == whole.layer_bytes_per_sequence);
    CHECK(parts.blocks_per_sequence == kv_heads * whole.blocks_per_sequence);
}

TEST_CASE("lanes per head: statistics of queries are by layer, in memory and in files") {
    const std::string path = std::filesystem::temp_directory_path() /
                             ("kvrt_heads_" + std::to_string(std::random_device()()));
    engine one(shape_of(storages[0], KV_LAYOUT_NATIVE, false));
    engine each(shape_of(storages[0], KV_LAYOUT_NATIVE, true));
    outputs gathered;
    for (engine* host : {&one, &each}) {
        const kv_seq sequence = host->create(nullptr, true);
        host->run({{sequence, 3, 90}});
        const uint32_t bands = dim / 2;
        std::vector<float> real(8 * bands), imaginary(8 * bands), magnitude(8 * bands);
        kv_query_statistics found = KV_INIT(kv_query_statistics);
        found.layer = 1;
        found.query_heads = 8;
        found.bands = bands;
        found.mean_real = real.data();
        found.mean_imaginary = imaginary.data();
        found.mean_magnitude = magnitude.data();
        require_ok(kv_seq_get_statistics(host->pool(), sequence, &found));
        CHECK(found.tokens == 90);
        gathered.insert(gathered.end(), {real, imaginary, magnitude});
        if (host == &one) require_ok(kv_seq_save_statistics(one.pool(), sequence, path.c_str()));
    }
    same_bits({gathered.begin(), gathered.begin() + 3}, {gathered.begin() + 3, gathered.end()});
    require_ok(kv_pool_load_statistics(each.pool(), path.c_str()));
    std::filesystem::remove(path);
}

TEST_CASE("lanes per head: tables are exported by KV head, and a step needs all of them") {
    pool_shape shape = shape_of(storages[0], KV_LAYOUT_HND, true);
    shape.layers.resize(2);
    shape.layers[1].lane_per_head = false;
    engine host(shape);
    const kv_seq sequence = host.create();
    host.run({{sequence, 1, 100}});
    const uint64_t before = host.info(sequence).accepted;
    kv_step* step = host.begin({{sequence, 1, 3}});
    std::vector<int32_t> blocks(kv_heads);
    for (uint32_t head = 0; head < kv_heads; ++head) {
        int32_t table[4], length = 0;
        kv_tables tables = KV_INIT(kv_tables);
        tables.kv_head = head;
        tables.block_table = table;
        tables.block_table_stride = tables.block_table_capacity = 4;
        tables.kv_len = &length;
        tables.item_capacity = 1;
        require_ok(kv_step_export(step, 0, &tables));
        CHECK(length == 103);
        CHECK(tables.slot_positions_count == 103);
        CHECK(tables.block_bytes == 64 * dim * 2 * 2);
        for (uint32_t other = 0; other < head; ++other) CHECK(table[0] != blocks[other]);
        blocks[head] = table[0];
    }
    kv_tables tables = KV_INIT(kv_tables);
    tables.kv_head = kv_heads;
    CHECK(kv_step_export(step, 0, &tables) == KV_INVALID);
    tables.kv_head = 1;
    CHECK(kv_step_export(step, 1, &tables) == KV_INVALID);
    CHECK(last_error().find("kv_head") != std::string::npos);
    host.write(step, 1);
    require_ok(kv_step_end(step, nullptr));

    // One head of layer 0 is neither exported nor written.
    step = host.begin({{sequence, 1, 1}});
    for (const uint32_t head : {0u, 1u, 3u}) {
        tables.kv_head = head;
        require_ok(kv_step_export(step, 0, &tables));
    }
    host.write(step, 1);
    CHECK(kv_step_end(step, nullptr) == KV_INVALID);
    CHECK(last_error().find("KV head 2 of layer 0") != std::string::npos);
    CHECK(host.info(sequence).accepted == before + 3);
    require_ok(kv_pool_check(host.pool()));
}

TEST_CASE("lanes per head: a fit for affine4 takes each head from its own lane") {
    std::vector<float> means[2], scales[2];
    uint64_t identities[2] = {};
    for (const bool per_head : {false, true}) {
        engine host(shape_of(storages[0], KV_LAYOUT_NATIVE, per_head));
        const kv_seq sequence = host.create();
        host.run({{sequence, 5, 200}});
        means[per_head].resize(kv_heads * dim);
        scales[per_head].resize(kv_heads * dim);
        kv_affine_fit fit = KV_INIT(kv_affine_fit);
        fit.layer = 1;
        fit.kv_heads = kv_heads;
        fit.key_dim = dim;
        fit.channel_means = means[per_head].data();
        fit.channel_scales = scales[per_head].data();
        require_ok(kv_seq_fit_affine(host.pool(), sequence, &fit));
        CHECK(fit.tokens_used == 200);
        identities[per_head] = fit.identity;
    }
    same_bits({means[0], scales[0]}, {means[1], scales[1]});
    CHECK(identities[0] == identities[1]);
}
