#include "driver/gather.hpp"

#include <algorithm>

namespace kvrt::cuda {

using namespace kernels;

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
                           kvrt_gather_queries& gathered) {
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
    for (uint32_t first = 0; first < gathered.count; first += most_gathered) {
        call.count = std::min(most_gathered, gathered.count - first);
        for (uint32_t i = 0; i < call.count; ++i) {
            const kvrt_gather_item& from = gathered.items[first + i];
            call.items[i] = {from.position, from.place, from.first_row, from.rows, from.begins,
                             from.counts,   0};
        }
        KVRT_TRY(functions.launch(gather_, call.count * call.heads, gather_threads,
                                  gather_shared_bytes, stream, &call));
        gathered.done = first + call.count;
    }
    return KV_OK;
}

}  // namespace kvrt::cuda
