#include "step/device_observations.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

#include "step/step.hpp"

namespace kvrt {

namespace {

constexpr uint64_t no_sums = ~uint64_t{0};

constexpr uint64_t wave_words_each = sizeof(kvrt_observe_wave) / sizeof(uint32_t);
constexpr uint64_t item_words_each = sizeof(kvrt_observe_item) / sizeof(uint32_t);

/// But for where attention lists it.
kvrt_observe_item item_of(const observation_store& observations, const step_item& item,
                          uint32_t lane, uint32_t counted_rows) {
    const sequence& owner = *item.owner;
    const observation_rules& rules = place_of(observations, owner)->rules;
    const observed_arrays arrays = arrays_to_observe(observations, owner, lane, item.rows);
    kvrt_observe_item made = {};
    made.array = arrays.sums;
    made.before = arrays.before;
    made.slots = owner.lanes[lane].slots + item.rows;
    made.slots_before = observed_lane_of(observations, owner, lane).slots;
    made.rows_of_decay = counted_rows;
    made.counts = rules.kind == observed_kind::counts ? 1 : 0;
    made.log2_decay = rules.decay == 1.0f ? 0.0f : std::log2(rules.decay);
    return made;
}

}  // namespace

status device_observations::create(const step_context& context, uint32_t places,
                                   uint32_t most_listed) {
    host_allocator& allocator = context.store->allocator;
    const uint64_t items = uint64_t{places} * context.store->limits.max_step_sequences;
    const uint64_t lanes = context.store->model.lanes.size();
    constexpr const char* what = "observed attention on the device";
    KVRT_TRY(rows.allocate(allocator, items, what));
    KVRT_TRY(turns.allocate(allocator, available ? items * lanes : 0, what));
    KVRT_TRY(sources.allocate(allocator, items, what));
    KVRT_TRY(leaders.allocate(allocator, lanes, what));
    KVRT_TRY(wave_words.allocate(allocator, most_listed * wave_words_each, what));
    return item_words.allocate(allocator, most_listed * item_words_each, what);
}

void device_observations::plan_item(const step& target, uint32_t index) {
    const cache& store = *target.context->store;
    observation_store& observations = target.context->retention->observations;
    const step_item& item = target.arrays->items[index];
    const sequence& owner = *item.owner;
    const uint32_t lanes = static_cast<uint32_t>(store.model.lanes.size());
    const uint64_t at = uint64_t{target.place} * store.limits.max_step_sequences + index;
    const observed_step planned = plan_observed(store, observations, owner, item.rows);
    rows[at] = 0;
    sources[at] = {};
    if (planned.rows == 0) return;
    observation_place& place = *place_of(observations, owner);
    sources[at] = {owner.observation_place, place.changes};
    for (uint32_t lane = 0; lane < lanes; ++lane) {
        const lane_turn turn = turn_of_lane(store, observations, owner, lane, planned);
        turns[at * lanes + lane] = turn;
        if (turn == lane_turn::observed) rows[at] = planned.rows;
    }
    if (rows[at] == 0) return;
    any = true;
    place.listed_in = target.number;
}

/// Lanes whose turn it is, with sums of as many slots in the same arrays, have the same list, if
/// their attention has.
void device_observations::find_leaders(const step& target) {
    const cache& store = *target.context->store;
    const observation_store& observations = target.context->retention->observations;
    const uint32_t lanes = static_cast<uint32_t>(store.model.lanes.size());
    const uint64_t first = uint64_t{target.place} * store.limits.max_step_sequences;
    const auto same = [&](uint32_t a, uint32_t b) {
        for (uint32_t i = 0; i < target.item_count; ++i) {
            if (rows[first + i] == 0) continue;
            const sequence& owner = *target.arrays->items[i].owner;
            const lane_turn* const turn = turns.data() + (first + i) * lanes;
            const observed_lane& mine = observed_lane_of(observations, owner, a);
            const observed_lane& other = observed_lane_of(observations, owner, b);
            if (turn[a] != turn[b] || mine.present != other.present ||
                mine.previous != other.previous || mine.slots != other.slots) {
                return false;
            }
        }
        return true;
    };
    for (uint32_t lane = 0; lane < lanes; ++lane) {
        uint32_t leader = 0;
        while (leader < lane && !(leaders[leader] == leader && same(leader, lane))) ++leader;
        leaders[lane] = leader;
    }
}

void device_observations::plan(const step& target) {
    any = false;
    if (!available) return;
    for (uint32_t i = 0; i < target.item_count; ++i) plan_item(target, i);
    if (any) find_leaders(target);
}

void device_observations::list(const step& target, uint32_t lane, kvrt_attend_plan& plan,
                               observed_view& view, uint64_t wave_word, uint64_t item_word) {
    const observation_store& observations = target.context->retention->observations;
    device_shares& shares = target.context->tables.shares;
    plugin_device& device = target.context->store->device;
    const uint64_t first_item =
        uint64_t{target.place} * target.context->store->limits.max_step_sequences;
    const uint64_t lanes = target.context->store->model.lanes.size();
    auto* const waves = reinterpret_cast<kvrt_observe_wave*>(wave_words.data());
    auto* const items = reinterpret_cast<kvrt_observe_item*>(item_words.data());
    uint32_t count = 0;
    for (uint32_t w = 0; w < plan.wave_count; ++w) {
        kvrt_attend_wave& wave = plan.waves[w];
        kvrt_observe_wave& made = waves[w];
        made = {count, 0, 0, 0};
        uint32_t last = ~uint32_t{0};  // the item that was listed last
        for (uint32_t i = 0; wave.kept != 0 && i < wave.sequences; ++i) {
            const uint32_t sequence = wave.first_sequence + i;
            const kvrt_attend_sequence& listed = plan.sequences[sequence];
            const uint64_t at = first_item + listed.table;
            if (listed.kept_rows == 0 || turns[at * lanes + lane] != lane_turn::observed) continue;
            if (listed.table != last) {
                last = listed.table;
                kvrt_observe_item& item = items[count++];
                item = item_of(observations, target.arrays->items[last], lane, rows[at]);
                item.first_sequence = sequence;
                item.first_stretch = made.stretches;
                made.stretches += ceil_divide(item.slots, KVRT_OBSERVE_STRETCH);
                ++made.items;
            }
            ++items[count - 1].sequences;
        }
        wave.stretches = made.stretches;
        if (made.items != 0) made.step = mark_of_step(target.number);
    }
    shares.write(device, view.wave_part, wave_word, wave_words.data(),
                 plan.wave_count * wave_words_each);
    view.items = count;
    if (count == 0) return;  // what was listed before stays, and no wave has it
    shares.write(device, view.item_part, item_word, item_words.data(), count * item_words_each);
}

void device_observations::note_lane(step& target, uint32_t lane) const {
    if (!available) return;
    const cache& store = *target.context->store;
    observation_store& observations = target.context->retention->observations;
    const uint64_t lanes = store.model.lanes.size();
    const uint64_t first = uint64_t{target.place} * store.limits.max_step_sequences;
    for (uint32_t i = 0; i < target.item_count; ++i) {
        const step_item& item = target.arrays->items[i];
        const sequence& owner = *item.owner;
        const listed_from& source = sources[first + i];
        // Another policy has come since the step was reserved, or none: it has seen nothing.
        if (source.place == 0 || source.place != owner.observation_place ||
            source.changes != place_of(observations, owner)->changes) {
            continue;
        }
        const lane_turn turn = turns[(first + i) * lanes + lane];
        if (turn == lane_turn::left_out) note_left_out(observations, owner);
        if (turn != lane_turn::observed) continue;
        note_observed(observations, owner, lane, item.rows, owner.lanes[lane].slots + item.rows);
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
