#include "driver/rounds.hpp"

#include <algorithm>
#include <cstring>

#include "base/checked.hpp"
#include "driver/verbs.hpp"
#include "kernels/compact.hpp"
#include "kernels/normalise.hpp"
#include "kernels/select.hpp"

namespace kvrt::cuda {

namespace {

using namespace kernels;

/// Rows of scores that lie in memory at once, where that many are asked for.
constexpr uint64_t comfortable_workspace = uint64_t{64} << 20;
constexpr uint64_t least_staging = uint64_t{64} << 10;
constexpr uint64_t most_staging = uint64_t{8} << 20;
constexpr uint64_t batch_alignment = 16;  ///< of an array in a batch
constexpr uint64_t row_alignment = 64;    ///< slots
constexpr uint32_t most_arrays = 10;      ///< of a share, beside those of its lanes

/// What a lane adds to a batch, at most.
uint64_t lane_bytes(uint64_t blocks, uint64_t pinned, uint64_t phases, uint64_t heads) {
    const uint64_t lists = sizeof(guard_lane) + round_scores::most_lane_bytes() +
                           sizeof(compact_lane) + sizeof(score_join) +
                           heads * (sizeof(normalise_head) + sizeof(select_set) + sizeof(uint64_t));
    return lists + 2 * blocks * sizeof(uint32_t) + pinned * sizeof(position_range) +
           phases * sizeof(double) + (most_arrays + 4) * batch_alignment;
}

bool same_rows(const kvrt_round_lane& a, const kvrt_round_lane& b) {
    return a.kind == b.kind && a.scores.scorer == b.scores.scorer &&
           a.scores.variants == b.scores.variants && (a.set == 0) == (b.set == 0);
}

/// Lanes that share survivors with the first of `left`: itself, and some behind it.
uint32_t lanes_of_set(const kvrt_round_lane* lanes, uint32_t left) {
    uint32_t count = 1;
    while (lanes->set != 0 && count < left && lanes[count].set == lanes->set) ++count;
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
      select_{"kvrt_select_survivors"},
      compact_{"kvrt_compact_lanes"} {}

round_runner::~round_runner() {
    if (stream_ == nullptr) return;
    const current_context here(*device_);
    (void)device_->calls().stream_destroy(stream_);
}

uint64_t round_runner::workspace_bytes(uint64_t heads, uint64_t rows, uint64_t stride) const {
    return heads * (sizeof(guarded_slots) + (rows + 1) * stride * sizeof(float));
}

status round_runner::create(device_context& device, kernel_functions& functions,
                            kvrt_round_memory& memory) {
    KVRT_TRY(functions.state());
    device_ = &device;
    functions_ = &functions;
    const current_context here(device);
    KVRT_TRY(here.state());
    for (kernel_function* each : {&candidates_, &join_, &select_, &compact_}) {
        KVRT_TRY(functions.find(*each));
    }
    KVRT_TRY(scorers_.create(functions));
    const uint64_t stride = round_up<uint64_t>(memory.most_slots, row_alignment);
    const uint64_t lane = workspace_bytes(memory.most_heads, 1, 0) +
                          (memory.most_rows + memory.most_heads) * stride * sizeof(float);
    const uint64_t all = lane * memory.lanes * memory.most_rounds;
    const uint64_t wanted = std::max(lane, std::min(all, comfortable_workspace));
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
    if (stream_ == nullptr) {
        KVRT_TRY(device.check(device.calls().stream_create(&stream_, stream_non_blocking),
                              "cuStreamCreate"));
    }
    const uint64_t sequence =
        memory.lanes * lane_bytes(memory.most_blocks, most_pinned, 0, memory.most_heads) +
        memory.phases * sizeof(double);
    const uint64_t staging = std::clamp(sequence * memory.most_rounds, least_staging, most_staging);
    return ring_.create(device, round_up(std::max(staging, 2 * sequence), ring_.alignment));
}

status round_runner::check(const kvrt_lane& lane, uint32_t scorer) {
    block_place place;
    KVRT_TRY(describe_lane(lane, "policy", place));
    return scorers_.check(lane, place, scorer);
}

float* round_runner::scores() const { return reinterpret_cast<float*>(workspace_.address()); }

/// Behind the survivors, which are behind the scores.
guarded_slots* round_runner::guarded(const round_share& mine) const {
    return reinterpret_cast<guarded_slots*>(scores() + mine.survivors_at() +
                                            mine.heads() * mine.stride);
}

uint64_t round_runner::batch_bytes(const kvrt_round& round) const {
    uint64_t bytes = 0;
    const double* phases = nullptr;
    for (uint32_t i = 0; i < round.count; ++i) {
        const kvrt_round_lane& lane = round.lanes[i];
        const bool more = lane.scores.phases != phases;
        phases = lane.scores.phases;
        bytes += lane_bytes(blocks_for(*lane.lane, lane.slots), lane.guards->pinned_count,
                            more ? lane.scores.phase_count : 0, lane.lane->kv_heads);
    }
    return round_up(bytes, ring_.alignment);
}

/// As many lanes that go together as there are rows for.
round_share round_runner::next_share(const kvrt_round& round, uint32_t first) const {
    round_share made;
    made.lanes = round.lanes + first;
    made.kv_heads = made.lanes->lane->kv_heads;
    made.rows = scorer_of(*made.lanes).rows_of(made.lanes->scores);
    made.shares_sets = made.lanes->set != 0;
    while (first + made.count < round.count) {
        const kvrt_round_lane& next = made.lanes[made.count];
        const uint32_t more = lanes_of_set(&next, round.count - first - made.count);
        const uint32_t slots = std::max(made.most_slots, next.slots);
        const uint64_t stride = round_up<uint64_t>(slots, row_alignment);
        const uint64_t heads = uint64_t{made.count + more} * made.kv_heads;
        if (made.count != 0 && (!same_rows(*made.lanes, next) ||
                                workspace_bytes(heads, made.rows, stride) > workspace_bytes_)) {
            break;
        }
        made.count += more;
        made.most_slots = slots;
        made.stride = stride;
    }
    return made;
}

template <class type>
type* round_runner::append(uint64_t count, uint64_t& at) {
    at = round_up(used_, batch_alignment);
    used_ = at + count * sizeof(type);
    return reinterpret_cast<type*>(ring_.data() + at);
}

/// Tables and pinned ranges lie behind each other; places in them count from the batch's begin.
round_runner::places round_runner::pack(round_share& mine) {
    places at;
    uint64_t members_at = 0;
    uint32_t leader = 0;  // of a set: whose survivors are all lanes'
    mine.sets = 0;
    auto* const guards = append<guard_lane>(mine.count, at.guards);
    const round_scorer& scorer = scorer_of(*mine.lanes);
    auto* const scored_lanes = append<std::byte>(mine.count * scorer.lane_bytes, at.scores);
    auto* const heads = append<normalise_head>(mine.heads(), at.heads);
    auto* const sets = append<select_set>(mine.heads(), at.sets);
    auto* const moves = append<compact_lane>(mine.count, at.moves);
    const uint32_t joined = mine.shares_sets ? mine.heads() : 0;
    auto* const members = append<uint64_t>(joined, members_at);
    auto* const joins = append<score_join>(mine.shares_sets ? mine.count : 0, at.joins);
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
        const kvrt_round_guards& rules = *from.guards;
        position_range* const ranges = append<position_range>(rules.pinned_count, pinned);
        for (uint32_t r = 0; r < rules.pinned_count; ++r) {
            ranges[r] = {rules.pinned[2 * r], rules.pinned[2 * r + 1]};
        }
        if (scored.phases != nullptr && scored.phases != phases_) {
            phases_ = scored.phases;
            std::copy_n(phases_, scored.phase_count,
                        append<double>(scored.phase_count, phases_at_));
        }
        const uint64_t row = uint64_t{i} * mine.kv_heads * mine.rows * mine.stride;
        uint64_t survivors = uint64_t{i} * mine.kv_heads * mine.stride;
        guards[i] = {source / sizeof(uint32_t),
                     pinned / sizeof(position_range),
                     rules.next_position,
                     rules.prompt_tokens,
                     rules.sinks,
                     rules.recent,
                     from.slots,
                     from.explicit_slots,
                     rules.pinned_count,
                     0};
        scorer.describe(from, {source / sizeof(uint32_t), phases_at_ / sizeof(double), row},
                        scored_lanes + i * scorer.lane_bytes);
        const bool leads = i == 0 || !mine.shares_sets || from.set != mine.lanes[i - 1].set;
        if (leads) leader = i;
        for (uint32_t h = 0; h < mine.kv_heads; ++h) {
            const uint32_t head = i * mine.kv_heads + h;
            const uint64_t of_head = row + h * mine.rows * mine.stride;
            heads[head] = {of_head, of_head, head};
            if (mine.shares_sets) members[head] = of_head;
            if (mine.shares_sets && (!leads || h != 0)) continue;
            if (mine.shares_sets) {
                const uint32_t lanes = lanes_of_set(&from, mine.count - i);
                joins[mine.sets] = {of_head, members_at / sizeof(uint64_t) + head, head,
                                    lanes * mine.kv_heads, 0};
            }
            sets[mine.sets++] = {of_head, survivors + h * mine.stride, head, from.slots, from.keep};
        }
        if (mine.shares_sets) survivors = uint64_t{leader} * mine.kv_heads * mine.stride;
        moves[i] = {source / sizeof(uint32_t),
                    target / sizeof(uint32_t),
                    survivors,
                    no_sums,
                    from.keep,
                    from.slots,
                    from.explicit_slots,
                    static_cast<uint32_t>(rules.next_position)};
    }
    return at;
}

/// Survivors, and their way to the front.
status round_runner::launch_rest(stream_handle stream, const round_share& mine, const places& at) {
    if (mine.shares_sets) {
        join_parameters join;
        join.scores = scores();
        join.guarded = guarded(mine);
        join.joins = on_device<score_join>(at.joins);
        join.members = on_device<uint64_t>(0);
        join.count = mine.sets;
        join.most_slots = mine.most_slots;
        KVRT_TRY(functions_->launch(join_, join_blocks(mine.sets, mine.most_slots),
                                    normalise_threads, 0, stream, &join));
    }
    uint32_t* const survivors = reinterpret_cast<uint32_t*>(scores() + mine.survivors_at());
    select_parameters select;
    select.scores = scores();
    select.survivors = survivors;
    select.guarded = guarded(mine);
    select.sets = on_device<select_set>(at.sets);
    select.count = mine.sets;
    KVRT_TRY(functions_->launch(select_, select.count, select_threads, select_shared_bytes, stream,
                                &select));
    const kvrt_lane& lane = *mine.lanes->lane;
    compact_parameters compact;
    compact.arena = static_cast<std::byte*>(const_cast<void*>(lane.arena));
    compact.place = mine.place;
    compact.positions = positions_of(lane.positions);
    compact.lanes = on_device<compact_lane>(at.moves);
    compact.tables = on_device<uint32_t>(0);
    compact.survivors = survivors;
    compact.survivor_stride = mine.shares_sets ? 0 : mine.stride;
    compact.count = mine.count;
    return functions_->launch(compact_, compact_blocks(mine.count, mine.kv_heads), compact_threads,
                              compact_shared_bytes, stream, &compact);
}

status round_runner::run_share(stream_handle stream, const kvrt_round& round, round_share& mine) {
    KVRT_TRY(describe_lane(*mine.lanes->lane, "kv_compress", mine.place));
    const uint64_t begin = round_up(used_, batch_alignment);
    const places at = pack(mine);
    KVRT_TRY(ring_.copy(ring_.on_device(begin), begin, used_ - begin));
    guard_parameters guards;
    guards.positions = positions_of(mine.lanes->lane->positions);
    guards.tables = on_device<uint32_t>(0);
    guards.lanes = on_device<guard_lane>(at.guards);
    guards.pinned = on_device<position_range>(0);
    guards.guarded = guarded(mine);
    guards.count = mine.count;
    guards.kv_heads = mine.kv_heads;
    KVRT_TRY(functions_->launch(candidates_, guard_blocks(mine.count, mine.kv_heads), guard_threads,
                                guard_shared_bytes, stream, &guards));
    KVRT_TRY(scorers_.launch({stream, round, mine, on_device<std::byte>(0),
                              on_device<std::byte>(at.scores), on_device<normalise_head>(at.heads),
                              guarded(mine), scores()}));
    return launch_rest(stream, mine, at);
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
    const uint64_t bytes = batch_bytes(round);
    KVRT_TRY(ring_.open(bytes, bytes, stream));
    used_ = 0;
    phases_ = nullptr;
    status verdict = KV_OK;
    while (round.done != round.count && verdict == KV_OK) {
        round_share mine = next_share(round, round.done);
        verdict = run_share(stream, round, mine);
        if (verdict == KV_OK) round.done += mine.count;
    }
    const status closed = ring_.close(used_);
    return verdict == KV_OK ? closed : verdict;
}

}  // namespace kvrt::cuda
