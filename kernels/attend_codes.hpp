// Keys and values in codes of 8 and 4 bits, read in place: native key tiles (words of a record side
// by side for 16 slots) and records of values. Codes become f16, which holds all of them; steps and
// least numbers never touch them. A key's step and least number are applied to its column of S. A
// value's step goes into its weight: weight * step = exp2(logit + log2(step)), with a running
// maximum of its own, so that f16 holds any.
//
// k and n of fragments are chosen so that a lane reads whole words: it has the four channels of a
// key's word as k = 2q, 2q + 1, 2q + 8, 2q + 9, and the four channels of a value's word in as many
// tiles of O (q is lane % 4).
#pragma once

#include "kernels/attend_softmax.hpp"

namespace kvrt::kernels {

/// Codes of bytes 0, 1 and of bytes 2, 3 of a word as pairs of f16, times 1 / code_unit.
template <class Cx>
KVRT_DEVICE void bytes_to_f16(coding codes, uint32_t word, uint32_t (&pairs)[2]) {
    if (codes == coding::fp8_e5m2) {  // the upper halves of f16
        pairs[0] = Cx::permute_bytes(word, 0, 0x1404);
        pairs[1] = Cx::permute_bytes(word, 0, 0x3424);
        return;
    }
    if (codes == coding::fp8_token || codes == coding::fp8_e4m3) {
        // Exponent and mantissa move one bit down, which divides by 256.
        KVRT_UNROLL
        for (uint32_t i = 0; i < 2; ++i) {
            const uint32_t upper = Cx::permute_bytes(word, 0, i == 0 ? 0x1404 : 0x3424);
            pairs[i] = (upper & 0x80008000u) | (upper & 0x7f007f00u) >> 1;
        }
        if ((((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) == 0) return;
        KVRT_UNROLL
        for (uint32_t i = 0; i < 4; ++i) {
            if ((word >> (8 * i) & 0x7fu) == 0x7fu) pairs[i / 2] |= 0x7fffu << (16 * (i % 2));
        }
        return;
    }
    // 1024 + code, less what is too much.
    const bool nibbles = codes == coding::int4_token;
    const uint32_t biased = nibbles ? word : word ^ 0x80808080u;
    const uint32_t excess = nibbles ? 0xe400e400u : 0xe480e480u;  // -1024, -1152
    pairs[0] = Cx::add_f16x2(Cx::permute_bytes(biased, 0x64646464u, 0x4140), excess);
    pairs[1] = Cx::add_f16x2(Cx::permute_bytes(biased, 0x64646464u, 0x4342), excess);
}

KVRT_BOTH constexpr float code_unit(coding codes) {
    return codes == coding::fp8_token || codes == coding::fp8_e4m3 ? 256.0f : 1.0f;
}

/// Nibbles are int4_token, else any of bytes.
template <class Cx, bool key_nibbles, bool value_nibbles, uint32_t most_channels>
struct code_tiles {
    static constexpr number query_type = number::f16;
    static constexpr number weight_type = number::f16;
    static constexpr bool coded = true;
    static constexpr bool has_least = value_nibbles;  ///< values do
    static constexpr uint32_t channels = most_channels;
    static constexpr uint32_t stages = channels <= 128 ? 3 : 2;
    static constexpr bool turns = false;  ///< knows attend_parameters::turning
    // Of a row, in the nibbles of a byte.
    static constexpr uint32_t key_halves = key_nibbles ? 2 : 1;
    static constexpr uint32_t value_halves = value_nibbles ? 2 : 1;

    static KVRT_BOTH uint32_t key_bytes(const operand_place& keys) { return keys.words * 64; }
    static KVRT_BOTH uint32_t value_bytes(const operand_place& values) { return values.words * 64; }
    static KVRT_BOTH uint32_t code_words(const operand_place& operand) {
        return operand.codes == coding::int4_token ? operand.dim / 8 : operand.dim / 4;
    }
    /// Steps of 4 words, for each half of the row.
    static KVRT_DEVICE uint32_t word_steps(const operand_place& operand) {
        return (code_words(operand) + 3) / 4;
    }

    static KVRT_DEVICE uint32_t column_of(const operand_place& keys, uint32_t channel) {
        const uint32_t in_half = keys.dim / key_halves;
        const uint32_t half = channel / in_half, at = channel % in_half;
        const uint32_t q = at / 4 % 4, i = at % 4;
        return (at / 16 * key_halves + half) * 16 + (i / 2) * 8 + q * 2 + i % 2;
    }
    static KVRT_DEVICE uint32_t channel_of(const operand_place& values, uint32_t tile,
                                           uint32_t column) {
        const uint32_t in_half = values.dim / value_halves;
        const uint32_t half = tile / 4 % value_halves;
        const uint32_t word = tile / (4 * value_halves) * 8 + column;
        return word * 4 < in_half ? half * in_half + word * 4 + tile % 4 : most_dim;
    }

    /// A word's 16 slots are 64 bytes, whose halves change places every other word: so four words
    /// of 8 slots fall into all banks.
    static KVRT_DEVICE uint32_t key_at(uint32_t word, uint32_t slot) {
        return word * 64 + (slot ^ (word / 2 % 2) * 8) * 4;
    }

    static KVRT_DEVICE void fetch_keys(const operand_place& keys, const group_source& from,
                                       std::byte* shared) {
        const std::byte* const tile = from.block + keys.at(from.slot, from.head, 0);
        for (uint32_t i = Cx::lane(); i < keys.words * 4; i += warp_lanes) {
            Cx::copy_async(shared + key_at(i / 4, i % 4 * 4), tile + i * 16);
        }
    }
    /// Records of 16 slots are one piece.
    static KVRT_DEVICE void fetch_values(const operand_place& values, const group_source& from,
                                         std::byte* shared) {
        const std::byte* const records = from.block + values.at(from.slot, from.head, 0);
        for (uint32_t i = Cx::lane(); i < values.words * 4; i += warp_lanes) {
            Cx::copy_async(shared + i * 16, records + i * 16);
        }
    }

    template <class fragments>
    static KVRT_DEVICE void multiply_keys(const operand_place& keys, const std::byte* shared,
                                          const fragments& queries, float (&scores)[2][4]) {
        const uint32_t q = Cx::lane() % 4, column = Cx::lane() / 4;
        const uint32_t steps = word_steps(keys), words = code_words(keys);
        KVRT_UNROLL
        for (uint32_t step = 0; step < most_channels / 16 / key_halves; ++step) {
            if (step >= steps) break;
            uint32_t word[2] = {0, 0};
            if (step * 4 + q < words) {
                word[0] = Cx::template load<uint32_t>(shared + key_at(step * 4 + q, column));
                word[1] = Cx::template load<uint32_t>(shared + key_at(step * 4 + q, column + 8));
            }
            KVRT_UNROLL
            for (uint32_t half = 0; half < key_halves; ++half) {
                uint32_t a[4], first[2], second[2];
                queries.of_step(step * key_halves + half, a);
                bytes_to_f16<Cx>(keys.codes, codes_of<key_nibbles>(word[0], half), first);
                bytes_to_f16<Cx>(keys.codes, codes_of<key_nibbles>(word[1], half), second);
                Cx::template multiply<number::f16>(scores[0], a, first);
                Cx::template multiply<number::f16>(scores[1], a, second);
            }
        }
    }

    /// The product with a key, from that with its codes.
    static KVRT_DEVICE float key_product(const operand_place& keys, const std::byte* shared,
                                         uint32_t head, uint32_t slot, float product,
                                         float query_sum) {
        if constexpr (key_nibbles) {
            const uint32_t meta =
                Cx::template load<uint32_t>(shared + key_at(code_words(keys), slot));
            const float step = Cx::f16_to_f32(static_cast<uint16_t>(meta));
            const float least = Cx::f16_to_f32(static_cast<uint16_t>(meta >> 16));
            return Cx::multiply_add(product, step, query_sum * least);
        }
        if (keys.codes == coding::fp8_e4m3 || keys.codes == coding::fp8_e5m2) {
            return product * (static_step(keys, head) * code_unit(keys.codes));
        }
        const float step = Cx::template load<float>(shared + key_at(code_words(keys), slot));
        return product * (step * code_unit(keys.codes));
    }

    /// Turns weights into weights times steps, relative to heaviest; gathers least numbers.
    static KVRT_DEVICE void weigh_values(const operand_place& values, uint32_t kv_head,
                                         const std::byte* shared, const uint32_t (&visible)[2],
                                         const float (&scores)[2][4], float (&weights)[2][4],
                                         float (&rescale)[2], running_softmax<code_tiles>& state) {
        float logits[2][4];
        KVRT_UNROLL
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t slot = i / 2 * 8 + Cx::lane() % 4 * 2 + i % 2;
            const std::byte* const meta = shared + (slot * values.words + code_words(values)) * 4;
            float step = 0.0f, least = 0.0f;
            if constexpr (value_nibbles) {
                const uint32_t both = Cx::template load<uint32_t>(meta);
                step = Cx::f16_to_f32(static_cast<uint16_t>(both));
                least = Cx::f16_to_f32(static_cast<uint16_t>(both >> 16));
            } else if (values.codes == coding::fp8_e4m3 || values.codes == coding::fp8_e5m2) {
                step = static_step(values, kv_head) * code_unit(values.codes);
            } else {
                step = Cx::template load<float>(meta) * code_unit(values.codes);
            }
            const float log_step = Cx::log2(step);
            KVRT_UNROLL
            for (uint32_t half = 0; half < 2; ++half) {
                const bool seen = (visible[half] >> slot & 1u) != 0;
                const float logit = scores[i / 2][half * 2 + i % 2];
                logits[i / 2][half * 2 + i % 2] = seen ? logit + log_step : logit;
                if constexpr (value_nibbles) {
                    const float weight = weights[i / 2][half * 2 + i % 2];
                    if (seen)
                        state.least[half] = Cx::multiply_add(weight, least, state.least[half]);
                }
            }
        }
        weigh_by_steps<Cx, code_tiles>(logits, weights, rescale, state);
    }

    /// half_tiles. Codes of whole numbers have none that spoils others, and steps are in weights.
    static KVRT_DEVICE bool spoils(const operand_place& values, const std::byte* shared,
                                   uint32_t visible) {
        uint32_t excess = 0;  // what takes codes that are no numbers to the sign
        if (values.codes == coding::fp8_token || values.codes == coding::fp8_e4m3) {
            excess = 0x01010101u;
        } else if (values.codes == coding::fp8_e5m2) {
            excess = 0x04040404u;
        }
        const uint32_t words = code_words(values);
        bool found = false;
        for (uint32_t i = Cx::lane(); excess != 0 && i < slots_of_group * words; i += warp_lanes) {
            if ((visible >> (i / words) & 1u) == 0) continue;
            const uint32_t word =
                Cx::template load<uint32_t>(shared + (i / words * values.words + i % words) * 4);
            found = found || (((word & 0x7f7f7f7fu) + excess) & 0x80808080u) != 0;
        }
        return found;
    }

    template <bool apart = false>
    static KVRT_DEVICE void multiply_values(const operand_place& values, const std::byte* shared,
                                            const uint32_t (&weights)[4], uint32_t visible,
                                            float (&out)[most_channels / 8][4], uint32_t own = 3) {
        const uint32_t q = Cx::lane() % 4, column = Cx::lane() / 4;
        const uint32_t words = code_words(values);
        const uint32_t slots[4] = {2 * q, 2 * q + 1, 2 * q + 8, 2 * q + 9};
        KVRT_UNROLL
        for (uint32_t step = 0; step < most_channels / 32 / value_halves; ++step) {
            if (step * 8 >= words) break;
            uint32_t word[4];
            KVRT_UNROLL
            for (uint32_t i = 0; i < 4; ++i) {
                const bool there = step * 8 + column < words && (visible >> slots[i] & 1u) != 0;
                word[i] = there ? Cx::template load<uint32_t>(
                                      shared + (slots[i] * values.words + step * 8 + column) * 4)
                                : 0;
            }
            KVRT_UNROLL
            for (uint32_t half = 0; half < value_halves; ++half) {
                // Pairs of slots side by side, two channels in a word.
                uint32_t pairs[2][4];
                KVRT_UNROLL
                for (uint32_t i = 0; i < 2; ++i) {
                    const uint32_t even = codes_of<value_nibbles>(word[2 * i], half);
                    const uint32_t odd = codes_of<value_nibbles>(word[2 * i + 1], half);
                    uint32_t low[2], high[2];
                    bytes_to_f16<Cx>(values.codes, Cx::permute_bytes(even, odd, 0x5140), low);
                    bytes_to_f16<Cx>(values.codes, Cx::permute_bytes(even, odd, 0x7362), high);
                    pairs[i][0] = low[0];
                    pairs[i][1] = low[1];
                    pairs[i][2] = high[0];
                    pairs[i][3] = high[1];
                }
                KVRT_UNROLL
                for (uint32_t channel = 0; channel < 4; ++channel) {
                    const uint32_t b[2] = {pairs[0][channel], pairs[1][channel]};
                    accumulate<Cx, number::f16, apart>(
                        out[(step * value_halves + half) * 4 + channel], weights, b, own);
                }
            }
        }
    }

  private:
    template <bool nibbles>
    static KVRT_DEVICE uint32_t codes_of(uint32_t word, uint32_t half) {
        if constexpr (!nibbles) return word;
        return (half == 0 ? word : word >> 4) & 0x0f0f0f0fu;
    }
    static KVRT_DEVICE float static_step(const operand_place& operand, uint32_t head) {
        return operand.scales == nullptr ? 1.0f
                                         : Cx::template load_constant<float>(operand.scales + head);
    }
};

}  // namespace kvrt::kernels
