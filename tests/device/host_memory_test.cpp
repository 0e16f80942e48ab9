// What a host asks of a CUDA device before it has a pool, and pools in memory of the host's own.
#include "cuda_pool.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

namespace {

/// Device memory from the fake driver, counted; what a host's caching allocator would do.
struct counting_memory {
    explicit counting_memory(fake_driver& driver) : fake(driver) {}

    fake_driver& fake;
    std::map<void*, std::size_t> live;
    uint64_t calls = 0;
    uint64_t refused_at = ~uint64_t{0};  ///< the call that finds no room
    std::size_t shift = 0;               ///< off the alignment
    bool right = true;  ///< the context was current, and what is released was allocated so

    kv_cuda_memory description() {
        kv_cuda_memory memory = KV_INIT(kv_cuda_memory);
        memory.user = this;
        memory.allocate = [](void* user, std::size_t bytes, std::size_t alignment) {
            return static_cast<counting_memory*>(user)->allocate(bytes, alignment);
        };
        memory.release = [](void* user, void* address, std::size_t bytes, std::size_t) {
            static_cast<counting_memory*>(user)->release(address, bytes);
        };
        return memory;
    }
    std::size_t bytes() const {
        std::size_t sum = 0;
        for (const auto& each : live) sum += each.second;
        return sum;
    }

  private:
    void* allocate(std::size_t bytes, std::size_t alignment) {
        right = right && fake.current() == fake.primary() && alignment == 256;
        if (calls++ == refused_at) return nullptr;
        device_pointer address = 0;
        if (fake.table().memory_allocate(&address, bytes + shift) != success) return nullptr;
        void* const memory = reinterpret_cast<void*>(address + shift);
        live[memory] = bytes;
        return memory;
    }
    void release(void* memory, std::size_t bytes) {
        right = right && live.count(memory) == 1 && live[memory] == bytes &&
                fake.current() == fake.primary();
        live.erase(memory);
        (void)fake.table().memory_free(reinterpret_cast<device_pointer>(memory) - shift);
    }
};

}  // namespace

TEST_CASE("a pool lives in device memory that the host hands out, and gives all of it back") {
    cuda_host host;
    counting_memory memory(host.fake);
    const kv_cuda_memory description = memory.description();
    const small_model model;
    const kv_pool_config config = small_config();
    kv_pool* pool = nullptr;
    const std::size_t before = host.fake.physical_bytes();
    REQUIRE_MESSAGE(kv_cuda_pool_create(&config, &model.description, &description, &pool) == KV_OK,
                    message_buffer());
    CHECK(memory.live.size() >= 3);  // arena, tables, uploads
    CHECK(memory.bytes() > config.arena_bytes);
    CHECK(host.fake.physical_bytes() - before == memory.bytes());  // and there is no other
    kv_seq seq = 0;
    kv_step* step = nullptr;
    REQUIRE(kv_seq_create(pool, nullptr, &seq) == KV_OK);
    REQUIRE(kv_step_begin(pool, &step) == KV_OK);
    REQUIRE(kv_cuda_step_use_stream(step, as_stream(host.stream)) == KV_OK);
    REQUIRE(kv_seq_append(step, seq, nullptr, 20, nullptr) == KV_OK);
    REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
    layer_tables tables;
    tables.fill(step, 0);
    tables.fill(step, 1);
    // The arena is in what was handed out.
    const auto base = reinterpret_cast<uintptr_t>(tables.tables.base);
    bool inside = false;
    for (const auto& [address, bytes] : memory.live) {
        const auto start = reinterpret_cast<uintptr_t>(address);
        inside = inside || (base >= start && base < start + bytes);
    }
    CHECK(inside);
    REQUIRE(kv_step_end(step, nullptr) == KV_OK);
    kv_pool_release(pool);
    CHECK(memory.live.empty());
    CHECK(memory.right);
}

TEST_CASE("what the host's device memory cannot do is refused, and nothing stays allocated") {
    cuda_host host;
    counting_memory memory(host.fake);
    kv_cuda_memory description = memory.description();
    const small_model model;
    kv_pool_config config = small_config();
    kv_pool* pool = nullptr;
    const auto create = [&] {
        return kv_cuda_pool_create(&config, &model.description, &description, &pool);
    };
    SUBCASE("no room, whichever allocation it is") {
        for (memory.refused_at = 0; create() != KV_OK; ++memory.refused_at) {
            memory.calls = 0;
            CHECK(create() == KV_NO_MEMORY);
            CHECK(message_has("the host's allocator refused"));
            CHECK(memory.live.empty());
            memory.calls = 0;
            REQUIRE(memory.refused_at < 20);
        }
        CHECK(memory.refused_at >= 3);
        kv_pool_release(pool);
    }
    SUBCASE("an address that kernels cannot use") {
        memory.shift = 64;
        CHECK(create() == KV_INVALID);
        CHECK(message_has("no multiple of 256"));
    }
    SUBCASE("an elastic pool") {
        config.flags = KV_POOL_ELASTIC;
        CHECK(create() == KV_UNSUPPORTED);
        CHECK(message_has("KV_POOL_ELASTIC"));
        CHECK(memory.calls == 0);
    }
    SUBCASE("a pool on the CPU") {
        config.device = KV_DEVICE_CPU;
        CHECK(create() == KV_INVALID);
        CHECK(message_has("KV_DEVICE_CUDA"));
    }
    SUBCASE("one function alone") {
        description.release = nullptr;
        CHECK(create() == KV_INVALID);
        CHECK(message_has("come together"));
    }
    SUBCASE("no memory of the host's: the driver's") {
        REQUIRE(kv_cuda_pool_create(&config, &model.description, nullptr, &pool) == KV_OK);
        CHECK(memory.calls == 0);
        kv_pool_release(pool);
    }
    SUBCASE("no place for the pool") {
        CHECK(kv_cuda_pool_create(&config, &model.description, &description, nullptr) ==
              KV_INVALID);
    }
    CHECK(memory.live.empty());
    CHECK(memory.right);
}

TEST_CASE("a device is described without being opened") {
    fake_driver::options settings;
    SUBCASE("one that maps") {}
    SUBCASE("one that does not") { settings.device_maps = false; }
    SUBCASE("a driver that does not") { settings.virtual_memory = false; }
    cuda_host host(settings);
    kv_cuda_device device = KV_INIT(kv_cuda_device);
    REQUIRE(kv_cuda_get_device(&device) == KV_OK);
    CHECK(std::string(device.name) == "a fake device");
    CHECK(device.memory_bytes == settings.memory_bytes);
    CHECK(device.compute_major == 9);
    CHECK(device.driver_version == 13000);
    CHECK(device.elastic == (settings.device_maps && settings.virtual_memory ? 1 : 0));
    CHECK(device.has_kernels == 0);  // this program has none in it
    CHECK(std::string(device.reason).find("nvcc") != std::string::npos);
    CHECK(host.fake.physical_bytes() == 0);
    CHECK(host.fake.calls("cuDevicePrimaryCtxRetain") == 0);
}

TEST_CASE("why there is no device is told as it is for a pool") {
    cuda_host host;
    kv_cuda_device device = KV_INIT(kv_cuda_device);
    host.fake.inject("cuDeviceGet", error_no_device);
    CHECK(kv_cuda_get_device(&device) == KV_DEVICE);
    CHECK(message_has("CUDA_ERROR_NO_DEVICE"));
    CHECK(kv_cuda_get_device(nullptr) == KV_INVALID);
    device.flags = 1;
    CHECK(kv_cuda_get_device(&device) == KV_UNSUPPORTED);
}
