// One function per block type; each decodes one block. All values are little-endian.
#include "dequantize.hpp"

#include <fmt/format.h>

#include <array>
#include <bit>
#include <cstring>

namespace generate {

static_assert(std::endian::native == std::endian::little, "GGUF files are read as they lie");

namespace {

constexpr std::array<weight_layout, 11> layouts = {{
    {weight_type::f32, "F32", 1, 4},
    {weight_type::f16, "F16", 1, 2},
    {weight_type::bf16, "BF16", 1, 2},
    {weight_type::q8_0, "Q8_0", 32, 34},
    {weight_type::q4_0, "Q4_0", 32, 18},
    {weight_type::q4_1, "Q4_1", 32, 20},
    {weight_type::q5_0, "Q5_0", 32, 22},
    {weight_type::q5_1, "Q5_1", 32, 24},
    {weight_type::q4_k, "Q4_K", 256, 144},
    {weight_type::q5_k, "Q5_K", 256, 176},
    {weight_type::q6_k, "Q6_K", 256, 210},
}};

using block_decoder = void (*)(const std::uint8_t* block, float* out);

template <class value_type>
value_type load(const std::uint8_t* bytes) {
    value_type value;
    std::memcpy(&value, bytes, sizeof(value));
    return value;
}

float load_half(const std::uint8_t* bytes) { return half_to_float(load<std::uint16_t>(bytes)); }

void decode_f32(const std::uint8_t* block, float* out) { *out = load<float>(block); }

void decode_f16(const std::uint8_t* block, float* out) { *out = load_half(block); }

void decode_bf16(const std::uint8_t* block, float* out) {
    *out = std::bit_cast<float>(static_cast<std::uint32_t>(load<std::uint16_t>(block)) << 16);
}

// scale f16, 32 signed bytes
void decode_q8_0(const std::uint8_t* block, float* out) {
    const float scale = load_half(block);
    for (int i = 0; i < 32; ++i) {
        out[i] = scale * static_cast<float>(load<std::int8_t>(block + 2 + i));
    }
}

// scale f16, 16 bytes: weight i in the low half, weight i + 16 in the high half; offset by 8
void decode_q4_0(const std::uint8_t* block, float* out) {
    const float scale = load_half(block);
    for (int i = 0; i < 16; ++i) {
        const int pair = block[2 + i];
        out[i] = scale * static_cast<float>((pair & 15) - 8);
        out[i + 16] = scale * static_cast<float>((pair >> 4) - 8);
    }
}

// scale and minimum f16, 16 bytes as in Q4_0
void decode_q4_1(const std::uint8_t* block, float* out) {
    const float scale = load_half(block);
    const float minimum = load_half(block + 2);
    for (int i = 0; i < 16; ++i) {
        const int pair = block[4 + i];
        out[i] = scale * static_cast<float>(pair & 15) + minimum;
        out[i + 16] = scale * static_cast<float>(pair >> 4) + minimum;
    }
}

// The fifth bits of all 32 weights lie in one 32-bit word, bit i for weight i.
int fifth_bit(std::uint32_t high, int i) { return static_cast<int>((high >> i) & 1u) << 4; }

// scale f16, fifth bits, 16 bytes as in Q4_0; offset by 16
void decode_q5_0(const std::uint8_t* block, float* out) {
    const float scale = load_half(block);
    const auto high = load<std::uint32_t>(block + 2);
    for (int i = 0; i < 16; ++i) {
        const int pair = block[6 + i];
        out[i] = scale * static_cast<float>(((pair & 15) | fifth_bit(high, i)) - 16);
        out[i + 16] = scale * static_cast<float>(((pair >> 4) | fifth_bit(high, i + 16)) - 16);
    }
}

// scale and minimum f16, fifth bits, 16 bytes as in Q4_0
void decode_q5_1(const std::uint8_t* block, float* out) {
    const float scale = load_half(block);
    const float minimum = load_half(block + 2);
    const auto high = load<std::uint32_t>(block + 4);
    for (int i = 0; i < 16; ++i) {
        const int pair = block[8 + i];
        out[i] = scale * static_cast<float>((pair & 15) | fifth_bit(high, i)) + minimum;
        out[i + 16] = scale * static_cast<float>((pair >> 4) | fifth_bit(high, i + 16)) + minimum;
    }
}

struct scale_and_minimum {
    float scale;
    float minimum;
};

// Q4_K and Q5_K pack eight 6-bit scales and eight 6-bit minima into 12 bytes: the first four of
// each in the low six bits of bytes 0..7; of the others, the low four bits in bytes 8..11 (scale
// low, minimum high) and the top two bits above the first four.
scale_and_minimum unpack_six_bits(const std::uint8_t* packed, int i) {
    int scale = 0;
    int minimum = 0;
    if (i < 4) {
        scale = packed[i] & 63;
        minimum = packed[i + 4] & 63;
    } else {
        scale = (packed[i + 4] & 15) | ((packed[i - 4] >> 6) << 4);
        minimum = (packed[i + 4] >> 4) | ((packed[i] >> 6) << 4);
    }
    return {static_cast<float>(scale), static_cast<float>(minimum)};
}

// Groups of 32 weights in pairs: the low halves of 32 bytes are one group, the high halves the
// next.
void decode_q4_k(const std::uint8_t* block, float* out) {
    const float scale = load_half(block);
    const float minimum = load_half(block + 2);
    const std::uint8_t* halves = block + 16;
    for (int group = 0; group < 8; ++group) {
        const scale_and_minimum own = unpack_six_bits(block + 4, group);
        const std::uint8_t* bytes = halves + (group / 2) * 32;
        const int shift = (group % 2) * 4;
        for (int i = 0; i < 32; ++i) {
            const int value = (bytes[i] >> shift) & 15;
            out[group * 32 + i] =
                scale * own.scale * static_cast<float>(value) - minimum * own.minimum;
        }
    }
}

// As Q4_K, with the fifth bit of group g's weight i in bit g of byte i of 32 more bytes.
void decode_q5_k(const std::uint8_t* block, float* out) {
    const float scale = load_half(block);
    const float minimum = load_half(block + 2);
    const std::uint8_t* high = block + 16;
    const std::uint8_t* halves = block + 48;
    for (int group = 0; group < 8; ++group) {
        const scale_and_minimum own = unpack_six_bits(block + 4, group);
        const std::uint8_t* bytes = halves + (group / 2) * 32;
        const int shift = (group % 2) * 4;
        for (int i = 0; i < 32; ++i) {
            const int value = ((bytes[i] >> shift) & 15) | (((high[i] >> group) & 1) << 4);
            out[group * 32 + i] =
                scale * own.scale * static_cast<float>(value) - minimum * own.minimum;
        }
    }
}

// 128 bytes of low halves, 64 bytes of upper two bits, 16 signed scales, scale f16. Each half of
// the block (128 weights) is four runs of 32: run r takes its low bits from bytes (r % 2) * 32 + i,
// low or high half by r / 2, its upper bits from byte i, bits 2r and 2r + 1. Offset by 32.
void decode_q6_k(const std::uint8_t* block, float* out) {
    const float scale = load_half(block + 208);
    for (int half = 0; half < 2; ++half) {
        const std::uint8_t* low = block + half * 64;
        const std::uint8_t* high = block + 128 + half * 32;
        const std::uint8_t* scales = block + 192 + half * 8;
        for (int run = 0; run < 4; ++run) {
            for (int i = 0; i < 32; ++i) {
                const int bits = (low[(run % 2) * 32 + i] >> ((run / 2) * 4)) & 15;
                const int value = (bits | (((high[i] >> (run * 2)) & 3) << 4)) - 32;
                const auto own = load<std::int8_t>(scales + run * 2 + i / 16);
                out[half * 128 + run * 32 + i] =
                    scale * static_cast<float>(own) * static_cast<float>(value);
            }
        }
    }
}

block_decoder decoder_of(weight_type type) {
    switch (type) {
        case weight_type::f32:
            return decode_f32;
        case weight_type::f16:
            return decode_f16;
        case weight_type::bf16:
            return decode_bf16;
        case weight_type::q8_0:
            return decode_q8_0;
        case weight_type::q4_0:
            return decode_q4_0;
        case weight_type::q4_1:
            return decode_q4_1;
        case weight_type::q5_0:
            return decode_q5_0;
        case weight_type::q5_1:
            return decode_q5_1;
        case weight_type::q4_k:
            return decode_q4_k;
        case weight_type::q5_k:
            return decode_q5_k;
        case weight_type::q6_k:
            return decode_q6_k;
    }
    return nullptr;
}

}  // namespace

const weight_layout* find_weight_layout(std::uint32_t type_id) {
    for (const weight_layout& layout : layouts) {
        if (static_cast<std::uint32_t>(layout.type) == type_id) {
            return &layout;
        }
    }
    return nullptr;
}

const char* readable_weight_types() {
    return "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K";
}

float half_to_float(std::uint16_t bits) {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
    const std::uint32_t exponent = (bits >> 10) & 31u;
    const std::uint32_t fraction = bits & 0x3ffu;
    if (exponent == 31) {  // infinity or not a number
        return std::bit_cast<float>(sign | 0x7f800000u | (fraction << 13));
    }
    if (exponent == 0) {  // zero or subnormal: fraction * 2^-24, exact in f32
        const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
        return sign != 0 ? -magnitude : magnitude;
    }
    return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
}

outcome<nothing> dequantize(weight_type type, std::span<const std::byte> bytes,
                            std::span<float> out) {
    const weight_layout* layout = find_weight_layout(static_cast<std::uint32_t>(type));
    const block_decoder decode = decoder_of(type);
    if (layout == nullptr || decode == nullptr) {
        return error{fmt::format("weights of type {} cannot be read, only {}",
                                 static_cast<std::uint32_t>(type), readable_weight_types())};
    }
    const std::size_t blocks = bytes.size() / layout->block_bytes;
    if (bytes.size() % layout->block_bytes != 0 || out.size() % layout->block_elements != 0 ||
        out.size() / layout->block_elements != blocks) {
        return error{fmt::format("{} bytes of {} are not {} weights", bytes.size(), layout->name,
                                 out.size())};
    }
    const auto* source = reinterpret_cast<const std::uint8_t*>(bytes.data());
    for (std::size_t i = 0; i < blocks; ++i) {
        decode(source + i * layout->block_bytes, out.data() + i * layout->block_elements);
    }
    return nothing{};
}

}  // namespace generate
