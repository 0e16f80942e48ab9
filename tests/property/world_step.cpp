#include <algorithm>
#include <cstring>

#include "world.hpp"

namespace property {

namespace {

using class_counts = std::array<uint64_t, 16>;

/// How many blocks of each class could be handed out: free ones, and slabs that take any class.
struct capacity {
    std::vector<kv_class_stats> classes;
    uint64_t slabs = 0;

    bool holds(const class_counts& needed) const {
        uint64_t left = slabs;
        for (std::size_t c = 0; c < classes.size(); ++c) {
            if (needed[c] <= classes[c].free) continue;
            const uint64_t per_slab = classes[c].blocks_per_slab;
            const uint64_t more = (needed[c] - classes[c].free + per_slab - 1) / per_slab;
            if (more > left) return false;
            left -= more;
        }
        return true;
    }
};

capacity capacity_of(kv_pool* pool, const kv_pool_stats& stats, bool empty) {
    capacity found;
    found.slabs = empty ? stats.slabs_total : stats.slabs_free;
    for (uint32_t c = 0; c < stats.classes; ++c) {
        found.classes.push_back(KV_INIT(kv_class_stats));
        require_ok(kv_pool_get_class_stats(pool, c, &found.classes[c]), "kv_pool_get_class_stats");
        if (empty) found.classes[c].free = 0;
    }
    return found;
}

}  // namespace

uint32_t world_step::rows() const {
    uint32_t count = 0;
    for (const world_item& item : items) count += item.rows;
    return count;
}

int world::begin() {
    note("begin");
    kv_step* handle = nullptr;
    const kv_pool_stats before = stats();
    const kv_status found = kv_step_begin(pool_, &handle);
    const int place = !steps_[0].open() ? 0 : !steps_[1].open() ? 1 : -1;
    if (place < 0) {
        expect_error(found, KV_LIMIT, "kv_step_begin");
        require(handle == nullptr, "kv_step_begin: a handle in spite of an error");
        return -1;
    }
    require_ok(found, "kv_step_begin");
    world_step& step = steps_[place];
    step = world_step{};
    step.handle = handle;
    step.number = ++model_.fences.last_begun;
    model_.fences.open[static_cast<std::size_t>(place)] = step.number;
    step.at_begin = before;
    operated();
    step.begun_at = operations_;
    return place;
}

kv_status world::append(int place, oracle_sequence& owner, uint32_t rows) {
    note("append to {}: {}, {} rows at {}", place, owner.serial, rows, owner.next_position);
    world_step& step = steps_[place];
    kv_append_info info = KV_INIT(kv_append_info);
    const kv_status found = kv_seq_append(step.handle, owner.handle, nullptr, rows, &info);
    kv_status expected = KV_OK;
    if (step.reserved || owner.step >= 0 || rows == 0) {
        expected = KV_INVALID;
    } else if (step.items.size() == model_.spec.max_step_sequences ||
               step.rows() + rows > model_.spec.max_step_tokens) {
        expected = KV_LIMIT;
    }
    if (expected != KV_OK) {
        expect_error(found, expected, "kv_seq_append");
        return found;
    }
    require_ok(found, "kv_seq_append");
    require(info.first_position == owner.next_position && info.item == step.items.size() &&
                info.first_row == step.rows(),
            "kv_seq_append: position {}, item {}, row {} instead of {}, {}, {}",
            info.first_position, info.item, info.first_row, owner.next_position, step.items.size(),
            step.rows());
    world_item item;
    item.owner = &owner;
    item.rows = rows;
    item.accepted = rows;
    step.items.push_back(std::move(item));
    owner.step = place;
    ++step.own;
    operated();
    return KV_OK;
}

kv_status world::remove(int place, oracle_sequence& owner) {
    note("remove from {}: {}", place, owner.serial);
    world_step& step = steps_[place];
    const kv_status found = kv_step_remove(step.handle, owner.handle);
    if (step.reserved || owner.step != place) {
        expect_error(found, KV_INVALID, "kv_step_remove");
        return found;
    }
    require_ok(found, "kv_step_remove");
    std::erase_if(step.items, [&](const world_item& item) { return item.owner == &owner; });
    owner.step = -1;
    owner.round_deferred = owner.has_deferred_policy = false;
    ++step.own;
    operated();
    return KV_OK;
}

kv_status world::predict(world_step& step, kv_reserve_report& expected,
                         std::vector<kv_status>& statuses) const {
    const kv_pool_stats before = stats();
    const capacity now = capacity_of(pool_, before, false);
    const capacity ever = capacity_of(pool_, before, true);
    class_counts fitting = {};
    kv_status worst = KV_OK;
    bool all_so_far = true;
    for (const world_item& item : step.items) {
        kv_status verdict = KV_OK;
        class_counts mine = {};
        class_counts whole = {};
        for (std::size_t lane = 0; lane < model_.lanes.size(); ++lane) {
            const uint64_t slots = uint64_t{item.owner->lanes[lane].slots()} + item.rows;
            if (slots > model_.spec.max_tokens) verdict = KV_LIMIT;
            whole[model_.lanes[lane].block_class] += model_.blocks_for(slots);
        }
        if (verdict == KV_OK && !ever.holds(whole)) verdict = KV_TOO_LARGE;
        mine = model_.need(*item.owner, item.rows);
        for (std::size_t c = 0; c < model_.class_bytes.size(); ++c) {
            expected.need_blocks += mine[c];
            expected.need_bytes += mine[c] * model_.class_bytes[c];
            mine[c] += fitting[c];
        }
        if (verdict == KV_OK && !now.holds(mine)) verdict = KV_AGAIN;
        if (verdict == KV_OK) fitting = mine;
        statuses.push_back(verdict);
        all_so_far = all_so_far && verdict == KV_OK;
        if (all_so_far) ++expected.items_that_fit;
        if (worst == KV_OK || (worst == KV_AGAIN && verdict != KV_OK)) worst = verdict;
    }
    if (step.reserved || step.items.empty()) return KV_INVALID;
    return worst;
}

kv_status world::reserve(int place) {
    note("reserve {}", place);
    world_step& step = steps_[place];
    kv_reserve_report expected = KV_INIT(kv_reserve_report);
    std::vector<kv_status> statuses;
    const kv_status verdict = predict(step, expected, statuses);
    std::vector<kv_status> found_statuses(statuses.size() + 1, 77);
    kv_reserve_report report = KV_INIT(kv_reserve_report);
    report.item_statuses = found_statuses.data();
    report.item_status_capacity = static_cast<uint32_t>(statuses.size());
    const kv_status found = kv_step_reserve(step.handle, &report);
    ++step.own;
    if (verdict == KV_OK || verdict == KV_AGAIN) {
        require(
            report.need_blocks == expected.need_blocks && report.need_bytes == expected.need_bytes,
            "kv_step_reserve needs {} blocks, {} bytes instead of {}, {}", report.need_blocks,
            report.need_bytes, expected.need_blocks, expected.need_bytes);
        require(report.free_bytes_after_fence >= report.free_bytes_now,
                "kv_step_reserve: {} bytes free now, {} after the fences", report.free_bytes_now,
                report.free_bytes_after_fence);
    }
    if (verdict != KV_INVALID) {
        require(report.items_that_fit == expected.items_that_fit,
                "kv_step_reserve: {} items fit instead of {}", report.items_that_fit,
                expected.items_that_fit);
        statuses.push_back(77);
        require(found_statuses == statuses, "kv_step_reserve: the statuses of its items differ");
    }
    if (verdict != KV_OK) {
        expect_error(found, verdict, "kv_step_reserve");
        return found;
    }
    require_ok(found, "kv_step_reserve");
    for (world_item& item : step.items) grow(step, item);
    step.reserved = true;
    operated();
    for (const world_item& item : step.items) {
        if (!item.owner->released) check_sequence(*item.owner);
    }
    return KV_OK;
}

void world::grow(world_step& step, world_item& item) {
    oracle_sequence& owner = *item.owner;
    item.fence_before = owner.last_fence;
    for (uint32_t lane = 0; lane < model_.lanes.size(); ++lane) {
        oracle_lane& state = owner.lanes[lane];
        lane_undo undo;
        undo.blocks_before = state.table.size();
        if (model_.tail_is_shared(owner, lane)) {
            undo.replaced = state.table.back();
            state.table.back() = model_.new_block(lane);
        }
        while (state.table.size() < model_.blocks_for(state.slots() + item.rows)) {
            state.table.push_back(model_.new_block(lane));
        }
        item.undo.push_back(std::move(undo));
    }
    owner.last_fence = step.number;
    owner.reserved_rows = item.rows;
}

/// The host's kernels may have seen the tables of an exported step: its fence holds then.
void world::undo(const world_step& step, world_item& item) {
    oracle_sequence& owner = *item.owner;
    const uint64_t fence = step.exported ? step.number : 0;
    drop_count ignored;
    for (uint32_t lane = 0; lane < item.undo.size(); ++lane) {
        std::vector<block_reference>& table = owner.lanes[lane].table;
        lane_undo& before = item.undo[lane];
        while (table.size() > before.blocks_before) {
            model_.drop(table.back(), lane, fence, ignored);
            table.pop_back();
        }
        if (before.replaced != nullptr) {
            model_.drop(table.back(), lane, fence, ignored);
            table.back() = before.replaced;
        }
    }
    if (!item.undo.empty() && !step.exported) owner.last_fence = item.fence_before;
    item.undo.clear();
    owner.reserved_rows = 0;
    owner.written_rows = 0;
}

void world::accept(int place, oracle_sequence& owner, uint32_t count) {
    note("accept in {}: {}, {} rows", place, owner.serial, count);
    world_step& step = steps_[place];
    const kv_status found = kv_step_accept(step.handle, owner.handle, count);
    const auto item = std::find_if(step.items.begin(), step.items.end(),
                                   [&](const world_item& i) { return i.owner == &owner; });
    if (!step.reserved || item == step.items.end() || count > item->rows) {
        expect_error(found, KV_INVALID, "kv_step_accept");
        return;
    }
    require_ok(found, "kv_step_accept");
    item->accepted = count;
    ++step.own;
    operated();
}

void world::close(world_step& step) {
    for (uint64_t& open : model_.fences.open) {
        if (open == step.number) open = 0;
    }
    for (world_item& item : step.items) item.owner->step = -1;
    for (world_item& item : step.items) {
        if (item.owner->released) model_.release(*item.owner);
    }
    step = world_step{};
    bury();
}

/// What kv_step_cancel and a failed kv_step_end leave behind.
void world::cancelled(world_step& step) {
    const bool undisturbed = operations_ - step.begun_at == step.own;
    const kv_pool_stats before = step.at_begin;
    for (auto item = step.items.rbegin(); item != step.items.rend(); ++item) {
        undo(step, *item);
        discard_pending(*item->owner);
        item->owner->round_deferred = false;
        item->owner->has_deferred_policy = false;
    }
    close(step);
    ++operations_;
    check_all();
    if (!undisturbed) return;
    kv_pool_stats after = stats();
    require(after.steps_cancelled == before.steps_cancelled + 1, "{} steps cancelled after {}",
            after.steps_cancelled, before.steps_cancelled);
    // A high-water mark stays, and which empty slabs have memory is the pool's own affair.
    after.steps_cancelled = before.steps_cancelled;
    after.peak_live_blocks = before.peak_live_blocks;
    after.slabs_given_back = before.slabs_given_back;
    after.slabs_resident = before.slabs_resident;
    // What was parked before may have come free meanwhile.
    const uint64_t idle_before = before.free + before.parked;
    const bool comparable = before.parked == 0 && after.parked == 0;
    require(!comparable || std::memcmp(&after, &before, sizeof after) == 0,
            "a cancelled step leaves other counters than before: {} blocks allocated, {} returned, "
            "{} pinned, {} free instead of {}, {}, {}, {}",
            after.blocks_allocated, after.blocks_returned, after.pinned, after.free,
            before.blocks_allocated, before.blocks_returned, before.pinned, idle_before);
}

void world::cancel(int place) {
    note("cancel {}", place);
    world_step& step = steps_[place];
    kv_step* handle = step.handle;
    require_ok(kv_step_cancel(handle), "kv_step_cancel");
    cancelled(step);
    expect_error(kv_step_cancel(handle), KV_INVALID, "kv_step_cancel, again");
}

void world::settle(world_step& step, world_item& item, kv_step_report& expected) {
    oracle_sequence& owner = *item.owner;
    const uint32_t accepted = model_.defect == mutation::accepted_draft && item.accepted < item.rows
                                  ? item.accepted + 1
                                  : item.accepted;
    drop_count returned;
    for (uint32_t lane = 0; lane < model_.lanes.size(); ++lane) {
        oracle_lane& state = owner.lanes[lane];
        for (std::vector<token>& head : state.heads) {
            head.insert(head.end(), item.tokens.begin(), item.tokens.begin() + accepted);
        }
        if (item.undo[lane].replaced != nullptr) {
            model_.drop(item.undo[lane].replaced, lane, step.number, returned);
        }
        model_.shrink(owner, lane, model_.blocks_for(state.slots()), returned);
    }
    owner.next_position += accepted;
    owner.tokens_since_round += accepted;
    commit_pending(owner);
    owner.reserved_rows = 0;
    owner.written_rows = 0;
    expected.accepted_tokens += accepted;
    drop_count slid;
    model_.slide(owner, slid);
    expected.window_blocks_returned += slid.blocks;
    expected.blocks_returned += slid.blocks + returned.blocks;
    expected.bytes_returned += slid.bytes + returned.bytes;
}

void world::end(int place) {
    note("end {}", place);
    world_step& step = steps_[place];
    kv_step* handle = step.handle;
    kv_step_report report = KV_INIT(kv_step_report);
    const kv_pool_stats before = stats();
    const kv_status found = kv_step_end(handle, &report);
    if (!step.reserved || !(step.written || step.exported)) {
        require_status(found, KV_INVALID, "kv_step_end of an unfinished step");
        cancelled(step);
        return;
    }
    require_ok(found, "kv_step_end");
    kv_step_report expected = KV_INIT(kv_step_report);
    expected.fence = step.number;
    for (uint64_t& open : model_.fences.open) {
        if (open == step.number) open = 0;
    }
    bool releases = false;
    for (world_item& item : step.items) settle(step, item, expected);
    for (world_item& item : step.items) {
        item.owner->step = -1;
        if (item.owner->released) {
            releases = true;
            model_.release(*item.owner);
        } else {
            round_at_step_end(*item.owner, item.accepted, expected);
        }
    }
    std::vector<oracle_sequence*> survivors;
    for (const world_item& item : step.items) {
        if (!item.owner->released) survivors.push_back(item.owner);
    }
    close(step);
    operated();
    for (const oracle_sequence* owner : survivors) check_sequence(*owner);
    require(report.fence == expected.fence, "fence {} instead of {}", report.fence, expected.fence);
    require(report.accepted_tokens == expected.accepted_tokens, "{} tokens accepted instead of {}",
            report.accepted_tokens, expected.accepted_tokens);
    require(report.window_blocks_returned == expected.window_blocks_returned,
            "{} blocks slid out of windows instead of {}", report.window_blocks_returned,
            expected.window_blocks_returned);
    require(report.compactions == expected.compactions &&
                report.compactions_skipped == expected.compactions_skipped,
            "{} rounds ran, {} were skipped instead of {}, {}", report.compactions,
            report.compactions_skipped, expected.compactions, expected.compactions_skipped);
    require(report.blocks_returned == expected.blocks_returned &&
                report.bytes_returned == expected.bytes_returned,
            "the step returned {} blocks, {} bytes instead of {}, {}", report.blocks_returned,
            report.bytes_returned, expected.blocks_returned, expected.bytes_returned);
    const kv_pool_stats after = stats();
    require(releases || after.blocks_returned - before.blocks_returned == report.blocks_returned,
            "the step reports {} blocks returned, the pool counts {}", report.blocks_returned,
            after.blocks_returned - before.blocks_returned);
    require(after.steps_ended == before.steps_ended + 1 &&
                after.tokens_accepted == before.tokens_accepted + report.accepted_tokens,
            "the pool counts {} steps, {} tokens after {}, {}", after.steps_ended,
            after.tokens_accepted, before.steps_ended, before.tokens_accepted);
}

}  // namespace property
