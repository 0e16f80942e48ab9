// Pools on KV_DEVICE_CUDA: what they do, what they refuse, and what they say when the device fails.
#include "cuda_pool.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

namespace {

kv_status create(const kv_pool_config& config, const kv_model& model) {
    kv_pool* pool = nullptr;
    const kv_status verdict = kv_pool_create(&config, &model, &pool);
    CHECK((pool == nullptr) == (verdict < 0));
    kv_pool_release(pool);
    return verdict;
}

}  // namespace

TEST_CASE("a pool's arena is device memory, all of it or slab by slab") {
    cuda_host host;
    for (const uint32_t flags : {0u, uint32_t{KV_POOL_ELASTIC}}) {
        CAPTURE(flags);
        const cuda_pool pool(small_config(flags));
        const uint64_t others = host.fake.physical_bytes() - pool.memory();  // tables, staging
        CHECK(others < (uint64_t{1} << 20));
        CHECK((pool.memory() >= (uint64_t{8} << 20)) == (flags == 0));
        const kv_seq seq = pool.create_sequence();
        kv_step* step = pool.begin(host.stream);
        REQUIRE(kv_seq_append(step, seq, nullptr, 40, nullptr) == KV_OK);
        REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
        layer_tables tables;
        for (uint32_t layer = 0; layer < 2; ++layer) {
            tables.fill(step, layer);
            CHECK(tables.tables.max_blocks == 3);
            for (uint32_t block = 0; block < 3; ++block) {
                const device_pointer row = tables.row(tables.block_table[block], 0);
                CHECK(host.fake.is_mapped(row, static_cast<size_t>(tables.tables.block_bytes)));
            }
        }
        REQUIRE(kv_step_end(step, nullptr) == KV_OK);
        CHECK(pool.memory() == host.fake.physical_bytes() - others);
        CHECK(kv_pool_check(pool) == KV_OK);
    }
    CHECK(host.fake.calls("cuMemcpyDtoDAsync_v2") == 0);
}

TEST_CASE("a step needs a stream, one, and a proper one") {
    cuda_host host;
    const cuda_pool pool(small_config());
    const kv_seq seq = pool.create_sequence();
    kv_step* step = nullptr;
    REQUIRE(kv_step_begin(pool, &step) == KV_OK);
    REQUIRE(kv_seq_append(step, seq, nullptr, 4, nullptr) == KV_OK);
    CHECK(kv_step_reserve(step, nullptr) == KV_INVALID);
    CHECK(message_has("kv_cuda_step_use_stream"));
    CHECK(kv_cuda_step_use_stream(step, nullptr) == KV_INVALID);
    CHECK(message_has("default stream"));
    host.fake.begin_capture(host.stream);
    CHECK(kv_cuda_step_use_stream(step, as_stream(host.stream)) == KV_INVALID);
    CHECK(message_has("captured"));
    CHECK(host.fake.end_capture(host.stream).empty());
    CHECK(kv_cuda_step_use_stream(step, as_stream(host.stream)) == KV_OK);
    CHECK(kv_cuda_step_use_stream(step, as_stream(host.stream)) == KV_INVALID);
    kv_step* second = nullptr;
    REQUIRE(kv_step_begin(pool, &second) == KV_OK);
    CHECK(kv_cuda_step_use_stream(second, as_stream(host.other)) == KV_INVALID);
    CHECK(message_has("another stream"));
    CHECK(kv_cuda_step_use_stream(second, as_stream(host.stream)) == KV_OK);
    REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
    CHECK(kv_cuda_step_use_stream(step, as_stream(host.stream)) == KV_INVALID);
    CHECK(kv_cuda_step_use_stream(nullptr, as_stream(host.stream)) == KV_INVALID);
    CHECK(kv_step_cancel(step) == KV_OK);
    CHECK(kv_step_cancel(second) == KV_OK);
    CHECK(kv_pool_check(pool) == KV_OK);
}

TEST_CASE("pools on the CPU have no streams") {
    kv_pool_config config = small_config();
    config.device = KV_DEVICE_CPU;
    const cuda_pool pool(config);
    kv_step* step = nullptr;
    REQUIRE(kv_step_begin(pool, &step) == KV_OK);
    int place = 0;
    CHECK(kv_cuda_step_use_stream(step, reinterpret_cast<CUstream_st*>(&place)) == KV_INVALID);
    CHECK(message_has("CPU"));
    const kv_seq seq = pool.create_sequence();
    REQUIRE(kv_seq_append(step, seq, nullptr, 4, nullptr) == KV_OK);
    REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
    kv_cuda_tables tables = KV_INIT(kv_cuda_tables);
    CHECK(kv_cuda_step_tables(step, 0, &tables) == KV_INVALID);
    CHECK(message_has("CPU"));
    uint64_t bytes = 0;
    CHECK(kv_cuda_pool_memory(pool, &bytes) == KV_INVALID);
    CHECK(kv_cuda_pool_memory(pool, nullptr) == KV_INVALID);
    REQUIRE(kv_step_cancel(step) == KV_OK);
}

TEST_CASE("blocks are parked until the device has passed the step, without anybody waiting") {
    cuda_host host;
    const cuda_pool pool(small_config(KV_POOL_ELASTIC));
    const kv_seq seq = pool.create_sequence();
    REQUIRE(append(pool, host.stream, seq, 200) == KV_OK);
    const uint64_t parked = pool.stats().parked;  // slid out of the window
    const uint64_t pinned = pool.stats().pinned;
    const uint64_t memory = pool.memory();
    CHECK(parked > 5);
    CHECK(pinned > 15);
    REQUIRE(kv_seq_release(pool, seq) == KV_OK);
    CHECK(pool.stats().parked == parked + pinned);

    kv_step* step = pool.begin(host.stream);
    CHECK(pool.stats().parked == parked + pinned);
    REQUIRE(kv_step_cancel(step) == KV_OK);
    host.fake.run_all();
    CHECK(pool.stats().parked == parked + pinned);  // nobody has asked
    step = pool.begin(host.stream);
    CHECK(pool.stats().parked == 0);
    CHECK(pool.memory() <= memory);
    REQUIRE(kv_step_cancel(step) == KV_OK);
    CHECK(host.fake.synchronisations() == 0);
    CHECK(kv_pool_check(pool) == KV_OK);
}

TEST_CASE("a cancelled step's blocks wait for what it had enqueued") {
    cuda_host host;
    const cuda_pool pool(small_config());
    const kv_seq seq = pool.create_sequence();
    kv_step* step = pool.begin(host.stream);
    REQUIRE(kv_seq_append(step, seq, nullptr, 100, nullptr) == KV_OK);
    REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
    REQUIRE(kv_step_cancel(step) == KV_OK);
    CHECK(pool.stats().parked > 10);
    CHECK(pool.stats().pinned == 0);
    host.fake.run_all();
    step = pool.begin(host.stream);
    CHECK(pool.stats().parked == 0);
    REQUIRE(kv_step_cancel(step) == KV_OK);
}

TEST_CASE("an elastic pool gives device memory back once nobody reads it") {
    cuda_host host;
    kv_pool_config config = small_config(KV_POOL_ELASTIC);
    config.arena_bytes = uint64_t{32} << 20;
    config.max_tokens_per_sequence = 1 << 17;
    config.max_step_tokens = 1 << 16;
    const cuda_pool pool(config);
    const uint64_t others = host.fake.physical_bytes();  // tables, staging
    const kv_seq seq = pool.create_sequence();
    kv_step* step = pool.begin(host.stream);
    REQUIRE(kv_seq_append(step, seq, nullptr, 20000, nullptr) == KV_OK);
    REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
    const uint64_t most = pool.memory();
    CHECK(most >= (uint64_t{20} << 20));
    REQUIRE(kv_step_cancel(step) == KV_OK);
    CHECK(pool.memory() == most);  // what was enqueued may still write there
    host.fake.run_all();
    step = pool.begin(host.stream);
    const uint64_t resident = pool.stats().slabs_resident * pool.stats().slab_bytes;
    CHECK(resident <= (uint64_t{4} << 20));
    CHECK(pool.memory() == resident);
    CHECK(host.fake.physical_bytes() == resident + others);
    REQUIRE(kv_step_cancel(step) == KV_OK);
}

TEST_CASE("memory given back while a step is in flight goes once the device has passed it") {
    cuda_host host;
    kv_pool_config config = small_config(KV_POOL_ELASTIC);
    config.arena_bytes = uint64_t{32} << 20;
    config.max_tokens_per_sequence = 1 << 17;
    config.max_step_tokens = 1 << 16;
    const cuda_pool pool(config);
    const kv_seq seq = pool.create_sequence();
    kv_step* step = pool.begin(host.stream);
    REQUIRE(kv_seq_append(step, seq, nullptr, 20000, nullptr) == KV_OK);
    REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
    for (uint32_t layer = 0; layer < 2; ++layer) {
        kv_tables tables = KV_INIT(kv_tables);
        REQUIRE(kv_step_export(step, layer, &tables) == KV_OK);
    }
    REQUIRE(kv_step_end(step, nullptr) == KV_OK);
    host.fake.run_all();
    step = pool.begin(host.stream);
    const uint64_t most = pool.memory();
    REQUIRE(kv_seq_release(pool, seq) == KV_OK);  // its own step has passed
    CHECK(pool.stats().slabs_given_back > 5);
    CHECK(pool.memory() == most);
    REQUIRE(kv_step_cancel(step) == KV_OK);
    host.fake.run_all();
    CHECK(pool.memory() == most);
    step = pool.begin(host.stream);
    CHECK(pool.memory() == pool.stats().slabs_resident * pool.stats().slab_bytes);
    CHECK(pool.memory() < most);
    REQUIRE(kv_step_cancel(step) == KV_OK);
}

TEST_CASE("what a pool on the device does not do yet is refused by name") {
    cuda_host host;
    const small_model model;
    SUBCASE("observation") {
        kv_pool_config config = small_config();
        config.max_observed_sequences = 1;
        CHECK(create(config, model.description) == KV_UNSUPPORTED);
        CHECK(message_has("max_observed_sequences"));
    }
    SUBCASE("sealed formats") {
        small_model sealed;
        sealed.layers[0].key_format = KV_FORMAT_KIVI2;
        kv_pool_config config = small_config();
        config.block_tokens = 128;
        CHECK(create(config, sealed.description) == KV_UNSUPPORTED);
        CHECK(message_has("sealed"));
    }
    SUBCASE("demotion") {
        small_model demoting;
        demoting.layers[0].demoted_key_format = KV_FORMAT_INT8_TOKEN;
        demoting.layers[0].demote_after = 64;
        CHECK(create(small_config(), demoting.description) == KV_UNSUPPORTED);
        CHECK(message_has("demotion"));
    }
    SUBCASE("verbs") {
        const cuda_pool pool(small_config());
        const kv_seq seq = pool.create_sequence();
        kv_policy policy = KV_INIT(kv_policy);
        policy.scorer = KV_SCORER_STREAMING;
        policy.budget = 32;
        kv_seq_config with_policy = KV_INIT(kv_seq_config);
        with_policy.policy = &policy;
        kv_seq refused = 0;
        CHECK(kv_seq_create(pool, &with_policy, &refused) == KV_UNSUPPORTED);
        CHECK(message_has("policy"));
        kv_compress_options options = KV_INIT(kv_compress_options);
        options.policy = &policy;
        CHECK(kv_compress(pool, seq, &options, nullptr) == KV_UNSUPPORTED);

        kv_step* step = pool.begin(host.stream);
        REQUIRE(kv_seq_append(step, seq, nullptr, 4, nullptr) == KV_OK);
        REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
        std::vector<float> numbers(4 * 2 * 64);
        kv_tensor tensor = KV_INIT(kv_tensor);
        tensor.data = numbers.data();
        tensor.dtype = KV_DTYPE_F32;
        tensor.rows = 4;
        tensor.heads = 2;
        tensor.dim = 64;
        CHECK(kv_write(step, 0, &tensor, &tensor) == KV_UNSUPPORTED);
        CHECK(message_has("kv_write"));
        layer_tables tables;
        for (uint32_t layer = 0; layer < 2; ++layer) tables.fill(step, layer);
        CHECK(kv_attend(step, 0, &tensor, &tensor, nullptr) == KV_UNSUPPORTED);
        CHECK(message_has("kv_attend"));
        REQUIRE(kv_step_end(step, nullptr) == KV_OK);
    }
}

TEST_CASE("a pool on the device is planned without one, as on the CPU") {
    const small_model model;
    kv_pool_config config = small_config();
    kv_plan_report on_device = KV_INIT(kv_plan_report);
    kv_plan_report on_host = KV_INIT(kv_plan_report);
    CHECK(kv_plan(&config, &model.description, &on_device) == KV_OK);
    config.device = KV_DEVICE_CPU;
    CHECK(kv_plan(&config, &model.description, &on_host) == KV_OK);
    CHECK(std::memcmp(&on_device, &on_host, sizeof on_host) == 0);
    CHECK(on_device.arena_bytes_needed > 0);
}

TEST_CASE("no plugin, no driver, no device, no memory: each is told") {
    SUBCASE("no device") {
        fake_driver::options none;
        none.devices = 0;
        cuda_host host(none);
        CHECK(create(small_config(), small_model().description) == KV_UNSUPPORTED);
        CHECK(message_has("device"));
    }
    SUBCASE("no memory for the arena") {
        fake_driver::options small;
        small.memory_bytes = 4 << 20;
        cuda_host host(small);
        CHECK(create(small_config(), small_model().description) == KV_NO_MEMORY);
        CHECK(message_has("CUDA_ERROR_OUT_OF_MEMORY"));
    }
    SUBCASE("no virtual memory") {
        fake_driver::options old;
        old.virtual_memory = false;
        cuda_host host(old);
        CHECK(create(small_config(KV_POOL_ELASTIC), small_model().description) == KV_UNSUPPORTED);
        CHECK(message_has("KV_POOL_ELASTIC"));
        CHECK(create(small_config(), small_model().description) == KV_OK);
    }
    SUBCASE("the host's allocator refuses") {
        cuda_host host;
        kv_pool_config config = small_config();
        kv_hooks hooks = KV_INIT(kv_hooks);
        uint32_t allowed = 0;
        hooks.user = &allowed;
        hooks.allocate = [](void* user, size_t bytes, size_t alignment) -> void* {
            uint32_t& left = *static_cast<uint32_t*>(user);
            if (left == 0) return nullptr;
            --left;
            return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
        };
        hooks.release = [](void*, void* memory, size_t, size_t) { std::free(memory); };
        config.hooks = &hooks;
        kv_status verdict = KV_NO_MEMORY;
        uint32_t tries = 0;
        for (; verdict == KV_NO_MEMORY && tries < 200; ++tries) {
            allowed = tries;
            verdict = create(config, small_model().description);
        }
        CHECK(verdict == KV_OK);
        CHECK(tries > 10);
    }
    SUBCASE("the device that is current") {
        fake_driver::options two;
        two.devices = 2;
        cuda_host host(two);
        host.fake.current_device = 1;
        CHECK(create(small_config(), small_model().description) == KV_OK);
        CHECK(host.fake.retained_device() == 1);
        host.fake.set_current(nullptr);
        CHECK(create(small_config(), small_model().description) == KV_OK);
        CHECK(host.fake.retained_device() == 0);
        host.fake.set_current(host.own);
    }
}

TEST_CASE("a slab that cannot be mapped: the step is as before, and the error has its name") {
    cuda_host host;
    const cuda_pool pool(small_config(KV_POOL_ELASTIC));
    const kv_seq seq = pool.create_sequence();
    const kv_seq other = pool.create_sequence();
    kv_step* step = pool.begin(host.stream);
    REQUIRE(kv_seq_append(step, seq, nullptr, 30, nullptr) == KV_OK);
    REQUIRE(kv_seq_append(step, other, nullptr, 20, nullptr) == KV_OK);
    host.fake.inject("cuMemMap", error_out_of_memory);
    CHECK(kv_step_reserve(step, nullptr) == KV_DEVICE);
    CHECK(message_has("cuMemMap: CUDA_ERROR_OUT_OF_MEMORY"));
    CHECK(pool.stats().pinned == 0);
    CHECK(kv_pool_check(pool) == KV_OK);
    CHECK(kv_step_reserve(step, nullptr) == KV_OK);
    REQUIRE(kv_step_cancel(step) == KV_OK);
    CHECK(pool.stats().pinned == 0);
    CHECK(kv_pool_check(pool) == KV_OK);
}

TEST_CASE("a fault is told by every call that needs the device, until the pool is released") {
    cuda_host host;
    const cuda_pool pool(small_config(KV_POOL_ELASTIC));
    const kv_seq seq = pool.create_sequence();
    REQUIRE(append(pool, host.stream, seq, 20) == KV_OK);
    kv_step* open = pool.begin(host.stream);
    REQUIRE(kv_seq_append(open, seq, nullptr, 20, nullptr) == KV_OK);
    host.fake.inject("cuEventQuery", error_illegal_address);
    CHECK(kv_step_reserve(open, nullptr) == KV_DEVICE);
    CHECK(message_has("cuEventQuery: CUDA_ERROR_ILLEGAL_ADDRESS"));
    CHECK(kv_step_reserve(open, nullptr) == KV_DEVICE);
    CHECK(message_has("CUDA_ERROR_ILLEGAL_ADDRESS"));
    kv_step* step = nullptr;
    CHECK(kv_step_begin(pool, &step) == KV_DEVICE);
    CHECK(message_has("release the pool"));
    CHECK(kv_step_cancel(open) == KV_OK);
    CHECK(kv_seq_release(pool, seq) == KV_OK);  // needs no device
    CHECK(pool.stats().parked > 0);             // for ever
    CHECK(kv_pool_check(pool) == KV_OK);
}

TEST_CASE("a step that cannot be ended is cancelled") {
    cuda_host host;
    const cuda_pool pool(small_config());
    const kv_seq seq = pool.create_sequence();
    kv_step* step = pool.begin(host.stream);
    REQUIRE(kv_seq_append(step, seq, nullptr, 20, nullptr) == KV_OK);
    REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
    layer_tables tables;
    for (uint32_t layer = 0; layer < 2; ++layer) tables.fill(step, layer);
    host.fake.inject("cuEventRecord", error_launch_failed);
    CHECK(kv_step_end(step, nullptr) == KV_DEVICE);
    CHECK(message_has("CUDA_ERROR_LAUNCH_FAILED"));
    CHECK(pool.stats().open_steps == 0);
    CHECK(pool.stats().pinned == 0);
    CHECK(pool.stats().tokens_accepted == 0);
    CHECK(kv_pool_check(pool) == KV_OK);
}
