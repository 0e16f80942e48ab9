// Decode attention over sealed tiles (format.hpp, tile_reading), with the kernels of
// records-inl.hpp. What a tile shares goes to the side where it is needed once; m is the middle of
// the codes:
//
//   q . k[t]  = factor[t] (sum (q step) (c - m)  +  q . (least + m step)),  folded into the query
//   w . v     = factor    (sum (w step[t]) (c - m) + sum w (least[t] + m step[t])),  into the sum
//
// Include it per target.

// Per-target include guard.
#if defined(KVRT_ATTENTION_TILES_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVRT_ATTENTION_TILES_INL_HPP
#undef KVRT_ATTENTION_TILES_INL_HPP
#else
#define KVRT_ATTENTION_TILES_INL_HPP
#endif

#include <hwy/highway.h>

#include "attention/records-inl.hpp"
#include "base/checked.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR

/// Lanes(d) numbers from f16, the first at `from`.
template <class tag>
HWY_INLINE hn::Vec<tag> load_halves(tag d, const std::byte* from) {
    const hn::Rebind<uint16_t, tag> d16;
    const hn::Rebind<hwy::float16_t, tag> df16;
    const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(from));
    return hn::PromoteTo(d, hn::BitCast(df16, bits));
}

/// `heads` queries with the steps of the channels folded in.
template <uint32_t heads>
struct folded_queries {
    alignas(64) float channels[heads][widest_row + 16];
    float bias[heads];

    /// queries are [heads][dim], numbers of the channels step[dim] and least[dim].
    void fold(const float* queries, const coded_operand& keys, const std::byte* numbers,
              float middle_code) {
        const uint32_t dim = keys.dim;
        for (uint32_t h = 0; h < heads; ++h) bias[h] = 0.0f;
        const uint32_t wide = dim / 16 * 16;
        fold(hn::CappedTag<float, 16>(), 0, wide, queries, dim, numbers, middle_code);
        if (wide == dim) return;
        fold(hn::CappedTag<float, 8>(), wide, dim, queries, dim, numbers, middle_code);
    }

  private:
    template <class tag>
    HWY_INLINE void fold(tag d, uint32_t first, uint32_t end, const float* queries, uint32_t dim,
                         const std::byte* numbers, float middle_code) {
        const uint32_t lanes = static_cast<uint32_t>(hn::Lanes(d));
        hn::Vec<tag> sums[heads];
        for (uint32_t h = 0; h < heads; ++h) sums[h] = hn::Zero(d);
        for (uint32_t i = first; i < end; i += lanes) {
            const auto step = load_halves(d, numbers + i * 2);
            const auto least = load_halves(d, numbers + (dim + i) * 2);
            const auto middle = hn::MulAdd(step, hn::Set(d, middle_code), least);
            for (uint32_t h = 0; h < heads; ++h) {
                const auto query = hn::LoadU(d, queries + h * dim + i);
                hn::StoreU(hn::Mul(query, step), d, channels[h] + i);
                sums[h] = hn::MulAdd(query, middle, sums[h]);
            }
        }
        for (uint32_t h = 0; h < heads; ++h) bias[h] += hn::GetLane(hn::SumOfLanes(d, sums[h]));
    }
};

/// How codes of tiles are multiplied: as floats.
struct float_products {
    using groups = value_groups;
    static constexpr bool takes_factors = false;  ///< of channels, and middle codes for 0
    template <uint32_t heads>
    using queries = folded_queries<heads>;

    template <code_kind kind, uint32_t heads>
    static void score(const std::byte* const* tiles, const std::byte* const* next_tiles,
                      uint32_t tile_count, const coded_operand& keys,
                      const folded_queries<heads>& folded, float* scores) {
        score_records<kind, heads, true>(tiles, next_tiles, tile_count, keys,
                                         reinterpret_cast<const std::byte*>(folded.channels[0]),
                                         sizeof folded.channels[0], scores);
    }
    template <code_kind kind, uint32_t heads>
    static void add_values(const value_rows& rows, const value_rows& next_rows,
                           const coded_operand& values, const value_groups& groups,
                           const float* weights, uint32_t first, uint32_t end, float* out) {
        add_value_rows<kind, heads>(rows, next_rows, values, groups, weights, first, end, out);
    }
};

/// scores[h][slot - first of the run] = query h . key, for the tile_count groups of 16 slots from
/// `place` of the tile on.
template <class products, code_kind kind, uint32_t heads>
HWY_NOINLINE void score_tile(const sealed_tile& from, uint32_t place, const std::byte* const* tiles,
                             const std::byte* const* next_tiles, uint32_t tile_count,
                             const float* queries, float* scores) {
    const hn::CappedTag<float, slot_group> d;
    const uint32_t lanes = static_cast<uint32_t>(hn::Lanes(d));
    const tile_reading& reading = from.operand.format->tile.reading;
    const uint32_t dim = from.operand.dim;
    const uint32_t together =
        reading.channel_tokens != 0 ? reading.channel_tokens : from.operand.tile_tokens;
    const coded_operand keys = coded_operand::of_tile(from.operand);
    const std::byte* factors = from.metadata() + dim * 4;
    typename products::template queries<heads> folded;
    for (uint32_t group = 0; group < tile_count;) {
        const uint32_t slot = place + group * slot_group;
        const uint32_t left = (together - slot % together) / slot_group;
        const uint32_t count = HWY_MIN(left, tile_count - group);
        folded.fold(queries, keys, from.metadata() + uint64_t{slot / together} * dim * 4,
                    middle_code(kind));
        float* out = scores + group * slot_group;
        products::template score<kind, heads>(tiles + group, next_tiles + group, count, keys,
                                              folded, out);
        for (uint32_t s = 0; s < count * slot_group; s += lanes) {
            const auto factor =
                reading.token_factors ? load_halves(d, factors + (slot + s) * 2) : hn::Set(d, 1.0f);
            for (uint32_t h = 0; h < heads; ++h) {
                float* at = out + h * run_slots + s;
                const auto sum = hn::Add(hn::LoadU(d, at), hn::Set(d, folded.bias[h]));
                hn::StoreU(hn::Mul(sum, factor), d, at);
            }
        }
        group += count;
    }
}

/// out[h][channel] += sum over slots [first, end) of weights[h][slot] * value; slot 0 of the run is
/// at `place` of the tile, and no slot beyond it.
template <class products, code_kind kind, uint32_t heads>
HWY_NOINLINE void add_tile_values(const sealed_tile& from, uint32_t place,
                                  const std::byte* const* tiles, const std::byte* const* next_tiles,
                                  const float* weights, uint32_t first, uint32_t end, float* out) {
    const hn::CappedTag<float, 8> d;
    const uint32_t lanes = static_cast<uint32_t>(hn::Lanes(d));
    const uint32_t dim = from.operand.dim;
    const std::byte* factors = from.metadata();
    const std::byte* steps = factors + dim * 2;
    const std::byte* leasts = steps + from.operand.tile_tokens * 2;
    const coded_operand values = coded_operand::of_tile(from.operand);
    typename products::groups groups;
    const auto middle = hn::Set(d, middle_code(kind));
    for (uint32_t slot = first / slot_group * slot_group; slot < round_up(end, slot_group);
         slot += lanes) {
        // What lies outside weighs nothing, even where it is no number.
        const auto inside = hn::And(
            hn::Ge(hn::Iota(d, static_cast<float>(slot)), hn::Set(d, static_cast<float>(first))),
            hn::Lt(hn::Iota(d, static_cast<float>(slot)), hn::Set(d, static_cast<float>(end))));
        const auto step = hn::IfThenElseZero(inside, load_halves(d, steps + (place + slot) * 2));
        const auto least = hn::IfThenElseZero(inside, load_halves(d, leasts + (place + slot) * 2));
        hn::Store(step, d, groups.step[0] + slot);
        hn::Store(hn::MulAdd(middle, step, least), d, groups.least[0] + slot);
        if constexpr (!products::takes_factors) hn::Store(middle, d, groups.zero[0] + slot);
    }
    const value_rows rows{tiles, from.code_row_bytes()};
    const value_rows next_rows{next_tiles, from.code_row_bytes()};
    if constexpr (products::takes_factors) {
        groups.has_factors = true;
        for (uint32_t i = 0; i < dim; i += lanes) {
            hn::Store(load_halves(d, factors + i * 2), d, groups.factors + i);
        }
        return products::template add_values<kind, heads>(rows, next_rows, values, groups, weights,
                                                          first, end, out);
    }
    alignas(64) float sums[heads * widest_row];
    std::fill_n(sums, heads * dim, 0.0f);
    products::template add_values<kind, heads>(rows, next_rows, values, groups, weights, first, end,
                                               sums);
    for (uint32_t i = 0; i < dim; i += lanes) {
        const auto factor = load_halves(d, factors + i * 2);
        for (uint32_t h = 0; h < heads; ++h) {
            float* at = out + h * dim + i;
            const auto sum = hn::LoadU(d, sums + h * dim + i);
            hn::StoreU(hn::MulAdd(sum, factor, hn::LoadU(d, at)), d, at);
        }
    }
}

#endif  // HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
