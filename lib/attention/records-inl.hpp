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

#include "attention/kernels.hpp"
#include "attention/unpack-inl.hpp"

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

/// sums[h] += query h . four channels of the slots, `from` their first.
template <code_kind kind, bool one_zero, int half, uint32_t heads, class tag>
HWY_INLINE void add_four(tag d, hn::Vec<hn::Rebind<uint32_t, tag>> word, hn::Vec<tag> base,
                         const std::byte* queries, uint32_t query_bytes, uint32_t from,
                         hn::Vec<tag> (&sums)[heads][2]) {
    const hn::Vec<tag> key[4] = {channel_of<kind, one_zero, 0, half>(d, word, base),
                                 channel_of<kind, one_zero, 1, half>(d, word, base),
                                 channel_of<kind, one_zero, 2, half>(d, word, base),
                                 channel_of<kind, one_zero, 3, half>(d, word, base)};
    HWY_UNROLL(8)
    for (uint32_t h = 0; h < heads; ++h) {
        const float* query = reinterpret_cast<const float*>(queries + h * query_bytes) + from;
        HWY_UNROLL(4)
        for (uint32_t c = 0; c < 4; ++c) {
            sums[h][c % 2] = hn::MulAdd(key[c], hn::Set(d, query[c]), sums[h][c % 2]);
        }
    }
}

/// The same of eight: those from `low` on lie in the low nibbles of the word, those from `high` on
/// in its high ones.
template <code_kind kind, bool one_zero, uint32_t heads, class tag>
HWY_INLINE void add_eight(tag d, hn::Vec<hn::Rebind<uint32_t, tag>> word, hn::Vec<tag> base,
                          const std::byte* queries, uint32_t query_bytes, uint32_t low,
                          uint32_t high, hn::Vec<tag> (&sums)[heads][2]) {
    if constexpr (is_looked_up(kind) && !in_register<kind, one_zero>) {
        const hn::Rebind<uint32_t, tag> du;
        const hn::Repartition<uint8_t, tag> d8;
        constexpr code_kind bytes = code_kind::signed_bytes;
        const auto numbers = [&](hn::Vec<decltype(du)> codes) {
            const auto nibbles = hn::BitCast(d8, hn::And(codes, hn::Set(du, 0x0f0f0f0fu)));
            return hn::BitCast(du, looked_up_bytes<kind>(d8, nibbles));
        };
        add_four<bytes, false, 0>(d, numbers(word), base, queries, query_bytes, low, sums);
        add_four<bytes, false, 0>(d, numbers(hn::ShiftRight<4>(word)), base, queries, query_bytes,
                                  high, sums);
    } else {
        add_four<kind, one_zero, 0>(d, word, base, queries, query_bytes, low, sums);
        add_four<kind, one_zero, 1>(d, word, base, queries, query_bytes, high, sums);
    }
}

/// The same of a group of `count` channels from `first` on; word(i) gives its i-th word.
template <code_kind kind, bool one_zero, uint32_t heads, class tag, class word_source>
HWY_INLINE void add_group(tag d, const word_source& word, hn::Vec<tag> base,
                          const std::byte* queries, uint32_t query_bytes, uint32_t first,
                          uint32_t count, hn::Vec<tag> (&sums)[heads][2]) {
    const hn::Rebind<uint32_t, tag> du;
    const uint32_t end = first + count, half = count / 2, quarter = count / 4;
    if constexpr (bits_of(kind) == 8) {
        for (uint32_t i = first; i < end; i += 4) {
            add_four<kind, one_zero, 0>(d, word((i - first) / 4), base, queries, query_bytes, i,
                                        sums);
        }
    } else if constexpr (bits_of(kind) == 4) {
        for (uint32_t i = first; i < first + half; i += 4) {
            add_eight<kind, one_zero>(d, word((i - first) / 4), base, queries, query_bytes, i,
                                      i + half, sums);
        }
    } else if constexpr (bits_of(kind) == 2) {
        for (uint32_t i = first; i < first + quarter; i += 4) {
            const auto codes = word((i - first) / 4);
            add_eight<kind, one_zero>(d, codes, base, queries, query_bytes, i, i + half, sums);
            add_eight<kind, one_zero>(d, hn::ShiftRight<2>(codes), base, queries, query_bytes,
                                      i + quarter, i + quarter + half, sums);
        }
    } else {
        // A word of third bits belongs to two of the others: one of each half of the quarters.
        const uint32_t eighth = count / 8;
        for (uint32_t i = first; i < first + eighth; i += 4) {
            auto third = word((i - first + quarter) / 4);
            for (uint32_t at = i; at < first + quarter; at += eighth) {
                const auto low = word((at - first) / 4);
                add_eight<kind, one_zero>(d, three_bit_nibbles<0>(du, low, third), base, queries,
                                          query_bytes, at, at + half, sums);
                add_eight<kind, one_zero>(d, three_bit_nibbles<1>(du, low, third), base, queries,
                                          query_bytes, at + quarter, at + quarter + half, sums);
                third = hn::ShiftRight<1>(third);
            }
        }
    }
}

/// scores[h][group * 16 + slot] = query h . key, of integer codes.
template <code_kind kind, uint32_t heads, bool one_zero = false>
HWY_NOINLINE void score_records(const std::byte* const* tiles, const std::byte* const* next_tiles,
                                uint32_t tile_count, const coded_operand& keys,
                                const std::byte* queries, uint32_t query_bytes, float* scores) {
    const hn::CappedTag<float, slot_group> d;
    const hn::Rebind<uint32_t, decltype(d)> du;
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
            for (uint32_t g = 0; g < keys.groups; ++g) {
                const uint32_t first = g * keys.group;
                const uint32_t first_word = first * bits_of(kind) / 32;
                const auto group =
                    read_group(d, keys, g, [&](uint32_t m) { return word(code_words + m); });
                hn::Vec<decltype(d)> sums[heads][2];
                for (uint32_t h = 0; h < heads; ++h) sums[h][0] = sums[h][1] = hn::Zero(d);
                add_group<kind, one_zero>(
                    d, [&](uint32_t i) { return word(first_word + i); },
                    number_base<kind, one_zero>(d, group.zero), queries, query_bytes, first,
                    keys.channels(g), sums);
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

/// The run's part of the channels of `codes`: its vectors at `target`, `apart` from each other, of
/// each head.
template <uint32_t heads, class tag, class code_source>
HWY_INLINE void add_channels(tag d, code_source codes, const value_rows& rows,
                             const value_rows& next_rows, const float* bases,
                             const float (*weights)[run_slots], const float* offset, uint32_t first,
                             uint32_t end, float* target, uint32_t apart, uint32_t dim) {
    constexpr uint32_t vectors = code_source::vectors;
    hn::Vec<tag> sums[heads][vectors];
    for (uint32_t h = 0; h < heads; ++h) {
        for (uint32_t v = 0; v < vectors; ++v) sums[h][v] = hn::Set(d, offset[h]);
    }
    const bool new_line = codes.starts_line();
    for (uint32_t slot = first; slot < end;) {
        const std::byte* row = rows.of(slot);
        const std::byte* next = next_rows.of(slot) + codes.byte;
        const uint32_t stop = HWY_MIN(end, (slot / slot_group + 1) * slot_group);
        for (; slot < stop; ++slot, row += rows.row_bytes, next += rows.row_bytes) {
            hn::Vec<tag> value[vectors];
            codes.load(d, row, hn::Set(d, bases[slot]), value);
            if (new_line) __builtin_prefetch(next, 0, 2);
            HWY_UNROLL(4)
            for (uint32_t h = 0; h < heads; ++h) {
                const auto weight = hn::Set(d, weights[h][slot]);
                HWY_UNROLL(4)
                for (uint32_t v = 0; v < vectors; ++v) {
                    sums[h][v] = hn::MulAdd(value[v], weight, sums[h][v]);
                }
            }
        }
    }
    for (uint32_t h = 0; h < heads; ++h) {
        for (uint32_t v = 0; v < vectors; ++v) {
            float* at = target + h * dim + v * apart;
            hn::StoreU(hn::Add(hn::LoadU(d, at), sums[h][v]), d, at);
        }
    }
    if constexpr (code_source::kind == code_kind::e4m3_bytes) {
        const typename code_source::tag8 d8;
        const auto is_nan = hn::Eq(codes.peak, hn::Set(d8, uint8_t{0xff}));
        if (hn::AllFalse(d8, is_nan)) return;
        alignas(64) uint8_t peaks[64];
        hn::StoreU(codes.peak, d8, peaks);
        for (uint32_t h = 0; h < heads; ++h) {
            for (uint32_t i = 0; i < 2 * hn::Lanes(d); ++i) {
                if (peaks[i] == 0xff) target[h * dim + i] = std::numeric_limits<float>::quiet_NaN();
            }
        }
    }
}

/// What add_channels takes of a group.
struct value_group {
    const value_rows& rows;
    const value_rows& next_rows;
    const float* bases;  ///< of slots: 2^23 + zero
    const float (*weights)[run_slots];
    const float* offset;
    uint32_t first, end;
    float* target;
    uint32_t dim;
};

/// Heads whose sums, of four vectors each, stay in the registers, which are 16 or 32.
inline constexpr uint32_t heads_of_four_vectors = HWY_ARCH_X86 && HWY_TARGET != HWY_AVX3 ? 2 : 4;

/// Channel `channel` of the group is the first of the first vector.
template <uint32_t heads, class tag, class code_source>
HWY_INLINE void add_to_group(tag d, const code_source& codes, const value_group& group,
                             uint32_t channel, uint32_t apart, uint32_t done = 0) {
    constexpr uint32_t some =
        code_source::vectors == 4 ? HWY_MIN(heads, heads_of_four_vectors) : heads;
    add_channels<some>(d, codes, group.rows, group.next_rows, group.bases, group.weights + done,
                       group.offset + done, group.first, group.end,
                       group.target + done * group.dim + channel, apart, group.dim);
    if constexpr (some < heads) {
        add_to_group<heads - some>(d, codes, group, channel, apart, done + some);
    }
}

/// Calls take(d, at) for pieces of `count` that are `per_lane` times Lanes(d) wide; at is where.
template <class callable>
HWY_INLINE void in_vectors(uint32_t count, uint32_t per_lane, const callable& take) {
    const hn::CappedTag<float, 16> wide;
    const hn::CappedTag<float, 8> middle;
    const hn::CappedTag<float, 4> narrow;
    const auto width = [&](auto d) { return per_lane * static_cast<uint32_t>(hn::Lanes(d)); };
    uint32_t at = 0;
    for (; at + width(wide) <= count; at += width(wide)) take(wide, at);
    for (; at + width(middle) <= count; at += width(middle)) take(middle, at);
    for (; at < count; at += width(narrow)) take(narrow, at);
}

/// A group of `count` channels, whose codes begin at `byte`.
template <code_kind kind, uint32_t heads>
HWY_INLINE void add_value_group(const value_group& group, uint32_t byte, uint32_t count) {
    const uint32_t half = count / 2, quarter = count / 4, eighth = count / 8;
    if constexpr (bits_of(kind) == 8) {
        in_vectors(count, 2, [&](auto d, uint32_t at) {
            add_to_group<heads>(d, row_codes<kind, decltype(d)>{byte + at}, group, at,
                                static_cast<uint32_t>(hn::Lanes(d)));
        });
    } else if constexpr (bits_of(kind) == 4) {
        in_vectors(half, 1, [&](auto d, uint32_t at) {
            add_to_group<heads>(d, row_codes<kind, decltype(d)>{byte + at}, group, at, half);
        });
    } else if constexpr (bits_of(kind) == 2) {
        const hn::CappedTag<float, 16> wide;
        if constexpr (hn::MaxLanes(wide) == 16) {
            if (count == 32) {
                return add_to_group<heads>(wide, row_group_of_32<decltype(wide)>{byte}, group, 0,
                                           16);
            }
        }
        in_vectors(quarter, 1, [&](auto d, uint32_t at) {
            add_to_group<heads>(d, row_quarters<decltype(d)>{byte + at}, group, at, quarter);
        });
    } else {
        in_vectors(eighth, 1, [&](auto d, uint32_t at) {
            const uint32_t third = byte + quarter + at;
            add_to_group<heads>(d, row_eighths<0, decltype(d)>{byte + at, third}, group, at,
                                quarter);
            add_to_group<heads>(d, row_eighths<1, decltype(d)>{byte + eighth + at, third}, group,
                                eighth + at, quarter);
        });
    }
}

/// out[h][channel] += sum over slots [first, end) of weights[h][slot] * value.
template <code_kind kind, uint32_t heads>
HWY_INLINE void add_value_rows(const value_rows& rows, const value_rows& next_rows,
                               const coded_operand& values, const value_groups& groups,
                               const float* weights, uint32_t first, uint32_t end, float* out) {
    const hn::CappedTag<float, slot_group> d;
    const uint32_t lanes = static_cast<uint32_t>(hn::Lanes(d));
    scaled_weights<heads> scaled;
    scale_weights<heads>(values, groups, is_fp8(kind) ? fp8_unit<kind> : 1.0f, weights, first, end,
                         scaled);
    alignas(64) float bases[run_slots];
    for (uint32_t g = 0; g < values.groups; ++g) {
        for (uint32_t slot = first / lanes * lanes; slot < end; slot += lanes) {
            const auto zero = hn::Load(d, groups.zero[g] + slot);
            hn::Store(hn::Add(zero, hn::Set(d, 0x1p23f)), d, bases + slot);
        }
        const uint32_t channel = g * values.group;
        add_value_group<kind, heads>({rows, next_rows, bases, scaled.weight[g], scaled.offset[g],
                                      first, end, out + channel, values.dim},
                                     channel * bits_of(kind) / 8, values.channels(g));
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
