// Decode attention over records whose codes stand for numbers (format.hpp, code_reading), read as
// floats in registers. It needs no more than Highway has everywhere; codes-inl.hpp multiplies
// integer codes faster where the processor has the instructions. Include it per target.
//
// With x = step (c - zero) + least, sums over codes are taken first:
//
//   q . k  = sum over groups: step (sum q (c - zero)) + least (sum q)
//   w . v  = sum over slots (w step) (c - zero) + sum over slots w least
//
// Where a group stores its least number, zero is the code nearest to 0 and least what is left, so
// that terms much larger than their sum do not cancel.

// Per-target include guard.
#if defined(KVRT_ATTENTION_RECORDS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVRT_ATTENTION_RECORDS_INL_HPP
#undef KVRT_ATTENTION_RECORDS_INL_HPP
#else
#define KVRT_ATTENTION_RECORDS_INL_HPP
#endif

#include <hwy/highway.h>

#include <cstring>
#include <limits>
#include <type_traits>

#include "attention/kernels.hpp"
#include "attention/operands-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {

// ---- Queries ----------------------------------------------------------------------------------

/// A query head for score_records: its channels, those of fp8 in the order 0 2 1 3 of each four,
/// and the sum of each group.
struct float_query {
    const float* channels;
    const float* sums;  ///< [groups]

    float_query(const std::byte* at, uint32_t dim)
        : channels(reinterpret_cast<const float*>(at)), sums(channels + dim) {}
};

inline void prepare_query(const float* query, const coded_operand& keys, std::byte* out) {
    float* channels = reinterpret_cast<float*>(out);
    float* sums = channels + keys.dim;
    for (uint32_t i = 0; i < keys.dim; i += 4) {
        const bool swapped = is_fp8(keys.reading.codes);
        channels[i] = query[i];
        channels[i + 1] = query[swapped ? i + 2 : i + 1];
        channels[i + 2] = query[swapped ? i + 1 : i + 2];
        channels[i + 3] = query[i + 3];
    }
    for (uint32_t g = 0; g < keys.groups; ++g) {
        double sum = 0.0;
        for (uint32_t i = 0; i < keys.channels(g); ++i) sum += double{query[g * keys.group + i]};
        sums[g] = static_cast<float>(sum);
    }
}

#if HWY_TARGET != HWY_SCALAR

// ---- Keys -------------------------------------------------------------------------------------

alignas(16) inline constexpr uint8_t doubled_e2m1_table[16] = {
    0, 1, 2, 3, 4, 6, 8, 12, 0, 0xff, 0xfe, 0xfd, 0xfc, 0xfa, 0xf8, 0xf4};

/// Twice the numbers of e2m1 codes in the low nibbles of bytes.
template <class tag8>
HWY_INLINE hn::Vec<tag8> doubled_e2m1(tag8 d8, hn::Vec<tag8> codes) {
    return hn::TableLookupBytes(hn::LoadDup128(d8, doubled_e2m1_table), codes);
}

/// A whole number of at most 23 bits as the mantissa of 2^23 + number.
inline constexpr uint32_t mantissa_base = 0x4b000000u;

/// Channel `c` of 4 in each word, as a float: of signed bytes, or of the nibbles of `half`, from
/// which 2^23 + zero is taken.
template <code_kind kind, int c, int half, class tag>
HWY_INLINE hn::Vec<tag> channel_of(tag d, hn::Vec<hn::Rebind<uint32_t, tag>> word,
                                   hn::Vec<tag> zero) {
    const hn::Rebind<uint32_t, tag> du;
    const hn::Rebind<int32_t, tag> di;
    if constexpr (kind == code_kind::nibbles) {
        const auto code = hn::ShiftRight<8 * c + 4 * half>(word);
        const auto bits = hn::OrAnd(hn::Set(du, mantissa_base), code, hn::Set(du, 15u));
        return hn::Sub(hn::BitCast(d, bits), zero);
    } else {
        (void)zero;
        return hn::ConvertTo(d,
                             hn::ShiftRight<24>(hn::BitCast(di, hn::ShiftLeft<24 - 8 * c>(word))));
    }
}

/// sums[h] += query h . four channels of the slots, `from` their first.
template <code_kind kind, int half, uint32_t heads, class tag>
HWY_INLINE void add_four(tag d, hn::Vec<hn::Rebind<uint32_t, tag>> word, hn::Vec<tag> zero,
                         const std::byte* queries, uint32_t query_bytes, uint32_t from,
                         hn::Vec<tag> (&sums)[heads][2]) {
    const hn::Vec<tag> key[4] = {
        channel_of<kind, 0, half>(d, word, zero), channel_of<kind, 1, half>(d, word, zero),
        channel_of<kind, 2, half>(d, word, zero), channel_of<kind, 3, half>(d, word, zero)};
    HWY_UNROLL(8)
    for (uint32_t h = 0; h < heads; ++h) {
        const float* query = reinterpret_cast<const float*>(queries + h * query_bytes) + from;
        HWY_UNROLL(4)
        for (uint32_t c = 0; c < 4; ++c) {
            sums[h][c % 2] = hn::MulAdd(key[c], hn::Set(d, query[c]), sums[h][c % 2]);
        }
    }
}

/// scores[h][group * 16 + slot] = query h . key, of integer codes.
template <code_kind kind, uint32_t heads>
HWY_NOINLINE void score_records(const std::byte* const* tiles, const std::byte* const* next_tiles,
                                uint32_t tile_count, const coded_operand& keys,
                                const std::byte* queries, uint32_t query_bytes, float* scores) {
    const hn::CappedTag<float, slot_group> d;
    const hn::Rebind<uint32_t, decltype(d)> du;
    const hn::Repartition<uint8_t, decltype(d)> d8;
    constexpr uint32_t lanes = static_cast<uint32_t>(hn::MaxLanes(d));
    const uint32_t code_words = keys.code_bytes / record_word;
    for (uint32_t t = 0; t < tile_count; ++t) {
        for (uint32_t part = 0; part < slot_group; part += lanes) {
            const uint32_t* tile = reinterpret_cast<const uint32_t*>(tiles[t]) + part;
            const auto word = [&](uint32_t w) {
                if (part == 0) __builtin_prefetch(next_tiles[t] + w * 64, 0, 2);
                return hn::LoadU(du, tile + w * slot_group);
            };
            hn::Vec<decltype(d)> total[heads];
            for (uint32_t h = 0; h < heads; ++h) total[h] = hn::Zero(d);
            uint32_t w = 0;
            for (uint32_t g = 0; g < keys.groups; ++g) {
                const uint32_t first = g * keys.group, count = keys.channels(g);
                const auto group =
                    read_group(d, keys, g, [&](uint32_t m) { return word(code_words + m); });
                const auto zero = hn::Add(group.zero, hn::Set(d, 0x1p23f));
                hn::Vec<decltype(d)> sums[heads][2];
                for (uint32_t h = 0; h < heads; ++h) sums[h][0] = sums[h][1] = hn::Zero(d);
                if constexpr (kind == code_kind::signed_bytes) {
                    for (uint32_t i = 0; i < count; i += 4, ++w) {
                        add_four<kind, 0>(d, word(w), zero, queries, query_bytes, first + i, sums);
                    }
                } else {
                    for (uint32_t i = 0; i < count / 2; i += 4, ++w) {
                        auto low = word(w), high = low;
                        if constexpr (kind == code_kind::e2m1_nibbles) {
                            const auto nibble = hn::Set(du, 0x0f0f0f0fu);
                            const auto numbers = [&](hn::Vec<decltype(du)> codes) {
                                return hn::BitCast(
                                    du, doubled_e2m1(d8, hn::BitCast(d8, hn::And(codes, nibble))));
                            };
                            high = numbers(hn::ShiftRight<4>(low));
                            low = numbers(low);
                        }
                        add_four<kind, 0>(d, low, zero, queries, query_bytes, first + i, sums);
                        add_four<kind, 1>(d, high, zero, queries, query_bytes,
                                          first + count / 2 + i, sums);
                    }
                }
                for (uint32_t h = 0; h < heads; ++h) {
                    const auto sum = hn::Add(sums[h][0], sums[h][1]);
                    total[h] = hn::MulAdd(sum, group.step, total[h]);
                    if (keys.has_least()) {
                        const float_query query(queries + h * query_bytes, keys.dim);
                        total[h] = hn::MulAdd(group.least, hn::Set(d, query.sums[g]), total[h]);
                    }
                }
            }
            for (uint32_t h = 0; h < heads; ++h) {
                hn::StoreU(total[h], d, scores + h * run_slots + t * slot_group + part);
            }
        }
    }
}

/// Codes of fp8 in 16 bits become halves: as they are (e5m2), or 2^-8 of the number (e4m3).
/// `upper` has the code in the upper byte, whatever is in the lower one.
template <code_kind kind, class tag16>
HWY_INLINE hn::Vec<tag16> fp8_halves(tag16 d16, hn::Vec<tag16> upper) {
    if constexpr (kind == code_kind::e5m2_bytes) {
        return hn::And(upper, hn::Set(d16, uint16_t{0xff00}));
    } else {
        const hn::RebindToSigned<tag16> di16;
        const auto spread = hn::BitCast(d16, hn::ShiftRight<1>(hn::BitCast(di16, upper)));
        return hn::And(spread, hn::Set(d16, uint16_t{0xbf80}));
    }
}

/// What a product with the halves is to be multiplied with.
template <code_kind kind>
inline constexpr float fp8_unit = kind == code_kind::e4m3_bytes ? 256.0f : 1.0f;

/// The lower and upper half of the vector as floats.
template <class tag, class halves>
HWY_INLINE void promote_halves(tag d, halves bits, hn::Vec<tag>& lower, hn::Vec<tag>& upper) {
    const hn::Repartition<uint16_t, tag> d16;
    const hn::Rebind<uint16_t, tag> d16_half;
    const hn::Rebind<hwy::float16_t, tag> df16;
    lower = hn::PromoteTo(d, hn::BitCast(df16, hn::LowerHalf(d16_half, bits)));
    upper = hn::PromoteTo(d, hn::BitCast(df16, hn::UpperHalf(d16_half, bits)));
    (void)d16;
}

/// The same of fp8 codes. Vectors hold two channels of half of the slots; halves come together at
/// the end. A slot with a NaN among codes of e4m3, which halves do not have, is NaN.
template <code_kind kind, uint32_t heads>
HWY_NOINLINE void score_fp8(const std::byte* const* tiles, const std::byte* const* next_tiles,
                            uint32_t tile_count, const coded_operand& keys,
                            const std::byte* queries, uint32_t query_bytes, float* scores) {
    const hn::CappedTag<float, slot_group> d;
    const hn::Rebind<uint32_t, decltype(d)> du;
    const hn::Rebind<uint64_t, hn::Half<decltype(d)>> du64;
    const hn::Repartition<uint16_t, decltype(d)> d16;
    const hn::Repartition<uint8_t, decltype(d)> d8;
    constexpr uint32_t lanes = static_cast<uint32_t>(hn::MaxLanes(d));
    const uint32_t code_words = keys.code_bytes / record_word;
    const auto pair = [&](const float* at) {
        uint64_t both;
        std::memcpy(&both, at, sizeof both);
        return hn::BitCast(d, hn::Set(du64, both));
    };
    for (uint32_t t = 0; t < tile_count; ++t) {
        for (uint32_t part = 0; part < slot_group; part += lanes) {
            const uint32_t* tile = reinterpret_cast<const uint32_t*>(tiles[t]) + part;
            const auto word = [&](uint32_t w) {
                if (part == 0) __builtin_prefetch(next_tiles[t] + w * 64, 0, 2);
                return hn::LoadU(du, tile + w * slot_group);
            };
            hn::Vec<decltype(d)> sums[heads][2];
            for (uint32_t h = 0; h < heads; ++h) sums[h][0] = sums[h][1] = hn::Zero(d);
            auto peak = hn::Zero(d8);
            for (uint32_t w = 0; w < code_words; ++w) {
                const auto codes = word(w);
                const auto bits = hn::BitCast(d16, codes);
                hn::Vec<decltype(d)> even[2], odd[2];
                promote_halves(d, fp8_halves<kind>(d16, hn::ShiftLeft<8>(bits)), even[0], even[1]);
                promote_halves(d, fp8_halves<kind>(d16, bits), odd[0], odd[1]);
                if constexpr (kind == code_kind::e4m3_bytes) {
                    const auto bytes = hn::BitCast(d8, codes);
                    peak = hn::Max(peak, hn::Or(bytes, hn::Set(d8, uint8_t{0x80})));
                }
                HWY_UNROLL(4)
                for (uint32_t h = 0; h < heads; ++h) {
                    const float* query =
                        reinterpret_cast<const float*>(queries + h * query_bytes) + 4 * w;
                    const auto query_even = pair(query), query_odd = pair(query + 2);
                    HWY_UNROLL(2)
                    for (uint32_t side = 0; side < 2; ++side) {
                        sums[h][side] = hn::MulAdd(even[side], query_even, sums[h][side]);
                        sums[h][side] = hn::MulAdd(odd[side], query_odd, sums[h][side]);
                    }
                }
            }
            auto step =
                read_group(d, keys, 0, [&](uint32_t m) { return word(code_words + m); }).step;
            step = hn::Mul(step, hn::Set(d, fp8_unit<kind>));
            if constexpr (kind == code_kind::e4m3_bytes) {
                const auto nan_bytes =
                    hn::VecFromMask(d8, hn::Eq(peak, hn::Set(d8, uint8_t{0xff})));
                const auto is_nan = hn::Ne(hn::BitCast(du, nan_bytes), hn::Zero(du));
                step = hn::IfThenElse(hn::RebindMask(d, is_nan),
                                      hn::Set(d, std::numeric_limits<float>::quiet_NaN()), step);
            }
            for (uint32_t h = 0; h < heads; ++h) {
                const auto sum = hn::Add(hn::ConcatEven(d, sums[h][1], sums[h][0]),
                                         hn::ConcatOdd(d, sums[h][1], sums[h][0]));
                hn::StoreU(hn::Mul(sum, step), d, scores + h * run_slots + t * slot_group + part);
            }
        }
    }
}

// ---- Values -----------------------------------------------------------------------------------

/// Where the rows of a run's slots lie.
struct value_rows {
    const std::byte* const* tiles;
    uint32_t row_bytes;

    const std::byte* of(uint32_t slot) const {
        return tiles[slot / slot_group] + slot % slot_group * row_bytes;
    }
};

/// What the metadata of a run's slots say, [group][slot]; 0 for slots outside [first, end).
struct value_groups {
    alignas(64) float step[most_groups][run_slots];
    alignas(64) float least[most_groups][run_slots];
    alignas(64) float zero[most_groups][run_slots];
};

inline void read_value_groups(const coded_operand& values, const value_rows& rows, uint32_t first,
                              uint32_t end, value_groups& out) {
    const hn::CappedTag<float, slot_group> d;
    const hn::Rebind<uint32_t, decltype(d)> du;
    const hn::Rebind<int32_t, decltype(d)> di;
    constexpr uint32_t lanes = static_cast<uint32_t>(hn::MaxLanes(d));
    const uint32_t meta_words = (rows.row_bytes - values.code_bytes) / record_word;
    alignas(64) int32_t words[most_groups][slot_group];
    const auto offsets =
        hn::Mul(hn::Iota(di, 0), hn::Set(di, static_cast<int32_t>(rows.row_bytes)));
    for (uint32_t slot = first / lanes * lanes; slot < end; slot += lanes) {
        const auto index = hn::Iota(di, static_cast<int32_t>(slot));
        const auto inside =
            hn::RebindMask(d, hn::And(hn::Gt(index, hn::Set(di, static_cast<int32_t>(first) - 1)),
                                      hn::Lt(index, hn::Set(di, static_cast<int32_t>(end)))));
        const std::byte* meta = rows.of(slot) + values.code_bytes;
        for (uint32_t m = 0; m < meta_words; ++m) {
            const int32_t* column = reinterpret_cast<const int32_t*>(meta + m * record_word);
            hn::Store(hn::GatherOffset(di, column, offsets), di, words[m]);
        }
        const auto word = [&](uint32_t m) { return hn::BitCast(du, hn::Load(di, words[m])); };
        for (uint32_t g = 0; g < values.groups; ++g) {
            const auto group = read_group(d, values, g, word);
            hn::StoreU(hn::IfThenElseZero(inside, group.step), d, out.step[g] + slot);
            hn::StoreU(hn::IfThenElseZero(inside, group.least), d, out.least[g] + slot);
            hn::StoreU(hn::IfThenElseZero(inside, group.zero), d, out.zero[g] + slot);
        }
    }
}

/// Weights times steps, and what leasts add to each channel of a group.
template <uint32_t heads>
struct scaled_weights {
    alignas(64) float weight[most_groups][heads][run_slots];
    float offset[most_groups][heads];
};

template <uint32_t heads>
void scale_weights(const coded_operand& values, const value_groups& groups, float unit,
                   const float* weights, uint32_t first, uint32_t end, scaled_weights<heads>& out) {
    const hn::CappedTag<float, slot_group> d;
    constexpr uint32_t lanes = static_cast<uint32_t>(hn::MaxLanes(d));
    for (uint32_t g = 0; g < values.groups; ++g) {
        for (uint32_t h = 0; h < heads; ++h) {
            auto offset = hn::Zero(d);
            for (uint32_t slot = first / lanes * lanes; slot < end; slot += lanes) {
                const auto weight = hn::LoadU(d, weights + h * run_slots + slot);
                const auto step = hn::Mul(hn::Load(d, groups.step[g] + slot), hn::Set(d, unit));
                hn::Store(hn::Mul(weight, step), d, out.weight[g][h] + slot);
                offset = hn::MulAdd(weight, hn::Load(d, groups.least[g] + slot), offset);
            }
            const bool leasts = values.has_least() || values.layout.tiled();
            out.offset[g][h] = leasts ? hn::GetLane(hn::SumOfLanes(d, offset)) : 0.0f;
        }
    }
}

/// Two vectors of channels from the bytes at `codes`: neighbours of byte codes, the two halves of
/// nibbles. `zero` is taken off nibbles. `peak` collects codes of e4m3.
template <code_kind kind, class tag, class tag8>
HWY_INLINE void load_codes(tag d, tag8 d8, const std::byte* codes, hn::Vec<tag> zero,
                           hn::Vec<tag> (&out)[2], hn::Vec<tag8>& peak) {
    const hn::Rebind<int32_t, tag> di;
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(codes);
    if constexpr (is_fp8(kind)) {
        const hn::Repartition<uint16_t, tag> d16;
        const auto both = hn::LoadU(d8, bytes);
        promote_halves(d, fp8_halves<kind>(d16, hn::ShiftLeft<8>(hn::PromoteTo(d16, both))), out[0],
                       out[1]);
        if constexpr (kind == code_kind::e4m3_bytes) {
            peak = hn::Max(peak, hn::Or(both, hn::Set(d8, uint8_t{0x80})));
        }
    } else if constexpr (kind == code_kind::signed_bytes) {
        const hn::Rebind<int8_t, tag> di8;
        for (uint32_t v = 0; v < 2; ++v) {
            const int8_t* at = reinterpret_cast<const int8_t*>(bytes) + v * hn::Lanes(d);
            out[v] = hn::ConvertTo(d, hn::PromoteTo(di, hn::LoadU(di8, at)));
        }
    } else if constexpr (kind == code_kind::nibbles) {
        const hn::Rebind<uint32_t, tag> du;
        const auto both = hn::PromoteTo(du, hn::LoadU(d8, bytes));
        const auto base = hn::Set(du, mantissa_base);
        out[0] = hn::Sub(hn::BitCast(d, hn::OrAnd(base, both, hn::Set(du, 15u))), zero);
        out[1] = hn::Sub(hn::BitCast(d, hn::Or(base, hn::ShiftRight<4>(both))), zero);
    } else {
        const hn::FixedTag<uint8_t, 16> full;
        const hn::Rebind<int8_t, tag> di8;
        const auto table = hn::Load(full, doubled_e2m1_table);
        const auto both = hn::LoadU(d8, bytes);
        const auto numbers = [&](hn::Vec<tag8> nibbles) {
            const auto number = hn::BitCast(di8, hn::TableLookupBytes(table, nibbles));
            return hn::ConvertTo(d, hn::PromoteTo(di, number));
        };
        out[0] = numbers(hn::And(both, hn::Set(d8, uint8_t{15})));
        out[1] = numbers(hn::ShiftRight<4>(both));
    }
}

/// The run's part of two vectors of channels: at `target` and `target + apart` of each head.
template <code_kind kind, uint32_t heads, class tag>
HWY_INLINE void add_channels(tag d, const value_rows& rows, const value_rows& next_rows,
                             uint32_t byte, const float* zeros, const float (*weights)[run_slots],
                             const float* offset, uint32_t first, uint32_t end, float* target,
                             uint32_t apart, uint32_t dim) {
    using tag8 =
        std::conditional_t<is_fp8(kind), hn::Rebind<uint8_t, hn::Repartition<uint16_t, tag>>,
                           hn::Rebind<uint8_t, tag>>;
    const tag8 d8;
    hn::Vec<tag> sums[heads][2];
    for (uint32_t h = 0; h < heads; ++h) sums[h][0] = sums[h][1] = hn::Set(d, offset[h]);
    auto peak = hn::Zero(d8);
    const bool new_line = byte % 64 == 0;
    for (uint32_t slot = first; slot < end; ++slot) {
        hn::Vec<tag> value[2];
        const auto zero = hn::Set(d, kind == code_kind::nibbles ? zeros[slot] + 0x1p23f : 0.0f);
        load_codes<kind>(d, d8, rows.of(slot) + byte, zero, value, peak);
        if (new_line) __builtin_prefetch(next_rows.of(slot) + byte, 0, 2);
        HWY_UNROLL(4)
        for (uint32_t h = 0; h < heads; ++h) {
            const auto weight = hn::Set(d, weights[h][slot]);
            sums[h][0] = hn::MulAdd(value[0], weight, sums[h][0]);
            sums[h][1] = hn::MulAdd(value[1], weight, sums[h][1]);
        }
    }
    for (uint32_t h = 0; h < heads; ++h) {
        float* at = target + h * dim;
        hn::StoreU(hn::Add(hn::LoadU(d, at), sums[h][0]), d, at);
        hn::StoreU(hn::Add(hn::LoadU(d, at + apart), sums[h][1]), d, at + apart);
    }
    if constexpr (kind == code_kind::e4m3_bytes) {
        const auto is_nan = hn::Eq(peak, hn::Set(d8, uint8_t{0xff}));
        if (hn::AllFalse(d8, is_nan)) return;
        alignas(64) uint8_t peaks[64];
        hn::StoreU(peak, d8, peaks);
        for (uint32_t h = 0; h < heads; ++h) {
            for (uint32_t i = 0; i < 2 * hn::Lanes(d); ++i) {
                if (peaks[i] == 0xff) target[h * dim + i] = std::numeric_limits<float>::quiet_NaN();
            }
        }
    }
}

/// out[h][channel] += sum over slots [first, end) of weights[h][slot] * value.
template <code_kind kind, uint32_t heads>
HWY_INLINE void add_value_rows(const value_rows& rows, const value_rows& next_rows,
                               const coded_operand& values, const value_groups& groups,
                               const float* weights, uint32_t first, uint32_t end, float* out) {
    const hn::CappedTag<float, 16> wide;
    const hn::CappedTag<float, 8> middle;
    const hn::CappedTag<float, 4> narrow;
    scaled_weights<heads> scaled;
    scale_weights<heads>(values, groups, is_fp8(kind) ? fp8_unit<kind> : 1.0f, weights, first, end,
                         scaled);
    for (uint32_t g = 0; g < values.groups; ++g) {
        const uint32_t count = values.channels(g);
        float* target = out + g * values.group;
        const uint32_t begin = is_nibbles(kind) ? g * values.group / 2 : g * values.group;
        const uint32_t bytes = is_nibbles(kind) ? count / 2 : count;
        const auto take = [&](auto d, uint32_t at) {
            const uint32_t lanes = static_cast<uint32_t>(hn::Lanes(d));
            add_channels<kind, heads>(d, rows, next_rows, begin + at, groups.zero[g],
                                      scaled.weight[g], scaled.offset[g], first, end, target + at,
                                      is_nibbles(kind) ? count / 2 : lanes, values.dim);
        };
        // Bytes that two vectors of channels take.
        const auto width = [](auto d) {
            const uint32_t lanes = static_cast<uint32_t>(hn::Lanes(d));
            return is_nibbles(kind) ? lanes : 2 * lanes;
        };
        uint32_t at = 0;
        for (; at + width(wide) <= bytes; at += width(wide)) take(wide, at);
        for (; at + width(middle) <= bytes; at += width(middle)) take(middle, at);
        for (; at < bytes; at += width(narrow)) take(narrow, at);
    }
}

/// The same of records, whose metadata lie behind their codes.
template <code_kind kind, uint32_t heads>
HWY_NOINLINE void add_record_values(const std::byte* const* tiles,
                                    const std::byte* const* next_tiles, const coded_operand& values,
                                    const float* weights, uint32_t first, uint32_t end,
                                    float* out) {
    const value_rows rows{tiles, values.layout.row_bytes()};
    const value_rows next_rows{next_tiles, values.layout.row_bytes()};
    value_groups groups;
    read_value_groups(values, rows, first, end, groups);
    add_value_rows<kind, heads>(rows, next_rows, values, groups, weights, first, end, out);
    for (uint32_t slot = first; slot < end; ++slot) {
        __builtin_prefetch(next_rows.of(slot) + values.code_bytes, 0, 2);
    }
}

#endif  // HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
