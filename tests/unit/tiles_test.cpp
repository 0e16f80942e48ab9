// The life of blocks with tile-local formats: written raw, sealed when full, opened when a sequence
// goes back into one, coded anew when survivors move. What each slot must hold is followed beside
// the library: the rows that were written, coded tile by tile as the codec codes them.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "api/handles.hpp"
#include "format/rotation.hpp"
#include "format/rows.hpp"
#include "sequence/seal.hpp"

using namespace kvrt;

namespace {

struct shape {
    uint32_t key_format, value_format;
    uint32_t kv_heads = 2, dim = 64;
    uint32_t window = 0;
};

struct pool_options {
    uint32_t block_tokens = 64;
    uint32_t flags = KV_POOL_DEBUG;
    uint32_t layout = KV_LAYOUT_NATIVE;
    uint32_t slabs = 16;
    uint32_t max_tokens = 1024;
};

void ok(kv_status status) {
    char text[512] = {};
    kv_last_error(text, sizeof text);
    REQUIRE_MESSAGE(status == KV_OK, kv_status_name(status), ": ", text);
}

/// What was written for a token, [heads][dim] in f32; keys have a mean per channel, as real ones
/// do.
std::vector<float> written(uint32_t tokens_seed, uint32_t layer, bool value, uint32_t heads,
                           uint32_t dim, uint64_t position) {
    std::mt19937 draw(tokens_seed * 7919u + layer * 104729u + (value ? 1u : 0u) +
                      static_cast<uint32_t>(position) * 31u);
    std::normal_distribution<float> noise;
    std::vector<float> row(heads * dim);
    for (uint32_t i = 0; i < row.size(); ++i) {
        row[i] = noise(draw) + (value ? 0.0f : static_cast<float>(i % 7) - 3.0f);
    }
    return row;
}

/// A pool, and a host that writes rows drawn by position.
struct world {
    std::vector<shape> shapes;
    kv_pool* pool = nullptr;

    world(std::vector<shape> layers, const pool_options& options) : shapes(std::move(layers)) {
        std::vector<kv_layer> model_layers;
        for (const shape& one : shapes) {
            kv_layer layer = KV_INIT(kv_layer);
            layer.query_heads = 2 * one.kv_heads;
            layer.kv_heads = one.kv_heads;
            layer.key_dim = one.dim;
            layer.key_format = one.key_format;
            layer.value_format = one.value_format;
            layer.window = one.window;
            layer.window_sinks = one.window != 0 ? 3 : 0;
            model_layers.push_back(layer);
        }
        kv_model model = KV_INIT(kv_model);
        model.layers = model_layers.data();
        model.layer_count = static_cast<uint32_t>(model_layers.size());
        kv_pool_config config = KV_INIT(kv_pool_config);
        config.arena_bytes = options.slabs * slab_bytes;
        config.block_tokens = options.block_tokens;
        config.flags = options.flags;
        config.layout = options.layout;
        config.max_sequences = 8;
        config.max_tokens_per_sequence = options.max_tokens;
        config.max_step_tokens = 512;
        config.threads = 2;
        ok(kv_pool_create(&config, &model, &pool));
    }
    ~world() { kv_pool_release(pool); }
    world(const world&) = delete;

    kv_seq create() const {
        kv_seq made = 0;
        ok(kv_seq_create(pool, nullptr, &made));
        return made;
    }

    void write(kv_step* step, uint32_t seed, uint64_t first, uint32_t count) const {
        for (uint32_t l = 0; l < shapes.size(); ++l) {
            kv_tensor tensors[2];
            std::vector<float> numbers[2];
            for (int value = 0; value < 2; ++value) {
                for (uint32_t r = 0; r < count; ++r) {
                    const auto row =
                        written(seed, l, value == 1, shapes[l].kv_heads, shapes[l].dim, first + r);
                    numbers[value].insert(numbers[value].end(), row.begin(), row.end());
                }
                tensors[value] = KV_INIT(kv_tensor);
                tensors[value].data = numbers[value].data();
                tensors[value].dtype = KV_DTYPE_F32;
                tensors[value].rows = count;
                tensors[value].heads = shapes[l].kv_heads;
                tensors[value].dim = shapes[l].dim;
            }
            ok(kv_write(step, l, &tensors[0], &tensors[1]));
        }
    }

    /// One step of `count` tokens of which `accepted` stay; cancelled if that is asked.
    kv_status step(kv_seq seq, uint32_t seed, uint32_t count, uint32_t accepted,
                   bool cancel = false) const {
        kv_step* open = nullptr;
        ok(kv_step_begin(pool, &open));
        kv_append_info info = KV_INIT(kv_append_info);
        ok(kv_seq_append(open, seq, nullptr, count, &info));
        const kv_status reserved = kv_step_reserve(open, nullptr);
        if (reserved != KV_OK) {
            ok(kv_step_cancel(open));
            return reserved;
        }
        write(open, seed, info.first_position, count);
        if (cancel) {
            ok(kv_step_cancel(open));
            return KV_OK;
        }
        if (accepted != count) ok(kv_step_accept(open, seq, accepted));
        ok(kv_step_end(open, nullptr));
        return KV_OK;
    }

    const sequence& inside(kv_seq seq) const { return *pool->store.sequences.find(seq); }
    const lane_state& lane(kv_seq seq, uint32_t layer) const { return inside(seq).lanes[layer]; }

    std::vector<float> stored(kv_seq seq, uint32_t layer, bool value, uint32_t head,
                              uint32_t slot) const {
        const lane_geometry& geometry = pool->store.model.lanes[layer];
        const lane_state& state = lane(seq, layer);
        const uint32_t tokens = pool->store.model.block_tokens;
        const tile_layout& layout =
            slot / tokens < state.sealed_blocks ? geometry.sealed_layout : geometry.layout;
        std::vector<float> row(shapes[layer].dim);
        read_row(value ? layout.values : layout.keys,
                 block_address(pool->store.blocks.arena(), state.table[slot / tokens]),
                 slot % tokens, head, 0, row.data());
        return row;
    }

    void check() const { ok(kv_pool_check(pool)); }
    uint64_t live_bytes() const {
        kv_pool_stats stats = KV_INIT(kv_pool_stats);
        ok(kv_pool_get_stats(pool, &stats));
        return stats.live_bytes;
    }
};

float rounded(float x) { return f16_to_f32(f32_to_f16(x)); }

/// A head's rows of positions [first, first + count) as the codec of an operand leaves them.
std::vector<std::vector<float>> sealed_rows(const world& w, uint32_t seed, uint32_t layer,
                                            bool value, uint32_t head,
                                            const std::vector<uint64_t>& positions) {
    const lane_geometry& geometry = w.pool->store.model.lanes[layer];
    const operand_layout& operand =
        value ? geometry.sealed_layout.values : geometry.sealed_layout.keys;
    const uint32_t dim = operand.dim;
    std::vector<float> rows;
    for (const uint64_t position : positions) {
        const auto all = written(seed, layer, value, w.shapes[layer].kv_heads, dim, position);
        std::vector<float> row(all.begin() + head * dim, all.begin() + (head + 1) * dim);
        if (operand.rotated) rotate_row(row.data(), dim);
        for (float& x : row) x = rounded(x);
        rows.insert(rows.end(), row.begin(), row.end());
    }
    std::vector<std::byte> tile(operand.tile_bytes);
    const uint32_t tokens = static_cast<uint32_t>(positions.size());
    operand.format->tile.seal(rows.data(), tokens, dim, tile.data());
    operand.format->tile.open(tile.data(), tokens, dim, 0, tokens, rows.data());
    std::vector<std::vector<float>> made;
    for (uint32_t t = 0; t < tokens; ++t) {
        std::vector<float> row(rows.begin() + t * dim, rows.begin() + (t + 1) * dim);
        if (operand.rotated) rotate_row(row.data(), dim);
        made.push_back(row);
    }
    return made;
}

bool tiled(const world& w, uint32_t layer, bool value) {
    const tile_layout& layout = w.pool->store.model.lanes[layer].sealed_layout;
    return value ? layout.values.tiled() : layout.keys.tiled();
}

/// Every slot of a sequence whose tiles hold consecutive tokens: sealed ones as the codec leaves
/// them, bit by bit; raw ones as f16.
void check_consecutive(const world& w, kv_seq seq, uint32_t seed, uint32_t tokens) {
    const uint32_t block_tokens = w.pool->store.model.block_tokens;
    for (uint32_t layer = 0; layer < w.shapes.size(); ++layer) {
        const lane_state& state = w.lane(seq, layer);
        REQUIRE(state.slots == tokens);
        const bool seals = w.pool->store.model.lanes[layer].seals;
        CHECK(state.sealed_blocks == (seals ? tokens / block_tokens : 0));
        for (int value = 0; value < 2; ++value) {
            if (!tiled(w, layer, value == 1)) continue;
            for (uint32_t head = 0; head < w.shapes[layer].kv_heads; ++head) {
                uint32_t wrong = 0;
                for (uint32_t first = 0; first + block_tokens <= tokens; first += block_tokens) {
                    std::vector<uint64_t> positions;
                    for (uint32_t i = 0; i < block_tokens; ++i) positions.push_back(first + i);
                    const auto rows = sealed_rows(w, seed, layer, value == 1, head, positions);
                    for (uint32_t i = 0; i < block_tokens; ++i) {
                        if (w.stored(seq, layer, value == 1, head, first + i) != rows[i]) ++wrong;
                    }
                }
                CHECK(wrong == 0);
                for (uint32_t slot = tokens / block_tokens * block_tokens; slot < tokens; ++slot) {
                    const auto all = written(seed, layer, value == 1, w.shapes[layer].kv_heads,
                                             w.shapes[layer].dim, slot);
                    const auto row = w.stored(seq, layer, value == 1, head, slot);
                    for (uint32_t i = 0; i < row.size(); ++i) {
                        REQUIRE(
                            row[i] ==
                            doctest::Approx(all[head * row.size() + i]).epsilon(0.002).scale(1.0));
                    }
                }
            }
        }
    }
}

const std::vector<shape> mixed = {
    {KV_FORMAT_KIVI4, KV_FORMAT_KIVI4},      {KV_FORMAT_KVARN4, KV_FORMAT_KVARN2},
    {KV_FORMAT_F16, KV_FORMAT_F16},          {KV_FORMAT_Q4_0, KV_FORMAT_KVARN4},
    {KV_FORMAT_KIVI2, KV_FORMAT_INT8_TOKEN},
};

TEST_CASE("blocks are sealed when they are full, whatever the chunks they came in") {
    for (const uint32_t layout : {KV_LAYOUT_NATIVE, KV_LAYOUT_HND, KV_LAYOUT_NHD}) {
        pool_options options;
        options.layout = layout;
        const world w(mixed, options);
        const kv_seq seq = w.create();
        uint32_t tokens = 0;
        for (const uint32_t chunk : {1u, 62u, 1u, 1u, 130u, 61u, 64u, 3u}) {
            ok(w.step(seq, 1, chunk, chunk));
            tokens += chunk;
            check_consecutive(w, seq, 1, tokens);
            w.check();
        }
        ok(kv_seq_release(w.pool, seq));
        CHECK(w.live_bytes() == 0);
        w.check();
    }
}

TEST_CASE("sealing gives the raw block back: what is held is tiles and one raw block") {
    const world w({{KV_FORMAT_KIVI4, KV_FORMAT_KIVI4}}, {});
    const lane_geometry& lane = w.pool->store.model.lanes[0];
    const uint64_t sealed = lane.sealed_layout.block_bytes, raw = lane.layout.block_bytes;
    // 64 tokens, 2 heads of 64: f16 keys and q4_1-like values of 40 bytes a row against tiles of
    // 4 bits, with two groups of 32 tokens that have 2 numbers of 2 bytes for each channel.
    CHECK(raw == 2 * 64 * (128 + 40));
    CHECK(sealed == 2 * (64 * 32 + 2 * 64 * 4 + 64 * 40));
    const kv_seq seq = w.create();
    for (uint32_t tokens = 1; tokens <= 200; ++tokens) {
        ok(w.step(seq, 1, 1, 1));
        CHECK(w.live_bytes() == tokens / 64 * sealed + (tokens % 64 != 0 ? raw : 0));
    }
    ok(kv_seq_release(w.pool, seq));
}

TEST_CASE("rejected and cancelled tokens are never in a tile") {
    const world w(mixed, {});
    const kv_seq seq = w.create();
    ok(w.step(seq, 1, 60, 60));
    ok(w.step(seq, 2, 8, 8, true));  // cancelled; other numbers
    check_consecutive(w, seq, 1, 60);
    kv_step* open = nullptr;
    ok(kv_step_begin(w.pool, &open));
    ok(kv_seq_append(open, seq, nullptr, 8, nullptr));
    ok(kv_step_reserve(open, nullptr));
    w.write(open, 2, 60, 8);  // drafts
    ok(kv_step_accept(open, seq, 0));
    ok(kv_step_end(open, nullptr));
    check_consecutive(w, seq, 1, 60);
    ok(w.step(seq, 1, 8, 4));
    check_consecutive(w, seq, 1, 64);
    ok(w.step(seq, 1, 140, 63));
    check_consecutive(w, seq, 1, 127);
    w.check();
}

TEST_CASE("a fork reads the same tiles, and writes its own tail") {
    const world w(mixed, {});
    const kv_seq parent = w.create();
    ok(w.step(parent, 1, 150, 150));
    kv_seq child = 0;
    ok(kv_seq_fork(w.pool, parent, 1, &child));
    const uint64_t before = w.live_bytes();
    ok(w.step(child, 1, 50, 50));
    ok(w.step(parent, 1, 10, 10));
    check_consecutive(w, child, 1, 200);
    check_consecutive(w, parent, 1, 160);
    for (uint32_t layer = 0; layer < mixed.size(); ++layer) {
        CHECK(w.lane(child, layer).table[0] == w.lane(parent, layer).table[0]);
    }
    ok(kv_seq_release(w.pool, child));
    CHECK(w.live_bytes() == before);
    check_consecutive(w, parent, 1, 160);
    w.check();
}

kv_layer_stats layer_stats(const world& w, uint32_t layer) {
    kv_layer_stats stats = KV_INIT(kv_layer_stats);
    stats.layer = layer;
    ok(kv_pool_get_layer_stats(w.pool, &stats));
    return stats;
}

TEST_CASE("going back into a tile opens it; coding it again costs little, and is reported") {
    const world w(mixed, {});
    const kv_seq seq = w.create();
    ok(w.step(seq, 1, 200, 200));
    CHECK(layer_stats(w, 0).recoded_rows == 0);
    ok(kv_seq_truncate(w.pool, seq, 100));
    w.check();
    for (uint32_t slot = 64; slot < 100; ++slot) {  // as before
        std::vector<uint64_t> positions;
        for (uint32_t i = 0; i < 64; ++i) positions.push_back(64 + i);
        if (slot == 64) {
            CHECK(w.stored(seq, 0, false, 1, slot) == sealed_rows(w, 1, 0, false, 1, positions)[0]);
        }
    }
    const auto old = w.stored(seq, 0, false, 0, 99);
    ok(w.step(seq, 1, 5, 5, true));  // opened, and closed again by the cancel
    CHECK(w.lane(seq, 0).sealed_blocks == 2);
    ok(w.step(seq, 1, 5, 5));
    CHECK(w.lane(seq, 0).sealed_blocks == 1);
    const auto raw = w.stored(seq, 0, false, 0, 99);
    for (uint32_t i = 0; i < raw.size(); ++i) CHECK(raw[i] == rounded(old[i]));
    ok(w.step(seq, 1, 23, 23));
    CHECK(w.lane(seq, 0).sealed_blocks == 2);
    // Slots 64 to 99 were coded twice: 36 rows of 2 heads, keys alone in layers 0 and 4.
    CHECK(layer_stats(w, 0).recoded_rows == 72);
    CHECK(layer_stats(w, 1).recoded_rows == 144);
    CHECK(layer_stats(w, 2).recoded_rows == 0);
    CHECK(layer_stats(w, 3).recoded_rows == 72);
    CHECK(layer_stats(w, 4).recoded_rows == 72);
    // 4 bits over a spread of some 5 deviations: a step of 0.33, an error of 0.1 of it squared.
    CHECK(layer_stats(w, 0).recoding_error < 0.05);
    CHECK(layer_stats(w, 0).recoding_error > 0.0);
    const auto twice = w.stored(seq, 0, false, 0, 99);
    for (uint32_t i = 0; i < twice.size(); ++i) {
        CHECK(std::abs(twice[i] - old[i]) < 0.3);  // half a step of the new tile, and of f16
    }
    w.check();
}

void compress(const world& w, kv_seq seq, uint32_t scorer, uint32_t budget,
              kv_compress_report& report) {
    kv_policy policy = KV_INIT(kv_policy);
    policy.scorer = scorer;
    policy.budget = budget;
    policy.recent = 8;
    policy.sinks = 4;
    policy.seed = budget;
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = &policy;
    report = KV_INIT(kv_compress_report);
    ok(kv_compress(w.pool, seq, &options, &report));
}

TEST_CASE(
    "survivors are coded anew once: tiles of what they were, with full blocks and a raw rest") {
    const world w(mixed, {});
    const kv_seq seq = w.create();
    ok(w.step(seq, 1, 250, 250));
    std::map<std::pair<uint32_t, uint64_t>, std::vector<float>> before;  // layer 0, keys
    for (uint32_t head = 0; head < 2; ++head) {
        for (uint32_t slot = 0; slot < 250; ++slot) {
            before[{head, slot}] = w.stored(seq, 0, false, head, slot);
        }
    }
    kv_compress_report report;
    compress(w, seq, KV_SCORER_RANDOM, 100, report);
    CHECK(report.outcome == KV_COMPRESS_DONE);
    CHECK(report.recoded_rows > 0);
    CHECK(report.recoding_error > 0.0);
    CHECK(report.recoding_error < 0.3);  // 2 bits are among them
    w.check();
    const lane_state& state = w.lane(seq, 0);
    CHECK(state.slots == 100);
    CHECK(state.blocks == 2);
    CHECK(state.sealed_blocks == 1);
    double worst = 0.0;
    for (uint32_t head = 0; head < 2; ++head) {
        const slot_positions positions = positions_of(w.pool->store, w.inside(seq), 0, head);
        for (uint32_t slot = 0; slot < 100; ++slot) {
            const auto row = w.stored(seq, 0, false, head, slot);
            const auto& old = before[{head, positions.at(slot)}];
            for (uint32_t i = 0; i < row.size(); ++i) {
                worst = std::max(worst, double{std::abs(row[i] - old[i])});
            }
            if (slot >= 64) {
                for (uint32_t i = 0; i < row.size(); ++i) REQUIRE(row[i] == rounded(old[i]));
            }
        }
    }
    CHECK(worst < 0.3);
    // Values of KIVI are token-local: byte by byte.
    const uint64_t held = w.live_bytes();
    ok(w.step(seq, 1, 60, 60));
    CHECK(w.live_bytes() > held);
    w.check();
}

TEST_CASE("token-local values beside tile-local keys move bit by bit") {
    const world w({{KV_FORMAT_KIVI4, KV_FORMAT_KIVI4}}, {});
    const kv_seq seq = w.create();
    ok(w.step(seq, 1, 250, 250));
    std::map<std::pair<uint32_t, uint64_t>, std::vector<float>> before;
    for (uint32_t head = 0; head < 2; ++head) {
        for (uint32_t slot = 0; slot < 250; ++slot) {
            before[{head, slot}] = w.stored(seq, 0, true, head, slot);
        }
    }
    for (const uint32_t budget : {190u, 130u, 70u, 40u}) {
        kv_compress_report report;
        compress(w, seq, KV_SCORER_RANDOM, budget, report);
        for (uint32_t head = 0; head < 2; ++head) {
            const slot_positions positions = positions_of(w.pool->store, w.inside(seq), 0, head);
            for (uint32_t slot = 0; slot < budget; ++slot) {
                REQUIRE(w.stored(seq, 0, true, head, slot) == before[{head, positions.at(slot)}]);
            }
        }
        w.check();
    }
}

TEST_CASE("survivors that do not move keep their tiles bit by bit") {
    const world w(mixed, {});
    const kv_seq seq = w.create();
    ok(w.step(seq, 1, 250, 250));
    const auto old = w.stored(seq, 1, true, 1, 70);
    kv_policy policy = KV_INIT(kv_policy);
    policy.scorer = KV_SCORER_STREAMING;
    policy.budget = 200;  // three blocks and a rest
    policy.sinks = 130;
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = &policy;
    kv_compress_report report = KV_INIT(kv_compress_report);
    ok(kv_compress(w.pool, seq, &options, &report));
    CHECK(w.stored(seq, 1, true, 1, 70) == old);
    CHECK(report.recoded_rows > 0);  // of the third block
    w.check();
}

/// Attention in double over what the pool says is stored, against kv_attend.
double attention_error(const world& w, kv_seq seq, uint32_t layer, uint32_t rows) {
    kv_step* open = nullptr;
    ok(kv_step_begin(w.pool, &open));
    kv_append_info info = KV_INIT(kv_append_info);
    ok(kv_seq_append(open, seq, nullptr, rows, &info));
    ok(kv_step_reserve(open, nullptr));
    w.write(open, 1, info.first_position, rows);
    const shape& shaped = w.shapes[layer];
    const uint32_t heads = 2 * shaped.kv_heads, dim = shaped.dim;
    std::vector<float> q(rows * heads * dim), out(q.size());
    std::mt19937 draw(5);
    std::normal_distribution<float> noise;
    for (float& x : q) x = noise(draw);
    kv_tensor tensors[2] = {KV_INIT(kv_tensor), KV_INIT(kv_tensor)};
    for (int i = 0; i < 2; ++i) {
        tensors[i].data = i == 0 ? q.data() : out.data();
        tensors[i].dtype = KV_DTYPE_F32;
        tensors[i].rows = rows;
        tensors[i].heads = heads;
        tensors[i].dim = dim;
    }
    ok(kv_attend(open, layer, &tensors[0], &tensors[1], nullptr));
    const uint32_t slots = w.lane(seq, layer).slots + rows;
    double worst = 0.0;
    for (uint32_t r = 0; r < rows; ++r) {
        for (uint32_t head = 0; head < heads; ++head) {
            std::vector<double> logits;
            double largest = -1e300, sum = 0.0;
            for (uint32_t slot = 0; slot + (rows - 1 - r) < slots; ++slot) {
                const auto key = w.stored(seq, layer, false, head / 2, slot);
                double logit = 0.0;
                for (uint32_t i = 0; i < dim; ++i) {
                    logit += double{q[(r * heads + head) * dim + i]} * double{key[i]};
                }
                logits.push_back(logit / std::sqrt(double(dim)));
                largest = std::max(largest, logits.back());
            }
            std::vector<double> result(dim, 0.0);
            for (uint32_t slot = 0; slot < logits.size(); ++slot) {
                const double weight = std::exp(logits[slot] - largest);
                sum += weight;
                const auto value = w.stored(seq, layer, true, head / 2, slot);
                for (uint32_t i = 0; i < dim; ++i) result[i] += weight * double{value[i]};
            }
            for (uint32_t i = 0; i < dim; ++i) {
                const double found = double{out[(r * heads + head) * dim + i]};
                worst = std::max(worst, std::abs(found - result[i] / sum));
            }
        }
    }
    ok(kv_step_cancel(open));
    return worst;
}

TEST_CASE("attention over tiles and raw rows together is the definition over what is stored") {
    for (const uint32_t dim : {64u, 80u, 128u}) {
        std::vector<shape> shapes = mixed;
        for (shape& one : shapes) one.dim = dim;
        const world w(shapes, {});
        const kv_seq seq = w.create();
        ok(w.step(seq, 1, 150, 150));
        for (uint32_t layer = 0; layer < shapes.size(); ++layer) {
            for (const uint32_t rows : {1u, 3u, 20u}) {
                CAPTURE(layer);
                CAPTURE(rows);
                CHECK(attention_error(w, seq, layer, rows) < 2e-5);
            }
        }
        kv_compress_report report;
        compress(w, seq, KV_SCORER_KEY_NORM, 90, report);
        for (uint32_t layer = 0; layer < shapes.size(); ++layer) {
            CHECK(attention_error(w, seq, layer, 1) < 2e-5);
        }
    }
}

TEST_CASE("a model with tiles of tokens that a block does not hold is refused, and says why") {
    kv_layer layer = KV_INIT(kv_layer);
    layer.query_heads = 1;
    layer.kv_heads = 1;
    layer.key_dim = 64;
    layer.key_format = KV_FORMAT_KIVI4;
    layer.value_format = KV_FORMAT_F16;
    kv_model model = KV_INIT(kv_model);
    model.layers = &layer;
    model.layer_count = 1;
    kv_pool_config config = KV_INIT(kv_pool_config);
    config.arena_bytes = slab_bytes;
    kv_pool* pool = nullptr;
    CHECK(kv_pool_create(&config, &model, &pool) == KV_UNSUPPORTED);
    char text[512];
    kv_last_error(text, sizeof text);
    CHECK(std::string(text).find("block_tokens is 16") != std::string::npos);
    layer.key_format = KV_FORMAT_F16;
    layer.value_format = KV_FORMAT_KVARN4;
    config.block_tokens = 32;
    CHECK(kv_pool_create(&config, &model, &pool) == KV_UNSUPPORTED);
    config.block_tokens = 128;
    ok(kv_pool_create(&config, &model, &pool));
    kv_pool_release(pool);
}

TEST_CASE("windows slide over tiles") {
    std::vector<shape> shapes = mixed;
    for (shape& one : shapes) one.window = 100;
    const world w(shapes, {});
    const kv_seq seq = w.create();
    for (uint32_t i = 0; i < 12; ++i) {
        ok(w.step(seq, 1, 50, 50));
        w.check();
    }
    // 600 tokens: the sinks' block, and blocks from position 500 on.
    CHECK(w.lane(seq, 0).blocks == 1 + 600 / 64 + 1 - 500 / 64);
    CHECK(w.lane(seq, 0).sealed_blocks + 1 == w.lane(seq, 0).blocks);
    std::vector<uint64_t> positions;
    for (uint32_t i = 0; i < 64; ++i) positions.push_back(512 + i);
    CHECK(w.stored(seq, 0, false, 0, 128) == sealed_rows(w, 1, 0, false, 0, positions)[0]);
    ok(kv_seq_release(w.pool, seq));
    CHECK(w.live_bytes() == 0);
}

TEST_CASE("while fences have not passed nothing is sealed under the host's kernels") {
    pool_options options;
    options.flags = KV_POOL_DEBUG | KV_POOL_HOST_FENCES;
    const world w({{KV_FORMAT_KIVI4, KV_FORMAT_KIVI4}}, options);
    const kv_seq seq = w.create();
    ok(w.step(seq, 1, 130, 130));
    CHECK(w.lane(seq, 0).sealed_blocks == 0);
    ok(w.step(seq, 1, 1, 1));  // fence 1 has not passed
    CHECK(w.lane(seq, 0).sealed_blocks == 0);
    ok(kv_pool_pass_fence(w.pool, 2));
    ok(w.step(seq, 1, 1, 1));
    CHECK(w.lane(seq, 0).sealed_blocks == 2);
    w.check();
    check_consecutive(w, seq, 1, 132);
}

TEST_CASE("a pool too small for raw blocks and tiles says so, and loses nothing") {
    pool_options options;
    options.slabs = 2;  // one of each class
    options.max_tokens = 8192;
    const world w({{KV_FORMAT_KIVI4, KV_FORMAT_KIVI4, 8, 128}}, options);
    const kv_seq seq = w.create();
    uint32_t tokens = 0;
    kv_status status = KV_OK;
    while ((status = w.step(seq, 1, 64, 64)) == KV_OK) tokens += 64;
    CHECK((status == KV_TOO_LARGE || status == KV_AGAIN));
    const lane_geometry& lane = w.pool->store.model.lanes[0];
    CHECK(tokens / 64 == slab_bytes / (lane.sealed_layout.block_bytes + guard_bytes));
    check_consecutive(w, seq, 1, tokens);
    w.check();
    ok(kv_seq_release(w.pool, seq));
    CHECK(w.live_bytes() == 0);
}

TEST_CASE(
    "any order of operations keeps every row near what was written, and every block counted") {
    pool_options options;
    options.slabs = 64;
    options.max_tokens = 2048;
    const world w(mixed, options);
    struct followed {
        kv_seq handle;
        uint64_t seen;
    };
    std::vector<followed> alive;
    std::mt19937 draw(11);
    const auto below = [&](uint32_t n) { return static_cast<uint32_t>(draw() % n); };
    for (int turn = 0; turn < 400; ++turn) {
        const uint32_t what = below(10);
        if (alive.empty() || (what == 0 && alive.size() < 6)) {
            alive.push_back({w.create(), 0});
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
            alive.push_back({child, one.seen});
        } else if (what == 6) {
            const uint64_t to = one.seen - std::min<uint64_t>(one.seen, below(100));
            const kv_status status = kv_seq_truncate(w.pool, one.handle, to);
            REQUIRE((status == KV_OK || status == KV_NO_SNAPSHOT));
            if (status == KV_OK) one.seen = to;
        } else if (what == 7 && w.lane(one.handle, 0).slots > 20) {
            kv_compress_report report;
            compress(w, one.handle, below(2) == 0 ? KV_SCORER_RANDOM : KV_SCORER_STREAMING,
                     16 + below(200), report);
        } else if (what == 8 && below(3) == 0) {
            ok(kv_seq_release(w.pool, one.handle));
            one = alive.back();
            alive.pop_back();
            continue;
        }
        w.check();
        const followed& looked = alive[below(static_cast<uint32_t>(alive.size()))];
        const uint32_t slots = w.lane(looked.handle, 0).slots;
        if (slots == 0) continue;
        for (int probe = 0; probe < 20; ++probe) {
            const uint32_t layer = below(static_cast<uint32_t>(mixed.size()));
            const uint32_t head = below(2), slot = below(slots);
            const bool value = below(2) == 1;
            const slot_positions positions =
                positions_of(w.pool->store, w.inside(looked.handle), layer, head);
            const auto row = w.stored(looked.handle, layer, value, head, slot);
            const auto distance = [&](uint64_t position) {
                const auto all = written(1, layer, value, 2, 64, position);
                double sum = 0.0;
                for (uint32_t i = 0; i < 64; ++i) {
                    sum += std::pow(double{row[i]} - double{all[head * 64 + i]}, 2.0);
                }
                return sum;
            };
            // However often it was coded again, it is this token's row and no neighbour's.
            const uint64_t position = positions.at(slot);
            const double error = distance(position);
            for (uint64_t other = position + 1; other < position + 5; ++other) {
                REQUIRE(error < distance(other));
            }
            // 4 bits stay near, too; 2 bits grow with each time.
            const bool two_bits = layer == 4 || (layer == 1 && value);
            double square = 0.0;
            for (const float x : row) square += double{x} * double{x};
            if (!two_bits) REQUIRE(error < 0.1 * square);
        }
    }
    for (const followed& one : alive) ok(kv_seq_release(w.pool, one.handle));
    CHECK(w.live_bytes() == 0);
    w.check();
}

}  // namespace
