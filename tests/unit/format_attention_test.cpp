// Attention over stored formats against the definition in double, on the rows that the test's own
// decoder reads from the arena.
#include <string>

#include "attention/kernels.hpp"
#include "attention_fixture.hpp"
#include "model/storage.hpp"

using namespace kvrt;
using namespace attention_test;
using paged_test::all_orders;
using paged_test::on_every_target;

namespace {

constexpr double tolerance = 1e-5;
constexpr uint32_t kv_heads = 2;

struct started_executor {
    host_allocator allocator;
    executor threads;
    explicit started_executor(uint32_t count) {
        REQUIRE(threads.start(allocator, count, nullptr) == KV_OK);
    }
};

struct stored_with {
    uint32_t key_format, value_format;
    bool rotate_keys = false, rotate_values = false;
};

/// Each format as keys and as values, and some together.
std::vector<stored_with> all_pairs() {
    std::vector<stored_with> pairs = {
        {KV_FORMAT_Q8_0, KV_FORMAT_Q4_0},         {KV_FORMAT_Q4_1, KV_FORMAT_Q4_1},
        {KV_FORMAT_FP8_E4M3, KV_FORMAT_FP8_E5M2}, {KV_FORMAT_NVFP4, KV_FORMAT_MXFP4},
        {KV_FORMAT_INT8_TOKEN, KV_FORMAT_F32},    {KV_FORMAT_BF16, KV_FORMAT_INT4_TOKEN},
        {KV_FORMAT_F32, KV_FORMAT_FP8_TOKEN},
    };
    for (const format_test::facts& format : format_test::record_facts()) {
        pairs.push_back({format.id, format.id});
        pairs.push_back({format.id, KV_FORMAT_F16});
        pairs.push_back({KV_FORMAT_F16, format.id});
    }
    for (const format_test::facts& format : format_test::key_facts) {
        pairs.push_back({format.id, format.id});
    }
    for (const format_test::facts& format : format_test::value_facts) {
        pairs.push_back({KV_FORMAT_F16, format.id});
    }
    return pairs;
}

paged_cache make_cache(const stored_with& what, tile_order order, uint32_t block_tokens,
                       uint32_t key_dim, uint32_t value_dim, uint32_t slots, uint32_t seed) {
    paged_cache cache(order, block_tokens, kv_heads, key_dim, value_dim, what.key_format,
                      what.value_format, slots, seed);
    cache.layout.keys.rotated = what.rotate_keys && !cache.facts(false).plain();
    cache.layout.values.rotated = what.rotate_values && !cache.facts(true).plain();
    if (cache.facts(false).static_scale) cache.layout.keys.scales = paged_test::static_scales;
    if (cache.facts(true).static_scale) cache.layout.values.scales = paged_test::static_scales;
    return cache;
}

template <class number, std::size_t count>
number pick(std::mt19937& random, const number (&choices)[count]) {
    return choices[random() % count];
}

/// A sequence of that many rows; the rest of the geometry is drawn.
problem draw(stored_with what, uint32_t rows, std::mt19937& random) {
    what.rotate_keys = random() % 3 == 0;
    what.rotate_values = random() % 3 == 0;
    const uint32_t slots = rows + static_cast<uint32_t>(random()) % 170;
    paged_cache cache = make_cache(
        what,
        pick(random, {tile_order::native, tile_order::native, tile_order::hnd, tile_order::nhd}),
        pick(random, {16u, 32u, 64u}), pick(random, {32u, 64u, 72u, 80u, 96u, 128u, 256u}),
        pick(random, {32u, 64u, 72u, 80u, 96u, 128u, 256u}), slots,
        static_cast<uint32_t>(random()));
    problem made(std::move(cache), pick(random, {1u, 4u}), rows, slots, random);
    if (random() % 3 == 0) made.layer.softcap = 3.0f;
    if (random() % 4 == 0) made.add_sinks(random);
    if (random() % 3 == 0) made.add_slopes();
    if (random() % 3 == 0) {
        made.layer.window = pick(random, {1u, 7u, 40u, 100u});
        made.layer.window_sinks = pick(random, {0u, 3u, 20u});
    }
    return made;
}

std::string in_words(const problem& drawn) {
    const operand_layout& keys = drawn.cache.layout.keys;
    const operand_layout& values = drawn.cache.layout.values;
    return std::string(keys.format->name) + (keys.rotated ? " rotated" : "") + " [" +
           std::to_string(keys.dim) + "], " + values.format->name +
           (values.rotated ? " rotated" : "") + " [" + std::to_string(values.dim) + "], order " +
           std::to_string(static_cast<uint32_t>(drawn.cache.layout.order)) + ", rows " +
           std::to_string(drawn.rows) + ", slots " + std::to_string(drawn.slots) + ", group " +
           std::to_string(drawn.layer.query_heads / kv_heads) + ", window " +
           std::to_string(drawn.layer.window) + " + " + std::to_string(drawn.layer.window_sinks);
}

/// On each instruction set, with codes multiplied in each way that it has.
template <class callable>
void on_every_way(problem& drawn, const callable& body) {
    on_every_target([&] {
        for (const code_arithmetic arithmetic :
             {code_arithmetic::matrices, code_arithmetic::dot_products, code_arithmetic::floats}) {
            // Decode alone knows several.
            if (arithmetic != code_arithmetic::matrices && drawn.rows != 1) continue;
            CAPTURE(static_cast<int>(arithmetic));
            drawn.layer.layout.arithmetic = arithmetic;
            body();
        }
        drawn.layer.layout.arithmetic = code_arithmetic::matrices;
    });
}

}  // namespace

TEST_CASE("attention over every format is what its definition says") {
    started_executor one(1), three(3);
    std::mt19937 random(81);
    for (const stored_with& what : all_pairs()) {
        for (const uint32_t rows : {1u, 1u, 1u, 5u, 40u}) {
            problem drawn = draw(what, rows, random);
            CAPTURE(in_words(drawn));
            const definition expected(drawn);
            on_every_way(drawn, [&] {
                const result alone = run(drawn, one.threads);
                CHECK(distance(expected, alone) < tolerance);
                CHECK(alone == run(drawn, three.threads));
            });
            if (rows == 5) {
                CHECK(distance(expected, run(drawn, one.threads, path::reference)) < 1e-6);
            }
        }
    }
}

TEST_CASE("codes of 2, 3 and 4 bits: every width of vectors, any number of query heads") {
    started_executor one(1);
    std::mt19937 random(88);
    const stored_with pairs[] = {{KV_FORMAT_TURBO4, KV_FORMAT_TURBO4},
                                 {KV_FORMAT_TURBO3, KV_FORMAT_TURBO3},
                                 {KV_FORMAT_F16, KV_FORMAT_KIVI2},
                                 {KV_FORMAT_F16, KV_FORMAT_KIVI4}};
    for (const stored_with& what : pairs) {
        for (const uint32_t dim : {64u, 72u, 80u, 96u, 128u, 160u, 192u, 224u, 256u}) {
            for (const uint32_t group : {1u, 2u, 3u, 4u, 6u}) {
                problem drawn(make_cache(what, tile_order::native, 16, dim, dim, 150, dim + group),
                              group, 1, 150, random);
                drawn.layer.window = pick(random, {0u, 40u, 75u});
                CAPTURE(in_words(drawn));
                const definition expected(drawn);
                const uint32_t multiple = what.value_format == KV_FORMAT_TURBO3  ? 32
                                          : what.value_format == KV_FORMAT_KIVI2 ? 16
                                                                                 : 8;
                on_every_way(drawn, [&] {
                    CHECK(distance(expected, run(drawn, one.threads)) < tolerance);
                    const bool has_vectors = std::string(attend_target_name()) != "SCALAR";
                    CHECK(decode_reads(drawn.layer.layout) == (has_vectors && dim % multiple == 0));
                });
            }
        }
    }
}

TEST_CASE("rows with outliers, and queries of one sign") {
    started_executor one(1);
    for (const format_test::facts& format : format_test::record_facts()) {
        CAPTURE(std::string(format.name));
        for (const uint32_t rows : {1u, 5u}) {
            std::mt19937 random(86);
            constexpr uint32_t slots = 150, dim = 128;
            problem drawn(
                make_cache({format.id, format.id}, tile_order::native, 16, dim, dim, slots, 7), 4,
                rows, slots, random);
            const format_test::key_like_rows source(dim, random);
            drawn.cache.fill(slots, [&](bool) {
                std::vector<float> row = source.draw(random);
                if (random() % 10 == 0) row[random() % dim] *= 100.0f;
                return row;
            });
            for (float& x : drawn.queries) x = std::abs(x);
            const definition expected(drawn);
            on_every_way(drawn,
                         [&] { CHECK(distance(expected, run(drawn, one.threads)) < tolerance); });
        }
    }
}

TEST_CASE("queries with a channel much larger than the others") {
    started_executor one(1);
    for (const uint32_t id :
         {uint32_t{KV_FORMAT_INT8_TOKEN}, uint32_t{KV_FORMAT_Q8_0}, uint32_t{KV_FORMAT_Q4_0},
          uint32_t{KV_FORMAT_NVFP4}, uint32_t{KV_FORMAT_MXFP4}}) {
        CAPTURE(id);
        std::mt19937 random(88);
        constexpr uint32_t slots = 150, dim = 128;
        problem drawn(make_cache({id, id}, tile_order::native, 16, dim, dim, slots, 7), 4, 1, slots,
                      random);
        const format_test::key_like_rows source(dim, random);
        drawn.cache.fill(slots, [&](bool) {
            std::vector<float> row = source.draw(random);
            row[0] = 0.0f;  // what these formats hold exactly: the large channel adds nothing
            return row;
        });
        for (std::size_t i = 0; i < drawn.queries.size(); i += dim) drawn.queries[i] = 1e4f;
        const definition expected(drawn);
        on_every_way(drawn,
                     [&] { CHECK(distance(expected, run(drawn, one.threads)) < tolerance); });
    }
}

TEST_CASE("fp8 at both ends of its range, and rows that reach from one to the other") {
    started_executor one(1);
    for (const uint32_t id : {uint32_t{KV_FORMAT_FP8_E4M3}, uint32_t{KV_FORMAT_FP8_E5M2},
                              uint32_t{KV_FORMAT_FP8_TOKEN}}) {
        CAPTURE(id);
        // Of e4m3 numbers below 2^-6 are subnormal, of e5m2 below 2^-14; 448 and 57344 are the
        // last.
        for (const float size : {0x1p-16f, 0x1p-8f, 1.0f, 100.0f, 1e4f}) {
            CAPTURE(size);
            if (id == KV_FORMAT_FP8_E4M3 && size < 0x1p-10f) continue;  // nothing but zeros
            for (const uint32_t dim : {64u, 128u, 192u, 256u}) {
                std::mt19937 random(dim);
                constexpr uint32_t slots = 150;
                problem drawn(make_cache({id, id}, tile_order::native, 16, dim, dim, slots, 7), 4,
                              1, slots, random);
                std::normal_distribution<float> normal;
                drawn.cache.fill(slots, [&](bool) {
                    std::vector<float> row(dim);
                    for (float& x : row) x = normal(random) * size;
                    if (random() % 8 == 0) {
                        for (float& x : row) x *= std::exp2(-8.0f * std::abs(normal(random)));
                    }
                    return row;
                });
                for (float& x : drawn.queries) x /= size;
                drawn.layer.window = random() % 2 == 0 ? 0 : 70;
                CAPTURE(in_words(drawn));
                const definition expected(drawn);
                on_every_way(
                    drawn, [&] { CHECK(distance(expected, run(drawn, one.threads)) < tolerance); });
            }
        }
    }
}

TEST_CASE("a long context of records is cut into pieces that join to the whole") {
    started_executor one(1), three(3);
    std::mt19937 random(82);
    for (const format_test::facts& format : format_test::record_facts()) {
        CAPTURE(std::string(format.name));
        for (const uint32_t rows : {1u, 4u}) {
            problem drawn(make_cache({format.id, format.id}, tile_order::native, 16, 64, 64, 1500,
                                     static_cast<uint32_t>(random())),
                          4, rows, 1500, random);
            if (rows == 4) drawn.layer.window = 900;
            const result alone = run(drawn, one.threads);
            CHECK(distance(drawn, alone) < tolerance);
            CHECK(alone == run(drawn, three.threads, path::kernels, 1 << 20));
        }
    }
}

TEST_CASE("windows that begin anywhere in a span of runs, whose rows differ in size") {
    started_executor one(1), three(3);
    std::mt19937 random(89);
    std::vector<stored_with> pairs;
    for (const format_test::facts& format : format_test::record_facts()) {
        pairs.push_back({format.id, format.id});
    }
    for (const format_test::facts& format : format_test::key_facts) {
        pairs.push_back({format.id, format.id});
    }
    for (const stored_with& what : pairs) {
        for (const uint32_t window : {0u, 65u, 150u, 257u, 400u}) {
            const uint32_t dim = pick(random, {64u, 128u});
            const uint32_t slots = 260 + static_cast<uint32_t>(random()) % 300;
            problem drawn(make_cache(what, tile_order::native, 64, dim, dim, slots, 8),
                          pick(random, {3u, 4u}), 1, slots, random);
            drawn.layer.window = window;
            drawn.layer.window_sinks = window == 0 ? 0 : pick(random, {0u, 3u, 70u});
            // From run to run, of both heads' keys and values.
            uint32_t row_count = 0;
            std::normal_distribution<float> normal;
            drawn.cache.fill(slots, [&](bool) {
                const float size = row_count++ / (4 * run_slots) % 2 == 0 ? 1.0f : 1e-2f;
                std::vector<float> row(dim);
                for (float& x : row) x = normal(random) * size;
                return row;
            });
            CAPTURE(in_words(drawn));
            const definition expected(drawn);
            on_every_way(drawn, [&] {
                const result alone = run(drawn, one.threads);
                CHECK(distance(expected, alone) < tolerance);
                CHECK(alone == run(drawn, three.threads));
            });
        }
    }
}

TEST_CASE("keys whose groups differ in size by some binary places") {
    started_executor one(1);
    for (const uint32_t id : {uint32_t{KV_FORMAT_MXFP4}, uint32_t{KV_FORMAT_NVFP4}}) {
        // Up to 3 of mxfp4 fit into a byte beside the code.
        for (const float size : {1.0f, 0x1p-2f, 0x1p-3f, 0x1p-4f, 0x1p-5f, 0.0f}) {
            for (const uint32_t dim : {128u, 256u}) {
                CAPTURE(size);
                std::mt19937 random(dim);
                constexpr uint32_t slots = 150;
                problem drawn(make_cache({id, id}, tile_order::native, 16, dim, dim, slots, 7), 4,
                              1, slots, random);
                std::normal_distribution<float> normal;
                drawn.cache.fill(slots, [&](bool) {
                    std::vector<float> row(dim);
                    const uint32_t small = random() % (dim / 32);
                    for (uint32_t i = 0; i < dim; ++i) {
                        row[i] = normal(random) * (i / 32 == small ? size : 1.0f);
                    }
                    return row;
                });
                CAPTURE(in_words(drawn));
                const definition expected(drawn);
                on_every_way(
                    drawn, [&] { CHECK(distance(expected, run(drawn, one.threads)) < tolerance); });
            }
        }
    }
}

TEST_CASE("static scales change what formats hold that take them, and nothing of the others") {
    started_executor one(1);
    on_every_target([&] {
        for (const format_test::facts& format : format_test::record_facts()) {
            CAPTURE(std::string(format.name));
            for (const uint32_t rows : {1u, 5u}) {
                result results[2];
                for (const bool scaled : {false, true}) {
                    std::mt19937 random(83);
                    paged_cache cache(tile_order::native, 16, kv_heads, 64, 64, format.id,
                                      format.id, 90);
                    kv_storage storage = KV_INIT(kv_storage);
                    storage.flags = scaled ? 0 : KV_STORAGE_SCALE_ONE;
                    storage.scales = scaled ? paged_test::static_scales : nullptr;
                    storage.scale_count = scaled ? kv_heads : 0;
                    float copied[2 * kv_heads];
                    float* next = copied;
                    for (operand_layout* operand : {&cache.layout.keys, &cache.layout.values}) {
                        REQUIRE(take_storage(&storage, kv_heads, "storage", 0, next, *operand) ==
                                KV_OK);
                    }
                    const problem drawn(std::move(cache), 4, rows, 90, random);
                    results[scaled] = run(drawn, one.threads);
                    CHECK(distance(drawn, results[scaled]) < tolerance);
                }
                CHECK((results[0] == results[1]) == !format.static_scale);
            }
        }
    });
}

TEST_CASE("blocks that held something else: half a block is written, nothing of the rest is read") {
    started_executor one(1);
    for (const format_test::facts& format : format_test::record_facts()) {
        CAPTURE(std::string(format.name));
        for (const tile_order order : all_orders) {
            CAPTURE(static_cast<uint32_t>(order));
            for (const uint32_t before : {0u, uint32_t{KV_FORMAT_F16}, uint32_t{KV_FORMAT_Q8_0}}) {
                CAPTURE(before);  // 0: every bit set, so that scales are NaN
                for (const uint32_t slots : {7u, 16u + 9u}) {
                    std::mt19937 random(84);
                    paged_cache cache =
                        make_cache({format.id, format.id}, order, 32, 64, 64, slots, 5);
                    if (before == 0) {
                        std::memset(cache.arena, 0xff, cache.bytes());
                    } else {
                        paged_cache other = make_cache({before, before}, order, 32, 64, 64, 96, 5);
                        other.fill(96, random);
                        std::memcpy(cache.arena, other.arena,
                                    std::min(cache.bytes(), other.bytes()));
                    }
                    for (const uint32_t rows : {1u, 5u}) {
                        problem drawn(cache, 4, rows, slots, random);
                        const definition expected(drawn);
                        on_every_way(drawn, [&] {
                            const result got = run(drawn, one.threads);
                            uint32_t infinite = 0;
                            for (const float x : got.out) infinite += std::isfinite(x) ? 0 : 1;
                            CHECK(infinite == 0);
                            CHECK(distance(expected, got) < tolerance);
                        });
                    }
                }
            }
        }
    }
}

TEST_CASE("a row that is not finite is NaN for those who see it, and for nobody else") {
    started_executor one(1);
    for (const format_test::facts& format : format_test::record_facts()) {
        CAPTURE(std::string(format.name));
        for (const bool value : {false, true}) {
            CAPTURE(value);
            for (const uint32_t rows : {1u, 5u}) {
                CAPTURE(rows);
                std::mt19937 random(85);
                constexpr uint32_t slots = 60, flawed = slots - 2;
                problem drawn(
                    make_cache({format.id, format.id}, tile_order::native, 16, 64, 64, slots, 6), 4,
                    rows, slots, random);
                const definition clean(drawn);
                // All bits set: NaN as a scale, as codes of static fp8.
                for (uint32_t word = 0; word < drawn.cache.words(value); ++word) {
                    std::memset(drawn.cache.arena +
                                    drawn.cache.offset(drawn.cache.blocks, value, flawed, 0, word),
                                0xff, 4);
                }
                on_every_way(drawn, [&] {
                    const result got = run(drawn, one.threads);
                    const std::size_t per_row = std::size_t{8} * 64;  // 8 query heads
                    uint32_t wrong = 0;
                    for (std::size_t i = 0; i < rows * per_row; ++i) {
                        const bool sees = i / per_row + 2 >= rows && i % per_row < per_row / 2;
                        wrong += sees ? !std::isnan(got.out[i])
                                      : std::abs(double{got.out[i]} - clean.out[i]) > 1e-4;
                    }
                    CHECK(wrong == 0);
                });
            }
        }
    }
}

TEST_CASE("one fp8 code that is no number: its channel alone, or its slot's score") {
    started_executor one(1);
    for (const uint32_t id : {uint32_t{KV_FORMAT_FP8_E4M3}, uint32_t{KV_FORMAT_FP8_E5M2},
                              uint32_t{KV_FORMAT_FP8_TOKEN}}) {
        CAPTURE(id);
        constexpr uint32_t channels[] = {0, 1, 2, 3, 37, 71};
        for (uint32_t i = 0; i < 12; ++i) {
            const uint32_t channel = channels[i % 6], dim = i < 6 ? 72 : 128;
            CAPTURE(channel);
            CAPTURE(dim);
            for (const bool value : {false, true}) {
                std::mt19937 random(87);
                constexpr uint32_t slots = 50, flawed = 33;
                problem drawn(make_cache({id, id}, tile_order::native, 16, dim, dim, slots, 6), 4,
                              1, slots, random);
                const definition clean(drawn);
                drawn.cache
                    .arena[drawn.cache.offset(drawn.cache.blocks, value, flawed, 1, channel / 4) +
                           channel % 4] = std::byte{0xff};
                on_every_target([&] {
                    const result got = run(drawn, one.threads);
                    uint32_t wrong = 0;
                    for (std::size_t at = 0; at < got.out.size(); ++at) {
                        const bool sees =
                            at >= got.out.size() / 2 && (!value || at % dim == channel);
                        wrong += sees ? !std::isnan(got.out[at])
                                      : std::abs(double{got.out[at]} - clean.out[at]) > 1e-4;
                    }
                    CHECK(wrong == 0);
                });
            }
        }
    }
}
