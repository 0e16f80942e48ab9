// Tables of open steps where kernels read them: in device memory, at addresses that never change,
// so that launches on them can be captured. Reserve writes what kv_step_export would, and uploads
// what differs from the last step in the same place.
//
// One array of 32-bit words, for each place of a step:
//   query_start [max_step_sequences + 1]    ends with the number of rows, again for every unused
//   item positions   [max_step_tokens] and for each lane
//     kv_len       [max_step_sequences]     0: no item
//     slot_mapping [max_step_tokens]        of two words; -1: no row
//     block_table  [max_step_sequences][stride]
// Each part begins on a line of the device's uploads. Lanes whose plan is another's, and slot
// mappings where the plugin has kernels, are filled on the device (device_shares.hpp).
#pragma once

#include "step/device_shares.hpp"

namespace kvrt {

struct step;
struct step_context;

struct device_tables {
    static constexpr uint64_t line_words = 16;

    /// What a row of the tables has been filled from: it is right as long as these are the same.
    struct row_source {
        kv_seq handle = 0;
        uint64_t growths = 0, changes = 0;
    };
    /// Where a lane's parts begin, in words, and where they are on the device.
    struct lane_parts {
        uint64_t kv_len = 0, slot_mapping = 0, block_table = 0;
    };

    uint64_t place_words = 0, lane_words = 0, positions = 0, first_lane = 0;
    uint32_t stride = 0;  ///< of block_table rows
    uint32_t items = 0, tokens = 0, lanes = 0;
    std::byte* address = nullptr;      ///< of the device
    const uint32_t* image = nullptr;   ///< the same words on the host, as they are to be there
    host_array<row_source> sources;    ///< [places][items]
    host_array<row_work> work;         ///< [items], of the step at hand
    host_array<uint32_t> filled;       ///< [places][items][lanes]: blocks in the table's row
    host_array<uint32_t> planned;      ///< [places][2]: items and rows of the last step there
    host_array<int> id_shifts;         ///< [lanes]: what ids of the host have more
    host_array<plan_part> lengths;     ///< [places][lanes]: kv_len
    host_array<uint32_t> row_scratch;  ///< words of a row, or of all rows of a lane
    device_shares shares;

    /// With the plans of the context's verbs behind it.
    status create(step_context& context, uint32_t places);

    /// What the step's kernels will read of it. AGAIN: the device must catch up with uploads first.
    status plan(const step& target);

    /// Where plan will put blocks of an item comes into the processor's caches meanwhile.
    void touch_rows(uint32_t place, uint32_t item_index) const;

    lane_parts parts_of(uint32_t place, uint32_t lane) const {
        const uint64_t begin = place * place_words + first_lane + lane * lane_words;
        const uint64_t mapping = begin + round_up<uint64_t>(items, line_words);
        return {begin, mapping, mapping + round_up<uint64_t>(2 * uint64_t{tokens}, line_words)};
    }
    /// What all lanes have in common: words of query_start, and of positions.
    uint64_t items_of(uint32_t place) const { return place * place_words; }
    uint64_t positions_of(uint32_t place) const { return place * place_words + positions; }
    const void* at(uint64_t word) const { return address + word * sizeof(uint32_t); }

  private:
    void plan_rows(const step& target);
    void plan_items(const step& target);
    void plan_blocks(const step& target, uint32_t item_index);
    void plan_lengths(const step& target, uint32_t lane);
    void plan_mapping(const step& target, uint32_t lane);
};

/// An exported id counts units of the largest power of two that divides every block's place.
uint32_t units_per_id(const block_store& blocks, const lane_geometry& lane);

}  // namespace kvrt
