#include "step/device_observations.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

#include "step/step.hpp"

namespace kvrt {

namespace {

constexpr uint64_t no_sums = ~uint64_t{0};

/// As the seam has an observer of an item, but for the parts it is listed in.
kvrt_observe_item item_of(const attend_observer& observer, const float* base, const step_item& item,
                          uint32_t slots) {
    kvrt_observe_item made = {};
    made.sums = static_cast<uint64_t>(observer.sums - base);
    made.before =
        observer.before == nullptr ? no_sums : static_cast<uint64_t>(observer.before - base);
    made.slots = slots;
    made.slots_before = observer.slots_before;
    made.rows = item.rows;
    made.first_row = observer.first_row;
    made.begins = 1;
    made.before_decays = observer.before_decays ? 1 : 0;
    made.counts = observer.counts ? 1 : 0;
    made.log2_decay = observer.decay == 1.0f ? 0.0f : std::log2(observer.decay);
    return made;
}

}  // namespace

status device_observations::create(const step_context& context, uint32_t places,
                                   uint32_t most_parts_of_view) {
    host_allocator& allocator = context.store->allocator;
    const uint64_t items = context.store->limits.max_step_sequences;
    constexpr const char* what = "observed attention on the device";
    KVRT_TRY(rows.allocate(allocator, uint64_t{places} * items, what));
    KVRT_TRY(parts.allocate(allocator, uint64_t{places} * place_parts, what));
    KVRT_TRY(listed.allocate(allocator, most_parts_of_view, what));
    return listed_items.allocate(allocator, items, what);
}

void device_observations::plan(const step& target) {
    part_count = 0;
    if (place_parts == 0) return;
    const step_context& context = *target.context;
    const uint64_t first = uint64_t{target.place} * context.store->limits.max_step_sequences;
    for (uint32_t i = 0; i < target.item_count; ++i) {
        const step_item& item = target.arrays->items[i];
        rows[first + i] = rows_to_observe(*context.store, context.retention->observations,
                                          *item.owner, item.rows);
    }
}

uint32_t device_observations::note_kept(const step& target, const kvrt_attend_plan& plan) {
    uint32_t count = 0;
    for (uint32_t w = 0; w < plan.wave_count; ++w) {
        const kvrt_attend_wave& wave = plan.waves[w];
        if (wave.kept == 0) continue;
        for (uint32_t i = 0; i < wave.sequences; ++i) {
            const kvrt_attend_sequence& made = plan.sequences[wave.first_sequence + i];
            if (made.kept_rows == 0) continue;
            const uint32_t end =
                made.first_row + made.rows - target.arrays->items[made.table].first_row;
            parts[uint64_t{target.place} * place_parts + part_count++] = {
                made.table, end - made.kept_rows, end, made.kept, w};
            ++count;
        }
    }
    return count;
}

void observe_on_device(step& target, uint32_t lane, const kept_part* parts, uint32_t part_count,
                       kvrt_attend_rows& rows) {
    const cache& store = *target.context->store;
    observation_store& observations = target.context->retention->observations;
    device_observations& mine = target.context->attention.observations;
    const uint64_t first = uint64_t{target.place} * store.limits.max_step_sequences;
    uint32_t count = 0, item_count = 0;
    for (uint32_t p = 0; p < part_count;) {
        const uint32_t index = parts[p].item;
        const step_item& item = target.arrays->items[index];
        attend_observer observer;
        // Another policy may ask for more, since the step was reserved: this one it does not see.
        const bool observes =
            make_observer(store, observations, *item.owner, lane, item.rows, observer) &&
            observer.first_row >= item.rows - mine.rows[first + index];
        kvrt_observe_item made = {};
        if (observes) {
            made = item_of(observer, observations.base, item,
                           item.owner->lanes[lane].slots + item.rows);
            mine.listed_items[item_count++] = index;
        }
        for (; p < part_count && parts[p].item == index; ++p) {
            if (!observes) continue;
            made.kept = parts[p].kept;
            made.first_kept = parts[p].first_row;
            made.end_kept = parts[p].end_row;
            made.wave = parts[p].wave;
            mine.listed[count++] = made;
            made.begins = 0;
        }
    }
    rows.observed = mine.listed.data();
    rows.observed_count = count;
    rows.observed_items = item_count;
    rows.sums = observations.base;
    rows.sums_stride = observations.slot_stride;
}

void note_observed_on_device(step& target, uint32_t lane, const kvrt_attend_rows& rows) {
    const device_observations& mine = target.context->attention.observations;
    for (uint32_t i = 0; i < rows.observed_items; ++i) {
        const step_item& item = target.arrays->items[mine.listed_items[i]];
        note_observed(target.context->retention->observations, *item.owner, lane, item.rows,
                      item.owner->lanes[lane].slots + item.rows);
    }
}

status copy_sums(step_context& context, const sequence& parent, const kv_seq* children,
                 uint32_t count) {
    cache& store = *context.store;
    const observation_store& observations = context.retention->observations;
    if (parent.observation_place == 0) return KV_OK;
    const uint32_t used = arrays_in_use(observations, parent);
    if (used == 0) return KV_OK;
    const uint64_t number = ++store.fences.last_begun;
    KVRT_TRY(store.device.open_round(number));
    status verdict = KV_OK;
    const auto words = [&](const sequence& owner, uint32_t array) {
        return reinterpret_cast<uint32_t*>(observations.base) +
               place_of_array(observations, owner, array);
    };
    for (uint32_t i = 0; i < count; ++i) {
        const sequence& child = *store.sequences.find(children[i]);
        for (uint32_t array = 0; array < observation_arrays && verdict == KV_OK; ++array) {
            if ((used >> array & 1u) == 0) continue;
            verdict = store.device.copy_words(number, words(child, array), words(parent, array),
                                              observations.length);
        }
    }
    const status ended = store.device.end_step(number);
    return verdict < 0 ? verdict : ended;
}

status read_sums(step_context& context, const sequence& owner, uint32_t lane, uint32_t kv_head,
                 uint32_t slots, float* scores) {
    cache& store = *context.store;
    const observation_store& observations = context.retention->observations;
    const observed_lane& state = observed_lane_of(observations, owner, lane);
    const uint32_t known = std::min(state.slots, slots);
    const uint32_t known_before = std::min(state.previous_slots, slots);
    host_allocator own;
    host_array<uint32_t> before;
    KVRT_TRY(before.allocate(own, known_before, "observed attention"));
    const auto words = [&](uint32_t array, uint32_t count) -> kvrt_words {
        return {reinterpret_cast<const uint32_t*>(observations.base) +
                    place_of_sums(observations, owner, array, lane, kv_head),
                count};
    };
    const kvrt_words present = words(state.present, known);
    const kvrt_words previous = words(state.previous, known_before);
    const uint64_t number = ++store.fences.last_begun;
    KVRT_TRY(store.device.open_round(number));
    status verdict = KV_OK;
    if (known != 0) {
        verdict = store.device.read_words(number, &present, 1, reinterpret_cast<uint32_t*>(scores));
    }
    if (known_before != 0 && verdict == KV_OK) {
        verdict = store.device.read_words(number, &previous, 1, before.data());
    }
    const status ended = store.device.end_step(number);
    KVRT_TRY(verdict < 0 ? verdict : ended);
    std::fill(scores + known, scores + slots, score_of_unknown(observations, owner));
    for (uint32_t slot = 0; slot < known_before; ++slot) {
        scores[slot] += std::bit_cast<float>(before[slot]);
    }
    return KV_OK;
}

kvrt_round_sums sums_of(const observation_store& observations, const sequence& owner,
                        uint32_t lane) {
    kvrt_round_sums made = {no_sums, no_sums, 0, 0, 0.0f, 0};
    if (owner.observation_place == 0) return made;
    made.unknown = score_of_unknown(observations, owner);
    const observed_lane& state = observed_lane_of(observations, owner, lane);
    if (state.slots != 0) {
        made.present = place_of_sums(observations, owner, state.present, lane, 0);
        made.slots = state.slots;
    }
    if (state.previous_slots != 0) {
        made.before = place_of_sums(observations, owner, state.previous, lane, 0);
        made.slots_before = state.previous_slots;
    }
    return made;
}

}  // namespace kvrt
