#include "model/turning.hpp"

#include <algorithm>
#include <cmath>

namespace kvrt {

namespace {

bool needs_turning(const lane_geometry& lane) { return lane.layout.keys.format->needs_positions; }

bool equal(const rope_description& a, const rope_description& b) {
    return a.style == b.style && a.dimensions == b.dimensions &&
           a.attention_factor == b.attention_factor &&
           std::equal(a.inverse_frequencies, a.inverse_frequencies + a.rotated_bands(),
                      b.inverse_frequencies);
}

status check(const layer_geometry& layer, const lane_geometry& lane) {
    if (!layer.rope_known) {
        return fail(KV_INVALID,
                    "layer {}: {} needs kv_rope, to turn means of keys by positions: say "
                    "KV_ROPE_NONE if they are not rotated",
                    lane.layer, lane.layout.keys.format->name);
    }
    const float gain = static_cast<float>(layer.rope.attention_factor);
    if (!std::isnormal(gain)) {
        return fail(KV_INVALID, "layer {}: rope attention_factor {} is out of reach for {}",
                    lane.layer, layer.rope.attention_factor, lane.layout.keys.format->name);
    }
    return KV_OK;
}

void fill(const rope_description& rope, float*& next, position_rotation& out) {
    out.pairs = rope.rotated_bands();
    out.interleaved = rope.style == KV_ROPE_INTERLEAVED;
    out.gain = static_cast<float>(rope.attention_factor);
    out.table = next;
    fill_turning_table(rope.inverse_frequencies, out.pairs, next);
    next += turning_table_floats(out.pairs);
}

}  // namespace

status make_turnings(host_allocator& allocator, model_geometry& model) {
    const auto rope_of = [&](const lane_geometry& lane) -> const rope_description& {
        return model.layers[lane.layer].rope;
    };
    // The first lane of each rotation, by lane; the lane itself where it is the first.
    host_array<uint32_t> firsts;
    host_allocator own;
    KVRT_TRY(firsts.allocate(own, model.lanes.size(), "rotations"));
    uint64_t count = 0, floats = 0;
    for (uint32_t i = 0; i < model.lanes.size(); ++i) {
        if (!needs_turning(model.lanes[i])) continue;
        const rope_description& rope = rope_of(model.lanes[i]);
        KVRT_TRY(check(model.layers[model.lanes[i].layer], model.lanes[i]));
        uint32_t first = 0;
        while (first < i && !(needs_turning(model.lanes[first]) && firsts[first] == first &&
                              equal(rope_of(model.lanes[first]), rope))) {
            ++first;
        }
        firsts[i] = first;
        if (first != i) continue;
        ++count;
        floats += turning_table_floats(rope.rotated_bands());
    }
    KVRT_TRY(model.turnings.allocate(allocator, count, "rotations"));
    KVRT_TRY(model.turning_tables.allocate(allocator, floats, "tables of rotations",
                                           memory_contents::undefined));
    position_rotation* next_turning = model.turnings.data();
    float* next_float = model.turning_tables.data();
    for (uint32_t i = 0; i < model.lanes.size(); ++i) {
        lane_geometry& lane = model.lanes[i];
        if (!needs_turning(lane)) continue;
        if (firsts[i] == i) {
            fill(rope_of(lane), next_float, *next_turning);
            lane.layout.keys.turning = next_turning++;
        } else {
            lane.layout.keys.turning = model.lanes[firsts[i]].layout.keys.turning;
        }
        lane.sealed_layout.keys.turning = lane.layout.keys.turning;
    }
    return KV_OK;
}

}  // namespace kvrt
