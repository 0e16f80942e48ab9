// Sealing and opening on a device: blocks are filled from others by launches on the step's stream.
//
//   reserve   in front of the step's work: what could not be sealed before, and, where too much is
//             pinned, what can be demoted of any sequence; sealed tails are opened
//   end       what is due then is sealed behind the step's work and in front of its event, so that
//             tables change at a step's end as on the CPU; behind that, where too much is pinned,
//             what can be demoted (device_pressure.hpp)
//
// That the device is behind, or has no memory, keeps nothing from ending: it is sealed with a later
// step. What a launch reads and writes is a list of words behind those of device_verbs, uploaded in
// front of it: kvrt_seal_blocks::items, by lane.
#pragma once

#include "sequence/seal.hpp"

namespace kvrt {

struct step;
struct step_context;

struct device_seals {
    /// Of a sequence's lane: `source` becomes `target`.
    struct entry {
        sequence* owner = nullptr;
        uint32_t lane = 0;
        block_id source = no_block, target = no_block;
        uint32_t slots = 0;
        uint32_t coded = 0;  ///< leading slots whose rows were coded before
    };

    uint64_t first_word = 0;
    host_array<entry> entries;  ///< in front those of the last list, blocks of a lane in order
    uint32_t count = 0;
    host_array<uint32_t> words;  ///< of the list

    /// Before the tables are created: its words begin at `next_word`, and end there then. None in
    /// pools without blocks that are sealed.
    status measure(const step_context& context, uint64_t& next_word);

    /// In a step that is not reserved yet, or pressure: that has ended, and takes more work. AGAIN:
    /// the device must catch up with uploads first.
    status seal_late(step& target);
    status relieve_pressure(step& target);

    /// Once tables have grown. The list goes up with them, then its launches follow.
    void list_openings(const step& target);
    status open_tails(step& target);

    /// Everything but the tables. Errors: the step cannot end; nothing has changed.
    status seal_at_end(step& target);
    /// Or, where the step does not end: nobody gets what was to be sealed into before the fence.
    void give_up(step& target, uint64_t fence);
    /// What that has enqueued takes its place in the tables of the step's sequences, whose lengths
    /// are those behind the step.
    void settle(step& target);

  private:
    void list_due(cache& store, sequence& owner, uint32_t lane, uint32_t accepted,
                  seal_reach reach);
    void add(const entry& made) { entries[count++] = made; }
    void write_list(const step& target);
    status launch(step& target, bool opens);
    status upload_and_seal(step& target);
    status seal_before_work(step& target);
};

}  // namespace kvrt
