// Kernels without one of their barriers: a test shows of each that it is missed.
//
// The thread sanitizer sees every one that is. Elsewhere results must differ in some order of
// threads, which they do where no other wait brings threads together in time.
#pragma once

#include <vector>

#include "child.hpp"
#include "lane_fixture.hpp"

namespace kernel_test {

/// The emulator's context, in which every thread walks past its `which`-th barrier.
struct without_barrier : context {
    static void leave_out(uint32_t barrier, uint32_t threads) {
        which = barrier;
        of_block = threads;
        met.assign(blocks_apart * threads, {});
    }

    static void barrier(KVRT_FROM_SITE) {
        place& mine = met[block() % blocks_apart * of_block + thread()];
        if (mine.block != block() + 1) mine = {block() + 1, 0};
        if (mine.barriers++ != which) context::barrier(function, line);
    }

  private:
    struct place {
        uint32_t block = 0;  // and 1
        uint32_t barriers = 0;
    };
    /// Blocks run beside each other under the thread sanitizer; so many have places of their own.
    static constexpr uint32_t blocks_apart = 64;
    static inline uint32_t which = 0, of_block = 0;
    static inline std::vector<place> met;
};

struct barrier_test {
    const char* test_case;          ///< which this is
    uint32_t threads;               ///< of a block
    std::vector<uint32_t> needed;   ///< barriers, counted by each thread
    std::vector<uint32_t> visible;  ///< those of them that results depend on in the emulator
};

/// run(order) launches the kernel in the context above, and returns whether all is as it should be.
template <class callable>
void check_barriers(const barrier_test& test, const callable& run) {
    constexpr uint32_t none = 0xffffffffu;
    const auto runs_without = [&](uint32_t barrier, thread_order order) {
        without_barrier::leave_out(barrier, test.threads);
        return run(order);
    };
#if defined(KVRT_EMULATE_THREAD)
    if (task_of_child() != nullptr) {
        runs_without(static_cast<uint32_t>(std::stoul(task_of_child())), thread_order::ascending);
        return;
    }
    const auto has_race = [&](uint32_t barrier) {
        const child_outcome outcome = run_child(test.test_case, std::to_string(barrier).c_str());
        return outcome.output.find("ThreadSanitizer: data race") != std::string::npos;
    };
    CHECK_FALSE(has_race(none));
    for (const uint32_t barrier : test.needed) {
        CAPTURE(barrier);
        CHECK(has_race(barrier));
    }
#else
    const auto is_missed = [&](uint32_t barrier) {
        for (const thread_order order : emulator::all_orders) {
            if (!runs_without(barrier, order)) return true;
        }
        return false;
    };
    CHECK_FALSE(is_missed(none));
    for (const uint32_t barrier : test.visible) {
        CAPTURE(barrier);
        CHECK(is_missed(barrier));
    }
#endif
}

}  // namespace kernel_test
