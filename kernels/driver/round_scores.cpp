#include "driver/round_scores.hpp"

#include <algorithm>

#include "driver/gather.hpp"
#include "driver/verbs.hpp"
#include "kernels/places.hpp"
#include "kernels/score_directions.hpp"
#include "kernels/score_sketch.hpp"

namespace kvrt::cuda {

namespace {

using namespace kernels;

template <class type>
type& made_at(std::byte* lane) {
    return *reinterpret_cast<type*>(lane);
}

status refuse(const char* what, const kvrt_operand& operand, const char* does) {
    return fail(KV_UNSUPPORTED,
                "policy: {} of KV_FORMAT {}{}: no kernel of KV_DEVICE_CUDA {} them in this "
                "version (see docs/device.md)",
                what, operand.format, operand.rotated != 0 ? ", rotated" : "", does);
}

void describe_place_lane(const kvrt_round_lane& from, const lane_places& at, std::byte* lane) {
    const kvrt_round_scores& scored = from.scores;
    made_at<place_lane>(lane) = {at.table,
                                 at.row,
                                 from.guards->next_position,
                                 scored.seed,
                                 scored.round,
                                 scored.layer,
                                 scored.first_head,
                                 from.slots,
                                 from.explicit_slots,
                                 from.sealed_slots,
                                 0};
}

void describe_key_lane(const kvrt_round_lane& from, const lane_places& at, std::byte* lane) {
    made_at<score_lane>(lane) = {at.table, at.row, at.moments, at.phases, from.slots, 0};
}

/// Scores that go by sums of observed attention, which are told by KV head.
void describe_nothing(const kvrt_round_lane&, const lane_places&, std::byte*) {}

}  // namespace

const round_scorer round_scores::scorers[] = {
    {KV_SCORER_STREAMING, lane_reads::nothing, false, sizeof(place_lane), describe_place_lane,
     &round_scores::score_places},
    {KV_SCORER_RANDOM, lane_reads::nothing, false, sizeof(place_lane), describe_place_lane,
     &round_scores::score_places},
    {KV_SCORER_KEY_NORM, lane_reads::keys_by_format, false, sizeof(score_lane), describe_key_lane,
     &round_scores::score_norms},
    {KV_SCORER_TRIATTENTION, lane_reads::keys_by_format, true, sizeof(score_lane),
     describe_key_lane, &round_scores::score_triattention},
    {KV_SCORER_KEYDIFF, lane_reads::keys, false, sizeof(score_lane), describe_key_lane,
     &round_scores::score_directions, &round_scores::direction_scratch},
    {KV_SCORER_LAGKV, lane_reads::keys_and_values, false, sizeof(score_lane), describe_key_lane,
     &round_scores::score_lag, [](uint32_t, uint64_t stride) { return 2 * stride; }},
    {KV_SCORER_VASE_SKETCH, lane_reads::keys_and_values, false, sizeof(place_lane),
     describe_place_lane, &round_scores::score_sketch,
     [](uint32_t dim, uint64_t) { return uint64_t{sketch_floats(dim)}; }},
    {KV_SCORER_EXPECTED_ATTENTION, lane_reads::keys_and_values, true, sizeof(score_lane),
     describe_key_lane, &round_scores::score_expected,
     [](uint32_t, uint64_t stride) { return stride; }},
    {KV_SCORER_H2O, lane_reads::nothing, false, 0, describe_nothing, &round_scores::score_observed},
    {KV_SCORER_SCISSORHANDS, lane_reads::nothing, false, 0, describe_nothing,
     &round_scores::score_observed},
    {KV_SCORER_TOVA, lane_reads::nothing, false, 0, describe_nothing,
     &round_scores::score_observed},
    {KV_SCORER_SNAPKV, lane_reads::nothing, false, 0, describe_nothing,
     &round_scores::score_observed},
    {KV_SCORER_VASE_ATTENTION, lane_reads::nothing, false, 0, describe_nothing,
     &round_scores::score_observed},
    {KV_SCORER_HOST, lane_reads::nothing, false, 0, describe_nothing,
     &round_scores::score_observed},
    {KV_SCORER_RKV, lane_reads::keys, false, sizeof(score_lane), describe_key_lane,
     &round_scores::score_redundancy, &round_scores::redundancy_scratch, true},
    {KV_SCORER_BLEND, lane_reads::keys_by_format, true, sizeof(score_lane), describe_key_lane,
     &round_scores::score_blend, &round_scores::blend_scratch, true},
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
      pool_{"kvrt_pool_rows"},
      moments_{"kvrt_make_moments"},
      sum_directions_{"kvrt_sum_directions"},
      score_directions_{"kvrt_score_directions"},
      compare_keys_{"kvrt_compare_keys"},
      spare_newest_{"kvrt_spare_newest"},
      deviations_{"kvrt_measure_deviations"},
      ranks_{"kvrt_rank_lag_parts"},
      draw_sketches_{"kvrt_draw_sketches"},
      score_sketches_{"kvrt_score_sketches"},
      expected_{"kvrt_score_expected"},
      soften_{"kvrt_soften_rows"},
      share_{"kvrt_share_rows"},
      blend_{"kvrt_blend_rows"},
      mix_{"kvrt_mix_redundancy"},
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

uint64_t round_scores::most_scratch(uint32_t dim, uint64_t stride) {
    uint64_t most = 0;
    for (const round_scorer& each : scorers) most = std::max(most, each.scratch_of(dim, stride));
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
    for (kernel_function* each :
         {&places_, &normalise_, &moments_, &pool_, &sum_directions_, &score_directions_,
          &compare_keys_, &spare_newest_, &deviations_, &ranks_, &draw_sketches_, &score_sketches_,
          &expected_, &soften_, &share_, &blend_, &mix_}) {
        KVRT_TRY(functions.find(*each));
    }
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
    const bool by_format = known->reads == lane_reads::keys_by_format;
    const bool opens_values = known->reads == lane_reads::keys_and_values;
    const bool opens_keys = known->reads == lane_reads::keys || opens_values;
    if (by_format ? reader_of(place.keys) == nullptr : opens_keys && !opens_rows(place.keys)) {
        return refuse("keys", lane.keys, "scores");
    }
    if (opens_values && !opens_rows(place.values)) return refuse("values", lane.values, "scores");
    return KV_OK;
}

status round_scores::check_opened(const kvrt_lane& lane, const block_place& place,
                                  uint32_t scorer) {
    const lane_reads reads = find(scorer)->reads;
    if (reads == lane_reads::nothing || place.keys.codes != coding::affine4) return KV_OK;
    return refuse("keys beside sealed values", lane.keys, "scores");
}

status round_scores::check_ranges(const kvrt_lane& lane, const block_place& place) {
    if (reader_of(place.values) != nullptr) return KV_OK;
    return refuse("value_reserve: values", lane.values, "measures");
}

status round_scores::launch(const score_call& call) {
    if (call.share.gathers) KVRT_TRY(make_moments(call));
    return (this->*find(call.first().scores.scorer)->launch)(call);
}

status round_scores::make_moments(const score_call& call) {
    const round_share& share = call.share;
    const kvrt_round_scores& scored = call.first().scores;
    moments_parameters parameters;
    parameters.memory = query_memory_of(call.round.queries);
    parameters.lanes = call.moments;
    parameters.count = share.count;
    parameters.heads = share.kv_heads * scored.group;
    parameters.bands = share.read.keys.dim - scored.rotated;
    return functions_->launch(moments_, parameters.count * parameters.heads, gather_threads,
                              gather_shared_bytes, call.stream, &parameters);
}

status round_scores::find_reader(const score_call& call, key_functions*& reader) {
    reader = reader_of(call.share.read.keys);
    if (reader != nullptr) return KV_OK;
    return fail(KV_INTERNAL, "a round of scorer {} over KV_FORMAT {}", call.first().scores.scorer,
                call.first().lane->keys.format);
}

status round_scores::score_places(const score_call& call) {
    const round_share& share = call.share;
    place_parameters parameters;
    parameters.positions = positions_of(call.first().lane->positions);
    parameters.sealed_positions = sealed_positions_of(call.first());
    parameters.tables = call.batch_of<uint32_t>();
    parameters.lanes = call.lanes_of<place_lane>();
    parameters.scores = call.scores;
    parameters.stride = share.stride;
    parameters.count = share.count;
    parameters.kv_heads = share.kv_heads;
    parameters.most_slots = share.most_slots;
    parameters.draws = call.first().scores.scorer == KV_SCORER_RANDOM;
    parameters.one_draw = share.shares_sets;
    return functions_->launch(places_, call.score_blocks(), score_threads, 0, call.stream,
                              &parameters);
}

status round_scores::score_norms(const score_call& call) {
    const round_share& share = call.share;
    key_functions* reader = nullptr;
    KVRT_TRY(find_reader(call, reader));
    measure_parameters parameters;
    parameters.arena = call.rows;
    parameters.place = share.read;
    parameters.lanes = call.lanes_of<score_lane>();
    parameters.tables = call.batch_of<uint32_t>();
    parameters.norm = call.scores;
    parameters.stride = share.stride;
    parameters.count = share.count;
    parameters.most_slots = share.most_slots;
    parameters.negates = true;
    return functions_->launch(reader->measure, call.score_blocks(), score_threads, 0, call.stream,
                              &parameters);
}

status round_scores::measure_ranges(const score_call& call, const score_lane* lanes) {
    const round_share& share = call.share;
    key_functions* const reader = reader_of(share.read.values);
    if (reader == nullptr) {
        return fail(KV_INTERNAL, "a round that reserves values of KV_FORMAT {}",
                    call.first().lane->values.format);
    }
    measure_parameters parameters;
    parameters.arena = call.rows;
    parameters.place = share.read;
    parameters.lanes = lanes;
    parameters.tables = call.batch_of<uint32_t>();
    parameters.range = call.scores;
    parameters.stride = share.stride;
    parameters.count = share.count;
    parameters.most_slots = share.most_slots;
    parameters.values = true;
    return functions_->launch(reader->measure, call.score_blocks(), score_threads, 0, call.stream,
                              &parameters);
}

status round_scores::score_triattention(const score_call& call) {
    const round_share& share = call.share;
    const kvrt_round_scores& scored = call.first().scores;
    key_functions* reader = nullptr;
    KVRT_TRY(find_reader(call, reader));
    triattention_parameters parameters;
    parameters.arena = call.rows;
    parameters.place = share.read;
    parameters.lanes = call.lanes_of<score_lane>();
    parameters.tables = call.batch_of<uint32_t>();
    parameters.mean_real = share.moments;
    parameters.mean_imaginary = share.moments + call.round.moment_stride;
    parameters.mean_magnitude = share.moments + 2 * call.round.moment_stride;
    parameters.phases = call.batch_of<double>();
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
    return normalise(call, call.heads, scored.group);
}

status round_scores::normalise(const score_call& call, const normalise_head* heads,
                               uint32_t group) {
    normalise_parameters parameters;
    parameters.scores = call.scores;
    parameters.guarded = call.guarded;
    parameters.heads = heads;
    parameters.stride = call.share.stride;
    parameters.group = group;
    parameters.count = call.share.heads();
    return functions_->launch(normalise_, parameters.count, normalise_threads,
                              normalise_shared_bytes(parameters.group), call.stream, &parameters);
}

}  // namespace kvrt::cuda
