// Rows of keys and values from the caller's tensors into blocks, quantised on the way. The bytes
// are those of the library's encoders (format/token_scaled.cpp, fp8_static.cpp, affine_codes.hpp),
// but for the payload of NaNs in plain f16 and bf16.
//
// A warp has one row of one head: a lane loads 8 channels, the row's reach is found by shuffles,
// and codes meet in shared memory where a word of them comes from several lanes.
#pragma once

#include "kernels/layout.hpp"
#include "kernels/small_float.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t write_threads = 128;
inline constexpr uint32_t write_shared_bytes = write_threads / warp_lanes * most_dim;
inline constexpr uint32_t lane_channels = 8;

/// Where row r of the tensors goes: a slot of a sequence; no_sequence: nowhere.
struct row_target {
    uint32_t sequence;
    uint32_t slot;
};

/// Rows [0, rows) of keys, [rows, kv_heads, key dim], and values. Launch with write_blocks(...)
/// blocks of write_threads threads and write_shared_bytes.
struct write_parameters {
    std::byte* arena = nullptr;
    block_place place;
    block_tables tables;
    const row_target* targets = nullptr;  ///< [rows]
    uint32_t rows = 0;
    tensor_place keys;
    tensor_place values;
    uint64_t* saturated_keys = nullptr;  ///< [kv_heads], added to; null: nobody counts
    uint64_t* saturated_values = nullptr;
};

constexpr uint32_t write_blocks(uint32_t rows, uint32_t kv_heads) {
    constexpr uint32_t warps = write_threads / warp_lanes;
    return (rows * kv_heads * 2 + warps - 1) / warps;
}

template <class Cx, number input>
KVRT_DEVICE float load_number(const std::byte* address) {
    if constexpr (input == number::f32) {
        return Cx::template load_constant<float>(address);
    } else {
        const uint16_t bits = Cx::template load_constant<uint16_t>(address);
        return input == number::f16 ? Cx::f16_to_f32(bits) : Cx::bf16_to_f32(bits);
    }
}

/// 8 channels of a row, `stride` elements apart; in 16 bytes at a time where they lie so.
template <class Cx, number input>
KVRT_DEVICE void load_channels(const std::byte* address, int64_t stride,
                               float (&row)[lane_channels]) {
    constexpr uint32_t size = number_bytes(input);
    if (stride != 1 || reinterpret_cast<uintptr_t>(address) % 16 != 0) {
        KVRT_UNROLL
        for (uint32_t i = 0; i < lane_channels; ++i) {
            row[i] = load_number<Cx, input>(address + int64_t{i} * stride * size);
        }
        return;
    }
    if constexpr (input == number::f32) {
        KVRT_UNROLL
        for (uint32_t i = 0; i < lane_channels; i += 4) {
            const word4 four = Cx::template load_constant<word4>(address + i * size);
            row[i] = Cx::bits_to_f32(four.x);
            row[i + 1] = Cx::bits_to_f32(four.y);
            row[i + 2] = Cx::bits_to_f32(four.z);
            row[i + 3] = Cx::bits_to_f32(four.w);
        }
    } else {
        const word4 eight = Cx::template load_constant<word4>(address);
        const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
        KVRT_UNROLL
        for (uint32_t i = 0; i < lane_channels; ++i) {
            const uint16_t bits = static_cast<uint16_t>(pairs[i / 2] >> (16 * (i % 2)));
            row[i] = input == number::f16 ? Cx::f16_to_f32(bits) : Cx::bf16_to_f32(bits);
        }
    }
}

/// Least and largest number of a row, and whether all are finite. Of equal numbers the first is
/// taken, so that 0 and -0 come out as in a loop over the row.
struct row_reach {
    float least, largest;
    bool finite;
};

template <class Cx>
KVRT_DEVICE row_reach reach_of_row(const float (&row)[lane_channels], bool active) {
    row_reach reach = {Cx::bits_to_f32(0x7f800000u), Cx::bits_to_f32(0xff800000u), true};
    if (active) {
        reach.least = reach.largest = row[0];
        KVRT_UNROLL
        for (uint32_t i = 0; i < lane_channels; ++i) {
            if (row[i] < reach.least) reach.least = row[i];
            if (reach.largest < row[i]) reach.largest = row[i];
            reach.finite = reach.finite && (Cx::f32_to_bits(row[i]) & 0x7f800000u) != 0x7f800000u;
        }
    }
    reach.finite = Cx::ballot(!reach.finite) == 0;
    KVRT_UNROLL
    for (uint32_t bits = 1; bits < warp_lanes; bits *= 2) {
        const float least = Cx::shuffle_xor(reach.least, bits);
        const float largest = Cx::shuffle_xor(reach.largest, bits);
        const bool second = (Cx::lane() & bits) != 0;
        // Whoever is second gives way when equal.
        if (second ? !(reach.least < least) : least < reach.least) reach.least = least;
        if (second ? !(largest < reach.largest) : reach.largest < largest) reach.largest = largest;
    }
    return reach;
}

template <class Cx>
KVRT_DEVICE float reciprocal_of(float step) {
    const float reciprocal = 1.0f / step;
    return (Cx::f32_to_bits(reciprocal) & 0x7f800000u) == 0x7f800000u ? 0.0f : reciprocal;
}

/// A step of |row| / largest_code. Rounded up, that of the largest magnitudes would bring them back
/// as infinity.
template <class Cx>
KVRT_DEVICE float token_step(const row_reach& reach, float largest_code) {
    if (!reach.finite) return Cx::bits_to_f32(0x7fc00000u);
    const float magnitude = -reach.least > reach.largest ? -reach.least : reach.largest;
    const float step = Cx::bits_to_f32(Cx::f32_to_bits(magnitude) & 0x7fffffffu) / largest_code;
    const bool infinite = Cx::f32_to_bits(step * largest_code) == 0x7f800000u;
    return infinite ? Cx::bits_to_f32(Cx::f32_to_bits(step) - 1) : step;
}

/// What encoding left of a row besides its codes, which lie in shared memory a byte each.
struct encoded_row {
    uint32_t meta = 0;
    uint32_t saturated = 0;  ///< of this lane's channels
};

template <class Cx>
KVRT_DEVICE uint32_t code_of_int8(float x, float inverse) {
    float code = Cx::nearest_away(x * inverse);
    code = code < -127.0f ? -127.0f : code;
    code = 127.0f < code ? 127.0f : code;
    return static_cast<uint32_t>(static_cast<int32_t>(code)) & 0xffu;
}

/// Codes of the lane's channels, by format.
template <class Cx>
KVRT_DEVICE encoded_row encode_channels(const operand_place& operand, uint32_t head, bool active,
                                        const float (&row)[lane_channels],
                                        uint32_t (&codes)[lane_channels]) {
    encoded_row done;
    if (operand.codes == coding::fp8_e4m3 || operand.codes == coding::fp8_e5m2) {
        const bool e4m3 = operand.codes == coding::fp8_e4m3;
        const float scale = operand.scales != nullptr
                                ? Cx::template load_constant<float>(operand.scales + head)
                                : 1.0f;
        const float largest = e4m3 ? 448.0f : 57344.0f;
        KVRT_UNROLL
        for (uint32_t i = 0; i < lane_channels; ++i) {
            const float scaled = row[i] / scale;
            if (active && (scaled > largest || scaled < -largest)) ++done.saturated;
            codes[i] = e4m3 ? f32_to_e4m3<Cx>(scaled) : f32_to_e5m2<Cx>(scaled);
        }
        return done;
    }
    const row_reach reach = reach_of_row<Cx>(row, active);
    if (operand.codes == coding::int4_token) {
        constexpr float largest_f16 = 65504.0f, last_code = 15.0f;
        float least = reach.least < -largest_f16 ? -largest_f16 : reach.least;
        least = largest_f16 < least ? largest_f16 : least;
        float step = (reach.largest - reach.least) / last_code;
        step = largest_f16 < step ? largest_f16 : step;
        const float inverse = reciprocal_of<Cx>(step);
        done.meta = reach.finite ? static_cast<uint32_t>(Cx::f32_to_f16(step)) |
                                       static_cast<uint32_t>(Cx::f32_to_f16(least)) << 16
                                 : 0x7e007e00u;
        const bool lost = step == 0.0f && least != reach.least;
        KVRT_UNROLL
        for (uint32_t i = 0; i < lane_channels; ++i) {
            const float code = (row[i] - least) * inverse + 0.5f;
            const bool beyond = code < 0.0f || code >= last_code + 2.0f;
            if (active && reach.finite) done.saturated += (beyond ? 1u : 0u) + (lost ? 1u : 0u);
            const float kept = code < 0.0f ? 0.0f : last_code < code ? last_code : code;
            codes[i] = reach.finite ? static_cast<uint32_t>(kept) : 0;
        }
        return done;
    }
    const bool int8 = operand.codes == coding::int8_token;
    const float step = token_step<Cx>(reach, int8 ? 127.0f : 448.0f);
    const float inverse = reciprocal_of<Cx>(step);
    done.meta = Cx::f32_to_bits(step);
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels; ++i) {
        codes[i] = !reach.finite ? 0
                   : int8        ? code_of_int8<Cx>(row[i], inverse)
                                 : f32_to_e4m3<Cx>(row[i] * inverse);
    }
    return done;
}

/// The record of a row, word by word.
template <class Cx>
KVRT_DEVICE uint32_t write_record(const operand_place& operand, uint32_t head,
                                  const float (&row)[lane_channels], std::byte* target) {
    const uint32_t lane = Cx::lane();
    const bool active = lane * lane_channels < operand.dim;
    uint32_t codes[lane_channels] = {};
    const encoded_row done = encode_channels<Cx>(operand, head, active, row, codes);
    std::byte* const shared = Cx::shared() + Cx::warp() * most_dim;
    if (active) {
        word2 bytes = {0, 0};
        KVRT_UNROLL
        for (uint32_t i = 0; i < 4; ++i) {
            bytes.x |= codes[i] << (8 * i);
            bytes.y |= codes[4 + i] << (8 * i);
        }
        Cx::store(shared + lane * lane_channels, bytes);
    }
    Cx::warp_barrier();
    const bool nibbles = operand.codes == coding::int4_token;
    const uint32_t code_words = nibbles ? operand.dim / 8 : operand.dim / 4;
    for (uint32_t word = lane; word < operand.words; word += warp_lanes) {
        uint32_t bits = done.meta;
        if (word < code_words) {
            bits = Cx::template load<uint32_t>(shared + word * 4);
            if (nibbles)
                bits |= Cx::template load<uint32_t>(shared + operand.dim / 2 + word * 4) << 4;
        }
        Cx::store(target + word * operand.word_stride, bits);
    }
    return done.saturated;
}

template <class Cx>
KVRT_DEVICE uint16_t to_half_width(float value, number type) {
    return type == number::f16 ? Cx::f32_to_f16(value) : Cx::f32_to_bf16(value);
}

template <class Cx>
KVRT_DEVICE void write_plain(const operand_place& operand, const float (&row)[lane_channels],
                             std::byte* target) {
    const uint32_t first = Cx::lane() * lane_channels;
    if (first >= operand.dim) return;
    std::byte* const at = target + first * operand.word_stride;
    if (operand.type == number::f32) {
        KVRT_UNROLL
        for (uint32_t i = 0; i < lane_channels; ++i) {
            Cx::store(at + i * operand.word_stride, row[i]);
        }
        return;
    }
    uint32_t bits[lane_channels];
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels; ++i) bits[i] = to_half_width<Cx>(row[i], operand.type);
    if (operand.by_rows()) {
        Cx::store(at, word4{bits[0] | bits[1] << 16, bits[2] | bits[3] << 16,
                            bits[4] | bits[5] << 16, bits[6] | bits[7] << 16});
        return;
    }
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels; ++i) {
        Cx::store(at + i * operand.word_stride, static_cast<uint16_t>(bits[i]));
    }
}

/// The kernel.
template <class Cx, number input>
KVRT_DEVICE void write_rows(const write_parameters& call) {
    const uint32_t heads = call.place.kv_heads;
    const uint32_t unit = Cx::block() * (write_threads / warp_lanes) + Cx::warp();
    const uint32_t row_index = unit / (2 * heads);
    if (row_index >= call.rows) return;
    const bool value = unit / heads % 2 != 0;
    const uint32_t head = unit % heads;
    const row_target to{Cx::template load_constant<uint32_t>(&call.targets[row_index].sequence),
                        Cx::template load_constant<uint32_t>(&call.targets[row_index].slot)};
    if (to.sequence == no_sequence) return;

    const operand_place& operand = value ? call.place.values : call.place.keys;
    const tensor_place& tensor = value ? call.values : call.keys;
    float row[lane_channels] = {};
    const uint32_t first = Cx::lane() * lane_channels;
    if (first < operand.dim) {
        const int64_t element = int64_t{row_index} * tensor.row_stride +
                                int64_t{head} * tensor.head_stride +
                                int64_t{first} * tensor.dim_stride;
        load_channels<Cx, input>(tensor.data + element * int64_t{number_bytes(input)},
                                 tensor.dim_stride, row);
    }
    const uint32_t* const table = call.tables.of(to.sequence);
    const uint32_t id =
        Cx::template load_constant<uint32_t>(table + to.slot / call.place.block_tokens);
    std::byte* const target =
        block_at(call.arena, id) + operand.at(to.slot % call.place.block_tokens, head, 0);
    if (operand.codes == coding::plain) return write_plain<Cx>(operand, row, target);

    const uint32_t saturated = write_record<Cx>(operand, head, row, target);
    uint64_t* const counts = value ? call.saturated_values : call.saturated_keys;
    if (counts == nullptr) return;
    const uint32_t all = Cx::reduce_add(saturated);
    if (all != 0 && Cx::lane() == 0) Cx::atomic_add(counts + head, uint64_t{all});
}

}  // namespace kvrt::kernels
