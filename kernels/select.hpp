// Of each set of scores the best, for a whole cohort in one launch: survivors in ascending order,
// the very ones that retention/select.cpp chooses. Among equal scores the lowest slot wins, -0
// equals 0, and NaN ranks behind all numbers.
//
// A block of threads has one set. It finds the key of the last that stays by a radix sort that goes
// into one bucket only, a histogram of 8 bits at a time in shared memory; then walks over all slots
// in order, counting with votes, and writes those that stay.
#pragma once

#include "kernels/candidates.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t select_threads = 256;
inline constexpr uint32_t select_digits = 256;  ///< one a thread
inline constexpr uint32_t select_items = 4;     ///< slots of a thread in a tile
inline constexpr uint32_t select_tile = select_threads * select_items;
static_assert(select_digits == select_threads);

/// One row of scores, and its survivors: those of the heads of a lane as compact_lane wants them.
struct select_set {
    uint64_t scores;     ///< place of slot 0's
    uint64_t survivors;  ///< place of the first
    uint64_t guarded;    ///< place of its candidates; all other slots stay
    uint32_t slots;
    uint32_t keep;  ///< how many stay; protected_slots <= keep <= slots
};

/// Launch with `count` blocks of select_threads threads and select_shared_bytes.
struct select_parameters {
    const float* scores = nullptr;
    uint32_t* survivors = nullptr;
    const guarded_slots* guarded = nullptr;
    const select_set* sets = nullptr;  ///< [count]
    uint32_t count = 0;
};

/// What is held whatever its score: of each set's candidates the `count` with the largest measure
/// get +infinity as their score, or all that there are, but no more than have places: those of
/// `keep` that are neither protected nor reserved. Launch like select_parameters.
struct reserve_set {
    uint64_t measure;  ///< place of slot 0's; may be that of the scores
    uint64_t scores;
    uint64_t guarded;
    uint32_t slots;
    uint32_t keep;
    uint32_t count;
};
struct reserve_parameters {
    const float* measures = nullptr;
    float* scores = nullptr;
    const guarded_slots* guarded = nullptr;
    const reserve_set* sets = nullptr;  ///< [count]
    uint32_t count = 0;
};

/// Tallies of warps: slots that stay for sure, and those whose key is the last one's.
struct alignas(8) warp_tally {
    uint32_t sure;
    uint32_t equal;
};

struct select_shared {
    uint32_t histogram[select_digits];
    uint32_t warp_sums[select_threads / warp_lanes];
    uint32_t digit;
    uint32_t of_equals;
    uint32_t above, equal;                               // of a count
    warp_tally tallies[2][select_threads / warp_lanes];  // of a tile, and the one behind it
    slot_range ranges[most_ranges];
};
inline constexpr uint32_t select_shared_bytes = sizeof(select_shared);

/// A key that orders as the score does, with -0 as 0 and NaN, whose key is 0, below everything.
template <class Cx>
KVRT_DEVICE uint32_t score_order(float score) {
    const uint32_t bits = Cx::f32_to_bits(score + 0.0f);
    if (score != score) return 0;
    return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

template <class Cx>
struct ranked_slots {
    const float* scores;
    uint32_t begin = 0;  ///< slots before are not looked at
    uint32_t slots;
    uint32_t ranges;      ///< of candidates, in shared memory
    uint32_t candidates;  ///< slots in them

    static KVRT_DEVICE select_shared* shared() {
        return reinterpret_cast<select_shared*>(Cx::shared());
    }

    /// Fetches the candidates; a barrier must follow.
    KVRT_DEVICE ranked_slots(const float* row, uint32_t row_slots, const guarded_slots* guarded)
        : scores(row),
          slots(row_slots),
          ranges(Cx::template load_constant<uint32_t>(&guarded->count)),
          candidates(row_slots - Cx::template load_constant<uint32_t>(&guarded->protected_slots)) {
        fetch(guarded);
    }
    /// Only those in [part.first, part.end); call count_candidates behind the barrier.
    KVRT_DEVICE ranked_slots(const float* row, const slot_range& part, const guarded_slots* guarded)
        : scores(row),
          begin(part.first),
          slots(part.end),
          ranges(Cx::template load_constant<uint32_t>(&guarded->count)),
          candidates(0) {
        fetch(guarded);
    }
    KVRT_DEVICE void count_candidates() {
        for (uint32_t r = 0; r < ranges; ++r) candidates += range(r).end - range(r).first;
    }

    KVRT_DEVICE void fetch(const guarded_slots* guarded) const {
        if (Cx::thread() >= 2 * ranges) return;
        const slot_range& from = guarded->range[Cx::thread() / 2];
        slot_range& to = shared()->ranges[Cx::thread() / 2];
        const bool first = Cx::thread() % 2 == 0;
        const uint32_t bound =
            Cx::template load_constant<uint32_t>(first ? &from.first : &from.end);
        Cx::store(first ? &to.first : &to.end,
                  bound < begin ? begin : (bound < slots ? bound : slots));
    }

    KVRT_DEVICE slot_range range(uint32_t index) const {
        return {Cx::template load<uint32_t>(&shared()->ranges[index].first),
                Cx::template load<uint32_t>(&shared()->ranges[index].end)};
    }
    KVRT_DEVICE bool is_candidate(uint32_t slot) const {
        bool inside = false;
        for (uint32_t r = 0; r < ranges; ++r) {
            const slot_range here = range(r);
            inside = inside || (slot >= here.first && slot < here.end);
        }
        return inside;
    }
    /// Scores written by this kernel may be read: each by the thread that wrote it.
    KVRT_DEVICE uint32_t key_of(uint32_t slot) const {
        return score_order<Cx>(Cx::template load<float>(scores + slot));
    }

    /// The key of the last that stays, and how many with that very key do.
    struct rank_bound {
        uint32_t key;
        uint32_t of_equals;
    };

    static constexpr uint32_t no_key = 0xffffffffu;  ///< above all that scores have

    /// Adds the candidates whose known digits are `found`, and, where that is asked, whose keys are
    /// below `limit`, to the histogram of the next.
    template <bool limited = false>
    KVRT_DEVICE void count_digits(uint32_t found, uint32_t known, uint32_t shift,
                                  uint32_t limit = no_key) const {
        for (uint32_t r = 0; r < ranges; ++r) {
            const slot_range here = range(r);
            const uint32_t length = here.end - here.first;
            for (uint32_t first = Cx::warp() * warp_lanes; first < length;
                 first += select_threads) {
                const uint32_t i = first + Cx::lane();
                uint32_t key = 0;
                bool counts = i < length;
                if (counts) {
                    key = key_of(here.first + i);
                    counts = (key & known) == found;
                    if constexpr (limited) counts = counts && key < limit;
                }
                if (Cx::ballot(counts) == 0) continue;
                // Scores have few leading digits: lanes with the same one add up first.
                const uint32_t digit = key >> shift & (select_digits - 1);
                const uint32_t same = Cx::match_any(counts ? digit : select_digits, whole_warp);
                const bool speaks = counts && (same & (0u - same)) == 1u << Cx::lane();
                if (speaks) Cx::atomic_add(&shared()->histogram[digit], Cx::count_bits(same));
            }
        }
    }

    /// Of the histogram, the digit where `wanted` are reached from above: all threads learn of it
    /// at the next barrier.
    static KVRT_DEVICE void find_digit(uint32_t wanted) {
        const uint32_t digit = select_digits - 1 - Cx::thread();
        uint32_t sum = Cx::template load<uint32_t>(&shared()->histogram[digit]);
        const uint32_t here = sum;
        KVRT_UNROLL
        for (uint32_t by = 1; by < warp_lanes; by *= 2) {
            const uint32_t lower = Cx::shuffle(sum, (Cx::lane() - by) % warp_lanes);
            if (Cx::lane() >= by) sum += lower;
        }
        if (Cx::lane() == warp_lanes - 1) Cx::store(&shared()->warp_sums[Cx::warp()], sum);
        Cx::barrier();
        for (uint32_t w = 0; w < Cx::warp(); ++w) {
            sum += Cx::template load<uint32_t>(&shared()->warp_sums[w]);
        }
        const uint32_t above = sum - here;
        if (above < wanted && sum >= wanted) {
            Cx::store(&shared()->digit, digit);
            Cx::store(&shared()->of_equals, wanted - above);
        }
    }

    /// wanted <= candidates. For 0 a bound that nothing reaches.
    KVRT_DEVICE rank_bound find_rank(uint32_t wanted) const {
        if (wanted == 0) return {no_key, 0};
        rank_bound bound = {0, wanted};
        uint32_t known = 0;
        for (uint32_t shift = 24;; shift -= 8) {
            Cx::store(&shared()->histogram[Cx::thread()], 0u);
            Cx::barrier();
            count_digits(bound.key, known, shift);
            Cx::barrier();
            find_digit(bound.of_equals);
            Cx::barrier();
            bound.key |= Cx::template load<uint32_t>(&shared()->digit) << shift;
            bound.of_equals = Cx::template load<uint32_t>(&shared()->of_equals);
            known |= (select_digits - 1) << shift;
            if (shift == 0) return bound;
        }
    }

    /// Candidates with keys above `key` (x) and with that very one (y), all below `limit`. All
    /// threads learn it. A barrier must be between one of these and the next.
    KVRT_DEVICE word2 count_from(uint32_t key, uint32_t limit) const {
        if (Cx::thread() == 0) Cx::store(&shared()->above, word2{0, 0});
        Cx::barrier();
        uint32_t above = 0, equal = 0;
        for (uint32_t r = 0; r < ranges; ++r) {
            const slot_range here = range(r);
            const uint32_t length = here.end - here.first;
            for (uint32_t first = Cx::warp() * warp_lanes; first < length;
                 first += select_threads) {
                const uint32_t i = first + Cx::lane();
                const uint32_t mine = i < length ? key_of(here.first + i) : no_key;
                above += Cx::count_bits(Cx::ballot(mine > key && mine < limit));
                equal += Cx::count_bits(Cx::ballot(mine == key && mine < limit));
            }
        }
        if (Cx::lane() == 0) {
            if (above != 0) Cx::atomic_add(&shared()->above, above);
            if (equal != 0) Cx::atomic_add(&shared()->equal, equal);
        }
        Cx::barrier();
        return Cx::template load<word2>(&shared()->above);
    }

    /// Calls take(place, slot) for the slots that reach the bound, of which the first has place 0;
    /// `with_others`: also for all that are no candidates.
    template <class callable>
    KVRT_DEVICE void for_each_taken(const rank_bound& bound, bool with_others,
                                    const callable& take) const {
        const uint32_t below = (1u << Cx::lane()) - 1;
        uint32_t sure = 0, equal = 0;  // before the tile
        uint32_t turn = 0;
        for (uint64_t tile = begin; tile < slots; tile += select_tile, turn ^= 1) {
            uint32_t sure_lanes[select_items], equal_lanes[select_items];
            warp_tally mine = {0, 0};
            const uint64_t first = tile + Cx::warp() * (warp_lanes * select_items) + Cx::lane();
            KVRT_UNROLL
            for (uint32_t i = 0; i < select_items; ++i) {
                const uint64_t place = first + i * warp_lanes;
                bool is_sure = false, is_equal = false;
                if (place < slots) {
                    const uint32_t slot = static_cast<uint32_t>(place);
                    if (is_candidate(slot)) {
                        const uint32_t key = key_of(slot);
                        is_sure = key > bound.key;
                        is_equal = key == bound.key;
                    } else {
                        is_sure = with_others;
                    }
                }
                sure_lanes[i] = Cx::ballot(is_sure);
                equal_lanes[i] = Cx::ballot(is_equal);
                mine.sure += Cx::count_bits(sure_lanes[i]);
                mine.equal += Cx::count_bits(equal_lanes[i]);
            }
            if (Cx::lane() == 0) {
                Cx::store(&shared()->tallies[turn][Cx::warp()], word2{mine.sure, mine.equal});
            }
            Cx::barrier();
            uint32_t sure_here = sure, equal_here = equal;
            for (uint32_t w = 0; w < select_threads / warp_lanes; ++w) {
                const word2 tally = Cx::template load<word2>(&shared()->tallies[turn][w]);
                sure += tally.x;
                equal += tally.y;
                if (w < Cx::warp()) {
                    sure_here += tally.x;
                    equal_here += tally.y;
                }
            }
            KVRT_UNROLL
            for (uint32_t i = 0; i < select_items; ++i) {
                const uint32_t sure_before = sure_here + Cx::count_bits(sure_lanes[i] & below);
                const uint32_t equal_before = equal_here + Cx::count_bits(equal_lanes[i] & below);
                const bool is_sure = (sure_lanes[i] >> Cx::lane() & 1u) != 0;
                const bool is_equal = (equal_lanes[i] >> Cx::lane() & 1u) != 0;
                const bool room = equal_before < bound.of_equals;
                if (is_sure || (is_equal && room)) {
                    take(sure_before + (room ? equal_before : bound.of_equals),
                         static_cast<uint32_t>(first + i * warp_lanes));
                }
                sure_here += Cx::count_bits(sure_lanes[i]);
                equal_here += Cx::count_bits(equal_lanes[i]);
            }
        }
    }
};

/// The kernel that selects.
template <class Cx>
KVRT_DEVICE void select_survivors(const select_parameters& call) {
    const select_set& set = call.sets[Cx::block()];
    const uint32_t keep = Cx::template load_constant<uint32_t>(&set.keep);
    uint32_t* const survivors =
        call.survivors + Cx::template load_constant<uint64_t>(&set.survivors);
    const ranked_slots<Cx> ranked(
        call.scores + Cx::template load_constant<uint64_t>(&set.scores),
        Cx::template load_constant<uint32_t>(&set.slots),
        call.guarded + Cx::template load_constant<uint64_t>(&set.guarded));
    Cx::barrier();
    const uint32_t held = ranked.slots - ranked.candidates;
    const auto bound = ranked.find_rank(keep > held ? keep - held : 0);
    ranked.for_each_taken(bound, true, [&](uint32_t place, uint32_t slot) {
        if (place < keep) Cx::store(survivors + place, slot);
    });
}

/// The kernel that reserves.
template <class Cx>
KVRT_DEVICE void reserve_slots(const reserve_parameters& call) {
    const reserve_set& set = call.sets[Cx::block()];
    const guarded_slots* const guarded =
        call.guarded + Cx::template load_constant<uint64_t>(&set.guarded);
    const uint32_t keep = Cx::template load_constant<uint32_t>(&set.keep);
    uint32_t count = Cx::template load_constant<uint32_t>(&set.count);
    float* const scores = call.scores + Cx::template load_constant<uint64_t>(&set.scores);
    const ranked_slots<Cx> ranked(
        call.measures + Cx::template load_constant<uint64_t>(&set.measure),
        Cx::template load_constant<uint32_t>(&set.slots), guarded);
    Cx::barrier();
    const uint32_t held =
        ranked.slots - ranked.candidates + Cx::template load_constant<uint32_t>(&guarded->reserved);
    const uint32_t places = keep > held ? keep - held : 0;
    count = count < places ? count : places;
    const auto bound = ranked.find_rank(count < ranked.candidates ? count : ranked.candidates);
    ranked.for_each_taken(bound, false, [&](uint32_t, uint32_t slot) {
        Cx::store(scores + slot, Cx::bits_to_f32(0x7f800000u));
    });
}

}  // namespace kvrt::kernels
