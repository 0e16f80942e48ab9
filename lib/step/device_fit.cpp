#include "step/device_fit.hpp"

#include "step/device_words.hpp"

namespace kvrt {

namespace {

/// A layer's lanes on the host: their blocks one behind the other, and positions of their slots.
struct layer_copy {
    host_allocator own;
    host_array<uint32_t> words;
    word_pieces pieces;  ///< of words, where they are on the device
    host_array<block_id> blocks;
    host_array<uint32_t> positions;
    host_array<fit_rows> lanes;
};

uint64_t words_of_block(const lane_geometry& lane, const lane_state& state, uint32_t block) {
    const tile_layout& layout = block < state.sealed_blocks ? lane.sealed_layout : lane.layout;
    return layout.block_bytes / sizeof(uint32_t);
}

status allocate_copy(const cache& store, const sequence& source, const layer_geometry& layer,
                     layer_copy& copy) {
    uint64_t words = 0, blocks = 0, positions = 0;
    for (uint32_t lane = layer.first_lane; lane < layer.end_lane(); ++lane) {
        const lane_state& state = source.lanes[lane];
        const uint32_t count = store.model.blocks_for(state.slots);
        for (uint32_t b = 0; b < count; ++b) {
            words += words_of_block(store.model.lanes[lane], state, b);
        }
        blocks += count;
        positions += uint64_t{store.model.lanes[lane].kv_heads} * state.slots;
    }
    constexpr const char* what = "keys of a device";
    KVRT_TRY(copy.words.allocate(copy.own, words, what, memory_contents::undefined));
    KVRT_TRY(copy.pieces.allocate(copy.own, words, blocks));
    KVRT_TRY(copy.blocks.allocate(copy.own, blocks, what));
    KVRT_TRY(copy.positions.allocate(copy.own, positions, what));
    return copy.lanes.allocate(copy.own, layer.lanes, what);
}

status copy_keys(step_context& context, const sequence& source, const layer_geometry& layer,
                 layer_copy& copy) {
    cache& store = *context.store;
    uint64_t word = 0, block = 0;
    for (uint32_t i = 0; i < layer.lanes; ++i) {
        const uint32_t lane = layer.first_lane + i;
        const lane_state& state = source.lanes[lane];
        const auto* const arena = static_cast<const std::byte*>(context.verbs.lanes[lane].arena);
        copy.lanes[i].bytes = reinterpret_cast<const std::byte*>(copy.words.data());
        copy.lanes[i].blocks = copy.blocks.data() + block;
        for (uint32_t b = 0; b < store.model.blocks_for(state.slots); ++b) {
            const uint64_t count = words_of_block(store.model.lanes[lane], state, b);
            const auto* const from =
                reinterpret_cast<const uint32_t*>(block_address(arena, state.table[b]));
            copy.blocks[block++] = static_cast<block_id>(word * sizeof(uint32_t) / block_unit);
            copy.pieces.add(from, count);
            word += count;
        }
    }
    return copy.pieces.read(context, copy.words.data());
}

status copy_positions(step_context& context, const sequence& source, const layer_geometry& layer,
                      layer_copy& copy) {
    const cache& store = *context.store;
    uint32_t* out = copy.positions.data();
    for (uint32_t i = 0; i < layer.lanes; ++i) {
        const uint32_t lane = layer.first_lane + i;
        copy.lanes[i].positions = out;
        for (uint32_t head = 0; head < store.model.lanes[lane].kv_heads; ++head) {
            const slot_positions known = positions_of(store, source, lane, head);
            uint32_t first = 0;
            if (device_has_positions(store, source, lane)) {
                first = known.explicit_slots;
                KVRT_TRY(read_positions(context, source, lane, head, first, out));
            }
            for (uint32_t slot = first; slot < known.slots; ++slot) {
                out[slot] = static_cast<uint32_t>(known.at(slot));
            }
            out += known.slots;
        }
    }
    return KV_OK;
}

}  // namespace

status fit_affine_on_device(step_context& context, const sequence& source, affine_fit& fit) {
    const layer_geometry& layer = context.store->model.layers[fit.layer];
    KVRT_TRY(context.rounds.prepare(context));  // what words come back through
    layer_copy copy;
    KVRT_TRY(allocate_copy(*context.store, source, layer, copy));
    KVRT_TRY(copy_keys(context, source, layer, copy));
    KVRT_TRY(copy_positions(context, source, layer, copy));
    return fit_affine(*context.store, source, copy.lanes.data(), fit);
}

}  // namespace kvrt
