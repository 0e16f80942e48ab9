// The execution context of the emulator (kernels/context.hpp says what it must offer). Accesses are
// made here, in the kernel's own thread and instrumented as the kernel is, once the engine has
// found nothing wrong with them.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>

#include "collectives.hpp"
#include "format/element.hpp"
#include "kernels/context.hpp"
#include "memory.hpp"

#if defined(KVRT_EMULATE_THREAD)
#include <sanitizer/tsan_interface.h>
#endif

namespace emulator {

/// The calling line of the kernel, as a last parameter.
#define KVRT_FROM_SITE const char *function = __builtin_FUNCTION(), int line = __builtin_LINE()

struct context {
    using number = kvrt::kernels::number;

    // ---- Places
    // ----------------------------------------------------------------------------------

    static uint32_t thread() { return thread_index(); }
    static uint32_t threads() { return thread_count(); }
    static uint32_t block() { return block_index(); }
    static uint32_t blocks() { return block_count(); }
    static uint32_t lane() { return thread_index() % 32; }
    static uint32_t warp() { return thread_index() / 32; }

    // ---- Order
    // -----------------------------------------------------------------------------------

    static void barrier(KVRT_FROM_SITE) { wait_in_order(0, 0, {function, line}); }
    static void barrier(uint32_t id, uint32_t threads, KVRT_FROM_SITE) {
        wait_in_order(id, threads, {function, line});
    }
    static void warp_barrier(uint32_t mask = 0xffffffffu, KVRT_FROM_SITE) {
        void* const tag = warp_tag(mask);
        release(tag);
        lane_values none = {};
        run_collective(meet, mask, none, {function, line});
        acquire(tag);
    }

    // ---- Warps
    // -----------------------------------------------------------------------------------

    template <class value>
    static value shuffle(value mine, uint32_t from_lane, uint32_t mask = 0xffffffffu,
                         KVRT_FROM_SITE) {
        lane_values values = {};
        std::memcpy(values.word, &mine, sizeof mine);
        values.word[1] = from_lane;
        run_collective(emulator::shuffle, mask, values, {function, line});
        value got;
        std::memcpy(&got, values.word, sizeof got);
        return got;
    }
    template <class value>
    static value shuffle_xor(value mine, uint32_t bits, uint32_t mask = 0xffffffffu,
                             KVRT_FROM_SITE) {
        return shuffle(mine, lane() ^ bits, mask, function, line);
    }
    /// As on the GPU, the last lanes keep what they have.
    template <class value>
    static value shuffle_down(value mine, uint32_t by, uint32_t mask = 0xffffffffu,
                              KVRT_FROM_SITE) {
        return shuffle(mine, lane() + by < 32 ? lane() + by : lane(), mask, function, line);
    }
    static uint32_t ballot(bool predicate, uint32_t mask = 0xffffffffu, KVRT_FROM_SITE) {
        return together(emulator::ballot, predicate ? 1u : 0u, mask, {function, line});
    }
    static uint32_t match_any(uint32_t value, uint32_t mask = 0xffffffffu, KVRT_FROM_SITE) {
        return together(emulator::match_any, value, mask, {function, line});
    }
    static uint32_t reduce_add(uint32_t value, uint32_t mask = 0xffffffffu, KVRT_FROM_SITE) {
        return together(emulator::reduce_add, value, mask, {function, line});
    }
    static uint32_t reduce_max(uint32_t value, uint32_t mask = 0xffffffffu, KVRT_FROM_SITE) {
        return together(emulator::reduce_max, value, mask, {function, line});
    }
    static uint32_t reduce_min(uint32_t value, uint32_t mask = 0xffffffffu, KVRT_FROM_SITE) {
        return together(emulator::reduce_min, value, mask, {function, line});
    }

    // ---- Shared memory and what goes there
    // -------------------------------------------------------

    static std::byte* shared() { return shared_memory(); }

    /// The target reads as 0xff until the copy is waited for, which makes it.
    static void copy_async(void* target, const void* source, uint32_t bytes = 16, KVRT_FROM_SITE) {
        const site where{function, line};
        check_aligned(target, 16, where);
        check_aligned(source, 16, where);
        if (bytes > 16) violate(violation_kind::bounds, "a copy of more than 16 bytes", where);
        if (!is_shared(target, 16)) {
            violate(violation_kind::bounds, "an asynchronous copy to outside of shared memory",
                    where);
        }
        if (bytes != 0 && !is_device(source, bytes)) {
            violate(violation_kind::bounds, "an asynchronous copy from outside of the device",
                    where);
        }
        pending_copies& pending = copies_of_thread();
        if (pending.count == pending_copies::most) {
            violate(violation_kind::not_waited, "too many asynchronous copies", where);
        }
        mark_coming(target, true);
        pending.copies[pending.count++] = {static_cast<std::byte*>(target),
                                           static_cast<const std::byte*>(source), bytes,
                                           pending.group};
    }
    static void commit_async() { ++copies_of_thread().group; }
    template <int newest>
    static void wait_async() {
        pending_copies& pending = copies_of_thread();
        uint32_t kept = 0;
        for (uint32_t i = 0; i < pending.count; ++i) {
            const pending_copy copy = pending.copies[i];
            if (copy.group + newest >= pending.group) {
                pending.copies[kept++] = copy;
                continue;
            }
            mark_coming(copy.target, false);
            for (uint32_t byte = 0; byte < 16; ++byte) {
                copy.target[byte] = byte < copy.bytes ? copy.source[byte] : std::byte{0};
            }
        }
        pending.count = kept;
    }

    // ---- Matrices
    // --------------------------------------------------------------------------------

    static void load_matrices(uint32_t (&out)[4], const void* row, KVRT_FROM_SITE) {
        load_fragments(exchange_rows, out, row, {function, line});
    }
    static void load_matrices_transposed(uint32_t (&out)[4], const void* row, KVRT_FROM_SITE) {
        load_fragments(exchange_rows_transposed, out, row, {function, line});
    }
    /// Hardware sums in an order of its own: shuffled launches use another than the others.
    template <number type>
    static void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                         KVRT_FROM_SITE) {
        static_assert(type != number::f32);
        constexpr bool f16 = type == number::f16;
        lane_values values = {};
        std::memcpy(values.word, a, sizeof a);
        std::memcpy(values.word + 2, b, sizeof b);
        std::memcpy(values.word + 3, d, sizeof d);
        const collective in_order = f16 ? multiply_f16 : multiply_bf16;
        const collective in_pairs = f16 ? multiply_f16_in_pairs : multiply_bf16_in_pairs;
        run_collective(sums_in_pairs() ? in_pairs : in_order, 0xffffffffu, values,
                       {function, line});
        std::memcpy(d, values.word + 3, sizeof d);
    }

    // ---- Memory
    // ----------------------------------------------------------------------------------

    template <class value>
    static value load(const void* address, KVRT_FROM_SITE) {
        check_access(address, sizeof(value), {function, line});
        return *static_cast<const value*>(address);
    }
    template <class value>
    static value load_constant(const void* address, KVRT_FROM_SITE) {
        return load<value>(address, function, line);
    }
    template <class value>
    static value load_once(const void* address, KVRT_FROM_SITE) {
        return load<value>(address, function, line);
    }
    template <class value>
    static void store(void* address, value what, KVRT_FROM_SITE) {
        check_access(address, sizeof(value), {function, line});
        *static_cast<value*>(address) = what;
    }
    template <class value>
    static void store_once(void* address, value what, KVRT_FROM_SITE) {
        store(address, what, function, line);
    }
    template <class value>
    static void atomic_add(value* address, value what, KVRT_FROM_SITE) {
        check_access(address, sizeof(value), {function, line});
        __atomic_fetch_add(address, what, __ATOMIC_RELAXED);
    }

    // ---- Numbers
    // ---------------------------------------------------------------------------------

    static uint16_t f32_to_f16(float value) { return kvrt::f32_to_f16(value); }
    static float f16_to_f32(uint16_t bits) { return kvrt::f16_to_f32(bits); }
    static uint16_t f32_to_bf16(float value) { return kvrt::f32_to_bf16(value); }
    static float bf16_to_f32(uint16_t bits) { return kvrt::bf16_to_f32(bits); }
    static float bits_to_f32(uint32_t bits) { return std::bit_cast<float>(bits); }
    static uint32_t f32_to_bits(float value) { return std::bit_cast<uint32_t>(value); }
    static uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t which) {
        const uint64_t both = a | uint64_t{b} << 32;
        uint32_t made = 0;
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t from = which >> (4 * i) & 7u;
            made |= static_cast<uint32_t>(both >> (8 * from) & 0xffu) << (8 * i);
        }
        return made;
    }
    static uint32_t count_bits(uint32_t bits) {
        return static_cast<uint32_t>(std::popcount(bits));
    }
    static uint32_t add_f16x2(uint32_t a, uint32_t b) {
        const auto sum = [&](uint32_t shift) {
            const float x = f16_to_f32(static_cast<uint16_t>(a >> shift));
            const float y = f16_to_f32(static_cast<uint16_t>(b >> shift));
            return uint32_t{f32_to_f16(x + y)} << shift;
        };
        return sum(0) | sum(16);
    }
    static float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
    static float exp2(float value) { return std::exp2(value); }
    static float log2(float value) { return std::log2(value); }
    static float tanh(float value) { return std::tanh(value); }
    static float nearest_away(float value) { return std::round(value); }
    static double square_root(double value) { return std::sqrt(value); }

  private:
    static void release(void* tag) {
#if defined(KVRT_EMULATE_THREAD)
        __tsan_release(tag);
#endif
        (void)tag;
    }
    static void acquire(void* tag) {
#if defined(KVRT_EMULATE_THREAD)
        __tsan_acquire(tag);
#endif
        (void)tag;
    }
    static void wait_in_order(uint32_t id, uint32_t threads, site where) {
        void* const tag = barrier_tag(id);
        release(tag);
        wait_at_barrier(id, threads, where);
        acquire(tag);
    }

    static uint32_t together(collective what, uint32_t mine, uint32_t mask, site where) {
        lane_values values = {};
        values.word[0] = mine;
        run_collective(what, mask, values, where);
        return static_cast<uint32_t>(values.word[0]);
    }

    static void check_aligned(const void* address, size_t bytes, site where) {
        if (reinterpret_cast<uintptr_t>(address) % bytes != 0) {
            violate(violation_kind::alignment, "an access that is not aligned to its bytes:", where,
                    static_cast<int64_t>(bytes));
        }
    }
    static void check_access(const void* address, size_t bytes, site where) {
        check_aligned(address, bytes, where);
        if (is_shared(address, bytes)) return check_arrived(address, bytes, where);
        if (!is_device(address, bytes)) {
            violate(violation_kind::bounds,
                    "an access outside of shared memory and device allocations", where);
        }
    }
    static void check_arrived(const void* address, size_t bytes, site where) {
        if (is_coming(address, bytes)) {
            violate(violation_kind::early_read,
                    "an access to the target of a copy that was not waited for", where);
        }
    }

    static void load_fragments(collective exchange, uint32_t (&out)[4], const void* row,
                               site where) {
        check_aligned(row, 16, where);
        if (!is_shared(row, 16)) {
            violate(violation_kind::bounds, "ldmatrix of what is not in shared memory", where);
        }
        lane_values values = {};
        values.word[0] = reinterpret_cast<uint64_t>(row);
        run_collective(exchange, 0xffffffffu, values, where);
        for (uint32_t matrix = 0; matrix < 4; ++matrix) {
            uint16_t pair[2];
            for (uint32_t i = 0; i < 2; ++i) {
                const void* const address =
                    reinterpret_cast<const void*>(values.word[2 * matrix + i]);
                check_arrived(address, 2, where);
                pair[i] = *static_cast<const uint16_t*>(address);
            }
            out[matrix] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
        }
    }
};

static_assert(kvrt::kernels::execution_context<context>);

}  // namespace emulator
