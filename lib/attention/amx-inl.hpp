// The tile registers of Intel AMX, as attention uses them, and splitting a factor for them. All
// products have the same shape:
//
//   sums [12 rows][16 columns] += left [12][k] times right [k][16]
//
// A row of `left` is one of three parts of one of four query heads: of its queries over channels,
// or of its weights over slots. `right` is what the cache holds, 16 slots or 16 channels wide, with
// k packed into words of 4 bytes: [k / 4][16][4].
//
// The kernels are in amx_codes-inl.hpp, amx_values-inl.hpp and amx_fp8-inl.hpp. Include it per
// target.

// Per-target include guard.
#if defined(KVRT_ATTENTION_AMX_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVRT_ATTENTION_AMX_INL_HPP
#undef KVRT_ATTENTION_AMX_INL_HPP
#else
#define KVRT_ATTENTION_AMX_INL_HPP
#endif

#include <hwy/highway.h>

#include <bit>
#include <cmath>
#include <cstring>

#include "attention/codes-inl.hpp"

// AVX-512 as Highway's target has it, and more: callers ask amx_usable() first.
#if HWY_TARGET == HWY_AVX3

#define KVRT_AMX_ATTRIBUTES ",avx512vnni,avx512vbmi,avx512fp16,amx-tile,amx-int8,amx-bf16"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {

// Registers 0 to 3 hold sums.
inline constexpr int left_of_values = 4, right_of_values = 5, left_of_keys = 6, right_of_keys = 7;

/// Signed bytes, summed in 32 bits.
template <int sums, int left, int right>
HWY_INLINE void multiply_bytes() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(left), "i"(right));
}
/// A product for nothing: after half a microsecond without one the unit falls asleep, and takes a
/// quarter of one to wake (measured on Sapphire Rapids). Called where no sums are in register 0, by
/// whom tile registers are set up for, whatever it is compiled for.
HWY_INLINE void stay_awake() { multiply_bytes<0, left_of_values, right_of_values>(); }

}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR KVRT_AMX_ATTRIBUTES)
namespace kvrt {
namespace HWY_NAMESPACE {

inline constexpr uint32_t amx_parts = 3, amx_heads = 4;
inline constexpr uint32_t amx_rows = amx_parts * amx_heads;
inline constexpr uint32_t amx_row_bytes = 64;
inline constexpr uint32_t run_tiles_of_16 = run_slots / slot_group;

/// repeat() of codes-inl.hpp, compiled for more instructions than that is.
template <uint32_t... indices, class callable>
HWY_INLINE void each_of(std::integer_sequence<uint32_t, indices...>, const callable& body) {
    (body(std::integral_constant<uint32_t, indices>()), ...);
}
template <uint32_t count, class callable>
HWY_INLINE void each_of(const callable& body) {
    each_of(std::make_integer_sequence<uint32_t, count>(), body);
}

// The compiler's own intrinsics do not say that they read and write memory.
template <int tile>
HWY_INLINE void load_tile(const void* from, std::size_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(tile), "r"(from), "r"(stride) : "memory");
}
template <int tile>
HWY_INLINE void store_tile(void* to, std::size_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(tile), "r"(to), "r"(stride) : "memory");
}
template <int tile>
HWY_INLINE void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}
/// Gives this thread's tile registers their shapes: what another library left there is lost, as the
/// instruction set's calling convention has it. `key_bytes`: of a row of `left` that one product
/// with keys takes.
HWY_NOINLINE inline void amx_set_shapes(uint32_t key_bytes) {
    struct {
        uint8_t palette = 1, start_row = 0;
        uint8_t reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } shapes;
    for (int tile = 0; tile <= right_of_keys; ++tile) {
        shapes.row_bytes[tile] = amx_row_bytes;
        shapes.rows[tile] = amx_rows;
    }
    shapes.rows[right_of_values] = 16;
    shapes.row_bytes[left_of_keys] = static_cast<uint16_t>(key_bytes);
    shapes.rows[right_of_keys] = static_cast<uint8_t>(key_bytes / 4);
    asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory");
}
HWY_NOINLINE inline void amx_release() { asm volatile("tilerelease"); }

/// How the query heads of a KV head lie: for each head and part a row of [groups][padded] numbers,
/// zeros where a group is shorter, and a tail with a number of each group.
struct amx_query_shape {
    uint32_t key_bytes;  ///< of a row that one product takes
    uint32_t padded;     ///< bytes of a group in a row, a multiple
    uint32_t codes;      ///< bytes of a row without its tail
    uint32_t stride;     ///< of rows, a third of a query head

    amx_query_shape(const coded_operand& keys, uint32_t query_bytes)
        : stride(query_bytes / amx_parts) {
        const bool short_groups = keys.groups > 1 && keys.group < amx_row_bytes;
        key_bytes = short_groups ? keys.group : amx_row_bytes;
        padded = round_up(keys.group, key_bytes);
        codes = keys.groups * padded;
    }
    /// What a query head takes at most.
    static constexpr uint32_t bytes_of(uint32_t dim) {
        return amx_parts * (round_up(dim, amx_row_bytes) + 2 * amx_row_bytes);
    }

    float* tail(std::byte* head, uint32_t part) const {
        return reinterpret_cast<float*>(head + tail_at(part));
    }
    const float* tail(const std::byte* head, uint32_t part) const {
        return reinterpret_cast<const float*>(head + tail_at(part));
    }

  private:
    uint32_t tail_at(uint32_t part) const { return part * stride + round_up(codes, amx_row_bytes); }
};

/// Numbers that the tails of a query head's rows keep of its groups.
struct amx_query_numbers {
    const float* scale;  ///< [groups], of a unit
    const float* sum;    ///< [groups], of the numbers times the scale

    amx_query_numbers(const amx_query_shape& shape, const std::byte* head)
        : scale(shape.tail(head, 0)), sum(shape.tail(head, 1)) {}
};

HWY_INLINE void prefetch_lines(const std::byte* from, uint32_t first, uint32_t end) {
    for (uint32_t line = first; line < end; ++line) __builtin_prefetch(from + line * 64, 0, 2);
}

HWY_INLINE __mmask16 first_lanes(uint32_t count) {
    return static_cast<__mmask16>(count >= 16 ? 0xffffu : (1u << count) - 1);
}

/// Which slots of the v-th 16 lie in [first, end).
HWY_INLINE __mmask16 lanes_inside(uint32_t first, uint32_t end, uint32_t v) {
    return static_cast<__mmask16>(first_lanes(end - HWY_MIN(end, 16 * v)) &
                                  ~first_lanes(first - HWY_MIN(first, 16 * v)));
}

/// What the largest of some magnitudes makes of them: whole numbers up to largest_number.
struct number_scale {
    float factor = 0.0f;  ///< 0 also where there is no usable one
    float unit = 0.0f;    ///< of the whole numbers; NaN where a magnitude is not finite

    explicit number_scale(float largest) {
        if (!(largest <= std::numeric_limits<float>::max())) {
            unit = NAN;
        } else if (largest > 0.0f && std::isfinite(largest_number / largest)) {
            factor = largest_number / largest;
            unit = largest / largest_number;
        }
    }
};

/// The largest magnitude; bits of magnitudes order as they do, those that are not finite last.
HWY_INLINE __m512i larger_magnitude(__m512i largest, __m512 numbers) {
    const __m512i magnitude =
        _mm512_and_si512(_mm512_castps_si512(numbers), _mm512_set1_epi32(0x7fffffff));
    return _mm512_max_epi32(largest, magnitude);
}
HWY_INLINE float magnitude_of(__m512i largest) {
    return std::bit_cast<float>(_mm512_reduce_max_epi32(largest));
}

/// What is added to whole numbers before they are taken apart: with 128 more in each digit none
/// borrows from the next.
inline constexpr int32_t raised_digits = 0x00808080;

/// Raised whole numbers of 64 slots or channels -> a byte of each for its lowest, middle and
/// highest digit, of which the highest is raised by `top`. Words of 4 bytes come out as packing
/// leaves them: the (4 l + m)-th is that of the 4 from 4 (4 m + l) on.
template <uint32_t top = 0x80>
HWY_INLINE void pack_digits(const __m512i (&raised)[4], __m512i (&bytes)[amx_parts]) {
    __m512i words[4];  // in each 128 bits: of 4 numbers, those of each digit
    each_of<4>([&](auto m) __attribute__((always_inline)) {
        words[m] = _mm512_shuffle_epi8(
            raised[m], _mm512_broadcast_i32x4(
                           _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
    });
    const __m512i low = _mm512_unpacklo_epi32(words[0], words[1]);
    const __m512i low_after = _mm512_unpacklo_epi32(words[2], words[3]);
    const __m512i high = _mm512_unpackhi_epi32(words[0], words[1]);
    const __m512i high_after = _mm512_unpackhi_epi32(words[2], words[3]);
    const __m512i middle = _mm512_set1_epi8(static_cast<char>(0x80));
    bytes[0] = _mm512_xor_si512(_mm512_unpacklo_epi64(low, low_after), middle);
    bytes[1] = _mm512_xor_si512(_mm512_unpackhi_epi64(low, low_after), middle);
    bytes[2] = _mm512_sub_epi8(_mm512_unpacklo_epi64(high, high_after),
                               _mm512_set1_epi8(static_cast<char>(top)));
}

/// Splits group `g` of a query head into digits of whole numbers.
HWY_INLINE void split_query_group(const float* query, uint32_t count, const amx_query_shape& shape,
                                  uint32_t g, std::byte* head) {
    const auto load = [&](uint32_t i) __attribute__((always_inline)) {
        return i < count ? _mm512_maskz_loadu_ps(first_lanes(count - i), query + i)
                         : _mm512_setzero_ps();
    };
    __m512i largest = _mm512_setzero_si512();
    for (uint32_t i = 0; i < count; i += 16) largest = larger_magnitude(largest, load(i));
    const number_scale scale(magnitude_of(largest));
    const __m512 factor = _mm512_set1_ps(scale.factor);
    const __m512i in_order =
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i total = _mm512_setzero_si512();  // below 2^31: 256 channels of 23 bits
    std::byte* target = head + g * shape.padded;
    for (uint32_t at = 0; at < shape.padded; at += amx_row_bytes) {
        __m512i numbers[4], bytes[amx_parts];
        each_of<4>([&](auto v) __attribute__((always_inline)) {
            numbers[v] = _mm512_cvtps_epi32(_mm512_mul_ps(load(at + 16 * v), factor));
            total = _mm512_add_epi32(total, numbers[v]);
            numbers[v] = _mm512_add_epi32(numbers[v], _mm512_set1_epi32(raised_digits));
        });
        pack_digits(numbers, bytes);
        const __mmask64 inside = shape.padded - at >= amx_row_bytes
                                     ? ~__mmask64{0}
                                     : (__mmask64{1} << (shape.padded - at)) - 1;
        for (uint32_t part = 0; part < amx_parts; ++part) {
            _mm512_mask_storeu_epi8(target + part * shape.stride + at, inside,
                                    _mm512_permutexvar_epi32(in_order, bytes[part]));
        }
    }
    shape.tail(head, 0)[g] = scale.unit;
    shape.tail(head, 1)[g] = static_cast<float>(_mm512_reduce_add_epi32(total)) * scale.unit;
}

/// A query head as the kernels take it.
inline void encode_amx_query(const float* query, const coded_operand& keys, uint32_t query_bytes,
                             std::byte* head) {
    const amx_query_shape shape(keys, query_bytes);
    for (uint32_t g = 0; g < keys.groups; ++g) {
        split_query_group(query + g * keys.group, keys.channels(g), shape, g, head);
    }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_POP_ATTRIBUTES

#endif  // HWY_AVX3

#endif  // per-target include guard
