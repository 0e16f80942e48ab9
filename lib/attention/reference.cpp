// The oracle of attention: one row and one head at a time, in double, straight from the definition.
#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/attend.hpp"
#include "format/rows.hpp"

namespace kvrt {

namespace {

struct row_of_item {
    const attend_call& call;
    const attend_item& item;
    uint32_t row;   ///< within the item
    uint32_t head;  ///< query head

    uint32_t kv_head() const { return head / (call.layer->query_heads / call.layer->kv_heads); }
    uint64_t position() const { return item.next_position - item.rows + row; }

    bool sees(uint32_t slot) const {
        if (slot >= item.slots - (item.rows - 1 - row)) return false;
        if (call.layer->window == 0 || slot < call.layer->window_sinks) return true;
        return int64_t{slot} >= item.window_first + int64_t{row};
    }
    uint64_t position_of(uint32_t slot) const {
        if (slot >= item.explicit_slots) return item.next_position - (item.slots - slot);
        return call.positions_of(item).of(item.blocks, slot, kv_head());
    }
    /// The stored row of a slot, as numbers.
    const float* stored(operand_layout tile_layout::*which, uint32_t slot,
                        float* row_buffer) const {
        const uint32_t block_tokens = call.layer->layout.block_tokens;
        const bool sealed = slot / block_tokens < item.sealed_blocks;
        const operand_layout& operand =
            (sealed ? call.layer->sealed_layout : call.layer->layout).*which;
        const std::byte* block = block_address(call.arena, item.blocks[slot / block_tokens]);
        const uint64_t place = operand.format->needs_positions ? position_of(slot) : 0;
        read_row(operand, block, slot % block_tokens, kv_head(), static_cast<uint32_t>(place),
                 row_buffer);
        return row_buffer;
    }

    /// As rotary embedding does where keys are turned by slots.
    void turn(uint32_t slot, double* numbers) const {
        const position_rotation& rotation = *call.layer->slot_turning;
        for (uint32_t b = 0; b < rotation.pairs; ++b) {
            double& x = numbers[rotation.interleaved ? 2 * b : b];
            double& y = numbers[rotation.interleaved ? 2 * b + 1 : rotation.pairs + b];
            const double angle = slot * rotation.inverse_frequencies[b];
            const double real = double{rotation.gain} * (x * std::cos(angle) - y * std::sin(angle));
            y = double{rotation.gain} * (x * std::sin(angle) + y * std::cos(angle));
            x = real;
        }
    }

    double logit(uint32_t slot) const {
        const attend_layer& layer = *call.layer;
        float buffer[widest_row];
        const uint32_t dim = layer.layout.keys.dim;
        const float* stored_key = stored(&tile_layout::keys, slot, buffer);
        double key[widest_row], query[widest_row];
        for (uint32_t d = 0; d < dim; ++d) {
            key[d] = double{stored_key[d]};
            query[d] = double{
                load_element(call.queries.at(item.first_row + row, head, d), call.queries.type)};
        }
        if (layer.slot_turning != nullptr) {
            turn(slot, key);
            turn(item.slots - item.rows + row, query);
        }
        double sum = 0.0;
        for (uint32_t d = 0; d < dim; ++d) sum += query[d] * key[d];
        sum *= layer.scale;
        if (layer.softcap != 0.0f) sum = layer.softcap * std::tanh(sum / layer.softcap);
        if (layer.alibi_slopes != nullptr) {
            sum += double{layer.alibi_slopes[head]} *
                   (static_cast<double>(position_of(slot)) - static_cast<double>(position()));
        }
        return sum;
    }

    double sink() const {
        return call.layer->sink_logits != nullptr ? double{call.layer->sink_logits[head]}
                                                  : -std::numeric_limits<double>::infinity();
    }

    void attend() const {
        const attend_layer& layer = *call.layer;
        const uint32_t dims = layer.layout.values.dim;
        double largest = sink();
        for (uint32_t slot = 0; slot < item.slots; ++slot) {
            if (sees(slot)) largest = std::max(largest, logit(slot));
        }
        double denominator = std::exp(sink() - largest);
        if (!std::isfinite(largest)) denominator = 0.0;
        double out[widest_row] = {};
        float buffer[widest_row];
        for (uint32_t slot = 0; slot < item.slots; ++slot) {
            if (!sees(slot) || largest == -std::numeric_limits<double>::infinity()) continue;
            const double weight = std::exp(logit(slot) - largest);
            denominator += weight;
            const float* value = stored(&tile_layout::values, slot, buffer);
            for (uint32_t d = 0; d < dims; ++d) out[d] += weight * double{value[d]};
        }
        for (uint32_t d = 0; d < dims; ++d) {
            const double value = denominator != 0.0 ? out[d] / denominator : 0.0;
            store_element(call.out.at(item.first_row + row, head, d), call.out.type,
                          static_cast<float>(value));
        }
        if (call.log_sum_exp != nullptr) {
            call.log_sum_at(item.first_row + row, head) =
                static_cast<float>(largest + std::log(denominator));
        }
    }
};

}  // namespace

void attend_reference(const attend_call& call) {
    for (uint32_t i = 0; i < call.item_count; ++i) {
        for (uint32_t row = 0; row < call.items[i].rows; ++row) {
            for (uint32_t head = 0; head < call.layer->query_heads; ++head) {
                row_of_item{call, call.items[i], row, head}.attend();
            }
        }
    }
}

}  // namespace kvrt
