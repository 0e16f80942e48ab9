#include "driver/round_scores.hpp"

#include <algorithm>

#include "driver/verbs.hpp"
#include "kernels/places.hpp"
#include "kernels/score.hpp"

namespace kvrt::cuda {

namespace {

using namespace kernels;

template <class type>
type& made_at(std::byte* lane) {
    return *reinterpret_cast<type*>(lane);
}

template <class type>
const type* lanes_of(const score_call& call) {
    return reinterpret_cast<const type*>(call.lanes);
}

template <class type>
const type* batch_of(const score_call& call) {
    return reinterpret_cast<const type*>(call.batch);
}

const std::byte* arena_of(const score_call& call) {
    return static_cast<const std::byte*>(call.first().lane->arena);
}

uint32_t blocks_of(const round_share& share) {
    return score_blocks(share.count, share.kv_heads, share.most_slots);
}

void describe_place_lane(const kvrt_round_lane& from, const lane_places& at, std::byte* lane) {
    const kvrt_round_scores& scored = from.scores;
    made_at<place_lane>(lane) = {at.table,          at.row,       from.guards->next_position,
                                 scored.seed,       scored.round, scored.layer,
                                 scored.first_head, from.slots,   from.explicit_slots};
}

void describe_key_lane(const kvrt_round_lane& from, const lane_places& at, std::byte* lane) {
    made_at<score_lane>(lane) = {at.table, at.row, from.scores.means, at.phases, from.slots, 0};
}

}  // namespace

const round_scorer round_scores::scorers[] = {
    {KV_SCORER_STREAMING, false, false, sizeof(place_lane), describe_place_lane,
     &round_scores::score_places},
    {KV_SCORER_RANDOM, false, false, sizeof(place_lane), describe_place_lane,
     &round_scores::score_places},
    {KV_SCORER_KEY_NORM, true, false, sizeof(score_lane), describe_key_lane,
     &round_scores::score_norms},
    {KV_SCORER_TRIATTENTION, true, true, sizeof(score_lane), describe_key_lane,
     &round_scores::score_triattention},
};

#define KVRT_READER(name, coded, type)        \
    {                                         \
        coded, type,                          \
            {{"kvrt_score_keys_" name "_2"},  \
             {"kvrt_score_keys_" name "_4"},  \
             {"kvrt_score_keys_" name "_8"}}, \
            {"kvrt_measure_rows_" name}, {    \
            "kvrt_gather_keys_" name          \
        }                                     \
    }

round_scores::round_scores()
    : places_{"kvrt_score_places"},
      normalise_{"kvrt_normalise_and_reduce"},
      readers_{KVRT_READER("f32", coding::plain, number::f32),
               KVRT_READER("f16", coding::plain, number::f16),
               KVRT_READER("bf16", coding::plain, number::bf16),
               KVRT_READER("int8_token", coding::int8_token, number::f32),
               KVRT_READER("int4_token", coding::int4_token, number::f32),
               KVRT_READER("fp8_token", coding::fp8_token, number::f32),
               KVRT_READER("fp8_e4m3", coding::fp8_e4m3, number::f32),
               KVRT_READER("fp8_e5m2", coding::fp8_e5m2, number::f32)} {}

uint32_t round_scores::most_lane_bytes() {
    uint32_t most = 0;
    for (const round_scorer& each : scorers) most = std::max(most, each.lane_bytes);
    return most;
}

const round_scorer* round_scores::find(uint32_t scorer) {
    for (const round_scorer& each : scorers) {
        if (each.scorer == scorer) return &each;
    }
    return nullptr;
}

status round_scores::create(kernel_functions& functions) {
    functions_ = &functions;
    for (kernel_function* each : {&places_, &normalise_}) KVRT_TRY(functions.find(*each));
    for (key_functions& each : readers_) {
        for (kernel_function& score : each.score) KVRT_TRY(functions.find(score));
        KVRT_TRY(functions.find(each.measure));
        KVRT_TRY(functions.find(each.gather));
    }
    return KV_OK;
}

round_scores::key_functions* round_scores::reader_of(const operand_place& keys) {
    if (keys.rotated) return nullptr;  // scores are of keys in their own basis
    for (key_functions& each : readers_) {
        if (each.codes != keys.codes) continue;
        if (keys.codes != coding::plain || each.type == keys.type) return &each;
    }
    return nullptr;
}

status round_scores::check(const kvrt_lane& lane, const block_place& place, uint32_t scorer) {
    const round_scorer* const known = find(scorer);
    if (known == nullptr) return fail(KV_INTERNAL, "a round of scorer {}", scorer);
    if (!known->reads_keys || reader_of(place.keys) != nullptr) return KV_OK;
    return fail(KV_UNSUPPORTED,
                "policy: keys of KV_FORMAT {}{}: no kernel of KV_DEVICE_CUDA scores them in this "
                "version (see docs/device.md)",
                lane.keys.format, lane.keys.rotated != 0 ? ", rotated" : "");
}

status round_scores::launch(const score_call& call) {
    return (this->*find(call.first().scores.scorer)->launch)(call);
}

status round_scores::find_reader(const score_call& call, key_functions*& reader) {
    reader = reader_of(call.share.place.keys);
    if (reader != nullptr) return KV_OK;
    return fail(KV_INTERNAL, "a round of scorer {} over KV_FORMAT {}", call.first().scores.scorer,
                call.first().lane->keys.format);
}

status round_scores::score_places(const score_call& call) {
    const round_share& share = call.share;
    place_parameters parameters;
    parameters.positions = positions_of(call.first().lane->positions);
    parameters.tables = batch_of<uint32_t>(call);
    parameters.lanes = lanes_of<place_lane>(call);
    parameters.scores = call.scores;
    parameters.stride = share.stride;
    parameters.count = share.count;
    parameters.kv_heads = share.kv_heads;
    parameters.most_slots = share.most_slots;
    parameters.draws = call.first().scores.scorer == KV_SCORER_RANDOM;
    parameters.one_draw = share.shares_sets;
    return functions_->launch(places_, blocks_of(share), score_threads, 0, call.stream,
                              &parameters);
}

status round_scores::score_norms(const score_call& call) {
    const round_share& share = call.share;
    key_functions* reader = nullptr;
    KVRT_TRY(find_reader(call, reader));
    measure_parameters parameters;
    parameters.arena = arena_of(call);
    parameters.place = share.place;
    parameters.lanes = lanes_of<score_lane>(call);
    parameters.tables = batch_of<uint32_t>(call);
    parameters.norm = call.scores;
    parameters.stride = share.stride;
    parameters.count = share.count;
    parameters.most_slots = share.most_slots;
    parameters.negates = true;
    return functions_->launch(reader->measure, blocks_of(share), score_threads, 0, call.stream,
                              &parameters);
}

status round_scores::score_triattention(const score_call& call) {
    const round_share& share = call.share;
    const kvrt_round_scores& scored = call.first().scores;
    key_functions* reader = nullptr;
    KVRT_TRY(find_reader(call, reader));
    triattention_parameters parameters;
    parameters.arena = arena_of(call);
    parameters.place = share.place;
    parameters.lanes = lanes_of<score_lane>(call);
    parameters.tables = batch_of<uint32_t>(call);
    parameters.mean_real = call.round.means[0];
    parameters.mean_imaginary = call.round.means[1];
    parameters.mean_magnitude = call.round.means[2];
    parameters.phases = batch_of<double>(call);
    parameters.scores = call.scores;
    parameters.score_stride = share.stride;
    parameters.attention_factor = scored.attention_factor;
    parameters.count = share.count;
    parameters.most_slots = share.most_slots;
    parameters.group = scored.group;
    parameters.rotated = scored.rotated;
    parameters.variants = scored.variants;
    parameters.interleaved = scored.interleaved != 0;
    const uint32_t at_once = heads_at_once(scored.group);
    kernel_function& score = reader->score[at_once == 2 ? 0 : at_once == 4 ? 1 : 2];
    KVRT_TRY(triattention_.launch(*functions_, call.stream, parameters, score, reader->gather));
    return normalise(call);
}

status round_scores::normalise(const score_call& call) {
    normalise_parameters parameters;
    parameters.scores = call.scores;
    parameters.guarded = call.guarded;
    parameters.heads = call.heads;
    parameters.stride = call.share.stride;
    parameters.group = call.first().scores.group;
    parameters.count = call.share.heads();
    return functions_->launch(normalise_, parameters.count, normalise_threads,
                              normalise_shared_bytes(parameters.group), call.stream, &parameters);
}

}  // namespace kvrt::cuda
