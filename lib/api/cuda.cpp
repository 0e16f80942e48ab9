// The calls of kv_cuda.h.
#include <exception>

#include "api/create.hpp"
#include "api/scores.hpp"
#include "kvrt/kv_cuda.h"

using namespace kvrt;

namespace {

status get_device(kv_cuda_device* device) {
    kv_cuda_device local;
    KVRT_TRY(adopt(device, 0, "device (kv_cuda_device)", local));
    const kvrt_plugin* plugin = nullptr;
    KVRT_TRY(load_cuda_plugin(plugin));
    kvrt_device_description found = {};
    KVRT_TRY(describe_device(*plugin, found));
    local.memory_bytes = found.memory_bytes;
    local.ordinal = found.ordinal;
    local.compute_major = found.compute_major;
    local.compute_minor = found.compute_minor;
    local.multiprocessors = found.multiprocessors;
    local.driver_version = found.driver_version;
    local.elastic = found.elastic;
    local.has_kernels = found.has_kernels;
    static_assert(sizeof local.name == sizeof found.name);
    static_assert(sizeof local.reason == sizeof found.reason);
    std::memcpy(local.name, found.name, sizeof local.name);
    std::memcpy(local.reason, found.reason, sizeof local.reason);
    deliver(local, device);
    return KV_OK;
}

status create_with_memory(const kv_pool_config* config, const kv_model* model,
                          const kv_cuda_memory* memory, kv_pool** out_pool) {
    device_allocator allocator;
    if (memory != nullptr) {
        kv_cuda_memory local;
        KVRT_TRY(adopt(memory, 0, "memory (kv_cuda_memory)", local));
        if (local.allocate == nullptr || local.release == nullptr) {
            return fail(KV_INVALID, "memory (kv_cuda_memory): allocate and release come together");
        }
        allocator = {local.user, local.allocate, local.release};
    }
    return create_pool(config, model, allocator, out_pool);
}

}  // namespace

extern "C" {

kv_status kv_cuda_get_device(kv_cuda_device* device) {
    try {
        return get_device(device);
    } catch (const std::exception& error) {
        return fail(KV_INTERNAL, "{}", error.what());
    }
}

kv_status kv_cuda_pool_create(const kv_pool_config* config, const kv_model* model,
                              const kv_cuda_memory* memory, kv_pool** out_pool) {
    if (out_pool == nullptr) return fail(KV_INVALID, "out_pool is NULL");
    *out_pool = nullptr;
    try {
        return create_with_memory(config, model, memory, out_pool);
    } catch (const std::exception& error) {
        return fail(KV_INTERNAL, "{}", error.what());
    }
}

kv_status kv_cuda_step_use_stream(kv_step* step, struct CUstream_st* stream) {
    return call_step(step, [&] { return step_use_stream(step->core, stream); });
}

kv_status kv_cuda_step_tables(kv_step* step, uint32_t layer, kv_cuda_tables* tables) {
    return call_step(step, [&]() -> status {
        kv_cuda_tables local;
        KVRT_TRY(adopt(tables, KV_CUDA_TABLES_ATTENDED, "tables (kv_cuda_tables)", local));
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

kv_status kv_cuda_seq_set_scores(kv_pool* pool, kv_seq seq, uint32_t layer, uint64_t first_position,
                                 uint64_t tokens, const float* scores, struct CUstream_st* stream) {
    return call_pool(pool, [&]() -> status {
        if (!pool->store.on_device()) return fail(KV_INVALID, "the pool is on the CPU");
        if (stream == nullptr) {
            return fail(KV_INVALID, "stream is NULL: the default stream is not used, create one");
        }
        return with_sequence(*pool, seq, [&](sequence& target) {
            return set_scores(*pool, target, {layer, first_position, tokens, scores, true, stream});
        });
    });
}

kv_status kv_cuda_pool_set_scoring(kv_pool* pool, const kv_cuda_scoring* scoring) {
    return call_pool(pool, [&]() -> status {
        kv_cuda_scoring local;
        KVRT_TRY(adopt(scoring, KV_CUDA_SCORING_TF32, "scoring (kv_cuda_scoring)", local));
        if (local.method > KV_CUDA_SCORE_MEASURED) {
            return fail(KV_INVALID,
                        "scoring (kv_cuda_scoring): method {} is none of"
                        " KV_CUDA_SCORE_*",
                        local.method);
        }
        cache& store = pool->store;
        if (!store.on_device()) return fail(KV_INVALID, "the pool is on the CPU");
        return store.device.set_scoring({local.method, local.flags, local.workspace_bytes});
    });
}

kv_status kv_cuda_pool_get_scoring(kv_pool* pool, kv_cuda_scoring_report* report) {
    return call_pool(pool, [&]() -> status {
        kv_cuda_scoring_report local;
        KVRT_TRY(adopt(report, 0, "report (kv_cuda_scoring_report)", local));
        const cache& store = pool->store;
        if (!store.on_device()) return fail(KV_INVALID, "the pool is on the CPU");
        kvrt_scoring_report found = {};
        store.device.report_scoring(found);
        local.scoring_flags = found.flags;
        local.method = found.method;
        local.library_version = found.library_version;
        local.workspace_bytes = found.workspace_bytes;
        local.kernel_cohorts = found.kernel_cohorts;
        local.product_cohorts = found.product_cohorts;
        local.shape_hits = found.shape_hits;
        local.shape_misses = found.shape_misses;
        local.kernel_kinds = found.kernel_kinds;
        local.product_kinds = found.product_kinds;
        local.open_kinds = found.open_kinds;
        static_assert(sizeof local.reason == sizeof found.reason);
        std::memcpy(local.reason, found.reason, sizeof local.reason);
        deliver(local, report);
        return KV_OK;
    });
}

}  // extern "C"
