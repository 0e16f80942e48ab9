// Moving slots, checked byte by byte over the whole arena: survivors arrive unchanged and nothing
// else is touched.
#include "format/move.hpp"

#include <doctest/doctest.h>

#include "paged_fixture.hpp"

using namespace kvrt;
using namespace paged_test;

namespace {

enum class target_kind { in_place, fresh, shared_head };

struct shape {
    tile_order order;
    uint32_t block_tokens, kv_heads, key_dim, value_dim;
    uint32_t keys, values;  // formats
};

std::vector<uint32_t> random_survivors(uint32_t slots, double density, uint32_t kept_head,
                                       std::mt19937& random) {
    std::vector<uint32_t> survivors;
    std::bernoulli_distribution stays(density);
    for (uint32_t slot = 0; slot < slots; ++slot) {
        if (slot < kept_head || stays(random)) survivors.push_back(slot);
    }
    return survivors;
}

// Moves slot survivors[i] to slot i in a copy of the arena, word by word.
void expect_moves(const paged_cache& cache, const std::vector<block_id>& target, uint32_t head,
                  const std::vector<uint32_t>& survivors, std::vector<std::byte>& expected) {
    const std::vector<std::byte> before = expected;
    for (uint32_t i = 0; i < survivors.size(); ++i) {
        for (bool value : {false, true}) {
            for (uint32_t word = 0; word < cache.words(value); ++word) {
                std::memcpy(
                    expected.data() + cache.offset(target, value, i, head, word),
                    before.data() + cache.offset(cache.blocks, value, survivors[i], head, word),
                    cache.word_bytes(value));
            }
        }
    }
}

void check_moves(const shape& shape, uint32_t slots, double density, uint32_t kept_head,
                 target_kind kind, uint32_t seed) {
    std::mt19937 random(seed);
    // The second half of the table serves as fresh blocks.
    const uint32_t needed = (slots + shape.block_tokens - 1) / shape.block_tokens;
    paged_cache cache(shape.order, shape.block_tokens, shape.kv_heads, shape.key_dim,
                      shape.value_dim, shape.keys, shape.values, 2 * needed * shape.block_tokens,
                      seed);
    std::vector<block_id> target(cache.blocks.begin(), cache.blocks.begin() + needed);
    if (kind != target_kind::in_place) {
        const uint32_t shared =
            kind == target_kind::shared_head ? kept_head / shape.block_tokens : 0;
        std::copy(cache.blocks.begin() + needed + shared, cache.blocks.begin() + 2 * needed,
                  target.begin() + shared);
    }
    std::vector<std::byte> expected = cache.copy();
    for (uint32_t head = 0; head < shape.kv_heads; ++head) {
        const std::vector<uint32_t> survivors = random_survivors(slots, density, kept_head, random);
        expect_moves(cache, target, head, survivors, expected);
        move_list moves;
        moves.source = cache.blocks.data();
        moves.target = target.data();
        moves.survivors = survivors.data();
        moves.count = static_cast<uint32_t>(survivors.size());
        moves.kv_head = head;
        move_slots(cache.layout, cache.arena, moves);
    }
    CHECK(std::memcmp(cache.arena, expected.data(), expected.size()) == 0);
}

constexpr shape plain_shapes[] = {
    {tile_order::native, 16, 2, 64, 64, KV_FORMAT_F16, KV_FORMAT_F16},
    {tile_order::native, 64, 3, 40, 72, KV_FORMAT_BF16, KV_FORMAT_F32},
    {tile_order::native, 32, 2, 64, 32, KV_FORMAT_F32, KV_FORMAT_BF16},
    {tile_order::native, 16, 1, 256, 256, KV_FORMAT_F32, KV_FORMAT_F32},
    {tile_order::hnd, 16, 2, 64, 40, KV_FORMAT_F16, KV_FORMAT_BF16},
    {tile_order::nhd, 32, 3, 72, 64, KV_FORMAT_BF16, KV_FORMAT_F32},
};

/// Each format whose rows are records, in every order; widths of words that do and do not fill a
/// vector.
std::vector<shape> shapes_of_records() {
    std::vector<shape> shapes;
    for (const format_test::facts& format : format_test::record_facts()) {
        for (const tile_order order : all_orders) {
            shapes.push_back({order, 16, 2, 64, 72, format.id, format.id});
        }
        shapes.push_back({tile_order::native, 64, 1, 80, 128, format.id, KV_FORMAT_F16});
        shapes.push_back({tile_order::native, 32, 1, 128, 32, KV_FORMAT_BF16, format.id});
    }
    for (const tile_order order : all_orders) {
        shapes.push_back({order, 16, 2, 72, 80, KV_FORMAT_TURBO4, KV_FORMAT_KIVI2});
        shapes.push_back({order, 32, 1, 80, 72, KV_FORMAT_TURBO3, KV_FORMAT_TURBO3});
    }
    return shapes;
}

}  // namespace

TEST_CASE("survivors arrive byte for byte, whatever the layout, the type and the target") {
    on_every_target([] {
        uint32_t seed = 0;
        for (const shape& shape : plain_shapes) {
            CAPTURE(&shape - plain_shapes);
            for (target_kind kind :
                 {target_kind::in_place, target_kind::fresh, target_kind::shared_head}) {
                CAPTURE(int(kind));
                for (double density : {0.0, 0.1, 0.5, 0.97, 1.0}) {
                    for (uint32_t kept_head : {0u, 5u, 70u}) {
                        CAPTURE(density);
                        CAPTURE(kept_head);
                        check_moves(shape, 203, density, kept_head, kind, ++seed);
                    }
                }
                check_moves(shape, 1, 1.0, 0, kind, ++seed);
            }
        }
    });
}

TEST_CASE("records arrive byte for byte, in place and in fresh blocks") {
    on_every_target([] {
        uint32_t seed = 1000;
        for (const shape& shape : shapes_of_records()) {
            CAPTURE(shape.keys);
            CAPTURE(shape.values);
            CAPTURE(static_cast<uint32_t>(shape.order));
            for (target_kind kind :
                 {target_kind::in_place, target_kind::fresh, target_kind::shared_head}) {
                CAPTURE(int(kind));
                for (double density : {0.1, 0.6, 0.97}) {
                    check_moves(shape, 203, density, seed % 40, kind, seed);
                    ++seed;
                }
            }
        }
        // So many that they go past the caches.
        check_moves({tile_order::native, 16, 1, 256, 256, KV_FORMAT_Q8_0, KV_FORMAT_Q4_1}, 1500,
                    0.7, 20, target_kind::in_place, ++seed);
    });
}

TEST_CASE("copying the first slots of a block leaves the rest of the target alone") {
    std::vector<shape> every_shape = shapes_of_records();
    every_shape.insert(every_shape.end(), std::begin(plain_shapes), std::end(plain_shapes));
    for (const shape& shape : every_shape) {
        CAPTURE(&shape - every_shape.data());
        for (uint32_t slots = 0; slots <= shape.block_tokens; slots += 1 + slots % 5) {
            paged_cache cache(shape.order, shape.block_tokens, shape.kv_heads, shape.key_dim,
                              shape.value_dim, shape.keys, shape.values, 2 * shape.block_tokens);
            std::vector<std::byte> expected = cache.copy();
            std::vector<uint32_t> all(slots);
            for (uint32_t i = 0; i < slots; ++i) all[i] = i;
            for (uint32_t head = 0; head < shape.kv_heads; ++head) {
                expect_moves(cache, {cache.blocks[1]}, head, all, expected);
            }
            copy_block_slots(cache.layout, cache.arena, cache.blocks[0], cache.blocks[1], slots);
            CAPTURE(slots);
            CHECK(std::memcmp(cache.arena, expected.data(), expected.size()) == 0);
        }
    }
}
