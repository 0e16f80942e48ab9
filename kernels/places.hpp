// Scores that follow from where tokens stand, not from what is stored: STREAMING's, the slot
// itself, and RANDOM's, drawn from the position; those of retention/scores.cpp, bit for bit.
#pragma once

#include "kernels/candidates.hpp"
#include "kernels/score.hpp"

namespace kvrt::kernels {

/// One lane of one sequence.
struct place_lane {
    uint64_t table;   ///< place in tables
    uint64_t scores;  ///< place of its first KV head's row
    uint64_t next_position;
    uint64_t seed, round;  ///< of the draw, with the next two
    uint32_t layer;
    uint32_t first_head;  ///< of the lane, in its layer
    uint32_t slots;
    uint32_t explicit_slots;
    uint32_t sealed_slots = 0;  ///< in blocks of a class of their own, the first ones
    uint32_t unused = 0;
};

/// KV head h of a lane has row h, rows `stride` apart; entries [0, slots) are written. Launch with
/// score_blocks(count, kv_heads, most_slots) blocks of score_threads threads.
struct place_parameters {
    position_place positions;
    position_place sealed_positions;  ///< of slots in sealed blocks
    const uint32_t* tables = nullptr;
    const place_lane* lanes = nullptr;  ///< [count]
    float* scores = nullptr;
    uint64_t stride = 0;
    uint32_t count = 0;
    uint32_t kv_heads = 0;
    uint32_t most_slots = 0;  ///< of a lane
    bool draws = false;       ///< RANDOM
    bool one_draw = false;    ///< for all heads of a lane
};

/// Both halves of a product of 128 bits, one over the other.
KVRT_DEVICE uint64_t fold_product(uint64_t a, uint64_t b) {
    const uint64_t a0 = a & 0xffffffffu, a1 = a >> 32, b0 = b & 0xffffffffu, b1 = b >> 32;
    const uint64_t low = a0 * b0, cross = a1 * b0, other = a0 * b1;
    const uint64_t carry = (low >> 32) + (cross & 0xffffffffu) + (other & 0xffffffffu);
    const uint64_t high = a1 * b1 + (cross >> 32) + (other >> 32) + (carry >> 32);
    return (a * b) ^ high;
}

/// XXH3's 64 bits of 24 or 32 bytes, by the first two words and the last two.
KVRT_DEVICE uint64_t draw_from_ends(uint32_t bytes, uint64_t first, uint64_t second,
                                    uint64_t last_but_one, uint64_t last, uint64_t seed) {
    const uint64_t begin =
        fold_product(first ^ (0xbe4ba423396cfeb8u + seed), second ^ (0x1cad21f72c81017cu - seed));
    const uint64_t end = fold_product(last_but_one ^ (0xdb979083e96dd4deu + seed),
                                      last ^ (0x1f67b3b7a4a44072u - seed));
    uint64_t bits = bytes * 0x9e3779b185ebca87u + begin + end;
    bits ^= bits >> 37;
    bits *= 0x165667919e3779f9u;
    return bits ^ bits >> 32;
}
/// Of three words, and of four.
KVRT_DEVICE uint64_t draw_bits(uint64_t first, uint64_t second, uint64_t third, uint64_t seed) {
    return draw_from_ends(24, first, second, second, third, seed);
}
KVRT_DEVICE uint64_t draw_bits(uint64_t first, uint64_t second, uint64_t third, uint64_t fourth,
                               uint64_t seed) {
    return draw_from_ends(32, first, second, third, fourth, seed);
}

/// The kernel.
template <class Cx>
KVRT_DEVICE void score_places(const place_parameters& call) {
    const uint32_t stretches = score_stretches(call.most_slots);
    const uint32_t first = Cx::block() % stretches * score_stretch;
    const uint32_t head = Cx::block() / stretches % call.kv_heads;
    const uint32_t index = Cx::block() / stretches / call.kv_heads;
    if (index >= call.count) return;
    const place_lane& lane = call.lanes[index];
    const slot_positions<Cx> positions{
        call.positions,
        call.tables + Cx::template load_constant<uint64_t>(&lane.table),
        head,
        Cx::template load_constant<uint32_t>(&lane.slots),
        Cx::template load_constant<uint32_t>(&lane.explicit_slots),
        Cx::template load_constant<uint64_t>(&lane.next_position),
        &call.sealed_positions,
        Cx::template load_constant<uint32_t>(&lane.sealed_slots)};
    float* const scores =
        call.scores + Cx::template load_constant<uint64_t>(&lane.scores) + head * call.stride;
    const uint64_t seed = Cx::template load_constant<uint64_t>(&lane.seed);
    const uint64_t round = Cx::template load_constant<uint64_t>(&lane.round);
    const uint64_t of_head =
        uint64_t{Cx::template load_constant<uint32_t>(&lane.layer)} << 32 |
        (Cx::template load_constant<uint32_t>(&lane.first_head) + (call.one_draw ? 0 : head));
    for (uint32_t i = Cx::thread(); i < score_stretch && first + i < positions.slots;
         i += score_threads) {
        const uint32_t slot = first + i;
        float score = static_cast<float>(slot);
        if (call.draws) {
            const uint64_t bits = draw_bits(round, of_head, positions.at(slot), seed);
            score = static_cast<float>(bits >> 40) * 0x1p-24f;
        }
        Cx::store(scores + slot, score);
    }
}

}  // namespace kvrt::kernels
