// Decode attention over codes, however they are multiplied: as floats (records-inl.hpp,
// tiles-inl.hpp), with 8-bit dot products (codes-inl.hpp) or by AMX (amx_codes-inl.hpp,
// amx_folded-inl.hpp, amx_values-inl.hpp, amx_fp8-inl.hpp), chosen by the processor and the codes.
//
// What decode.cpp and the files with kernels of keys, values and tiles (decode_keys.cpp,
// decode_values.cpp, decode_tiles.cpp) have in common, and how they call each other: directly, per
// target. Include it per target.

// Per-target include guard.
#if defined(KVRT_ATTENTION_CODED_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVRT_ATTENTION_CODED_INL_HPP
#undef KVRT_ATTENTION_CODED_INL_HPP
#else
#define KVRT_ATTENTION_CODED_INL_HPP
#endif

#include <hwy/highway.h>

#include <type_traits>

#include "attention/amx_fp8-inl.hpp"
#include "attention/amx_values-inl.hpp"
#include "attention/codes-inl.hpp"
#include "base/amx.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {

inline constexpr uint32_t run_groups = run_slots / slot_group;
inline constexpr uint32_t max_together = 8;  // query heads that share a pass over a tile

// Scores and weights of a span are [run][max_together][run_slots]: floats from run to run.
inline constexpr uint32_t span_stride = max_together * run_slots;

// Where the tiles of a run lie, and the ones to prefetch meanwhile.
struct run_tiles {
    const std::byte* const* keys;
    const std::byte* const* values;
    const std::byte* const* next_keys;
    const std::byte* const* next_values;
    uint32_t groups;
};

// The same of a span.
struct span_tiles {
    const std::byte* keys[span_runs * run_groups];
    const std::byte* values[span_runs * run_groups];
    const std::byte* next_keys[span_runs * run_groups];
    const std::byte* next_values[span_runs * run_groups];
    uint32_t groups;

    run_tiles of_run(uint32_t r) const {
        const uint32_t g = r * run_groups;
        return {keys + g, values + g, next_keys + g, next_values + g,
                HWY_MIN(run_groups, groups - g)};
    }
};

// ---- Kernels by code ----------------------------------------------------------------------------

/// scores[h][slot - run] = query . key, of a run of records, whose queries are from
/// encode_query_heads. Slots [first, end) of the run count.
void score_coded(const run_tiles& tiles, const tile_layout& layout, bool float_queries,
                 uint32_t head, uint32_t heads, const std::byte* queries, uint32_t query_bytes,
                 uint32_t first, uint32_t end, float* scores);

/// scores[h][i] += what the mean of keys adds at positions[i], of `count` slots whose positions
/// ascend.
void score_means(const tile_layout& layout, const uint32_t* positions, uint32_t count,
                 uint32_t heads, const std::byte* queries, uint32_t query_bytes, float* scores);

/// kernels.hpp, encode_queries.
void encode_query_heads(const tile_layout& layout, uint32_t query_heads, const float* queries,
                        std::byte* out, uint8_t* as_floats);

/// out[h][channel] += weighted values of records, of slots [first, end) of a span.
void add_coded_values(const span_tiles& tiles, const tile_layout& layout, uint32_t head,
                      uint32_t heads, const float* weights, uint32_t first, uint32_t end,
                      float* out);

/// The same two of a run that lies in a sealed tile, from `place` of it on.
void score_sealed(const run_tiles& tiles, const tile_layout& layout, const sealed_tile& from,
                  uint32_t place, uint32_t heads, const float* queries, float* scores);
void add_sealed_values(const run_tiles& tiles, const tile_layout& layout, const sealed_tile& from,
                       uint32_t place, uint32_t heads, const float* weights, uint32_t first,
                       uint32_t end, float* out);

// ---- Which codes, which way ---------------------------------------------------------------------

template <code_kind... kinds>
struct kind_list {
    static constexpr bool has(code_kind kind) { return ((kind == kinds) || ...); }

    /// Calls body(kind) with a kind of the list as a constant.
    template <class callable>
    static void call(code_kind kind, const callable& body) {
        ((kind == kinds ? body(std::integral_constant<code_kind, kinds>()) : void()), ...);
    }
};

#if HWY_TARGET == HWY_AVX3

/// The codes that codes-inl.hpp multiplies.
constexpr bool is_multiplied(code_kind kind) {
    return kind == code_kind::signed_bytes || kind == code_kind::nibbles ||
           kind == code_kind::e2m1_nibbles;
}

/// Whether the operand's codes are whole numbers, and multiplied as such.
inline bool multiplies_codes(const tile_layout& layout, const operand_layout& operand) {
    static const bool has_dot_products = __builtin_cpu_supports("avx512vnni") != 0;
    return has_dot_products && layout.arithmetic >= code_arithmetic::dot_products &&
           is_multiplied(operand.format->reading.codes);
}

/// Whether they are multiplied by AMX.
inline bool multiplies_tiles(const tile_layout& layout, const operand_layout& operand) {
    if (operand.plain() || layout.arithmetic < code_arithmetic::matrices) return false;
    const bool fp8 = !operand.tiled() && is_fp8(operand.format->reading.codes);
    return (fp8 ? amx_takes_fp8(operand.dim) : amx_takes(operand)) && amx_usable();
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
