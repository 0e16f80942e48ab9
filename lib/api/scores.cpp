// What sequences have been given of scores, or have observed, by token.
#include "api/scores.hpp"

#include <algorithm>

namespace kvrt {

namespace {

/// The layer of a call about scores, with tables of its own whose tokens policies choose.
status find_scored_layer(const kv_pool& pool, uint32_t layer, const layer_geometry*& found) {
    const model_geometry& model = pool.store.model;
    if (layer >= model.layers.size()) {
        return fail(KV_INVALID, "layer {} of a model of {} layers", layer, model.layers.size());
    }
    found = &model.layers[layer];
    if (found->stores && model.lanes[found->first_lane].evictable) return KV_OK;
    return fail(KV_INVALID,
                "layer {}: policies choose no tokens here: it shares a cache, or has a "
                "window",
                layer);
}

void give_on_host(kv_pool& pool, const sequence& target, const layer_geometry& layer,
                  const given_scores& given) {
    for (uint32_t kv_head = 0; kv_head < layer.kv_heads; ++kv_head) {
        const head_place at = layer.place_of(kv_head);
        give_scores(pool.retention.observations, target, at.lane, at.head,
                    positions_of(pool.store, target, at.lane, at.head), given.first_position,
                    given.tokens, given.scores + kv_head * given.tokens);
    }
}

}  // namespace

status set_scores(kv_pool& pool, const sequence& target, const given_scores& given) {
    const layer_geometry* layer = nullptr;
    const uint64_t first = given.first_position, tokens = given.tokens;
    KVRT_TRY(find_scored_layer(pool, given.layer, layer));
    if (given.scores == nullptr || tokens == 0) {
        return fail(KV_INVALID, "scores of {} tokens at {}: say which", tokens,
                    static_cast<const void*>(given.scores));
    }
    if (first >= target.next_position || tokens > target.next_position - first) {
        return fail(KV_INVALID, "scores for positions [{}, {} + {}), {} were seen", first, first,
                    tokens, target.next_position);
    }
    observation_store& observations = pool.retention.observations;
    const observation_place* place = place_of(observations, target);
    if (place == nullptr || place->rules.kind != observed_kind::given) {
        return fail(KV_INVALID, "scores are for sequences whose policy's scorer is HOST");
    }
    if (pool.store.on_device()) {
        KVRT_TRY(give_on_device(pool.steps, target, given));
    } else {
        give_on_host(pool, target, *layer, given);
    }
    for (uint32_t lane = layer->first_lane; lane < layer->end_lane(); ++lane) {
        end_giving(observations, target, lane);
    }
    return KV_OK;
}

namespace {

status get_scores(kv_pool& pool, const sequence& source, uint32_t layer, uint32_t kv_head,
                  uint64_t capacity, float* out_scores, uint64_t* out_count) {
    const layer_geometry* geometry = nullptr;
    KVRT_TRY(find_scored_layer(pool, layer, geometry));
    if (kv_head >= geometry->kv_heads) {
        return fail(KV_INVALID, "KV head {} of {}", kv_head, geometry->kv_heads);
    }
    if (out_count == nullptr || (out_scores == nullptr && capacity != 0)) {
        return fail(KV_INVALID, "out_count, and out_scores where capacity is not 0, must be set");
    }
    const head_place at = geometry->place_of(kv_head);
    const observation_store& observations = pool.retention.observations;
    *out_count = 0;
    if (observed_queries(observations, source, at.lane) == 0) return KV_OK;
    *out_count = source.lanes[at.lane].slots;
    const uint32_t wanted = static_cast<uint32_t>(std::min(capacity, *out_count));
    if (wanted != 0 && pool.store.on_device()) {
        return read_sums(pool.steps, source, at.lane, at.head, wanted, out_scores);
    }
    if (wanted != 0) {
        read_observations(observations, source, at.lane, at.head, wanted, out_scores);
    }
    return KV_OK;
}

}  // namespace

}  // namespace kvrt

using namespace kvrt;

extern "C" {

kv_status kv_seq_set_scores(kv_pool* pool, kv_seq seq, uint32_t layer, uint64_t first_position,
                            uint64_t tokens, const float* scores) {
    return call_pool(pool, [&] {
        return with_sequence(*pool, seq, [&](sequence& target) {
            return set_scores(*pool, target, {layer, first_position, tokens, scores});
        });
    });
}

kv_status kv_seq_get_scores(kv_pool* pool, kv_seq seq, uint32_t layer, uint32_t kv_head,
                            uint64_t capacity, float* out_scores, uint64_t* out_count) {
    return call_pool(pool, [&] {
        return with_sequence(*pool, seq, [&](sequence& source) {
            return get_scores(*pool, source, layer, kv_head, capacity, out_scores, out_count);
        });
    });
}

}  // extern "C"
