// Keys and values of any storage: a warp opens 16 slots to f16 in shared memory as it fetches them,
// each row divided by a power of two near its largest number, so that f16 holds any. From there on
// they are rows of f16; a key's power is applied to its column of S, a value's to its weight.
//
// What is opened is there at once, so there is one stage.
#pragma once

#include "kernels/attend_softmax.hpp"
#include "kernels/decode.hpp"

namespace kvrt::kernels {

template <class Cx, uint32_t most_channels>
struct opened_tiles {
    using rows = half_tiles<Cx, number::f16, most_channels>;

    static constexpr number query_type = number::f16;
    static constexpr number weight_type = number::f16;
    static constexpr bool coded = true;
    static constexpr bool has_least = false;
    static constexpr uint32_t channels = most_channels;
    static constexpr uint32_t stages = 1;
    static constexpr bool turns = true;  ///< knows attend_parameters::turning
    static constexpr uint32_t row_lanes = most_channels / lane_channels;
    static constexpr bool early = channels <= 128;

    /// Rows, then the power of each.
    static KVRT_BOTH uint32_t rows_bytes(const operand_place& operand) {
        return slots_of_group * odd_row(whole_steps(operand.dim));
    }
    static KVRT_BOTH uint32_t key_bytes(const operand_place& keys) {
        return rows_bytes(keys) + slots_of_group * sizeof(float);
    }
    static KVRT_BOTH uint32_t value_bytes(const operand_place& values) { return key_bytes(values); }
    static KVRT_DEVICE uint32_t column_of(const operand_place&, uint32_t channel) {
        return channel;
    }
    static KVRT_DEVICE uint32_t channel_of(const operand_place&, uint32_t tile, uint32_t column) {
        return tile * 8 + column;
    }

    static KVRT_DEVICE void fetch_keys(const operand_place& keys, const group_source& from,
                                       std::byte* shared) {
        open<true>(keys, from, shared);
    }
    static KVRT_DEVICE void fetch_values(const operand_place& values, const group_source& from,
                                         std::byte* shared) {
        open<false>(values, from, shared);
    }

    template <class fragments>
    static KVRT_DEVICE void multiply_keys(const operand_place& keys, const std::byte* shared,
                                          const fragments& queries, float (&scores)[2][4]) {
        rows::template multiply_key_rows<early>(keys, shared, queries, scores);
    }
    static KVRT_DEVICE float key_product(const operand_place& keys, const std::byte* shared,
                                         uint32_t, uint32_t slot, float product, float) {
        return product * power_of(keys, shared, slot);
    }

    /// Turns weights into weights times powers, relative to heaviest.
    static KVRT_DEVICE void weigh_values(const operand_place& values, uint32_t,
                                         const std::byte* shared, const uint32_t (&visible)[2],
                                         const float (&scores)[2][4], float (&weights)[2][4],
                                         float (&rescale)[2],
                                         running_softmax<opened_tiles>& state) {
        float logits[2][4];
        KVRT_UNROLL
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t slot = i / 2 * 8 + Cx::lane() % 4 * 2 + i % 2;
            const float log_power = Cx::log2(power_of(values, shared, slot));
            KVRT_UNROLL
            for (uint32_t half = 0; half < 2; ++half) {
                const float logit = scores[i / 2][half * 2 + i % 2];
                const bool seen = (visible[half] >> slot & 1u) != 0;
                logits[i / 2][half * 2 + i % 2] = seen ? logit + log_power : logit;
            }
        }
        weigh_by_steps<Cx, opened_tiles>(logits, weights, rescale, state);
    }

    static KVRT_DEVICE bool spoils(const operand_place& values, const std::byte* shared,
                                   uint32_t visible) {
        return rows::spoils(values, shared, visible);
    }
    template <bool apart = false>
    static KVRT_DEVICE void multiply_values(const operand_place& values, const std::byte* shared,
                                            const uint32_t (&weights)[4], uint32_t visible,
                                            float (&out)[most_channels / 8][4], uint32_t own = 3) {
        rows::template multiply_values<apart, early>(values, shared, weights, visible, out, own);
    }

  private:
    static KVRT_DEVICE float power_of(const operand_place& operand, const std::byte* shared,
                                      uint32_t slot) {
        return Cx::template load<float>(shared + rows_bytes(operand) + slot * sizeof(float));
    }

    static KVRT_DEVICE uint32_t position_of(const group_source& from, uint32_t slot) {
        const bool stored = slot < from.positions.stored_slots && (from.seen >> slot & 1u) != 0;
        return stored ? Cx::template load_constant<uint32_t>(from.positions.stored + slot)
                      : from.positions.implied + slot;
    }

    /// Some lanes a row, 8 channels each. What is not seen becomes 0.
    template <bool keys>
    static KVRT_DEVICE void open(const operand_place& operand, const group_source& from,
                                 std::byte* shared) {
        const uint32_t first = Cx::lane() % row_lanes * lane_channels;
        KVRT_ROLLED  // or registers do not do
            for (uint32_t slot = Cx::lane() / row_lanes; slot < slots_of_group;
                 slot += warp_lanes / row_lanes) {
            float row[lane_channels] = {};
            if (first < operand.dim && (from.seen >> slot & 1u) != 0) {
                open_channels<Cx>(operand, from.block, from.slot + slot, from.head, first, row);
            }
            if constexpr (keys) {
                if (operand.codes == coding::affine4) {
                    unlevel_channels<Cx>(operand, from.head, position_of(from, slot), first, row);
                }
                if (from.turning->pairs != 0) {
                    if (operand.rotated) rotate_channels<Cx>(operand.dim, row);
                    turn_channels<Cx>(*from.turning, from.in_context + slot, first, row);
                }
            }
            float largest = 0.0f;
            KVRT_UNROLL
            for (uint32_t i = 0; i < lane_channels; ++i) {
                const float magnitude = magnitude_of<Cx>(row[i]);
                largest = magnitude > largest ? magnitude : largest;
            }
            KVRT_UNROLL
            for (uint32_t bits = 1; bits < row_lanes; bits *= 2) {
                const float other = Cx::shuffle_xor(largest, bits);
                largest = other > largest ? other : largest;
            }
            const power_of_two power = power_near<Cx>(largest);
            KVRT_UNROLL
            for (uint32_t i = 0; i < lane_channels; ++i) row[i] *= power.inverse;
            if (first < whole_steps(operand.dim)) {
                std::byte* const to = shared + slot * odd_row(whole_steps(operand.dim));
                store_channels<Cx>(number::f16, to + first * 2, 2, row);
            }
            if (first == 0) {
                Cx::store(shared + rows_bytes(operand) + slot * sizeof(float), power.power);
            }
        }
    }
};

}  // namespace kvrt::kernels
