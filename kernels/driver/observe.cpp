// Observed attention as launches: what attention has kept of weights is added up by slot.
#include "kernels/observe.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "driver/verbs.hpp"

namespace kvrt::cuda {

using namespace kernels;

// The seam's list is the kernel's.
static_assert(sizeof(kvrt_observe_item) == sizeof(observe_item));
static_assert(offsetof(kvrt_observe_item, kept) == offsetof(observe_item, kept));
static_assert(offsetof(kvrt_observe_item, end_kept) == offsetof(observe_item, end_kept));
static_assert(offsetof(kvrt_observe_item, log2_decay) == offsetof(observe_item, log2_decay));

kept_weights kept_of(const kvrt_attend_rows& rows) {
    std::byte* const weights = static_cast<std::byte*>(rows.workspace) + rows.kept_at;
    return {
        reinterpret_cast<uint16_t*>(weights),
        reinterpret_cast<float*>(weights + rows.kept_entries * slots_of_group * sizeof(uint16_t))};
}

status launch_observe(kernel_functions& functions, stream_handle stream,
                      const kvrt_attend_rows& rows, uint32_t wave) {
    observe_parameters call;
    call.kept = kept_of(rows);
    call.sums = rows.sums;
    call.sums_stride = rows.sums_stride;
    call.kv_heads = rows.lane->kv_heads;
    call.group = rows.query_heads / call.kv_heads;
    for (uint32_t i = 0; i < rows.observed_count; ++i) {
        const kvrt_observe_item& item = rows.observed[i];
        if (item.wave == wave) {
            std::memcpy(&call.items[call.count++], &item, sizeof item);
            call.most_slots = std::max(call.most_slots, item.slots);
        }
        if (call.count == 0 || (call.count < observed_at_once && i + 1 != rows.observed_count)) {
            continue;
        }
        KVRT_TRY(functions.launch(functions.observe(),
                                  observe_blocks(call.count, call.kv_heads, call.most_slots),
                                  observe_threads, 0, stream, &call));
        call.count = call.most_slots = 0;
    }
    return KV_OK;
}

}  // namespace kvrt::cuda
