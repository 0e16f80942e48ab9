// From scores to survivors: which slots of a KV head stay, in ascending order, as compact.hpp takes
// them. Every slot that is no candidate stays, and the candidates with the highest scores, so that
// `keep` stay in all: the answer of retention/select.hpp, bit for bit. Among equal scores the
// lowest slot wins; -0 equals 0; NaN ranks behind all numbers.
//
// A block of threads has a head. It finds the key of the last candidate that stays, 8 bits at a
// time from the top, by counting in shared memory; then it walks over all slots once, in order.
#pragma once

#include "kernels/context.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t select_threads = 256;
inline constexpr uint32_t select_warps = select_threads / warp_lanes;
inline constexpr uint32_t digit_values = 256;
inline constexpr uint32_t select_shared_bytes = (digit_values + 2 + 2 * select_warps) * 4;

struct slot_range {
    uint32_t first;
    uint32_t end;
};

/// One head. Its candidates are `ranges` entries of the launch's, ascending and apart.
struct select_head {
    uint64_t scores;     ///< place of slot 0's in the launch's array
    uint64_t survivors;  ///< likewise; room for `keep`
    uint32_t slots;
    uint32_t keep;  ///< no fewer than slots that are no candidates, at most slots
    uint32_t first_range;
    uint32_t ranges;
};

/// Launch with `count` blocks of select_threads threads and select_shared_bytes.
struct select_parameters {
    const float* scores = nullptr;
    uint32_t* survivors = nullptr;
    const slot_range* ranges = nullptr;
    const select_head* heads = nullptr;  ///< [count]
    uint32_t count = 0;
};

/// A key that orders as the score does, with -0 as 0 and NaN, whose key is 0, below everything.
template <class Cx>
KVRT_DEVICE uint32_t score_order(float score) {
    if (score != score) return 0;
    const uint32_t bits = Cx::f32_to_bits(score + 0.0f);
    return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

template <class Cx>
struct head_selection {
    const select_parameters& call;
    select_head head;

    KVRT_DEVICE uint32_t* counts() const { return reinterpret_cast<uint32_t*>(Cx::shared()); }
    /// What warp 0 found of a digit: the key so far, and how many with it are still wanted.
    KVRT_DEVICE uint32_t* found() const { return counts() + digit_values; }
    KVRT_DEVICE uint32_t* warp_counts() const { return found() + 2; }

    KVRT_DEVICE slot_range range(uint32_t index) const {
        const slot_range* const at = call.ranges + head.first_range + index;
        return {Cx::template load_constant<uint32_t>(&at->first),
                Cx::template load_constant<uint32_t>(&at->end)};
    }
    KVRT_DEVICE bool is_candidate(uint32_t slot) const {
        for (uint32_t i = 0; i < head.ranges; ++i) {
            const slot_range here = range(i);
            if (slot < here.end) return slot >= here.first;
        }
        return false;
    }
    KVRT_DEVICE uint32_t key_of(uint32_t slot) const {
        return score_order<Cx>(Cx::template load_constant<float>(call.scores + head.scores + slot));
    }

    /// Counts the digits at `shift` of candidates whose higher digits are those of `key`.
    KVRT_DEVICE void count_digits(uint32_t key, uint32_t shift) const {
        const uint32_t above = shift == 24 ? 0 : 0xffffffffu << (shift + 8);
        for (uint32_t i = 0; i < head.ranges; ++i) {
            const slot_range here = range(i);
            for (uint32_t base = here.first; base < here.end; base += select_threads) {
                const uint32_t slot = base + Cx::thread();
                uint32_t digit = digit_values;  // none
                if (slot < here.end) {
                    const uint32_t mine = key_of(slot);
                    if (((mine ^ key) & above) == 0) digit = mine >> shift & 0xffu;
                }
                // Scores are much alike in their upper digits: lanes with the same one count
                // together.
                const uint32_t alike = Cx::match_any(digit);
                const bool first = (alike & ((1u << Cx::lane()) - 1)) == 0;
                if (first && digit != digit_values) {
                    Cx::atomic_add(counts() + digit, Cx::count_bits(alike));
                }
            }
        }
    }

    /// Warp 0: the digit, from the top, at which `wanted` are reached.
    KVRT_DEVICE void find_digit(uint32_t key, uint32_t shift, uint32_t wanted) const {
        constexpr uint32_t each = digit_values / warp_lanes;
        const uint32_t lane = Cx::lane(), top = digit_values - 1 - lane * each;
        uint32_t sum = 0;
        KVRT_UNROLL
        for (uint32_t i = 0; i < each; ++i) sum += counts()[top - i];
        uint32_t up_to = sum;
        KVRT_UNROLL
        for (uint32_t by = 1; by < warp_lanes; by *= 2) {
            const uint32_t other = Cx::shuffle(up_to, lane >= by ? lane - by : lane);
            if (lane >= by) up_to += other;
        }
        uint32_t before = up_to - sum;
        if (before >= wanted || up_to < wanted) return;  // it is another lane's
        for (uint32_t i = 0; i < each; ++i) {
            const uint32_t here = counts()[top - i];
            if (before + here >= wanted) {
                found()[0] = key | (top - i) << shift;
                found()[1] = wanted - before;
                return;
            }
            before += here;
        }
    }

    /// The key of the wanted-th highest candidate, and how many with that key stay.
    KVRT_DEVICE void find_bound(uint32_t& key, uint32_t& of_equals) const {
        uint32_t candidates = 0;
        for (uint32_t i = 0; i < head.ranges; ++i) candidates += range(i).end - range(i).first;
        uint32_t wanted = head.keep - (head.slots - candidates);
        key = wanted == 0 ? 0xffffffffu : 0;  // no score has the first
        of_equals = wanted;
        if (wanted == 0) return;
        for (uint32_t shift = 32; shift != 0;) {
            shift -= 8;
            counts()[Cx::thread()] = 0;
            Cx::barrier();
            count_digits(key, shift);
            Cx::barrier();
            if (Cx::warp() == 0) find_digit(key, shift, of_equals);
            Cx::barrier();
            key = found()[0];
            of_equals = found()[1];
        }
    }

    /// How many of the flags of lower threads are set; all: of all threads. `place` is 0 and 1 in
    /// turn.
    KVRT_DEVICE uint32_t count_before(bool flag, uint32_t place, uint32_t& all) const {
        const uint32_t set = Cx::ballot(flag);
        uint32_t* const by_warp = warp_counts() + place * select_warps;
        if (Cx::lane() == 0) by_warp[Cx::warp()] = Cx::count_bits(set);
        Cx::barrier();
        uint32_t before = Cx::count_bits(set & ((1u << Cx::lane()) - 1));
        all = 0;
        KVRT_UNROLL
        for (uint32_t warp = 0; warp < select_warps; ++warp) {
            const uint32_t there = by_warp[warp];
            if (warp < Cx::warp()) before += there;
            all += there;
        }
        return before;
    }

    KVRT_DEVICE void write_survivors(uint32_t key, uint32_t of_equals) const {
        uint32_t equals = 0, written = 0;
        for (uint32_t base = 0; base < head.slots; base += select_threads) {
            const uint32_t slot = base + Cx::thread();
            const bool candidate = slot < head.slots && is_candidate(slot);
            const uint32_t mine = candidate ? key_of(slot) : 0;
            uint32_t all;
            const bool equal = candidate && mine == key;
            const uint32_t rank = equals + count_before(equal, 0, all);
            equals += all;
            const bool stays =
                slot < head.slots && (!candidate || mine > key || (equal && rank < of_equals));
            const uint32_t at = written + count_before(stays, 1, all);
            written += all;
            if (stays) Cx::store(call.survivors + head.survivors + at, slot);
        }
    }
};

/// The kernel.
template <class Cx>
KVRT_DEVICE void select_survivors(const select_parameters& call) {
    if (Cx::block() >= call.count) return;
    const std::byte* const listed = reinterpret_cast<const std::byte*>(call.heads + Cx::block());
    const word4 places = Cx::template load_constant<word4>(listed);
    const word4 sizes = Cx::template load_constant<word4>(listed + 16);
    const head_selection<Cx> selection{
        call,
        {places.x | uint64_t{places.y} << 32, places.z | uint64_t{places.w} << 32, sizes.x, sizes.y,
         sizes.z, sizes.w}};
    uint32_t key, of_equals;
    selection.find_bound(key, of_equals);
    selection.write_survivors(key, of_equals);
}

}  // namespace kvrt::kernels
