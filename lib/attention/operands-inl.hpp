// What the kernels of coded operands know of them: how codes are grouped, and what the metadata of
// a group say for several slots at once. Include it per target.

// Per-target include guard.
#if defined(KVRT_ATTENTION_OPERANDS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVRT_ATTENTION_OPERANDS_INL_HPP
#undef KVRT_ATTENTION_OPERANDS_INL_HPP
#else
#define KVRT_ATTENTION_OPERANDS_INL_HPP
#endif

#include <hwy/highway.h>

#include <limits>
#include <type_traits>

#include "format/record.hpp"
#include "format/tile.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

inline constexpr uint32_t most_groups = 16;  // 256 channels in groups of 16

constexpr bool is_fp8(code_kind kind) {
    return kind == code_kind::e4m3_bytes || kind == code_kind::e5m2_bytes;
}
constexpr uint32_t bits_of(code_kind kind) {
    switch (kind) {
        case code_kind::nibbles:
        case code_kind::e2m1_nibbles:
        case code_kind::normal_nibbles:
            return 4;
        case code_kind::three_bits:
        case code_kind::normal_three_bits:
            return 3;
        case code_kind::two_bits:
            return 2;
        default:
            return 8;
    }
}
constexpr bool is_nibbles(code_kind kind) { return bits_of(kind) == 4; }

/// The channels that a group is a multiple of where kernels read it: the parts that it is packed
/// in, halves, quarters or eighths, are whole words then.
constexpr uint32_t whole_channels(code_kind kind) {
    switch (bits_of(kind)) {
        case 4:
            return 2 * record_word;
        case 3:
            return 8 * record_word;
        case 2:
            return 4 * record_word;
        default:
            return record_word;
    }
}

/// Calls body(heads) with the number of heads that a kernel takes at once, 1 to 4, as a constant.
template <class callable>
void with_heads(uint32_t heads, const callable& body) {
    switch (heads) {
        case 1:
            return body(std::integral_constant<uint32_t, 1>());
        case 2:
            return body(std::integral_constant<uint32_t, 2>());
        case 3:
            return body(std::integral_constant<uint32_t, 3>());
        default:
            return body(std::integral_constant<uint32_t, 4>());
    }
}

/// Taken off the codes of tiles, so that sums over them stay small.
constexpr float middle_code(code_kind kind) {
    return static_cast<float>(1u << (bits_of(kind) - 1));
}

/// What a kernel needs of an operand whose format has a code_reading.
struct coded_operand {
    const operand_layout& layout;
    code_reading reading;
    uint32_t dim, group, groups, code_bytes;
    float scale;  ///< the reading's unit, times the head's static scale where the format takes one

    coded_operand(const operand_layout& operand, uint32_t head)
        : layout(operand),
          reading(operand.format->reading),
          dim(operand.dim),
          group(operand.format->group_of(operand.dim)),
          groups(operand.format->groups(operand.dim)),
          code_bytes(operand.format->code_bytes(operand.dim)),
          scale(operand.format->reading.unit) {
        if (operand.format->takes_scales) scale *= operand.constants(head).scale;
    }

    /// The codes of a tile (format.hpp, tile_reading) as one group without metadata of its own.
    static coded_operand of_tile(const operand_layout& operand) { return coded_operand(operand); }

    uint32_t channels(uint32_t index) const { return HWY_MIN(group, dim - index * group); }
    bool has_least() const { return reading.groups == group_kind::f16_step_least; }

  private:
    explicit coded_operand(const operand_layout& operand)
        : layout(operand),
          reading{operand.format->tile.reading.codes, group_kind::none,
                  middle_code(operand.format->tile.reading.codes), 1.0f},
          dim(operand.dim),
          group(operand.dim),
          groups(1),
          code_bytes(operand.format->code_bytes(operand.dim)),
          scale(1.0f) {}
};

/// A sealed tile of one KV head, and where its parts lie.
struct sealed_tile {
    const operand_layout& operand;
    const std::byte* tile;

    uint32_t code_row_bytes() const { return operand.format->code_bytes(operand.dim); }
    const std::byte* metadata() const {
        return tile + uint64_t{operand.tile_tokens} * code_row_bytes();
    }
};

template <class tag>
HWY_INLINE hn::Vec<tag> halves_to_floats(tag d, hn::Vec<hn::Rebind<uint32_t, tag>> words) {
#if HWY_TARGET == HWY_SCALAR
    return hn::Set(d, f16_to_f32(static_cast<uint16_t>(hn::GetLane(words))));
#else
    const hn::Rebind<uint16_t, tag> d16;
    const hn::Rebind<hwy::float16_t, tag> df16;
    return hn::PromoteTo(d, hn::BitCast(df16, hn::TruncateTo(d16, words)));
#endif
}

/// Step, least and zero of one group of Lanes(d) slots.
template <class tag>
struct group_numbers {
    hn::Vec<tag> step, least, zero;
};

/// word(i) gives the i-th metadata word of the slots.
template <class tag, class word_source>
HWY_INLINE group_numbers<tag> read_group(tag d, const coded_operand& operand, uint32_t g,
                                         const word_source& word) {
    const hn::Rebind<uint32_t, tag> du;
    const auto scale = hn::Set(d, operand.scale);
    group_numbers<tag> group{scale, hn::Zero(d), hn::Set(d, operand.reading.zero)};
    const auto low_half = hn::Set(du, 0xffffu);
    switch (operand.reading.groups) {
        case group_kind::none:
            return group;
        case group_kind::f16_step: {
            const auto pair = word(g / 2);
            const auto half = g % 2 == 0 ? hn::And(pair, low_half) : hn::ShiftRight<16>(pair);
            group.step = hn::Mul(halves_to_floats(d, half), scale);
            return group;
        }
        case group_kind::f16_step_least: {
            const auto both = word(g);
            group.step = hn::Mul(halves_to_floats(d, hn::And(both, low_half)), scale);
            const auto least = halves_to_floats(d, hn::ShiftRight<16>(both));
            // Nearly the nearest; whatever is no number becomes 0.
            const auto place =
                hn::Round(hn::Mul(hn::Neg(least), hn::ApproximateReciprocal(group.step)));
            const uint32_t last_code = (1u << bits_of(operand.reading.codes)) - 1;
            group.zero =
                hn::IfThenElseZero(hn::Gt(place, hn::Zero(d)),
                                   hn::Min(place, hn::Set(d, static_cast<float>(last_code))));
            group.least = hn::MulAdd(group.step, group.zero, least);
            return group;
        }
        case group_kind::f32_step:
            group.step = hn::Mul(hn::BitCast(d, word(0)), scale);
            return group;
        default: {
            const auto byte = hn::And(hn::ShiftRightSame(word(g / 4), static_cast<int>(g % 4 * 8)),
                                      hn::Set(du, 0xffu));
            const auto nan = hn::Set(d, std::numeric_limits<float>::quiet_NaN());
            if (operand.reading.groups == group_kind::e4m3_step) {
                // Never negative. Exponents of floats are 120 more, but where there is none.
                const hn::RebindToSigned<decltype(du)> di;
                const auto magnitude = hn::And(byte, hn::Set(du, 0x7fu));
                const auto mantissa = hn::And(byte, hn::Set(du, 7u));
                const auto normal = hn::BitCast(
                    d, hn::Add(hn::ShiftLeft<20>(magnitude), hn::Set(du, uint32_t{120} << 23)));
                const auto subnormal =
                    hn::Mul(hn::ConvertTo(d, hn::BitCast(di, mantissa)), hn::Set(d, 0x1p-9f));
                const auto is_subnormal = hn::RebindMask(d, hn::Eq(magnitude, mantissa));
                const auto is_nan = hn::RebindMask(d, hn::Eq(magnitude, hn::Set(du, 0x7fu)));
                group.step = hn::IfThenElse(is_subnormal, subnormal, normal);
                group.step = hn::Mul(hn::IfThenElse(is_nan, nan, group.step), scale);
            } else {
                const auto is_least = hn::RebindMask(d, hn::Eq(byte, hn::Zero(du)));
                const auto is_nan = hn::RebindMask(d, hn::Eq(byte, hn::Set(du, 0xffu)));
                group.step = hn::BitCast(d, hn::ShiftLeft<23>(byte));
                group.step = hn::IfThenElse(is_least, hn::Set(d, 0x1p-127f), group.step);
                group.step = hn::Mul(hn::IfThenElse(is_nan, nan, group.step), scale);
            }
            return group;
        }
    }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
