// Attention's kernels against the definition in double, on every instruction set of this machine.
#include "attention_fixture.hpp"

using namespace kvrt;
using namespace attention_test;
using paged_test::on_every_target;

namespace {

constexpr double tolerance = 1e-5;

struct started_executor {
    host_allocator allocator;
    executor threads;
    explicit started_executor(uint32_t count) {
        REQUIRE(threads.start(allocator, count, nullptr) == KV_OK);
    }
};

template <class number, std::size_t count>
number pick(std::mt19937& random, const number (&choices)[count]) {
    return choices[random() % count];
}

problem draw(std::mt19937& random, bool native_only) {
    const uint32_t kv_heads = pick(random, {1u, 2u, 3u});
    const uint32_t group = pick(random, {1u, 2u, 3u, 4u, 5u, 7u, 8u, 9u, 16u});
    const uint32_t key_dim = pick(random, {32u, 40u, 64u, 72u, 80u, 96u, 128u, 192u, 256u});
    const uint32_t value_dim = pick(random, {32u, 64u, 72u, 128u, 256u});
    const uint32_t block_tokens = pick(random, {16u, 32u, 64u, 128u});
    const uint32_t rows = pick(random, {1u, 1u, 1u, 2u, 5u, 8u, 9u, 30u});
    const uint32_t slots = rows + random() % pick(random, {1u, 30u, 150u, 700u});
    const tile_order order =
        native_only ? tile_order::native
                    : pick(random, {tile_order::native, tile_order::hnd, tile_order::nhd});
    paged_cache cache(
        order, block_tokens, kv_heads, key_dim, value_dim, pick(random, paged_test::all_elements),
        pick(random, paged_test::all_elements), slots, static_cast<uint32_t>(random()));
    problem made(std::move(cache), group, rows, slots, random);
    if (random() % 3 == 0) made.layer.softcap = 3.0f;
    if (random() % 3 == 0) made.add_sinks(random);
    if (random() % 3 == 0) made.add_slopes();
    if (random() % 2 == 0) {
        made.layer.window = pick(random, {1u, 7u, 40u, 200u});
        made.layer.window_sinks = pick(random, {0u, 3u, 20u});
    }
    return made;
}

constexpr uint16_t f16_nan = 0x7e00, f16_infinity = 0x7c00;

/// Sets one element of an f16 slot, for every head.
void poison(problem& target, bool value, uint32_t slot, uint16_t bits) {
    for (uint32_t head = 0; head < target.layer.kv_heads; ++head) {
        std::memcpy(
            target.cache.arena + target.cache.offset(target.cache.blocks, value, slot, head, 1),
            &bits, sizeof bits);
    }
}

}  // namespace

TEST_CASE("attention is what its definition says, for any geometry") {
    started_executor one(1);
    on_every_target([&] {
        std::mt19937 random(11);
        for (int trial = 0; trial < 60; ++trial) {
            CAPTURE(trial);
            const problem drawn = draw(random, trial % 2 == 0);
            CHECK(distance(drawn, run(drawn, one.threads)) < tolerance);
        }
    });
}

TEST_CASE("the reference is what the definition says") {
    started_executor one(1);
    std::mt19937 random(12);
    for (int trial = 0; trial < 30; ++trial) {
        CAPTURE(trial);
        const problem drawn = draw(random, false);
        CHECK(distance(drawn, run(drawn, one.threads, path::reference)) < 1e-6);
    }
}

TEST_CASE("threads and workspace do not show in the bits") {
    started_executor one(1), three(3);
    std::mt19937 random(13);
    for (int trial = 0; trial < 40; ++trial) {
        CAPTURE(trial);
        const problem drawn = draw(random, false);
        const result alone = run(drawn, one.threads);
        CHECK(alone == run(drawn, three.threads));
        CHECK(alone == run(drawn, three.threads, path::kernels, 8 << 20));
    }
}

TEST_CASE("a long context is cut into pieces that join to the whole") {
    started_executor one(1), three(3);
    std::mt19937 random(14);
    for (const uint32_t rows : {1u, 4u}) {
        for (const uint32_t window : {0u, 1500u}) {
            paged_cache cache(tile_order::native, 16, 2, 64, 64, element::f16, element::bf16, 3000);
            problem drawn(std::move(cache), 3, rows, 3000, random);
            drawn.layer.window = window;
            drawn.layer.window_sinks = window != 0 ? 5 : 0;
            const result alone = run(drawn, one.threads);
            CHECK(distance(drawn, alone) < tolerance);
            CHECK(alone == run(drawn, three.threads, path::kernels, 1 << 20));
        }
    }
}

TEST_CASE("what a row does not see is not multiplied") {
    started_executor one(1);
    on_every_target([&] {
        std::mt19937 random(15);
        for (const uint32_t rows : {1u, 3u, 20u}) {
            for (const uint16_t flaw : {f16_nan, f16_infinity}) {
                CAPTURE(rows);
                paged_cache cache(tile_order::native, 16, 1, 64, 64, element::f16, element::f16,
                                  90);
                problem drawn(std::move(cache), 4, rows, 90, random);
                drawn.layer.window = 30;
                drawn.layer.window_sinks = 2;
                // Behind every row's window, and beyond the sinks.
                poison(drawn, true, 10, flaw);
                poison(drawn, false, 11, flaw);
                CHECK(distance(drawn, run(drawn, one.threads)) < tolerance);
                if (rows == 1) continue;
                // The last token: rows before it must not notice.
                const result clean = run(drawn, one.threads);
                poison(drawn, true, 89, flaw);
                const result flawed = run(drawn, one.threads);
                const std::size_t before = std::size_t{rows - 1} * 4 * 64;
                for (std::size_t i = 0; i < before; ++i) {
                    REQUIRE(flawed.out[i] == doctest::Approx(clean.out[i]).epsilon(1e-5));
                }
                CHECK(!std::isfinite(flawed.out[before + 1]));
            }
        }
    });
}

TEST_CASE("slots whose logits are minus infinity weigh nothing, alone in a run or everywhere") {
    started_executor one(1);
    on_every_target([&] {
        std::mt19937 random(19);
        for (const uint32_t rows : {1u, 3u}) {
            for (const path which : {path::kernels, path::reference}) {
                CAPTURE(rows);
                paged_cache cache(tile_order::native, 16, 1, 64, 64, element::f16, element::f16,
                                  150);
                problem drawn(std::move(cache), 2, rows, 150, random);
                for (std::size_t i = 1; i < drawn.queries.size(); i += 64) drawn.queries[i] = -1.0f;
                // The first whole run and some of the second.
                for (uint32_t slot = 0; slot < 70; ++slot) poison(drawn, false, slot, f16_infinity);
                CHECK(distance(drawn, run(drawn, one.threads, which)) < tolerance);
                for (uint32_t slot = 70; slot < 150; ++slot) {
                    poison(drawn, false, slot, f16_infinity);
                }
                const result none = run(drawn, one.threads, which);
                for (const float value : none.out) REQUIRE(value == 0.0f);
                for (const float value : none.log_sum_exp) REQUIRE(value == -INFINITY);
            }
        }
    });
}

TEST_CASE("an item computes the same alone and among others") {
    started_executor one(1), three(3);
    std::mt19937 random(16);
    const uint32_t lengths[] = {5, 700, 64, 1};
    const uint32_t row_counts[] = {1, 2, 30, 1};
    constexpr uint32_t dim = 64, heads = 6;
    // One arena of four sequences: a long cache whose blocks are dealt out.
    paged_cache shared(tile_order::native, 16, 2, dim, dim, element::bf16, element::bf16, 900);
    problem whole(std::move(shared), 3, 34, 900, random);
    std::vector<attend_item> items;
    uint32_t first_block = 0, first_row = 0;
    for (uint32_t i = 0; i < 4; ++i) {
        attend_item item;
        item.blocks = whole.cache.blocks.data() + first_block;
        item.first_row = first_row;
        item.slots = std::max(lengths[i], row_counts[i]);
        item.rows = row_counts[i];
        item.next_position = item.slots;
        first_block += (item.slots + 15) / 16;
        first_row += item.rows;
        items.push_back(item);
    }
    std::vector<std::byte> workspace(1 << 22);
    const auto attend_over = [&](const attend_item* some, uint32_t count, executor& threads) {
        std::vector<float> out(std::size_t{34} * heads * dim, -1.0f);
        attend_call call;
        call.layer = &whole.layer;
        call.arena = whole.cache.arena;
        call.items = some;
        call.item_count = count;
        call.queries = {reinterpret_cast<std::byte*>(whole.queries.data()), element::f32,
                        heads * dim, dim, 1};
        call.out = {reinterpret_cast<std::byte*>(out.data()), element::f32, heads * dim, dim, 1};
        call.workspace = workspace.data();
        call.workspace_bytes = workspace.size();
        attend(call, threads);
        return out;
    };
    const std::vector<float> together = attend_over(items.data(), 4, three.threads);
    for (const attend_item& item : items) {
        const std::vector<float> alone = attend_over(&item, 1, one.threads);
        const std::size_t first = std::size_t{item.first_row} * heads * dim;
        CHECK(std::memcmp(together.data() + first, alone.data() + first,
                          std::size_t{item.rows} * heads * dim * sizeof(float)) == 0);
    }
}

TEST_CASE("explicit positions count for ALiBi") {
    started_executor one(1);
    std::mt19937 random(17);
    paged_cache cache(tile_order::native, 16, 1, 32, 32, element::f32, element::f32, 40);
    problem drawn(std::move(cache), 2, 1, 40, random);
    drawn.add_slopes();
    // The first 20 slots stand at positions 0, 3, 6, ...; the others end at position 139.
    std::vector<uint32_t> stored(std::size_t{drawn.cache.block_count} * 16, 0xffffffffu);
    position_store positions;
    positions.base = stored.data();
    positions.numbering = block_numbering(drawn.cache.layout.block_bytes / block_unit);
    positions.block_stride = 16;
    positions.block_tokens = 16;
    for (uint32_t slot = 0; slot < 20; ++slot) {
        positions.of(drawn.cache.blocks[slot / 16], 0)[slot % 16] = 3 * slot;
    }
    attend_item item = drawn.item();
    item.explicit_slots = 20;
    item.next_position = 140;
    std::vector<float> out(2 * 32);
    std::vector<std::byte> workspace(attend_workspace_bytes(drawn.layer, 40));
    attend_call call;
    call.layer = &drawn.layer;
    call.arena = drawn.cache.arena;
    call.positions = positions;
    call.items = &item;
    call.item_count = 1;
    call.queries = {reinterpret_cast<std::byte*>(drawn.queries.data()), element::f32, 64, 32, 1};
    call.out = {reinterpret_cast<std::byte*>(out.data()), element::f32, 64, 32, 1};
    call.workspace = workspace.data();
    call.workspace_bytes = workspace.size();
    attend(call, one.threads);
    for (uint32_t head = 0; head < 2; ++head) {
        std::vector<double> weights(40);
        double sum = 0;
        for (uint32_t slot = 0; slot < 40; ++slot) {
            double dot = 0;
            for (uint32_t i = 0; i < 32; ++i) {
                dot += double{drawn.queries[head * 32 + i]} * drawn.cache.get(false, slot, 0, i);
            }
            const double position = slot < 20 ? 3.0 * slot : 100.0 + slot;
            weights[slot] = std::exp(dot * double{drawn.layer.scale} +
                                     double{drawn.slopes[head]} * (position - 139.0));
            sum += weights[slot];
        }
        for (uint32_t i = 0; i < 32; ++i) {
            double expected = 0;
            for (uint32_t slot = 0; slot < 40; ++slot) {
                expected += weights[slot] / sum * drawn.cache.get(true, slot, 0, i);
            }
            CHECK(out[head * 32 + i] == doctest::Approx(expected).epsilon(1e-4));
        }
    }
}

TEST_CASE("queries and outputs of 16 bits with any strides") {
    started_executor one(1);
    std::mt19937 random(18);
    for (const element type : {element::f16, element::bf16}) {
        paged_cache cache(tile_order::native, 16, 2, 64, 40, element::f16, element::f16, 50);
        problem drawn(std::move(cache), 2, 3, 50, random);
        // Queries in the middle of a packed row of 1000 elements, every second element used.
        constexpr int64_t row_stride = 1000, head_stride = 160, dim_stride = 2;
        std::vector<uint16_t> packed(3 * row_stride, 0x7fff), out(3 * row_stride, 0x1234);
        for (uint32_t row = 0; row < 3; ++row) {
            for (uint32_t head = 0; head < 4; ++head) {
                for (uint32_t i = 0; i < 64; ++i) {
                    float& query = drawn.queries[(row * 4 + head) * 64 + i];
                    const uint16_t bits = paged_test::nearest_bits(query, type);
                    query = static_cast<float>(paged_test::value_of(bits, type));
                    packed[row * row_stride + head * head_stride + i * dim_stride] = bits;
                }
            }
        }
        const attend_item item = drawn.item();
        std::vector<std::byte> workspace(attend_workspace_bytes(drawn.layer, 50));
        attend_call call;
        call.layer = &drawn.layer;
        call.arena = drawn.cache.arena;
        call.items = &item;
        call.item_count = 1;
        call.queries = {reinterpret_cast<std::byte*>(packed.data()), type, row_stride, head_stride,
                        dim_stride};
        call.out = {reinterpret_cast<std::byte*>(out.data()), type, row_stride, head_stride,
                    dim_stride};
        call.workspace = workspace.data();
        call.workspace_bytes = workspace.size();
        attend(call, one.threads);
        uint32_t touched = 0;
        for (const uint16_t bits : out) touched += bits != 0x1234 ? 1 : 0;
        CHECK(touched <= 3 * 4 * 40);
        std::vector<double> expected(40);
        for (uint32_t row = 0; row < 3; ++row) {
            for (uint32_t head = 0; head < 4; ++head) {
                double log_sum_exp = 0;
                drawn.attend_row(row, head, expected.data(), log_sum_exp);
                for (uint32_t i = 0; i < 40; ++i) {
                    const double got = paged_test::value_of(
                        out[row * row_stride + head * head_stride + i * dim_stride], type);
                    CHECK(got == doctest::Approx(expected[i]).epsilon(0.01));
                }
            }
        }
    }
}
