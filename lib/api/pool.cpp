// Pools: creation, release, fences, the check.
#include <algorithm>
#include <chrono>
#include <new>
#include <string>

#include "api/create.hpp"

namespace kvrt {

namespace {

constexpr uint32_t max_sequence_limit = 65536;
constexpr uint32_t max_token_limit = 1u << 26;
constexpr uint32_t max_thread_limit = 256;

status check_range(const char* name, uint64_t value, uint64_t low, uint64_t high) {
    if (value >= low && value <= high) return KV_OK;
    return fail(KV_INVALID, "config: {} is {}: {} to {}", name, value, low, high);
}

}  // namespace

status resolve_config(const kv_pool_config* config, kv_pool_config& resolved, kv_hooks& hooks) {
    constexpr uint32_t known_flags =
        KV_POOL_ELASTIC | KV_POOL_THREAD_SAFE | KV_POOL_DEBUG | KV_POOL_HOST_FENCES;
    KVRT_TRY(adopt(config, known_flags, "config (kv_pool_config)", resolved));
    const auto use_default = [](uint32_t& field, uint32_t value) {
        if (field == 0) field = value;
    };
    use_default(resolved.device, KV_DEVICE_CPU);
    use_default(resolved.block_tokens, 16);
    use_default(resolved.max_sequences, 64);
    use_default(resolved.max_tokens_per_sequence, 32768);
    use_default(resolved.max_step_sequences, resolved.max_sequences);
    use_default(resolved.max_step_tokens, 8192);
    if (resolved.device != KV_DEVICE_CPU && resolved.device != KV_DEVICE_CUDA) {
        return fail(KV_UNSUPPORTED, "config: device {} is not one of KV_DEVICE_*", resolved.device);
    }
    if (resolved.layout > KV_LAYOUT_NHD) {
        return fail(KV_UNSUPPORTED, "config: layout {} is not one of KV_LAYOUT_*", resolved.layout);
    }
    if (resolved.block_tokens != 16 && resolved.block_tokens != 32 && resolved.block_tokens != 64 &&
        resolved.block_tokens != 128) {
        return fail(KV_INVALID, "config: block_tokens is {}: 16, 32, 64 or 128",
                    resolved.block_tokens);
    }
    KVRT_TRY(check_range("max_sequences", resolved.max_sequences, 1, max_sequence_limit));
    KVRT_TRY(check_range("max_tokens_per_sequence", resolved.max_tokens_per_sequence, 1,
                         max_token_limit));
    KVRT_TRY(
        check_range("max_step_sequences", resolved.max_step_sequences, 1, resolved.max_sequences));
    KVRT_TRY(check_range("max_step_tokens", resolved.max_step_tokens, 1, max_token_limit));
    KVRT_TRY(check_range("max_observed_sequences", resolved.max_observed_sequences, 0,
                         resolved.max_sequences));
    KVRT_TRY(check_range("pressure_percent", resolved.pressure_percent, 0, 100));
    KVRT_TRY(check_range("threads", resolved.threads, 0, max_thread_limit));
    hooks = KV_INIT(kv_hooks);
    if (resolved.hooks == nullptr) return KV_OK;
    KVRT_TRY(adopt(resolved.hooks, 0, "config.hooks (kv_hooks)", hooks));
    if ((hooks.allocate == nullptr) != (hooks.release == nullptr)) {
        return fail(KV_INVALID, "config.hooks: allocate and release come together");
    }
    return KV_OK;
}

status check_arena(uint64_t arena_bytes) {
    if (arena_bytes < slab_bytes) {
        return fail(KV_INVALID, "config: arena_bytes is {}: at least one slab of {}", arena_bytes,
                    slab_bytes);
    }
    if (arena_bytes > max_arena_bytes) {
        return fail(KV_TOO_LARGE, "config: arena_bytes is {}: at most {}", arena_bytes,
                    max_arena_bytes);
    }
    return KV_OK;
}

/// Layers that were to demote, and never would.
status check_demotion(const cache& store) {
    if (store.limits.pressure_bytes != 0) return KV_OK;
    for (const lane_geometry& lane : store.model.lanes) {
        if (!lane.demotes || lane.demote_after != never_demoted) continue;
        return fail(KV_INVALID,
                    "layer {}: demote_after 0 is demotion under pressure alone, and this pool "
                    "never has any: set config.pressure_percent, or demote_after",
                    lane.layer);
    }
    return KV_OK;
}

status create_stores(const kv_pool_config& resolved, const kv_model* model, kv_pool& pool) {
    cache& store = pool.store;
    host_allocator& allocator = store.allocator;
    pool.flags = resolved.flags;
    store.fences.by_host = (resolved.flags & KV_POOL_HOST_FENCES) != 0;
    store.limits = {
        resolved.max_sequences,
        resolved.max_tokens_per_sequence,
        resolved.max_step_sequences,
        resolved.max_step_tokens,
        resolved.max_observed_sequences,
        resolved.arena_bytes / slab_bytes * slab_bytes / 100 * resolved.pressure_percent};
    KVRT_TRY(describe_model(model, resolved.block_tokens, static_cast<tile_order>(resolved.layout),
                            allocator, store.model));
    KVRT_TRY(check_demotion(store));
    store.any_seals = std::any_of(store.model.lanes.begin(), store.model.lanes.end(),
                                  [](const lane_geometry& lane) { return lane.seals; });
    if (store.any_seals && store.on_device() && store.device.kernels() < 0) {
        const std::string reason = message_buffer();
        return fail(KV_UNSUPPORTED,
                    "model: a layer has blocks that are sealed (KIVI, KVARN, demotion): {}",
                    reason);
    }
    if (store.on_device() && resolved.max_observed_sequences != 0 && store.device.kernels() < 0) {
        const std::string reason = message_buffer();
        return fail(KV_UNSUPPORTED, "config: max_observed_sequences: {}", reason);
    }
    store.any_window = std::any_of(store.model.lanes.begin(), store.model.lanes.end(),
                                   [](const lane_geometry& lane) { return lane.window != 0; });
    block_store::options options;
    options.slabs = resolved.arena_bytes / slab_bytes;
    options.elastic = (resolved.flags & KV_POOL_ELASTIC) != 0;
    options.debug = (resolved.flags & KV_POOL_DEBUG) != 0;
    if (store.on_device()) options.inspected = &store.device;
    device_memory& memory = store.on_device() ? static_cast<device_memory&>(store.device)
                                              : static_cast<device_memory&>(store.memory);
    KVRT_TRY(store.blocks.create(allocator, memory, options, store.model.classes.data(),
                                 store.model.class_count));
    KVRT_TRY(store.sequences.create(allocator, resolved.max_sequences,
                                    static_cast<uint32_t>(store.model.lanes.size()),
                                    store.model.blocks_for(resolved.max_tokens_per_sequence)));
    KVRT_TRY(store.saturated.allocate(allocator, store.model.counters, "saturation counters"));
    KVRT_TRY(store.recoded.allocate(allocator, store.model.counters / 2, "counters of tiles"));
    KVRT_TRY(create_retention(store, pool.retention));
    return create_step_context(store, pool.retention, pool.steps);
}

namespace {

status open_device(const kv_pool_config& resolved, const device_allocator& memory, cache& store) {
    if (resolved.device == KV_DEVICE_CPU) {
        if (memory.allocate == nullptr) return KV_OK;
        return fail(KV_INVALID,
                    "memory (kv_cuda_memory): the config's device is not "
                    "KV_DEVICE_CUDA");
    }
    const bool elastic = (resolved.flags & KV_POOL_ELASTIC) != 0;
    if (elastic && memory.allocate != nullptr) {
        return fail(KV_UNSUPPORTED,
                    "memory (kv_cuda_memory): KV_POOL_ELASTIC gives memory back in parts, and what "
                    "was allocated has none: leave one of the two out");
    }
    const kvrt_plugin* plugin = nullptr;
    KVRT_TRY(load_cuda_plugin(plugin));
    KVRT_TRY(store.device.open(*plugin, store.allocator, elastic, memory));
    store.fences.device = &store.device;
    return KV_OK;
}

}  // namespace

uint64_t now(const kv_pool& pool) {
    if (pool.hooks.now != nullptr) return pool.hooks.now(pool.hooks.user);
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                     std::chrono::steady_clock::now().time_since_epoch())
                                     .count());
}

void log_line(const kv_pool& pool, int32_t level, const char* text) {
    if (pool.hooks.log != nullptr) {
        pool.hooks.log(pool.hooks.user, level, text, std::strlen(text));
    }
}

namespace {

/// The pool itself lives in the host's memory too.
void destroy(kv_pool* pool) {
    host_allocator allocator = pool->store.allocator;
    pool->~kv_pool();
    release(allocator, pool, sizeof(kv_pool), alignof(kv_pool));
}

}  // namespace

status create_pool(const kv_pool_config* config, const kv_model* model,
                   const device_allocator& device, kv_pool** out_pool) {
    kv_pool_config resolved;
    kv_hooks hooks;
    KVRT_TRY(resolve_config(config, resolved, hooks));
    KVRT_TRY(check_arena(resolved.arena_bytes));
    host_allocator allocator;
    allocator.user = hooks.user;
    allocator.allocate = hooks.allocate;
    allocator.release = hooks.release;
    void* memory = allocate(allocator, sizeof(kv_pool), alignof(kv_pool), memory_contents::zeroed);
    if (memory == nullptr) {
        return fail(KV_NO_MEMORY, "the allocator refused {} bytes for the pool", sizeof(kv_pool));
    }
    kv_pool* pool = new (memory) kv_pool;
    pool->store.allocator = allocator;
    pool->hooks = hooks;
    status verdict = pool->store.threads.start(pool->store.allocator, resolved.threads, &hooks);
    if (verdict == KV_OK) verdict = open_device(resolved, device, pool->store);
    if (verdict == KV_OK) verdict = create_stores(resolved, model, *pool);
    if (verdict < 0) {
        destroy(pool);
        return verdict;
    }
    for (kv_step& handle : pool->handles) handle.pool = pool;
    count_pool_created();
    publish_stats(*pool);
    *out_pool = pool;
    return KV_OK;
}

namespace {

status pass_fence(kv_pool& pool, uint64_t fence) {
    fence_clock& fences = pool.store.fences;
    if (!fences.by_host) {
        return fail(KV_INVALID, "the pool has no KV_POOL_HOST_FENCES: fences pass at step end");
    }
    if (fence == 0 || fence > fences.last_begun) {
        return fail(KV_INVALID, "fence is {}, the last step begun is {}", fence, fences.last_begun);
    }
    for (const uint64_t open : fences.open) {
        if (open != 0 && open <= fence) {
            return fail(KV_INVALID, "fence {}: step {} is still open", fence, open);
        }
    }
    fences.host_passed = std::max(fences.host_passed, fence);
    pool.store.blocks.collect(fences);
    publish_stats(pool);
    return KV_OK;
}

/// References that open steps hold besides the tables: shared tails they have copied.
status check(kv_pool& pool) {
    held_block held[1];
    uint64_t count = 0;
    host_allocator own;
    host_array<held_block> list;
    const uint64_t lanes = pool.store.model.lanes.size();
    KVRT_TRY(list.allocate(own, max_open_steps * pool.store.limits.max_step_sequences * lanes,
                           "reference check"));
    for (const kv_step& handle : pool.handles) {
        const step& open = handle.core;
        if (open.state != step_state::reserved) continue;
        for (uint64_t i = 0; i < open.item_count * lanes; ++i) {
            const lane_undo& undo = open.arrays->undo[i];
            if (!open.arrays->items[i / lanes].grew || undo.replaced == no_block) continue;
            list[count++] = {pool.store.blocks.class_of(undo.replaced), undo.replaced};
        }
    }
    return check_cache(pool.store, count != 0 ? list.data() : held, count);
}

}  // namespace

}  // namespace kvrt

using namespace kvrt;

extern "C" {

kv_status kv_pool_create(const kv_pool_config* config, const kv_model* model, kv_pool** out_pool) {
    if (out_pool == nullptr) return fail(KV_INVALID, "out_pool is NULL");
    *out_pool = nullptr;
    try {
        return create_pool(config, model, {}, out_pool);
    } catch (const std::exception& error) {
        return fail(KV_INTERNAL, "{}", error.what());
    }
}

void kv_pool_release(kv_pool* pool) {
    if (pool == nullptr) return;
    count_pool_released(*pool);
    destroy(pool);
}

kv_status kv_pool_pass_fence(kv_pool* pool, uint64_t fence) {
    return call_pool(pool, [&] { return pass_fence(*pool, fence); });
}

kv_status kv_pool_check(kv_pool* pool) {
    return call_pool(pool, [&] {
        const status verdict = check(*pool);
        if (verdict < 0) log_line(*pool, KV_LOG_ERROR, message_buffer());
        return verdict;
    });
}

}  // extern "C"
