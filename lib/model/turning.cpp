#include "model/turning.hpp"

#include <algorithm>
#include <cmath>

namespace kvrt {

namespace {

bool equal(const rope_description& a, const rope_description& b) {
    return a.style == b.style && a.dimensions == b.dimensions &&
           a.attention_factor == b.attention_factor &&
           std::equal(a.inverse_frequencies, a.inverse_frequencies + a.rotated_bands(),
                      b.inverse_frequencies);
}

status check_rope(const layer_geometry& layer, uint32_t index, const char* who, const char* why) {
    if (!layer.rope_known) {
        return fail(KV_INVALID,
                    "layer {}: {} needs kv_rope, {}: say KV_ROPE_NONE if they are not rotated",
                    index, who, why);
    }
    if (!std::isnormal(static_cast<float>(layer.rope.attention_factor))) {
        return fail(KV_INVALID, "layer {}: rope attention_factor {} is out of reach for {}", index,
                    layer.rope.attention_factor, who);
    }
    return KV_OK;
}

/// Calls take(rope, place for what is made of it) for each layer that turns keys: as its format
/// stores them, as attention reads them, or both.
template <class callable>
void for_each_turning(model_geometry& model, const callable& take) {
    for (layer_geometry& layer : model.layers) {
        if (!layer.stores) continue;
        operand_layout& stored = model.lanes[layer.first_lane].layout.keys;
        if (stored.format->needs_positions) take(layer.stored_rope(), stored.turning);
        if (layer.slot_rotated()) take(layer.rope, layer.slot_turning);
    }
}

void fill(const rope_description& rope, float*& next, position_rotation& out) {
    out.pairs = rope.rotated_bands();
    out.interleaved = rope.style == KV_ROPE_INTERLEAVED;
    out.gain = static_cast<float>(rope.attention_factor);
    out.table = next;
    out.inverse_frequencies = rope.inverse_frequencies;
    fill_turning_table(rope.inverse_frequencies, out.pairs, next);
    next += turning_table_floats(out.pairs);
}

/// All lanes of a layer store keys as its first does; layers that share attend as their owner does.
void spread(model_geometry& model) {
    for (layer_geometry& layer : model.layers) {
        const lane_geometry& first = model.lanes[layer.first_lane];
        if (!layer.stores) layer.slot_turning = model.layers[first.layer].slot_turning;
        const position_rotation* turning = first.layout.keys.turning;
        for (uint32_t lane = layer.first_lane; lane < layer.end_lane(); ++lane) {
            model.lanes[lane].layout.keys.turning = turning;
            model.lanes[lane].sealed_layout.keys.turning = turning;
        }
    }
}

}  // namespace

status make_turnings(host_allocator& allocator, model_geometry& model) {
    for (uint32_t i = 0; i < model.layers.size(); ++i) {
        const layer_geometry& layer = model.layers[i];
        if (!layer.stores) continue;
        const format_description& keys = *model.lanes[layer.first_lane].layout.keys.format;
        if (keys.needs_positions) {
            KVRT_TRY(check_rope(layer, i, keys.name, "to turn means of keys by positions"));
        }
        if (layer.cache_positions) {
            KVRT_TRY(check_rope(layer, i, "KV_LAYER_CACHE_POSITIONS",
                                "to rotate queries and keys by slots"));
        }
    }
    // The rotations that differ, in the order in which they come.
    host_array<const rope_description*> ropes;
    host_allocator own;
    KVRT_TRY(ropes.allocate(own, 2 * model.layers.size(), "rotations"));
    uint64_t count = 0, floats = 0;
    const auto find = [&](const rope_description& rope) {
        const auto end = ropes.begin() + count;
        return static_cast<uint64_t>(
            std::find_if(ropes.begin(), end,
                         [&](const rope_description* known) { return equal(*known, rope); }) -
            ropes.begin());
    };
    for_each_turning(model, [&](const rope_description& rope, const position_rotation*&) {
        if (find(rope) != count) return;
        ropes[count++] = &rope;
        floats += turning_table_floats(rope.rotated_bands());
    });
    KVRT_TRY(model.turnings.allocate(allocator, count, "rotations"));
    KVRT_TRY(model.turning_tables.allocate(allocator, floats, "tables of rotations",
                                           memory_contents::undefined));
    float* next = model.turning_tables.data();
    for (uint64_t i = 0; i < count; ++i) fill(*ropes[i], next, model.turnings[i]);
    for_each_turning(model, [&](const rope_description& rope, const position_rotation*& made) {
        made = &model.turnings[find(rope)];
    });
    spread(model);
    return KV_OK;
}

}  // namespace kvrt
