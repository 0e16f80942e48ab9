// Kernels without one of their barriers: a test shows of each that it is missed.
#pragma once

#include <vector>

#include "lane_fixture.hpp"

namespace kernel_test {

/// The emulator's context, in which every thread walks past its `which`-th barrier, or past every
/// `every`-th from there on.
struct without_barrier : context {
    static inline uint32_t which = 0, every = 0;

    static void forget(uint32_t threads) { met.assign(threads, {}); }

    static void barrier(KVRT_FROM_SITE) {
        place& mine = met[thread()];
        if (mine.block != block() + 1) mine = {block() + 1, 0};
        const uint32_t number = mine.barriers++;
        const bool again = every != 0 && number > which && (number - which) % every == 0;
        if (number != which && !again) context::barrier(function, line);
    }

  private:
    struct place {
        uint32_t block = 0;  // and 1
        uint32_t barriers = 0;
    };
    static inline std::vector<place> met;
};

/// Whether some order of threads shows that barrier `which` is missing: run(order) launches the
/// kernel in the context above and returns whether all is as it should be.
template <class callable>
bool misses_barrier(uint32_t which, uint32_t every, uint32_t threads, const callable& run) {
    without_barrier::which = which;
    without_barrier::every = every;
    for (const thread_order order : emulator::all_orders) {
        without_barrier::forget(threads);
        if (!run(order)) return true;
    }
    return false;
}

}  // namespace kernel_test
