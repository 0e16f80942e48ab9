#include "driver/rounds.hpp"

#include <algorithm>
#include <cstring>

#include "driver/verbs.hpp"
#include "kernels/allocate.hpp"
#include "kernels/compact_sealed.hpp"
#include "kernels/normalise.hpp"
#include "kernels/pool.hpp"
#include "kernels/quota.hpp"
#include "kernels/sample.hpp"

namespace kvrt::cuda {

namespace {

using namespace kernels;

/// Rows of scores that lie in memory at once, where that many are asked for.
constexpr uint64_t comfortable_workspace = uint64_t{64} << 20;
constexpr uint64_t least_staging = uint64_t{64} << 10;
constexpr uint64_t most_staging = uint64_t{8} << 20;
constexpr uint32_t most_arrays = 24;  ///< of a share, beside those of its lanes

/// What a lane adds to a batch, at most.
uint64_t lane_bytes(uint64_t blocks, uint64_t pinned, uint64_t phases, uint64_t heads,
                    bool segmented, bool sampled) {
    const uint64_t lists = sizeof(guard_lane) + round_scores::most_lane_bytes() +
                           sizeof(score_lane) + sizeof(moments_lane) + sizeof(compact_lane) +
                           sizeof(sealed_lane) + sizeof(open_lane) + sizeof(uint64_t) +
                           sizeof(counted_group);
    const uint64_t of_head = 2 * sizeof(normalise_head) + sizeof(select_set) + sizeof(reserve_set) +
                             sizeof(counted_set) + (segmented ? sizeof(quota_set) : 0) +
                             (sampled ? sizeof(sample_set) : 0) + sizeof(pool_row) +
                             sizeof(uint32_t) + 2 * (sizeof(score_join) + 2 * sizeof(uint64_t));
    return lists + heads * of_head + 3 * blocks * sizeof(uint32_t) +
           pinned * sizeof(position_range) + phases * sizeof(double) +
           (most_arrays + 5) * batch_alignment;
}

bool reserves(const kvrt_round_lane& lane) { return lane.guards->value_reserve != 0; }
bool is_segmented(const kvrt_round_lane& lane) { return lane.guards->segments != 0; }

bool same_rows(const kvrt_round_lane& a, const kvrt_round_lane& b) {
    return a.kind == b.kind && a.scores.scorer == b.scores.scorer &&
           a.scores.variants == b.scores.variants && a.scores.spread == b.scores.spread &&
           a.scores.sinks == b.scores.sinks && a.scores.pool_width == b.scores.pool_width &&
           a.scores.pool_maximum == b.scores.pool_maximum &&
           a.scores.prior_share == b.scores.prior_share &&
           a.scores.redundancy == b.scores.redundancy &&
           a.scores.similarity == b.scores.similarity && a.selection == b.selection &&
           a.bundle == b.bundle && reserves(a) == reserves(b);
}

/// Lanes that must be in a share with the first of `left`: itself, and some behind it.
uint32_t lanes_of_set(const kvrt_round_lane* lanes, uint32_t left) {
    uint32_t count = 1;
    const bool alone = lanes->bundle != 0 || lanes->selection != KV_SELECT_PER_LAYER;
    while (!alone && count < left && same_rows(*lanes, lanes[count]) &&
           lanes[count].set == lanes->set) {
        ++count;
    }
    return count;
}

const round_scorer& scorer_of(const kvrt_round_lane& lane) {
    return *round_scores::find(lane.scores.scorer);
}

uint32_t blocks_for(const kvrt_lane& lane, uint32_t slots) {
    return ceil_divide(slots, lane.block_tokens);
}

}  // namespace

round_runner::round_runner()
    : candidates_{"kvrt_find_candidates"},
      join_{"kvrt_join_rows"},
      sample_{"kvrt_sample_scores"},
      quota_{"kvrt_reserve_segments"},
      reserve_{"kvrt_reserve_slots"},
      select_{"kvrt_select_survivors"},
      compact_{"kvrt_compact_lanes"},
      compact_sealed_{"kvrt_compact_sealed_lanes"},
      open_lanes_{"kvrt_open_lanes"},
      open_survivors_{"kvrt_open_survivors"},
      compact_tiles_{"kvrt_compact_tiles"},
      share_budgets_{"kvrt_share_budgets"},
      count_reaching_{"kvrt_count_reaching"} {}

round_runner::~round_runner() {
    if (device_ == nullptr) return;
    const current_context here(*device_);
    if (counts_ != nullptr) (void)device_->calls().host_free(counts_);
    if (stream_ != nullptr) (void)device_->calls().stream_destroy(stream_);
}

/// `heads` of lanes, in rows `stride` apart, with so many floats to work in for each.
uint64_t round_runner::share_bytes(const round_share& mine, uint64_t heads, uint64_t stride,
                                   uint64_t scratch) const {
    const uint64_t rows = (mine.rows + (mine.reserves ? 1 : 0)) * stride + scratch;
    const uint64_t of_head = rows * sizeof(float);
    const uint64_t alignment = scratch_alignment * sizeof(float);
    if (mine.lanes->bundle != 0) return heads * of_head + alignment;
    return heads * (of_head + sizeof(guarded_slots) + stride * sizeof(float)) + alignment;
}

/// For a layer whose heads share a set, and for the widest bundle of a sequence.
uint64_t round_runner::least_workspace(const kvrt_round_memory& memory) const {
    const uint64_t stride = round_up<uint64_t>(memory.most_slots, row_alignment);
    const uint64_t scratch = round_scores::most_scratch(memory.most_dim, stride);
    const uint64_t rows = memory.most_rows + memory.most_heads;  // one for ranges
    const uint64_t of_sets = 3 * memory.most_heads;              // scores, ranges, survivors
    const uint64_t guarded = uint64_t{memory.lanes} * memory.most_heads * sizeof(guarded_slots);
    return round_up(guarded, row_alignment * sizeof(float)) +
           ((rows + of_sets) * stride + memory.most_heads * scratch + scratch_alignment) *
               sizeof(float);
}

status round_runner::create(device_context& device, kernel_functions& functions,
                            kvrt_round_memory& memory) {
    KVRT_TRY(functions.state());
    device_ = &device;
    functions_ = &functions;
    const current_context here(device);
    KVRT_TRY(here.state());
    for (kernel_function* each :
         {&candidates_, &join_, &sample_, &quota_, &reserve_, &select_, &compact_, &compact_sealed_,
          &open_lanes_, &open_survivors_, &compact_tiles_, &share_budgets_, &count_reaching_}) {
        KVRT_TRY(functions.find(*each));
    }
    KVRT_TRY(scorers_.create(functions));
    const uint64_t least = least_workspace(memory);
    const uint64_t all = least * memory.lanes * memory.most_rounds;
    const uint64_t wanted = std::max(least, std::min(all, comfortable_workspace));
    if (workspace_bytes_ == 0) {
        KVRT_TRY(workspace_.allocate(device, wanted));
        workspace_bytes_ = wanted;
    }
    for (uint32_t i = 0; i < KVRT_MOST_POSITIONS; ++i) {
        if (memory.position_words[i] == 0) continue;
        if (positions_[i].address() == 0) {
            KVRT_TRY(positions_[i].allocate(device, memory.position_words[i] * sizeof(uint32_t)));
        }
        memory.positions[i] = reinterpret_cast<uint32_t*>(positions_[i].address());
    }
    if (counts_ == nullptr) {
        void* counts = nullptr;
        KVRT_TRY(device.check(
            device.calls().host_allocate(&counts, memory.count_words * sizeof(uint32_t), 0),
            "cuMemHostAlloc (counts)"));
        counts_ = static_cast<uint32_t*>(counts);
    }
    memory.counts = counts_;
    if (stream_ == nullptr) {
        KVRT_TRY(device.check(device.calls().stream_create(&stream_, stream_non_blocking),
                              "cuStreamCreate"));
    }
    const uint64_t sequence = memory.lanes * lane_bytes(memory.most_blocks, most_pinned, 0,
                                                        memory.most_heads, true, true) +
                              memory.phases * sizeof(double);
    const uint64_t staging = std::clamp(sequence * memory.most_rounds, least_staging, most_staging);
    return ring_.create(device, round_up(std::max(staging, 2 * sequence), ring_.alignment));
}

status round_runner::check(const kvrt_lane& lane, const kvrt_lane* sealed, uint32_t scorer) {
    block_place place;
    KVRT_TRY(describe_lane(lane, "policy", place));
    if (sealed == nullptr) return scorers_.check(lane, place, scorer);
    KVRT_TRY(scorers_.check_opened(lane, place, scorer));
    return describe_lane(*sealed, "policy", place);
}

status round_runner::check_ranges(const kvrt_lane& lane, const kvrt_lane* sealed) {
    block_place place;
    KVRT_TRY(describe_lane(lane, "policy", place));
    return sealed == nullptr ? scorers_.check_ranges(lane, place) : KV_OK;
}

float* round_runner::scores() const { return reinterpret_cast<float*>(workspace_.address()); }

guarded_slots* round_runner::guarded(const round_share& mine) const {
    return reinterpret_cast<guarded_slots*>(scores() + mine.guarded_at);
}

uint64_t* round_runner::phases_in_batch::place_of(const double* phases, bool& missing) {
    uint32_t i = 0;
    while (i < most && of[i] != phases) ++i;
    missing = i == most;
    if (missing) i = count++ % most;
    of[i] = phases;
    return at + i;
}

uint64_t round_runner::batch_bytes(const kvrt_round& round) const {
    uint64_t bytes = 0;
    phases_in_batch phases;
    for (uint32_t i = 0; i < round.count; ++i) {
        const kvrt_round_lane& lane = round.lanes[i];
        bool more = false;
        if (lane.scores.phases != nullptr) (void)phases.place_of(lane.scores.phases, more);
        bytes += lane_bytes(blocks_for(*lane.lane, lane.slots), lane.guards->pinned_count,
                            more ? lane.scores.phase_count : 0, lane.lane->kv_heads,
                            is_segmented(lane), lane.scores.samples != 0);
    }
    return round_up(bytes, ring_.alignment);
}

/// As many lanes that go together as there are rows for in `room` bytes; those of a bundle are
/// placed by who asks.
round_share round_runner::next_share(const kvrt_round_lane* lanes, uint32_t left,
                                     uint64_t room) const {
    round_share made;
    made.lanes = lanes;
    made.kv_heads = lanes->lane->kv_heads;
    const round_scorer& scorer = scorer_of(*lanes);
    const uint32_t dim = std::max(lanes->lane->keys.dim, lanes->lane->values.dim);
    made.rows = scorer.rows_of(lanes->scores);
    made.shares_sets =
        lanes->selection == KV_SELECT_PER_LAYER || lanes->selection == KV_SELECT_UNION;
    made.reserves = reserves(*lanes);
    const kvrt_lane* const sealed = lanes->sealed;
    made.opens = sealed != nullptr && (made.reserves || scorer.reads != lane_reads::nothing);
    const bool has_tiles =
        sealed != nullptr && (sealed->keys.tile_tokens != 0 || sealed->values.tile_tokens != 0);
    uint64_t opened = 0;
    while (made.count < left) {
        const kvrt_round_lane& next = lanes[made.count];
        if (!same_rows(*lanes, next)) break;
        const uint32_t more = lanes_of_set(&next, left - made.count);
        const uint32_t slots = std::max(made.most_slots, next.slots);
        const uint64_t stride = round_up<uint64_t>(slots, row_alignment);
        const uint64_t heads = uint64_t{made.count + more} * made.kv_heads;
        const uint64_t scratch = scorer.scratch_of(dim, stride);
        for (uint32_t i = 0; (made.opens || has_tiles) && i < more; ++i) {
            opened += opened_bytes((&next)[i]);
        }
        const bool fits =
            share_bytes(made, heads, stride, scratch) <= room && opened <= opened_size_;
        if (made.count != 0 && !fits) break;
        made.count += more;
        made.most_slots = slots;
        made.stride = stride;
        made.scratch = scratch;
    }
    made.moments = lanes->scores.moments;
    for (uint32_t i = 1; i < made.count; ++i) {
        made.moments = std::min(made.moments, lanes[i].scores.moments);
    }
    made.guarded_at = made.survivors_at() + made.heads() * made.stride;
    made.scratch_at = round_up(
        made.guarded_at + made.heads() * sizeof(guarded_slots) / sizeof(float), scratch_alignment);
    return made;
}

/// Tables and pinned ranges lie behind each other; places in them count from the batch's begin.
round_runner::places round_runner::pack(round_share& mine, set_lists& sets) {
    places at;
    uint64_t tables_at = 0;
    auto* const guards = append<guard_lane>(mine.count, at.guards);
    const round_scorer& scorer = scorer_of(*mine.lanes);
    auto* const scored_lanes = append<std::byte>(mine.count * scorer.lane_bytes, at.scores);
    auto* const heads = append<normalise_head>(mine.heads(), at.heads);
    auto* const ranges = append<score_lane>(mine.reserves ? mine.count : 0, at.ranges);
    auto* const tables = append<uint64_t>(mine.count, tables_at);
    auto* const moves = at_host<compact_lane>(sets.moves) + sets.lanes;
    auto* const sealed = at_host<sealed_lane>(sets.sealed) + sets.lanes;
    auto* const moments = append<moments_lane>(mine.count, at.moments);
    auto* const opened = append<open_lane>(mine.opens ? mine.count : 0, at.opened);
    uint32_t opened_blocks = 0;
    for (uint32_t i = 0; i < mine.count; ++i) {
        const kvrt_round_lane& from = mine.lanes[i];
        const kvrt_round_scores& scored = from.scores;
        uint64_t source = 0, target = 0, pinned = 0;
        const uint32_t blocks = blocks_for(*from.lane, from.slots);
        const uint32_t kept = blocks_for(*from.lane, from.keep);
        std::copy_n(from.source_table, blocks, append<uint32_t>(blocks, source));
        target = source;
        if (from.target_table != from.source_table) {
            std::copy_n(from.target_table, kept, append<uint32_t>(kept, target));
        }
        tables[i] = source / sizeof(uint32_t);
        uint64_t rows_table = tables[i];  // of what is read
        if (mine.opens) rows_table = pack_opened(from, tables[i], opened_blocks, opened[i]);
        const kvrt_round_guards& rules = *from.guards;
        position_range* const pins = append<position_range>(rules.pinned_count, pinned);
        for (uint32_t r = 0; r < rules.pinned_count; ++r) {
            pins[r] = {rules.pinned[2 * r], rules.pinned[2 * r + 1]};
        }
        uint64_t phases_at = 0;
        if (scored.phases != nullptr) {
            bool missing = false;
            uint64_t* const noted = phases_.place_of(scored.phases, missing);
            if (missing) {
                std::copy_n(scored.phases, scored.phase_count,
                            append<double>(scored.phase_count, *noted));
            }
            phases_at = *noted;
        }
        const uint64_t row = mine.first + uint64_t{i} * mine.kv_heads * mine.rows * mine.stride;
        guards[i] = {tables[i],           pinned / sizeof(position_range),
                     rules.next_position, rules.prompt_tokens,
                     rules.sinks,         rules.recent,
                     from.slots,          from.explicit_slots,
                     rules.pinned_count,  from.sealed_slots};
        scorer.describe(
            from,
            {scorer.reads == lane_reads::nothing ? tables[i] : rows_table,
             phases_at / sizeof(double), row, static_cast<uint64_t>(scored.moments - mine.moments)},
            scored_lanes + i * scorer.lane_bytes);
        moments[i] = {scored.first_band, scored.first_query_head, scored.place,
                      scored.gathered != 0 ? scored.counted : no_sequence};
        mine.gathers = mine.gathers || scored.gathered != 0;
        if (mine.reserves) {
            const uint64_t to = mine.ranges_at() + uint64_t{i} * mine.kv_heads * mine.stride;
            ranges[i] = {rows_table, to, 0, 0, from.slots, 0};
        }
        for (uint32_t h = 0; h < mine.kv_heads; ++h) {
            const uint64_t of_head = row + h * mine.rows * mine.stride;
            heads[i * mine.kv_heads + h] = {of_head, of_head, i * mine.kv_heads + h};
        }
        moves[i] = {tables[i],
                    target / sizeof(uint32_t),
                    rows_of_set(mine, sets, i, 0).survivors,
                    from.sums.present,
                    from.keep,
                    from.slots,
                    from.explicit_slots,
                    static_cast<uint32_t>(rules.next_position),
                    from.sums.before,
                    from.sums.slots,
                    from.sums.slots_before,
                    from.sums.unknown,
                    0};
        if (from.sealed == nullptr) continue;
        sealed[i] = {from.saturated_keys, from.saturated_values, from.sealed_slots,
                     from.sealed_after,   from.coded_slots,      0};
    }
    if (mine.lanes->scores.pool_width != 0) pack_observed(mine, at);
    pack_sets(mine, tables, sets, at);
    sets.lanes += mine.count;
    sets.heads += mine.heads();
    return at;
}

/// Candidates, and a row of scores for each set, as far as the share has it.
status round_runner::score(stream_handle stream, const kvrt_round& round, const round_share& mine,
                           const places& at) {
    guard_parameters guards;
    guards.positions = positions_of(mine.lanes->lane->positions);
    guards.sealed_positions = sealed_positions_of(*mine.lanes);
    guards.tables = on_device<uint32_t>(0);
    guards.lanes = on_device<guard_lane>(at.guards);
    guards.pinned = on_device<position_range>(0);
    guards.guarded = guarded(mine);
    guards.count = mine.count;
    guards.kv_heads = mine.kv_heads;
    KVRT_TRY(functions_->launch(candidates_, guard_blocks(mine.count, mine.kv_heads), guard_threads,
                                guard_shared_bytes, stream, &guards));
    if (mine.opens) KVRT_TRY(open_share(stream, mine, at));
    const std::byte* const rows = mine.opens
                                      ? reinterpret_cast<const std::byte*>(opened_.address())
                                      : static_cast<const std::byte*>(mine.lanes->lane->arena);
    const score_call call = {stream,
                             round,
                             mine,
                             on_device<std::byte>(0),
                             on_device<std::byte>(at.scores),
                             on_device<normalise_head>(at.heads),
                             on_device<moments_lane>(at.moments),
                             guarded(mine),
                             scores(),
                             scores() + mine.scratch_at,
                             on_device<pool_row>(at.observed),
                             on_device<normalise_head>(at.unlike),
                             rows};
    KVRT_TRY(scorers_.launch(call));
    if (mine.reserves) KVRT_TRY(scorers_.measure_ranges(call, on_device<score_lane>(at.ranges)));
    return launch_joins(stream, mine, at);
}

status round_runner::copy_from(uint64_t begin, uint64_t end) {
    return ring_.copy(ring_.on_device(begin), begin, end - begin);
}

status round_runner::run_share(stream_handle stream, kvrt_round& round) {
    const kvrt_round_lane* const lanes = round.lanes + round.done;
    round_share mine = next_share(lanes, round.count - round.done, workspace_bytes_);
    KVRT_TRY(describe_share(mine));
    mine.sums_stride = round.sums_stride;
    const uint64_t begin = round_up(used_, batch_alignment);
    set_lists sets;
    begin_sets(lanes, mine.count, mine.heads(), sets);
    const places at = pack(mine, sets);
    KVRT_TRY(copy_from(begin, used_));
    KVRT_TRY(score(stream, round, mine, at));
    KVRT_TRY(launch_sets(stream, sets, guarded(mine)));
    KVRT_TRY(launch_compaction(stream, round, mine, sets, 0, mine.stride));
    round.done += mine.count;
    return KV_OK;
}

status round_runner::read(stream_handle stream, const kvrt_words* pieces, uint64_t count,
                          uint32_t* out) {
    for (uint64_t next = 0; next < count;) {
        KVRT_TRY(ring_.drain());
        KVRT_TRY(ring_.open(pieces[next].count * sizeof(uint32_t), ring_.bytes(), stream));
        uint64_t used = 0;
        status verdict = KV_OK;
        for (; next < count && verdict == KV_OK; ++next) {
            const uint64_t bytes = pieces[next].count * sizeof(uint32_t);
            if (used + bytes > ring_.size()) break;
            verdict =
                ring_.copy_back(reinterpret_cast<device_pointer>(pieces[next].words), used, bytes);
            used += bytes;
        }
        const status closed = ring_.close(used);
        KVRT_TRY(verdict == KV_OK ? closed : verdict);
        KVRT_TRY(ring_.drain());
        std::memcpy(out, ring_.data(), used);
        out += used / sizeof(uint32_t);
    }
    return KV_OK;
}

status round_runner::run(stream_handle stream, kvrt_round& round) {
    round.done = 0;
    KVRT_TRY(check_bundles(round));
    const uint64_t bytes = batch_bytes(round);
    KVRT_TRY(ring_.open(bytes, bytes, stream));
    used_ = 0;
    phases_ = {};
    status verdict = KV_OK;
    while (round.done != round.count && verdict == KV_OK) {
        verdict = round.lanes[round.done].bundle == 0 ? run_share(stream, round)
                                                      : run_bundle(stream, round);
    }
    const status closed = ring_.close(used_);
    return verdict == KV_OK ? closed : verdict;
}

}  // namespace kvrt::cuda
