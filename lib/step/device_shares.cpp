#include "step/device_shares.hpp"

#include <algorithm>
#include <bit>

#include "step/step.hpp"

namespace kvrt {

namespace {

constexpr uint32_t nothing = 0xffffffffu;
constexpr uint64_t line_words = device_tables::line_words;
constexpr uint64_t copy_words = sizeof(kvrt_plan_copy) / sizeof(uint32_t);
constexpr uint64_t mapping_words = sizeof(kvrt_lane_mapping) / sizeof(uint32_t);
/// Lengths and targets of a lane; sequences and pieces of a view, these of two kinds of blocks, and
/// what is observed; of a layer what is gathered.
constexpr uint64_t parts_of_lane = 2, parts_of_view = 7;

uint32_t line_of(uint64_t word) { return static_cast<uint32_t>(word / line_words); }

/// Do two lanes have the same slots?
bool alike(const lane_state& a, const lane_state& b) {
    return a.slots == b.slots && a.explicit_slots == b.explicit_slots &&
           a.sealed_blocks == b.sealed_blocks;
}

/// The first lane that `same` holds for, among those before `lane` that lead in `found`; `lane`
/// itself where there is none.
template <class callable>
uint32_t leader_of(uint32_t lane, const uint32_t* found, const callable& same) {
    for (uint32_t first = 0; first < lane; ++first) {
        if (found[first] == first && same(first)) return first;
    }
    return lane;
}

}  // namespace

status device_shares::create(const step_context& context, uint32_t places, uint64_t& words) {
    const cache& store = *context.store;
    host_allocator& allocator = context.store->allocator;
    constexpr const char* what = "lanes that share plans";
    available = store.device.kernels() == KV_OK;
    lanes = static_cast<uint32_t>(store.model.lanes.size());
    items = store.limits.max_step_sequences;
    const uint64_t most_copies =
        parts_of_lane * lanes + parts_of_view * context.layers.size() + store.model.layers.size();
    first_word = round_up<uint64_t>(words, line_words);
    first_mapping = round_up<uint64_t>(most_copies * copy_words, line_words);
    place_words = first_mapping + round_up<uint64_t>(lanes * mapping_words, line_words);
    if (available) words = first_word + places * place_words;
    KVRT_TRY(leaders.allocate(allocator, lanes, what));
    KVRT_TRY(finer.allocate(allocator, lanes, what));
    KVRT_TRY(item_leaders.allocate(allocator, uint64_t{places} * items * lanes, what));
    KVRT_TRY(lane_mappings.allocate(allocator, lanes, what));
    KVRT_TRY(planned.allocate(allocator, most_copies, what));
    return copies.allocate(allocator, most_copies, what);
}

void device_shares::compare_lanes(const sequence& owner, uint32_t* found) const {
    for (uint32_t lane = 0; lane < lanes; ++lane) {
        found[lane] = leader_of(lane, found, [&](uint32_t first) {
            return alike(owner.lanes[first], owner.lanes[lane]);
        });
    }
}

void device_shares::find_leaders(const step& target, const host_array<row_work>& work) {
    copy_count = planned_count = most_lines = 0;
    if (!available) {
        for (uint32_t lane = 0; lane < lanes; ++lane) leaders[lane] = lane;
        return;
    }
    for (uint32_t i = 0; i < target.item_count; ++i) {
        uint32_t* const mine = item_leaders.data() + (uint64_t{target.place} * items + i) * lanes;
        if (work[i] == row_work::all) compare_lanes(*target.arrays->items[i].owner, mine);
        if (i == 0) {
            std::copy_n(mine, lanes, leaders.data());
        } else if (!std::equal(mine, mine + lanes, leaders.data())) {
            for (uint32_t lane = 0; lane < lanes; ++lane) {
                finer[lane] = leader_of(lane, finer.data(), [&](uint32_t first) {
                    return mine[first] == mine[lane] && leaders[first] == leaders[lane];
                });
            }
            std::copy_n(finer.data(), lanes, leaders.data());
        }
    }
}

/// How far a part is to be filled: entries of an earlier step that could not be uploaded, or of one
/// before that, may still be there.
uint64_t device_shares::plan_reach(plan_part& part, uint64_t count) {
    planned[planned_count++] = {&part, count};
    part.reach = std::max(part.reach, count);
    return part.reach;
}

void device_shares::write(plugin_device& device, plan_part& part, uint64_t word, uint32_t* words,
                          uint64_t count) {
    const uint64_t end = plan_reach(part, count);
    std::fill(words + count, words + end, nothing);
    if (part.copied) device.forget_table(word, part.used);
    part.copied = false;
    part.used = std::max(part.used, end);
    device.write_table(word, words, end);
}

void device_shares::copy(plan_part& part, uint64_t word, uint64_t from, uint64_t count) {
    const uint64_t end = plan_reach(part, count);
    if (end == 0) return;
    const uint32_t lines = static_cast<uint32_t>(ceil_divide(end, line_words));
    copies[copy_count++] = {line_of(from), line_of(word), lines, 0};
    most_lines = std::max(most_lines, lines);
    part.copied = true;
    part.used = std::max(part.used, uint64_t{lines} * line_words);
}

void device_shares::list(const step& target) {
    if (!available) return;
    const step_context& context = *target.context;
    plugin_device& device = context.store->device;
    for (uint32_t lane = 0; lane < lanes; ++lane) {
        const device_tables::lane_parts parts = context.tables.parts_of(target.place, lane);
        lane_mappings[lane] = {line_of(context.verbs.targets_of(target.place, leaders[lane])),
                               line_of(parts.slot_mapping), line_of(parts.block_table), 0};
    }
    const uint64_t begin = first_word + target.place * place_words;
    device.write_table(begin, reinterpret_cast<const uint32_t*>(copies.data()),
                       copy_count * copy_words);
    device.write_table(begin + first_mapping,
                       reinterpret_cast<const uint32_t*>(lane_mappings.data()),
                       lanes * mapping_words);
}

status device_shares::launch(const step& target) {
    if (available) {
        cache& store = *target.context->store;
        uint32_t& rows = mapped_rows[target.place];
        rows = std::max(rows, target.rows);
        const uint64_t begin = first_word + target.place * place_words;
        const kvrt_share_plans call = {begin,
                                       begin + first_mapping,
                                       copy_count,
                                       most_lines,
                                       lanes,
                                       rows,
                                       target.context->tables.stride,
                                       store.model.block_tokens};
        KVRT_TRY(store.device.share_plans(target.number, call));
        rows = target.rows;
    }
    for (uint32_t i = 0; i < planned_count; ++i) planned[i].part->reach = planned[i].count;
    return KV_OK;
}

}  // namespace kvrt
