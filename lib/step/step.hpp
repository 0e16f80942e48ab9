// The step: one forward pass over a batch, as a transaction.
//
//   building   append, remove                       nothing of any sequence has changed
//   reserved   write, attend, export, accept        tables have grown; lane_undo says how to shrink
//   closed     after end or cancel
//
// A sequence's lengths change at step end alone. Steps are few (two open at once), so their arrays
// are allocated once per place and used again.
#pragma once

#include "attention/attend.hpp"
#include "format/encode.hpp"
#include "kvrt/kv_cuda.h"
#include "retention/compact.hpp"
#include "sequence/cache.hpp"
#include "step/device_attention.hpp"
#include "step/device_counts.hpp"
#include "step/device_given.hpp"
#include "step/device_queries.hpp"
#include "step/device_rounds.hpp"
#include "step/device_seal.hpp"
#include "step/device_tables.hpp"
#include "step/device_verbs.hpp"

namespace kvrt {

inline constexpr uint32_t max_open_steps = 2;

enum class step_state : uint32_t { closed, building, reserved };

/// What a device knows a step by: two with one mark are never near. Neither 0 nor -1.
constexpr uint32_t mark_of_step(uint64_t number) {
    return static_cast<uint32_t>(number % 0xfffffffe) + 1;
}

struct step_item {
    sequence* owner = nullptr;
    kv_seq handle = 0;
    uint32_t first_row = 0;
    uint32_t rows = 0;
    uint32_t accepted = 0;
    bool grew = false;          ///< reserve changed its tables; lane_undo holds then
    uint64_t fence_before = 0;  ///< the owner's last_fence before reserve
};

/// What reserve did to one lane of one item.
struct lane_undo {
    uint32_t blocks_before = 0;
    uint32_t sealed_before = 0;
    uint32_t opened_before = 0;  ///< opened_slots
    uint32_t promised = 0;       ///< blocks set aside for what will be sealed at the step's end
    /// A partly filled tail block that was copied because others read it, or because it is sealed:
    /// still referenced, until end or cancel.
    block_id replaced = no_block;
};

/// The arrays of one open step.
struct step_storage {
    host_array<step_item> items;            ///< [max_step_sequences]
    host_array<lane_undo> undo;             ///< [max_step_sequences, lanes]
    host_array<attend_item> attend_items;   ///< [most lanes of a layer, max_step_sequences]
    host_array<attend_observer> observers;  ///< as attend_items, of pools that observe
    host_array<write_item> write_items;     ///< the same
    host_array<uint8_t> lane_written;       ///< [lanes], by kv_write
    host_array<uint8_t> lane_exported;      ///< [lanes]: the host's kernels may have written
};

/// What all steps of a pool work with.
struct step_context {
    cache* store = nullptr;
    retention_context* retention = nullptr;
    host_array<attend_layer> layers;       ///< by layer, and the lanes it attends over
    host_array<uint32_t> first_layer;      ///< [layers]: where those of a layer begin
    host_array<attend_call> attend_calls;  ///< [most lanes of a layer]
    host_array<write_call> write_calls;    ///< the same
    host_array<std::byte> workspace;       ///< of attention
    step_storage storage[max_open_steps];
    device_tables tables;  ///< of a pool on a device
    device_verbs verbs;    ///< the same
    device_rounds rounds;  ///< the same
    device_queries queries;
    device_given given;
    device_seals seals;
    device_counts counts;
    device_attention attention;
};

status create_step_context(cache& store, retention_context& retention, step_context& context);

struct step {
    step_context* context = nullptr;
    step_storage* arrays = nullptr;
    step_state state = step_state::closed;
    uint64_t number = 0;  ///< its fence
    uint32_t place = 0;   ///< which storage
    uint32_t item_count = 0;
    uint32_t rows = 0;
    bool has_stream = false;  ///< of a pool on a device
    demotion demoted;         ///< when it was reserved
};

/// Opens `target`. LIMIT when two are open.
status step_begin(step_context& context, step& target);
status step_append(step& target, sequence& owner, kv_seq handle, uint32_t count,
                   kv_append_info* info);
/// On a device: what the step enqueues goes to this stream. Before reserve.
status step_use_stream(step& target, void* stream);
status step_remove(step& target, sequence& owner);
status step_reserve(step& target, kv_reserve_report& report);
status check_accept(step& target, const sequence& owner, uint32_t count);
status step_accept(step& target, sequence& owner, uint32_t count);
status step_write(step& target, uint32_t layer, const kv_tensor* keys, const kv_tensor* values);
status step_attend(step& target, uint32_t layer, const kv_tensor* queries, const kv_tensor* out,
                   const kv_attend_options& options);
status step_export(step& target, uint32_t layer, kv_tables& tables);

/// Of a layer's lane: where kernels find the step's tables. The lane counts as exported.
status step_device_tables(step& target, uint32_t layer, kv_cuda_tables& tables);

/// INVALID when the step cannot end (not reserved, a lane not written): it is cancelled then.
status step_end(step& target, kv_step_report& report);
void step_cancel(step& target);

/// INVALID, with what state the step is in, unless it is `wanted`.
status expect_state(const step& target, step_state wanted, const char* verb);

/// A sequence's item in this step, or nullptr.
step_item* find_item(step& target, const sequence& owner);

}  // namespace kvrt
