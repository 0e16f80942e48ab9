// Defects that end the process where a sanitizer finds them, each in a child: this program, started
// again for one test case. In a tree without sanitizers the child finds what it can itself.
#include <cstring>
#include <vector>

#include "child.hpp"
#include "defects.hpp"

using namespace emulator;
using kernel_test::child_outcome;
using kernel_test::run_child;

namespace {

struct seeded {
    const char* name;
    defect what;
    // What must be in the child's output, in each kind of tree; null: nobody can see it there.
    const char* plain;
    const char* address;
    const char* thread;
    int rows_barrier = -1;  // of rows_without_barrier; else `what` is
};

constexpr char race[] = "ThreadSanitizer: data race";
constexpr seeded all_seeded[] = {
    {"none", defect::none, "clean", "clean", "clean"},
    {"missing_barrier", defect::missing_barrier, nullptr, nullptr, race},
    {"early_reuse", defect::early_reuse, nullptr, nullptr, race},
    {"block_race", defect::block_race, nullptr, nullptr, race},
    {"shared_overrun", defect::shared_overrun, "beyond the shared memory of block 0",
     "AddressSanitizer: use-after-poison", "beyond the shared memory of block 0"},
    {"device_overrun", defect::device_overrun, "beyond a device allocation of 8 bytes",
     "AddressSanitizer: use-after-poison", nullptr},
    {"early_raw_read", defect::early_raw_read, "wrong sum", "AddressSanitizer: use-after-poison",
     "wrong sum"},
    {"rows_whole", defect::none, nullptr, nullptr, "clean", 5},
    {"rows_queries_barrier", defect::none, nullptr, nullptr, race, 0},
    {"rows_held_barrier", defect::none, nullptr, nullptr, race, 1},
    {"rows_stage_barrier", defect::none, nullptr, nullptr, race, 2},
    {"rows_done_barrier", defect::none, nullptr, nullptr, race, 3},
    {"rows_parts_barrier", defect::none, nullptr, nullptr, race, 4},
};

const char* expected_of(const seeded& each) {
#if defined(KVRT_EMULATE_ADDRESS)
    return each.address;
#elif defined(KVRT_EMULATE_THREAD)
    return each.thread;
#else
    return each.plain;
#endif
}

void report_outcome(const launch_report& report, bool right) {
    std::printf("%s%s\n", report.text().c_str(),
                !report.clean() ? ""
                : right         ? "clean"
                                : "wrong sum");
}

void run_defect(const seeded& each) {
    if (each.rows_barrier >= 0) {
        const bool right = rows_without_barrier(static_cast<uint32_t>(each.rows_barrier),
                                                thread_order::ascending, 60, 3);
        std::printf("%s\n", right ? "clean" : "wrong");
        return;
    }
    for (const thread_order order : all_orders) {
        std::vector<float> numbers(700, 1.0f);
        const device_array<float> in(numbers);
        device_array<float> sums(2);
        const launch_report report =
            launch({.blocks = 2, .threads = 128, .shared_bytes = 512, .order = order},
                   [&] { block_sum<context>(in.data(), 700, sums.data(), each.what); });
        report_outcome(report, true);

        const device_array<uint32_t> rows(std::vector<uint32_t>(64 * 8, 3));
        device_array<uint32_t> columns(8);
        const launch_report of_rows =
            launch({.threads = 32, .shared_bytes = 1024, .order = order},
                   [&] { sum_rows<context>(rows.data(), 64, columns.data(), each.what); });
        report_outcome(of_rows, columns[7] == 192);
    }
}

}  // namespace

TEST_CASE("seeded defect" * doctest::skip()) {
    const char* const name = kernel_test::task_of_child();
    for (const seeded& each : all_seeded) {
        if (name != nullptr && std::strcmp(name, each.name) == 0) run_defect(each);
    }
}

TEST_CASE("emulator: what sanitizers report") {
    for (const seeded& each : all_seeded) {
        const char* const expected = expected_of(each);
        if (expected == nullptr) continue;
        CAPTURE(each.name);
        const child_outcome outcome = run_child("seeded defect", each.name);
        INFO(outcome.output);
        CHECK(outcome.output.find(expected) != std::string::npos);
        const bool by_sanitizer = std::strstr(expected, "Sanitizer") != nullptr;
        CHECK((outcome.status != 0) == by_sanitizer);
        if (!by_sanitizer) CHECK(outcome.output.find("Sanitizer") == std::string::npos);
    }
}
