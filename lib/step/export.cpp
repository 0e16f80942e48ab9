// Export of block tables, slot maps and lengths for engines with their own kernels.
#include <algorithm>
#include <numeric>

#include "step/step.hpp"

namespace kvrt {

uint32_t units_per_id(const block_store& blocks, const lane_geometry& lane) {
    return std::gcd(std::gcd(blocks.units_per_block(lane.class_index),
                             blocks.units_per_block(lane.sealed_class_index)),
                    units_per_slab);
}

namespace {

struct exporter {
    const step& source;
    const cache& store;
    const lane_geometry& lane;
    uint32_t lane_index;
    kv_tables& tables;

    const lane_state& state(uint32_t item) const {
        return source.arrays->items[item].owner->lanes[lane_index];
    }
    uint32_t slots(uint32_t item) const {
        return state(item).slots + source.arrays->items[item].rows;
    }
    uint32_t block_count(uint32_t item) const { return store.model.blocks_for(slots(item)); }
};

/// What is said of words where there are none: a sealed operand that lies in tiles.
constexpr operand_layout in_tiles = {.word_bytes = 0};

void describe(const exporter& from) {
    kv_tables& tables = from.tables;
    const tile_layout& layout = from.lane.layout;
    tables.item_count = from.source.item_count;
    tables.token_count = from.source.rows;
    tables.max_blocks = 0;
    tables.indices_count = 0;
    tables.slot_positions_count = 0;
    for (uint32_t i = 0; i < from.source.item_count; ++i) {
        tables.max_blocks = std::max(tables.max_blocks, from.block_count(i));
        tables.indices_count += from.block_count(i);
        tables.slot_positions_count += uint64_t{from.slots(i)} * layout.kv_heads;
    }
    tables.layout = static_cast<uint32_t>(layout.order);
    tables.key_format = layout.keys.format->id;
    tables.value_format = layout.values.format->id;
    tables.block_tokens = layout.block_tokens;
    tables.slot_group = slot_group;
    tables.base = from.store.blocks.arena();
    tables.block_stride = int64_t{units_per_id(from.store.blocks, from.lane)} * block_unit;
    tables.block_bytes = layout.block_bytes;
    tables.key_offset = layout.keys.offset;
    tables.value_offset = layout.values.offset;
    tables.key_stride_group = layout.keys.group_stride;
    tables.key_stride_slot = layout.keys.slot_stride;
    tables.key_stride_head = layout.keys.head_stride;
    tables.key_stride_dim = layout.keys.word_stride;
    tables.value_stride_group = layout.values.group_stride;
    tables.value_stride_slot = layout.values.slot_stride;
    tables.value_stride_head = layout.values.head_stride;
    tables.value_stride_dim = layout.values.word_stride;
    tables.fence = from.source.number;
    tables.key_scales = layout.keys.plain() ? nullptr : layout.keys.scales;
    tables.value_scales = layout.values.plain() ? nullptr : layout.values.scales;
    tables.key_words = layout.keys.words;
    tables.value_words = layout.values.words;
    tables.key_word_bytes = layout.keys.word_bytes;
    tables.value_word_bytes = layout.values.word_bytes;
    const tile_layout& sealed = from.lane.sealed_layout;
    tables.sealed_key_format = sealed.keys.format->id;
    tables.sealed_value_format = sealed.values.format->id;
    tables.sealed_block_bytes = sealed.block_bytes;
    tables.sealed_key_offset = sealed.keys.offset;
    tables.sealed_value_offset = sealed.values.offset;
    tables.sealed_key_head_bytes = sealed.keys.tile_at(1) - sealed.keys.offset;
    tables.sealed_value_head_bytes = sealed.values.tile_at(1) - sealed.values.offset;
    const operand_layout& keys = sealed.keys.tiled() ? in_tiles : sealed.keys;
    const operand_layout& values = sealed.values.tiled() ? in_tiles : sealed.values;
    tables.sealed_key_words = keys.words;
    tables.sealed_value_words = values.words;
    tables.sealed_key_word_bytes = keys.word_bytes;
    tables.sealed_value_word_bytes = values.word_bytes;
    tables.sealed_key_stride_group = keys.group_stride;
    tables.sealed_key_stride_slot = keys.slot_stride;
    tables.sealed_key_stride_head = keys.head_stride;
    tables.sealed_key_stride_dim = keys.word_stride;
    tables.sealed_value_stride_group = values.group_stride;
    tables.sealed_value_stride_slot = values.slot_stride;
    tables.sealed_value_stride_head = values.head_stride;
    tables.sealed_value_stride_dim = values.word_stride;
    tables.sealed_key_scales = keys.scales;
    tables.sealed_value_scales = values.scales;
    tables.key_identity = from.lane.key_identity;
    tables.value_identity = from.lane.value_identity;
}

status check_capacities(const exporter& from) {
    const kv_tables& tables = from.tables;
    const auto check = [](bool wanted, const char* name, uint64_t needed,
                          uint64_t capacity) -> status {
        if (!wanted || needed <= capacity) return KV_OK;
        return fail(KV_LIMIT, "tables: {} holds {} elements, {} are needed", name, capacity,
                    needed);
    };
    const bool by_item = tables.indptr != nullptr || tables.last_page_len != nullptr ||
                         tables.query_start != nullptr || tables.kv_len != nullptr ||
                         tables.slot_indptr != nullptr || tables.sealed_blocks != nullptr;
    const bool by_token = tables.slot_mapping != nullptr || tables.positions != nullptr;
    KVRT_TRY(check(by_item, "item_capacity", tables.item_count, tables.item_capacity));
    KVRT_TRY(check(by_token, "token_capacity", tables.token_count, tables.token_capacity));
    KVRT_TRY(check(tables.indices != nullptr, "indices_capacity", tables.indices_count,
                   tables.indices_capacity));
    KVRT_TRY(check(tables.slot_positions != nullptr, "slot_positions_capacity",
                   tables.slot_positions_count, tables.slot_positions_capacity));
    if (tables.block_table == nullptr) return KV_OK;
    KVRT_TRY(check(true, "block_table_stride", tables.max_blocks, tables.block_table_stride));
    uint64_t needed = 0;
    if (!checked_multiply(tables.block_table_stride, tables.item_count, needed)) {
        return fail(KV_LIMIT, "tables: block_table_stride {} is out of reach",
                    tables.block_table_stride);
    }
    return check(true, "block_table_capacity", needed, tables.block_table_capacity);
}

void fill_blocks(const exporter& from) {
    const kv_tables& tables = from.tables;
    const uint32_t units = units_per_id(from.store.blocks, from.lane);
    int32_t next_index = 0;
    for (uint32_t i = 0; i < tables.item_count; ++i) {
        const uint32_t blocks = from.block_count(i);
        const block_id* table = from.state(i).table;
        if (tables.indptr != nullptr) tables.indptr[i] = next_index;
        if (tables.sealed_blocks != nullptr) {
            tables.sealed_blocks[i] = static_cast<int32_t>(from.state(i).sealed_blocks);
        }
        if (tables.last_page_len != nullptr) {
            tables.last_page_len[i] =
                static_cast<int32_t>(from.slots(i) - (blocks - 1) * from.store.model.block_tokens);
        }
        for (uint32_t b = 0; b < blocks; ++b) {
            const int32_t id = static_cast<int32_t>(table[b] / units);
            if (tables.indices != nullptr) tables.indices[next_index] = id;
            if (tables.block_table != nullptr) {
                tables.block_table[i * tables.block_table_stride + b] = id;
            }
            ++next_index;
        }
        if (tables.block_table != nullptr) {
            int32_t* row = tables.block_table + i * tables.block_table_stride;
            std::fill(row + blocks, row + tables.block_table_stride, -1);
        }
    }
    if (tables.indptr != nullptr) tables.indptr[tables.item_count] = next_index;
}

void fill_tokens(const exporter& from) {
    const kv_tables& tables = from.tables;
    const uint32_t units = units_per_id(from.store.blocks, from.lane);
    const uint32_t block_tokens = from.store.model.block_tokens;
    for (uint32_t i = 0; i < tables.item_count; ++i) {
        const step_item& item = from.source.arrays->items[i];
        if (tables.query_start != nullptr) {
            tables.query_start[i] = static_cast<int32_t>(item.first_row);
        }
        if (tables.kv_len != nullptr) tables.kv_len[i] = static_cast<int32_t>(from.slots(i));
        for (uint32_t r = 0; r < item.rows; ++r) {
            const uint32_t slot = from.state(i).slots + r;
            if (tables.slot_mapping != nullptr) {
                tables.slot_mapping[item.first_row + r] =
                    int64_t{from.state(i).table[slot / block_tokens] / units} * block_tokens +
                    slot % block_tokens;
            }
            if (tables.positions != nullptr) {
                tables.positions[item.first_row + r] =
                    static_cast<int32_t>(item.owner->next_position + r);
            }
        }
    }
    if (tables.query_start != nullptr) {
        tables.query_start[tables.item_count] = static_cast<int32_t>(tables.token_count);
    }
}

/// Positions that rounds have placed are the device's, unless the host can tell them.
status check_slot_positions(const exporter& from) {
    if (from.tables.slot_positions == nullptr) return KV_OK;
    for (uint32_t i = 0; i < from.source.item_count; ++i) {
        const sequence& owner = *from.source.arrays->items[i].owner;
        if (!device_has_positions(from.store, owner, from.lane_index) ||
            list_known_positions(retained_of(from.store, owner, from.lane_index), 0, nullptr)) {
            continue;
        }
        return fail(KV_UNSUPPORTED,
                    "tables: slot_positions: a round has chosen tokens of item {} on the device: "
                    "their positions are not read back in this version (see kv_cuda.h)",
                    i);
    }
    return KV_OK;
}

void fill_slot_positions(const exporter& from) {
    const kv_tables& tables = from.tables;
    const uint64_t per_head =
        from.lane.kv_heads == 0 ? 0 : tables.slot_positions_count / from.lane.kv_heads;
    uint64_t next_slot = 0;
    for (uint32_t i = 0; i < tables.item_count; ++i) {
        if (tables.slot_indptr != nullptr) tables.slot_indptr[i] = static_cast<int32_t>(next_slot);
        if (tables.slot_positions != nullptr) {
            const step_item& item = from.source.arrays->items[i];
            for (uint32_t head = 0; head < from.lane.kv_heads; ++head) {
                slot_positions positions =
                    positions_of(from.store, *item.owner, from.lane_index, head);
                positions.slots += item.rows;
                positions.next_position += item.rows;
                int32_t* target = tables.slot_positions + head * per_head + next_slot;
                uint32_t first = 0;
                if (device_has_positions(from.store, *item.owner, from.lane_index)) {
                    first = positions.explicit_slots;
                    (void)list_known_positions(
                        retained_of(from.store, *item.owner, from.lane_index), first,
                        reinterpret_cast<uint32_t*>(target));
                }
                for (uint32_t slot = first; slot < from.slots(i); ++slot) {
                    target[slot] = static_cast<int32_t>(positions.at(slot));
                }
            }
        }
        next_slot += from.slots(i);
    }
    if (tables.slot_indptr != nullptr) {
        tables.slot_indptr[tables.item_count] = static_cast<int32_t>(next_slot);
    }
}

status find_lane(const cache& store, uint32_t layer, uint32_t kv_head, uint32_t& lane) {
    if (layer >= store.model.layers.size()) {
        return fail(KV_INVALID, "layer {} of a model of {} layers", layer,
                    store.model.layers.size());
    }
    const layer_geometry& geometry = store.model.layers[layer];
    if (kv_head >= geometry.lanes) {
        return fail(KV_INVALID,
                    "tables: kv_head is {}, layer {} has {} lanes: 0 to kv_heads - 1 with "
                    "KV_LAYER_LANE_PER_HEAD, else 0",
                    kv_head, layer, geometry.lanes);
    }
    lane = geometry.first_lane + kv_head;
    return KV_OK;
}

/// The host's kernels may write there from now on.
void note_exported(step& target, uint32_t lane) {
    target.arrays->lane_exported[lane] = 1;
    for (uint32_t i = 0; i < target.item_count; ++i) {
        step_item& item = target.arrays->items[i];
        item.owner->written_rows = item.rows;
    }
}

}  // namespace

status step_export(step& target, uint32_t layer, kv_tables& tables) {
    KVRT_TRY(expect_state(target, step_state::reserved, "kv_step_export"));
    const cache& store = *target.context->store;
    uint32_t lane = 0;
    KVRT_TRY(find_lane(store, layer, tables.kv_head, lane));
    const exporter from{target, store, store.model.lanes[lane], lane, tables};
    describe(from);
    KVRT_TRY(check_capacities(from));
    KVRT_TRY(check_slot_positions(from));
    fill_blocks(from);
    fill_tokens(from);
    fill_slot_positions(from);
    note_exported(target, lane);
    return KV_OK;
}

status step_device_tables(step& target, uint32_t layer, kv_cuda_tables& tables) {
    KVRT_TRY(expect_state(target, step_state::reserved, "kv_cuda_step_tables"));
    const cache& store = *target.context->store;
    if (!store.on_device()) {
        return fail(KV_INVALID, "kv_cuda_step_tables: the pool is on the CPU");
    }
    uint32_t lane = 0;
    KVRT_TRY(find_lane(store, layer, tables.kv_head, lane));
    const bool attended = (tables.flags & KV_CUDA_TABLES_ATTENDED) != 0;
    if (attended) KVRT_TRY(check_replayed(target, layer));
    const device_tables& source = target.context->tables;
    const device_tables::lane_parts parts = source.parts_of(target.place, lane);
    tables.place = target.place;
    tables.block_table = static_cast<const int32_t*>(source.at(parts.block_table));
    tables.block_table_stride = source.stride;
    tables.slot_mapping = static_cast<const int64_t*>(source.at(parts.slot_mapping));
    tables.kv_len = static_cast<const int32_t*>(source.at(parts.kv_len));
    tables.query_start = static_cast<const int32_t*>(source.at(source.items_of(target.place)));
    tables.positions = static_cast<const int32_t*>(source.at(source.positions_of(target.place)));
    note_exported(target, lane);
    if (attended) note_replayed(target, layer);
    return KV_OK;
}

}  // namespace kvrt
