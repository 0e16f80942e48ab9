#include "driver/gather.hpp"

#include <cstddef>

namespace kvrt::cuda {

using namespace kernels;

// The seam's list is the kernel's.
static_assert(sizeof(kvrt_gather_item) == sizeof(gathered_item));
static_assert(offsetof(kvrt_gather_item, counted) == offsetof(gathered_item, counted));
static_assert(KVRT_GATHER_BEGINS == begins_anew);

query_memory query_memory_of(const kvrt_query_memory& memory) {
    return {memory.totals, memory.pending, static_cast<query_count*>(memory.counts), memory.length,
            memory.heads};
}

status query_gatherer::create(device_context& device, kernel_functions& functions, uint64_t places,
                              kvrt_query_memory& memory) {
    KVRT_TRY(functions.state());
    const current_context here(device);
    KVRT_TRY(here.state());
    KVRT_TRY(functions.find(gather_));
    const uint64_t sums = places * query_sums * memory.length;
    const uint64_t counts = places * memory.heads * sizeof(query_count);
    KVRT_TRY(memory_.allocate(device, sums * (sizeof(double) + sizeof(float)) + counts));
    memory.totals = reinterpret_cast<double*>(memory_.address());
    memory.counts = memory.totals + sums;
    memory.pending = reinterpret_cast<float*>(memory_.address() + sums * sizeof(double) + counts);
    return KV_OK;
}

status query_gatherer::run(kernel_functions& functions, stream_handle stream,
                           const kvrt_gather_queries& gathered) {
    query_parameters call;
    call.memory = query_memory_of(gathered.memory);
    call.first_band = gathered.first_band;
    call.first_head = gathered.first_head;
    const kvrt_device_tensor& queries = gathered.queries;
    call.queries = {static_cast<std::byte*>(queries.data), queries.row_stride, queries.head_stride,
                    queries.dim_stride};
    call.type = static_cast<number>(queries.type);
    call.heads = gathered.heads;
    call.bands = gathered.bands;
    call.rotated = gathered.rotated;
    call.interleaved = gathered.interleaved != 0;
    call.inverse_factor = static_cast<float>(1.0 / gathered.attention_factor);
    for (uint32_t i = 0; i < call.rotated; ++i) {
        call.turns[i] = gathered.inverse_frequencies[i] * 0.15915494309189535;  // 1 / (2 pi)
    }
    call.items = reinterpret_cast<const gathered_item*>(gathered.items);
    call.step = gathered.step;
    call.query_start = gathered.query_start;
    call.positions = gathered.positions;
    return functions.launch(gather_, gathered.count * call.heads, gather_threads,
                            gather_shared_bytes, stream, &call);
}

}  // namespace kvrt::cuda
