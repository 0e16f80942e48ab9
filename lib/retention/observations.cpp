#include "retention/observations.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

namespace kvrt {

namespace {

/// The sums of one array of a lane, of KV head 0; heads are slot_stride apart.
float* array_of(const observation_store& observations, uint32_t place, uint32_t array,
                uint32_t lane) {
    const uint64_t whole = uint64_t{place} * observation_arrays + array;
    return observations.base + whole * observations.length + observations.offset[lane];
}

observed_lane& lane_at(const observation_store& observations, uint32_t place, uint32_t lane) {
    const uint64_t lanes = observations.offset.size();
    return const_cast<observed_lane&>(observations.lanes[place * lanes + lane]);
}

uint32_t index_of(const sequence& owner) { return owner.observation_place - 1; }

void clear_place(observation_store& observations, uint32_t place) {
    const uint32_t lanes = static_cast<uint32_t>(observations.offset.size());
    for (uint32_t lane = 0; lane < lanes; ++lane) lane_at(observations, place, lane) = {};
    observation_place& whole = observations.places[place];
    whole.skipped = 0;
    whole.gap = whole.pending_gap = false;
    whole.seen_end = 0;
    ++whole.changes;
}

bool is_free(cache& store, const observation_place& place) {
    for (const uint64_t open : store.fences.open) {
        if (open != 0 && place.listed_in == open) return false;
    }
    return place.owner == 0 || store.sequences.find(place.owner) == nullptr;
}

/// The first place whose owner is gone; the number of places if there is none.
uint32_t find_free_place(cache& store, const observation_store& observations, uint32_t from) {
    uint32_t place = from;
    while (place < observations.places.size() && !is_free(store, observations.places[place])) {
        ++place;
    }
    return place;
}

void take_place(cache& store, observation_store& observations, sequence& owner, uint32_t place,
                const observation_rules& rules) {
    observations.places[place].owner = store.sequences.handle(owner);
    observations.places[place].rules = rules;
    clear_place(observations, place);
    owner.observation_place = place + 1;
}

bool is_windowed(const observation_rules& rules) { return rules.window != 0; }

/// At the end of how many more steps of one token, at the least, a round is due; 0: of this one.
/// As many as there are numbers where nothing says when one comes.
uint64_t steps_before_round(const cache& store, const sequence& owner) {
    const kv_policy& policy = owner.policy;
    uint64_t least = std::numeric_limits<uint64_t>::max();
    const auto comes_after = [&](uint64_t bound, uint64_t reached) {
        least = std::min(least, bound > reached ? bound - reached : 0);
    };
    if (policy.every != 0) comes_after(policy.every, owner.tokens_since_round + 1);
    if (owner.prompt_was_in) return 0;
    if ((policy.flags & KV_POLICY_AT_PROMPT_END) != 0 &&
        owner.next_position < policy.prompt_tokens) {
        comes_after(policy.prompt_tokens, owner.next_position + 1);
    }
    if (policy.slack != 0) {
        uint32_t most = 0;  // no mean of lanes is more
        for (uint32_t lane = 0; lane < store.model.lanes.size(); ++lane) {
            if (store.model.lanes[lane].evictable) most = std::max(most, owner.lanes[lane].slots);
        }
        comes_after(uint64_t{policy.budget} + policy.slack, most);
    }
    return least;
}

/// Does no round that the policy makes count the query of this step of one token?
bool leaves_out(const cache& store, const sequence& owner, const observation_rules& rules) {
    const uint64_t counted = rules.kind == observed_kind::last ? 1 : rules.window;
    const bool comes_by_itself = owner.policy.every != 0 || owner.policy.slack != 0;
    return counted != 0 && rules.every == 1 && comes_by_itself &&
           store.limits.pressure_bytes == 0 && steps_before_round(store, owner) >= counted;
}

}  // namespace

status create_observations(cache& store, uint32_t places, observation_store& observations) {
    const model_geometry& model = store.model;
    host_allocator& allocator = store.allocator;
    constexpr const char* what = "observations (max_observed_sequences)";
    observations.slot_stride = round_up<uint64_t>(store.limits.max_tokens_per_sequence, 64);
    KVRT_TRY(observations.offset.allocate(allocator, model.lanes.size(), what));
    observations.length = 0;
    for (uint32_t lane = 0; lane < model.lanes.size(); ++lane) {
        observations.offset[lane] = observations.length;
        if (!model.lanes[lane].evictable) continue;
        observations.length += model.lanes[lane].kv_heads * observations.slot_stride;
    }
    uint64_t floats = 0;
    if (!checked_multiply(uint64_t{places} * observation_arrays, observations.length, floats)) {
        return fail(KV_TOO_LARGE, "{}: {} places of {} floats", what, places, observations.length);
    }
    if (store.on_device() && places != 0) {
        kvrt_sums_memory& memory = observations.on_device;
        memory.arrays = uint64_t{places} * observation_arrays;
        memory.heads = observations.length / observations.slot_stride;
        memory.slots = observations.slot_stride;
        KVRT_TRY(store.device.create_sums(memory));
        observations.base = memory.sums;
    } else {
        KVRT_TRY(observations.sums.allocate(allocator, floats, what, memory_contents::undefined));
        observations.base = observations.sums.data();
    }
    KVRT_TRY(observations.lanes.allocate(allocator, uint64_t{places} * model.lanes.size(), what));
    return observations.places.allocate(allocator, places, what);
}

observation_place* place_of(observation_store& observations, const sequence& owner) {
    return owner.observation_place == 0 ? nullptr : &observations.places[index_of(owner)];
}

const observation_place* place_of(const observation_store& observations, const sequence& owner) {
    return owner.observation_place == 0 ? nullptr : &observations.places[index_of(owner)];
}

status prepare_observations(cache& store, observation_store& observations, sequence& owner,
                            const kv_policy* policy) {
    const observation_rules rules = policy == nullptr ? observation_rules{} : rules_of(*policy);
    observation_place* present = place_of(observations, owner);
    if (rules.kind == observed_kind::nothing) {
        if (present != nullptr) present->owner = 0;
        owner.observation_place = 0;
        return KV_OK;
    }
    if (present != nullptr) {
        if (present->rules == rules) return KV_OK;
        present->rules = rules;
        clear_place(observations, index_of(owner));
        return KV_OK;
    }
    const uint32_t place = find_free_place(store, observations, 0);
    if (place == observations.places.size()) {
        return fail(KV_LIMIT,
                    "policy: scorer {} keeps scores per token, and {} of max_observed_sequences = "
                    "{} sequences do already: create the pool with more",
                    find_scorer(policy->scorer)->name, observations.places.size(),
                    observations.places.size());
    }
    take_place(store, observations, owner, place, rules);
    return KV_OK;
}

status check_child_places(cache& store, observation_store& observations, const sequence& parent,
                          uint32_t children) {
    if (parent.observation_place == 0) return KV_OK;
    uint32_t found = 0;
    for (uint32_t place = find_free_place(store, observations, 0);
         place < observations.places.size() && found < children;
         place = find_free_place(store, observations, place + 1)) {
        ++found;
    }
    if (found == children) return KV_OK;
    return fail(KV_LIMIT,
                "{} children whose policy keeps scores per token, {} of max_observed_sequences = "
                "{} places are free",
                children, found, observations.places.size());
}

void copy_observations(cache& store, observation_store& observations, const sequence& parent,
                       sequence& child) {
    child.observation_place = 0;
    if (parent.observation_place == 0) return;
    const uint32_t from = index_of(parent);
    const uint32_t to = find_free_place(store, observations, 0);
    take_place(store, observations, child, to, observations.places[from].rules);
    observations.places[to].skipped = observations.places[from].skipped;
    observations.places[to].gap = observations.places[from].gap;
    observations.places[to].seen_end = observations.places[from].seen_end;
    for (uint32_t lane = 0; lane < store.model.lanes.size(); ++lane) {
        const observed_lane& source = lane_at(observations, from, lane);
        observed_lane& target = lane_at(observations, to, lane);
        target = source;
        target.pending = false;
        const auto copy = [&](uint32_t array, uint32_t slots) {
            for (uint32_t head = 0; slots != 0 && head < store.model.lanes[lane].kv_heads; ++head) {
                const uint64_t offset = head * observations.slot_stride;
                std::copy_n(array_of(observations, from, array, lane) + offset, slots,
                            array_of(observations, to, array, lane) + offset);
            }
        };
        if (store.on_device()) continue;
        copy(source.present, source.slots);
        copy(source.previous, source.previous_slots);
    }
}

uint32_t arrays_in_use(const observation_store& observations, const sequence& owner) {
    uint32_t used = 0;
    for (uint32_t lane = 0; lane < observations.offset.size(); ++lane) {
        const observed_lane& state = lane_at(observations, index_of(owner), lane);
        if (state.slots != 0) used |= 1u << state.present;
        if (state.previous_slots != 0) used |= 1u << state.previous;
    }
    return used;
}

uint64_t place_of_array(const observation_store& observations, const sequence& owner,
                        uint32_t array) {
    return (uint64_t{index_of(owner)} * observation_arrays + array) * observations.length;
}

const observed_lane& observed_lane_of(const observation_store& observations, const sequence& owner,
                                      uint32_t lane) {
    return lane_at(observations, index_of(owner), lane);
}

uint64_t place_of_sums(const observation_store& observations, const sequence& owner, uint32_t array,
                       uint32_t lane, uint32_t kv_head) {
    return place_of_array(observations, owner, array) + observations.offset[lane] +
           kv_head * observations.slot_stride;
}

namespace {

/// Is a step's attention observed that has so many rows? Not every one of one token is.
bool takes_turn(const observation_place& place, uint32_t rows) {
    if (place.rules.kind == observed_kind::given) return false;
    return rows != 1 || place.skipped + 1 >= place.rules.every;
}

/// Rows before it do not count.
uint32_t first_observed_row(const observation_rules& rules, uint32_t rows) {
    if (rules.kind == observed_kind::last) return rows - 1;
    return is_windowed(rules) && rows > rules.window ? rows - rules.window : 0;
}

}  // namespace

observed_step plan_observed(const cache& store, const observation_store& observations,
                            const sequence& owner, uint32_t rows) {
    const observation_place* place = place_of(observations, owner);
    if (place == nullptr || !takes_turn(*place, rows)) return {};
    return {rows - first_observed_row(place->rules, rows),
            rows == 1 && leaves_out(store, owner, place->rules)};
}

lane_turn turn_of_lane(const cache& store, const observation_store& observations,
                       const sequence& owner, uint32_t lane, const observed_step& planned) {
    if (planned.rows == 0 || !store.model.lanes[lane].evictable) return lane_turn::none;
    const bool seen = observed_queries(observations, owner, lane) != 0;
    return planned.leaves_out && seen ? lane_turn::left_out : lane_turn::observed;
}

observed_arrays arrays_to_observe(const observation_store& observations, const sequence& owner,
                                  uint32_t lane, uint32_t rows) {
    const uint32_t place = index_of(owner), first = place * observation_arrays;
    const observation_rules& rules = observations.places[place].rules;
    const observed_lane& state = lane_at(observations, place, lane);
    const bool forgets = rules.kind == observed_kind::last || observations.places[place].gap ||
                         (is_windowed(rules) && rows >= rules.window);
    return {first + state.third(), forgets ? no_array : first + state.present};
}

bool make_observer(const cache& store, observation_store& observations, const sequence& owner,
                   uint32_t lane, uint32_t rows, attend_observer& observer) {
    const observed_step planned = plan_observed(store, observations, owner, rows);
    const lane_turn turn = turn_of_lane(store, observations, owner, lane, planned);
    if (turn == lane_turn::left_out) note_left_out(observations, owner);
    if (turn != lane_turn::observed) return false;
    const uint32_t place = index_of(owner);
    const observation_rules& rules = observations.places[place].rules;
    const observed_lane& state = lane_at(observations, place, lane);
    const observed_arrays arrays = arrays_to_observe(observations, owner, lane, rows);
    observer = {};
    observer.stride = observations.slot_stride;
    observer.sums = array_of(observations, place, state.third(), lane);
    observer.first_row = rows - planned.rows;
    observer.counts = rules.kind == observed_kind::counts;
    observer.decay = rules.decay;
    if (state.pending) {  // another layer has read the same lane in this step
        observer.before = observer.sums;
        observer.slots_before = state.pending_slots;
        observer.before_decays = false;
    } else if (arrays.before != no_array) {
        observer.before = array_of(observations, place, state.present, lane);
        observer.slots_before = state.slots;
    }
    return true;
}

void note_left_out(observation_store& observations, const sequence& owner) {
    observations.places[index_of(owner)].pending_gap = true;
}

void note_observed(observation_store& observations, const sequence& owner, uint32_t lane,
                   uint32_t rows, uint32_t slots) {
    const uint32_t place = index_of(owner);
    const observation_rules& rules = observations.places[place].rules;
    observed_lane& state = lane_at(observations, place, lane);
    state.pending = true;
    state.pending_slots = slots;
    state.pending_queries = rules.kind == observed_kind::last ? 1
                            : is_windowed(rules)              ? std::min(rows, rules.window)
                                                              : rows;
}

void commit_observations(const cache& store, observation_store& observations,
                         const sequence& owner) {
    if (owner.observation_place == 0) return;
    const uint32_t place = index_of(owner);
    observation_place& whole = observations.places[place];
    const observation_rules& rules = whole.rules;
    bool observed = false;
    for (uint32_t lane = 0; lane < store.model.lanes.size(); ++lane) {
        observed_lane& state = lane_at(observations, place, lane);
        if (!state.pending) continue;
        observed = true;
        state.pending = false;
        const bool forgets = rules.kind == observed_kind::last || whole.gap ||
                             (is_windowed(rules) && state.pending_queries == rules.window);
        state.present = state.third();
        state.slots = std::min(state.pending_slots, owner.lanes[lane].slots);
        if (forgets) {
            state.queries = state.pending_queries;
            state.previous_slots = 0;
            state.previous_queries = 0;
        } else {
            constexpr uint32_t most = std::numeric_limits<uint32_t>::max();
            state.queries += std::min(state.pending_queries, most - state.queries);
        }
        if (is_windowed(rules) && state.queries >= rules.window) {
            std::swap(state.present, state.previous);
            state.previous_slots = state.slots;
            state.previous_queries = state.queries;
            state.slots = 0;
            state.queries = 0;
        }
    }
    whole.skipped = observed ? 0 : whole.skipped + 1;
    whole.gap = !observed && (whole.gap || whole.pending_gap);
    whole.pending_gap = false;
    if (observed) whole.seen_end = owner.next_position;
}

void discard_observations(const cache& store, observation_store& observations,
                          const sequence& owner) {
    if (owner.observation_place == 0) return;
    for (uint32_t lane = 0; lane < store.model.lanes.size(); ++lane) {
        lane_at(observations, index_of(owner), lane).pending = false;
    }
    observations.places[index_of(owner)].pending_gap = false;
}

void truncate_observations(const cache& store, observation_store& observations,
                           const sequence& owner) {
    if (owner.observation_place == 0) return;
    for (uint32_t lane = 0; lane < store.model.lanes.size(); ++lane) {
        observed_lane& state = lane_at(observations, index_of(owner), lane);
        state.slots = std::min(state.slots, owner.lanes[lane].slots);
        state.previous_slots = std::min(state.previous_slots, owner.lanes[lane].slots);
        state.given_end = std::min(state.given_end, owner.next_position);
    }
    observation_place& whole = observations.places[index_of(owner)];
    whole.seen_end = std::min(whole.seen_end, owner.next_position);
}

uint64_t unseen_tokens(const observation_store& observations, const sequence& owner,
                       const kv_policy& policy) {
    const observation_place* place = place_of(observations, owner);
    if (place == nullptr || !place->gap || !(place->rules == rules_of(policy))) return 0;
    return owner.next_position - place->seen_end;
}

namespace {

/// Of ascending survivors, those below `slots`.
uint32_t survivors_below(const uint32_t* survivors, uint32_t count, uint32_t slots) {
    return static_cast<uint32_t>(std::lower_bound(survivors, survivors + count, slots) - survivors);
}

}  // namespace

void compact_observations(observation_store& observations, const sequence& owner, uint32_t lane,
                          uint32_t kv_head, const uint32_t* survivors, uint32_t count) {
    if (owner.observation_place == 0) return;
    const uint32_t place = index_of(owner);
    const observed_lane& state = lane_at(observations, place, lane);
    const float unknown = score_of_unknown(observations, owner);
    const auto slide = [&](uint32_t array, uint32_t slots) {
        float* sums =
            array_of(observations, place, array, lane) + kv_head * observations.slot_stride;
        const uint32_t known = survivors_below(survivors, count, slots);
        for (uint32_t i = 0; i < known; ++i) sums[i] = sums[survivors[i]];
        // Heads differ in how many of their survivors have sums; the lane has one number.
        std::fill(sums + known, sums + std::min(slots, count), unknown);
    };
    slide(state.present, state.slots);
    if (state.previous_slots != 0) slide(state.previous, state.previous_slots);
}

void end_compaction(observation_store& observations, const sequence& owner, uint32_t lane,
                    uint32_t count) {
    if (owner.observation_place == 0) return;
    observed_lane& state = lane_at(observations, index_of(owner), lane);
    state.slots = std::min(state.slots, count);
    state.previous_slots = std::min(state.previous_slots, count);
}

uint64_t observed_queries(const observation_store& observations, const sequence& owner,
                          uint32_t lane) {
    return owner.observation_place == 0 ? 0 : lane_at(observations, index_of(owner), lane).seen();
}

uint64_t positions_behind(const observation_store& observations, const sequence& owner,
                          uint32_t lane) {
    return owner.next_position - lane_at(observations, index_of(owner), lane).given_end;
}

float score_of_unknown(const observation_store& observations, const sequence& owner) {
    const bool given = observations.places[index_of(owner)].rules.kind == observed_kind::given;
    return given ? std::numeric_limits<float>::infinity() : 0.0f;
}

void read_observations(const observation_store& observations, const sequence& owner, uint32_t lane,
                       uint32_t kv_head, uint32_t slots, float* scores) {
    const uint32_t place = index_of(owner);
    const observed_lane& state = lane_at(observations, place, lane);
    const uint64_t offset = kv_head * observations.slot_stride;
    const uint32_t known = std::min(state.slots, slots);
    std::copy_n(array_of(observations, place, state.present, lane) + offset, known, scores);
    std::fill(scores + known, scores + slots, score_of_unknown(observations, owner));
    const float* before = array_of(observations, place, state.previous, lane) + offset;
    const uint32_t known_before = std::min(state.previous_slots, slots);
    for (uint32_t slot = 0; slot < known_before; ++slot) scores[slot] += before[slot];
}

void give_scores(observation_store& observations, const sequence& owner, uint32_t lane,
                 uint32_t kv_head, const slot_positions& positions, uint64_t first, uint64_t count,
                 const float* scores) {
    const uint32_t place = index_of(owner);
    const observed_lane& state = lane_at(observations, place, lane);
    float* mine =
        array_of(observations, place, state.present, lane) + kv_head * observations.slot_stride;
    std::fill(mine + std::min(state.slots, positions.slots), mine + positions.slots,
              std::numeric_limits<float>::infinity());
    const uint64_t end = count > ~first ? ~uint64_t{0} : first + count;
    for (uint32_t slot = positions.find(first); slot < positions.slots; ++slot) {
        const uint64_t position = positions.at(slot);
        if (position >= end) break;
        mine[slot] = scores[position - first];
    }
}

void end_giving(observation_store& observations, const sequence& owner, uint32_t lane) {
    observed_lane& state = lane_at(observations, index_of(owner), lane);
    state.slots = owner.lanes[lane].slots;
    state.queries = 1;
    state.given_end = owner.next_position;
}

}  // namespace kvrt
