// Decode attention over whole-numbered codes (format.hpp, code_reading), multiplied by AMX. The
// arithmetic is that of codes-inl.hpp: queries and weights become whole numbers of 24 bits, in
// three digits of a signed byte; sums of products with codes, their zeros taken off, are exact.
//
// Keys lie as AMX wants them once codes are bytes: a word is 4 channels of a slot, 16 slots side by
// side. Of values the rows of 4 slots are interleaved byte by byte. Include it per target.

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

/// Signed bytes of codes in the lowest bits of bytes, of unsigned ones less their zeros.
template <code_kind kind>
HWY_INLINE __m512i signed_codes(__m512i codes, __m512i zero) {
    if constexpr (is_looked_up(kind)) {
        const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(code_table<kind>()));
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), codes);
    } else if constexpr (is_unsigned(kind)) {
        return _mm512_sub_epi8(codes, zero);
    } else {
        return codes;
    }
}

/// Parts of a group whose codes share bytes.
template <code_kind kind>
inline constexpr uint32_t parts_of_group = bits_of(kind) == 8   ? 1
                                           : bits_of(kind) == 4 ? 2
                                                                : 4;

/// Part `part` of codes of fewer than 8 bits, whose bytes are `low`; of 3 bits, `third` has that
/// bit at place `bit`.
template <code_kind kind, uint32_t part, uint32_t bit = 0>
HWY_INLINE __m512i part_of_codes(__m512i low, __m512i third) {
    if constexpr (bits_of(kind) == 8) {
        return low;
    } else if constexpr (bits_of(kind) == 4) {
        return low_nibbles(_mm512_srli_epi16(low, 4 * part));
    } else {
        const __m512i two = _mm512_set1_epi8(3);
        const __m512i codes = _mm512_srli_epi16(low, 2 * part);
        if constexpr (bits_of(kind) == 2) return _mm512_and_si512(codes, two);
        const __m512i upper =
            bit < 2 ? _mm512_slli_epi16(third, 2 - bit) : _mm512_srli_epi16(third, bit - 2);
        // (codes & 3) | (upper & 4)
        return _mm512_and_si512(_mm512_ternarylogic_epi32(codes, upper, two, 0xe4),
                                _mm512_set1_epi8(7));
    }
}

// ---- Keys -------------------------------------------------------------------------------------

/// The most words of bytes that a row takes, its groups padded.
inline constexpr uint32_t most_padded_words = widest_row / 4;

/// Of a run's keys: what the metadata of groups say, and rows of `right`.
struct amx_keys {
    alignas(64) float step[most_groups][run_slots];
    alignas(64) float least[most_groups][run_slots];
    alignas(64) std::byte rows[run_tiles_of_16][most_padded_words * amx_row_bytes];
};

/// A group of 16 keys as signed bytes, a word for each 4 of its channels.
template <code_kind kind>
HWY_INLINE void expand_group(const std::byte* from, const std::byte* next, uint32_t channels,
                             __m512i zero, std::byte* out) {
    constexpr uint32_t parts = parts_of_group<kind>;
    const uint32_t words = channels / 4 / parts;
    const auto load = [&](uint32_t w) KVRT_INLINE_LAMBDA {
        __builtin_prefetch(next + w * amx_row_bytes, 0, 2);
        return _mm512_loadu_si512(from + w * amx_row_bytes);
    };
    const auto store = [&](uint32_t w, __m512i codes) KVRT_INLINE_LAMBDA {
        _mm512_store_si512(out + w * amx_row_bytes, signed_codes<kind>(codes, zero));
    };
    if constexpr (bits_of(kind) == 3) {
        // A word of third bits belongs to two of the others.
        for (uint32_t w = 0; w < words / 2; ++w) {
            const __m512i third = load(words + w);
            each_of<2>([&](auto half) KVRT_INLINE_LAMBDA {
                const uint32_t at = w + half * words / 2;
                const __m512i low = load(at);
                each_of<parts>([&](auto part) KVRT_INLINE_LAMBDA {
                    store(part * words + at,
                          part_of_codes<kind, part, 2 * part + half>(low, third));
                });
            });
        }
    } else {
        for (uint32_t w = 0; w < words; ++w) {
            const __m512i codes = load(w);
            each_of<parts>([&](auto part) KVRT_INLINE_LAMBDA {
                store(part * words + w, part_of_codes<kind, part>(codes, codes));
            });
        }
    }
}

template <code_kind kind>
HWY_INLINE void read_keys(const std::byte* const* tiles, const std::byte* const* next_tiles,
                          uint32_t tile_count, const coded_operand& keys,
                          const amx_query_shape& shape, bool in_place, amx_keys& out) {
    const hn::CappedTag<float, slot_group> d;
    const uint32_t code_words = keys.code_bytes / record_word;
    for (uint32_t t = 0; t < tile_count; ++t) {
        stay_awake();
        const std::byte* metadata = tiles[t] + code_words * amx_row_bytes;
        uint32_t at = 0;
        for (uint32_t g = 0; g < keys.groups; ++g) {
            const auto group = read_group(d, keys, g, [&](uint32_t m) {
                return hn::Vec<hn::Rebind<uint32_t, decltype(d)>>{
                    _mm512_loadu_si512(metadata + m * amx_row_bytes)};
            });
            _mm512_store_ps(out.step[g] + 16 * t, group.step.raw);
            _mm512_store_ps(out.least[g] + 16 * t, group.least.raw);
            if (in_place) continue;
            const __m512i zero = _mm512_mullo_epi32(_mm512_cvtps_epi32(group.zero.raw),
                                                    _mm512_set1_epi32(0x01010101));
            expand_group<kind>(tiles[t] + at, next_tiles[t] + at, keys.channels(g), zero,
                               out.rows[t] + g * shape.padded / 4 * amx_row_bytes);
            at += keys.channels(g) * bits_of(kind) / 32 * amx_row_bytes;
        }
        prefetch_lines(next_tiles[t], code_words, keys.layout.words);
    }
}

/// scores[h][group * 16 + slot] = query h . key, for `heads` queries from encode_amx_query.
template <code_kind kind, uint32_t heads>
HWY_NOINLINE void score_amx_codes(const std::byte* const* tiles, const std::byte* const* next_tiles,
                                  uint32_t tile_count, const coded_operand& keys,
                                  const std::byte* queries, uint32_t query_bytes, float* scores) {
    const amx_query_shape shape(keys, query_bytes);
    alignas(64) int32_t sums[run_tiles_of_16][amx_rows][16];
    amx_keys run;
    // Bytes are multiplied where they lie, unless a product would take what lies behind them.
    const bool in_place = kind == code_kind::signed_bytes && keys.dim == shape.codes;
    read_keys<kind>(tiles, next_tiles, tile_count, keys, shape, in_place, run);
    const uint32_t lines = in_place ? keys.dim / 4 / (keys.groups * heads) : 0;
    uint32_t line = 0;
    for (uint32_t g = 0; g < keys.groups; ++g) {
        const uint32_t first = g * shape.padded;
        each_of<run_tiles_of_16>([&](auto t) KVRT_INLINE_LAMBDA { zero_tile<t>(); });
        for (uint32_t k = first; k < first + shape.padded; k += shape.key_bytes) {
            load_tile<left_of_keys>(queries + k, shape.stride);
            each_of<run_tiles_of_16>([&](auto t) KVRT_INLINE_LAMBDA {
                if (t >= tile_count) return;
                const std::byte* right = in_place ? tiles[t] : run.rows[t];
                load_tile<right_of_keys>(right + k / 4 * amx_row_bytes, amx_row_bytes);
                multiply_bytes<t, left_of_keys, right_of_keys>();
            });
        }
        each_of<run_tiles_of_16>([&](auto t) KVRT_INLINE_LAMBDA {
            if (t < tile_count) store_tile<t>(sums[t], amx_row_bytes);
        });
        each_of<heads>([&](auto h) KVRT_INLINE_LAMBDA {
            const amx_query_numbers query(shape, queries + h * query_bytes);
            const __m512 scale = _mm512_set1_ps(query.scale[g]);
            const __m512 sum_of_query = _mm512_set1_ps(query.sum[g]);
            for (uint32_t t = 0; t < tile_count; ++t) {
                __m512i digit[amx_parts];
                for (uint32_t part = 0; part < amx_parts; ++part) {
                    digit[part] = _mm512_load_si512(sums[t][h * amx_parts + part]);
                }
                prefetch_lines(next_tiles[t], line, line + lines);
                float* at = scores + h * run_slots + t * slot_group;
                const __m512 sum = _mm512_mul_ps(joined(digit), scale);
                const __m512 before = g == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(at);
                __m512 total = _mm512_fmadd_ps(sum, _mm512_load_ps(run.step[g] + 16 * t), before);
                if (keys.has_least()) {
                    total =
                        _mm512_fmadd_ps(_mm512_load_ps(run.least[g] + 16 * t), sum_of_query, total);
                }
                _mm512_storeu_ps(at, total);
            }
            line += lines;
        });
    }
}

// ---- Values -----------------------------------------------------------------------------------

/// Weights times the steps of a group, as whole numbers: rows of `left`, over the run's slots in
/// the order of pack_digits.
struct amx_weights {
    alignas(64) std::byte rows[amx_rows][run_slots];
};

inline constexpr uint32_t packed_place(uint32_t quad) { return quad % 4 * 4 + quad / 4; }

template <uint32_t heads>
HWY_INLINE void split_weights(const value_groups& groups, const weight_numbers<heads>& numbers,
                              const float* weights, uint32_t g, uint32_t first, uint32_t end,
                              amx_weights& out) {
    for (uint32_t h = 0; h < heads; ++h) {
        const __m512 factor = _mm512_set1_ps(numbers.factor[g * heads + h]);
        __m512i number[run_tiles_of_16], digits[amx_parts];
        each_of<run_tiles_of_16>([&](auto v) KVRT_INLINE_LAMBDA {
            const bool inside = v >= first / 16 && v < (end + 15) / 16;
            number[v] = inside ? _mm512_cvtps_epi32(
                                     _mm512_mul_ps(weighted_step(groups, weights, g, h, v), factor))
                               : _mm512_setzero_si512();
        });
        pack_digits(number, digits);
        for (uint32_t part = 0; part < amx_parts; ++part) {
            _mm512_store_si512(out.rows[h * amx_parts + part], digits[part]);
        }
    }
}

/// Sixteen or fewer channels of a group, side by side in a tile.
struct amx_channels {
    uint32_t first, count, group;
};
inline constexpr uint32_t most_value_tiles = widest_row / 16 + 4;

/// Whether two groups share the 16 bytes of codes that are taken at once.
template <code_kind kind>
bool has_short_groups(const coded_operand& values) {
    return values.group * bits_of(kind) == 64;
}

/// Whether the kernels take an operand: third bits of values lie 16 by 16, and short groups of
/// values are whole.
inline bool amx_takes(const operand_layout& operand) {
    const format_description& format = *operand.format;
    const uint32_t bits = format.code_bits;
    if (bits == 3) return operand.dim % 128 == 0;
    return operand.tiled() || format.group_of(operand.dim) * bits != 64 ||
           operand.dim % format.group_of(operand.dim) == 0;
}

/// Code bytes of 4 rows, up to 16 of each -> dword j holds byte j of the 4.
template <bool whole>
HWY_INLINE __m512i interleaved_rows(const std::byte* row, std::size_t row_bytes, uint32_t bytes) {
    const __mmask16 mask = first_lanes(bytes);
    const auto part = [&](uint32_t s) KVRT_INLINE_LAMBDA {
        const std::byte* at = row + s * row_bytes;
        if constexpr (whole) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
        return _mm_maskz_loadu_epi8(mask, at);
    };
    __m512i all = _mm512_castsi128_si512(part(0));
    all = _mm512_inserti32x4(all, part(1), 1);
    all = _mm512_inserti32x4(all, part(2), 2);
    all = _mm512_inserti32x4(all, part(3), 3);
    alignas(64) static constexpr uint8_t order[64] = {
        0,  16, 32, 48, 1,  17, 33, 49, 2,  18, 34, 50, 3,  19, 35, 51, 4,  20, 36, 52, 5,  21,
        37, 53, 6,  22, 38, 54, 7,  23, 39, 55, 8,  24, 40, 56, 9,  25, 41, 57, 10, 26, 42, 58,
        11, 27, 43, 59, 12, 28, 44, 60, 13, 29, 45, 61, 14, 30, 46, 62, 15, 31, 47, 63};
    return _mm512_permutexvar_epi8(_mm512_load_si512(order), all);
}

/// The channels of tiles, in the order in which chunks of 16 code bytes fill them; returns how many
/// there are.
template <code_kind kind>
inline uint32_t list_channels(const coded_operand& values, amx_channels* out) {
    constexpr uint32_t parts = parts_of_group<kind>;
    uint32_t count = 0;
    for (uint32_t g = 0; g < values.groups; ++g) {
        const uint32_t first = g * values.group, channels = values.channels(g);
        if (has_short_groups<kind>(values)) {
            for (uint32_t i = 0; i < channels; i += 16) out[count++] = {first + i, 16, g};
            continue;
        }
        const uint32_t bytes = channels / parts;
        for (uint32_t i = 0; i < bytes; i += 16) {
            for (uint32_t part = 0; part < parts; ++part) {
                out[count++] = {first + part * bytes + i, HWY_MIN(16u, bytes - i), g};
            }
        }
    }
    return count;
}

/// A tile of `right`, a line longer: what is 4 KiB behind another's lines delays loading those.
using padded_tile = std::byte[17][amx_row_bytes];

/// `bytes` code bytes of a row from `byte` on; third bits in the 16 bytes from `third` on, at place
/// 2 * part, or one more (`upper_third`).
struct value_chunk {
    uint32_t byte, bytes, third;
    bool upper_third;
};

/// A chunk of all rows of the run -> a tile of `right` for each part. Zeros are those of 4 slots,
/// of two groups where short ones share the chunk. Meanwhile the lines [first_line, end_line) of
/// each 16 next rows are fetched.
template <code_kind kind, bool whole, bool upper_third>
HWY_INLINE void expand_chunk(const value_rows& rows, const value_rows& next_rows,
                             const value_chunk& chunk, bool short_groups,
                             const uint32_t (*zeros)[run_quads], uint32_t first_vector,
                             uint32_t end_vector, uint32_t first_line, uint32_t end_line,
                             padded_tile* out) {
    constexpr uint32_t parts = parts_of_group<kind>;
    for (uint32_t v = first_vector; v < end_vector; ++v) {
        prefetch_lines(next_rows.tiles[v], first_line, end_line);
        each_of<4>([&](auto q) KVRT_INLINE_LAMBDA {
            const std::byte* row = rows.tiles[v] + 4 * q * std::size_t{rows.row_bytes};
            const __m512i low =
                interleaved_rows<whole>(row + chunk.byte, rows.row_bytes, chunk.bytes);
            __m512i third = low, zero = low;
            if constexpr (bits_of(kind) == 3) {
                third = interleaved_rows<true>(row + chunk.third, rows.row_bytes, 16);
            }
            if constexpr (is_unsigned(kind)) {
                zero =
                    _mm512_inserti64x4(_mm512_set1_epi32(static_cast<int>(zeros[0][4 * v + q])),
                                       _mm256_set1_epi32(static_cast<int>(zeros[1][4 * v + q])), 1);
            }
            __m512i tile[parts];
            each_of<parts>([&](auto part) KVRT_INLINE_LAMBDA {
                constexpr uint32_t bit = 2 * part + (upper_third ? 1 : 0);
                tile[part] = signed_codes<kind>(part_of_codes<kind, part, bit>(low, third), zero);
            });
            if constexpr (parts > 1) {
                if (short_groups) {
                    __m512i paired[parts];
                    each_of<parts / 2>([&](auto i) KVRT_INLINE_LAMBDA {
                        const __m512i a = tile[2 * i], b = tile[2 * i + 1];
                        paired[i] = _mm512_shuffle_i64x2(a, b, 0x44);
                        paired[parts / 2 + i] = _mm512_shuffle_i64x2(a, b, 0xee);
                    });
                    each_of<parts>([&](auto i) KVRT_INLINE_LAMBDA { tile[i] = paired[i]; });
                }
            }
            each_of<parts>([&](auto i) KVRT_INLINE_LAMBDA {
                _mm512_store_si512(out[i][packed_place(4 * v + q)], tile[i]);
            });
        });
    }
}

/// Of a run's values: tiles of `right`, and what they are multiplied with.
template <uint32_t heads>
struct amx_values {
    alignas(64) padded_tile right[most_value_tiles];
    alignas(64) int32_t sums[2][4][amx_rows][16];
    amx_weights left[most_groups];
    amx_channels channels[most_value_tiles];
};

/// out[h][channel] += sum over slots [first, end) of weights[h][slot] * value. Tiles are taken four
/// at a time: while products of the last four are on their way, the next are expanded. Tile
/// registers load from memory alone, not from stores that are under way.
template <code_kind kind, uint32_t heads>
HWY_NOINLINE void add_amx_values(const value_rows& rows, const value_rows& next_rows,
                                 const coded_operand& values, const value_groups& groups,
                                 const float* weights, uint32_t first, uint32_t end, float* out) {
    const uint32_t first_vector = first / 16, end_vector = (end + 15) / 16;
    amx_values<heads> run;
    const uint32_t count = list_channels<kind>(values, run.channels);
    const weight_numbers<heads> numbers(groups, values, weights, first, end);
    for (uint32_t g = 0; g < values.groups; ++g) {
        stay_awake();
        split_weights<heads>(groups, numbers, weights, g, first, end, run.left[g]);
    }
    const bool short_groups = has_short_groups<kind>(values);
    constexpr uint32_t parts = parts_of_group<kind>;
    const uint32_t lines = ceil_divide(slot_group * rows.row_bytes, 64u);
    uint32_t byte = 0;
    const auto expand = [&](uint32_t tile) KVRT_INLINE_LAMBDA {
        stay_awake();
        const amx_channels& some = run.channels[tile];
        value_chunk chunk{byte, some.count, 0, false};
        if (short_groups) chunk.bytes = tile + parts <= count ? 16 : 8;
        if (bits_of(kind) == 3) {
            const uint32_t eighth = values.dim / 8;
            chunk.third = values.dim / 4 + byte % eighth;
            chunk.upper_third = byte >= eighth;
        }
        byte += chunk.bytes;
        alignas(64) uint32_t zeros[2][run_quads];
        for (uint32_t side = 0; is_unsigned(kind) && side < 2; ++side) {
            const uint32_t g = HWY_MIN(values.groups - 1, some.group + (short_groups ? side : 0));
            for (uint32_t v = first_vector; v < end_vector; ++v) {
                const __m512i whole = _mm512_cvtps_epi32(_mm512_load_ps(groups.zero[g] + 16 * v));
                _mm_store_si128(reinterpret_cast<__m128i*>(zeros[side] + 4 * v),
                                _mm512_cvtepi32_epi8(whole));
            }
        }
        const auto run_chunk = [&](auto whole, auto upper_third) KVRT_INLINE_LAMBDA {
            expand_chunk<kind, decltype(whole)::value, decltype(upper_third)::value>(
                rows, next_rows, chunk, short_groups, zeros, first_vector, end_vector,
                tile * lines / count, HWY_MIN(tile + parts, count) * lines / count,
                run.right + tile);
        };
        if (bits_of(kind) == 3 && chunk.upper_third) {
            run_chunk(std::true_type(), std::true_type());
        } else if (chunk.bytes == 16) {
            run_chunk(std::true_type(), std::false_type());
        } else {
            run_chunk(std::false_type(), std::false_type());
        }
    };
    const auto expand_four = [&](uint32_t at) KVRT_INLINE_LAMBDA {
        for (uint32_t tile = at; tile < HWY_MIN(at + 4, count); tile += parts) expand(tile);
    };
    const auto multiply_four = [&](uint32_t at) KVRT_INLINE_LAMBDA {
        auto& sums = run.sums[at / 4 % 2];
        each_of<4>([&](auto i) KVRT_INLINE_LAMBDA {
            if (at + i >= count) return;
            zero_tile<i>();
            load_tile<left_of_values>(run.left[run.channels[at + i].group].rows, amx_row_bytes);
            load_tile<right_of_values>(run.right[at + i], amx_row_bytes);
            multiply_bytes<i, left_of_values, right_of_values>();
        });
        each_of<4>([&](auto i) KVRT_INLINE_LAMBDA {
            if (at + i < count) store_tile<i>(sums[i], amx_row_bytes);
        });
    };
    const auto join_four = [&](uint32_t at) KVRT_INLINE_LAMBDA {
        for (uint32_t i = 0; i < HWY_MIN(4u, count - at); ++i) {
            const amx_channels& some = run.channels[at + i];
            const float* unit = numbers.unit + some.group * heads;
            const float* offset = numbers.offset + some.group * heads;
            const __mmask16 lanes = first_lanes(some.count);
            each_of<heads>([&](auto h) KVRT_INLINE_LAMBDA {
                __m512i digit[amx_parts];
                for (uint32_t part = 0; part < amx_parts; ++part) {
                    digit[part] = _mm512_load_si512(run.sums[at / 4 % 2][i][h * amx_parts + part]);
                }
                add_masked(out + h * values.dim + some.first, lanes,
                           _mm512_fmadd_ps(joined(digit), _mm512_set1_ps(unit[h]),
                                           _mm512_set1_ps(offset[h])));
            });
        }
    };
    expand_four(0);
    for (uint32_t at = 0; at < count; at += 4) {
        if (at + 4 < count) expand_four(at + 4);
        multiply_four(at);
        if (at != 0) join_four(at - 4);
    }
    join_four((count - 1) / 4 * 4);
}

/// The same of records, whose metadata lie behind their codes.
template <code_kind kind, uint32_t heads>
HWY_NOINLINE void add_amx_record_values(const std::byte* const* tiles,
                                        const std::byte* const* next_tiles,
                                        const coded_operand& values, const float* weights,
                                        uint32_t first, uint32_t end, float* out) {
    const value_rows rows{tiles, values.layout.row_bytes()};
    const value_rows next_rows{next_tiles, values.layout.row_bytes()};
    value_groups groups;
    read_value_groups(values, rows, first, end, groups);
    add_amx_values<kind, heads>(rows, next_rows, values, groups, weights, first, end, out);
}

/// The same of tiles (tiles-inl.hpp), whose metadata are folded into queries and weights.
struct amx_products {
    template <code_kind kind, uint32_t heads>
    static void score(const std::byte* const* tiles, const std::byte* const* next_tiles,
                      uint32_t tile_count, const coded_operand& keys, const float* queries,
                      uint32_t stride, float* scores) {
        constexpr uint32_t query_bytes = amx_query_shape::bytes_of(widest_row);
        alignas(64) std::byte coded[amx_heads][query_bytes];
        for (uint32_t h = 0; h < heads; ++h) {
            encode_amx_query(queries + h * stride, keys, query_bytes, coded[h]);
        }
        score_amx_codes<kind, heads>(tiles, next_tiles, tile_count, keys, coded[0], query_bytes,
                                     scores);
    }
    template <code_kind kind, uint32_t heads>
    static void add_values(const value_rows& rows, const value_rows& next_rows,
                           const coded_operand& values, const value_groups& groups,
                           const float* weights, uint32_t first, uint32_t end, float* out) {
        add_amx_values<kind, heads>(rows, next_rows, values, groups, weights, first, end, out);
    }
};

#undef KVRT_INLINE_LAMBDA

}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_POP_ATTRIBUTES

#endif  // HWY_AVX3

#endif  // per-target include guard
