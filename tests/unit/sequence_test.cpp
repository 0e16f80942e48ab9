// Sequences under the interface: handles, positions of slots, and what happens at the last
// position.
#include "sequence/sequence.hpp"

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "step/step.hpp"

using namespace kvrt;

namespace {

TEST_CASE("handles carry a generation; a closed sequence's handle is stale for good") {
    host_allocator allocator;
    sequence_table table;
    REQUIRE(table.create(allocator, 2, 3, 5) == KV_OK);
    sequence* one = table.open();
    sequence* two = table.open();
    REQUIRE(one != nullptr);
    REQUIRE(two != nullptr);
    CHECK(table.open() == nullptr);
    CHECK(table.alive() == 2);
    CHECK(table.free() == 0);
    const kv_seq first = table.handle(*one);
    const kv_seq second = table.handle(*two);
    CHECK(first != 0);
    CHECK(first != second);
    CHECK(table.find(first) == one);
    CHECK(table.find(second) == two);

    kv_seq last = first;
    for (int i = 0; i < 100; ++i) {
        table.close(*table.find(last));
        CHECK(table.find(last) == nullptr);
        CHECK(table.fail_stale(last) == KV_STALE);
        const kv_seq next = table.handle(*table.open());
        CHECK(next != last);
        CHECK(table.find(first) == nullptr);
        last = next;
    }
    CHECK(table.find(second) == two);
    CHECK_FALSE(table.is_handle(0));
    CHECK_FALSE(table.is_handle(1));
    CHECK_FALSE(table.is_handle((uint64_t{1} << 32) | 3));
    CHECK(table.fail_stale(3) == KV_INVALID);
}

TEST_CASE("a reused sequence starts empty, with tables of its own") {
    host_allocator allocator;
    sequence_table table;
    REQUIRE(table.create(allocator, 2, 2, 4) == KV_OK);
    sequence* one = table.open();
    sequence* two = table.open();
    std::vector<block_id*> tables;
    for (const sequence* owner : {one, two}) {
        for (uint32_t lane = 0; lane < 2; ++lane) tables.push_back(owner->lanes[lane].table);
    }
    for (std::size_t i = 1; i < tables.size(); ++i) CHECK(tables[i] == tables[i - 1] + 4);
    one->next_position = 50;
    one->pinned_count = 3;
    one->in_step = true;
    one->lanes[1].slots = 9;
    one->lanes[1].blocks = 1;
    table.close(*one);
    const sequence* again = table.open();
    CHECK(again == one);
    CHECK(again->next_position == 0);
    CHECK(again->pinned_count == 0);
    CHECK_FALSE(again->in_step);
    CHECK(again->lanes[1].slots == 0);
    CHECK(again->lanes[1].blocks == 0);
    CHECK(again->lanes[1].table == tables[1]);
}

TEST_CASE("positions: stored ones first, then consecutive ones up to the next") {
    // Blocks of 4 slots and 2 heads; ids are units of one block here.
    std::vector<uint32_t> stored(3 * 2 * 4, 0);
    slot_positions positions;
    positions.store.open.base = stored.data();
    positions.store.open.numbering = block_numbering(1);
    positions.store.open.block_stride = 8;
    positions.store.open.block_tokens = 4;
    const block_id blocks[3] = {2, 0, 1};
    positions.blocks = blocks;
    positions.kv_head = 1;
    positions.slots = 9;
    positions.explicit_slots = 6;
    positions.next_position = 100;
    const uint32_t expected[9] = {3, 7, 20, 21, 50, 51, 97, 98, 99};
    for (uint32_t slot = 0; slot < 6; ++slot) {
        stored[blocks[slot / 4] * 8 + 4 + slot % 4] = expected[slot];
    }
    for (uint32_t slot = 0; slot < 9; ++slot) CHECK(positions.at(slot) == expected[slot]);
    for (uint64_t position = 0; position < 110; ++position) {
        uint32_t first = 0;
        while (first < 9 && expected[first] < position) ++first;
        CHECK(positions.find(position) == first);
    }
}

/// A cache and its steps, without the interface above.
struct core {
    cache store;
    retention_context retention;
    step_context steps;

    core() {
        store.limits = {4, 256, 4, 64};
        kv_layer layer = KV_INIT(kv_layer);
        layer.query_heads = 2;
        layer.kv_heads = 1;
        layer.key_dim = 32;
        kv_model model = KV_INIT(kv_model);
        model.layers = &layer;
        model.layer_count = 1;
        REQUIRE(store.threads.start(store.allocator, 1, nullptr) == KV_OK);
        REQUIRE(describe_model(&model, 16, tile_order::native, store.allocator, store.model) ==
                KV_OK);
        REQUIRE(store.blocks.create(store.allocator, store.memory, {2, false, true},
                                    store.model.classes.data(), store.model.class_count) == KV_OK);
        REQUIRE(store.sequences.create(store.allocator, 4, 1, 16) == KV_OK);
        REQUIRE(create_retention(store, retention) == KV_OK);
        REQUIRE(create_step_context(store, retention, steps) == KV_OK);
    }

    /// Appends and accepts `count` tokens; the host's kernels have written them.
    status append(sequence& owner, uint32_t count) {
        step open;
        kv_append_info info = KV_INIT(kv_append_info);
        kv_reserve_report reserved = KV_INIT(kv_reserve_report);
        kv_tables tables = KV_INIT(kv_tables);
        kv_step_report report = KV_INIT(kv_step_report);
        KVRT_TRY(step_begin(steps, open));
        status verdict = step_append(open, owner, store.sequences.handle(owner), count, &info);
        if (verdict == KV_OK) verdict = step_reserve(open, reserved);
        if (verdict == KV_OK) verdict = step_export(open, 0, tables);
        if (verdict == KV_OK) return step_end(open, report);
        step_cancel(open);
        return verdict;
    }
};

TEST_CASE("positions end at 2^31 - 1: LIMIT before, nothing changed, up to there all is well") {
    core c;
    sequence& owner = *c.store.sequences.open();
    REQUIRE(c.append(owner, 20) == KV_OK);
    owner.next_position = max_position - 5;
    for (const uint32_t count : {6u, 64u}) {
        CHECK(c.append(owner, count) == KV_LIMIT);
        CHECK(std::string(message_buffer()).find("2147483647") != std::string::npos);
        CHECK(owner.next_position == max_position - 5);
        CHECK(owner.lanes[0].slots == 20);
        CHECK(owner.lanes[0].blocks == 2);
        CHECK_FALSE(owner.in_step);
    }
    CHECK(c.append(owner, 5) == KV_OK);
    CHECK(owner.next_position == max_position);
    CHECK(positions_of(c.store, owner, 0, 0).at(24) == max_position - 1);
    CHECK(c.append(owner, 1) == KV_LIMIT);
    CHECK(check_cache(c.store, nullptr, 0) == KV_OK);
}

TEST_CASE("room: what every lane takes without asking, none while others read the tail") {
    core c;
    sequence& owner = *c.store.sequences.open();
    measure_room(c.store, owner);
    CHECK(owner.room == 0);
    REQUIRE(c.append(owner, 20) == KV_OK);
    CHECK(owner.room == 12);
    REQUIRE(c.append(owner, 5) == KV_OK);
    CHECK(owner.room == 7);
    sequence* child = fork_sequence(c.store, owner);
    REQUIRE(child != nullptr);
    CHECK(owner.room == 0);
    CHECK(child->room == 0);
    measure_room(c.store, owner);
    CHECK(owner.room == 0);
    // The child's first token moves it to a tail of its own; the parent's room comes back.
    REQUIRE(c.append(*child, 1) == KV_OK);
    CHECK(child->lanes[0].table[0] == owner.lanes[0].table[0]);
    CHECK(child->lanes[0].table[1] != owner.lanes[0].table[1]);
    CHECK(child->room == 6);
    measure_room(c.store, owner);
    CHECK(owner.room == 7);
    CHECK(check_cache(c.store, nullptr, 0) == KV_OK);
}

TEST_CASE("a full tail block needs no copy after a fork") {
    core c;
    sequence& owner = *c.store.sequences.open();
    REQUIRE(c.append(owner, 32) == KV_OK);
    sequence* child = fork_sequence(c.store, owner);
    REQUIRE(c.append(*child, 1) == KV_OK);
    CHECK(child->lanes[0].table[1] == owner.lanes[0].table[1]);
    CHECK(child->lanes[0].blocks == 3);
    CHECK(c.store.blocks.totals().pinned == 3);
    release_sequence(c.store, owner);
    CHECK(c.store.blocks.totals().pinned == 3);
    release_sequence(c.store, *child);
    CHECK(c.store.blocks.totals().pinned == 0);
    CHECK(check_cache(c.store, nullptr, 0) == KV_OK);
}

TEST_CASE("the check finds what does not fit") {
    core c;
    sequence& owner = *c.store.sequences.open();
    REQUIRE(c.append(owner, 20) == KV_OK);
    lane_state& lane = owner.lanes[0];
    REQUIRE(check_cache(c.store, nullptr, 0) == KV_OK);
    lane.slots = 33;
    CHECK(check_cache(c.store, nullptr, 0) == KV_INTERNAL);
    lane.slots = 20;
    c.store.blocks.retain(lane.table[0]);
    CHECK(check_cache(c.store, nullptr, 0) == KV_INTERNAL);
    const held_block held{0, lane.table[0]};
    CHECK(check_cache(c.store, &held, 1) == KV_OK);
    c.store.blocks.drop(lane.table[0], 0, c.store.fences);
    lane.explicit_slots = 3;  // all of them "at position 0xffffffff" or less: not ascending
    const position_store positions = c.store.blocks.positions(0, 16);
    for (uint32_t slot = 0; slot < 3; ++slot) positions.of(lane.table[0], 0)[slot] = 7;
    CHECK(check_cache(c.store, nullptr, 0) == KV_INTERNAL);
    CHECK(std::string(message_buffer()).find("ascend") != std::string::npos);
    lane.explicit_slots = 0;
    CHECK(check_cache(c.store, nullptr, 0) == KV_OK);
}

}  // namespace
