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
    element keys, values;
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

constexpr shape shapes[] = {
    {tile_order::native, 16, 2, 64, 64, element::f16, element::f16},
    {tile_order::native, 64, 3, 40, 72, element::bf16, element::f32},
    {tile_order::native, 32, 2, 64, 32, element::f32, element::bf16},
    {tile_order::native, 16, 1, 256, 256, element::f32, element::f32},
    {tile_order::hnd, 16, 2, 64, 40, element::f16, element::bf16},
    {tile_order::nhd, 32, 3, 72, 64, element::bf16, element::f32},
};

}  // namespace

TEST_CASE("survivors arrive byte for byte, whatever the layout, the type and the target") {
    on_every_target([] {
        uint32_t seed = 0;
        for (const shape& shape : shapes) {
            CAPTURE(&shape - shapes);
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

TEST_CASE("copying the first slots of a block leaves the rest of the target alone") {
    for (const shape& shape : shapes) {
        CAPTURE(&shape - shapes);
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
