// How many slots lanes would keep where scores say so, for a whole cohort in one launch: the very
// numbers that retention/allocate_round.cpp finds. Nothing moves by them yet: the host, whose
// tables are to shrink, reads them when they have come.
//
//   share_budgets    a block of threads has the heads of a layer of one sequence, which compete for
//                    the sum of their budgets (Ada-KV, arXiv 2407.11550)
//   count_reaching   it has a lane, whose head with the most candidates that reach the threshold
//                    counts
#pragma once

#include "kernels/select.hpp"

namespace kvrt::kernels {

/// A set of scores. Counts may lie in memory of the host.
struct counted_set {
    uint64_t scores;   ///< place of slot 0's
    uint64_t guarded;  ///< place of its candidates
    uint64_t notes;    ///< place of four words to work in, of share_budgets
    uint32_t* count;   ///< share_budgets: what the head keeps
    uint32_t slots;
    uint32_t budget;  ///< share_budgets: slots that the head brings in, more than it has perhaps
    uint32_t floor;   ///< share_budgets: slots that it keeps of them, whatever others have
    uint32_t unused;
};

struct counted_group {
    uint64_t first;   ///< of its sets
    uint32_t sets;    ///< of share_budgets: in the order of the heads, some without slots
    uint32_t extra;   ///< share_budgets: budgets of heads without slots
    uint32_t* count;  ///< count_reaching: what the lane keeps
    uint32_t most;    ///< count_reaching: and that is the most
    float threshold;
};

/// Launch with `count` blocks of select_threads threads and select_shared_bytes.
struct counting_parameters {
    const float* scores = nullptr;
    uint32_t* notes = nullptr;
    const guarded_slots* guarded = nullptr;
    const counted_set* sets = nullptr;
    const counted_group* groups = nullptr;  ///< [count]
    uint32_t count = 0;
};

template <class Cx>
KVRT_DEVICE ranked_slots<Cx> ranked_of(const counting_parameters& call, const counted_set& set) {
    return {call.scores + Cx::template load_constant<uint64_t>(&set.scores),
            Cx::template load_constant<uint32_t>(&set.slots),
            call.guarded + Cx::template load_constant<uint64_t>(&set.guarded)};
}

template <class Cx>
KVRT_DEVICE uint32_t* target(uint32_t* const* count) {
    return reinterpret_cast<uint32_t*>(Cx::template load_constant<uint64_t>(count));
}

/// All threads of a block say the same.
template <class Cx>
KVRT_DEVICE bool has_slots(const counted_set& set) {
    return Cx::template load_constant<uint32_t>(&set.slots) != 0;
}

/// What is known of a head while others are looked at: its safe candidates, and those with the key
/// of the last safe one that are not safe.
struct alignas(16) safe_notes {
    uint32_t key;
    uint32_t unsafe_equals;
    uint32_t safe;
    uint32_t unused;
};

/// The kernel that shares.
template <class Cx>
KVRT_DEVICE void share_budgets(const counting_parameters& call) {
    const counted_group& group = call.groups[Cx::block()];
    const counted_set* const sets = call.sets + Cx::template load_constant<uint64_t>(&group.first);
    const uint32_t heads = Cx::template load_constant<uint32_t>(&group.sets);
    const auto notes_of = [&](uint32_t head) {
        return reinterpret_cast<safe_notes*>(
            call.notes + Cx::template load_constant<uint64_t>(&sets[head].notes));
    };
    // Places for candidates that are not safe, and how many there are.
    uint32_t places = Cx::template load_constant<uint32_t>(&group.extra), open = 0;
    for (uint32_t head = 0; head < heads; ++head) {
        if (!has_slots<Cx>(sets[head])) continue;
        const ranked_slots<Cx> ranked = ranked_of<Cx>(call, sets[head]);
        Cx::barrier();
        const uint32_t held = ranked.slots - ranked.candidates;
        const uint32_t budget = Cx::template load_constant<uint32_t>(&sets[head].budget);
        const uint32_t floor = Cx::template load_constant<uint32_t>(&sets[head].floor);
        const uint32_t mine = budget > held ? budget - held : 0;
        uint32_t safe = floor > held ? floor - held : 0;
        safe = safe < mine ? safe : mine;
        safe = safe < ranked.candidates ? safe : ranked.candidates;
        const auto bound = ranked.find_rank(safe);
        const uint32_t equals = ranked.count_from(bound.key, ranked.no_key).y;
        if (Cx::thread() == 0) {
            Cx::store(notes_of(head), safe_notes{bound.key, equals - bound.of_equals, safe, 0});
        }
        places += mine - safe;
        open += ranked.candidates - safe;
    }
    uint32_t key = ranked_slots<Cx>::no_key, of_equals = 0;  // nothing reaches this
    if (places > open) places = open;
    if (places != 0) {
        uint32_t known = 0;
        key = 0;
        of_equals = places;
        for (uint32_t shift = 24;; shift -= 8) {
            Cx::store(&ranked_slots<Cx>::shared()->histogram[Cx::thread()], 0u);
            for (uint32_t head = 0; head < heads; ++head) {
                if (!has_slots<Cx>(sets[head])) continue;
                const ranked_slots<Cx> ranked = ranked_of<Cx>(call, sets[head]);
                Cx::barrier();
                const safe_notes note = Cx::template load<safe_notes>(notes_of(head));
                ranked.template count_digits<true>(key, known, shift, note.key);
                if (Cx::thread() == 0 && note.unsafe_equals != 0 && (note.key & known) == key) {
                    Cx::atomic_add(&ranked_slots<Cx>::shared()
                                        ->histogram[note.key >> shift & (select_digits - 1)],
                                   note.unsafe_equals);
                }
                Cx::barrier();
            }
            ranked_slots<Cx>::find_digit(of_equals);
            Cx::barrier();
            key |= Cx::template load<uint32_t>(&ranked_slots<Cx>::shared()->digit) << shift;
            of_equals = Cx::template load<uint32_t>(&ranked_slots<Cx>::shared()->of_equals);
            known |= (select_digits - 1) << shift;
            if (shift == 0) break;
        }
    }
    for (uint32_t head = 0; head < heads; ++head) {
        if (!has_slots<Cx>(sets[head])) continue;
        const ranked_slots<Cx> ranked = ranked_of<Cx>(call, sets[head]);
        Cx::barrier();
        const safe_notes note = Cx::template load<safe_notes>(notes_of(head));
        word2 reach = ranked.count_from(key, note.key);
        if (note.key > key) reach.x += note.unsafe_equals;
        if (note.key == key) reach.y += note.unsafe_equals;
        const uint32_t equal = reach.y < of_equals ? reach.y : of_equals;
        of_equals -= equal;
        if (Cx::thread() == 0) {
            const uint32_t held = ranked.slots - ranked.candidates;
            Cx::store(target<Cx>(&sets[head].count), held + note.safe + reach.x + equal);
        }
    }
}

/// The kernel that counts.
template <class Cx>
KVRT_DEVICE void count_reaching(const counting_parameters& call) {
    const counted_group& group = call.groups[Cx::block()];
    const counted_set* const sets = call.sets + Cx::template load_constant<uint64_t>(&group.first);
    const uint32_t heads = Cx::template load_constant<uint32_t>(&group.sets);
    // No number's key is 0.
    const uint32_t below = score_order<Cx>(Cx::template load_constant<float>(&group.threshold)) - 1;
    uint32_t wanted = 0;
    for (uint32_t head = 0; head < heads; ++head) {
        const ranked_slots<Cx> ranked = ranked_of<Cx>(call, sets[head]);
        Cx::barrier();
        const uint32_t held = ranked.slots - ranked.candidates;
        const uint32_t here = held + ranked.count_from(below, ranked.no_key).x;
        wanted = here > wanted ? here : wanted;
    }
    const uint32_t most = Cx::template load_constant<uint32_t>(&group.most);
    if (Cx::thread() == 0) Cx::store(target<Cx>(&group.count), wanted < most ? wanted : most);
}

}  // namespace kvrt::kernels
