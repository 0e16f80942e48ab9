// Demotion of older blocks to a smaller format: which blocks, to which bits, and what comes back.
#include "tiles_attention.hpp"

using namespace tiles_test;

namespace {

constexpr shape to_int8 = {.key_format = KV_FORMAT_F16,
                           .value_format = KV_FORMAT_F16,
                           .demoted_keys = KV_FORMAT_INT8_TOKEN,
                           .demote_after = 100};
constexpr shape to_int4_rotated = {.key_format = KV_FORMAT_F32,
                                   .value_format = KV_FORMAT_BF16,
                                   .demoted_keys = KV_FORMAT_INT4_TOKEN,
                                   .demoted_values = KV_FORMAT_Q4_0,
                                   .demote_after = 30,
                                   .demoted_rotated = true};
constexpr shape keys_alone = {.key_format = KV_FORMAT_F16,
                              .value_format = KV_FORMAT_F16,
                              .demoted_keys = KV_FORMAT_Q8_0,
                              .demoted_values = KV_FORMAT_F16,
                              .demote_after = 1};
constexpr shape by_head = {.key_format = KV_FORMAT_F32,
                           .value_format = KV_FORMAT_F32,
                           .demoted_keys = KV_FORMAT_F16,
                           .demote_after = 64,
                           .lane_per_head = true};
constexpr shape under_pressure = {.key_format = KV_FORMAT_F16,
                                  .value_format = KV_FORMAT_F16,
                                  .demoted_keys = KV_FORMAT_INT4_TOKEN};
const std::vector<shape> demoting = {to_int8, to_int4_rotated, keys_alone,
                                     by_head, under_pressure,  {KV_FORMAT_F16, KV_FORMAT_F16}};

pool_options options_of(uint32_t layout = KV_LAYOUT_NATIVE) {
    return {.block_tokens = 16, .layout = layout, .slabs = 64, .max_tokens = 2048};
}

const lane_geometry& geometry_of(const world& w, uint32_t layer) {
    return w.pool->store.model.lanes[w.place(layer, 0).lane];
}

/// A row as an operand stores it and gives it back. It comes in the basis it was written in.
std::vector<float> through(const operand_layout& operand, std::vector<float> row) {
    if (operand.rotated) rotate_row(row.data(), operand.dim);
    if (operand.plain()) {
        std::byte stored[4];
        for (float& x : row) {
            store_element(stored, operand.type, x);
            x = load_element(stored, operand.type);
        }
    } else {
        std::vector<std::byte> record(most_record_bytes);
        operand.format->encode(row.data(), operand.dim, operand.constants(0), record.data());
        operand.format->decode(record.data(), operand.dim, operand.constants(0), row.data());
    }
    if (operand.rotated) rotate_row(row.data(), operand.dim);
    return row;
}

/// What a token's row may be: as written, demoted, opened and demoted again ... `openings` times.
/// Rotating there and back rounds a little.
enum class form { written, demoted, other };
form form_of(const world& w, uint32_t layer, bool value, uint32_t head, uint64_t position,
             const std::vector<float>& found, uint32_t openings = 0) {
    const lane_geometry& geometry = geometry_of(w, layer);
    const operand_layout& raw = value ? geometry.layout.values : geometry.layout.keys;
    const operand_layout& small =
        value ? geometry.sealed_layout.values : geometry.sealed_layout.keys;
    const auto all = written(1, layer, value, 2, raw.dim, position);
    std::vector<float> row(all.begin() + head * raw.dim, all.begin() + (head + 1) * raw.dim);
    const auto same = [&](const std::vector<float>& a) {
        for (uint32_t i = 0; i < raw.dim; ++i) {
            const float difference = std::abs(a[i] - found[i]);
            if (raw.rotated ? difference > 2e-5f : difference != 0.0f) return false;
        }
        return true;
    };
    for (uint32_t turn = 0; turn <= openings; ++turn) {
        row = through(raw, row);
        if (same(row)) return form::written;
        row = through(small, row);
        if (same(row)) return form::demoted;
    }
    return form::other;
}

/// Every slot of a sequence of which no token was evicted.
void check_rows(const world& w, kv_seq seq, uint32_t layer) {
    const lane_state& state = w.lane(seq, layer);
    const uint32_t sealed = std::min(state.slots, state.sealed_blocks * 16);
    const lane_geometry& geometry = geometry_of(w, layer);
    for (uint32_t head = 0; head < 2; ++head) {
        for (int value = 0; value < 2; ++value) {
            const bool same =
                value == 1 ? geometry.layout.values.format == geometry.sealed_layout.values.format
                           : geometry.layout.keys.format == geometry.sealed_layout.keys.format;
            for (uint32_t slot = 0; slot < state.slots; ++slot) {
                const form expected = slot < sealed && !same ? form::demoted : form::written;
                REQUIRE(form_of(w, layer, value == 1, head, slot,
                                w.stored(seq, layer, value == 1, head, slot)) == expected);
            }
        }
    }
}

TEST_CASE("blocks behind the newest tokens are demoted, whatever the chunks they came in") {
    for (const uint32_t layout : {KV_LAYOUT_NATIVE, KV_LAYOUT_HND, KV_LAYOUT_NHD}) {
        for (const uint32_t chunk : {1u, 7u, 64u, 333u}) {
            CAPTURE(layout);
            CAPTURE(chunk);
            const world w(demoting, options_of(layout));
            const kv_seq seq = w.create();
            uint64_t demoted = 0, saved = 0;
            for (uint32_t tokens = 0; tokens < 333;) {
                const uint32_t count = std::min(chunk, 333 - tokens);
                kv_step_report report = KV_INIT(kv_step_report);
                ok(w.step(seq, 1, count, count, false, &report));
                tokens += count;
                demoted += report.demoted_blocks;
                saved += report.demoted_bytes;
                for (uint32_t layer = 0; layer < demoting.size(); ++layer) {
                    const uint32_t after = demoting[layer].demote_after;
                    const uint32_t old = after == 0 || tokens < after ? 0 : tokens - after;
                    REQUIRE(w.lane(seq, layer).sealed_blocks == old / 16);
                }
            }
            w.check();
            for (uint32_t layer = 0; layer < demoting.size(); ++layer) {
                CAPTURE(layer);
                check_rows(w, seq, layer);
            }
            // (333 - 100) / 16, (333 - 30) / 16, 332 / 16, and of two heads (333 - 64) / 16.
            CHECK(demoted == 14 + 18 + 20 + 2 * 16);
            uint64_t bytes = 0, whole = 0;
            for (uint32_t layer = 0; layer < demoting.size(); ++layer) {
                const uint32_t lanes = demoting[layer].lane_per_head ? 2 : 1;
                whole += uint64_t{geometry_of(w, layer).layout.block_bytes} * 21 * lanes;
            }
            bytes = w.live_bytes();
            CHECK(whole - bytes == saved);
            // Keys of f16 in int8: 16 tokens, 2 heads, 64 channels. Values stay as they are.
            CHECK(geometry_of(w, 2).layout.block_bytes -
                      geometry_of(w, 2).sealed_layout.block_bytes ==
                  2 * 16 * (128 - 68));
        }
    }
}

TEST_CASE(
    "attention over demoted blocks and others together is the definition over what is stored") {
    const world w(demoting, options_of());
    const kv_seq seq = w.create();
    ok(w.step(seq, 1, 300, 300));
    for (const bool evicts : {false, true}) {
        kv_compress_report report;
        if (evicts) compress(w, seq, KV_SCORER_KEY_NORM, 150, report);
        for (uint32_t layer = 0; layer < demoting.size(); ++layer) {
            for (const uint32_t rows : {1u, 3u, 20u}) {
                CAPTURE(layer);
                CAPTURE(rows);
                CHECK(attention_error(w, seq, layer, rows) < 2e-5);
            }
        }
    }
}

TEST_CASE("survivors of a compaction are bit by bit what they were; no demoted row is decoded") {
    const world w(demoting, options_of());
    const kv_seq seq = w.create();
    ok(w.step(seq, 1, 333, 333));
    struct row {
        std::vector<float> numbers;
        bool demoted;
    };
    std::map<std::tuple<uint32_t, bool, uint32_t, uint64_t>, row> before;
    const auto each = [&](const auto& visit) {
        for (uint32_t layer = 0; layer < demoting.size(); ++layer) {
            for (uint32_t i = 0; i < 4; ++i) {
                const uint32_t head = i / 2;
                const bool value = i % 2 == 1;
                const head_place place = w.place(layer, head);
                const slot_positions positions =
                    positions_of(w.pool->store, w.inside(seq), place.lane, place.head);
                const lane_state& state = w.lane(seq, layer, head);
                for (uint32_t slot = 0; slot < state.slots; ++slot) {
                    visit(std::tuple{layer, value, head, positions.at(slot)},
                          row{w.stored(seq, layer, value, head, slot),
                              slot / 16 < state.sealed_blocks});
                }
            }
        }
    };
    each([&](const auto& key, const row& found) { before[key] = found; });
    kv_compress_report report;
    uint32_t demoted_now = 0;
    for (const uint32_t budget : {200u, 111u, 40u}) {
        CAPTURE(budget);
        compress(w, seq, KV_SCORER_RANDOM, budget, report);
        CHECK(report.outcome == KV_COMPRESS_DONE);
        w.check();
        each([&](const auto& key, const row& found) {
            row& was = before.at(key);
            if (was.demoted) REQUIRE(found.demoted);
            if (was.demoted == found.demoted) {
                REQUIRE(found.numbers == was.numbers);
                return;
            }
            // Beside demoted ones in their block: coded once, now.
            ++demoted_now;
            const auto [layer, value, head, position] = key;
            const lane_geometry& geometry = geometry_of(w, layer);
            const bool same =
                value && geometry.layout.values.format == geometry.sealed_layout.values.format;
            REQUIRE(form_of(w, layer, value, head, position, found.numbers) ==
                    (same ? form::written : form::demoted));
            was = found;
        });
        for (uint32_t layer = 0; layer < demoting.size(); ++layer) {
            const lane_state& state = w.lane(seq, layer);
            CHECK(state.slots == budget);
            // What fills the last demoted block is less than a block for the head with the most.
            CHECK(state.sealed_blocks <= (budget + 15) / 16);
        }
    }
    CHECK(demoted_now > 0);
    kv_layer_stats stats = KV_INIT(kv_layer_stats);
    for (uint32_t layer = 0; layer < demoting.size(); ++layer) {
        stats.layer = layer;
        ok(kv_pool_get_layer_stats(w.pool, &stats));
        CHECK(stats.recoded_rows == 0);
    }
    ok(w.step(seq, 1, 300, 300));
    w.check();
    ok(kv_seq_release(w.pool, seq));
    CHECK(w.live_bytes() == 0);
}

TEST_CASE("what a fork holds follows from its length: it demotes a copy of what it shares") {
    const world w({to_int8}, options_of());
    const kv_seq seq = w.create();
    ok(w.step(seq, 1, 150, 150));  // 3 blocks are old enough
    CHECK(w.lane(seq, 0).sealed_blocks == 3);
    kv_seq child = 0;
    ok(kv_seq_fork(w.pool, seq, 1, &child));
    const uint64_t before = w.live_bytes();
    ok(w.step(seq, 1, 100, 100));
    ok(w.step(child, 1, 200, 200));
    CHECK(w.lane(seq, 0).sealed_blocks == 9);
    CHECK(w.lane(child, 0).sealed_blocks == 15);
    check_rows(w, seq, 0);
    check_rows(w, child, 0);
    // Shared are the 3 blocks that were demoted before; the 6 full raw ones exist twice, demoted.
    const lane_geometry& lane = geometry_of(w, 0);
    CHECK(before == 3 * lane.sealed_layout.block_bytes + 7 * lane.layout.block_bytes);
    CHECK(w.live_bytes() == (3 + 6 + 12) * lane.sealed_layout.block_bytes +
                                (16 - 9 + 22 - 15) * lane.layout.block_bytes);
    w.check();
}

TEST_CASE("going back into a demoted block opens it; what is coded again is reported") {
    const world w({to_int8}, options_of());
    const kv_seq seq = w.create();
    ok(w.step(seq, 1, 200, 200));
    CHECK(w.lane(seq, 0).sealed_blocks == 6);
    ok(kv_seq_truncate(w.pool, seq, 90));  // ten tokens into the sixth block
    CHECK(w.lane(seq, 0).sealed_blocks == 6);
    ok(w.step(seq, 1, 1, 1));
    CHECK(w.lane(seq, 0).sealed_blocks == 5);
    kv_layer_stats stats = KV_INIT(kv_layer_stats);
    ok(kv_pool_get_layer_stats(w.pool, &stats));
    CHECK(stats.recoded_rows == 0);
    ok(w.step(seq, 1, 109, 109));
    CHECK(w.lane(seq, 0).sealed_blocks == 6);
    ok(kv_pool_get_layer_stats(w.pool, &stats));
    CHECK(stats.recoded_rows == 10 * 2 * 2);  // keys and values of two heads
    CHECK(stats.recoding_error < 0.01);
    for (uint32_t slot = 0; slot < 200; ++slot) {
        REQUIRE(form_of(w, 0, false, 1, slot, w.stored(seq, 0, false, 1, slot), 1) != form::other);
    }
}

TEST_CASE("what saturates on demotion is counted once, with its KV head") {
    shape one = to_int8;
    one.demoted_keys = KV_FORMAT_F16;
    one.key_format = one.value_format = KV_FORMAT_F32;
    one.demoted_keys = KV_FORMAT_FP8_E4M3;
    kv_storage unit = KV_INIT(kv_storage);
    unit.flags = KV_STORAGE_SCALE_ONE;
    kv_layer layer = KV_INIT(kv_layer);
    layer.query_heads = layer.kv_heads = 2;
    layer.key_dim = 64;
    layer.key_format = KV_FORMAT_F32;
    layer.demoted_key_format = KV_FORMAT_FP8_E4M3;
    layer.demoted_key_storage = layer.demoted_value_storage = &unit;
    layer.demote_after = 1;
    kv_model model = KV_INIT(kv_model);
    model.layers = &layer;
    model.layer_count = 1;
    kv_pool_config config = KV_INIT(kv_pool_config);
    config.arena_bytes = 4 * slab_bytes;
    kv_pool* pool = nullptr;
    ok(kv_pool_create(&config, &model, &pool));
    kv_seq seq = 0;
    ok(kv_seq_create(pool, nullptr, &seq));
    std::vector<float> rows(40 * 2 * 64, 1.0f);
    rows[0 * 128 + 5] = 1e6f;        // head 0
    rows[3 * 128 + 64] = -1e5f;      // head 1
    rows[39 * 128 + 64 + 1] = 1e6f;  // not demoted yet
    kv_tensor tensor = KV_INIT(kv_tensor);
    tensor.data = rows.data();
    tensor.dtype = KV_DTYPE_F32;
    tensor.rows = 40;
    tensor.heads = 2;
    tensor.dim = 64;
    kv_step* step = nullptr;
    ok(kv_step_begin(pool, &step));
    ok(kv_seq_append(step, seq, nullptr, 40, nullptr));
    ok(kv_step_reserve(step, nullptr));
    ok(kv_write(step, 0, &tensor, &tensor));
    ok(kv_step_end(step, nullptr));
    uint64_t keys[2] = {}, values[2] = {};
    kv_layer_stats stats = KV_INIT(kv_layer_stats);
    stats.head_capacity = 2;
    stats.saturated_keys = keys;
    stats.saturated_values = values;
    ok(kv_pool_get_layer_stats(pool, &stats));
    for (const uint64_t* counted : {keys, values}) {
        CHECK(counted[0] == 1);
        CHECK(counted[1] == 1);
    }
    kv_pool_release(pool);
}

TEST_CASE("under pressure blocks are demoted before anything is evicted") {
    pool_options options = options_of();
    options.slabs = 8;
    options.pressure_percent = 40;
    const world w({{.key_format = KV_FORMAT_F16,
                    .value_format = KV_FORMAT_F16,
                    .kv_heads = 8,
                    .dim = 128,
                    .demoted_keys = KV_FORMAT_INT4_TOKEN}},
                  options);
    const kv_seq first = w.create();
    kv_policy policy = KV_INIT(kv_policy);
    policy.scorer = KV_SCORER_STREAMING;
    policy.budget = 64;
    policy.recent = 16;
    ok(kv_seq_set_policy(w.pool, first, &policy));
    kv_step_report report = KV_INIT(kv_step_report);
    uint64_t demoted = 0;
    uint32_t tokens = 0;
    // 40 % of 8 slabs hold 1,638 such tokens; int4 takes less than a third of their bytes.
    while (report.pressure_rounds == 0) {
        ok(w.step(first, 1, 64, 64, false, &report));
        demoted += report.demoted_blocks;
        tokens += 64;
        REQUIRE(tokens <= 2048);
        if (tokens < 1600) {
            REQUIRE(demoted == 0);
        } else if (report.pressure_rounds == 0 && demoted != 0) {
            CHECK(report.blocks_returned == 0);
            CHECK(w.lane(first, 0).slots == tokens);
            CHECK(w.lane(first, 0).sealed_blocks == tokens / 16);
            break;
        }
    }
    CHECK(demoted == tokens / 16);
    CHECK(report.demoted_bytes == demoted * (geometry_of(w, 0).layout.block_bytes -
                                             geometry_of(w, 0).sealed_layout.block_bytes));
    // Others come, which are demoted too; when that is not enough, the first one's policy runs.
    kv_seq other = w.create();
    while (report.pressure_rounds == 0) {
        if (w.lane(other, 0).slots + 64 > 2048) other = w.create();
        ok(w.step(other, 1, 64, 64, false, &report));
    }
    CHECK(w.lane(first, 0).slots == 64);
    w.check();
}

TEST_CASE("under pressure what others read stays: it would lie beside its copy") {
    pool_options options = options_of();
    options.slabs = 8;
    options.pressure_percent = 40;
    const world w({{.key_format = KV_FORMAT_F16,
                    .value_format = KV_FORMAT_F16,
                    .kv_heads = 8,
                    .dim = 128,
                    .demoted_keys = KV_FORMAT_INT4_TOKEN}},
                  options);
    const kv_seq first = w.create(), other = w.create();
    for (int i = 0; i < 3; ++i) ok(w.step(first, 1, 400, 400));
    kv_seq child = 0;
    ok(kv_seq_fork(w.pool, first, 1, &child));
    kv_step_report report = KV_INIT(kv_step_report);
    while (report.demoted_blocks == 0) ok(w.step(other, 1, 64, 64, false, &report));
    CHECK(w.lane(first, 0).sealed_blocks == 0);
    CHECK(w.lane(child, 0).sealed_blocks == 0);
    CHECK(w.lane(other, 0).sealed_blocks == w.lane(other, 0).slots / 16);
    ok(kv_seq_release(w.pool, child));
    report = KV_INIT(kv_step_report);
    while (report.demoted_blocks == 0) ok(w.step(other, 1, 64, 64, false, &report));
    while (w.lane(first, 0).sealed_blocks == 0) ok(w.step(w.create(), 1, 500, 500));
    CHECK(w.lane(first, 0).sealed_blocks == 1200 / 16);
    w.check();
}

TEST_CASE("a full pool: rounds find room, and demote more where blocks are missing") {
    pool_options options = options_of();
    options.slabs = 2;  // one of each class
    options.max_tokens = 8192;
    const world w({{.key_format = KV_FORMAT_F16,
                    .value_format = KV_FORMAT_F16,
                    .kv_heads = 2,
                    .dim = 128,
                    .demoted_keys = KV_FORMAT_INT4_TOKEN,
                    .demote_after = 512}},
                  options);
    const kv_seq seq = w.create();
    uint32_t tokens = 0;
    kv_status status = KV_OK;
    while ((status = w.step(seq, 1, 64, 64)) == KV_OK) tokens += 64;
    CHECK((status == KV_TOO_LARGE || status == KV_AGAIN));
    CHECK(tokens > 1024);
    check_rows(w, seq, 0);
    kv_compress_report report;
    compress(w, seq, KV_SCORER_RANDOM, tokens / 4, report);
    CHECK(report.outcome == KV_COMPRESS_DONE);
    w.check();
    ok(w.step(seq, 1, 64, 64));
    w.check();
    ok(kv_seq_release(w.pool, seq));
    CHECK(w.live_bytes() == 0);
}

TEST_CASE("any order of operations keeps demoted rows and others, and every block counted") {
    const world w(demoting, options_of());
    struct followed {
        kv_seq handle;
        uint64_t seen;
        uint32_t openings;
    };
    std::vector<followed> alive;
    std::mt19937 draw(12);
    const auto below = [&](uint32_t n) { return static_cast<uint32_t>(draw() % n); };
    for (int turn = 0; turn < 600; ++turn) {
        const uint32_t what = below(10);
        if (alive.empty() || (what == 0 && alive.size() < 6)) {
            alive.push_back({w.create(), 0, 0});
            continue;
        }
        followed& one = alive[below(static_cast<uint32_t>(alive.size()))];
        if (what <= 4) {
            const uint32_t count = 1 + below(90), accepted = below(4) == 0 ? below(count) : count;
            const bool cancel = below(8) == 0;
            if (w.lane(one.handle, 0).slots + count > 2048) continue;
            ok(w.step(one.handle, 1, count, accepted, cancel));
            if (!cancel) one.seen += accepted;
        } else if (what == 5 && alive.size() < 6) {
            kv_seq child = 0;
            ok(kv_seq_fork(w.pool, one.handle, 1, &child));
            alive.push_back({child, one.seen, one.openings});
        } else if (what == 6) {
            const uint64_t to = one.seen - std::min<uint64_t>(one.seen, below(100));
            const kv_status status = kv_seq_truncate(w.pool, one.handle, to);
            REQUIRE((status == KV_OK || status == KV_NO_SNAPSHOT));
            if (status == KV_OK) one.seen = to;
            ++one.openings;
        } else if (what == 7 && w.lane(one.handle, 0).slots > 20) {
            kv_compress_report report;
            compress(w, one.handle, below(2) == 0 ? KV_SCORER_RANDOM : KV_SCORER_STREAMING,
                     16 + below(200), report);
            ++one.openings;  // the tail may be a demoted block
        } else if (what == 8 && below(3) == 0) {
            ok(kv_seq_release(w.pool, one.handle));
            one = alive.back();
            alive.pop_back();
            continue;
        }
        w.check();
        const followed& looked = alive[below(static_cast<uint32_t>(alive.size()))];
        for (int probe = 0; probe < 40; ++probe) {
            const uint32_t layer = below(static_cast<uint32_t>(demoting.size()));
            const uint32_t head = below(2);
            const lane_state& state = w.lane(looked.handle, layer, head);
            if (state.slots == 0) continue;
            const uint32_t slot = below(state.slots);
            const bool value = below(2) == 1;
            const head_place place = w.place(layer, head);
            const uint64_t position =
                positions_of(w.pool->store, w.inside(looked.handle), place.lane, place.head)
                    .at(slot);
            const form found =
                form_of(w, layer, value, head, position,
                        w.stored(looked.handle, layer, value, head, slot), looked.openings);
            REQUIRE(found != form::other);
        }
    }
    for (const followed& one : alive) ok(kv_seq_release(w.pool, one.handle));
    CHECK(w.live_bytes() == 0);
    w.check();
}

}  // namespace
