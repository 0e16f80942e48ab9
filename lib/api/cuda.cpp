// The calls of kv_cuda.h.
#include "api/handles.hpp"
#include "kvrt/kv_cuda.h"

using namespace kvrt;

extern "C" {

kv_status kv_cuda_step_use_stream(kv_step* step, struct CUstream_st* stream) {
    return call_step(step, [&] { return step_use_stream(step->core, stream); });
}

kv_status kv_cuda_step_tables(kv_step* step, uint32_t layer, kv_cuda_tables* tables) {
    return call_step(step, [&]() -> status {
        kv_cuda_tables local;
        KVRT_TRY(adopt(tables, 0, "tables (kv_cuda_tables)", local));
        KVRT_TRY(step_device_tables(step->core, layer, local));
        deliver(local, tables);
        return KV_OK;
    });
}

kv_status kv_cuda_pool_memory(kv_pool* pool, uint64_t* out_bytes) {
    return call_pool(pool, [&]() -> status {
        if (out_bytes == nullptr) return fail(KV_INVALID, "out_bytes is NULL");
        const cache& store = pool->store;
        if (!store.on_device()) return fail(KV_INVALID, "the pool is on the CPU");
        *out_bytes = store.device.mapped_bytes();
        return KV_OK;
    });
}

}  // extern "C"
