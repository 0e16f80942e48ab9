// The formats by their formulas, for tests: bits parsed and numbers computed here, in double, from
// what kvrt.h and the formats' own definitions say, without a line of the library's.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "format/element.hpp"
#include "format/format.hpp"
#include "kvrt/kvrt.h"

namespace format_test {

using kvrt::element;
using kvrt::operand_role;

// ---- Numbers of a few bits --------------------------------------------------------------------

/// What the largest exponent means: infinities and NaNs, one NaN, or numbers like any other.
enum class top_exponent { ieee, one_nan, numbers };

inline double float_value(uint32_t bits, int exponent_bits, int mantissa_bits, top_exponent top) {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int last_exponent = (1 << exponent_bits) - 1;
    const int exponent = static_cast<int>(bits >> mantissa_bits) & last_exponent;
    const int mantissa = static_cast<int>(bits) & ((1 << mantissa_bits) - 1);
    const double sign = (bits >> (exponent_bits + mantissa_bits) & 1u) != 0 ? -1.0 : 1.0;
    if (exponent == last_exponent && top == top_exponent::ieee) {
        return mantissa != 0 ? NAN : sign * INFINITY;
    }
    if (exponent == last_exponent && top == top_exponent::one_nan &&
        mantissa == (1 << mantissa_bits) - 1) {
        return NAN;
    }
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

inline double e4m3_value(uint32_t code) { return float_value(code, 4, 3, top_exponent::one_nan); }
inline double e5m2_value(uint32_t code) { return float_value(code, 5, 2, top_exponent::ieee); }
inline double e2m1_value(uint32_t code) { return float_value(code, 2, 1, top_exponent::numbers); }
inline double e8m0_value(uint32_t code) {
    return code == 255 ? NAN : std::ldexp(1.0, static_cast<int>(code) - 127);
}

/// Value of 16 stored bits.
inline double value_of(uint16_t bits, element type) {
    return type == element::f16 ? float_value(bits, 5, 10, top_exponent::ieee)
                                : float_value(bits, 8, 7, top_exponent::ieee);
}

/// The nearest 16-bit number, ties to even, found by bisection over all of them.
inline uint16_t nearest_bits(double value, element type) {
    const uint16_t infinity = type == element::f16 ? 0x7c00 : 0x7f80;
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::abs(value);
    if (std::isinf(value)) return static_cast<uint16_t>(sign | infinity);
    uint16_t low = 0, high = infinity;  // value_of(low) <= magnitude; bits order as values do
    while (high - low > 1) {
        const uint16_t middle = static_cast<uint16_t>((low + high) / 2);
        (value_of(middle, type) <= magnitude ? low : high) = middle;
    }
    // Beyond the largest number the next one counts as if the exponent went on.
    const double below = value_of(low, type);
    const double above = high == infinity
                             ? 2 * below - value_of(static_cast<uint16_t>(low - 1), type)
                             : value_of(high, type);
    const double middle = (below + above) / 2;
    const bool up = magnitude > middle || (magnitude == middle && (low & 1) != 0);
    return static_cast<uint16_t>(sign | (up ? high : low));
}

/// The nearest of the codes [0, count) without sign, ties to even; beyond the last one, the last.
template <class value_function>
uint32_t nearest_code(double magnitude, uint32_t count, const value_function& value) {
    if (magnitude >= value(count - 1)) return count - 1;
    uint32_t best = 0;
    for (uint32_t code = 1; code < count; ++code) {
        const double off = std::abs(value(code) - magnitude);
        const double best_off = std::abs(value(best) - magnitude);
        if (off < best_off || (off == best_off && code % 2 == 0)) best = code;
    }
    return best;
}

// ---- Records ----------------------------------------------------------------------------------

/// normal_16 and normal_8: the codes of so many centroids of a normal distribution, in whole
/// multiples of 1 / 38.146 and 1 / 40.905.
enum class coding {
    plain,
    e4m3,
    e5m2,
    int8,
    uint4,
    uint4_less_8,
    e2m1,
    uint3,
    uint2,
    normal_16,
    normal_8
};
enum class metadata {
    none,
    f32_scale,
    f16_scale,
    f16_scale_and_least,
    e4m3_scale,
    e8m0_scale,
    f16_norm
};

struct facts {
    uint32_t id;
    const char* name;
    coding code;
    metadata meta;
    uint32_t group;     // channels; 0: the whole row
    bool static_scale;  // multiplies
    bool foreign_form;  // HND and NHD hold each group's metadata in front of its codes
    operand_role role = operand_role::keys;  // what the library is asked for
    bool always_rotated = false;

    uint32_t code_bits() const {
        switch (code) {
            case coding::plain:
                return id == KV_FORMAT_F32 ? 32 : 16;
            case coding::e4m3:
            case coding::e5m2:
            case coding::int8:
                return 8;
            case coding::uint3:
            case coding::normal_8:
                return 3;
            case coding::uint2:
                return 2;
            default:
                return 4;
        }
    }
    uint32_t codes() const { return 1u << code_bits(); }
    uint32_t meta_bytes() const {
        switch (meta) {
            case metadata::none:
                return 0;
            case metadata::f32_scale:
            case metadata::f16_scale_and_least:
                return 4;
            case metadata::f16_scale:
            case metadata::f16_norm:
                return 2;
            default:
                return 1;
        }
    }
    bool plain() const { return code == coding::plain; }
    uint32_t group_of(uint32_t dim) const { return group == 0 || group > dim ? dim : group; }
    uint32_t groups(uint32_t dim) const { return (dim + group_of(dim) - 1) / group_of(dim); }
    uint32_t count_of(uint32_t dim, uint32_t index) const {  // channels of a group
        return std::min(group_of(dim), dim - index * group_of(dim));
    }
    uint32_t bytes(uint32_t dim) const {  // codes, then metadata, unpadded
        return dim * code_bits() / 8 + groups(dim) * meta_bytes();
    }
    uint32_t padded_bytes(uint32_t dim) const { return (bytes(dim) + 3) / 4 * 4; }
};

constexpr facts all_facts[] = {
    {KV_FORMAT_F32, "f32", coding::plain, metadata::none, 0, false, false},
    {KV_FORMAT_F16, "f16", coding::plain, metadata::none, 0, false, false},
    {KV_FORMAT_BF16, "bf16", coding::plain, metadata::none, 0, false, false},
    {KV_FORMAT_FP8_E4M3, "fp8_e4m3", coding::e4m3, metadata::none, 0, true, false},
    {KV_FORMAT_FP8_E5M2, "fp8_e5m2", coding::e5m2, metadata::none, 0, true, false},
    {KV_FORMAT_FP8_TOKEN, "fp8_token", coding::e4m3, metadata::f32_scale, 0, false, false},
    {KV_FORMAT_INT8_TOKEN, "int8_token", coding::int8, metadata::f32_scale, 0, false, false},
    {KV_FORMAT_INT4_TOKEN, "int4_token", coding::uint4, metadata::f16_scale_and_least, 0, false,
     false},
    {KV_FORMAT_Q8_0, "q8_0", coding::int8, metadata::f16_scale, 32, false, true},
    {KV_FORMAT_Q4_0, "q4_0", coding::uint4_less_8, metadata::f16_scale, 32, false, true},
    {KV_FORMAT_Q4_1, "q4_1", coding::uint4, metadata::f16_scale_and_least, 32, false, true},
    {KV_FORMAT_NVFP4, "nvfp4", coding::e2m1, metadata::e4m3_scale, 16, true, false},
    {KV_FORMAT_MXFP4, "mxfp4", coding::e2m1, metadata::e8m0_scale, 32, false, false},
};

/// Formats whose rows are records in one role, or other records than in the other.
constexpr facts key_facts[] = {
    {KV_FORMAT_TURBO4, "turbo4", coding::normal_16, metadata::f16_norm, 0, false, false,
     operand_role::keys, true},
    {KV_FORMAT_TURBO3, "turbo3", coding::normal_8, metadata::f16_norm, 0, false, false,
     operand_role::keys, true},
};
constexpr facts value_facts[] = {
    {KV_FORMAT_KIVI4, "kivi4", coding::uint4, metadata::f16_scale_and_least, 32, false, false,
     operand_role::values, false},
    {KV_FORMAT_KIVI2, "kivi2", coding::uint2, metadata::f16_scale_and_least, 32, false, false,
     operand_role::values, false},
    {KV_FORMAT_TURBO4, "turbo4", coding::uint4, metadata::f16_scale_and_least, 0, false, false,
     operand_role::values, true},
    {KV_FORMAT_TURBO3, "turbo3", coding::uint3, metadata::f16_scale_and_least, 0, false, false,
     operand_role::values, true},
};

inline const facts& facts_of(uint32_t id, operand_role role = operand_role::keys) {
    if (role == operand_role::keys) {
        for (const facts& format : key_facts) {
            if (format.id == id) return format;
        }
    } else {
        for (const facts& format : value_facts) {
            if (format.id == id) return format;
        }
    }
    return all_facts[id - 1];
}

/// The formats whose rows are records, the same for keys and for values.
inline std::vector<facts> record_facts() {
    return {std::begin(all_facts) + 3, std::end(all_facts)};
}

/// Those, and the ones of one role.
inline std::vector<facts> all_record_facts() {
    std::vector<facts> found = record_facts();
    found.insert(found.end(), std::begin(key_facts), std::end(key_facts));
    found.insert(found.end(), std::begin(value_facts), std::end(value_facts));
    return found;
}

template <class number>
number parse(const std::byte* address) {
    number value;
    std::memcpy(&value, address, sizeof value);
    return value;
}

/// `bits` of channel i of a group of `count`, in bytes which hold 8 / bits channels each: byte j
/// the channels j, j + count * bits / 8, and so on, from its lowest bits up.
inline uint32_t packed_bits(const std::byte* bytes, uint32_t count, uint32_t bits, uint32_t i) {
    const uint32_t apart = count * bits / 8;
    const uint32_t byte = std::to_integer<uint32_t>(bytes[i % apart]);
    return byte >> (i / apart * bits) & ((1u << bits) - 1);
}

/// The code of channel i. Of 3 bits the highest lie behind the other two.
inline uint32_t code_at(const facts& format, const std::byte* record, uint32_t dim, uint32_t i) {
    const uint32_t bits = format.code_bits(), index = i / format.group_of(dim);
    const uint32_t first = index * format.group_of(dim), count = format.count_of(dim, index);
    const std::byte* codes = record + first * bits / 8;
    if (bits != 3) return packed_bits(codes, count, bits, i - first);
    return packed_bits(codes, count, 2, i) | packed_bits(codes + count / 4, count, 1, i) << 2;
}

/// The `count` numbers, ascending, that N(0, 1) is nearest to in the mean square: each the mean of
/// what lies nearest to it (Lloyd, Max).
inline std::vector<double> normal_centroids(uint32_t count) {
    const auto density = [](double x) { return std::exp(-x * x / 2) / std::sqrt(2 * M_PI); };
    const auto above = [](double x) { return std::erfc(x / std::sqrt(2.0)) / 2; };
    std::vector<double> centroids(count);
    for (uint32_t i = 0; i < count; ++i) centroids[i] = (i + 0.5) * 5.4 / count - 2.7;
    for (int turn = 0; turn < 5000; ++turn) {
        double low = -INFINITY;
        std::vector<double> better(count);
        for (uint32_t i = 0; i < count; ++i) {
            const double high = i + 1 < count ? (centroids[i] + centroids[i + 1]) / 2 : INFINITY;
            better[i] = (density(low) - density(high)) / (above(low) - above(high));
            low = high;
        }
        centroids = better;
    }
    return centroids;
}

/// Those in whole multiples of 1 / scale.
inline std::vector<double> whole_centroids(uint32_t count, double scale) {
    std::vector<double> levels = normal_centroids(count);
    for (double& level : levels) level = std::round(level * scale) / scale;
    return levels;
}

inline double code_value(const facts& format, uint32_t code) {
    static const std::vector<double> centroids_16 = whole_centroids(16, 38.146);
    static const std::vector<double> centroids_8 = whole_centroids(8, 40.905);
    switch (format.code) {
        case coding::e4m3:
            return e4m3_value(code);
        case coding::e5m2:
            return e5m2_value(code);
        case coding::int8:
            return code < 128 ? static_cast<double>(code) : static_cast<double>(code) - 256.0;
        case coding::uint4_less_8:
            return static_cast<double>(code) - 8.0;
        case coding::e2m1:
            return e2m1_value(code);
        case coding::normal_16:
            return centroids_16[code];
        case coding::normal_8:
            return centroids_8[code];
        default:
            return static_cast<double>(code);
    }
}

/// x = step * code_value + least.
struct group_numbers {
    double step, least;
};

inline group_numbers group_at(const facts& format, const std::byte* record, uint32_t dim,
                              uint32_t index, double scale) {
    const std::byte* meta = record + dim * format.code_bits() / 8 + index * format.meta_bytes();
    switch (format.meta) {
        case metadata::f32_scale:
            return {double{parse<float>(meta)}, 0.0};
        case metadata::f16_scale:
        case metadata::f16_norm:
            return {value_of(parse<uint16_t>(meta), element::f16), 0.0};
        case metadata::f16_scale_and_least:
            return {value_of(parse<uint16_t>(meta), element::f16),
                    value_of(parse<uint16_t>(meta + 2), element::f16)};
        case metadata::e4m3_scale:
            return {scale * e4m3_value(std::to_integer<uint32_t>(*meta)), 0.0};
        case metadata::e8m0_scale:
            return {e8m0_value(std::to_integer<uint32_t>(*meta)), 0.0};
        default:
            return {scale, 0.0};
    }
}

inline std::vector<double> decode(const facts& format, const std::byte* record, uint32_t dim,
                                  double scale) {
    std::vector<double> row(dim);
    for (uint32_t i = 0; i < dim; ++i) {
        const group_numbers group = group_at(format, record, dim, i / format.group_of(dim), scale);
        row[i] = group.step * code_value(format, code_at(format, record, dim, i)) + group.least;
    }
    return row;
}

/// Each group's metadata in front of its codes, as llama.cpp's blocks follow each other.
inline std::vector<std::byte> foreign_form(const facts& format, const std::byte* record,
                                           uint32_t dim) {
    std::vector<std::byte> row;
    const std::byte* code = record;
    const std::byte* meta = record + dim * format.code_bits() / 8;
    for (uint32_t index = 0; index < format.groups(dim); ++index) {
        const uint32_t code_bytes = format.count_of(dim, index) * format.code_bits() / 8;
        row.insert(row.end(), meta, meta + format.meta_bytes());
        row.insert(row.end(), code, code + code_bytes);
        meta += format.meta_bytes();
        code += code_bytes;
    }
    return row;
}

/// The record behind a row in foreign form, padded.
inline std::vector<std::byte> from_foreign_form(const facts& format, const std::byte* row,
                                                uint32_t dim) {
    std::vector<std::byte> record(format.padded_bytes(dim));
    std::byte* code = record.data();
    std::byte* meta = record.data() + dim * format.code_bits() / 8;
    for (uint32_t index = 0; index < format.groups(dim); ++index) {
        const uint32_t code_bytes = format.count_of(dim, index) * format.code_bits() / 8;
        meta = std::copy_n(row, format.meta_bytes(), meta);
        code = std::copy_n(row + format.meta_bytes(), code_bytes, code);
        row += format.meta_bytes() + code_bytes;
    }
    return record;
}

// ---- Rotation ---------------------------------------------------------------------------------

/// Hadamard's matrix, orthonormal, in blocks of the largest power of two that divides the length:
/// entry (i, j) of a block is 1 or -1 as i and j share an even or odd number of bits.
inline std::vector<double> hadamard(const std::vector<double>& row) {
    const std::size_t block = row.size() & (~row.size() + 1);
    const double size = std::sqrt(static_cast<double>(block));
    std::vector<double> out(row.size());
    for (std::size_t i = 0; i < row.size(); ++i) {
        double sum = 0;
        for (std::size_t j = 0; j < block; ++j) {
            const double entry = __builtin_popcountll(i & j & (block - 1)) % 2 == 0 ? 1.0 : -1.0;
            sum += entry * row[i / block * block + j];
        }
        out[i] = sum / size;
    }
    return out;
}

// ---- Rows -------------------------------------------------------------------------------------

inline std::vector<float> gauss_row(uint32_t dim, std::mt19937& random) {
    std::normal_distribution<float> normal;
    std::vector<float> row(dim);
    for (float& x : row) x = normal(random);
    return row;
}

/// Rows like keys: six channels with large means of their own, the others with small ones.
class key_like_rows {
  public:
    key_like_rows(uint32_t dim, std::mt19937& random) : means_(dim), deviations_(dim, 1.0f) {
        std::normal_distribution<float> normal;
        for (float& mean : means_) mean = 0.5f * normal(random);
        for (uint32_t k = 0; k < 6; ++k) {  // 6 to 16, evenly, with either sign
            const uint32_t channel = dim * k / 6 + random() % (dim / 6);
            means_[channel] = (k % 2 == 0 ? 1.0f : -1.0f) * (6.0f + 2.0f * static_cast<float>(k));
            deviations_[channel] = 1.5f;
        }
    }
    std::vector<float> draw(std::mt19937& random) const {
        std::vector<float> row = gauss_row(static_cast<uint32_t>(means_.size()), random);
        for (std::size_t i = 0; i < row.size(); ++i) row[i] = row[i] * deviations_[i] + means_[i];
        return row;
    }

  private:
    std::vector<float> means_, deviations_;
};

}  // namespace format_test
