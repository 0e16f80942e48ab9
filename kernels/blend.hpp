// Scores made of several rows, as retention/score_expected.cpp and score_directions.cpp weigh them:
// BLEND's, of what queries are expected to ask, what attention has given, and how unlike others a
// key is; R-KV's, of the latter two. Sums are in double, z-scores in the CPU's order. Only
// candidates are looked at and written.
#pragma once

#include "kernels/transform.hpp"

namespace kvrt::kernels {

/// Launch like normalise_and_reduce (normalise.hpp), with blend_shared_bytes. The rows of
/// heads[h].scores become the scores: BLEND's begin as the prior, R-KV's as redundancy.
struct blend_parameters {
    float* scores = nullptr;
    float* observed = nullptr;      ///< block h has row h, parts_stride apart; overwritten
    const float* unlike = nullptr;  ///< likewise, z-scores; of BLEND
    const guarded_slots* guarded = nullptr;
    const normalise_head* heads = nullptr;  ///< [count]
    uint64_t parts_stride = 0;
    uint32_t count = 0;
    float prior_share = 0.0f;  ///< of BLEND, beside what was observed
    float redundancy = 0.0f;   ///< share of key directions
};
/// Of two rows, mean and factor.
inline constexpr uint32_t blend_shared_bytes = normalise_shared_bytes(2);

/// What a head's block looks at.
template <class Cx>
struct blended_rows {
    float* scores;
    float* observed;
    const guarded_slots* guarded;
    uint32_t ranges;

    explicit KVRT_DEVICE blended_rows(const blend_parameters& call)
        : scores(call.scores +
                 Cx::template load_constant<uint64_t>(&call.heads[Cx::block()].scores)),
          observed(call.observed + uint64_t{Cx::block()} * call.parts_stride),
          guarded(call.guarded +
                  Cx::template load_constant<uint64_t>(&call.heads[Cx::block()].guarded)),
          ranges(Cx::template load_constant<uint32_t>(&guarded->count)) {}

    /// Calls body(slot) for the candidates of this thread.
    template <class callable>
    KVRT_DEVICE void for_each_slot(const callable& body) const {
        for (uint32_t r = 0; r < ranges; ++r) {
            const slot_range range = range_of<Cx>(guarded, r);
            for (uint32_t i = Cx::thread(); i < range.end - range.first; i += normalise_threads) {
                body(range.first + i);
            }
        }
    }
    /// Attention falls off by powers of ten: its logarithms, of shares of the mean, are compared.
    /// Where nothing was observed all stays as it is.
    KVRT_DEVICE void take_logarithms() const {
        constexpr float least_share = 0x1p-10f;
        double sum = 0.0;
        for_each_of_lane<Cx>(guarded, ranges, [&](uint32_t slot) {
            sum += double{Cx::template load<float>(observed + slot)};
        });
        const double total = sum_of_lanes<Cx>(sum);
        uint32_t slots = 0;
        for (uint32_t r = 0; r < ranges; ++r) {
            const slot_range range = range_of<Cx>(guarded, r);
            slots += range.end - range.first;
        }
        Cx::barrier();  // all have summed the whole row
        if (!(total > 0.0)) return;
        const float mean = static_cast<float>(total / slots);
        for_each_slot([&](uint32_t slot) {
            const float share = Cx::template load<float>(observed + slot) / mean;
            Cx::store(observed + slot, std::log(share + least_share));
        });
    }
};

/// The kernel of BLEND's scores. TriAttention's row is the greatest of several z-scores, so it is
/// brought to the spread of the others.
template <class Cx>
KVRT_DEVICE void blend_rows(const blend_parameters& call) {
    const blended_rows<Cx> rows(call);
    const float* const unlike = call.unlike + uint64_t{Cx::block()} * call.parts_stride;
    row_moments* const moments = reinterpret_cast<row_moments*>(Cx::shared());  // [2]
    rows.take_logarithms();
    Cx::barrier();
    const uint32_t index = Cx::thread() / sum_lanes;
    const row_moments mine = moments_of_row<Cx>(index == 0 ? rows.scores : rows.observed,
                                                rows.guarded, rows.ranges, index < 2);
    if (index < 2 && Cx::lane() % sum_lanes == 0) store_moments<Cx>(moments + index, mine);
    Cx::barrier();
    rows.for_each_slot([&](uint32_t slot) {
        const float prior = z_score<Cx>(moments, rows.scores + slot);
        const float observed = z_score<Cx>(moments + 1, rows.observed + slot);
        const float asked = call.prior_share * prior + (1.0f - call.prior_share) * observed;
        Cx::store(rows.scores + slot,
                  (1.0f - call.redundancy) * asked +
                      call.redundancy * Cx::template load<float>(unlike + slot));
    });
}

/// The kernel of R-KV's: shares of what was observed, less softmax of redundancy.
template <class Cx>
KVRT_DEVICE void mix_redundancy(const blend_parameters& call) {
    const blended_rows<Cx> rows(call);
    float* const shared = reinterpret_cast<float*>(Cx::shared());
    const float share =
        soften_row<Cx>(rows.guarded, rows.ranges, 1, rows.scores, Cx::thread() < sum_lanes);
    if (Cx::thread() == 0) Cx::store(shared, share);
    const row_total total = total_of_row<Cx>(rows.guarded, rows.ranges, rows.observed);
    Cx::barrier();
    const float softened = Cx::template load<float>(shared);
    const float importance = 1.0f - call.redundancy;
    rows.for_each_slot([&](uint32_t slot) {
        const float observed = total.share_of(Cx::template load<float>(rows.observed + slot));
        const float redundancy = Cx::template load<float>(rows.scores + slot) * softened;
        Cx::store(rows.scores + slot, importance * observed - (1.0f - importance) * redundancy);
    });
}

}  // namespace kvrt::kernels
