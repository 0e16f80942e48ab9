// Decode attention over native tiles of floats: scores of a run's keys, and weighted sums of its
// values, read once and where they lie. Include it per target.

// Per-target include guard.
#if defined(KVRT_ATTENTION_NATIVE_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVRT_ATTENTION_NATIVE_INL_HPP
#undef KVRT_ATTENTION_NATIVE_INL_HPP
#else
#define KVRT_ATTENTION_NATIVE_INL_HPP
#endif

#include <hwy/highway.h>

#include "attention/coded-inl.hpp"
#include "format/vector-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {
namespace {

constexpr uint32_t line_bytes = 64;

using slots_tag = hn::CappedTag<float, slot_group>;

HWY_INLINE void prefetch_line(const std::byte* address) { __builtin_prefetch(address, 0, 2); }

// scores[g][group * 16 + lane] = q[g] . k, for `heads` query heads.
template <element type, uint32_t heads>
HWY_NOINLINE void score_run(const run_tiles& tiles, const float* queries, uint32_t dim,
                            float* scores) {
    const slots_tag d;
    constexpr uint32_t parts = slot_group / static_cast<uint32_t>(hn::MaxLanes(slots_tag()));
    constexpr uint32_t lanes = static_cast<uint32_t>(hn::MaxLanes(slots_tag()));
    // Several sums per head hide the latency of the fused multiply-add.
    constexpr uint32_t chains = parts > 1 ? 1 : (heads <= 2 ? 4 : 2);
    constexpr uint32_t row_bytes = slot_group * element_bytes(type);
    for (uint32_t group = 0; group < tiles.groups; ++group) {
        const std::byte* tile = tiles.keys[group];
        const std::byte* ahead = tiles.next_keys[group];
        for (uint32_t part = 0; part < parts; ++part) {
            hn::Vec<slots_tag> sums[heads][chains];
            for (uint32_t g = 0; g < heads; ++g) {
                for (uint32_t c = 0; c < chains; ++c) sums[g][c] = hn::Zero(d);
            }
            const std::byte* row = tile + part * lanes * element_bytes(type);
            for (uint32_t i = 0; i < dim; i += 4) {
                if (part == 0) {
                    for (uint32_t line = 0; line < 4 * row_bytes; line += line_bytes) {
                        prefetch_line(ahead + i * row_bytes + line);
                    }
                }
                HWY_UNROLL(4)
                for (uint32_t c = 0; c < 4; ++c) {
                    const auto key = load_f32<type>(d, row + (i + c) * row_bytes);
                    HWY_UNROLL(8)
                    for (uint32_t g = 0; g < heads; ++g) {
                        sums[g][c % chains] = hn::MulAdd(key, hn::Set(d, queries[g * dim + i + c]),
                                                         sums[g][c % chains]);
                    }
                }
            }
            for (uint32_t g = 0; g < heads; ++g) {
                for (uint32_t c = 1; c < chains; ++c) sums[g][0] = hn::Add(sums[g][0], sums[g][c]);
                hn::StoreU(sums[g][0], d,
                           scores + g * run_slots + group * slot_group + part * lanes);
            }
        }
    }
}

// values[g][...] += weights[g][slot] * v[slot], for slots [first, end) of the run and the
// dimensions [from, from + vectors * lanes) held in registers.
template <element type, uint32_t heads, uint32_t vectors, class tag>
HWY_INLINE void add_columns(tag d, const run_tiles& tiles, const float* weights, uint32_t first,
                            uint32_t end, uint32_t dim, uint32_t from, float* values) {
    const uint32_t lanes = static_cast<uint32_t>(hn::Lanes(d));
    const uint32_t row_bytes = dim * element_bytes(type);
    hn::Vec<tag> sums[heads][vectors];
    for (uint32_t g = 0; g < heads; ++g) {
        for (uint32_t v = 0; v < vectors; ++v) {
            sums[g][v] = hn::LoadU(d, values + g * dim + from + v * lanes);
        }
    }
    for (uint32_t slot = first; slot < end; ++slot) {
        const uint32_t place = slot % slot_group * row_bytes + from * element_bytes(type);
        const std::byte* row = tiles.values[slot / slot_group] + place;
        const std::byte* ahead = tiles.next_values[slot / slot_group] + place;
        hn::Vec<tag> value[vectors];
        HWY_UNROLL(8)
        for (uint32_t v = 0; v < vectors; ++v) {
            value[v] = load_f32<type>(d, row + v * lanes * element_bytes(type));
        }
        for (uint32_t line = 0; line < vectors * lanes * element_bytes(type); line += line_bytes) {
            prefetch_line(ahead + line);
        }
        HWY_UNROLL(8)
        for (uint32_t g = 0; g < heads; ++g) {
            const auto weight = hn::Set(d, weights[g * run_slots + slot]);
            HWY_UNROLL(8)
            for (uint32_t v = 0; v < vectors; ++v) {
                sums[g][v] = hn::MulAdd(value[v], weight, sums[g][v]);
            }
        }
    }
    for (uint32_t g = 0; g < heads; ++g) {
        for (uint32_t v = 0; v < vectors; ++v) {
            hn::StoreU(sums[g][v], d, values + g * dim + from + v * lanes);
        }
    }
}

template <element type, uint32_t heads>
HWY_NOINLINE void add_values(const run_tiles& tiles, const float* weights, uint32_t first,
                             uint32_t end, uint32_t dim, float* values) {
    const slots_tag d;
    const hn::CappedTag<float, 8> narrow;
    constexpr uint32_t lanes = static_cast<uint32_t>(hn::MaxLanes(slots_tag()));
    constexpr uint32_t narrow_lanes = static_cast<uint32_t>(hn::MaxLanes(narrow));
    constexpr uint32_t registers = lanes == 16 ? 16 : 8;
    constexpr uint32_t vectors = HWY_MAX(1u, HWY_MIN(8u, registers / heads));
    uint32_t from = 0;
    for (; from + vectors * lanes <= dim; from += vectors * lanes) {
        add_columns<type, heads, vectors>(d, tiles, weights, first, end, dim, from, values);
    }
    for (; from + lanes <= dim; from += lanes) {
        add_columns<type, heads, 1>(d, tiles, weights, first, end, dim, from, values);
    }
    for (; from < dim; from += narrow_lanes) {
        add_columns<type, heads, 1>(narrow, tiles, weights, first, end, dim, from, values);
    }
}

using score_function = void (*)(const run_tiles&, const float*, uint32_t, float*);
using value_function = void (*)(const run_tiles&, const float*, uint32_t, uint32_t, uint32_t,
                                float*);

template <element type>
score_function score_of(uint32_t heads) {
    constexpr score_function table[max_together] = {
        score_run<type, 1>, score_run<type, 2>, score_run<type, 3>, score_run<type, 4>,
        score_run<type, 5>, score_run<type, 6>, score_run<type, 7>, score_run<type, 8>};
    return table[heads - 1];
}

template <element type>
value_function value_of(uint32_t heads) {
    constexpr value_function table[max_together] = {
        add_values<type, 1>, add_values<type, 2>, add_values<type, 3>, add_values<type, 4>,
        add_values<type, 5>, add_values<type, 6>, add_values<type, 7>, add_values<type, 8>};
    return table[heads - 1];
}

score_function score_of(element type, uint32_t heads) {
    switch (type) {
        case element::f32:
            return score_of<element::f32>(heads);
        case element::f16:
            return score_of<element::f16>(heads);
        default:
            return score_of<element::bf16>(heads);
    }
}

value_function value_of(element type, uint32_t heads) {
    switch (type) {
        case element::f32:
            return value_of<element::f32>(heads);
        case element::f16:
            return value_of<element::f16>(heads);
        default:
            return value_of<element::bf16>(heads);
    }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
