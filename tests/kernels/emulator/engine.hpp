// Runs a kernel on the host: each thread of a block is a fibre, blocks come one after another. The
// order in which threads run is an input, so what depends on it can be seen, and seen again.
//
// What a GPU would answer with a wrong number, a hang or nothing at all ends the launch here and is
// recorded, with the function and line of the thread that did it:
//
//   divergence   a barrier that some threads will not reach, or that they reach in different places
//   stuck        threads that wait for each other
//   mask         a lane outside of its own mask, lanes that disagree on it or on what they do, a
//                shuffle from a lane that is not in it
//   alignment    an access that is not aligned to its size
//   bounds       an access outside of device allocations and of the block's shared memory
//   early_read   a look at the target of an asynchronous copy before it was waited for
//   not_waited   the end of a thread whose asynchronous copies were not waited for
//   overrun      bytes around an allocation or shared memory that have changed
//
// Under the thread sanitizer a barrier orders what threads did before and after it, as does
// warp_barrier for its lanes; nothing else does. So a race, in shared or in global memory, between
// threads of a block or of two, is one to the sanitizer. Under the address sanitizer so is every
// access out of bounds, also those that do not go through the execution context.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "fibre.hpp"

namespace emulator {

enum class thread_order { ascending, descending, shuffled };
inline constexpr thread_order all_orders[] = {thread_order::ascending, thread_order::descending,
                                              thread_order::shuffled};

struct launch_options {
    uint32_t blocks = 1;
    uint32_t threads = 32;
    uint32_t shared_bytes = 0;
    thread_order order = thread_order::ascending;
    uint64_t seed = 1;  ///< of the shuffled order
    fibre_switch switching = fastest_switch();
};

enum class violation_kind {
    divergence,
    stuck,
    mask,
    alignment,
    bounds,
    early_read,
    not_waited,
    overrun
};

struct violation {
    violation_kind kind;
    std::string text;
};

struct launch_report {
    std::vector<violation> violations;  ///< the one that ended the launch, and overruns
    uint64_t switches = 0;

    bool clean() const { return violations.empty(); }
    bool has(violation_kind kind) const;
    std::string text() const;
};

launch_report run_blocks(const launch_options& options, void (*body)(void*), void* argument);

/// Runs body() once for each thread of each block.
template <class function>
launch_report launch(const launch_options& options, function body) {
    return run_blocks(
        options, [](void* self) { (*static_cast<function*>(self))(); }, &body);
}

// ---- What the execution context asks of the running thread's block ------------------------------

/// Where in the kernel a thread is.
struct site {
    const char* function = "";
    int line = 0;
};

uint32_t thread_index();
uint32_t thread_count();
uint32_t block_index();
uint32_t block_count();
std::byte* shared_memory();
/// Whether products of matrices are summed in pairs: another choice that a kernel must not feel.
bool sums_in_pairs();
bool is_shared(const void* address, size_t bytes);

/// Records a violation and ends the launch; does not come back.
[[noreturn]] void violate(violation_kind kind, const char* what, site where, int64_t number = -1);

/// Waits until `count` threads (0: all of the block) are at barrier `id`.
void wait_at_barrier(uint32_t id, uint32_t count, site where);

/// What the barrier's next arrivals are ordered by, for the thread sanitizer. Alternates, so that
/// who comes through late learns nothing of what others did after it.
void* barrier_tag(uint32_t id);
void* warp_tag(uint32_t mask);

inline constexpr uint32_t lane_words = 8;
struct lane_values {
    uint64_t word[lane_words];
};

/// Something that the lanes of a mask do together: what each brought becomes what each gets.
/// Returns what is wrong, or null.
using collective = const char* (*)(lane_values* lanes, uint32_t mask);

void run_collective(collective what, uint32_t mask, lane_values& mine, site where);

/// Marks 16 bytes of shared memory as being on their way, or arrived.
void mark_coming(const void* address, bool coming);
bool is_coming(const void* address, size_t bytes);

/// Asynchronous copies of the running thread, oldest first.
struct pending_copy {
    std::byte* target;
    const std::byte* source;
    uint32_t bytes;
    uint32_t group;
};
struct pending_copies {
    static constexpr uint32_t most = 1024;
    pending_copy copies[most];
    uint32_t count = 0;
    uint32_t group = 0;  ///< that the next copy belongs to
};
pending_copies& copies_of_thread();

}  // namespace emulator
