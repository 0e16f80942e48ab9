// Refused memory: of the host's allocator at pool creation, for every single allocation, and of the
// device behind a slab in the middle of a reserve.
#include <doctest/doctest.h>

#include <cstdlib>
#include <map>

#include "checked.hpp"
#include "geometry.hpp"
#include "step/step.hpp"

namespace {

using namespace property;

/// Refuses the allocation with number `refused`; knows all that are alive.
struct counting_allocator {
    uint64_t refused = 0;
    uint64_t calls = 0;
    std::map<void*, std::pair<std::size_t, std::size_t>> alive;
    bool wrong_release = false;

    kv_hooks hooks() {
        kv_hooks made = KV_INIT(kv_hooks);
        made.user = this;
        made.allocate = [](void* user, std::size_t bytes, std::size_t alignment) -> void* {
            auto& self = *static_cast<counting_allocator*>(user);
            if (++self.calls == self.refused) return nullptr;
            const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
            void* memory = std::aligned_alloc(alignment, rounded);
            // Not zero: the library must not count on fresh memory.
            if (rounded < 1u << 20) std::memset(memory, 0x5a, rounded);
            self.alive[memory] = {bytes, alignment};
            return memory;
        };
        made.release = [](void* user, void* memory, std::size_t bytes, std::size_t alignment) {
            auto& self = *static_cast<counting_allocator*>(user);
            const auto found = self.alive.find(memory);
            if (found == self.alive.end() || found->second != std::pair(bytes, alignment)) {
                self.wrong_release = true;
                return;
            }
            self.alive.erase(found);
            std::free(memory);
        };
        return made;
    }
};

kv_pool_config config_of(const pool_spec& spec, const kv_hooks& hooks) {
    kv_pool_config config = KV_INIT(kv_pool_config);
    config.flags = spec.flags;
    config.arena_bytes = uint64_t{spec.slabs} << 21;
    config.layout = spec.layout;
    config.block_tokens = spec.block_tokens;
    config.max_sequences = 3;
    config.max_tokens_per_sequence = 64;
    config.max_step_sequences = 2;
    config.max_step_tokens = 64;
    config.threads = 2;
    config.hooks = &hooks;
    return config;
}

}  // namespace

TEST_CASE("a pool whose n-th allocation is refused is not created, for every n") {
    layer_spec plain;
    plain.query_heads = 2;
    plain.kv_heads = 2;
    plain.sink_logits = {0.5f, 1.0f};
    plain.alibi_slopes = {0.5f, 0.25f};
    const kv_rope rope = [] {
        kv_rope made = KV_INIT(kv_rope);
        made.style = KV_ROPE_HALF;
        return made;
    }();
    std::vector<kv_layer> layers(3, KV_INIT(kv_layer));
    for (kv_layer& layer : layers) {
        layer.query_heads = layer.kv_heads = 2;
        layer.key_dim = 32;
        layer.rope = &rope;
        layer.sink_logits = plain.sink_logits.data();
        layer.alibi_slopes = plain.alibi_slopes.data();
    }
    layers[1].key_dim = 64;
    layers[2].window = 20;
    kv_model model = KV_INIT(kv_model);
    model.layers = layers.data();
    model.layer_count = 3;
    constexpr uint32_t all_flags = KV_POOL_DEBUG | KV_POOL_ELASTIC | KV_POOL_THREAD_SAFE;
    for (const uint32_t flags : {0u, all_flags}) {
        pool_spec spec;
        spec.flags = flags;
        uint64_t refusals = 0;
        bool created = false;
        for (uint64_t n = 1; !created && n < 1000; ++n) {
            counting_allocator allocator;
            allocator.refused = n;
            const kv_hooks hooks = allocator.hooks();
            const kv_pool_config config = config_of(spec, hooks);
            kv_pool* pool = reinterpret_cast<kv_pool*>(&allocator);
            const kv_status found = kv_pool_create(&config, &model, &pool);
            CAPTURE(n);
            if (found == KV_OK) {
                created = true;
                CHECK(allocator.calls < n);
                kv_pool_release(pool);
            } else {
                ++refusals;
                CHECK(found == KV_NO_MEMORY);
                CHECK(pool == nullptr);
                CHECK(!last_error().empty());
            }
            CHECK(allocator.alive.empty());
            CHECK_FALSE(allocator.wrong_release);
        }
        CHECK(created);
        CHECK(refusals > 20);
    }
}

namespace {

/// A device that runs out of memory after `commits` slabs.
class small_device final : public kvrt::device_memory {
  public:
    explicit small_device(uint64_t commits) : commits_left(commits) {}
    kvrt::status reserve(uint64_t bytes, uint64_t alignment, std::byte** out_base) override {
        return memory_.reserve(bytes, alignment, out_base);
    }
    kvrt::status commit(uint64_t, uint64_t) override {
        if (commits_left == 0) return kvrt::fail(KV_DEVICE, "no memory behind a slab");
        --commits_left;
        return KV_OK;
    }
    void give_back(uint64_t, uint64_t) override { ++commits_left; }

    uint64_t commits_left;

  private:
    kvrt::cpu_memory memory_;
};

/// The core without its interface, over that device. Two layers; a slab holds 64 of their blocks.
struct core {
    small_device device;
    kvrt::cache store;
    kvrt::retention_context retention;
    kvrt::step_context steps;

    explicit core(uint64_t commits) : device(commits) {
        std::vector<kv_layer> layers(2, KV_INIT(kv_layer));
        for (kv_layer& layer : layers) {
            layer.query_heads = layer.kv_heads = 8;
            layer.key_dim = 32;
            layer.key_format = KV_FORMAT_F32;
        }
        kv_model model = KV_INIT(kv_model);
        model.layers = layers.data();
        model.layer_count = 2;
        store.limits = {4, 2048, 4, 2048};
        require_ok(store.threads.start(store.allocator, 1, nullptr), "executor");
        require_ok(kvrt::describe_model(&model, 16, kvrt::tile_order::native, store.allocator,
                                        store.model),
                   "describe_model");
        kvrt::block_store::options options;
        options.slabs = 3;
        options.elastic = true;
        require_ok(store.blocks.create(store.allocator, device, options, store.model.classes.data(),
                                       store.model.class_count),
                   "block_store");
        require_ok(store.sequences.create(store.allocator, 4, 2, store.model.blocks_for(2048)),
                   "sequence_table");
        require_ok(kvrt::create_retention(store, retention), "create_retention");
        require_ok(kvrt::create_step_context(store, retention, steps), "create_step_context");
    }

    void append(kvrt::step& step, kvrt::sequence& owner, uint32_t rows) {
        require_ok(kvrt::step_append(step, owner, store.sequences.handle(owner), rows, nullptr),
                   "step_append");
    }
    kv_status reserve(kvrt::step& step) {
        kv_reserve_report report = KV_INIT(kv_reserve_report);
        return kvrt::step_reserve(step, report);
    }
    void grow(kvrt::sequence& owner, uint32_t rows) {
        kvrt::step step;
        require_ok(kvrt::step_begin(steps, step), "step_begin");
        append(step, owner, rows);
        require_ok(reserve(step), "step_reserve");
        for (uint8_t& written : step.arrays->lane_written) written = 1;
        kv_step_report report = KV_INIT(kv_step_report);
        require_ok(kvrt::step_end(step, report), "step_end");
    }
};

}  // namespace

TEST_CASE("a device that refuses memory in the middle of a reserve leaves everything as it was") {
    check_no_mismatch([&] {
        // One slab can be had. The step needs a copied tail, blocks of it, and then a second slab.
        core small(1);
        kvrt::sequence* parent = small.store.sequences.open();
        small.grow(*parent, 40);
        kvrt::sequence* child = kvrt::fork_sequence(small.store, *parent);
        require_ok(kvrt::check_cache(small.store, nullptr, 0), "check_cache");
        const kvrt::block_counters before = small.store.blocks.totals();
        const kvrt::class_counters class_before = small.store.blocks.counters(0);
        const kvrt::block_id tail = child->lanes[0].table[child->lanes[0].blocks - 1];

        for (uint32_t tries = 0; tries < 3; ++tries) {
            kvrt::step step;
            require_ok(kvrt::step_begin(small.steps, step), "step_begin");
            small.append(step, *child, 5);
            small.append(step, *parent, 900);
            CHECK(small.reserve(step) == KV_DEVICE);
            CHECK(child->lanes[0].table[child->lanes[0].blocks - 1] == tail);
            CHECK(child->lanes[0].blocks == 3);
            CHECK(parent->lanes[1].blocks == 3);
            CHECK(child->reserved_rows == 0);
            const kvrt::block_counters after = small.store.blocks.totals();
            CHECK(after.allocated == before.allocated);
            CHECK(after.returned == before.returned);
            CHECK(after.pinned == before.pinned);
            CHECK(after.pinned_bytes == before.pinned_bytes);
            const kvrt::class_counters class_after = small.store.blocks.counters(0);
            CHECK(class_after.total == class_before.total);
            CHECK(class_after.free == class_before.free);
            CHECK(class_after.parked == 0);
            require_ok(kvrt::check_cache(small.store, nullptr, 0), "check_cache");
            // The step is still open: without the large item it fits.
            require_ok(kvrt::step_remove(step, *parent), "step_remove");
            CHECK(small.reserve(step) == KV_OK);
            kvrt::step_cancel(step);
            require_ok(kvrt::check_cache(small.store, nullptr, 0), "check_cache");
            CHECK(small.store.blocks.totals().allocated == before.allocated);
        }
        // With the memory there, the same step succeeds.
        small.device.commits_left = 2;
        small.grow(*parent, 900);
        require_ok(kvrt::check_cache(small.store, nullptr, 0), "check_cache");
        CHECK(parent->next_position == 940);
        kvrt::release_sequence(small.store, *parent);
        kvrt::release_sequence(small.store, *child);
        CHECK(small.store.blocks.totals().pinned == 0);
        CHECK(small.store.blocks.free_slabs() == 3);
    });
}
