// Nothing is allocated between kv_step_begin and kv_step_end in steady state: counted at the C
// library's allocator and the system's memory calls, by the pool's own counter, and by the host's
// allocator hook.
#include <cstdlib>
#include <memory>

#include "abi/allocations.hpp"
#include "abi/world.hpp"

using namespace abi;

namespace {

TEST_CASE("the counter counts") {
    if (!counts_memory_calls()) return;
    const memory_calls before = memory_calls_so_far();
    void* volatile memory = std::malloc(100);
    CHECK(memory_calls_so_far().heap == before.heap + 1);
    std::free(memory);
    ::operator delete(::operator new(100));
    CHECK(memory_calls_so_far().heap == before.heap + 2);
    // A library's calls are seen too: creating a pool maps its arena.
    { const live_pool pool; }
    CHECK(memory_calls_so_far().system > before.system);
}

/// A mixed step: decodes, a draft that is half taken back, and a chunk of a prompt.
struct batch {
    kv_seq decoding[2], drafting, prefilling;
    tensors t{1 + 1 + 4 + 20};
    kv_tables tables = KV_INIT(kv_tables);
    int32_t indices[512], indptr[8];
    kv_status statuses[4];

    batch() {
        tables.indices = indices;
        tables.indptr = indptr;
        tables.indices_capacity = 512;
        tables.item_capacity = 7;
    }

    void run(const live_pool& pool) {
        kv_step* step = nullptr;
        kv_append_info info = KV_INIT(kv_append_info);
        kv_reserve_report reserved = KV_INIT(kv_reserve_report);
        reserved.item_statuses = statuses;
        reserved.item_status_capacity = 4;
        kv_step_report report = KV_INIT(kv_step_report);
        bool good = kv_step_begin(pool, &step) == KV_OK;
        for (const kv_seq seq : decoding) {
            good = good && kv_seq_append(step, seq, nullptr, 1, &info) == KV_OK;
        }
        good = good && kv_seq_append(step, drafting, nullptr, 4, &info) == KV_OK;
        good = good && kv_seq_append(step, prefilling, nullptr, 20, &info) == KV_OK;
        good = good && kv_step_reserve(step, &reserved) == KV_OK;
        good = good && kv_step_export(step, 0, &tables) == KV_OK;
        for (uint32_t layer = 0; layer < 3; ++layer) {
            if (layer != 2) good = good && kv_write(step, layer, &t.keys, &t.values) == KV_OK;
            good = good && kv_attend(step, layer, &t.queries, &t.out, nullptr) == KV_OK;
        }
        good = good && kv_step_accept(step, drafting, 2) == KV_OK;
        good = good && kv_step_end(step, &report) == KV_OK;
        if (!good) std::abort();  // a message would allocate
    }
};

/// What a scheduler asks of policies between steps. False if a call failed.
bool ask_about_policies(kv_pool* pool, kv_seq seq, const kv_policy& policy) {
    kv_policy_footprint footprint = KV_INIT(kv_policy_footprint);
    kv_retention_info info = KV_INIT(kv_retention_info);
    float scores[64];
    uint64_t count = 0;
    return kv_pool_policy_footprint(pool, &policy, &footprint) == KV_OK &&
           kv_seq_get_retention(pool, seq, &info) == KV_OK &&
           kv_seq_get_scores(pool, seq, 0, 1, 64, scores, &count) == KV_OK;
}

/// Steps with block boundaries, policies, drafts and window blocks, and refused calls between.
void run_steady_state(uint32_t flags, uint32_t threads, const kv_hooks* hooks) {
    kv_pool_config config = small_config(flags);
    config.arena_bytes = uint64_t{64} << 20;
    config.max_tokens_per_sequence = 4096;
    config.threads = threads;
    config.hooks = hooks;
    config.max_observed_sequences = 1;
    config.pressure_percent = 1;
    const live_pool pool(config);
    kv_policy policy = KV_INIT(kv_policy);
    policy.scorer = KV_SCORER_TRIATTENTION;
    policy.budget = 48;
    policy.every = 16;
    const auto b = std::make_unique<batch>();
    b->decoding[0] = pool.create_sequence(&policy);
    kv_policy observing = policy;
    observing.scorer = KV_SCORER_SNAPKV;
    observing.every = 0;
    observing.slack = 16;
    b->decoding[1] = pool.create_sequence(&observing);
    b->drafting = pool.create_sequence();
    b->prefilling = pool.create_sequence(&policy);
    for (int i = 0; i < 40; ++i) b->run(pool);

    const kv_pool_stats stats = pool.stats();
    const memory_calls before = memory_calls_so_far();
    for (int i = 0; i < 100; ++i) {
        b->run(pool);
        kv_step* step = nullptr;
        if (kv_step_begin(pool, &step) != KV_OK) std::abort();
        if (kv_seq_append(step, 0, nullptr, 1, nullptr) != KV_INVALID) std::abort();
        if (kv_step_cancel(step) != KV_OK) std::abort();
        if (!ask_about_policies(pool, b->decoding[1], observing)) std::abort();
    }
    const memory_calls after = memory_calls_so_far();
    CHECK(after.heap == before.heap);
    CHECK(after.system == before.system);
    const kv_pool_stats now = pool.stats();
    CHECK(now.host_allocations == stats.host_allocations);
    CHECK(now.metadata_bytes == stats.metadata_bytes);
    CHECK(now.steps_ended == stats.steps_ended + 100);
    CHECK(now.compactions > stats.compactions);
    CHECK(kv_pool_check(pool) == KV_OK);
}

TEST_CASE("no allocation in steady state, one thread") { run_steady_state(0, 1, nullptr); }
TEST_CASE("no allocation in steady state, four threads") {
    run_steady_state(KV_POOL_THREAD_SAFE, 4, nullptr);
}
TEST_CASE("no allocation in steady state, elastic") {
    run_steady_state(KV_POOL_ELASTIC, 2, nullptr);
}

/// The host's allocator: counts, and gives memory with bytes of its own choice.
struct host_memory {
    uint64_t calls = 0;
    uint64_t live_bytes = 0;
    uint64_t wrong = 0;

    kv_hooks hooks() {
        kv_hooks table = KV_INIT(kv_hooks);
        table.user = this;
        table.allocate = [](void* user, size_t bytes, size_t alignment) -> void* {
            host_memory& self = *static_cast<host_memory*>(user);
            ++self.calls;
            self.live_bytes += bytes;
            if (bytes == 0 || (alignment & (alignment - 1)) != 0) ++self.wrong;
            const size_t whole = (bytes + alignment - 1) / alignment * alignment;
            void* memory = std::aligned_alloc(alignment < 16 ? 16 : alignment,
                                              alignment < 16 ? (bytes + 15) / 16 * 16 : whole);
            if (memory != nullptr && bytes < (1u << 24)) std::memset(memory, 0xa7, bytes);
            return memory;
        };
        table.release = [](void* user, void* memory, size_t bytes, size_t alignment) {
            host_memory& self = *static_cast<host_memory*>(user);
            self.live_bytes -= bytes;
            if (memory == nullptr || alignment == 0) ++self.wrong;
            std::free(memory);
        };
        return table;
    }
};

TEST_CASE("the host's allocator gets every request at creation, and all of it back") {
    host_memory memory;
    const kv_hooks hooks = memory.hooks();
    {
        kv_pool_config config = small_config();
        config.hooks = &hooks;
        const live_pool pool(config);
        CHECK(memory.calls == pool.stats().host_allocations);
        CHECK(memory.live_bytes == pool.stats().metadata_bytes);
        CHECK(memory.calls > 10);
        const uint64_t calls = memory.calls;
        const kv_seq seq = pool.create_sequence();
        pool.append(seq, 100);
        kv_seq child = 0;
        REQUIRE(kv_seq_fork(pool, seq, 1, &child) == KV_OK);
        pool.append(child, 50);
        REQUIRE(kv_seq_release(pool, seq) == KV_OK);
        CHECK(memory.calls == calls);
        kv_plan_report plan = KV_INIT(kv_plan_report);
        const kv_model description = pool.model.describe();
        REQUIRE(kv_plan(&config, &description, &plan) == KV_OK);
        CHECK(plan.metadata_bytes == memory.live_bytes);
        CHECK(memory.calls == calls);
    }
    CHECK(memory.live_bytes == 0);
    CHECK(memory.wrong == 0);
}

TEST_CASE("creation refused at any request leaves nothing behind") {
    struct limited {
        host_memory memory;
        kv_hooks inner;
        uint64_t allowed = 0;
    };
    const small_model model;
    const kv_model description = model.describe();
    kv_pool_config config = small_config();
    config.threads = 2;
    limited host;
    host.inner = host.memory.hooks();
    kv_hooks hooks = host.inner;
    hooks.user = &host;
    hooks.allocate = [](void* user, size_t bytes, size_t alignment) -> void* {
        limited& self = *static_cast<limited*>(user);
        if (self.memory.calls >= self.allowed) return nullptr;
        return self.inner.allocate(&self.memory, bytes, alignment);
    };
    hooks.release = [](void* user, void* memory, size_t bytes, size_t alignment) {
        limited& self = *static_cast<limited*>(user);
        self.inner.release(&self.memory, memory, bytes, alignment);
    };
    config.hooks = &hooks;
    uint64_t refused = 0;
    for (;; ++host.allowed) {
        host.memory.calls = 0;
        kv_pool* pool = nullptr;
        const kv_status verdict = kv_pool_create(&config, &description, &pool);
        if (verdict == KV_OK) {
            kv_pool_release(pool);
            CHECK(host.memory.live_bytes == 0);
            break;
        }
        CHECK(verdict == KV_NO_MEMORY);
        CHECK(pool == nullptr);
        CHECK_FALSE(last_error().empty());
        CHECK(host.memory.live_bytes == 0);
        REQUIRE(++refused < 1000);
    }
    CHECK(refused > 10);
    CHECK(host.memory.wrong == 0);
}

TEST_CASE(
    "hooks: log gets what kv_pool_check finds, now times reports, parallel_for runs the work") {
    struct record {
        uint64_t time = 0;
        uint64_t jobs = 0;
    } seen;
    kv_hooks hooks = KV_INIT(kv_hooks);
    hooks.user = &seen;
    hooks.now = [](void* user) { return static_cast<record*>(user)->time += 1000; };
    hooks.parallel_for = [](void* user, uint32_t count, void (*body)(void*, uint32_t),
                            void* context) {
        ++static_cast<record*>(user)->jobs;
        for (uint32_t i = count; i-- > 0;) body(context, i);  // any order will do
    };
    kv_pool_config config = small_config();
    config.hooks = &hooks;
    const live_pool pool(config);
    const kv_seq seq = pool.create_sequence();
    pool.append(seq, 100);
    CHECK(seen.jobs > 0);
    kv_policy policy = KV_INIT(kv_policy);
    policy.scorer = KV_SCORER_STREAMING;
    policy.budget = 16;
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = &policy;
    kv_compress_report report = KV_INIT(kv_compress_report);
    REQUIRE(kv_compress(pool, seq, &options, &report) == KV_OK);
    CHECK(report.nanoseconds >= 1000);
    CHECK(report.nanoseconds % 1000 == 0);
}

}  // namespace
