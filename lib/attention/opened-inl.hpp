// Records of keys as floats, 16 slots at a time as [dim][16], for what has to be done to keys
// before queries meet them. Include it per target.

// Per-target include guard.
#if defined(KVRT_ATTENTION_OPENED_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVRT_ATTENTION_OPENED_INL_HPP
#undef KVRT_ATTENTION_OPENED_INL_HPP
#else
#define KVRT_ATTENTION_OPENED_INL_HPP
#endif

#include <hwy/highway.h>

#include <cmath>
#include <limits>
#include <type_traits>

#include "attention/unpack-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {
namespace {

// The rows of a tile [dim][16] as rotation.hpp has them in their other basis.
void rotate_tile(float* tile, uint32_t dim) {
    const hn::CappedTag<float, slot_group> d;
    constexpr uint32_t lanes = static_cast<uint32_t>(hn::MaxLanes(d));
    const uint32_t block = dim & (~dim + 1);
    const auto scale = hn::Set(d, 1.0f / std::sqrt(static_cast<float>(block)));
    for (uint32_t lane = 0; lane < slot_group; lane += lanes) {
        float* column = tile + lane;
        for (uint32_t half = 1; half < block; half *= 2) {
            const bool last = 2 * half == block;
            for (uint32_t i = 0; i < dim; ++i) {
                if ((i & half) != 0) continue;
                float* first = column + i * slot_group;
                float* second = first + half * slot_group;
                const auto a = hn::LoadU(d, first), b = hn::LoadU(d, second);
                const auto sum = hn::Add(a, b), difference = hn::Sub(a, b);
                hn::StoreU(last ? hn::Mul(sum, scale) : sum, d, first);
                hn::StoreU(last ? hn::Mul(difference, scale) : difference, d, second);
            }
        }
    }
}

#if HWY_TARGET != HWY_SCALAR

// Channel `c` of 4 codes of fp8 in each word, as a float.
template <code_kind kind, int c, class tag>
HWY_INLINE hn::Vec<tag> fp8_channel(tag d, hn::Vec<hn::Rebind<uint32_t, tag>> word) {
    const hn::Rebind<uint32_t, tag> du;
    const auto code = hn::ShiftRight<8 * c>(word);
    if constexpr (kind == code_kind::e5m2_bytes) {
        return halves_to_floats(d, hn::ShiftLeft<8>(hn::And(code, hn::Set(du, 0xffu))));
    } else {
        const auto magnitude = hn::And(code, hn::Set(du, 0x7fu));
        const auto sign = hn::ShiftLeft<8>(hn::And(code, hn::Set(du, 0x80u)));
        const auto half = hn::Or(sign, hn::ShiftLeft<7>(magnitude));
        const auto number = hn::Mul(halves_to_floats(d, half), hn::Set(d, fp8_unit<kind>));
        const auto is_nan = hn::RebindMask(d, hn::Eq(magnitude, hn::Set(du, 0x7fu)));
        return hn::IfThenElse(is_nan, hn::Set(d, std::numeric_limits<float>::quiet_NaN()), number);
    }
}

// Records of 16 slots, of codes of 8 or 4 bits, as [dim][16]; words of `ahead` are prefetched
// meanwhile.
template <code_kind kind>
void open_records(const coded_operand& keys, const std::byte* tile, const std::byte* ahead,
                  float* out) {
    const hn::CappedTag<float, slot_group> d;
    const hn::Rebind<uint32_t, decltype(d)> du;
    const hn::Repartition<uint8_t, decltype(d)> d8;
    using floats = hn::Vec<decltype(d)>;
    using words = hn::Vec<decltype(du)>;
    constexpr uint32_t lanes = static_cast<uint32_t>(hn::MaxLanes(d));
    const uint32_t code_words = keys.code_bytes / record_word;
    for (uint32_t part = 0; part < slot_group; part += lanes) {
        const uint32_t* from = reinterpret_cast<const uint32_t*>(tile) + part;
        const auto word = [&](uint32_t w) {
            if (part == 0) __builtin_prefetch(ahead + w * 64, 0, 2);
            return hn::LoadU(du, from + w * slot_group);
        };
        for (uint32_t g = 0; g < keys.groups; ++g) {
            const auto group =
                read_group(d, keys, g, [&](uint32_t m) { return word(code_words + m); });
            const floats base = number_base<kind, false>(d, group.zero);
            const uint32_t first = g * keys.group;
            const auto put = [&](uint32_t channel, floats number) {
                hn::StoreU(hn::MulAdd(number, group.step, group.least), d,
                           out + channel * slot_group + part);
            };
            const auto put_four = [&](auto as, auto half, uint32_t channel, words codes) {
                constexpr code_kind stored = decltype(as)::value;
                constexpr int side = decltype(half)::value;
                put(channel, channel_of<stored, false, 0, side>(d, codes, base));
                put(channel + 1, channel_of<stored, false, 1, side>(d, codes, base));
                put(channel + 2, channel_of<stored, false, 2, side>(d, codes, base));
                put(channel + 3, channel_of<stored, false, 3, side>(d, codes, base));
            };
            const std::integral_constant<code_kind, kind> itself;
            const std::integral_constant<int, 0> low;
            if constexpr (is_fp8(kind)) {
                for (uint32_t i = first; i < first + keys.channels(g); i += 4) {
                    const words codes = word(i / 4);
                    put(i, fp8_channel<kind, 0>(d, codes));
                    put(i + 1, fp8_channel<kind, 1>(d, codes));
                    put(i + 2, fp8_channel<kind, 2>(d, codes));
                    put(i + 3, fp8_channel<kind, 3>(d, codes));
                }
            } else if constexpr (bits_of(kind) == 8) {
                for (uint32_t i = 0; i < keys.channels(g); i += 4) {
                    put_four(itself, low, first + i, word((first + i) / 4));
                }
            } else {
                const uint32_t apart = keys.channels(g) / 2;
                for (uint32_t i = 0; i < apart; i += 4) {
                    const words codes = word(first / 8 + i / 4);
                    if constexpr (is_looked_up(kind) && !in_register<kind, false>) {
                        const std::integral_constant<code_kind, code_kind::signed_bytes> bytes;
                        const auto numbers = [&](words nibbles) {
                            const auto clear = hn::And(nibbles, hn::Set(du, 0x0f0f0f0fu));
                            return hn::BitCast(du,
                                               looked_up_bytes<kind>(d8, hn::BitCast(d8, clear)));
                        };
                        put_four(bytes, low, first + i, numbers(codes));
                        put_four(bytes, low, first + i + apart, numbers(hn::ShiftRight<4>(codes)));
                    } else {
                        put_four(itself, low, first + i, codes);
                        put_four(itself, std::integral_constant<int, 1>(), first + i + apart,
                                 codes);
                    }
                }
            }
        }
    }
}

// The same, of any kind that decode_reads says is read where keys are turned.
void open_keys(const coded_operand& keys, const std::byte* tile, const std::byte* ahead,
               float* out) {
    switch (keys.reading.codes) {
        case code_kind::signed_bytes:
            return open_records<code_kind::signed_bytes>(keys, tile, ahead, out);
        case code_kind::e4m3_bytes:
            return open_records<code_kind::e4m3_bytes>(keys, tile, ahead, out);
        case code_kind::e5m2_bytes:
            return open_records<code_kind::e5m2_bytes>(keys, tile, ahead, out);
        case code_kind::nibbles:
            return open_records<code_kind::nibbles>(keys, tile, ahead, out);
        case code_kind::e2m1_nibbles:
            return open_records<code_kind::e2m1_nibbles>(keys, tile, ahead, out);
        default:
            return open_records<code_kind::normal_nibbles>(keys, tile, ahead, out);
    }
}

#else

void open_keys(const coded_operand&, const std::byte*, const std::byte*, float*) {}

#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
