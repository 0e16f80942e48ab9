// Writing rows: values against round-to-nearest-even by bisection, places against kvrt.h, and
// nothing else touched.
#include "format/encode.hpp"

#include <doctest/doctest.h>

#include "base/executor.hpp"
#include "paged_fixture.hpp"

using namespace kvrt;
using namespace paged_test;

namespace {

// Ordinary numbers, ties, numbers near the ends of the formats, zeroes.
float any_float(std::mt19937& random) {
    const uint32_t kind = random() % 8;
    std::normal_distribution<float> normal;
    if (kind == 0) return std::ldexp(normal(random), static_cast<int>(random() % 60) - 40);
    if (kind == 1) {  // a tie of both formats: half of the last place of bf16 or f16
        const uint32_t bits = (random() & 0xbfff0000u) | (random() % 2 ? 0x8000u : 0x1000u);
        const float tie = std::bit_cast<float>(bits);
        return std::isfinite(tie) ? tie : 1.0f;
    }
    if (kind == 2) return random() % 2 ? 65519.0f : -65520.0f;
    if (kind == 3) return random() % 2 ? 0.0f : -0.0f;
    if (kind == 4) return std::ldexp(static_cast<float>(random() % 4096), -25 - int(random() % 3));
    return normal(random);
}

uint32_t bits_at(const std::byte* address, element type) {
    uint32_t bits = 0;
    std::memcpy(&bits, address, size_of(type));
    return bits;
}

struct item_plan {
    uint32_t first_slot, rows;
};

// Writes items into a cache and compares every byte of the arena with what it has to be.
void check_write(tile_order order, uint32_t block_tokens, uint32_t kv_heads, uint32_t key_dim,
                 uint32_t value_dim, element input, element stored, bool strided,
                 const std::vector<item_plan>& plans, executor& threads) {
    uint32_t slots = 0, rows = 0;
    for (const item_plan& plan : plans) {
        slots += (plan.first_slot + plan.rows + block_tokens - 1) / block_tokens * block_tokens;
        rows += plan.rows;
    }
    paged_cache cache(order, block_tokens, kv_heads, key_dim, value_dim, stored, stored, slots);
    packed_tensor keys(input, rows + 2, kv_heads, key_dim, strided);
    packed_tensor values(input, rows + 2, kv_heads, value_dim, strided);
    std::mt19937 random(7);
    for (packed_tensor* tensor : {&keys, &values}) {
        const uint32_t dim = tensor == &keys ? key_dim : value_dim;
        for (uint32_t r = 0; r < rows + 2; ++r)
            for (uint32_t h = 0; h < kv_heads; ++h)
                for (uint32_t d = 0; d < dim; ++d) tensor->put(r, h, d, double{any_float(random)});
    }

    std::vector<write_item> items;
    std::vector<std::byte> expected = cache.copy();
    uint32_t table_start = 0, next_row = 2;
    for (const item_plan& plan : plans) {
        write_item item;
        item.blocks = cache.blocks.data() + table_start;
        item.first_slot = plan.first_slot;
        item.first_row = next_row;
        item.rows = plan.rows;
        items.push_back(item);
        const std::vector<block_id> table(cache.blocks.begin() + table_start, cache.blocks.end());
        for (uint32_t r = 0; r < plan.rows; ++r) {
            for (bool value : {false, true}) {
                const packed_tensor& tensor = value ? values : keys;
                for (uint32_t h = 0; h < kv_heads; ++h) {
                    for (uint32_t d = 0; d < (value ? value_dim : key_dim); ++d) {
                        const std::byte* source = tensor.at(next_row + r, h, d);
                        uint32_t bits = bits_at(source, input);
                        if (input != stored) {
                            const double number = number_at(source, input);
                            bits = stored == element::f32
                                       ? std::bit_cast<uint32_t>(static_cast<float>(number))
                                       : nearest_bits(number, stored);
                        }
                        std::memcpy(
                            expected.data() + cache.offset(table, value, plan.first_slot + r, h, d),
                            &bits, size_of(stored));
                    }
                }
            }
        }
        next_row += plan.rows;
        table_start += (plan.first_slot + plan.rows + block_tokens - 1) / block_tokens;
    }

    write_rows(cache.layout, cache.arena, items.data(), static_cast<uint32_t>(items.size()),
               keys.view, values.view, {}, threads);
    CHECK(std::memcmp(cache.arena, expected.data(), expected.size()) == 0);
}

}  // namespace

TEST_CASE("rows of every type land in every format and layout, rounded once to nearest even") {
    executor alone;
    on_every_target([&] {
        for (tile_order order : all_orders) {
            for (element input : all_elements) {
                for (element stored : all_elements) {
                    CAPTURE(int(order));
                    CAPTURE(int(input));
                    CAPTURE(int(stored));
                    for (bool strided : {false, true}) {
                        check_write(order, 16, 2, 40, 72, input, stored, strided,
                                    {{0, 16}, {5, 43}, {31, 1}}, alone);
                        check_write(order, 64, 3, 64, 32, input, stored, strided,
                                    {{3, 150}, {64, 16}}, alone);
                    }
                }
            }
        }
        check_write(tile_order::native, 16, 1, 256, 256, element::f32, element::f16, false,
                    {{0, 33}}, alone);
    });
}

TEST_CASE("NaN stays NaN and infinity stays infinity in every conversion") {
    executor alone;
    const float specials[] = {INFINITY, -INFINITY, NAN, std::bit_cast<float>(0x7f800001u),
                              std::bit_cast<float>(0xffbfffffu)};
    on_every_target([&] {
        for (element stored : all_elements) {
            paged_cache cache(tile_order::native, 16, 1, 32, 32, stored, stored, 16);
            std::vector<float> rows(16 * 32);
            for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = specials[i % 5];
            tensor_view view;
            view.data = reinterpret_cast<std::byte*>(rows.data());
            view.row_stride = 32;
            view.head_stride = 32;
            write_item item;
            item.blocks = cache.blocks.data();
            item.rows = 16;
            write_rows(cache.layout, cache.arena, &item, 1, view, view, {}, alone);
            for (uint32_t i = 0; i < rows.size(); ++i) {
                for (bool value : {false, true}) {
                    const double got = cache.get(value, i / 32, 0, i % 32);
                    if (i % 5 < 2) {
                        CHECK(got == double{specials[i % 5]});
                    } else {
                        CHECK(std::isnan(got));
                    }
                }
            }
        }
    });
}

TEST_CASE("a large call is cut over threads without changing a byte") {
    host_allocator allocator;
    executor threads;
    REQUIRE(threads.start(allocator, 3, nullptr) == KV_OK);
    std::vector<item_plan> plans = {{0, 700}, {9, 1}, {15, 400}, {0, 1}, {2, 77}};
    check_write(tile_order::native, 16, 2, 64, 64, element::f32, element::bf16, false, plans,
                threads);
    check_write(tile_order::nhd, 32, 2, 64, 64, element::bf16, element::f16, false, plans, threads);
}

TEST_CASE("a call without rows does nothing") {
    executor alone;
    check_write(tile_order::native, 16, 1, 32, 32, element::f32, element::f32, false,
                {{4, 0}, {2, 0}}, alone);
}
