// Rows that are softened, and rows over their sum: the bits are those of the CPU's library.
#include "kernels/transform.hpp"

#include "filled_lane.hpp"
#include "retention/transform.hpp"
#include "score_rows.hpp"

using namespace kernel_test;
namespace kernels = kvrt::kernels;

namespace {

/// Rows of several KV heads with candidates of several kinds.
struct transformation {
    uint32_t group;
    uint64_t stride;
    std::vector<float> scores, norms, softened, shared;
    std::vector<kernels::guarded_slots> guarded;
    std::vector<kernels::normalise_head> heads;

    transformation(uint32_t rows, uint32_t slots, std::mt19937& random)
        : group(rows), stride(slots + 1) {
        for (uint32_t kind = 0; kind < static_cast<uint32_t>(scores_like::count); ++kind) {
            for (const kvrt::guarded_slots& each : some_candidates(slots)) {
                add(draw_row(static_cast<scores_like>(kind), group * stride, random), each, random);
                if (few_cases) break;
            }
        }
    }
    void add(std::vector<float> rows, const kvrt::guarded_slots& of, std::mt19937& random) {
        heads.push_back({scores.size(), scores.size(), guarded.size()});
        guarded.push_back(to_kernels(of));
        scores.insert(scores.end(), rows.begin(), rows.end());
        const std::vector<float> norm = draw_row(scores_like::normal, stride, random);
        norms.insert(norms.end(), norm.begin(), norm.end());
        std::vector<float> other = rows;
        kvrt::softmax_mean(rows.data(), stride, group, of.candidates, rows.data());
        kvrt::scale_by_norm(of.candidates, norm.data(), 0.0f, rows.data());
        softened.insert(softened.end(), rows.begin(), rows.begin() + static_cast<long>(stride));
        kvrt::normalise_to_sum(of.candidates, other.data());
        shared.insert(shared.end(), other.begin(), other.begin() + static_cast<long>(stride));
    }
    template <class callable>
    std::vector<float> run(uint32_t rows, uint32_t shared_bytes, thread_order order,
                           const callable& kernel) const {
        device_array<float> on_scores(scores);
        const device_array<float> on_norms(norms);
        const device_array<kernels::guarded_slots> on_guarded(guarded);
        const device_array<kernels::normalise_head> on_heads(heads);
        kernels::transform_parameters call;
        call.scores = on_scores.data();
        call.norms = on_norms.data();
        call.guarded = on_guarded.data();
        call.heads = on_heads.data();
        call.stride = stride;
        call.group = rows;
        call.count = static_cast<uint32_t>(heads.size());
        const launch_report report = launch({.blocks = call.count,
                                             .threads = kernels::normalise_threads,
                                             .shared_bytes = shared_bytes,
                                             .order = order},
                                            [&] { kernel(call); });
        REQUIRE_MESSAGE(report.clean(), report.text());
        const std::vector<float> all = on_scores.copy();
        std::vector<float> first;  // rows
        for (const kernels::normalise_head& head : heads) {
            const auto begin = all.begin() + static_cast<long>(head.out);
            first.insert(first.end(), begin, begin + static_cast<long>(stride));
        }
        return first;
    }
};

/// NaN is NaN, whatever its bits.
uint32_t differences(const std::vector<float>& a, const std::vector<float>& b) {
    REQUIRE(a.size() == b.size());
    uint32_t count = 0;
    for (size_t i = 0; i < a.size(); ++i) count += a[i] == b[i] || (a[i] != a[i] && b[i] != b[i]);
    return static_cast<uint32_t>(a.size()) - count;
}

}  // namespace

TEST_CASE("softening and sharing kernels: the CPU's numbers") {
    std::mt19937 random(11);
    const std::pair<uint32_t, uint32_t> shapes[] = {{4, 700}, {1, 40}, {12, 150}};
    for (const auto& [group, slots] : shapes) {
        CAPTURE(group);
        const transformation all(group, few_cases ? 40 : slots, random);
        for (const thread_order order : orders()) {
            const auto softened =
                all.run(group, kernels::soften_shared_bytes(group), order,
                        [](const auto& call) { kernels::soften_rows<context>(call); });
            if (cpu_fuses()) CHECK(differences(softened, all.softened) == 0);
            const auto shared =
                all.run(1, 0, order, [](const auto& call) { kernels::share_rows<context>(call); });
            CHECK(differences(shared, all.shared) == 0);
        }
        if (few_cases) break;
    }
    // By hand: weights 1 : 3 and 3 : 1 of two heads, and norms 2 and 4.
    transformation hand(2, 3, random);
    hand.scores = {9, 0, std::log(3.0f), 9, 9, std::log(3.0f), 0, 9};
    hand.norms = {9, 2, 4, 9};
    hand.guarded = {to_kernels(guarded_of(4, {{1, 3}}))};
    hand.heads = {{0, 0, 0}};
    const auto softened = hand.run(2, kernels::soften_shared_bytes(2), thread_order::shuffled,
                                   [](const auto& call) { kernels::soften_rows<context>(call); });
    const float expected[] = {9, 1, 2, 9};
    for (int i = 0; i < 4; ++i) CHECK(softened[i] == doctest::Approx(expected[i]));
}
