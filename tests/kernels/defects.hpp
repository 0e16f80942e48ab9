// Two small kernels with a place for each defect that the emulator or a sanitizer must find.
#pragma once

#include "emulator/context.hpp"

enum class defect {
    none,
    missing_barrier,        // between writing shared memory and reading what others wrote
    missing_reuse_barrier,  // before a copy to shared memory that others still read
    early_reuse,            // the same with a store: in ascending order the result stays right
    barrier_in_branch,
    wrong_mask,
    shared_overrun,  // one element behind it
    device_overrun,
    early_read,      // of a copy's target, before it is waited for
    early_raw_read,  // the same, past the execution context
    never_waited,
    misaligned,
    copy_overrun,
    block_race,  // two blocks write one word of global memory
};

/// Whether attend_rows.hpp comes to the right result, and clean, when all threads run through their
/// barrier of this number: a sequence of so many slots and rows (attend_rows_test.cpp).
bool rows_without_barrier(uint32_t barrier, emulator::thread_order order, uint32_t slots,
                          uint32_t rows);

/// out[block] = the sum of numbers[0 .. count), by 128 threads.
template <class Cx>
void block_sum(const float* numbers, uint32_t count, float* out, defect seeded) {
    float* const shared = reinterpret_cast<float*>(Cx::shared());
    const uint32_t thread = Cx::thread();
    float sum = 0.0f;
    if (seeded == defect::block_race && thread == 0) out[0] = sum;
    for (uint32_t i = thread; i < count; i += 128) {
        sum += Cx::template load<float>(numbers + i);
    }
    shared[thread] = sum;
    if (seeded != defect::missing_barrier) Cx::barrier();
    for (uint32_t width = 64; width >= 32; width /= 2) {
        if (thread < width) shared[thread] += shared[thread + width];
        if (seeded != defect::barrier_in_branch || thread < width) Cx::barrier();
    }
    if (seeded == defect::shared_overrun && thread == 127) shared[128] = 1.0f;
    if (seeded == defect::device_overrun && thread == 0) out[Cx::blocks()] = 1.0f;
    if (seeded == defect::early_reuse && thread >= 96) shared[thread - 96] = 0.0f;
    if (thread >= 32) return;
    float part = shared[thread];
    const bool narrow = seeded == defect::wrong_mask;
    if (narrow && thread >= 16) return;
    for (uint32_t bits = 16; bits != 0; bits /= 2) {
        part += Cx::shuffle_xor(part, bits, narrow ? 0x0000ffffu : 0xffffffffu);
    }
    if (thread == 0) Cx::store(out + Cx::block(), part);
}

/// Sums of the columns of [rows][8] numbers, by one warp that brings in 16 rows at a time, two
/// stages of them in turn.
template <class Cx>
void sum_rows(const uint32_t* numbers, uint32_t rows, uint32_t* out, defect seeded) {
    constexpr uint32_t stage_rows = 16;
    uint32_t* const shared = reinterpret_cast<uint32_t*>(Cx::shared());
    const uint32_t lane = Cx::lane();
    const uint32_t stages = rows / stage_rows;
    const auto stage_at = [&](uint32_t stage) {
        const uint32_t behind = seeded == defect::copy_overrun ? 1000 : 0;
        return shared + stage % 2 * stage_rows * 8 + lane * 4 + behind;
    };
    const auto fetch = [&](uint32_t stage) {
        const uint32_t off = seeded == defect::misaligned ? 1 : 0;
        if (stage < stages) {
            Cx::copy_async(stage_at(stage), numbers + stage * stage_rows * 8 + lane * 4 + off);
        }
        Cx::commit_async();
    };
    uint32_t sum = 0;
    fetch(0);
    for (uint32_t stage = 0; stage < stages; ++stage) {
        fetch(stage + 1);
        if (seeded != defect::never_waited) {
            if (seeded == defect::early_read || seeded == defect::early_raw_read) {
                Cx::template wait_async<2>();
            } else {
                Cx::template wait_async<1>();
            }
        }
        Cx::warp_barrier();
        for (uint32_t row = lane / 8; row < stage_rows && seeded != defect::never_waited;
             row += 4) {
            const uint32_t* const at = shared + (stage % 2 * stage_rows + row) * 8 + lane % 8;
            sum += seeded == defect::early_raw_read ? *at : Cx::template load<uint32_t>(at);
        }
        if (seeded != defect::missing_reuse_barrier) Cx::warp_barrier();
    }
    if (seeded != defect::never_waited) Cx::template wait_async<0>();
    sum += Cx::shuffle_xor(sum, 8);
    sum += Cx::shuffle_xor(sum, 16);
    if (lane < 8) Cx::store(out + lane, sum);
}
