// TriAttention's scores as products of matrices: what the kernels around a product make, with the
// product in double in between, against the definition and against the kernel that sums itself.
#include "kernels/score_products.hpp"

#include <bit>

#include "score_cohort.hpp"

using namespace kernel_test;

namespace {

struct split {
    uint32_t tile;   ///< slots at once
    uint32_t heads;  ///< of the cohort, at once
};

enum class arithmetic { f32, tf32 };

/// To 10 bits behind the point.
float to_tf32(float x) {
    uint32_t bits = std::bit_cast<uint32_t>(x);
    bits += 0x0fffu + (bits >> 13 & 1u);
    return std::bit_cast<float>(bits & ~0x1fffu);
}

/// What a library of matrices does, column for column. The worst error of a sum, in units of the
/// sum of its terms' magnitudes.
double multiply(const kernels::product_parameters& call, arithmetic kind) {
    double worst = 0;
    const uint32_t inner = call.inner(), columns = call.columns();
    for (uint32_t head = 0; head < call.heads; ++head) {
        const float* const keys = call.keys + uint64_t{head} * inner * call.tile;
        const float* const weights = call.weights + uint64_t{head} * inner * columns;
        for (uint32_t column = 0; column < columns; ++column) {
            for (uint32_t place = 0; place < call.tile; ++place) {
                double exact = 0, magnitudes = 0;
                float sum = 0;
                for (uint32_t i = 0; i < inner; ++i) {
                    float key = keys[uint64_t{i} * call.tile + place];
                    float weight = weights[uint64_t{column} * inner + i];
                    exact += double{key} * double{weight};
                    magnitudes += std::abs(double{key} * double{weight});
                    if (kind == arithmetic::tf32) {
                        key = to_tf32(key);
                        weight = to_tf32(weight);
                    }
                    sum = std::fma(key, weight, sum);
                }
                call.products[(uint64_t{head} * columns + column) * call.tile + place] = sum;
                // Of slots behind the last nothing was gathered.
                if (!std::isnan(sum)) {
                    worst = std::max(worst, std::abs(double{sum} - exact) / magnitudes);
                }
            }
        }
    }
    return worst;
}

/// By heads and tiles as a cohort is scored; where one is not clean, its report.
launch_report score_by_products(scored_cohort& cohort, const split& parts, thread_order order,
                                std::vector<float>& scores, arithmetic kind = arithmetic::f32) {
    const double bound = kind == arithmetic::f32 ? 3e-5 : 1.1e-3;
    return cohort.with_call(
        [&](const kernels::triattention_parameters& score) {
            kernels::product_parameters call;
            call.score = score;
            call.tile = parts.tile;
            const uint32_t all = score.count * cohort.heads;
            const uint64_t inner = call.inner(), columns = call.columns();
            device_array<float> keys(std::vector<float>(parts.heads * inner * call.tile, NAN));
            device_array<float> weights(std::vector<float>(parts.heads * inner * columns, NAN));
            device_array<float> products(parts.heads * columns * call.tile);
            call.keys = keys.data();
            call.weights = weights.data();
            call.products = products.data();
            launch_report report;
            const auto run = [&](uint32_t blocks, const auto& body) {
                if (!report.clean()) return;
                report = launch(
                    {.blocks = blocks, .threads = kernels::score_threads, .order = order}, body);
            };
            for (; call.first_head < all; call.first_head += call.heads) {
                call.heads = std::min(parts.heads, all - call.first_head);
                run(call.heads, [&] { kernels::weigh_heads<context>(call); });
                for (call.first_slot = 0; call.first_slot < score.most_slots;
                     call.first_slot += call.tile) {
                    const uint32_t blocks = kernels::product_blocks(call.heads, call.tile);
                    run(blocks, [&] {
                        with_format(score.place.keys, [&]<kernels::coding codes, number type>() {
                            kernels::gather_keys<context, codes, type>(call);
                        });
                    });
                    CHECK(multiply(call, kind) < bound);
                    run(blocks, [&] { kernels::take_greatest<context>(call); });
                }
            }
            return report;
        },
        scores);
}

}  // namespace

TEST_CASE("TriAttention as products: the definition, and the kernel that sums itself") {
    struct {
        score_case test;
        std::vector<uint32_t> slots;
        split parts;
    } cases[] = {
        {{{}, 64, KV_ROPE_HALF, 4, true}, {75, 300, 1}, {128, 3}},
        {{{.key_dim = 128, .key_format = KV_FORMAT_INT8_TOKEN}, 48, KV_ROPE_HALF, 7, false, 1.3},
         {130, 128},
         {256, 4}},
        {{{.kv_heads = 1, .key_format = KV_FORMAT_BF16}, 32, KV_ROPE_INTERLEAVED, 2, true, 0.9},
         {140},
         {128, 9}},
        // Of 10 bands, and the others do not rotate.
        {{{.order = tile_order::hnd, .kv_heads = 1}, 20, KV_ROPE_HALF, 12}, {40}, {128, 1}},
        {{{.order = tile_order::nhd, .key_dim = 72, .key_format = KV_FORMAT_INT4_TOKEN},
          72,
          KV_ROPE_INTERLEAVED,
          1},
         {33, 20},
         {128, 2}},
        {{{.kv_heads = 1, .key_dim = 40, .key_format = KV_FORMAT_F32}, 0, KV_ROPE_NONE, 2},
         {50},
         {128, 1}},
        {{{.kv_heads = 1, .key_format = KV_FORMAT_FP8_TOKEN}, 64}, {17}, {128, 1}},
        {{{.kv_heads = 1, .key_format = KV_FORMAT_FP8_E4M3}, 64}, {17}, {128, 1}},
        {{{.kv_heads = 1, .key_format = KV_FORMAT_FP8_E5M2}, 64}, {17}, {128, 1}},
    };
    uint32_t number_of_case = 0;
    for (const auto& each : cases) {
        if (few_cases && number_of_case > 0) break;
        CAPTURE(each.test.lane.text());
        scored_cohort cohort(each.test, each.slots);
        std::vector<float> summed;
        REQUIRE(cohort.run<context>(thread_order::ascending, summed).clean());
        for (const thread_order order : emulator::all_orders) {
            // The first in every order, others in one.
            if (number_of_case != 0 && number_of_case % 3 != static_cast<uint32_t>(order)) continue;
            std::vector<float> scores;
            const launch_report report = score_by_products(cohort, each.parts, order, scores);
            REQUIRE_MESSAGE(report.clean(), report.text());
            // The bound of the other kernel: weights and what is gathered are rounded to f32 alike.
            CHECK(worst_to_definition(cohort, scores) < 3e-4);
            CHECK(worst_distance(scores, summed) < 2e-4);
        }
        ++number_of_case;
    }
}

TEST_CASE("TriAttention as products: factors of 11 bits cost what is said of them") {
    scored_cohort cohort({{.kv_heads = 1, .key_dim = 256}, 256, KV_ROPE_HALF, 2}, {60});
    std::vector<float> close, rough;
    REQUIRE(score_by_products(cohort, {128, 1}, thread_order::ascending, close).clean());
    REQUIRE(score_by_products(cohort, {128, 1}, thread_order::ascending, rough, arithmetic::tf32)
                .clean());
    CHECK(worst_to_definition(cohort, close) < 3e-4);
    CHECK(worst_to_definition(cohort, rough) > 3e-3);
}

TEST_CASE("TriAttention as products: phases of another sequence are found") {
    scored_cohort cohort({{.kv_heads = 1}, 64, KV_ROPE_HALF, 2, true}, {20, 20});
    std::vector<float> right, wrong;
    REQUIRE(score_by_products(cohort, {128, 1}, thread_order::ascending, right).clean());
    std::swap(cohort.lanes[0].phases, cohort.lanes[1].phases);
    REQUIRE(score_by_products(cohort, {128, 1}, thread_order::ascending, wrong).clean());
    CHECK(worst_to_definition(cohort, right) < 3e-4);
    CHECK(worst_to_definition(cohort, wrong) > 1e-2);
}
