#include "step/device_rounds.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "retention/scorers.hpp"
#include "retention/scoring.hpp"
#include "step/step.hpp"

namespace kvrt {

namespace {

constexpr uint32_t most_rounds_at_once = 64;
/// So that planning takes little memory, whatever the model.
constexpr uint32_t most_planned_lanes = 1u << 13;

static_assert(max_block_classes <= KVRT_MOST_POSITIONS);

bool rotate_alike(const cache& store, uint32_t a, uint32_t b) {
    const auto dim = [&](uint32_t layer) {
        return store.model.lanes[store.model.layers[layer].first_lane].layout.keys.dim;
    };
    const rope_description &first = store.model.layers[a].rope,
                           &second = store.model.layers[b].rope;
    return dim(a) == dim(b) && first.style == second.style &&
           first.dimensions == second.dimensions &&
           first.attention_factor == second.attention_factor &&
           std::equal(first.inverse_frequencies, first.inverse_frequencies + first.rotated_bands(),
                      second.inverse_frequencies);
}

/// Each rotation has its phases once, in the order of the layers.
void place_phases(const cache& store, device_rounds& rounds) {
    rounds.phase_stride = 0;
    for (uint32_t layer = 0; layer < store.model.layers.size(); ++layer) {
        rounds.first_phase[layer] = rounds.phase_stride;
        if (!has_statistics(store, layer)) continue;
        uint32_t other = 0;
        while (other < layer &&
               !(has_statistics(store, other) && rotate_alike(store, other, layer))) {
            ++other;
        }
        if (other < layer) {
            rounds.first_phase[layer] = rounds.first_phase[other];
        } else {
            rounds.phase_stride += most_phases(store, layer);
        }
    }
}

/// Lanes of one kind have one layout, one rotation and as many query heads. Kinds that rotate alike
/// follow each other.
void number_kinds(const step_context& context, device_rounds& rounds) {
    const model_geometry& model = context.store->model;
    const auto alike = [&](uint32_t a, uint32_t b) {
        const lane_geometry &first = model.lanes[a], &second = model.lanes[b];
        const auto in_both = [&](const host_array<kvrt_lane>& lanes) {
            return std::memcmp(&lanes[a], &lanes[b], sizeof(kvrt_lane)) == 0;
        };
        return in_both(context.verbs.lanes) && in_both(context.verbs.sealed_lanes) &&
               model.layers[first.layer].group() == model.layers[second.layer].group() &&
               rotate_alike(*context.store, first.layer, second.layer);
    };
    constexpr uint32_t none = ~uint32_t{0};
    std::fill(rounds.kind_of.begin(), rounds.kind_of.end(), none);
    uint32_t kinds = 0;
    const uint32_t lanes = static_cast<uint32_t>(model.lanes.size());
    for (uint32_t first = 0; first < lanes; ++first) {
        if (rounds.kind_of[first] != none) continue;
        for (uint32_t lane = first; lane < lanes; ++lane) {
            if (rounds.kind_of[lane] != none ||
                !rotate_alike(*context.store, model.lanes[first].layer, model.lanes[lane].layer)) {
                continue;
            }
            for (uint32_t other = lane; other < lanes; ++other) {
                if (rounds.kind_of[other] == none && alike(lane, other)) {
                    rounds.kind_of[other] = kinds;
                }
            }
            ++kinds;
        }
    }
    uint32_t run = 0, last = none;  // the last lane that rounds may take
    for (uint32_t lane = 0; lane < lanes; ++lane) {
        if (!model.lanes[lane].evictable) continue;
        if (last != none && rounds.kind_of[last] != rounds.kind_of[lane]) ++run;
        rounds.run_of[lane] = run;
        last = lane;
    }
}

}  // namespace

uint64_t most_phases(const cache& store, uint32_t layer) {
    triattention_shape widest = shape_of(store, layer, kv_policy{});
    widest.offset_max = 1u << 31;
    widest.maximum = true;
    return triattention_phase_count(widest, store.model.layers[layer].rope);
}

void device_rounds::measure(const step_context& context, uint64_t& words) {
    moments_word = round_up<uint64_t>(words, device_tables::line_words);
    words = moments_word + query_sum_arrays * context.retention->statistics.length;
}

status device_rounds::create(step_context& context) {
    const model_geometry& model = context.store->model;
    if (!context.verbs.available) return KV_OK;
    for (const layer_geometry& layer : model.layers) {
        const lane_geometry& lane = model.lanes[layer.first_lane];
        const bool reads = layer.alibi_slopes != nullptr || lane.layout.keys.turning != nullptr;
        if (reads && lane.evictable) return prepare(context);
    }
    return KV_OK;
}

status device_rounds::prepare(step_context& context) {
    if (prepared) return KV_OK;
    cache& store = *context.store;
    const model_geometry& model = store.model;
    host_allocator& allocator = store.allocator;
    const uint32_t lane_count = static_cast<uint32_t>(model.lanes.size());
    constexpr const char* what = "rounds on the device";
    most_rounds = std::clamp(most_planned_lanes / lane_count, 1u,
                             std::min(store.limits.max_step_sequences, most_rounds_at_once));
    // After a failure, what is there stays.
    const auto once = [&](auto& array, uint64_t count) {
        return array.size() != 0 ? KV_OK : array.allocate(allocator, count, what);
    };
    KVRT_TRY(once(first_phase, model.layers.size()));
    place_phases(store, *this);

    kvrt_round_memory memory = {};
    memory.most_slots = store.limits.max_tokens_per_sequence;
    memory.most_blocks = model.blocks_for(store.limits.max_tokens_per_sequence);
    memory.lanes = lane_count;
    memory.most_rounds = most_rounds;
    memory.phases = phase_stride;
    memory.count_words = uint64_t{store.limits.max_sequences} * lane_count;
    for (const lane_geometry& lane : model.lanes) {
        // All heads of a layer may share a set.
        memory.most_heads = std::max(memory.most_heads, model.layers[lane.layer].kv_heads);
        memory.most_rows = std::max(memory.most_rows, model.layers[lane.layer].query_heads);
        memory.most_dim = std::max({memory.most_dim, lane.layout.keys.dim, lane.layout.values.dim});
        if (!lane.evictable) continue;
        for (const uint32_t index : {lane.class_index, lane.sealed_class_index}) {
            memory.position_words[index] =
                store.blocks.blocks_in_class(index) * model.classes[index].positions_per_block;
        }
    }
    KVRT_TRY(store.device.create_rounds(memory));
    for (uint32_t i = 0; i < lane_count; ++i) {
        const lane_geometry& lane = model.lanes[i];
        if (!lane.evictable) continue;
        const auto positions_in = [&](uint32_t index) -> kvrt_positions {
            const position_store source = store.blocks.positions(index, model.block_tokens);
            return {memory.positions[index], source.numbering.reciprocal,
                    units_per_slab,          source.numbering.blocks_per_slab,
                    source.block_stride,     source.block_tokens};
        };
        context.verbs.lanes[i].positions = positions_in(lane.class_index);
        if (!lane.seals) continue;
        context.verbs.sealed_lanes[i].positions = positions_in(lane.sealed_class_index);
    }
    KVRT_TRY(once(kind_of, lane_count));
    KVRT_TRY(once(run_of, lane_count));
    number_kinds(context, *this);
    const uint64_t planned_lanes = uint64_t{most_rounds} * lane_count;
    KVRT_TRY(once(pending, most_rounds));
    KVRT_TRY(once(first_set, most_rounds));
    KVRT_TRY(once(planned, planned_lanes));
    KVRT_TRY(once(lanes, planned_lanes));
    KVRT_TRY(once(planned_origins, planned_lanes));
    KVRT_TRY(once(origins, planned_lanes));
    KVRT_TRY(once(order, planned_lanes));
    KVRT_TRY(once(phases, most_rounds * phase_stride));
    KVRT_TRY(once(targets, uint64_t{lane_count} * store.sequences.max_blocks()));
    KVRT_TRY(once(target_at, planned_lanes));
    KVRT_TRY(once(store.spans, uint64_t{store.limits.max_sequences} * lane_count));
    KVRT_TRY(counted.prepare(store, memory.counts));
    prepared = true;
    return KV_OK;
}

void device_rounds::write_moments(step_context& context) {
    static_assert(sizeof(float) == sizeof(uint32_t));
    const statistics_store& statistics = context.retention->statistics;
    if (moments_written == statistics.given_changes) return;
    moments_written = statistics.given_changes;
    context.store->device.write_table(moments_word,
                                      reinterpret_cast<const uint32_t*>(statistics.given.data()),
                                      query_sum_arrays * statistics.length);
}

position_store device_rounds::positions_of(const step_context& context, uint32_t lane,
                                           bool sealed) const {
    const cache& store = *context.store;
    const lane_geometry& geometry = store.model.lanes[lane];
    const device_verbs& verbs = context.verbs;
    position_store made = store.blocks.positions(
        sealed ? geometry.sealed_class_index : geometry.class_index, store.model.block_tokens);
    made.base = (sealed ? verbs.sealed_lanes : verbs.lanes)[lane].positions.base;
    return made;
}

status read_positions(step_context& context, const sequence& owner, uint32_t lane, uint32_t head,
                      uint64_t count, uint32_t* positions) {
    cache& store = *context.store;
    const uint32_t block_tokens = store.model.block_tokens;
    const position_store stores[2] = {context.rounds.positions_of(context, lane, false),
                                      context.rounds.positions_of(context, lane, true)};
    const lane_state& state = owner.lanes[lane];
    host_allocator own;
    host_array<kvrt_words> pieces;
    KVRT_TRY(pieces.allocate(own, ceil_divide<uint64_t>(count, block_tokens), "positions"));
    for (uint64_t i = 0; i < pieces.size(); ++i) {
        pieces[i] = {stores[i < state.sealed_blocks ? 1 : 0].of(state.table[i], head),
                     std::min<uint64_t>(block_tokens, count - i * block_tokens)};
    }
    const uint64_t number = ++store.fences.last_begun;
    KVRT_TRY(store.device.open_round(number));
    const status verdict = store.device.read_words(number, pieces.data(), pieces.size(), positions);
    const status ended = store.device.end_step(number);
    return verdict < 0 ? verdict : ended;
}

bool goes_by_observation(uint32_t scorer) {
    return find_scorer(scorer)->observes != observed_kind::nothing;
}

status check_policy_on_device(const step_context& context, const kv_policy& policy) {
    const cache& store = *context.store;
    const status kernels = store.device.kernels();
    if (kernels < 0) {
        const std::string reason = message_buffer();
        return fail(kernels, "policy: {}", reason);
    }
    for (uint32_t i = 0; i < store.model.lanes.size(); ++i) {
        const lane_geometry& lane = store.model.lanes[i];
        if (!takes_part(store, policy, lane.layer)) continue;
        const kvrt_lane* const sealed = lane.seals ? &context.verbs.sealed_lanes[i] : nullptr;
        KVRT_TRY(store.device.check_round(context.verbs.lanes[i], sealed, policy.scorer));
        if (value_reserve_of(policy) == 0) continue;
        KVRT_TRY(store.device.check_value_ranges(context.verbs.lanes[i], sealed));
    }
    return KV_OK;
}

namespace {

bool reads_rows(const kv_policy& policy) {
    const uint32_t scorer = policy.scorer;
    const bool reads_sums =
        goes_by_observation(scorer) && scorer != KV_SCORER_BLEND && scorer != KV_SCORER_RKV;
    return value_reserve_of(policy) != 0 ||
           !(reads_sums || scorer == KV_SCORER_STREAMING || scorer == KV_SCORER_RANDOM);
}

/// Rows in f32 of the lanes that a policy reads or codes anew: room for all of the largest layer,
/// and for as many more as are comfortable.
status prepare_opened(step_context& context, const kv_policy& policy) {
    constexpr uint64_t comfortable = uint64_t{64} << 20;
    cache& store = *context.store;
    uint64_t largest = 0, all = 0;
    bool opens = false;
    for (const layer_geometry& layer : store.model.layers) {
        if (!layer.stores) continue;
        const lane_geometry& lane = store.model.lanes[layer.first_lane];
        if (!lane.seals || !lane.evictable) continue;
        const uint64_t slots =
            uint64_t{store.model.blocks_for(store.limits.max_tokens_per_sequence)} *
            store.model.block_tokens;
        const uint64_t bytes = slots * layer.kv_heads *
                               (lane.layout.keys.dim + lane.layout.values.dim) * sizeof(float);
        largest = std::max(largest, bytes);
        all += bytes * context.rounds.most_rounds;
        opens = opens || reads_rows(policy) || !lane.demotes;
    }
    if (!opens) return KV_OK;
    return store.device.create_opened(std::max(largest, std::min(all, comfortable)));
}

}  // namespace

status prepare_policy_on_device(step_context& context, const kv_policy& policy) {
    KVRT_TRY(check_policy_on_device(context, policy));
    KVRT_TRY(context.rounds.prepare(context));
    if (policy.scorer == KV_SCORER_HOST) KVRT_TRY(context.given.prepare(context));
    KVRT_TRY(prepare_opened(context, policy));
    const auto& given = context.retention->statistics.given_tokens;
    const bool gathers = (policy.flags & KV_POLICY_STATISTICS_ONLINE) != 0 ||
                         std::all_of(given.begin(), given.end(), [](uint64_t t) { return t == 0; });
    if (!gathers || !find_scorer(policy.scorer)->query_statistics) return KV_OK;
    return context.queries.prepare(context);
}

}  // namespace kvrt
