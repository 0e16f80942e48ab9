// Compiled without sanitizers: what the engine notes of threads is no business of the kernel's, and
// the switches of fibres must not be seen as calls.
#include "engine.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <random>

#include "memory.hpp"

#if defined(KVRT_EMULATE_ADDRESS)
#include <sanitizer/asan_interface.h>
#endif

namespace emulator {

namespace {

constexpr uint32_t barriers = 16;
constexpr uint32_t lanes = 32;

enum class waiting_for { nothing, barrier, warp, never };

struct emulated_thread {
    waiting_for waits = waiting_for::nothing;
    uint32_t barrier = 0;
    site where;
    std::unique_ptr<pending_copies> copies;
    std::unique_ptr<fibre> run;  // the last, to go first: then what it did is over
};

struct emulated_warp {
    // Several masks may be on their way at once, known by their lowest lanes.
    struct meeting {
        collective what = nullptr;
        uint32_t mask = 0, arrived = 0;
        uint32_t turn = 0;
    };
    meeting meetings[lanes];
    lane_values values[lanes];
};

struct barrier_state {
    uint32_t arrived = 0, count = 0;
    uint32_t turn = 0;
};

// Addresses that the thread sanitizer knows the order of threads by, two for each barrier and each
// lowest lane of a warp. A block has its own: what it waits for says nothing of other blocks.
struct order_tags {
    char barrier[barriers][2];
    char warp[lanes][lanes][2];
};

// A block of the launch that is running; there is one.
struct emulated_block {
    launch_options options;
    uint32_t index = 0;
    std::vector<emulated_thread> threads;
    std::vector<emulated_warp> warps;
    barrier_state barrier[barriers];
    std::byte* shared = nullptr;
    std::unique_ptr<order_tags> tags;
    std::vector<uint8_t> coming;  // by 16 bytes of shared memory
    uint32_t running = 0;
    bool stopped = false;
    void (*body)(void*) = nullptr;
    void* argument = nullptr;
};
emulated_block now;
launch_report* report = nullptr;

emulated_thread& running() { return now.threads[now.running]; }

std::string place(site where) {
    return std::string(where.function) + ":" + std::to_string(where.line);
}

void record(violation_kind kind, const std::string& text) {
    report->violations.push_back({kind, text});
    now.stopped = true;
}

void thread_body() {
    now.body(now.argument);
    const pending_copies* const copies = running().copies.get();
    if (copies != nullptr && copies->count != 0) {
        record(violation_kind::not_waited,
               "thread " + std::to_string(now.running) + " of block " + std::to_string(now.index) +
                   " ended with " + std::to_string(copies->count) + " copies not waited for");
    }
}

// Who waits where, a line for each place.
std::string waiters() {
    struct group {
        site where;
        uint32_t threads, first;
    };
    std::vector<group> groups;
    for (uint32_t t = 0; t < now.threads.size(); ++t) {
        const emulated_thread& thread = now.threads[t];
        if (thread.run->finished()) continue;
        const auto same = [&](const group& g) {
            return g.where.line == thread.where.line &&
                   std::strcmp(g.where.function, thread.where.function) == 0;
        };
        const auto found = std::find_if(groups.begin(), groups.end(), same);
        if (found == groups.end()) {
            groups.push_back({thread.where, 1, t});
        } else {
            ++found->threads;
        }
    }
    std::string text;
    for (const group& g : groups) {
        text += "\n  " + std::to_string(g.threads) + " threads, the first " +
                std::to_string(g.first) + ", wait at " + place(g.where);
    }
    return text;
}

void check_no_progress() {
    uint32_t live = 0, at_barrier = 0;
    for (const emulated_thread& thread : now.threads) {
        live += thread.run->finished() ? 0 : 1;
        at_barrier += thread.waits == waiting_for::barrier && thread.barrier == 0 ? 1 : 0;
    }
    const bool all_at_barrier = at_barrier == live;
    record(all_at_barrier ? violation_kind::divergence : violation_kind::stuck,
           (all_at_barrier ? "a barrier that threads have ended without"
                           : "no thread of block " + std::to_string(now.index) + " can go on") +
               waiters());
}

void run_block() {
    const launch_options& options = now.options;
    std::vector<uint32_t> order(options.threads);
    for (uint32_t i = 0; i < options.threads; ++i) {
        order[i] = options.order == thread_order::descending ? options.threads - 1 - i : i;
    }
    std::mt19937_64 random(options.seed + now.index);
    for (uint32_t live = options.threads; live != 0;) {
        if (options.order == thread_order::shuffled) {
            std::shuffle(order.begin(), order.end(), random);
        }
        bool progress = false;
        for (const uint32_t t : order) {
            emulated_thread& thread = now.threads[t];
            if (thread.waits != waiting_for::nothing) continue;
            progress = true;
            now.running = t;
            ++report->switches;
            thread.run->resume();
            if (now.stopped) return;
            if (thread.run->finished()) {
                thread.waits = waiting_for::never;
                --live;
            }
        }
        if (!progress && live != 0) return check_no_progress();
    }
}

}  // namespace

bool launch_report::has(violation_kind kind) const {
    return std::any_of(violations.begin(), violations.end(),
                       [&](const violation& each) { return each.kind == kind; });
}

std::string launch_report::text() const {
    std::string all;
    for (const violation& each : violations) all += "emulator: " + each.text + "\n";
    return all;
}

launch_report run_blocks(const launch_options& options, void (*body)(void*), void* argument) {
    launch_report made;
    report = &made;
    now.options = options;
    now.body = body;
    now.argument = argument;
    now.stopped = false;
    // What blocks leave behind is kept to the end: the thread sanitizer would take memory that two
    // blocks use one after the other for memory that they share.
    std::vector<std::vector<emulated_thread>> threads;
    std::vector<std::unique_ptr<order_tags>> tags;
    std::vector<std::byte*> shared;
    for (uint32_t block = 0; block < options.blocks && !now.stopped; ++block) {
        now.index = block;
        now.threads.clear();
        now.threads.resize(options.threads);
        now.warps.assign((options.threads + lanes - 1) / lanes, {});
        for (barrier_state& each : now.barrier) each = {};
        now.tags = std::make_unique<order_tags>();
        const size_t bytes = (options.shared_bytes + 2 * strip_bytes + 255) / 256 * 256;
        std::byte* const raw = static_cast<std::byte*>(std::aligned_alloc(256, bytes));
        if (raw == nullptr) throw std::bad_alloc();
        shared.push_back(raw);
        now.shared = raw + strip_bytes;
        std::memset(now.shared, 0xff, options.shared_bytes);
        draw_strips(now.shared, options.shared_bytes);
        now.coming.assign(options.shared_bytes / 16 + 1, 0);
        for (emulated_thread& thread : now.threads) {
            thread.run = std::make_unique<fibre>(options.switching, thread_body);
        }
        run_block();
        if (!strips_are_whole(now.shared, options.shared_bytes)) {
            record(violation_kind::overrun,
                   "a write beyond the shared memory of block " + std::to_string(block));
        }
#if defined(KVRT_EMULATE_THREAD)
        threads.push_back(std::move(now.threads));
        tags.push_back(std::move(now.tags));
#endif
    }
    now.threads.clear();
    threads.clear();
    for (std::byte* each : shared) {
        clear_strips(each + strip_bytes, options.shared_bytes);
        std::free(each);
    }
    const std::string damage = damaged_strips();
    if (!damage.empty()) record(violation_kind::overrun, damage);
    report = nullptr;
    return made;
}

uint32_t thread_index() { return now.running; }
uint32_t thread_count() { return now.options.threads; }
uint32_t block_index() { return now.index; }
uint32_t block_count() { return now.options.blocks; }
std::byte* shared_memory() { return now.shared; }
bool sums_in_pairs() { return now.options.order == thread_order::shuffled; }

bool is_shared(const void* address, size_t bytes) {
    const std::byte* const first = static_cast<const std::byte*>(address);
    return first >= now.shared && first + bytes <= now.shared + now.options.shared_bytes;
}

// What is on the stack of a thread that violates something is never destroyed, so no strings are.
static void record_violation(violation_kind kind, const char* what, int64_t number, site where) {
    record(kind, what + (number >= 0 ? " " + std::to_string(number) : std::string()) + ", thread " +
                     std::to_string(now.running) + " of block " + std::to_string(now.index) +
                     " at " + place(where));
}

void violate(violation_kind kind, const char* what, site where, int64_t number) {
    record_violation(kind, what, number, where);
    fibre::leave();
    std::abort();  // a stopped launch resumes nobody
}

void wait_at_barrier(uint32_t id, uint32_t count, site where) {
    const bool whole_block = id == 0;
    if (id >= barriers || (!whole_block && (count == 0 || count % lanes != 0))) {
        violate(violation_kind::divergence, "no such barrier, or not of whole warps:", where, id);
    }
    barrier_state& barrier = now.barrier[id];
    if (whole_block) count = now.options.threads;
    running().where = where;
    if (barrier.arrived != 0 && barrier.count != count) {
        violate(violation_kind::divergence, "threads wait for different numbers at barrier", where,
                id);
    }
    barrier.count = count;
    if (whole_block) {
        for (const emulated_thread& other : now.threads) {
            if (other.waits != waiting_for::barrier || other.barrier != 0) continue;
            if (other.where.line != where.line ||
                std::strcmp(other.where.function, where.function) != 0) {
                violate(violation_kind::divergence,
                        "threads wait at different barriers, others at line", where,
                        other.where.line);
            }
            break;  // whoever waits already waits in one place
        }
    }
    running().waits = waiting_for::barrier;
    running().barrier = id;
    if (++barrier.arrived < count) return fibre::leave();
    barrier.arrived = 0;
    ++barrier.turn;
    for (emulated_thread& thread : now.threads) {
        if (thread.waits == waiting_for::barrier && thread.barrier == id) {
            thread.waits = waiting_for::nothing;
        }
    }
    // Others go first as often as not.
    fibre::leave();
}

void* barrier_tag(uint32_t id) {
    id %= barriers;
    return &now.tags->barrier[id][now.barrier[id].turn % 2];
}

void* warp_tag(uint32_t mask) {
    const uint32_t warp = now.running / lanes;
    const uint32_t lowest = mask == 0 ? 0 : static_cast<uint32_t>(__builtin_ctz(mask));
    return &now.tags->warp[warp][lowest][now.warps[warp].meetings[lowest].turn % 2];
}

void run_collective(collective what, uint32_t mask, lane_values& mine, site where) {
    emulated_thread& thread = running();
    const uint32_t lane = now.running % lanes;
    emulated_warp& warp = now.warps[now.running / lanes];
    const uint32_t first_thread = now.running - lane;
    thread.where = where;
    if ((mask >> lane & 1u) == 0) {
        violate(violation_kind::mask, "a lane outside of its own mask", where);
    }
    emulated_warp::meeting& met = warp.meetings[__builtin_ctz(mask)];
    for (const emulated_warp::meeting& other : warp.meetings) {
        if (other.arrived == 0 || (other.mask & mask) == 0) continue;
        if (other.mask != mask) {
            violate(violation_kind::mask, "lanes disagree on the mask", where);
        }
        if (other.what != what) {
            violate(violation_kind::mask, "lanes of a mask do different things", where);
        }
    }
    met.mask = mask;
    met.what = what;
    warp.values[lane] = mine;
    met.arrived |= 1u << lane;
    if (met.arrived != mask) {
        thread.waits = waiting_for::warp;
        fibre::leave();
    } else {
        met.arrived = 0;
        ++met.turn;
        const char* const wrong = what(warp.values, mask);
        if (wrong != nullptr) violate(violation_kind::mask, wrong, where);
        for (uint32_t other = 0; other < lanes; ++other) {
            if ((mask >> other & 1u) != 0 && other != lane) {
                now.threads[first_thread + other].waits = waiting_for::nothing;
            }
        }
    }
    mine = warp.values[lane];
}

void mark_coming(const void* address, bool coming) {
    std::byte* const target = static_cast<std::byte*>(const_cast<void*>(address));
    now.coming[static_cast<size_t>(target - now.shared) / 16] = coming ? 1 : 0;
    if (coming) {
        for (uint32_t i = 0; i < 16; ++i) target[i] = std::byte{0xff};
    }
#if defined(KVRT_EMULATE_ADDRESS)
    if (coming) {
        __asan_poison_memory_region(target, 16);
    } else {
        __asan_unpoison_memory_region(target, 16);
    }
#endif
}

bool is_coming(const void* address, size_t bytes) {
    if (!is_shared(address, bytes) || bytes == 0) return false;
    const size_t offset = static_cast<size_t>(static_cast<const std::byte*>(address) - now.shared);
    for (size_t i = offset / 16; i <= (offset + bytes - 1) / 16; ++i) {
        if (now.coming[i] != 0) return true;
    }
    return false;
}

pending_copies& copies_of_thread() {
    if (running().copies == nullptr) running().copies = std::make_unique<pending_copies>();
    return *running().copies;
}

}  // namespace emulator
