#include "step/device_tables.hpp"

#include <algorithm>
#include <bit>

#include "step/step.hpp"

namespace kvrt {

namespace {

constexpr uint32_t nothing = 0xffffffffu;
constexpr uint64_t least_staging = uint64_t{64} << 10;
constexpr uint64_t most_staging = uint64_t{8} << 20;

}  // namespace

status device_tables::create(step_context& context, uint32_t places) {
    cache& store = *context.store;
    items = store.limits.max_step_sequences;
    tokens = store.limits.max_step_tokens;
    lanes = static_cast<uint32_t>(store.model.lanes.size());
    stride = static_cast<uint32_t>(round_up<uint64_t>(
        store.model.blocks_for(store.limits.max_tokens_per_sequence), line_words));
    positions = round_up<uint64_t>(items + 1, line_words);
    first_lane = positions + round_up<uint64_t>(tokens, line_words);
    lane_words = round_up<uint64_t>(items, line_words) +
                 round_up<uint64_t>(2 * uint64_t{tokens}, line_words) + uint64_t{items} * stride;
    place_words = first_lane + lanes * lane_words;
    uint64_t words = places * place_words;
    KVRT_TRY(shares.create(context, places, words));
    KVRT_TRY(context.verbs.measure(context, places, words, words));
    KVRT_TRY(context.queries.measure(context, places, words));
    context.rounds.measure(context, words);
    KVRT_TRY(context.seals.measure(context, words));
    host_allocator& allocator = store.allocator;
    KVRT_TRY(sources.allocate(allocator, uint64_t{places} * items, "device tables"));
    KVRT_TRY(work.allocate(allocator, items, "device tables"));
    KVRT_TRY(filled.allocate(allocator, uint64_t{places} * lanes * items, "device tables"));
    KVRT_TRY(planned.allocate(allocator, uint64_t{places} * 2, "device tables"));
    KVRT_TRY(id_shifts.allocate(allocator, lanes, "device tables"));
    for (uint32_t lane = 0; lane < lanes; ++lane) {
        id_shifts[lane] = std::countr_zero(units_per_id(store.blocks, store.model.lanes[lane]));
    }
    KVRT_TRY(lengths.allocate(allocator, uint64_t{places} * lanes, "device tables"));
    KVRT_TRY(row_scratch.allocate(
        allocator, std::max<uint64_t>({stride, items + 1, 2 * uint64_t{tokens}}), "device tables"));
    const uint64_t staging = std::clamp(words * sizeof(uint32_t), least_staging, most_staging);
    KVRT_TRY(store.device.create_table(words, staging, &address, &image));
    KVRT_TRY(context.verbs.create(context));
    return context.rounds.create(context);
}

/// What all lanes have in common. Items and rows that the last step in this place had and this one
/// has not become empty.
void device_tables::plan_items(const step& target) {
    plugin_device& device = target.context->store->device;
    uint32_t* const last = planned.data() + 2 * target.place;
    uint32_t* const words = row_scratch.data();
    const uint64_t begin = target.place * place_words;
    const uint32_t item_end = std::max(target.item_count, last[0]);
    for (uint32_t i = 0; i < item_end; ++i) {
        words[i] = i < target.item_count ? target.arrays->items[i].first_row : target.rows;
    }
    std::fill(words + item_end, words + items + 1, target.rows);
    device.write_table(begin, words, items + 1);
    for (uint32_t i = 0; i < target.item_count; ++i) {
        const step_item& item = target.arrays->items[i];
        for (uint32_t r = 0; r < item.rows; ++r) {
            words[item.first_row + r] = static_cast<uint32_t>(item.owner->next_position + r);
        }
    }
    device.write_table(begin + positions, words, target.rows);
}

/// Rows whose sequence has the tables it had when they were filled are left alone: a step of one
/// token each looks at few tables.
void device_tables::plan_rows(const step& target) {
    for (uint32_t i = 0; i < target.item_count; ++i) {
        const step_item& item = target.arrays->items[i];
        const sequence& owner = *item.owner;
        row_source& source = sources[uint64_t{target.place} * items + i];
        const bool appended = source.handle == item.handle && source.changes == owner.table_changes;
        work[i] = !appended                               ? row_work::all
                  : source.growths != owner.table_growths ? row_work::append
                                                          : row_work::none;
        source = {item.handle, owner.table_growths, owner.table_changes};
    }
}

void device_tables::touch_rows(uint32_t place, uint32_t item_index) const {
    const uint64_t row = uint64_t{place} * items + item_index;
    for (uint32_t lane = 0; lane < lanes; ++lane) {
        const uint64_t table = parts_of(place, lane).block_table + uint64_t{item_index} * stride;
        __builtin_prefetch(image + table + filled[row * lanes + lane], 1);
    }
}

/// Of an item whose tables have changed.
void device_tables::plan_blocks(const step& target, uint32_t item_index) {
    const cache& store = *target.context->store;
    plugin_device& device = target.context->store->device;
    const step_item& item = target.arrays->items[item_index];
    uint32_t* const words = row_scratch.data();
    uint32_t* const filled_here =
        filled.data() + (uint64_t{target.place} * items + item_index) * lanes;
    for (uint32_t lane = 0; lane < lanes; ++lane) {
        const lane_state& state = item.owner->lanes[lane];
        const uint64_t table = parts_of(target.place, lane).block_table;
        const int shift = id_shifts[lane];
        uint32_t& before = filled_here[lane];
        const uint32_t blocks = store.model.blocks_for(state.slots + item.rows);
        const uint32_t first = work[item_index] == row_work::append ? before : 0;
        const uint32_t end = std::max(blocks, before);
        for (uint32_t b = first; b < blocks; ++b) words[b] = state.table[b] >> shift;
        std::fill(words + blocks, words + end, nothing);
        device.write_table(table + uint64_t{item_index} * stride + first, words + first,
                           end - first);
        before = blocks;
    }
}

void device_tables::plan_lengths(const step& target, uint32_t lane) {
    const uint64_t word = parts_of(target.place, lane).kv_len;
    plan_part& part = lengths[uint64_t{target.place} * lanes + lane];
    if (!shares.leads(lane)) {
        return shares.copy(part, word, parts_of(target.place, shares.leaders[lane]).kv_len, items);
    }
    uint32_t* const words = row_scratch.data();
    for (uint32_t i = 0; i < target.item_count; ++i) {
        const step_item& item = target.arrays->items[i];
        words[i] = item.owner->lanes[lane].slots + item.rows;
    }
    std::fill(words + target.item_count, words + items, 0);
    shares.write(target.context->store->device, part, word, words, items);
}

void device_tables::plan_mapping(const step& target, uint32_t lane) {
    const cache& store = *target.context->store;
    uint32_t* const words = row_scratch.data();
    const uint32_t block_tokens = store.model.block_tokens;
    const int shift = id_shifts[lane];
    const int block_shift = std::countr_zero(block_tokens);
    for (uint32_t i = 0; i < target.item_count; ++i) {
        const step_item& item = target.arrays->items[i];
        const lane_state& state = item.owner->lanes[lane];
        for (uint32_t r = 0; r < item.rows; ++r) {
            const uint32_t slot = state.slots + r;
            const uint64_t id = state.table[slot >> block_shift] >> shift;
            const uint64_t place = (id << block_shift) + (slot & (block_tokens - 1));
            words[2 * (item.first_row + r)] = static_cast<uint32_t>(place);
            words[2 * (item.first_row + r) + 1] = static_cast<uint32_t>(place >> 32);
        }
    }
    const uint32_t row_end = std::max(target.rows, planned[2 * target.place + 1]);
    std::fill(words + 2 * uint64_t{target.rows}, words + 2 * uint64_t{row_end}, nothing);
    target.context->store->device.write_table(parts_of(target.place, lane).slot_mapping, words,
                                              2 * uint64_t{row_end});
}

status device_tables::plan(const step& target) {
    plan_rows(target);
    plan_items(target);
    shares.find_leaders(target, work);
    for (uint32_t i = 0; i < target.item_count; ++i) {
        if (work[i] != row_work::none) plan_blocks(target, i);
    }
    for (uint32_t lane = 0; lane < lanes; ++lane) {
        plan_lengths(target, lane);
        if (!shares.available) plan_mapping(target, lane);
    }
    uint32_t* const last = planned.data() + 2 * target.place;
    last[0] = target.item_count;
    last[1] = target.rows;
    KVRT_TRY(target.context->verbs.plan(target));
    target.context->queries.plan(target);
    target.context->rounds.write_moments(*target.context);
    shares.list(target);
    KVRT_TRY(target.context->store->device.upload_table(target.number));
    return shares.launch(target);
}

}  // namespace kvrt
