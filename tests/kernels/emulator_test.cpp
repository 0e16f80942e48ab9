// The emulator itself: what it computes when kernels are right, and that it finds each defect that
// it promises to find. Defects that only a sanitizer reports are in sanitizer_test.cpp.
#include <doctest/doctest.h>

#include <vector>

#include "defects.hpp"

using namespace emulator;

namespace {

launch_report run_sum(defect seeded, thread_order order, float& result, fibre_switch switching) {
    std::vector<float> numbers(5000);
    for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<float>(i % 7);
    const device_array<float> in(numbers);
    device_array<float> out(2);
    launch_report report = launch({.blocks = 2,
                                   .threads = 128,
                                   .shared_bytes = 128 * sizeof(float),
                                   .order = order,
                                   .switching = switching},
                                  [&] { block_sum<context>(in.data(), 5000, out.data(), seeded); });
    result = out[1];
    return report;
}

launch_report run_rows(defect seeded, thread_order order, std::vector<uint32_t>& result) {
    device_array<uint32_t> in(64 * 8);
    for (uint32_t i = 0; i < in.size(); ++i) in[i] = i;
    device_array<uint32_t> out(8);
    launch_report report = launch({.threads = 32, .shared_bytes = 4096, .order = order},
                                  [&] { sum_rows<context>(in.data(), 64, out.data(), seeded); });
    result = out.copy();
    return report;
}

void expect(const launch_report& report, violation_kind kind, const char* words) {
    INFO(report.text());
    REQUIRE(report.violations.size() >= 1);
    CHECK(report.violations[0].kind == kind);
    CHECK(report.violations[0].text.find(words) != std::string::npos);
}

}  // namespace

TEST_CASE("emulator: right kernels are right in every order, with either switch") {
    // 714 whole rounds of 0..6 and 0, 1: 21 * 714 + 1.
    for (const fibre_switch switching : {fibre_switch::assembly, fibre_switch::portable}) {
        for (const thread_order order : all_orders) {
            float sum = 0.0f;
            const launch_report report = run_sum(defect::none, order, sum, switching);
            REQUIRE_MESSAGE(report.clean(), report.text());
            CHECK(sum == 14995.0f);
        }
    }
    for (const thread_order order : all_orders) {
        std::vector<uint32_t> sums;
        const launch_report report = run_rows(defect::none, order, sums);
        REQUIRE_MESSAGE(report.clean(), report.text());
        for (uint32_t i = 0; i < 8; ++i) CHECK(sums[i] == 64 * i + 8 * (63 * 64 / 2));
    }
}

#if !defined(KVRT_EMULATE_THREAD)  // which reports it itself: sanitizer_test.cpp
TEST_CASE("emulator: a missing barrier shows in some order") {
    bool wrong = false;
    for (const thread_order order : all_orders) {
        float sum = 0.0f;
        run_sum(defect::missing_barrier, order, sum, fastest_switch());
        wrong = wrong || sum != 14995.0f;
    }
    CHECK(wrong);
}
#endif

TEST_CASE("emulator: barriers that not all threads reach") {
    float sum;
    launch_report report =
        run_sum(defect::barrier_in_branch, thread_order::ascending, sum, fastest_switch());
    expect(report, violation_kind::divergence, "threads have ended without");
    CHECK_MESSAGE(report.text().find("at block_sum") != std::string::npos, report.text());

    report = launch({.threads = 64}, [] {
        if (context::warp() == 0) {
            context::barrier();
        } else {
            context::barrier();
        }
    });
    expect(report, violation_kind::divergence, "different barriers, others at line");

    report = launch({.threads = 64}, [] { context::barrier(1, context::warp() == 0 ? 64 : 32); });
    expect(report, violation_kind::divergence, "different numbers at barrier 1");

    report = launch({.threads = 64}, [] {
        if (context::warp() == 0) context::barrier(2, 64);
        if (context::warp() == 1) context::barrier(3, 64);
    });
    expect(report, violation_kind::stuck, "32 threads, the first 32, wait at operator()");
}

TEST_CASE("emulator: named barriers hold their threads only") {
    device_array<uint32_t> out(3);
    const launch_report report = launch({.threads = 96, .shared_bytes = 16}, [&] {
        uint32_t* const shared = reinterpret_cast<uint32_t*>(context::shared());
        if (context::thread() == 64) context::store(&out[2], 7u);
        if (context::warp() == 2) return;
        for (uint32_t turn = 0; turn < 3; ++turn) {
            if (context::thread() == turn) shared[0] = turn;
            context::barrier(1, 64);
            if (context::thread() == 40) context::store(&out[0], shared[0]);
            context::barrier(1, 64);
        }
    });
    REQUIRE_MESSAGE(report.clean(), report.text());
    CHECK(out[0] == 2);
    CHECK(out[2] == 7);
}

TEST_CASE("emulator: operations of a warp") {
    device_array<uint32_t> out(32 * 8);
    for (const thread_order order : all_orders) {
        const launch_report report = launch({.threads = 32, .order = order}, [&] {
            const uint32_t lane = context::lane();
            uint32_t* const mine = &out[lane * 8];
            context::store(mine, context::shuffle(lane * 3, (lane + 5) % 32));
            context::store(mine + 1, context::shuffle_xor(lane, 6));
            context::store(mine + 2, context::shuffle_down(lane, 4));
            context::store(mine + 3, context::ballot(lane % 3 == 0));
            context::store(mine + 4, context::match_any(lane / 8));
            context::store(mine + 5, context::reduce_add(lane));
            context::store(mine + 6, context::reduce_max(lane ^ 9u));
            // Two halves on their own, one of them twice.
            const uint32_t half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
            uint32_t least = context::reduce_min(lane + 1, half);
            if (lane < 16) least += context::reduce_min(lane, half);
            context::store(mine + 7, least);
        });
        REQUIRE_MESSAGE(report.clean(), report.text());
        for (uint32_t lane = 0; lane < 32; ++lane) {
            CAPTURE(lane);
            const uint32_t* const mine = &out[lane * 8];
            CHECK(mine[0] == (lane + 5) % 32 * 3);
            CHECK(mine[1] == (lane ^ 6u));
            CHECK(mine[2] == (lane < 28 ? lane + 4 : lane));
            CHECK(mine[3] == 0x49249249u);
            CHECK(mine[4] == 0xffu << (lane / 8 * 8));
            CHECK(mine[5] == 496);
            CHECK(mine[6] == 31);
            CHECK(mine[7] == (lane < 16 ? 1u : 17u));
        }
    }
}

TEST_CASE("emulator: masks") {
    float sum;
    expect(run_sum(defect::wrong_mask, thread_order::ascending, sum, fastest_switch()),
           violation_kind::mask, "not in the mask");
    expect(launch({.threads = 32}, [] { context::warp_barrier(0x0000ffffu); }),
           violation_kind::mask, "outside of its own mask");
    expect(launch({.threads = 32},
                  [] { context::warp_barrier(context::lane() < 16 ? 0xffffffffu : 0xffff0000u); }),
           violation_kind::mask, "disagree on the mask");
    expect(launch({.threads = 32},
                  [] {
                      if (context::lane() == 0) {
                          context::ballot(true);
                      } else {
                          context::reduce_add(1);
                      }
                  }),
           violation_kind::mask, "different things");
    expect(launch({.threads = 32},
                  [] {
                      if (context::lane() != 3) context::warp_barrier();
                  }),
           violation_kind::stuck, "31 threads, the first 0, wait at operator()");
}

TEST_CASE("emulator: asynchronous copies") {
    std::vector<uint32_t> sums;
    expect(run_rows(defect::early_read, thread_order::ascending, sums), violation_kind::early_read,
           "not waited for");
    expect(run_rows(defect::missing_reuse_barrier, thread_order::ascending, sums),
           violation_kind::early_read, "not waited for");
    expect(run_rows(defect::never_waited, thread_order::ascending, sums),
           violation_kind::not_waited, "copies not waited for");
    expect(run_rows(defect::misaligned, thread_order::ascending, sums), violation_kind::alignment,
           "not aligned to its bytes: 16");
    expect(run_rows(defect::copy_overrun, thread_order::ascending, sums), violation_kind::bounds,
           "outside of shared memory, thread");

    // The bytes behind those that are read become 0; older groups arrive, newer ones do not.
    device_array<uint32_t> in{1, 2, 3, 4, 5, 6, 7, 8};
    device_array<uint32_t> out(8);
    const launch_report report = launch({.threads = 1, .shared_bytes = 32}, [&] {
        uint32_t* const shared = reinterpret_cast<uint32_t*>(context::shared());
        context::copy_async(shared, &in[0], 12);
        context::commit_async();
        context::copy_async(shared + 4, &in[4], 0);
        context::commit_async();
        context::wait_async<1>();
        for (uint32_t i = 0; i < 4; ++i) context::store(&out[i], shared[i]);
        context::wait_async<0>();
        for (uint32_t i = 4; i < 8; ++i) context::store(&out[i], shared[i]);
    });
    REQUIRE_MESSAGE(report.clean(), report.text());
    CHECK(out.copy() == std::vector<uint32_t>{1, 2, 3, 0, 0, 0, 0, 0});
}

TEST_CASE("emulator: alignment and bounds") {
    device_array<uint32_t> memory(5);
    expect(launch({.threads = 1}, [&] { context::load<kvrt::kernels::word4>(memory.data() + 1); }),
           violation_kind::alignment, "bytes: 16");
    expect(launch({.threads = 1}, [&] { context::load<uint32_t>(memory.data() + 5); }),
           violation_kind::bounds, "outside of shared memory and device");
    expect(
        launch({.threads = 1}, [&] { context::store(memory.data() + 4, kvrt::kernels::word4{}); }),
        violation_kind::bounds, "outside of shared memory and device");
    expect(launch({.threads = 1, .shared_bytes = 64},
                  [] { context::store(context::shared() + 64, 1u); }),
           violation_kind::bounds, "outside of shared memory and device");
    CHECK(launch({.threads = 1, .shared_bytes = 64}, [] {
              context::store(context::shared() + 60, 1u);
          }).clean());
}

TEST_CASE("emulator: memory holds no numbers before they are written") {
    device_array<uint32_t> out(2);
    const device_array<uint32_t> fresh(1);
    const launch_report report = launch({.threads = 1, .shared_bytes = 4}, [&] {
        context::store(&out[0], context::load<uint32_t>(context::shared()));
        context::store(&out[1], context::load<uint32_t>(fresh.data()));
    });
    REQUIRE(report.clean());
    CHECK(out[0] == 0xffffffffu);
    CHECK(out[1] == 0xffffffffu);
}
