// Compaction of caches in every format whose rows stand for themselves: rows are moved, never coded
// again. Bytes are those from before, attention that over a cache that never held anything else,
// and a step that is open over another sequence meanwhile notices nothing.
#include "tables.hpp"

using namespace conformance;

namespace {

constexpr uint32_t tokens = 130;
constexpr uint32_t budget = 37;

struct stored {
    uint32_t format;
    uint32_t storage_flags;
};

constexpr stored all_stored[] = {
    {KV_FORMAT_F32, 0},
    {KV_FORMAT_F16, 0},
    {KV_FORMAT_BF16, 0},
    {KV_FORMAT_FP8_E4M3, KV_STORAGE_SCALE_ONE},
    {KV_FORMAT_FP8_E5M2, KV_STORAGE_SCALE_ONE | KV_STORAGE_ROTATE},
    {KV_FORMAT_FP8_TOKEN, 0},
    {KV_FORMAT_INT8_TOKEN, KV_STORAGE_ROTATE},
    {KV_FORMAT_INT4_TOKEN, 0},
    {KV_FORMAT_INT4_TOKEN, KV_STORAGE_ROTATE},
    {KV_FORMAT_Q8_0, 0},
    {KV_FORMAT_Q4_0, KV_STORAGE_ROTATE},
    {KV_FORMAT_Q4_1, 0},
    {KV_FORMAT_NVFP4, 0},
    {KV_FORMAT_MXFP4, 0},
};

/// Two layers of odd dimensions: the format as keys and as values, beside itself and beside f16.
pool_shape shape_of(const stored& one, uint32_t layout) {
    layer_shape both;
    both.key_format = both.value_format = one.format;
    both.storage_flags = one.storage_flags;
    both.value_dim = 72;
    layer_shape values = both;
    values.key_dim = 64;
    values.value_dim = 40;
    pool_shape shape;
    shape.layers = {both, values};
    shape.layout = layout;
    return shape;
}

/// The bytes of one token's row.
std::string row_bytes(const exported& e, uint32_t slot, uint32_t head, bool value) {
    const uint32_t words = value ? e.tables.value_words : e.tables.key_words;
    const uint32_t bytes = value ? e.tables.value_word_bytes : e.tables.key_word_bytes;
    const int32_t block = e.block_table[slot / e.tables.block_tokens];
    std::string row;
    for (uint32_t word = 0; word < words; ++word) {
        row.append(e.address(block, slot % e.tables.block_tokens, head, word, value), bytes);
    }
    return row;
}

/// Rows of a head by position: keys, then values.
struct head_rows {
    std::vector<std::string> by_position = std::vector<std::string>(tokens);
    uint32_t count = 0;
};

std::vector<head_rows> rows_of(engine& host, kv_seq sequence, uint32_t layer) {
    kv_step* step = host.begin({{sequence, 3, 1}});
    const exported e(step, layer);
    std::vector<head_rows> heads(2);
    for (uint32_t head = 0; head < 2; ++head) {
        const int32_t* positions = e.slot_positions.data() + head * e.slot_positions.size() / 2;
        for (uint32_t slot = 0; slot + 1 < static_cast<uint32_t>(e.kv_len[0]); ++slot) {
            const auto position = static_cast<uint32_t>(positions[slot]);
            REQUIRE(position < tokens);
            heads[head].by_position[position] =
                row_bytes(e, slot, head, false) + row_bytes(e, slot, head, true);
            ++heads[head].count;
        }
    }
    require_ok(kv_step_cancel(step));
    return heads;
}

void compress(engine& host, kv_seq sequence, const kv_policy& policy) {
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = &policy;
    kv_compress_report report = KV_INIT(kv_compress_report);
    require_ok(kv_compress(host.pool(), sequence, &options, &report));
    CHECK(report.outcome == KV_COMPRESS_DONE);
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

constexpr uint32_t all_layouts[] = {KV_LAYOUT_NATIVE, KV_LAYOUT_HND, KV_LAYOUT_NHD};

}  // namespace

TEST_CASE("survivors of a compaction have the bytes that they had, in every format and layout") {
    for (const uint32_t layout : all_layouts) {
        for (const stored& one : all_stored) {
            CAPTURE(layout);
            CAPTURE(one.format);
            engine host(shape_of(one, layout));
            const kv_seq a = host.create();
            host.run({{a, 3, tokens}});
            std::vector<std::vector<head_rows>> before;
            for (uint32_t layer = 0; layer < 2; ++layer) {
                before.push_back(rows_of(host, a, layer));
            }
            compress(host, a, policy_of(KV_SCORER_RANDOM, budget));  // each head its own survivors
            for (uint32_t layer = 0; layer < 2; ++layer) {
                CAPTURE(layer);
                const std::vector<head_rows> after = rows_of(host, a, layer);
                for (uint32_t head = 0; head < 2; ++head) {
                    CHECK(before[layer][head].count == tokens);
                    CHECK(after[head].count == budget);
                    uint32_t same = 0, different = 0;
                    for (uint32_t position = 0; position < tokens; ++position) {
                        const std::string& row = after[head].by_position[position];
                        if (row.empty()) continue;
                        ++(row == before[layer][head].by_position[position] ? same : different);
                    }
                    CHECK(same == budget);
                    CHECK(different == 0);
                    // Rows differ from each other, or this would say nothing.
                    CHECK(before[layer][head].by_position[1] != before[layer][head].by_position[2]);
                }
            }
        }
    }
}

TEST_CASE("in every format a compacted cache attends as one that was only given the survivors") {
    for (const uint32_t layout : all_layouts) {
        for (const stored& one : all_stored) {
            CAPTURE(layout);
            CAPTURE(one.format);
            engine host(shape_of(one, layout)), fresh(shape_of(one, layout));
            const kv_seq a = host.create();
            host.run({{a, 3, tokens}});
            kv_policy policy = policy_of(KV_SCORER_RANDOM, budget);
            policy.selection = KV_SELECT_UNION;
            compress(host, a, policy);
            const std::vector<uint32_t> survivors = host.positions(a, 0, 0);
            REQUIRE(survivors.size() == budget);
            const kv_seq b = fresh.create();
            part given{b, 3, budget};
            given.content.assign(survivors.begin(), survivors.end());
            fresh.run({given});
            part next{b, 3, 1};
            next.content_shift = tokens - budget;
            const auto found = host.run({{a, 3, 1}}), expected = fresh.run({next});
            for (uint32_t layer = 0; layer < 2; ++layer) {
                CHECK(same_bits(found[layer], expected[layer]));
            }
        }
    }
}

TEST_CASE("in every format an open step over another sequence is none the wiser") {
    for (const stored& one : all_stored) {
        CAPTURE(one.format);
        engine host(shape_of(one, KV_LAYOUT_NATIVE)), still(shape_of(one, KV_LAYOUT_NATIVE));
        const kv_seq a = host.create(), b = host.create(), alone = still.create();
        // In turn, so that blocks of both lie among each other.
        for (uint32_t i = 0; i < tokens / 10; ++i) host.run({{a, 3, 10}, {b, 4, 10}});
        for (uint32_t i = 0; i < tokens / 10; ++i) still.run({{alone, 4, 10}});
        kv_step* step = host.begin({{b, 4, 2}});
        host.write(step, 0);
        const std::vector<float> first = host.attend(step, 0);
        const exported tables(step, 1);
        compress(host, a, policy_of(KV_SCORER_RANDOM, budget));
        const exported later(step, 1);
        CHECK(tables.block_table == later.block_table);
        host.write(step, 1);
        const std::vector<float> second = host.attend(step, 1);
        require_ok(kv_step_end(step, nullptr));
        const auto expected = still.run({{alone, 4, 2}});
        CHECK(same_bits(first, expected[0]));
        CHECK(same_bits(second, expected[1]));
        require_ok(kv_pool_check(host.pool()));
    }
}
