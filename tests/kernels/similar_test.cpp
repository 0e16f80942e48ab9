// R-KV's exact redundancy: the kernels against its definition in double, and the CPU's.
#include "content_cohort.hpp"
#include "kernels/score_similar.hpp"
#include "retention/unit_keys.hpp"

using namespace kernel_test;

namespace {

/// R-KV's exact redundancy: means of cosines with all other keys, but for rows whose newest similar
/// one a key is. NaN of keys that are not finite, which are like no other.
std::vector<double> defined_redundancy(const std::vector<std::vector<double>>& keys,
                                       double similarity) {
    const std::size_t count = keys.size();
    std::vector<std::vector<double>> units = keys;
    std::vector<double> found(count, 0.0);
    for (std::size_t i = 0; i < count; ++i) {
        double square = 0;
        for (const double x : keys[i]) square += x * x;
        if (!std::isfinite(square)) found[i] = NAN;
        for (double& x : units[i]) x = std::isfinite(square) ? x / std::sqrt(square) : 0.0;
    }
    for (std::size_t row = 0; row < count; ++row) {
        std::vector<double> cosines(count, 0.0);
        std::size_t newest = count;
        for (std::size_t j = 0; j < count; ++j) {
            if (j == row) continue;
            for (std::size_t c = 0; c < units[j].size(); ++c) {
                cosines[j] += units[row][c] * units[j][c];
            }
            if (cosines[j] > similarity) newest = j;
        }
        if (newest != count) cosines[newest] = 0.0;
        for (std::size_t j = 0; j < count; ++j) {
            found[j] += cosines[j] / static_cast<double>(count);
        }
    }
    return found;
}

/// The CPU's.
std::vector<float> redundancy_of_cpu(const kvrt::stored_rows& rows, uint32_t slots,
                                     float similarity) {
    std::vector<float> sums(slots), cosines(slots);
    std::vector<uint32_t> newest(slots);
    struct alignas(64) line {
        float floats[16];
    };
    std::vector<line> units(kvrt::unit_copy_count(slots, rows.key_dim()) / 16);
    kvrt::copy_unit_keys(rows, 0, slots, units[0].floats, sums.data());
    kvrt::compare_unit_keys(units[0].floats, slots, rows.key_dim(), 0, slots, similarity,
                            sums.data(), newest.data(), cosines.data());
    kvrt::join_redundancy(slots, sums.data(), newest.data(), cosines.data(), sums.data());
    return sums;
}

}  // namespace

TEST_CASE(
    "R-KV's kernels: cosines with all other keys, of which the newest similar one is spared") {
    constexpr float similarity = 0.15f;
    for_each_lane([](const lane_description& what, thread_order order) {
        content_cohort cohort(what);
        cohort.shorten(few_cases ? 70 : 200);
        put_nan(cohort.here, 3, 30, 5);
        device_array<float> out(cohort.nothing()), cosines(cohort.heads() * cohort.stride);
        device_array<uint32_t> newest(cohort.heads() * cohort.stride);
        const device_array<kernels::score_lane> lanes(cohort.lanes);
        auto call = cohort.make_call<kernels::similarity_parameters>();
        call.lanes = lanes.data();
        call.scores = out.data();
        call.newest = newest.data();
        call.cosines = cosines.data();
        call.parts_stride = call.score_stride = cohort.stride;
        call.most_slots = cohort.slots[0];
        call.similarity = similarity;
        cohort.run(kernels::similar_blocks(call.count, what.kv_heads, call.most_slots),
                   kernels::similar_threads, kernels::similar_shared_bytes, order,
                   [&] { kernels::compare_keys<context>(call); });
        cohort.run(kernels::score_blocks(call.count, what.kv_heads, call.most_slots),
                   kernels::score_threads, 0, order, [&] { kernels::spare_newest<context>(call); });
        cohort.scores = out.copy();
        cohort.check_ends();
        cohort.for_each_head([&](uint32_t i, uint32_t head) {
            const uint32_t slots = cohort.slots[i];
            std::vector<std::vector<double>> keys;
            for (uint32_t slot = 0; slot < slots; ++slot) {
                keys.push_back(row_of(cohort.here, false, i, slot, head));
            }
            const auto expected = defined_redundancy(keys, double{similarity});
            const auto of_cpu = redundancy_of_cpu(rows_of(cohort.here, i, head), slots, similarity);
            const auto differs = [](double a, double b) {
                return std::isnan(a) != std::isnan(b) || std::abs(a - b) > 1e-6;
            };
            for (uint32_t slot = 0; slot < slots; ++slot) {
                const double got = double{cohort.row(i, head)[slot]};
                CAPTURE(slot);
                CHECK(!differs(got, expected[slot]));
                CHECK(!differs(got, double{of_cpu[slot]}));
            }
            CHECK(std::isnan(cohort.row(i, head)[30]));
        });
    });
}
