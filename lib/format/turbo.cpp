// TurboQuant (arXiv 2504.19874) with codes of 4 and 3 bits, on rotated rows.
//
//   keys    x = factor * unit * level[code]: levels nearly those of Lloyd and Max for N(0, 1), of
//           which a rotated row's channels are nearly drawn once they are divided by their root
//           mean square (normal_levels.hpp). The factor, in f16, is the row's norm by that of
//           its levels: so the decoded row has the row's norm, and 1 / sqrt(dim) needs no room of
//           its own.
//   values  x = step * code + least over the whole row, both in f16: the 4-bit ones are records of
//           int4_token.
#include "format/affine_codes.hpp"
#include "format/formats.hpp"
#include "format/normal_levels.hpp"

namespace kvrt {

namespace {

/// The positive levels, from the least one on. A number belongs to the next one where it is above
/// the middle of the two.
template <uint32_t bits>
constexpr float level_size(uint32_t level) {
    return normal_levels<bits>::of_code[(1u << (bits - 1)) + level];
}

/// Codes of row[i] * inverse, and the sum of the squares of their levels.
template <uint32_t bits>
double nearest_levels(const float* row, uint32_t dim, double inverse, uint8_t* codes) {
    constexpr uint32_t half = 1u << (bits - 1);
    float sizes[widest_row];
    uint8_t levels[widest_row] = {};
    for (uint32_t i = 0; i < dim; ++i) {
        sizes[i] = static_cast<float>(std::fabs(double{row[i]} * inverse));
    }
    for (uint32_t level = 1; level < half; ++level) {
        const float middle = (level_size<bits>(level - 1) + level_size<bits>(level)) / 2.0f;
        for (uint32_t i = 0; i < dim; ++i) {
            levels[i] = static_cast<uint8_t>(levels[i] + (sizes[i] > middle ? 1 : 0));
        }
    }
    double squares = 0.0;
    for (uint32_t i = 0; i < dim; ++i) {
        const double size = double{level_size<bits>(levels[i])};
        squares += size * size;
        codes[i] =
            static_cast<uint8_t>(std::signbit(row[i]) ? half - 1 - levels[i] : half + levels[i]);
    }
    return squares;
}

template <uint32_t bits>
uint32_t encode_key(const float* row, uint32_t dim, const row_constants&, std::byte* record) {
    constexpr uint32_t half = 1u << (bits - 1);
    std::byte* meta = record + dim * bits / 8;
    uint8_t codes[widest_row] = {};
    uint32_t saturated = 0;
    double squares = 0.0;  // of f32 numbers, whose squares double holds
    float flaw = 0.0f;
    for (uint32_t i = 0; i < dim; ++i) {
        squares += double{row[i]} * double{row[i]};
        flaw += row[i] * 0.0f;
    }
    if (flaw != 0.0f) {  // NaN: a number is not finite
        store_f16(meta, NAN);
    } else if (squares == 0.0) {
        store_f16(meta, 0.0f);
        nearest_levels<bits>(row, dim, 0.0, codes);
    } else {
        constexpr double unit = normal_levels<bits>::unit;
        const double norm = std::sqrt(squares);
        const double inverse = std::sqrt(static_cast<double>(dim)) / norm / unit;
        double factor = norm / std::sqrt(nearest_levels<bits>(row, dim, inverse, codes)) / unit;
        if (factor > double{largest_f16}) {  // the nearest that the largest factor admits
            factor = double{largest_f16};
            nearest_levels<bits>(row, dim, 1.0 / (factor * unit), codes);
            const double reach =
                factor * unit *
                double{level_size<bits>(half - 1) * 1.5f - level_size<bits>(half - 2) * 0.5f};
            for (uint32_t i = 0; i < dim; ++i) {
                saturated += std::fabs(double{row[i]}) > reach ? 1 : 0;
            }
        }
        store_f16(meta, static_cast<float>(factor));
    }
    store_codes<bits>(codes, dim, record);
    return saturated;
}

template <uint32_t bits>
void decode_key(const std::byte* record, uint32_t dim, const row_constants&, float* row) {
    using levels = normal_levels<bits>;
    const float factor = load_f16(record + dim * bits / 8);
    float numbers[1u << bits];
    for (uint32_t code = 0; code < 1u << bits; ++code) {
        numbers[code] = factor * static_cast<float>(levels::unit * levels::of_code[code]);
    }
    uint8_t codes[widest_row] = {};
    load_codes<bits>(record, dim, codes);
    for (uint32_t i = 0; i < dim; ++i) row[i] = numbers[codes[i]];
}

template <uint32_t bits>
uint32_t encode_value(const float* row, uint32_t dim, const row_constants&, std::byte* record) {
    return encode_affine_groups<bits>(row, dim, dim, record);
}

template <uint32_t bits>
void decode_value(const std::byte* record, uint32_t dim, const row_constants&, float* row) {
    decode_affine_groups<bits>(record, dim, dim, row);
}

template <uint32_t bits>
constexpr format_description keys_of(uint32_t id, const char* name) {
    return {.id = id,
            .name = name,
            .kind = format_class::token_local,
            .code_bits = bits,
            .group_bytes = 2,
            .always_rotated = true,
            .reading = {bits == 4 ? code_kind::normal_nibbles : code_kind::normal_three_bits,
                        group_kind::f16_step, 0.0f, static_cast<float>(normal_levels<bits>::unit)},
            .encode = encode_key<bits>,
            .decode = decode_key<bits>};
}

template <uint32_t bits>
constexpr format_description values_of(uint32_t id, const char* name) {
    return {.id = id,
            .name = name,
            .kind = format_class::token_local,
            .code_bits = bits,
            .group_bytes = 4,
            .always_rotated = true,
            .reading = affine_reading<bits>,
            .encode = encode_value<bits>,
            .decode = decode_value<bits>};
}

}  // namespace

constinit const format_description turbo4_key_format = keys_of<4>(KV_FORMAT_TURBO4, "turbo4");
constinit const format_description turbo4_value_format = values_of<4>(KV_FORMAT_TURBO4, "turbo4");
constinit const format_description turbo3_key_format = keys_of<3>(KV_FORMAT_TURBO3, "turbo3");
constinit const format_description turbo3_value_format = values_of<3>(KV_FORMAT_TURBO3, "turbo3");

}  // namespace kvrt
