// Two lanes of one sequence each, part of whose positions are stored, in blocks of a table that is
// shuffled.
#pragma once

#include "lane_fixture.hpp"
#include "memory/block_id.hpp"
#include "sequence/slots.hpp"

namespace kernel_test {

/// Of one stretch and of more. Head h of a lane has position 3 slot + h where it is stored.
struct placed_lanes {
    static constexpr uint32_t heads = 2, block_tokens = 16, block_units = 3, blocks = 80;
    std::vector<uint32_t> slots = {40, 1070}, stored_slots = {0, 700};
    kvrt::block_numbering numbering{block_units};
    std::vector<uint32_t> tables, stored;

    placed_lanes() {
        for (uint32_t i = 0; i < 2 * blocks; ++i) tables.push_back(i * block_units);
        std::mt19937 random(9);
        std::shuffle(tables.begin(), tables.end(), random);
        stored.assign((numbering.index((2 * blocks - 1) * block_units) + 1) * heads * block_tokens,
                      0xeeeeeeeeu);
        for (uint32_t i = 0; i < 2; ++i) {
            for (uint32_t head = 0; head < heads; ++head) {
                for (uint32_t slot = 0; slot < stored_slots[i]; ++slot) {
                    store().of(tables[table_of(i) + slot / block_tokens],
                               head)[slot % block_tokens] = 3 * slot + head;
                }
            }
        }
    }
    static uint64_t table_of(uint32_t i) { return uint64_t{i} * blocks; }
    uint64_t next_position(uint32_t i) const { return uint64_t{3} * slots[i] + 7; }
    kvrt::position_store store() {
        return {stored.data(), numbering, heads * block_tokens, block_tokens};
    }
    kvrt::slot_positions positions(uint32_t i, uint32_t head) {
        kvrt::slot_positions at;
        at.store.open = store();
        at.blocks = tables.data() + table_of(i);
        at.kv_head = head;
        at.slots = slots[i];
        at.explicit_slots = stored_slots[i];
        at.next_position = next_position(i);
        return at;
    }
};

}  // namespace kernel_test
