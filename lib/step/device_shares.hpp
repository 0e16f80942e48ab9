// Lanes that have the same slots of every sequence in a step, as most have, need the same plan for
// kernels but for the places of their blocks. It is made and uploaded once, for the first of them,
// which leads; on the device the others' parts of the table become copies of its parts, and slot
// mappings are made there from each lane's own block table.
//
// A part is words of the table at a fixed place, from a line on: entries, and behind them -1. Its
// image on the host is what the device has only while the part is written from here: once it was
// copied to, it is forgotten before it is written again.
//
// The lists of copies and of mappings are words of the table themselves, of each place:
//   copies    [most_copies]   kvrt_plan_copy
//   mappings  [lanes]         kvrt_lane_mapping
#pragma once

#include "sequence/cache.hpp"

namespace kvrt {

struct step;
struct step_context;

/// What a step has to do about an item's row of the block tables.
enum class row_work : uint8_t { none, append, all };

struct plan_part {
    uint64_t reach = 0;   ///< words from its first on that the device may have entries in
    uint64_t used = 0;    ///< that it may ever have had
    bool copied = false;  ///< its image is not what the device has
};

struct device_shares {
    bool available = false;  ///< the plugin has kernels; else every lane leads
    uint32_t lanes = 0, items = 0;
    uint64_t first_word = 0, place_words = 0, first_mapping = 0;
    host_array<uint32_t> leaders;       ///< [lanes], of the step at hand
    host_array<uint32_t> item_leaders;  ///< [places][items][lanes]: the same, of each item alone
    host_array<uint32_t> finer;         ///< [lanes], scratch
    host_array<kvrt_plan_copy> copies;  ///< of the step at hand
    host_array<kvrt_lane_mapping> lane_mappings;  ///< [lanes]: the same
    /// Parts that the step at hand has planned, and how many words of them are entries.
    struct planned_part {
        plan_part* part = nullptr;
        uint64_t count = 0;
    };
    host_array<planned_part> planned;
    uint32_t copy_count = 0, planned_count = 0, most_lines = 0;
    uint32_t mapped_rows[2] = {0, 0};  ///< [places]: as plan_part::reach

    /// Before the table is created: its words begin at `words`, and end there then.
    status create(const step_context& context, uint32_t places, uint64_t& words);

    /// Which lanes lead. Items that had no more than blocks put behind their tables are as before.
    void find_leaders(const step& target, const host_array<row_work>& work);
    bool leads(uint32_t lane) const { return leaders[lane] == lane; }

    /// Entries of a part, from the host, which has room behind them for as many as there were;
    void write(plugin_device& device, plan_part& part, uint64_t word, uint32_t* words,
               uint64_t count);
    /// or those of another, as many.
    void copy(plan_part& part, uint64_t word, uint64_t from, uint64_t count);

    /// What is to be copied and mapped goes into the table,
    void list(const step& target);
    /// and happens behind the upload.
    status launch(const step& target);

  private:
    void compare_lanes(const sequence& owner, uint32_t* found) const;
    uint64_t plan_reach(plan_part& part, uint64_t count);
};

}  // namespace kvrt
