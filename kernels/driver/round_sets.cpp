// Sets of survivors in rounds as launches: scores of lanes and heads that have one join, some
// candidates stay whatever the others score, and the best of the rest. And bundles, whose sets are
// complete only when all their shares have been scored.
#include <algorithm>

#include "driver/rounds.hpp"
#include "driver/verbs.hpp"
#include "kernels/allocate.hpp"
#include "kernels/compact.hpp"
#include "kernels/normalise.hpp"
#include "kernels/quota.hpp"
#include "kernels/sample.hpp"

namespace kvrt::cuda {

namespace {

using namespace kernels;

/// The number of a head's set.
uint64_t set_of(const kvrt_round_lane& lane, uint32_t head) {
    return lane.set + (lane.selection == KV_SELECT_PER_HEAD ? head : 0);
}

/// Heads from which scores join: those of lanes of one sequence, from `first` on.
uint32_t end_of_group(const kvrt_round_lane* lanes, uint32_t first, uint32_t count) {
    const kvrt_round_lane& mine = lanes[first];
    uint32_t end = first + 1;
    const auto goes_with = [&](const kvrt_round_lane& other) {
        return mine.bundle != 0 ? other.guards == mine.guards : other.set == mine.set;
    };
    while (end < count && goes_with(lanes[end])) ++end;
    return end;
}

}  // namespace

uint64_t round_runner::bundle::scores_at() const {
    return round_up<uint64_t>(heads * sizeof(guarded_slots) / sizeof(float), row_alignment);
}

round_runner::bundle round_runner::bundle_at(const kvrt_round& round, uint32_t first) const {
    bundle made;
    made.lanes = round.lanes + first;
    uint32_t most_slots = 0;
    while (first + made.count < round.count) {
        const kvrt_round_lane& next = made.lanes[made.count];
        if (next.bundle != made.lanes->bundle) break;
        const uint32_t heads = next.lane->kv_heads;
        made.sets = std::max(made.sets, static_cast<uint32_t>(set_of(next, heads - 1)) + 1);
        made.heads += heads;
        made.reserves = made.reserves || next.guards->value_reserve != 0;
        most_slots = std::max(most_slots, next.slots);
        ++made.count;
    }
    made.stride = round_up<uint64_t>(most_slots, row_alignment);
    return made;
}

/// Before anything is enqueued: is there room for rows of sets, and for those of any lane beside?
status round_runner::check_bundles(const kvrt_round& round) const {
    uint32_t first = 0;
    while (first < round.count && round.lanes[first].bundle == 0) ++first;
    while (first < round.count) {
        const bundle all = bundle_at(round, first);
        uint64_t most = 0;
        for (uint32_t i = 0; i < all.count; ++i) {
            const round_share mine = next_share(all.lanes + i, 1, 0);
            most = std::max(most, share_bytes(mine, mine.kv_heads, mine.stride, mine.scratch));
        }
        const uint64_t bytes = all.end() * sizeof(float) + most;
        if (bytes > workspace_bytes_) {
            return fail(KV_TOO_LARGE,
                        "kv_compress: {} lanes with {} sets of survivors in common take {} bytes "
                        "of a workspace of {}",
                        all.count, all.sets, bytes, workspace_bytes_);
        }
        first += all.count;
    }
    return KV_OK;
}

/// Room in the batch for what is told of so many lanes and sets.
void round_runner::begin_sets(const kvrt_round_lane* lanes, uint32_t count, uint32_t sets,
                              set_lists& lists) {
    uint64_t begun_at = 0;
    bool sampled = false, segmented = false, reserved = false, seals = false;
    for (uint32_t i = 0; i < count; ++i) {
        sampled = sampled || lanes[i].scores.samples != 0;
        segmented = segmented || lanes[i].guards->segments != 0;
        reserved = reserved || lanes[i].guards->value_reserve != 0;
        seals = seals || lanes[i].sealed != nullptr;
    }
    (void)append<compact_lane>(count, lists.moves);
    (void)append<sealed_lane>(seals ? count : 0, lists.sealed);
    (void)append<select_set>(sets, lists.selects);
    (void)append<sample_set>(sampled ? sets : 0, lists.samples);
    (void)append<quota_set>(segmented ? sets : 0, lists.quotas);
    (void)append<reserve_set>(reserved ? sets : 0, lists.reserves);
    std::fill_n(append<counted_set>(lists.counts ? sets : 0, lists.counted),
                lists.counts ? sets : 0, counted_set{});
    lists.begun = append<uint32_t>(sets, begun_at);
    std::fill_n(lists.begun, sets, 0u);
}

/// Rows of a head's own set; or of that which its lane leads where heads of lanes beside each other
/// share one; or of the bundle's.
round_runner::set_rows round_runner::rows_of_set(const round_share& mine, const set_lists& sets,
                                                 uint32_t lane, uint32_t head) const {
    if (sets.of != nullptr) {
        const uint64_t row = set_of(mine.lanes[lane], head) * sets.of->stride;
        return {sets.of->scores_at() + row, sets.of->ranges_at() + row,
                sets.of->survivors_at() + row};
    }
    while (mine.shares_sets && lane != 0 && mine.lanes[lane - 1].set == mine.lanes[lane].set) {
        --lane;
    }
    const uint64_t index = uint64_t{lane} * mine.kv_heads + (mine.shares_sets ? 0 : head);
    return {mine.first + index * mine.rows * mine.stride, mine.ranges_at() + index * mine.stride,
            mine.survivors_at() + index * mine.stride};
}

/// A set, by the first head that has it.
void round_runner::add_set(const round_share& mine, uint32_t lane, uint32_t head, uint64_t table,
                           const set_rows& rows, set_lists& sets) {
    const kvrt_round_lane& from = mine.lanes[lane];
    const kvrt_round_guards& rules = *from.guards;
    const uint64_t guarded_place = sets.heads + lane * mine.kv_heads + head;
    at_host<select_set>(sets.selects)[sets.count++] = {rows.scores, rows.survivors, guarded_place,
                                                       from.slots, from.keep};
    if (sets.counts) {
        at_host<counted_set>(sets.counted)[set_of(from, head)] = {
            rows.scores, guarded_place, rows.survivors, from.count,
            from.slots,  from.budget,   from.floor,     0};
    }
    if (from.scores.samples != 0) {
        const uint32_t drawn = from.scores.first_head + (mine.shares_sets ? 0 : head);
        at_host<sample_set>(sets.samples)[sets.sample_count++] = {
            positions_of(from.lane->positions),
            table,
            rows.scores,
            guarded_place,
            rules.next_position,
            from.scores.seed,
            from.scores.round,
            uint64_t{from.scores.layer} << 32 | drawn,
            head,
            from.slots,
            from.explicit_slots,
            from.sealed_slots,
            sealed_positions_of(from)};
        sets.most_sampled = std::max(sets.most_sampled, from.slots);
    }
    if (rules.segments != 0) {
        at_host<quota_set>(sets.quotas)[sets.quota_count++] = {positions_of(from.lane->positions),
                                                               table,
                                                               rows.scores,
                                                               guarded_place,
                                                               rules.next_position,
                                                               rules.segmented_tokens,
                                                               head,
                                                               from.slots,
                                                               from.explicit_slots,
                                                               from.places,
                                                               rules.segments,
                                                               rules.segment_quota,
                                                               from.sealed_slots,
                                                               0,
                                                               sealed_positions_of(from)};
        sets.most_segments = std::max(sets.most_segments, rules.segments);
    }
    if (rules.value_reserve == 0) return;
    at_host<reserve_set>(sets.reserves)[sets.reserve_count++] = {
        rows.ranges, rows.scores, guarded_place, from.slots, from.places, rules.value_reserve};
}

/// The share's sets, and the rows that join in them.
void round_runner::pack_sets(const round_share& mine, const uint64_t* tables, set_lists& sets,
                             places& at) {
    if (sets.of == nullptr && !mine.shares_sets) {
        for (uint32_t i = 0; i < mine.heads(); ++i) {
            const uint32_t lane = i / mine.kv_heads, head = i % mine.kv_heads;
            add_set(mine, lane, head, tables[lane], rows_of_set(mine, sets, lane, head), sets);
        }
        return;
    }
    uint64_t members_at = 0;
    const uint32_t kinds = mine.reserves ? 2 : 1;  // of rows: scores, ranges
    auto* const joins = append<score_join>(mine.heads(), at.joins);
    auto* const range_joins = append<score_join>(mine.reserves ? mine.heads() : 0, at.range_joins);
    // Of each head, and of a set that others have begun.
    auto* const members = append<uint64_t>(2 * uint64_t{mine.heads()} * kinds, members_at);
    uint32_t used = 0;
    const auto list = [&](score_join& join, uint64_t out, bool begun, uint32_t first, uint32_t end,
                          uint64_t set, uint64_t rows_at, uint64_t row_length) {
        join = {out, members_at / sizeof(uint64_t) + used, 0, 0, 0};
        const uint32_t begin = used;
        if (begun) members[used++] = out;
        for (uint32_t head = first * mine.kv_heads; head < end * mine.kv_heads; ++head) {
            if (set_of(mine.lanes[head / mine.kv_heads], head % mine.kv_heads) != set) continue;
            if (used == begin + (begun ? 1 : 0)) join.guarded = head;
            members[used++] = rows_at + head * row_length;
        }
        join.member_count = used - begin;
    };
    for (uint32_t first = 0; first < mine.count;) {
        const uint32_t end = end_of_group(mine.lanes, first, mine.count);
        // The sets of a group are numbered in a row, but not all of them need be here.
        uint64_t low = ~uint64_t{0}, high = 0;
        for (uint32_t i = first; i < end; ++i) {
            low = std::min(low, set_of(mine.lanes[i], 0));
            high = std::max(high, set_of(mine.lanes[i], mine.kv_heads - 1));
        }
        for (uint64_t set = low; set <= high; ++set) {
            uint32_t head = first * mine.kv_heads;
            while (head < end * mine.kv_heads &&
                   set_of(mine.lanes[head / mine.kv_heads], head % mine.kv_heads) != set) {
                ++head;
            }
            if (head == end * mine.kv_heads) continue;
            const uint32_t lane = head / mine.kv_heads;
            const set_rows rows = rows_of_set(mine, sets, lane, head % mine.kv_heads);
            const bool begun = sets.of != nullptr && sets.begun[set] != 0;
            list(joins[at.join_count], rows.scores, begun, first, end, set, mine.first,
                 mine.rows * mine.stride);
            if (mine.reserves) {
                list(range_joins[at.join_count], rows.ranges, begun, first, end, set,
                     mine.ranges_at(), mine.stride);
            }
            ++at.join_count;
            if (begun) continue;
            if (sets.of != nullptr) sets.begun[set] = 1;
            add_set(mine, lane, head % mine.kv_heads, tables[lane], rows, sets);
        }
        first = end;
    }
}

status round_runner::launch_joins(stream_handle stream, const round_share& mine, const places& at) {
    if (at.join_count == 0) return KV_OK;
    join_parameters join;
    join.scores = scores();
    join.guarded = guarded(mine);
    join.joins = on_device<score_join>(at.joins);
    join.members = on_device<uint64_t>(0);
    join.count = at.join_count;
    join.most_slots = mine.most_slots;
    join.greatest = mine.lanes->selection == KV_SELECT_UNION;
    const uint32_t blocks = join_blocks(join.count, join.most_slots);
    KVRT_TRY(functions_->launch(join_, blocks, normalise_threads, 0, stream, &join));
    if (!mine.reserves) return KV_OK;
    join.joins = on_device<score_join>(at.range_joins);
    join.greatest = true;
    return functions_->launch(join_, blocks, normalise_threads, 0, stream, &join);
}

/// Draws go by scores; then the best of a segment, before others are held, which have no order.
status round_runner::launch_adjustments(stream_handle stream, const set_lists& sets,
                                        guarded_slots* guarded) {
    if (sets.sample_count != 0) {
        sample_parameters sample;
        sample.scores = scores();
        sample.guarded = guarded;
        sample.tables = on_device<uint32_t>(0);
        sample.sets = on_device<sample_set>(sets.samples);
        sample.count = sets.sample_count;
        sample.most_slots = sets.most_sampled;
        KVRT_TRY(functions_->launch(sample_, join_blocks(sample.count, sample.most_slots),
                                    normalise_threads, 0, stream, &sample));
    }
    if (sets.quota_count != 0) {
        quota_parameters quota;
        quota.scores = scores();
        quota.guarded = guarded;
        quota.tables = on_device<uint32_t>(0);
        quota.sets = on_device<quota_set>(sets.quotas);
        quota.count = sets.quota_count;
        quota.most_segments = sets.most_segments;
        KVRT_TRY(functions_->launch(quota_, quota_blocks(quota.count, quota.most_segments),
                                    select_threads, quota_shared_bytes, stream, &quota));
    }
    if (sets.reserve_count != 0) {
        reserve_parameters reserve;
        reserve.measures = scores();
        reserve.scores = scores();
        reserve.guarded = guarded;
        reserve.sets = on_device<reserve_set>(sets.reserves);
        reserve.count = sets.reserve_count;
        KVRT_TRY(functions_->launch(reserve_, reserve.count, select_threads, select_shared_bytes,
                                    stream, &reserve));
    }
    return KV_OK;
}

status round_runner::launch_sets(stream_handle stream, const set_lists& sets,
                                 guarded_slots* guarded) {
    KVRT_TRY(launch_adjustments(stream, sets, guarded));
    select_parameters select;
    select.scores = scores();
    select.survivors = reinterpret_cast<uint32_t*>(scores());
    select.guarded = guarded;
    select.sets = on_device<select_set>(sets.selects);
    select.count = sets.count;
    return functions_->launch(select_, select.count, select_threads, select_shared_bytes, stream,
                              &select);
}

/// With ADAPTIVE the lanes of a sequence are one group, else each is one.
status round_runner::launch_counts(stream_handle stream, const kvrt_round& round, const bundle& all,
                                   const set_lists& sets) {
    const bool compete = round.counts == KV_ALLOCATE_ADAPTIVE;
    const uint64_t begin = round_up(used_, batch_alignment);
    uint64_t groups_at = 0;
    auto* const groups = append<counted_group>(all.count, groups_at);
    counting_parameters call;
    for (uint32_t i = 0; i < all.count;) {
        const kvrt_round_lane& lane = all.lanes[i];
        const uint32_t end = compete ? end_of_group(all.lanes, i, all.count) : i + 1;
        const kvrt_round_lane& last = all.lanes[end - 1];
        const uint64_t first = set_of(lane, 0);
        const uint64_t sets_end = set_of(last, last.lane->kv_heads - 1) + 1;
        groups[call.count++] = {first,
                                static_cast<uint32_t>(sets_end - first),
                                lane.absent_budget,
                                lane.count,
                                lane.keep,
                                lane.threshold};
        i = end;
    }
    KVRT_TRY(copy_from(begin, used_));
    call.scores = scores();
    call.notes = reinterpret_cast<uint32_t*>(scores());
    call.guarded = reinterpret_cast<guarded_slots*>(scores());
    call.sets = on_device<counted_set>(sets.counted);
    call.groups = on_device<counted_group>(groups_at);
    return functions_->launch(compete ? share_budgets_ : count_reaching_, call.count,
                              select_threads, select_shared_bytes, stream, &call);
}

/// Shares follow each other in what the workspace has behind the rows of the sets. Only when all
/// have been scored is it known what survives.
status round_runner::run_bundle(stream_handle stream, kvrt_round& round) {
    const bundle all = bundle_at(round, round.done);
    const uint64_t room = workspace_bytes_ - all.end() * sizeof(float);
    const uint64_t lists_begin = round_up(used_, batch_alignment);
    set_lists sets;
    sets.of = &all;
    sets.counts = round.counts != 0;
    begin_sets(all.lanes, all.count, all.sets, sets);
    const uint64_t lists_end = used_;
    while (sets.lanes != all.count) {
        round_share mine = next_share(all.lanes + sets.lanes, all.count - sets.lanes, room);
        KVRT_TRY(describe_share(mine));
        mine.sums_stride = round.sums_stride;
        mine.first = all.end();
        mine.guarded_at = sets.heads * sizeof(guarded_slots) / sizeof(float);
        mine.scratch_at = round_up(mine.survivors_at(), scratch_alignment);
        const uint64_t begin = round_up(used_, batch_alignment);
        const places at = pack(mine, sets);
        KVRT_TRY(copy_from(begin, used_));
        KVRT_TRY(score(stream, round, mine, at));
    }
    KVRT_TRY(copy_from(lists_begin, lists_end));
    if (sets.counts) {
        KVRT_TRY(launch_adjustments(stream, sets, reinterpret_cast<guarded_slots*>(scores())));
        KVRT_TRY(launch_counts(stream, round, all, sets));
        round.done += all.count;
        return KV_OK;
    }
    KVRT_TRY(launch_sets(stream, sets, reinterpret_cast<guarded_slots*>(scores())));
    for (uint32_t moved = 0; moved != all.count;) {
        round_share mine = next_share(all.lanes + moved, all.count - moved, workspace_bytes_);
        KVRT_TRY(describe_share(mine));
        KVRT_TRY(launch_compaction(stream, round, mine, sets, moved, all.stride));
        moved += mine.count;
        round.done += mine.count;
    }
    return KV_OK;
}

}  // namespace kvrt::cuda
