// Scores that the host gives, by position, into the sums of its sequence, by slot: those of
// retention/observations.cpp (give_scores). After a round by scores the device alone knows which
// positions the slots of a head have.
#pragma once

#include "kernels/candidates.hpp"
#include "kernels/score.hpp"

namespace kvrt::kernels {

/// One lane of a layer, of one sequence.
struct given_lane {
    uint64_t table;   ///< place in tables
    uint64_t sums;    ///< place of its first KV head's sums, in arrays sums_stride apart
    uint64_t scores;  ///< place of its first KV head's scores, `tokens` apart
    uint32_t slots;
    uint32_t explicit_slots;
    uint32_t known;  ///< slots before it have a score, or +infinity, since an earlier call
    uint32_t unused;
};

/// Launch with score_blocks(count, kv_heads, most_slots) blocks of score_threads threads.
struct give_parameters {
    position_place positions;
    const uint32_t* tables = nullptr;
    const given_lane* lanes = nullptr;  ///< [count]
    const float* scores = nullptr;
    float* sums = nullptr;
    uint64_t sums_stride = 0;
    uint64_t next_position = 0;
    uint64_t first_position = 0;  ///< of the scores, with the next
    uint64_t tokens = 0;
    uint32_t count = 0;
    uint32_t kv_heads = 0;    ///< of a lane
    uint32_t most_slots = 0;  ///< likewise
    uint32_t unused = 0;
};

/// The kernel. Slots that are new, and were given nothing, have +infinity.
template <class Cx>
KVRT_DEVICE void give_scores(const give_parameters& call) {
    const uint32_t stretches = score_stretches(call.most_slots);
    const uint32_t first = Cx::block() % stretches * score_stretch;
    const uint32_t head = Cx::block() / stretches % call.kv_heads;
    const given_lane& lane = call.lanes[Cx::block() / stretches / call.kv_heads];
    const uint32_t slots = Cx::template load_constant<uint32_t>(&lane.slots);
    if (first >= slots) return;
    const slot_positions<Cx> positions{
        call.positions,
        call.tables + Cx::template load_constant<uint64_t>(&lane.table),
        head,
        slots,
        Cx::template load_constant<uint32_t>(&lane.explicit_slots),
        call.next_position};
    const uint32_t end = slots - first < score_stretch ? slots : first + score_stretch;
    const uint32_t known = Cx::template load_constant<uint32_t>(&lane.known);
    // Often few tokens are new, at the end of many: most stretches are as they were.
    if (end <= known && positions.at(end - 1) < call.first_position) return;
    float* const sums =
        call.sums + Cx::template load_constant<uint64_t>(&lane.sums) + head * call.sums_stride;
    const float* const scores =
        call.scores + Cx::template load_constant<uint64_t>(&lane.scores) + head * call.tokens;
    const float never_given = Cx::bits_to_f32(0x7f800000u);
    for (uint32_t slot = first + Cx::thread(); slot < end; slot += score_threads) {
        const uint64_t position = positions.at(slot);
        // A position before the first is far behind the last.
        const uint64_t place = position - call.first_position;
        if (place < call.tokens) {
            Cx::store(sums + slot, Cx::template load<float>(scores + place));
        } else if (slot >= known) {
            Cx::store(sums + slot, never_given);
        }
    }
}

}  // namespace kvrt::kernels
