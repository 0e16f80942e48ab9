// Codes become floats in registers: of keys a word of 4 bytes of each of 16 slots, of values
// neighbouring bytes of a row. packed_codes.hpp says how codes of fewer than 8 bits lie in them.
// Include it per target.

// Per-target include guard.
#if defined(KVRT_ATTENTION_UNPACK_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVRT_ATTENTION_UNPACK_INL_HPP
#undef KVRT_ATTENTION_UNPACK_INL_HPP
#else
#define KVRT_ATTENTION_UNPACK_INL_HPP
#endif

#include <hwy/highway.h>

#include <cstring>
#include <type_traits>

#include "attention/operands-inl.hpp"
#include "format/normal_levels.hpp"
#include "format/small_float.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR

/// Codes that stand for whole numbers of a table.
constexpr bool is_looked_up(code_kind kind) {
    return kind == code_kind::e2m1_nibbles || kind == code_kind::normal_nibbles ||
           kind == code_kind::normal_three_bits;
}

/// Those of fewer than 8 bits that stand for themselves.
constexpr bool is_unsigned(code_kind kind) {
    return kind == code_kind::nibbles || kind == code_kind::two_bits ||
           kind == code_kind::three_bits;
}

/// The numbers of 16 codes, aligned; of those of 3 bits whatever the fourth is.
template <code_kind kind>
constexpr const int8_t* code_table() {
    if constexpr (kind == code_kind::e2m1_nibbles) return e2m1_doubled.data();
    if constexpr (kind == code_kind::normal_nibbles) return normal_levels<4>::of_code;
    if constexpr (kind == code_kind::normal_three_bits) return normal_levels<3>::of_code;
}

/// The numbers of the codes in the low nibbles of bytes, whose high ones are clear.
template <code_kind kind, class tag8>
HWY_INLINE hn::Vec<tag8> looked_up_bytes(tag8 d8, hn::Vec<tag8> nibbles) {
    const auto* table = reinterpret_cast<const uint8_t*>(code_table<kind>());
    if constexpr (hn::MaxLanes(d8) >= 16) {
        return hn::TableLookupBytes(hn::LoadDup128(d8, table), nibbles);
    } else {
        return hn::TableLookupBytes(hn::Load(hn::FixedTag<uint8_t, 16>(), table), nibbles);
    }
}

// ---- Unsigned codes ---------------------------------------------------------------------------

/// A whole number of at most 23 bits as the mantissa of 2^23 + number.
inline constexpr uint32_t mantissa_base = 0x4b000000u;

/// c - zero of the codes in the lowest bits of words; `base` is 2^23 + zero.
template <code_kind kind, class tag>
HWY_INLINE hn::Vec<tag> unsigned_number(tag d, hn::Vec<hn::Rebind<uint32_t, tag>> codes,
                                        hn::Vec<tag> base) {
    const hn::Rebind<uint32_t, tag> du;
    const auto mask = hn::Set(du, (1u << bits_of(kind)) - 1);
    return hn::Sub(hn::BitCast(d, hn::OrAnd(hn::Set(du, mantissa_base), codes, mask)), base);
}

/// Codes of 3 bits as nibbles of bytes: of parts 0 and 2 of the group, or 1 and 3, from bytes of
/// their low bits and of their third ones.
template <int part, class tag>
HWY_INLINE hn::Vec<tag> three_bit_nibbles(tag du, hn::Vec<tag> low, hn::Vec<tag> third) {
    if constexpr (part == 0) {
        third = hn::ShiftLeft<2>(third);
    } else {
        low = hn::ShiftRight<2>(low);
    }
    const auto low_bits = hn::And(low, hn::Set(du, 0x33333333u));
    return hn::OrAnd(low_bits, third, hn::Set(du, 0x44444444u));
}

// ---- Codes of fp8 -----------------------------------------------------------------------------

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
    const hn::Rebind<uint16_t, tag> d16_half;
    const hn::Rebind<hwy::float16_t, tag> df16;
    lower = hn::PromoteTo(d, hn::BitCast(df16, hn::LowerHalf(d16_half, bits)));
    upper = hn::PromoteTo(d, hn::BitCast(df16, hn::UpperHalf(d16_half, bits)));
}

// ---- Words of keys ----------------------------------------------------------------------------

/// Whether numbers are looked up in a register of 16 floats, by the 4 lowest bits of words: those
/// of tables, and unsigned codes that all have the same zero.
template <code_kind kind, bool one_zero>
inline constexpr bool in_register = HWY_TARGET == HWY_AVX3 &&
                                    (is_looked_up(kind) || (one_zero && is_unsigned(kind)));

/// What channel_of needs beside the codes: 2^23 + zero, or that register.
template <code_kind kind, bool one_zero, class tag>
HWY_INLINE hn::Vec<tag> number_base(tag d, hn::Vec<tag> zero) {
    const hn::Rebind<int32_t, tag> di;
    if constexpr (!in_register<kind, one_zero>) {
        return hn::Add(zero, hn::Set(d, 0x1p23f));
    } else if constexpr (is_looked_up(kind)) {
        const hn::Rebind<int8_t, tag> di8;
        return hn::ConvertTo(d, hn::PromoteTo(di, hn::LoadU(di8, code_table<kind>())));
    } else {
        const auto codes = hn::And(hn::Iota(di, 0), hn::Set(di, (1 << bits_of(kind)) - 1));
        return hn::Sub(hn::ConvertTo(d, codes), zero);
    }
}

/// Channel `c` of 4 in each word, as a float: of signed bytes, or of the nibbles of `half`, which
/// may have bits of no meaning above the code.
template <code_kind kind, bool one_zero, int c, int half, class tag>
HWY_INLINE hn::Vec<tag> channel_of(tag d, hn::Vec<hn::Rebind<uint32_t, tag>> word,
                                   hn::Vec<tag> base) {
    const hn::Rebind<int32_t, tag> di;
    if constexpr (in_register<kind, one_zero>) {
#if HWY_TARGET == HWY_AVX3
        const auto code = hn::ShiftRight<8 * c + 4 * half>(word);
        return hn::Vec<tag>{_mm512_permutexvar_ps(code.raw, base.raw)};
#endif
    } else if constexpr (is_unsigned(kind)) {
        return unsigned_number<kind>(d, hn::ShiftRight<8 * c + 4 * half>(word), base);
    } else {
        (void)base;
        return hn::ConvertTo(d,
                             hn::ShiftRight<24>(hn::BitCast(di, hn::ShiftLeft<24 - 8 * c>(word))));
    }
}

// ---- Rows of values ---------------------------------------------------------------------------
//
// Each of these gives `vectors` vectors of a row's channels from the bytes at `byte` on; `base` is
// 2^23 + zero of unsigned codes.

/// Two vectors: neighbours of byte codes, the two halves of nibbles.
template <code_kind kind_, class tag>
struct row_codes {
    static constexpr code_kind kind = kind_;
    static constexpr uint32_t vectors = 2;
    using tag8 =
        std::conditional_t<is_fp8(kind), hn::Rebind<uint8_t, hn::Repartition<uint16_t, tag>>,
                           hn::Rebind<uint8_t, tag>>;
    uint32_t byte;
    hn::Vec<tag8> peak = hn::Zero(tag8());  ///< collects codes of e4m3

    bool starts_line() const { return byte % 64 == 0; }

    HWY_INLINE void load(tag d, const std::byte* row, hn::Vec<tag> base, hn::Vec<tag> (&out)[2]) {
        const hn::Rebind<int32_t, tag> di;
        const tag8 d8;
        const uint8_t* bytes = reinterpret_cast<const uint8_t*>(row + byte);
        (void)base;
        if constexpr (is_fp8(kind)) {
            const hn::Repartition<uint16_t, tag> d16;
            const auto both = hn::LoadU(d8, bytes);
            promote_halves(d, fp8_halves<kind>(d16, hn::ShiftLeft<8>(hn::PromoteTo(d16, both))),
                           out[0], out[1]);
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
            out[0] = unsigned_number<kind>(d, both, base);
            out[1] = unsigned_number<kind>(d, hn::ShiftRight<4>(both), base);
        } else {
            const hn::Rebind<int8_t, tag> di8;
            const auto both = hn::LoadU(d8, bytes);
            const auto numbers = [&](hn::Vec<tag8> nibbles) {
                const auto number = hn::BitCast(di8, looked_up_bytes<kind>(d8, nibbles));
                return hn::ConvertTo(d, hn::PromoteTo(di, number));
            };
            out[0] = numbers(hn::And(both, hn::Set(d8, uint8_t{15})));
            out[1] = numbers(hn::ShiftRight<4>(both));
        }
    }
};

/// Codes of 2 bits: a vector of each quarter of the group.
template <class tag>
struct row_quarters {
    static constexpr code_kind kind = code_kind::two_bits;
    static constexpr uint32_t vectors = 4;
    uint32_t byte;

    bool starts_line() const { return byte % 64 == 0; }

    HWY_INLINE void load(tag d, const std::byte* row, hn::Vec<tag> base,
                         hn::Vec<tag> (&out)[4]) const {
        const hn::Rebind<uint32_t, tag> du;
        const hn::Rebind<uint8_t, tag> d8;
        const auto all =
            hn::PromoteTo(du, hn::LoadU(d8, reinterpret_cast<const uint8_t*>(row + byte)));
        out[0] = unsigned_number<kind>(d, all, base);
        out[1] = unsigned_number<kind>(d, hn::ShiftRight<2>(all), base);
        out[2] = unsigned_number<kind>(d, hn::ShiftRight<4>(all), base);
        out[3] = unsigned_number<kind>(d, hn::ShiftRight<6>(all), base);
    }
};

/// A group of 32 codes of 2 bits, of which a vector of 16 lanes holds two quarters.
template <class tag>
struct row_group_of_32 {
    static constexpr code_kind kind = code_kind::two_bits;
    static constexpr uint32_t vectors = 2;
    uint32_t byte;

    bool starts_line() const { return byte % 64 == 0; }

    HWY_INLINE void load(tag d, const std::byte* row, hn::Vec<tag> base,
                         hn::Vec<tag> (&out)[2]) const {
        const hn::Rebind<uint32_t, tag> du;
        const hn::FixedTag<uint64_t, 2> du64;
        const hn::FixedTag<uint8_t, 16> d8;
        alignas(64) static constexpr uint32_t shifts[16] = {0, 0, 0, 0, 0, 0, 0, 0,
                                                            2, 2, 2, 2, 2, 2, 2, 2};
        uint64_t group;
        std::memcpy(&group, row + byte, sizeof group);
        const auto twice = hn::PromoteTo(du, hn::BitCast(d8, hn::Set(du64, group)));
        const auto first = hn::Shr(twice, hn::Load(du, shifts));
        out[0] = unsigned_number<kind>(d, first, base);
        out[1] = unsigned_number<kind>(d, hn::ShiftRight<4>(first), base);
    }
};

/// Codes of 3 bits: a vector of each quarter of the group, from its first half or its second one.
template <int half, class tag>
struct row_eighths {
    static constexpr code_kind kind = code_kind::three_bits;
    static constexpr uint32_t vectors = 4;
    uint32_t byte;   ///< of the low bits
    uint32_t third;  ///< the byte of the third ones

    bool starts_line() const { return byte % 64 == 0 || third % 64 == 0; }

    HWY_INLINE void load(tag d, const std::byte* row, hn::Vec<tag> base,
                         hn::Vec<tag> (&out)[4]) const {
        const hn::Rebind<uint32_t, tag> du;
        const hn::Rebind<uint8_t, tag> d8;
        const auto bytes = [&](uint32_t at) {
            return hn::PromoteTo(du, hn::LoadU(d8, reinterpret_cast<const uint8_t*>(row + at)));
        };
        const auto low = bytes(byte), bits = hn::ShiftRight<half>(bytes(third));
        const auto even = three_bit_nibbles<0>(du, low, bits);
        const auto odd = three_bit_nibbles<1>(du, low, bits);
        out[0] = unsigned_number<kind>(d, even, base);
        out[1] = unsigned_number<kind>(d, odd, base);
        out[2] = unsigned_number<kind>(d, hn::ShiftRight<4>(even), base);
        out[3] = unsigned_number<kind>(d, hn::ShiftRight<4>(odd), base);
    }
};

#endif  // HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
