// Statistics of queries as kernels gather them: sums, totals and moments against those of the CPU,
// means against their definition in double.
#include <complex>

#include "filled_lane.hpp"
#include "kernels/gather_queries.hpp"
#include "retention/query_statistics.hpp"

using namespace kernel_test;
namespace kernels = kvrt::kernels;

namespace {

constexpr uint32_t arrays = kernels::query_sums;
static_assert(arrays == kvrt::query_sum_arrays);

struct gather_case {
    uint32_t dim = 64, rotated_dims = 64;
    uint32_t style = KV_ROPE_HALF;
    number type = number::f32;
    double factor = 1.0;
};

/// Two places, of which each has a layer of four query heads behind another of three bands.
struct gathering {
    static constexpr uint32_t heads = 4, first_band = 3, first_head = 1, places = 2;
    gather_case test;
    kvrt::rope_description rope;
    uint32_t bands;
    uint64_t length;
    device_array<double> totals;
    device_array<float> pending;
    device_array<kernels::query_count> counts;
    std::vector<double> cpu_totals;
    uint64_t cpu_tokens = 0;
    std::vector<std::complex<double>> definition;  // sums of queries before rotation, of place 1

    explicit gathering(const gather_case& of)
        : test(of),
          bands(of.dim - of.rotated_dims / 2),
          length(first_band + heads * bands),
          totals(places * arrays * length),
          pending(places * arrays * length),
          counts(places * (first_head + heads)),
          cpu_totals(arrays * length),
          definition(heads * bands) {
        rope.style = of.style;
        rope.dimensions = of.rotated_dims;
        rope.attention_factor = of.factor;
        for (uint32_t f = 0; f < of.rotated_dims / 2; ++f) {
            rope.inverse_frequencies[f] = std::pow(1e4, -2.0 * f / of.rotated_dims);
        }
    }
    kernels::query_memory memory() {
        return {totals.data(), pending.data(), counts.data(), length, first_head + heads};
    }
    /// Rows of place 1 behind `before` others, from `position` on: of the second of three items, of
    /// which the others gather nothing, in a step of its own.
    void gather(uint32_t before, uint32_t rows, uint32_t position, bool begins,
                thread_order order) {
        device_tensor queries(test.type, before + rows, heads, test.dim, 5);
        queries.fill(position + rows);
        kernels::query_parameters call;
        call.memory = memory();
        call.first_band = first_band;
        call.first_head = first_head;
        call.queries = queries.place;
        call.type = test.type;
        call.heads = heads;
        call.bands = bands;
        call.rotated = rope.rotated_bands();
        call.interleaved = rope.style == KV_ROPE_INTERLEAVED;
        call.inverse_factor = static_cast<float>(1.0 / rope.attention_factor);
        for (uint32_t f = 0; f < call.rotated; ++f) {
            call.turns[f] = rope.inverse_frequencies[f] * 0.15915494309189535;
        }
        const uint32_t place = begins ? 1 | kernels::begins_anew : 1;
        const device_array<kernels::gathered_item> items(std::vector<kernels::gathered_item>{
            {kernels::no_sequence, 0}, {place, committed_}, {kernels::no_sequence, 0}});
        const device_array<uint32_t> step(std::vector<uint32_t>{++step_});
        const device_array<uint32_t> query_start(
            std::vector<uint32_t>{0, before, before + rows, before + rows});
        std::vector<uint32_t> positions(before, 9999);
        for (uint32_t r = 0; r < rows; ++r) positions.push_back(position + r);
        const device_array<uint32_t> on_positions(positions);
        call.items = items.data();
        call.step = step.data();
        call.query_start = query_start.data();
        call.positions = on_positions.data();
        const launch_report report = launch({.blocks = 3 * heads,
                                             .threads = kernels::gather_threads,
                                             .shared_bytes = kernels::gather_shared_bytes,
                                             .order = order},
                                            [&] { kernels::gather_queries<context>(call); });
        REQUIRE_MESSAGE(report.clean(), report.text());
        std::vector<float> sums(arrays * length);
        kvrt::add_queries(rope, test.dim, queries.view(), before, rows, position, 0, heads,
                          kvrt::query_sums_at(sums.data() + first_band, length));
        const std::vector<float> got = pending.copy();
        for (uint32_t array = 0; array < arrays; ++array) {
            for (uint32_t i = 0; i < heads * bands; ++i) {
                const float expected = sums[array * length + first_band + i];
                const float found = got[(arrays + array) * length + first_band + i];
                if (rows <= kernels::gather_rows && cpu_fuses()) {
                    REQUIRE(found == expected);
                } else {
                    REQUIRE(std::abs(found - expected) < 1e-4f * static_cast<float>(rows));
                }
            }
        }
        last_ = std::move(sums);
        last_rows_ = rows;
        last_queries_.assign(heads * bands, 0);
        for (uint32_t r = 0; r < rows; ++r) {
            for (uint32_t i = 0; i < heads * bands; ++i) {
                last_queries_[i] += query(queries, before + r, i, position + r);
            }
        }
    }
    /// On the CPU, what was gathered last counts.
    void commit() {
        kvrt::commit_queries(kvrt::query_sums_at(last_.data() + first_band, length), heads * bands,
                             kvrt::query_sums_at(cpu_totals.data() + first_band, length));
        cpu_tokens += last_rows_;
        committed_ = step_;
        for (size_t i = 0; i < definition.size(); ++i) definition[i] += last_queries_[i];
    }
    void make_moments() {
        const std::vector<kernels::moments_lane> listed = {
            {first_band, first_head, 0, kernels::no_sequence},
            {first_band, first_head, 1, committed_}};
        const device_array<kernels::moments_lane> lanes(listed);
        kernels::moments_parameters call{memory(), lanes.data(), 2, heads, bands};
        const launch_report report = launch({.blocks = 2 * heads,
                                             .threads = kernels::gather_threads,
                                             .shared_bytes = kernels::gather_shared_bytes},
                                            [&] { kernels::make_moments<context>(call); });
        REQUIRE_MESSAGE(report.clean(), report.text());
    }
    void check_moments(uint32_t place) const {
        std::vector<float> expected(arrays * length);
        float* const at = expected.data() + first_band;
        kvrt::query_moments_of(
            kvrt::query_sums_at(const_cast<double*>(cpu_totals.data()) + first_band, length),
            heads * bands, cpu_tokens,
            {at, at + length, at + 2 * length, at + 3 * length, at + 4 * length, at + 5 * length});
        const std::vector<float> all = pending.copy();
        const float* const got = all.data() + place * arrays * length;
        double worst = 0, worst_mean = 0;
        for (uint32_t array = 0; array < arrays; ++array) {
            for (uint32_t i = 0; i < heads * bands; ++i) {
                const uint64_t here = array * length + first_band + i;
                worst = std::max(worst, std::abs(double{got[here]} - double{expected[here]}));
            }
        }
        for (uint32_t i = 0; i < heads * bands; ++i) {
            const std::complex<double> mean = definition[i] / static_cast<double>(cpu_tokens);
            const double real = got[first_band + i], imaginary = got[length + first_band + i];
            worst_mean = std::max(worst_mean, std::abs(mean - std::complex(real, imaginary)));
        }
        CHECK(worst < 1e-5);
        CHECK(worst_mean < 1e-5);
        const std::vector<kernels::query_count> known = counts.copy();
        for (uint32_t h = 0; h < heads; ++h) {
            const kernels::query_count& count =
                known[place * (first_head + heads) + first_head + h];
            CHECK(count.tokens == cpu_tokens);
            CHECK(count.pending == 0);
        }
    }

  private:
    std::complex<double> query(const device_tensor& queries, uint32_t row, uint32_t i,
                               uint64_t position) const {
        const uint32_t head = i / bands, band = i % bands, rotated = rope.rotated_bands();
        if (band >= rotated) return double{queries.get(row, head, rotated + band)};
        const bool half = rope.style == KV_ROPE_HALF;
        const std::complex<double> stored(
            queries.get(row, head, half ? band : 2 * band),
            queries.get(row, head, half ? band + rotated : 2 * band + 1));
        const double angle = rope.inverse_frequencies[band] * static_cast<double>(position);
        return stored * std::polar(1.0 / rope.attention_factor, -angle);
    }
    std::vector<float> last_;
    uint32_t last_rows_ = 0, step_ = 0, committed_ = 0;
    std::vector<std::complex<double>> last_queries_;
};

}  // namespace

TEST_CASE("gathering kernels: sums, totals and moments of queries before rotation") {
    std::vector<gather_case> cases = {
        {},
        {128, 48, KV_ROPE_HALF, number::bf16, 1.3},
        {72, 72, KV_ROPE_INTERLEAVED, number::f16, 0.9},
        {256, 0, KV_ROPE_NONE, number::f32},
    };
    if (few_cases) cases.resize(1);
    uint32_t index = 0;
    for (const gather_case& each : cases) {
        CAPTURE(index);
        const thread_order order = emulator::all_orders[index++ % std::size(emulator::all_orders)];
        gathering run(each);
        run.gather(2, 75, 0, true, order);
        run.commit();
        run.gather(0, 1, 75, false, order);
        run.commit();
        run.gather(1, 16, 76, false, order);  // of a step that is cancelled
        run.gather(1, 3, 76, false, order);
        run.commit();
        run.make_moments();
        run.check_moments(1);
        run.make_moments();  // once more: nothing is pending
        run.check_moments(1);
        // Sums that are not finite do not count.
        gathering odd(each);
        odd.gather(0, 4, 0, true, order);
        odd.commit();
        odd.gather(0, 2, 4, false, order);
        odd.commit();
        odd.pending[(arrays + 2) * odd.length + gathering::first_band] = NAN;
        odd.make_moments();
        CHECK(odd.counts.copy()[odd.counts.size() - gathering::heads].tokens == 4);
        CHECK(odd.counts.copy()[odd.counts.size() - 1].tokens == 6);
    }
}
