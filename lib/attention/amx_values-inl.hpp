// Weighted sums of values over whole-numbered codes (format.hpp, code_reading), multiplied by AMX:
// see amx_codes-inl.hpp. The rows of 4 slots are interleaved byte by byte: rows of one group 64
// bytes at a time, others 16. Include it per target.

// Per-target include guard.
#if defined(KVRT_ATTENTION_AMX_VALUES_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVRT_ATTENTION_AMX_VALUES_INL_HPP
#undef KVRT_ATTENTION_AMX_VALUES_INL_HPP
#else
#define KVRT_ATTENTION_AMX_VALUES_INL_HPP
#endif

#include <hwy/highway.h>

#include "attention/amx_weights-inl.hpp"

#if HWY_TARGET == HWY_AVX3

HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR KVRT_AMX_ATTRIBUTES)
namespace kvrt {
namespace HWY_NAMESPACE {

#define KVRT_INLINE_LAMBDA __attribute__((always_inline))

inline constexpr uint32_t packed_place(uint32_t quad) { return quad % 4 * 4 + quad / 4; }

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

/// Whether the kernels take an operand: third bits of values lie 16 by 16, short groups of values
/// are whole, and the last 16 bytes of a row lie in it.
inline bool amx_takes(const operand_layout& operand) {
    const format_description& format = *operand.format;
    const uint32_t bits = format.code_bits;
    if (format.code_bytes(operand.dim) < 16) return false;
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

/// A chunk of rows of a run, vectors [first_vector, end_vector) of its span -> a tile of `right`
/// for each part. Meanwhile the lines [first_line, end_line) of each 16 next rows are fetched.
template <code_kind kind, bool whole, bool upper_third>
HWY_INLINE void expand_chunk(const value_rows& rows, const value_rows& next_rows,
                             const value_chunk& chunk, bool short_groups, uint32_t first_vector,
                             uint32_t end_vector, uint32_t first_line, uint32_t end_line,
                             padded_tile* out) {
    constexpr uint32_t parts = parts_of_group<kind>;
    for (uint32_t v = first_vector; v < end_vector; ++v) {
        prefetch_lines(next_rows.tiles[v], first_line, end_line);
        each_of<4>([&](auto q) KVRT_INLINE_LAMBDA {
            const std::byte* row = rows.tiles[v] + 4 * q * std::size_t{rows.row_bytes};
            const __m512i low =
                interleaved_rows<whole>(row + chunk.byte, rows.row_bytes, chunk.bytes);
            __m512i third = low;
            if constexpr (bits_of(kind) == 3) {
                third = interleaved_rows<true>(row + chunk.third, rows.row_bytes, 16);
            }
            __m512i tile[parts];
            each_of<parts>([&](auto part) KVRT_INLINE_LAMBDA {
                constexpr uint32_t bit = 2 * part + (upper_third ? 1 : 0);
                tile[part] = signed_part<kind, part, bit>(low, third);
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
                _mm512_store_si512(out[i][packed_place(4 * (v % run_tiles_of_16) + q)], tile[i]);
            });
        });
    }
}

/// Of a span's values: four tiles of `right` of a run, and of the one before, and what they are
/// multiplied with.
struct amx_values {
    alignas(64) padded_tile right[2][4];
    alignas(64) int32_t sums[4][amx_rows][16];
    relative_weights relative;
    amx_weights left[most_groups];
    amx_channels channels[most_value_tiles];
    value_chunk chunks[most_value_tiles];  ///< of each tile that is its chunk's first
};

/// The chunks of the tiles that list_channels lists.
template <code_kind kind>
inline void list_chunks(const coded_operand& values, const amx_channels* channels, uint32_t count,
                        value_chunk* out) {
    constexpr uint32_t parts = parts_of_group<kind>;
    uint32_t byte = 0;
    for (uint32_t tile = 0; tile < count; tile += parts) {
        value_chunk chunk{byte, channels[tile].count, 0, false};
        if (has_short_groups<kind>(values)) chunk.bytes = tile + parts <= count ? 16 : 8;
        if (bits_of(kind) == 3) {
            const uint32_t eighth = values.dim / 8;
            chunk.third = values.dim / 4 + byte % eighth;
            chunk.upper_third = byte >= eighth;
        }
        byte += chunk.bytes;
        out[tile] = chunk;
    }
}

/// out[h][channel] += sum over slots [first, end) of weights[h][slot] * value. Four tiles at a time
/// are taken through all runs, their sums in tile registers; while products of a run are on their
/// way, the next is expanded. Tile registers load from memory alone, not from stores that are under
/// way.
template <code_kind kind, uint32_t heads>
HWY_NOINLINE void add_grouped_values(const value_rows& rows, const value_rows& next_rows,
                                     const coded_operand& values, const amx_groups& groups,
                                     const span_weights& weights, const span_part& part,
                                     float* out) {
    constexpr uint32_t parts = parts_of_group<kind>;
    amx_values span;
    const uint32_t count = list_channels<kind>(values, span.channels);
    list_chunks<kind>(values, span.channels, count, span.chunks);
    const bool has_least = values.has_least() || values.layout.tiled();
    const bool short_groups = has_short_groups<kind>(values);
    const bool relates = values.groups > 1;  // one group gains nothing by that
    const uint32_t lines = ceil_divide(slot_group * rows.row_bytes, 64u);
    const auto expand = [&](uint32_t tile, uint32_t run, padded_tile* right) KVRT_INLINE_LAMBDA {
        const value_chunk& chunk = span.chunks[tile];
        const auto run_chunk = [&](auto whole, auto upper_third) KVRT_INLINE_LAMBDA {
            expand_chunk<kind, decltype(whole)::value, decltype(upper_third)::value>(
                rows, next_rows, chunk, short_groups, part.first_of(run), part.end_of(run),
                tile * lines / count, HWY_MIN(tile + parts, count) * lines / count, right);
        };
        if (bits_of(kind) == 3 && chunk.upper_third) {
            run_chunk(std::true_type(), std::true_type());
        } else if (chunk.bytes == 16) {
            run_chunk(std::true_type(), std::false_type());
        } else {
            run_chunk(std::false_type(), std::false_type());
        }
    };
    const auto expand_four = [&](uint32_t at, uint32_t run, uint32_t buffer) KVRT_INLINE_LAMBDA {
        for (uint32_t i = 0; i < HWY_MIN(4u, count - at); i += parts) {
            expand(at + i, run, span.right[buffer] + i);
        }
    };
    const auto split_four = [&](uint32_t at) KVRT_INLINE_LAMBDA {
        const uint32_t last = span.channels[HWY_MIN(at + 4, count) - 1].group;
        const uint32_t split = at == 0 ? 0 : span.channels[at - 1].group + 1;
        for (uint32_t g = split; g <= last; ++g) {
            stay_awake();
            if (!relates || !split_relative_weights<kind, heads>(groups, has_least, span.relative,
                                                                 g, part, span.left[g])) {
                split_weights<kind, heads>(groups, has_least, weights, g, part, span.left[g]);
            }
        }
    };
    const auto multiply_four = [&](uint32_t at, uint32_t run, uint32_t buffer) KVRT_INLINE_LAMBDA {
        each_of<4>([&](auto i) KVRT_INLINE_LAMBDA {
            if (at + i >= count) return;
            const uint32_t g = span.channels[at + i].group;
            if (i == 0 || g != span.channels[at + i - 1].group) {
                load_tile<left_of_values>(span.left[g].rows[run], amx_row_bytes);
            }
            load_tile<right_of_values>(span.right[buffer][i], amx_row_bytes);
            multiply_bytes<i, left_of_values, right_of_values>();
        });
    };
    const auto join_four = [&](uint32_t at) KVRT_INLINE_LAMBDA {
        for (uint32_t i = 0; i < HWY_MIN(4u, count - at); ++i) {
            const amx_channels& some = span.channels[at + i];
            const amx_weights& left = span.left[some.group];
            const __mmask16 lanes = first_lanes(some.count);
            each_of<heads>([&](auto h) KVRT_INLINE_LAMBDA {
                const __m512 sum = joined_rows(span.sums[i] + h * amx_parts);
                __m512 more = _mm512_fmadd_ps(sum, _mm512_set1_ps(left.unit[h]),
                                              _mm512_set1_ps(left.offset[h]));
                if (groups.has_factors) {
                    more = _mm512_mul_ps(more,
                                         _mm512_maskz_loadu_ps(lanes, groups.factors + some.first));
                }
                add_masked(out + h * values.dim + some.first, lanes, more);
            });
        }
    };
    const uint32_t first_run = part.first_run(), end_run = part.end_run();
    uint32_t buffer = 0;
    for (uint32_t i = 0; i < HWY_MIN(4u, count); i += parts) {
        stay_awake();
        expand(i, first_run, span.right[buffer] + i);
    }
    if (relates) relate_weights<heads>(weights, part, span.relative);
    split_four(0);
    for (uint32_t at = 0; at < count; at += 4) {
        each_of<4>([&](auto i) KVRT_INLINE_LAMBDA { zero_tile<i>(); });
        for (uint32_t run = first_run; run < end_run; ++run, buffer ^= 1) {
            if (run + 1 < end_run) {
                expand_four(at, run + 1, buffer ^ 1);
            } else if (at + 4 < count) {
                expand_four(at + 4, first_run, buffer ^ 1);
            }
            multiply_four(at, run, buffer);
        }
        each_of<4>([&](auto i) KVRT_INLINE_LAMBDA {
            if (at + i < count) store_tile<i>(span.sums[i], amx_row_bytes);
        });
        if (at + 4 < count) split_four(at + 4);
        join_four(at);
    }
}

/// Whether rows are one group, taken 64 bytes of codes at a time.
template <code_kind kind>
bool has_wide_rows(const coded_operand& values) {
    return bits_of(kind) != 3 && values.groups == 1 && values.code_bytes % 64 == 0;
}

/// What a run of such rows is multiplied from and with. Interleaving 64 bytes of rows within lanes
/// leaves channels apart: of four tiles of a part, columns 4 L ... 4 L + 3 of tile i are channels
/// 16 L + 4 i ... 16 L + 4 i + 3.
struct wide_values {
    alignas(64) padded_tile right[widest_row / 16];
    alignas(64) int32_t sums[2][4][amx_rows][16];
    amx_weights left;
};

/// 64 bytes of 16 rows -> rows of four tiles for each part. As many are fetched from `next` on.
template <code_kind kind>
HWY_INLINE void expand_wide(const std::byte* row, std::size_t row_bytes, uint32_t v,
                            const std::byte* next, padded_tile* out) {
    each_of<4>([&](auto q) KVRT_INLINE_LAMBDA {
        // Few lines at a time: what else misses waits for them.
        prefetch_lines(next, 4 * q, 4 * q + 4);
        const auto load = [&](uint32_t s) KVRT_INLINE_LAMBDA {
            return _mm512_loadu_si512(row + (4 * q + s) * row_bytes);
        };
        const __m512i a = load(0), b = load(1), c = load(2), d = load(3);
        const __m512i low_ab = _mm512_unpacklo_epi8(a, b), high_ab = _mm512_unpackhi_epi8(a, b);
        const __m512i low_cd = _mm512_unpacklo_epi8(c, d), high_cd = _mm512_unpackhi_epi8(c, d);
        const __m512i mixed[4] = {
            _mm512_unpacklo_epi16(low_ab, low_cd), _mm512_unpackhi_epi16(low_ab, low_cd),
            _mm512_unpacklo_epi16(high_ab, high_cd), _mm512_unpackhi_epi16(high_ab, high_cd)};
        each_of<parts_of_group<kind>>([&](auto part) KVRT_INLINE_LAMBDA {
            each_of<4>([&](auto i) KVRT_INLINE_LAMBDA {
                _mm512_store_si512(out[4 * part + i][packed_place(4 * v + q)],
                                   signed_part<kind, part>(mixed[i], mixed[i]));
            });
        });
    });
}

/// Sums of four such tiles, times their unit, and times `factors` unless that is null, go to 64
/// channels.
HWY_INLINE void add_wide_sums(const __m512 (&sum)[4], __m512 unit, __m512 offset,
                              const float* factors, float* out) {
    const __m512 low = _mm512_shuffle_f32x4(sum[0], sum[1], 0x44);
    const __m512 high = _mm512_shuffle_f32x4(sum[0], sum[1], 0xee);
    const __m512 low_after = _mm512_shuffle_f32x4(sum[2], sum[3], 0x44);
    const __m512 high_after = _mm512_shuffle_f32x4(sum[2], sum[3], 0xee);
    const auto add = [&](uint32_t channel, __m512 more) KVRT_INLINE_LAMBDA {
        __m512 total = _mm512_loadu_ps(out + channel);
        if (factors != nullptr) {
            total = _mm512_fmadd_ps(_mm512_fmadd_ps(more, unit, offset),
                                    _mm512_loadu_ps(factors + channel), total);
        } else {
            total = _mm512_fmadd_ps(more, unit, _mm512_add_ps(total, offset));
        }
        _mm512_storeu_ps(out + channel, total);
    };
    add(0, _mm512_shuffle_f32x4(low, low_after, 0x88));
    add(16, _mm512_shuffle_f32x4(low, low_after, 0xdd));
    add(32, _mm512_shuffle_f32x4(high, high_after, 0x88));
    add(48, _mm512_shuffle_f32x4(high, high_after, 0xdd));
}

/// add_grouped_values for such rows, of one run.
template <code_kind kind, uint32_t heads>
HWY_NOINLINE void add_wide_values(const value_rows& rows, const value_rows& next_rows,
                                  const coded_operand& values, const amx_groups& groups,
                                  const span_weights& weights, uint32_t of_run,
                                  const span_part& vectors, float* out) {
    constexpr uint32_t parts = parts_of_group<kind>;
    const uint32_t first_vector = vectors.first, end_vector = vectors.end;
    const uint32_t blocks = values.code_bytes / 64, fours = blocks * parts;
    const uint32_t lines = ceil_divide(slot_group * rows.row_bytes, 64u);
    const bool has_least = values.has_least() || values.layout.tiled();
    wide_values run;
    // Weights take long to become known: rows are expanded meanwhile.
    const uint32_t steps = blocks * (end_vector - first_vector), middle = (steps - 1) / 2;
    uint32_t step = 0;
    for (uint32_t b = 0; b < blocks; ++b) {
        for (uint32_t v = first_vector; v < end_vector; ++v, ++step) {
            stay_awake();
            expand_wide<kind>(rows.tiles[v] + 64 * b, rows.row_bytes, v % run_tiles_of_16,
                              next_rows.tiles[v] + slot_group * 64 * b, run.right + 4 * parts * b);
            if (step == middle) {
                split_weights<kind, heads>(groups, has_least, weights, 0, vectors, run.left);
            }
        }
    }
    const auto multiply_four = [&](uint32_t four) KVRT_INLINE_LAMBDA {
        each_of<4>([&](auto i) KVRT_INLINE_LAMBDA {
            zero_tile<i>();
            load_tile<right_of_values>(run.right[4 * four + i], amx_row_bytes);
            multiply_bytes<i, left_of_values, right_of_values>();
        });
        each_of<4>([&](auto i)
                       KVRT_INLINE_LAMBDA { store_tile<i>(run.sums[four % 2][i], amx_row_bytes); });
    };
    const auto join_four = [&](uint32_t four) KVRT_INLINE_LAMBDA {
        const uint32_t part = four % parts, b = four / parts;
        const uint32_t channel = part * values.dim / parts + 64 * b;
        each_of<heads>([&](auto h) KVRT_INLINE_LAMBDA {
            __m512 sum[4];
            each_of<4>([&](auto i) KVRT_INLINE_LAMBDA {
                sum[i] = joined_rows(run.sums[four % 2][i] + h * amx_parts);
            });
            add_wide_sums(sum, _mm512_set1_ps(run.left.unit[h]), _mm512_set1_ps(run.left.offset[h]),
                          groups.has_factors ? groups.factors + channel : nullptr,
                          out + h * values.dim + channel);
        });
    };
    load_tile<left_of_values>(run.left.rows[of_run], amx_row_bytes);
    for (uint32_t four = 0; four < fours; ++four) {
        multiply_four(four);
        if (four != 0) join_four(four - 1);
    }
    join_four(fours - 1);
    for (uint32_t v = first_vector; v < end_vector; ++v) {
        prefetch_lines(next_rows.tiles[v], slot_group * blocks, lines);
    }
}

/// Not inlined: the caller's metadata and the tiles on one stack frame are slower, for where they
/// come to lie.
template <code_kind kind, uint32_t heads>
HWY_NOINLINE void add_amx_values(const value_rows& rows, const value_rows& next_rows,
                                 const coded_operand& values, const amx_groups& groups,
                                 const span_weights& weights, uint32_t first, uint32_t end,
                                 float* out) {
    const span_part part(first, end);
    if (!has_wide_rows<kind>(values)) {
        return add_grouped_values<kind, heads>(rows, next_rows, values, groups, weights, part, out);
    }
    for (uint32_t r = part.first_run(); r < part.end_run(); ++r) {
        const span_part run(HWY_MAX(first, r * run_slots), HWY_MIN(end, (r + 1) * run_slots));
        add_wide_values<kind, heads>(rows, next_rows, values, groups, weights, r, run, out);
    }
}

/// The same of records, whose metadata lie behind their codes. Slots are those of a span, whose
/// weights of a run begin run_stride behind those of the run before.
template <code_kind kind, uint32_t heads>
HWY_NOINLINE void add_amx_record_values(const std::byte* const* tiles,
                                        const std::byte* const* next_tiles,
                                        const coded_operand& values, const float* weights,
                                        uint32_t run_stride, uint32_t first, uint32_t end,
                                        float* out) {
    const value_rows rows{tiles, values.layout.row_bytes()};
    const value_rows next_rows{next_tiles, values.layout.row_bytes()};
    amx_groups groups;
    read_span_groups<kind>(values, rows, first, end, groups);
    add_amx_values<kind, heads>(rows, next_rows, values, groups, {weights, run_stride}, first, end,
                                out);
}

#undef KVRT_INLINE_LAMBDA

}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_POP_ATTRIBUTES

#endif  // HWY_AVX3

#endif  // per-target include guard
