// Rounds that leave other numbers of tokens in each KV head's lane: positions, memory that comes
// back, and attention over what is left, by its definition in double on what lies in the arena.
#include "retention/round.hpp"
#include "tiles_fixture.hpp"

using namespace kvrt;

namespace {

constexpr uint32_t kv_heads = 4, group = 2, dim = 64, block_tokens = 64;

struct heads_pool {
    kv_pool* pool = nullptr;
    kv_seq sequence = 0;

    heads_pool(uint32_t key_format, uint32_t value_format, uint32_t threads) {
        kv_rope rope = KV_INIT(kv_rope);
        rope.style = KV_ROPE_HALF;
        std::vector<float> means(kv_heads * dim), scales(kv_heads * dim);
        for (uint32_t i = 0; i < means.size(); ++i) {
            means[i] = static_cast<float>(i % 7) - 3.0f;
            scales[i] = 1.0f + static_cast<float>(i / dim) + static_cast<float>(i % 32 % 3);
        }
        kv_storage channels = KV_INIT(kv_storage);
        channels.channel_means = means.data();
        channels.channel_scales = scales.data();
        channels.channel_heads = kv_heads;
        channels.channel_dim = dim;
        kv_layer layer = KV_INIT(kv_layer);
        layer.flags = KV_LAYER_LANE_PER_HEAD;
        layer.query_heads = group * kv_heads;
        layer.kv_heads = kv_heads;
        layer.key_dim = dim;
        layer.key_format = key_format;
        layer.value_format = value_format;
        layer.rope = &rope;
        if (key_format == KV_FORMAT_AFFINE4) layer.key_storage = &channels;
        kv_model model = KV_INIT(kv_model);
        model.layers = &layer;
        model.layer_count = 1;
        kv_pool_config config = KV_INIT(kv_pool_config);
        config.arena_bytes = 8 * slab_bytes;
        config.block_tokens = block_tokens;
        config.flags = KV_POOL_DEBUG;
        config.max_sequences = 4;
        config.max_tokens_per_sequence = 1024;
        config.threads = threads;
        tiles_test::ok(kv_pool_create(&config, &model, &pool));
        tiles_test::ok(kv_seq_create(pool, nullptr, &sequence));
    }
    ~heads_pool() { kv_pool_release(pool); }
    heads_pool(const heads_pool&) = delete;

    kvrt::sequence& inside() const { return *pool->store.sequences.find(sequence); }
    const lane_state& lane(uint32_t head) const { return inside().lanes[head]; }
    uint64_t live_bytes() const {
        kv_pool_stats stats = KV_INIT(kv_pool_stats);
        tiles_test::ok(kv_pool_get_stats(pool, &stats));
        return stats.live_bytes;
    }
    std::vector<uint32_t> positions(uint32_t head) const {
        std::vector<uint32_t> found(1024);
        uint64_t count = 0;
        tiles_test::ok(
            kv_seq_get_positions(pool, sequence, 0, head, found.size(), found.data(), &count));
        found.resize(count);
        return found;
    }

    /// A head's row in a slot as it lies there, turned back to how it was handed over.
    std::vector<float> stored(bool value, uint32_t head, uint32_t slot, uint32_t position) const {
        const lane_geometry& geometry = pool->store.model.lanes[head];
        const tile_layout& layout = slot / block_tokens < lane(head).sealed_blocks
                                        ? geometry.sealed_layout
                                        : geometry.layout;
        std::vector<float> row(dim);
        read_row(value ? layout.values : layout.keys,
                 block_address(pool->store.blocks.arena(), lane(head).table[slot / block_tokens]),
                 slot % block_tokens, 0, position, row.data());
        return row;
    }

    void check_attention(uint32_t rows, uint64_t first, const std::vector<float>& queries,
                         const std::vector<float>& out) const {
        double off = 0, size = 0;
        for (uint32_t head = 0; head < kv_heads; ++head) {
            std::vector<uint32_t> at = positions(head);
            for (uint32_t r = 0; r < rows; ++r) at.push_back(static_cast<uint32_t>(first + r));
            std::vector<std::vector<float>> keys, values;
            for (uint32_t slot = 0; slot < at.size(); ++slot) {
                keys.push_back(stored(false, head, slot, at[slot]));
                values.push_back(stored(true, head, slot, at[slot]));
            }
            for (uint32_t i = 0; i < rows * group; ++i) {
                const uint32_t row = i / group;
                const uint64_t vector = uint64_t{row} * group * kv_heads + head * group + i % group;
                std::vector<double> sums(dim);
                double total = 0;
                for (uint32_t slot = 0; slot + rows - 1 - row < at.size(); ++slot) {
                    double dot = 0;
                    for (uint32_t d = 0; d < dim; ++d) {
                        dot += double{queries[vector * dim + d]} * double{keys[slot][d]};
                    }
                    const double weight = std::exp(dot / 8.0);
                    total += weight;
                    for (uint32_t d = 0; d < dim; ++d) sums[d] += weight * values[slot][d];
                }
                for (uint32_t d = 0; d < dim; ++d) {
                    const double found = double{out[vector * dim + d]};
                    off += (found - sums[d] / total) * (found - sums[d] / total);
                    size += sums[d] / total * sums[d] / total;
                }
            }
        }
        CHECK(std::sqrt(off / size) < 1e-5);
    }

    void step(uint32_t rows, std::mt19937& random) const {
        std::normal_distribution<float> normal;
        const auto draw = [&](uint32_t heads, float factor) {
            std::vector<float> numbers(rows * heads * dim);
            for (uint32_t i = 0; i < numbers.size(); ++i) {
                numbers[i] = factor * (normal(random) + static_cast<float>(i % 7) - 3.0f);
            }
            return numbers;
        };
        std::vector<float> keys = draw(kv_heads, 1.0f), values = draw(kv_heads, 1.0f);
        std::vector<float> queries = draw(kv_heads * group, 0.1f), out(queries.size());
        const auto view = [&](std::vector<float>& numbers, uint32_t heads) {
            kv_tensor tensor = KV_INIT(kv_tensor);
            tensor.data = numbers.data();
            tensor.dtype = KV_DTYPE_F32;
            tensor.rows = rows;
            tensor.heads = heads;
            tensor.dim = dim;
            return tensor;
        };
        kv_step* open = nullptr;
        kv_append_info info = KV_INIT(kv_append_info);
        tiles_test::ok(kv_step_begin(pool, &open));
        tiles_test::ok(kv_seq_append(open, sequence, nullptr, rows, &info));
        tiles_test::ok(kv_step_reserve(open, nullptr));
        const kv_tensor k = view(keys, kv_heads), v = view(values, kv_heads);
        const kv_tensor q = view(queries, kv_heads * group), o = view(out, kv_heads * group);
        tiles_test::ok(kv_write(open, 0, &k, &v));
        tiles_test::ok(kv_attend(open, 0, &q, &o, nullptr));
        check_attention(rows, info.first_position, queries, out);
        tiles_test::ok(kv_step_end(open, nullptr));
        tiles_test::ok(kv_pool_check(pool));
    }

    /// Lanes with keep 0 are left whole.
    compaction_report round(const std::vector<uint32_t>& keep) const {
        kv_policy policy = KV_INIT(kv_policy);
        policy.scorer = KV_SCORER_RANDOM;
        policy.budget = 1;
        policy.recent = 5;
        policy.seed = 3;
        round_plan plan = plan_of(pool->store, pool->retention, inside(), policy);
        for (uint32_t head = 0; head < kv_heads; ++head) {
            pool->retention.chosen_lanes[head] = keep[head] != 0 ? 1 : 0;
            pool->retention.keep[head] = keep[head];
        }
        compaction_report report;
        REQUIRE(run_round(plan, report) == KV_OK);
        publish_stats(*pool);
        tiles_test::ok(kv_pool_check(pool));
        return report;
    }
};

/// Bytes of the blocks that so many slots take, full ones sealed where the format does that.
uint64_t bytes_of(const heads_pool& p, uint32_t slots) {
    const lane_geometry& geometry = p.pool->store.model.lanes[0];
    const uint64_t full = slots / block_tokens, open = slots % block_tokens != 0 ? 1 : 0;
    return full * geometry.sealed_layout.block_bytes + open * geometry.layout.block_bytes;
}

}  // namespace

TEST_CASE("lanes per head keep other numbers of tokens, and give the memory of the others back") {
    const std::pair<uint32_t, uint32_t> formats[] = {
        {KV_FORMAT_F16, KV_FORMAT_F16},        {KV_FORMAT_INT8_TOKEN, KV_FORMAT_INT4_TOKEN},
        {KV_FORMAT_KIVI4, KV_FORMAT_KIVI4},    {KV_FORMAT_KVARN4, KV_FORMAT_Q8_0},
        {KV_FORMAT_AFFINE4, KV_FORMAT_KVARN4},
    };
    for (const auto& [keys, values] : formats) {
        CAPTURE(keys);
        CAPTURE(values);
        std::mt19937 random(keys);
        heads_pool p(keys, values, 1 + keys % 2);
        for (const uint32_t rows : {300u, 100u, 1u}) p.step(rows, random);
        std::vector<std::vector<uint32_t>> before(kv_heads);
        for (uint32_t head = 0; head < kv_heads; ++head) before[head] = p.positions(head);

        const std::vector<uint32_t> keep = {30, 300, 64, 0};
        const uint64_t bytes = p.live_bytes();
        CHECK(bytes == kv_heads * bytes_of(p, 401));
        const compaction_report report = p.round(keep);
        CHECK(report.layers == 1);
        CHECK(report.tokens_before == 4 * 401);
        CHECK(report.tokens_after == 30 + 300 + 64 + 401);
        CHECK(p.live_bytes() ==
              bytes_of(p, 30) + bytes_of(p, 300) + bytes_of(p, 64) + bytes_of(p, 401));
        kv_seq_layer_info info = KV_INIT(kv_seq_layer_info);
        tiles_test::ok(kv_seq_get_layer_info(p.pool, p.sequence, 0, &info));
        CHECK(info.retained == 401);
        CHECK(info.blocks == 1 + 5 + 1 + 7);
        for (uint32_t head = 0; head < kv_heads; ++head) {
            const std::vector<uint32_t> left = p.positions(head);
            REQUIRE(left.size() == (keep[head] != 0 ? keep[head] : 401));
            CHECK(
                std::includes(before[head].begin(), before[head].end(), left.begin(), left.end()));
            for (uint32_t i = 1; i <= 5; ++i) CHECK(left[left.size() - i] == 401 - i);
        }

        // What follows fills other places in each lane's blocks.
        for (const uint32_t rows : {1u, 4u, 1u, 70u, 1u}) p.step(rows, random);
        p.round({40, 200, 100, 90});
        for (const uint32_t rows : {1u, 9u, 1u}) p.step(rows, random);
        tiles_test::ok(kv_seq_truncate(p.pool, p.sequence, 480));
        for (const uint32_t rows : {1u, 60u}) p.step(rows, random);
        tiles_test::ok(kv_seq_release(p.pool, p.sequence));
        CHECK(p.live_bytes() == 0);
    }
}
