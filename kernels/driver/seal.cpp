// Blocks between the layouts of a lane, as launches.
#include "kernels/seal.hpp"

#include "driver/fences.hpp"
#include "driver/verbs.hpp"

namespace kvrt::cuda {

static_assert(sizeof(kernels::seal_item) == 4 * sizeof(uint32_t));
static_assert(offsetof(kernels::seal_item, slots) == 2 * sizeof(uint32_t));

status launch_seal(kernel_functions& functions, stream_handle stream,
                   const kvrt_seal_blocks& blocks) {
    kernels::seal_parameters call;
    KVRT_TRY(describe_lane(*blocks.from, "sealing", call.from));
    KVRT_TRY(describe_lane(*blocks.to, "sealing", call.to));
    call.arena = static_cast<std::byte*>(const_cast<void*>(blocks.to->arena));
    call.source_arena = call.arena;
    call.from_positions = positions_of(blocks.from->positions);
    call.to_positions = positions_of(blocks.to->positions);
    call.items = reinterpret_cast<const kernels::seal_item*>(blocks.items);
    call.count = blocks.count;
    call.saturated_keys = blocks.saturated_keys;
    call.saturated_values = blocks.saturated_values;
    return functions.launch(functions.seal(), kernels::seal_blocks(call.count, call.to.kv_heads),
                            kernels::seal_threads, kernels::seal_shared_bytes, stream, &call);
}

}  // namespace kvrt::cuda
