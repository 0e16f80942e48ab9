// Attention over keys that are stored before rotation and turned by their slots, against the
// definition in double: every instruction set, rotations of all kinds, all formats of rows.
#include <string>

#include "attention/kernels.hpp"
#include "attention_fixture.hpp"

using namespace kvrt;
using namespace attention_test;
using format_test::rope_facts;
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

rope_facts draw_rope(uint32_t key_dim, std::mt19937& random) {
    const uint32_t parts = pick(random, {1u, 1u, 2u, 4u});
    return {pick(random, {uint32_t{KV_ROPE_HALF}, uint32_t{KV_ROPE_INTERLEAVED}}),
            key_dim / parts / 2 * 2, pick(random, {10000.0, 100.0, 1.0}),
            pick(random, {1.0, 1.0, 1.2, 0.7})};
}

problem draw(uint32_t rows, std::mt19937& random) {
    const uint32_t key_dim = pick(random, {32u, 40u, 64u, 72u, 80u, 96u, 128u, 192u, 256u});
    const uint32_t slots = rows + random() % pick(random, {1u, 30u, 150u, 700u});
    paged_cache cache(
        pick(random, {tile_order::native, tile_order::native, tile_order::hnd, tile_order::nhd}),
        pick(random, {16u, 32u, 64u}), pick(random, {1u, 2u, 3u}), key_dim,
        pick(random, {32u, 64u, 72u, 128u, 256u}), pick(random, paged_test::all_elements),
        pick(random, paged_test::all_elements), slots, static_cast<uint32_t>(random()));
    problem made(std::move(cache), pick(random, {1u, 3u, 4u, 9u}), rows, slots, random);
    made.rotate_by_slots(draw_rope(key_dim, random));
    if (random() % 3 == 0) made.layer.softcap = 3.0f;
    if (random() % 3 == 0) made.add_sinks(random);
    if (random() % 3 == 0) made.add_slopes();
    if (random() % 3 == 0) {
        made.layer.window = pick(random, {1u, 7u, 40u, 200u});
        made.layer.window_sinks = pick(random, {0u, 3u, 20u});
    }
    return made;
}

std::string in_words(const problem& drawn) {
    const operand_layout& keys = drawn.cache.layout.keys;
    const rope_facts& rope = drawn.rotation->rope;
    return std::string(keys.format->name) + (keys.rotated ? " rotated [" : " [") +
           std::to_string(keys.dim) + "], order " +
           std::to_string(static_cast<uint32_t>(drawn.cache.layout.order)) + ", rows " +
           std::to_string(drawn.rows) + ", slots " + std::to_string(drawn.slots) + ", rope " +
           std::to_string(rope.style) + " of " + std::to_string(rope.dimensions) + ", window " +
           std::to_string(drawn.layer.window);
}

}  // namespace

TEST_CASE("keys turned by slots: attention is what its definition says, for any geometry") {
    started_executor one(1), three(3);
    std::mt19937 random(31);
    for (const uint32_t rows : {1u, 2u, 5u, 9u, 30u}) {
        for (int trial = 0; trial < (rows == 1 ? 24 : 8); ++trial) {
            const problem drawn = draw(rows, random);
            CAPTURE(in_words(drawn));
            const definition expected(drawn);
            on_every_target([&] {
                const result alone = run(drawn, one.threads);
                CHECK(distance(expected, alone) < tolerance);
                CHECK(alone == run(drawn, three.threads, path::kernels, 1 << 20));
            });
            CHECK(distance(expected, run(drawn, one.threads, path::reference)) < 1e-6);
        }
    }
}

TEST_CASE("keys turned by slots: every format of rows, spread by Hadamard's matrix or not") {
    started_executor one(1), three(3);
    std::mt19937 random(32);
    constexpr uint32_t kv_heads = 2;
    std::vector<format_test::facts> formats = format_test::record_facts();
    formats.insert(formats.end(), std::begin(format_test::key_facts),
                   std::end(format_test::key_facts));
    for (const format_test::facts& format : formats) {
        for (const bool spread : {false, true}) {
            for (const uint32_t rows : {1u, 6u}) {
                const uint32_t key_dim = pick(random, {64u, 80u, 128u, 256u});
                const uint32_t slots = 60 + random() % 100;
                paged_cache cache(pick(random, paged_test::all_orders), 32, kv_heads, key_dim, 64,
                                  format.id, KV_FORMAT_F16, slots, static_cast<uint32_t>(random()));
                cache.layout.keys.rotated = spread;
                if (format.static_scale) cache.layout.keys.scales = paged_test::static_scales;
                problem drawn(std::move(cache), 4, rows, slots, random);
                drawn.rotate_by_slots(draw_rope(key_dim, random));
                CAPTURE(in_words(drawn));
                const definition expected(drawn);
                on_every_target([&] {
                    const result alone = run(drawn, one.threads);
                    CHECK(distance(expected, alone) < tolerance);
                    CHECK(alone == run(drawn, three.threads));
                });
                CHECK(distance(expected, run(drawn, one.threads, path::reference)) < 1e-6);
            }
        }
    }
}

TEST_CASE("keys turned by slots: where the tokens stood in the text does not show") {
    started_executor one(1);
    std::mt19937 random(33);
    for (const uint32_t rows : {1u, 4u}) {
        paged_cache cache(tile_order::native, 16, 2, 64, 64, element::f16, element::f16, 300);
        problem drawn(std::move(cache), 2, rows, 300, random);
        drawn.add_slopes();
        drawn.rotate_by_slots({KV_ROPE_HALF, 64, 10000.0, 1.0});
        const result near = run(drawn, one.threads);
        drawn.skipped = 1u << 30;
        CHECK(near == run(drawn, one.threads));
    }
}

TEST_CASE("keys turned by slots: a long context is cut into pieces that join to the whole") {
    started_executor one(1), three(3);
    std::mt19937 random(34);
    for (const uint32_t rows : {1u, 4u}) {
        paged_cache cache(tile_order::native, 16, 2, 64, 64, element::f16, element::bf16, 3000);
        problem drawn(std::move(cache), 3, rows, 3000, random);
        drawn.rotate_by_slots({KV_ROPE_INTERLEAVED, 48, 10000.0, 1.0});
        const result alone = run(drawn, one.threads);
        CHECK(distance(drawn, alone) < tolerance);
        CHECK(alone == run(drawn, three.threads, path::kernels, 1 << 20));
    }
}

TEST_CASE(
    "keys turned by slots: decode takes floats and codes of 8 or 4 bits, the others go row "
    "by row") {
    std::mt19937 random(35);
    struct reading {
        uint32_t format;
        bool turned;
    };
    for (const reading& one : {reading{KV_FORMAT_F16, true}, reading{KV_FORMAT_INT8_TOKEN, true},
                               reading{KV_FORMAT_Q4_1, true}, reading{KV_FORMAT_NVFP4, true},
                               reading{KV_FORMAT_TURBO4, true}, reading{KV_FORMAT_FP8_TOKEN, true},
                               reading{KV_FORMAT_TURBO3, false}}) {
        CAPTURE(one.format);
        paged_cache cache(tile_order::native, 16, 1, 64, 64, one.format, KV_FORMAT_F16, 16);
        problem drawn(std::move(cache), 1, 1, 16, random);
        const bool reads = decode_reads(drawn.layer.layout);  // on this machine
        CHECK(decode_reads(drawn.layer, drawn.layer.layout) == reads);
        drawn.rotate_by_slots({KV_ROPE_HALF, 64, 10000.0, 1.0});
        CHECK(decode_reads(drawn.layer, drawn.layer.layout) == (reads && one.turned));
    }
}
