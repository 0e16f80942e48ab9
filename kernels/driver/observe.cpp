#include "driver/observe.hpp"

#include <algorithm>
#include <cstddef>

#include "base/checked.hpp"

namespace kvrt::cuda {

using namespace kernels;

// The seam's lists are the kernel's.
static_assert(sizeof(kvrt_observe_item) == sizeof(observe_item));
static_assert(offsetof(kvrt_observe_item, rows_of_decay) == offsetof(observe_item, rows_of_decay));
static_assert(offsetof(kvrt_observe_item, first_stretch) == offsetof(observe_item, first_stretch));
static_assert(offsetof(kvrt_observe_item, log2_decay) == offsetof(observe_item, log2_decay));
static_assert(sizeof(kvrt_observe_wave) == sizeof(observe_wave));
static_assert(offsetof(kvrt_observe_wave, step) == offsetof(observe_wave, step));
static_assert(KVRT_OBSERVE_STRETCH == observe_stretch);

namespace {

uint64_t marks_of_head(const kvrt_sums_memory& memory) {
    return ceil_divide<uint64_t>(memory.slots, observe_stretch);
}

}  // namespace

status observed_sums::create(device_context& device, kvrt_sums_memory& memory) {
    device_ = &device;
    const uint64_t rows = memory.arrays * memory.heads;
    mark_bytes_ = rows * marks_of_head(memory) * sizeof(uint32_t);
    KVRT_TRY(sums_.allocate(device, rows * memory.slots * sizeof(float)));
    KVRT_TRY(marks_.allocate(device, mark_bytes_));
    memory.sums = reinterpret_cast<float*>(sums_.address());
    memory.marks = reinterpret_cast<uint32_t*>(marks_.address());
    return KV_OK;
}

status observed_sums::begin(stream_handle stream) {
    if (begun_ || marks_.address() == 0) return KV_OK;
    const current_context here(*device_);
    KVRT_TRY(here.state());
    KVRT_TRY(device_->check(device_->calls().fill_bytes(marks_.address(), 0, mark_bytes_, stream),
                            "cuMemsetD8Async (observed attention)"));
    begun_ = true;
    return KV_OK;
}

kept_weights kept_of(const kvrt_attend_rows& rows) {
    std::byte* const weights = static_cast<std::byte*>(rows.workspace) + rows.kept_at;
    return {
        reinterpret_cast<uint16_t*>(weights),
        reinterpret_cast<float*>(weights + rows.kept_entries * slots_of_group * sizeof(uint16_t))};
}

status launch_observe(kernel_functions& functions, stream_handle stream, bool captured,
                      const kvrt_attend_rows& rows, uint32_t wave) {
    if (rows.observes == 0) return KV_OK;
    const kvrt_sums_memory& memory = rows.sums;
    // As many as whole contexts have pieces, of which none has fewer slots.
    const uint32_t stretches = captured ? rows.most_pieces : rows.waves[wave].stretches;
    if (stretches == 0) return KV_OK;
    observe_parameters call;
    call.kept = kept_of(rows);
    call.sums_stride = memory.slots;
    call.array_stride = memory.heads * memory.slots;
    call.sums = memory.sums + rows.first_head * call.sums_stride;
    call.marks_stride = marks_of_head(memory);
    call.marks_array_stride = memory.heads * call.marks_stride;
    call.marks = memory.marks + rows.first_head * call.marks_stride;
    call.sequences = reinterpret_cast<const attend_sequence*>(rows.sequences);
    call.items = reinterpret_cast<const observe_item*>(rows.observe_items);
    call.wave = reinterpret_cast<const observe_wave*>(rows.observe_waves) + wave;
    call.kv_heads = rows.lane->kv_heads;
    call.group = rows.query_heads / call.kv_heads;
    call.blocks = observe_blocks(stretches, call.kv_heads);
    return functions.launch(functions.observe(), call.blocks, observe_threads, 0, stream, &call);
}

}  // namespace kvrt::cuda
