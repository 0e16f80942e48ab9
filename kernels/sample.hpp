// Sampling in place of the top: a set's scores become log(score) plus Gumbel noise, which is a
// function of key and position (retention/sampling.hpp). In double, so with the CPU's bits but
// where logarithms differ in the last place.
#pragma once

#include <cmath>

#include "kernels/normalise.hpp"
#include "kernels/places.hpp"
#include "kernels/quota.hpp"

namespace kvrt::kernels {

/// A set's row, where its slots stand in the text, and what the draw depends on.
struct sample_set {
    position_place positions;
    uint64_t table;    ///< place in tables
    uint64_t scores;   ///< place of slot 0's
    uint64_t guarded;  ///< place of its candidates
    uint64_t next_position;
    uint64_t seed, round;
    uint64_t owner;  ///< layer << 32 | head, as drawn
    uint32_t head;   ///< whose positions they are
    uint32_t slots;
    uint32_t explicit_slots;
    uint32_t sealed_slots = 0;  ///< whose positions are here:
    position_place sealed_positions;
};

/// Launch with join_blocks(count, most_slots) blocks of normalise_threads threads. Only candidates
/// are looked at and written.
struct sample_parameters {
    float* scores = nullptr;
    const guarded_slots* guarded = nullptr;
    const uint32_t* tables = nullptr;
    const sample_set* sets = nullptr;  ///< [count]
    uint32_t count = 0;
    uint32_t most_slots = 0;
};

/// The kernel. +infinity and NaN stay.
template <class Cx>
KVRT_DEVICE void sample_scores(const sample_parameters& call) {
    constexpr uint64_t sampling = 2;  // draw_purpose of retention/sampling.hpp
    const uint32_t stretches = join_stretches(call.most_slots);
    const uint32_t first = Cx::block() % stretches * join_stretch;
    const sample_set& set = call.sets[Cx::block() / stretches];
    const position_place store = fetch_positions<Cx>(set.positions);
    const position_place sealed = fetch_positions<Cx>(set.sealed_positions);
    const slot_positions<Cx> positions{
        store,
        call.tables + Cx::template load_constant<uint64_t>(&set.table),
        Cx::template load_constant<uint32_t>(&set.head),
        Cx::template load_constant<uint32_t>(&set.slots),
        Cx::template load_constant<uint32_t>(&set.explicit_slots),
        Cx::template load_constant<uint64_t>(&set.next_position),
        &sealed,
        Cx::template load_constant<uint32_t>(&set.sealed_slots)};
    const guarded_slots* const guarded =
        call.guarded + Cx::template load_constant<uint64_t>(&set.guarded);
    float* const scores = call.scores + Cx::template load_constant<uint64_t>(&set.scores);
    const uint64_t seed = Cx::template load_constant<uint64_t>(&set.seed);
    const uint64_t round = Cx::template load_constant<uint64_t>(&set.round);
    const uint64_t owner = Cx::template load_constant<uint64_t>(&set.owner);
    const uint32_t ranges = Cx::template load_constant<uint32_t>(&guarded->count);
    for (uint32_t r = 0; r < ranges; ++r) {
        const slot_range range = cut_to_stretch(range_of<Cx>(guarded, r), first);
        for (uint64_t place = uint64_t{range.first} + Cx::thread(); place < range.end;
             place += normalise_threads) {
            const uint32_t slot = static_cast<uint32_t>(place);
            const float score = Cx::template load<float>(scores + slot);
            if (score != score) continue;
            const uint64_t bits = draw_bits(round, owner, positions.at(slot), sampling, seed);
            const double uniform = (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;
            const double weight = (score > 0.0f ? double{score} : 0.0) / -std::log(uniform);
            Cx::store(scores + slot, static_cast<float>(std::log(weight)));
        }
    }
}

}  // namespace kvrt::kernels
