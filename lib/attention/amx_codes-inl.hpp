// Decode attention over whole-numbered codes (format.hpp, code_reading), multiplied by AMX. The
// arithmetic is that of codes-inl.hpp, but for unsigned codes' zero: queries and weights become
// whole numbers in three digits of a signed byte, queries of 24 bits, weights of 22, whose unit is
// a power of two. Sums of products with codes, less the middle one, are exact.
//
// Here are the codes and the scores of keys, which lie as AMX wants them once codes are bytes: a
// word is 4 channels of a slot, 16 slots side by side. Values are in amx_values-inl.hpp. Include it
// per target.

// Per-target include guard.
#if defined(KVRT_ATTENTION_AMX_CODES_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVRT_ATTENTION_AMX_CODES_INL_HPP
#undef KVRT_ATTENTION_AMX_CODES_INL_HPP
#else
#define KVRT_ATTENTION_AMX_CODES_INL_HPP
#endif

#include <hwy/highway.h>

#include "attention/amx-inl.hpp"
#include "attention/unpack-inl.hpp"

#if HWY_TARGET == HWY_AVX3

HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR KVRT_AMX_ATTRIBUTES)
namespace kvrt {
namespace HWY_NAMESPACE {

#define KVRT_INLINE_LAMBDA __attribute__((always_inline))

/// Unsigned codes are multiplied less the middle one, and at the top of their bytes, where they are
/// signed: what a sum of products with bytes is to be multiplied with.
template <code_kind kind>
inline constexpr float byte_unit = is_unsigned(kind) ? 1.0f / (1 << (8 - bits_of(kind))) : 1.0f;

/// read_group() of operands-inl.hpp for 16 slots; where codes are unsigned, their middle one stands
/// for 0.
struct middle_group {
    __m512 step, least;
};
template <code_kind kind, class word_source>
HWY_INLINE middle_group read_middle_group(const coded_operand& operand, uint32_t g,
                                          const word_source& word) {
    const __m512 scale = _mm512_set1_ps(operand.scale);
    const auto from_half = [](__m512i words) KVRT_INLINE_LAMBDA {
        return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words));
    };
    const auto byte_of = [&](uint32_t index) KVRT_INLINE_LAMBDA {
        return _mm512_and_si512(_mm512_srl_epi32(word(index / 4), _mm_cvtsi32_si128(index % 4 * 8)),
                                _mm512_set1_epi32(0xff));
    };
    const auto scaled = [&](__m512 step, __mmask16 is_nan) KVRT_INLINE_LAMBDA {
        const __m512 nan = _mm512_set1_ps(std::numeric_limits<float>::quiet_NaN());
        return _mm512_mul_ps(_mm512_mask_mov_ps(step, is_nan, nan), scale);
    };
    const __m512 none = _mm512_setzero_ps();
    switch (operand.reading.groups) {
        case group_kind::none:
            return {scale, none};
        case group_kind::f16_step:
            return {
                _mm512_mul_ps(
                    from_half(_mm512_srl_epi32(word(g / 2), _mm_cvtsi32_si128(g % 2 * 16))), scale),
                none};
        case group_kind::f16_step_least: {
            const __m512i both = word(g);
            const __m512 step = _mm512_mul_ps(from_half(both), scale);
            const float middle = is_unsigned(kind) ? middle_code(kind) : 0.0f;
            return {step, _mm512_fmadd_ps(step, _mm512_set1_ps(middle),
                                          from_half(_mm512_srli_epi32(both, 16)))};
        }
        case group_kind::f32_step:
            return {_mm512_mul_ps(_mm512_castsi512_ps(word(0)), scale), none};
        case group_kind::e4m3_step: {
            // Never negative. As a half it is 2^-8 of its number.
            const __m512i magnitude = _mm512_and_si512(byte_of(g), _mm512_set1_epi32(0x7f));
            const __m512 step =
                _mm512_mul_ps(from_half(_mm512_slli_epi32(magnitude, 7)), _mm512_set1_ps(256.0f));
            return {scaled(step, _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f))),
                    none};
        }
        default: {
            const __m512i byte = byte_of(g);
            const __m512 step =
                _mm512_mask_mov_ps(_mm512_castsi512_ps(_mm512_slli_epi32(byte, 23)),
                                   _mm512_testn_epi32_mask(byte, byte), _mm512_set1_ps(0x1p-127f));
            return {scaled(step, _mm512_cmpeq_epi32_mask(byte, _mm512_set1_epi32(0xff))), none};
        }
    }
}

/// Parts of a group whose codes share bytes.
template <code_kind kind>
inline constexpr uint32_t parts_of_group = bits_of(kind) == 8   ? 1
                                           : bits_of(kind) == 4 ? 2
                                                                : 4;

/// (a ^ b) & c, and c ? a : b.
inline constexpr int flipped_and_masked = 0x28, chosen = 0xe4;

/// Part `part` of codes as signed bytes; of 3 bits, `third` has that bit at place `bit`. Shifts of
/// 16 bits bring other codes' bits along, which masks leave out.
template <code_kind kind, uint32_t part, uint32_t bit = 0>
HWY_INLINE __m512i signed_part(__m512i bytes, __m512i third) {
    constexpr uint32_t bits = bits_of(kind);
    const auto shifted = [](__m512i from, auto left) KVRT_INLINE_LAMBDA {
        constexpr int by = decltype(left)::value;
        if constexpr (by > 0) return _mm512_slli_epi16(from, by);
        if constexpr (by < 0) return _mm512_srli_epi16(from, -by);
        return from;
    };
    // Brings codes of `bits` bits to the top of the byte, or of the lowest ones.
    constexpr int top = is_unsigned(kind) ? 8 : bits;
    const auto low = [&] KVRT_INLINE_LAMBDA {
        constexpr int width = bits == 3 ? 2 : bits, place = width * part;
        constexpr int end = bits == 3 ? top - 1 : top;
        return shifted(bytes, std::integral_constant<int, end - width - place>());
    };
    if constexpr (bits == 8) {
        return bytes;
    } else {
        __m512i codes = low();
        if constexpr (bits == 3) {
            const __m512i upper =
                shifted(third, std::integral_constant<int, top - 1 - static_cast<int>(bit)>());
            codes = _mm512_ternarylogic_epi32(
                codes, upper, _mm512_set1_epi8(static_cast<char>(3 << (top - 3))), chosen);
        }
        const __m512i mask = _mm512_set1_epi8(
            static_cast<char>(((1 << bits) - 1) << (top - static_cast<int>(bits))));
        if constexpr (is_unsigned(kind)) {
            return _mm512_ternarylogic_epi32(codes, _mm512_set1_epi8(static_cast<char>(0x80)), mask,
                                             flipped_and_masked);
        } else {
            const __m128i table =
                _mm_load_si128(reinterpret_cast<const __m128i*>(code_table<kind>()));
            return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table),
                                       _mm512_and_si512(codes, mask));
        }
    }
}

/// Three rows of sums, of products with each digit, as one. Loaded one by one: an array of them GCC
/// 12 copies by halves, and waits for those to be stored.
HWY_INLINE __m512 joined_rows(const int32_t (*rows)[16]) {
    const auto row = [&](uint32_t part) KVRT_INLINE_LAMBDA {
        return _mm512_cvtepi32_ps(_mm512_load_si512(rows[part]));
    };
    const __m512 base = _mm512_set1_ps(256.0f);
    return _mm512_fmadd_ps(_mm512_fmadd_ps(row(2), base, row(1)), base, row(0));
}

// ---- Keys -------------------------------------------------------------------------------------

/// The most words of bytes that a row takes, its groups padded.
inline constexpr uint32_t most_padded_words = widest_row / 4;

/// A group of 16 keys as signed bytes, a word for each 4 of its channels.
template <code_kind kind>
HWY_INLINE void expand_group(const std::byte* from, const std::byte* next, uint32_t channels,
                             std::byte* out) {
    constexpr uint32_t parts = parts_of_group<kind>;
    const uint32_t words = channels / 4 / parts;
    const auto load = [&](uint32_t w) KVRT_INLINE_LAMBDA {
        __builtin_prefetch(next + w * amx_row_bytes, 0, 2);
        return _mm512_loadu_si512(from + w * amx_row_bytes);
    };
    const auto store = [&](uint32_t w, __m512i codes) KVRT_INLINE_LAMBDA {
        _mm512_store_si512(out + w * amx_row_bytes, codes);
    };
    if constexpr (bits_of(kind) == 3) {
        // A word of third bits belongs to two of the others.
        for (uint32_t w = 0; w < words / 2; ++w) {
            const __m512i third = load(words + w);
            each_of<2>([&](auto half) KVRT_INLINE_LAMBDA {
                const uint32_t at = w + half * words / 2;
                const __m512i low = load(at);
                each_of<parts>([&](auto part) KVRT_INLINE_LAMBDA {
                    store(part * words + at, signed_part<kind, part, 2 * part + half>(low, third));
                });
            });
        }
    } else {
        for (uint32_t w = 0; w < words; ++w) {
            const __m512i codes = load(w);
            each_of<parts>([&](auto part) KVRT_INLINE_LAMBDA {
                store(part * words + w, signed_part<kind, part>(codes, codes));
            });
        }
    }
}

/// Rows of a query that are one group stay in registers 1 to 4, 64 bytes of each in one: in what
/// has the shape of sums, and of rows of weights.
HWY_INLINE void keep_query_rows(const std::byte* rows, std::size_t stride, uint32_t bytes) {
    load_tile<1>(rows, stride);
    if (bytes > 1 * amx_row_bytes) load_tile<2>(rows + 1 * amx_row_bytes, stride);
    if (bytes > 2 * amx_row_bytes) load_tile<3>(rows + 2 * amx_row_bytes, stride);
    if (bytes > 3 * amx_row_bytes) load_tile<4>(rows + 3 * amx_row_bytes, stride);
}
/// The k-th of them times `rows`, into sums in register 0.
HWY_INLINE void multiply_kept_rows(uint32_t k, const std::byte* rows) {
    load_tile<right_of_values>(rows, amx_row_bytes);
    switch (k) {
        case 0:
            return multiply_bytes<0, 1, right_of_values>();
        case 1:
            return multiply_bytes<0, 2, right_of_values>();
        case 2:
            return multiply_bytes<0, 3, right_of_values>();
        default:
            return multiply_bytes<0, 4, right_of_values>();
    }
}

/// What becomes of sums of products with queries: scores of 16 slots.
template <uint32_t heads>
struct key_sums {
    const amx_query_shape& shape;
    const std::byte* queries;
    uint32_t query_bytes;
    bool has_least;
    float* scores;  ///< of the first head's 16 slots

    /// Sums of group g; those of the first begin the scores.
    HWY_INLINE void join(uint32_t g, const middle_group& group, float unit,
                         const int32_t (*sums)[16]) const {
        const __m512 step = _mm512_mul_ps(group.step, _mm512_set1_ps(unit));
        each_of<heads>([&](auto h) KVRT_INLINE_LAMBDA {
            const amx_query_numbers query(shape, queries + h * query_bytes);
            float* at = scores + h * run_slots;
            const __m512 sum =
                _mm512_mul_ps(joined_rows(sums + h * amx_parts), _mm512_set1_ps(query.scale[g]));
            const __m512 before = g == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(at);
            __m512 total = _mm512_fmadd_ps(sum, step, before);
            if (has_least) {
                total = _mm512_fmadd_ps(group.least, _mm512_set1_ps(query.sum[g]), total);
            }
            _mm512_storeu_ps(at, total);
        });
    }
};

/// Rows of `right` and sums of two tiles, groups as far apart in both. The four begin so far from
/// each other that what is loaded for a group is no multiple of 4 KiB from what was stored for it
/// and the one before: such loads would wait.
class amx_keys {
  public:
    explicit amx_keys(const amx_query_shape& shape)
        : stride_(HWY_MAX(shape.padded / 4 * amx_row_bytes, amx_rows * amx_row_bytes)) {}
    std::byte* rows(uint32_t tile, uint32_t g) { return of(tile % 2, g); }
    int32_t (*sums(uint32_t tile, uint32_t g))[16] {
        return reinterpret_cast<int32_t(*)[16]>(of(2 + tile % 2, g));
    }

  private:
    static constexpr uint32_t page = 4096;
    static constexpr uint32_t begin[4] = {0, page / 2, 1280, page / 2 + 1280};
    std::byte* of(uint32_t which, uint32_t g) {
        return memory_[which] + begin[which] + g * stride_;
    }
    uint32_t stride_;
    alignas(64) std::byte memory_[4][most_groups * amx_rows * amx_row_bytes + page];
};

/// scores[h][tile * 16 + slot] = query h . key, for `heads` queries from encode_amx_query. While
/// codes of a tile become bytes, products of the one before are on their way, and sums of the one
/// before that are joined.
template <code_kind kind, uint32_t heads>
HWY_NOINLINE void score_expanded(const std::byte* const* tiles, const std::byte* const* next_tiles,
                                 uint32_t tile_count, const coded_operand& keys,
                                 const std::byte* queries, uint32_t query_bytes, float* scores) {
    const amx_query_shape shape(keys, query_bytes);
    const uint32_t code_words = keys.code_bytes / record_word;
    amx_keys run(shape);
    const auto expand = [&](uint32_t t, uint32_t g) KVRT_INLINE_LAMBDA {
        const uint32_t at = g * keys.group * bits_of(kind) / 32 * amx_row_bytes;
        expand_group<kind>(tiles[t] + at, next_tiles[t] + at, keys.channels(g), run.rows(t, g));
    };
    const auto multiply = [&](uint32_t t, uint32_t g) KVRT_INLINE_LAMBDA {
        zero_tile<0>();
        for (uint32_t k = 0; k < shape.padded; k += shape.key_bytes) {
            const std::byte* rows = run.rows(t, g) + k / 4 * amx_row_bytes;
            if (keys.groups == 1) {
                multiply_kept_rows(k / amx_row_bytes, rows);
                continue;
            }
            load_tile<left_of_keys>(queries + g * shape.padded + k, shape.stride);
            load_tile<right_of_keys>(rows, amx_row_bytes);
            multiply_bytes<0, left_of_keys, right_of_keys>();
        }
    };
    const auto join = [&](uint32_t t, uint32_t g) KVRT_INLINE_LAMBDA {
        const std::byte* metadata = tiles[t] + code_words * amx_row_bytes;
        const auto group = read_middle_group<kind>(keys, g, [&](uint32_t m) KVRT_INLINE_LAMBDA {
            return _mm512_loadu_si512(metadata + m * amx_row_bytes);
        });
        const key_sums<heads> joined{shape, queries, query_bytes, keys.has_least(),
                                     scores + t * slot_group};
        joined.join(g, group, byte_unit<kind>, run.sums(t, g));
    };
    stay_awake();
    if (keys.groups == 1) keep_query_rows(queries, shape.stride, shape.padded);
    for (uint32_t t = 0; t < tile_count + 2; ++t) {
        for (uint32_t g = 0; g < keys.groups; ++g) {
            const bool multiplied = t >= 1 && t <= tile_count;
            if (t < tile_count) expand(t, g);
            if (multiplied) multiply(t - 1, g);
            if (t >= 2) join(t - 2, g);
            if (multiplied) store_tile<0>(run.sums(t - 1, g), amx_row_bytes);
        }
        if (t < tile_count) prefetch_lines(next_tiles[t], code_words, keys.layout.words);
    }
}

/// The same of bytes, which are multiplied where they lie: all tiles of a group at once.
template <uint32_t heads>
HWY_NOINLINE void score_bytes(const std::byte* const* tiles, const std::byte* const* next_tiles,
                              uint32_t tile_count, const coded_operand& keys,
                              const std::byte* queries, uint32_t query_bytes, float* scores) {
    constexpr code_kind kind = code_kind::signed_bytes;
    const amx_query_shape shape(keys, query_bytes);
    const uint32_t code_words = keys.code_bytes / record_word;
    alignas(64) int32_t sums[2][run_tiles_of_16][amx_rows][16];
    for (uint32_t t = 0; t < tile_count; ++t) {
        prefetch_lines(next_tiles[t], code_words, keys.layout.words);
    }
    const auto multiply = [&](uint32_t g) KVRT_INLINE_LAMBDA {
        const uint32_t first = g * shape.padded;
        each_of<run_tiles_of_16>([&](auto t) KVRT_INLINE_LAMBDA { zero_tile<t>(); });
        for (uint32_t k = first; k < first + shape.padded; k += shape.key_bytes) {
            load_tile<left_of_keys>(queries + k, shape.stride);
            each_of<run_tiles_of_16>([&](auto t) KVRT_INLINE_LAMBDA {
                if (t >= tile_count) return;
                prefetch_lines(next_tiles[t], k / 4, (k + shape.key_bytes) / 4);
                load_tile<right_of_keys>(tiles[t] + k / 4 * amx_row_bytes, amx_row_bytes);
                multiply_bytes<t, left_of_keys, right_of_keys>();
            });
        }
    };
    const auto store = [&](uint32_t g) KVRT_INLINE_LAMBDA {
        each_of<run_tiles_of_16>([&](auto t) KVRT_INLINE_LAMBDA {
            if (t < tile_count) store_tile<t>(sums[g % 2][t], amx_row_bytes);
        });
    };
    const auto join = [&](uint32_t g) KVRT_INLINE_LAMBDA {
        for (uint32_t t = 0; t < tile_count; ++t) {
            const std::byte* metadata = tiles[t] + code_words * amx_row_bytes;
            const auto group = read_middle_group<kind>(keys, g, [&](uint32_t m) KVRT_INLINE_LAMBDA {
                return _mm512_loadu_si512(metadata + m * amx_row_bytes);
            });
            const key_sums<heads> joined{shape, queries, query_bytes, keys.has_least(),
                                         scores + t * slot_group};
            joined.join(g, group, byte_unit<kind>, sums[g % 2][t]);
        }
    };
    // A group's sums are joined while the next group's products are on their way.
    for (uint32_t g = 0; g < keys.groups; ++g) {
        multiply(g);
        if (g != 0) join(g - 1);
        store(g);
    }
    join(keys.groups - 1);
}

template <code_kind kind, uint32_t heads>
HWY_NOINLINE void score_amx_codes(const std::byte* const* tiles, const std::byte* const* next_tiles,
                                  uint32_t tile_count, const coded_operand& keys,
                                  const std::byte* queries, uint32_t query_bytes, float* scores) {
    if constexpr (kind == code_kind::signed_bytes) {
        // Unless a product would take what lies behind them.
        const amx_query_shape shape(keys, query_bytes);
        if (keys.dim == shape.codes) {
            return score_bytes<heads>(tiles, next_tiles, tile_count, keys, queries, query_bytes,
                                      scores);
        }
    }
    score_expanded<kind, heads>(tiles, next_tiles, tile_count, keys, queries, query_bytes, scores);
}

#undef KVRT_INLINE_LAMBDA

}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_POP_ATTRIBUTES

#endif  // HWY_AVX3

#endif  // per-target include guard
