// Counters: gathered after every call that changes them, read from any thread.
#include <thread>

#include "api/handles.hpp"

namespace kvrt {

namespace {

template <std::size_t words, class struct_type>
void store_words(std::array<std::atomic<uint64_t>, words>& target, const struct_type& source) {
    std::array<uint64_t, words> copy;
    std::memcpy(copy.data(), &source, sizeof source);
    for (std::size_t i = 0; i < words; ++i) {
        target[i].store(copy[i], std::memory_order_relaxed);
    }
}

template <std::size_t words, class struct_type>
void load_words(const std::array<std::atomic<uint64_t>, words>& source, struct_type& target) {
    std::array<uint64_t, words> copy;
    for (std::size_t i = 0; i < words; ++i) copy[i] = source[i].load(std::memory_order_relaxed);
    std::memcpy(static_cast<void*>(&target), copy.data(), sizeof target);
}

kv_class_stats class_stats(const block_store& blocks, uint32_t class_index) {
    const class_counters& counters = blocks.counters(class_index);
    kv_class_stats stats = KV_INIT(kv_class_stats);
    stats.block_bytes = blocks.block_bytes(class_index);
    stats.blocks_per_slab = blocks.blocks_per_slab(class_index);
    stats.slabs = counters.slabs;
    stats.total = counters.total;
    stats.free = counters.free;
    stats.pinned = counters.pinned;
    stats.parked = counters.parked;
    return stats;
}

/// Of the whole process. Unsigned, so that differences of either sign add up.
struct live_totals {
    std::atomic<uint64_t> pools{0}, sequences{0}, steps{0};
};

live_totals& totals_of_process() {
    static live_totals totals;
    return totals;
}

void share_live(kv_pool& pool, live_share now) {
    live_totals& totals = totals_of_process();
    totals.sequences.fetch_add(uint64_t{now.sequences} - pool.live.sequences,
                               std::memory_order_relaxed);
    totals.steps.fetch_add(uint64_t{now.steps} - pool.live.steps, std::memory_order_relaxed);
    pool.live = now;
}

}  // namespace

void count_pool_created() { totals_of_process().pools.fetch_add(1, std::memory_order_relaxed); }

void count_pool_released(kv_pool& pool) {
    share_live(pool, {});
    totals_of_process().pools.fetch_sub(1, std::memory_order_relaxed);
}

// The order of a sequence lock without fences that ThreadSanitizer does not know: the writer makes
// the version odd before and even after, with release stores of its own words in between.
void published_stats::publish(const kv_pool_stats& pool, const kv_class_stats* classes,
                              uint32_t class_count) {
    const uint64_t version = version_.load(std::memory_order_relaxed);
    version_.exchange(version + 1, std::memory_order_acq_rel);
    store_words(pool_, pool);
    for (uint32_t c = 0; c < class_count; ++c) store_words(classes_[c], classes[c]);
    version_.store(version + 2, std::memory_order_release);
}

void published_stats::read(kv_pool_stats* pool, uint32_t class_index,
                           kv_class_stats* one_class) const {
    while (true) {
        const uint64_t before = version_.load(std::memory_order_acquire);
        if (before % 2 == 0) {
            if (pool != nullptr) load_words(pool_, *pool);
            if (one_class != nullptr) load_words(classes_[class_index], *one_class);
            // A read-modify-write of nothing: it orders the loads above before the comparison.
            if (const_cast<std::atomic<uint64_t>&>(version_).fetch_add(
                    0, std::memory_order_acq_rel) == before) {
                return;
            }
        }
        std::this_thread::yield();
    }
}

void publish_stats(kv_pool& pool) {
    const cache& store = pool.store;
    const block_store& blocks = store.blocks;
    const block_counters& totals = blocks.totals();
    kv_class_stats classes[max_block_classes];
    kv_pool_stats stats = KV_INIT(kv_pool_stats);
    for (uint32_t c = 0; c < blocks.class_count(); ++c) {
        classes[c] = class_stats(blocks, c);
        stats.total += classes[c].total;
        stats.free += classes[c].free;
        stats.pinned += classes[c].pinned;
        stats.parked += classes[c].parked;
    }
    stats.slab_bytes = slab_bytes;
    stats.slabs_total = blocks.slab_count();
    stats.slabs_free = blocks.free_slabs();
    stats.slabs_resident = blocks.resident_slabs();
    stats.arena_bytes = blocks.slab_count() * slab_bytes;
    stats.live_bytes = totals.pinned_bytes;
    stats.live_blocks = totals.pinned;
    stats.peak_live_blocks = totals.peak_pinned;
    stats.blocks_allocated = totals.allocated;
    stats.blocks_returned = totals.returned;
    stats.bytes_returned = totals.returned_bytes;
    stats.blocks_returned_by_compaction = pool.retention.returned.blocks;
    stats.bytes_returned_by_compaction = pool.retention.returned.bytes;
    stats.compactions = pool.retention.compactions;
    stats.compactions_skipped = pool.retention.compactions_skipped;
    stats.slabs_given_back = totals.slabs_given_back;
    stats.steps_ended = pool.steps_ended;
    stats.steps_cancelled = pool.steps_cancelled;
    stats.tokens_accepted = pool.tokens_accepted;
    stats.host_allocations = store.allocator.allocations;
    stats.sequences = store.sequences.alive();
    stats.open_steps =
        (store.fences.open[0] != 0 ? 1u : 0u) + (store.fences.open[1] != 0 ? 1u : 0u);
    stats.classes = blocks.class_count();
    stats.metadata_bytes = store.allocator.live_bytes;
    pool.stats.publish(stats, classes, blocks.class_count());
    share_live(pool, {stats.sequences, stats.open_steps});
}

}  // namespace kvrt

using namespace kvrt;

namespace {

/// Writers count meanwhile.
void copy_counts(uint64_t* counts, uint32_t count, uint64_t* out) {
    for (uint32_t i = 0; out != nullptr && i < count; ++i) {
        out[i] = std::atomic_ref<uint64_t>(counts[i]).load(std::memory_order_relaxed);
    }
}

}  // namespace

extern "C" {

kv_status kv_pool_get_stats(kv_pool* pool, kv_pool_stats* out_stats) {
    if (pool == nullptr) return fail(KV_INVALID, "pool is NULL");
    KVRT_TRY(check_struct(out_stats, sizeof *out_stats, 0, "out_stats (kv_pool_stats)"));
    kv_pool_stats stats;
    pool->stats.read(&stats, 0, nullptr);
    deliver(stats, out_stats);
    return KV_OK;
}

kv_status kv_pool_get_class_stats(kv_pool* pool, uint32_t class_index, kv_class_stats* out_stats) {
    if (pool == nullptr) return fail(KV_INVALID, "pool is NULL");
    KVRT_TRY(check_struct(out_stats, sizeof *out_stats, 0, "out_stats (kv_class_stats)"));
    if (class_index >= pool->store.blocks.class_count()) {
        return fail(KV_INVALID, "class_index is {}, the pool has {} classes", class_index,
                    pool->store.blocks.class_count());
    }
    kv_class_stats stats;
    pool->stats.read(nullptr, class_index, &stats);
    deliver(stats, out_stats);
    return KV_OK;
}

kv_status kv_pool_get_layer_stats(kv_pool* pool, kv_layer_stats* stats) {
    if (pool == nullptr) return fail(KV_INVALID, "pool is NULL");
    kv_layer_stats local;
    KVRT_TRY(adopt(stats, 0, "stats (kv_layer_stats)", local));
    if (local.layer >= pool->store.model.layers.size()) {
        return fail(KV_INVALID, "stats: layer {} of a model of {} layers", local.layer,
                    pool->store.model.layers.size());
    }
    const layer_geometry& layer = pool->store.model.layers[local.layer];
    const uint32_t lane = layer.first_lane;  // counters of a layer's heads lie side by side
    local.kv_heads = layer.kv_heads;
    const bool wanted = local.saturated_keys != nullptr || local.saturated_values != nullptr;
    status verdict = KV_OK;
    if (wanted && local.head_capacity < local.kv_heads) {
        verdict = fail(KV_LIMIT, "stats: head_capacity is {}, the layer has {} KV heads",
                       local.head_capacity, local.kv_heads);
    } else {
        const saturation_counts counts = saturation_of(pool->store, lane);
        copy_counts(counts.keys, local.kv_heads, local.saturated_keys);
        copy_counts(counts.values, local.kv_heads, local.saturated_values);
    }
    recoding recoded;
    for (uint32_t head = 0; head < local.kv_heads; ++head) {
        recoded.add(recoded_of(pool->store, lane)[head].load_shared());
    }
    local.recoded_rows = recoded.rows;
    local.recoding_error = recoded.relative_change();
    deliver(local, stats);
    return verdict;
}

uint64_t kv_live_count(uint32_t kind) {
    const live_totals& totals = totals_of_process();
    switch (kind) {
        case KV_LIVE_POOLS:
            return totals.pools.load(std::memory_order_relaxed);
        case KV_LIVE_SEQUENCES:
            return totals.sequences.load(std::memory_order_relaxed);
        case KV_LIVE_STEPS:
            return totals.steps.load(std::memory_order_relaxed);
        default:
            return 0;
    }
}

}  // extern "C"
