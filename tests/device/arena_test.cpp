// The arena's device memory: mapped behind slabs in use, given back once nobody reads it.
#include "driver/arena.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <random>
#include <string>

#include "fake_driver.hpp"
#include "memory/blocks.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

namespace {

constexpr uint64_t mib = uint64_t{1} << 20;

bool message_has(const char* part) {
    return std::string(message_buffer()).find(part) != std::string::npos;
}

struct world {
    fake_driver fake;
    host_allocator allocator;
    device_context device;
    std::optional<arena_memory> arena;
    std::unique_ptr<fence_ring> fences = std::make_unique<fence_ring>();
    stream_handle stream = fake.make_stream();
    std::byte* base = nullptr;

    explicit world(const fake_driver::options& settings = {}) : fake(settings) {
        REQUIRE(device.open(fake.table(), 0) == KV_OK);
        REQUIRE(fences->create(device) == KV_OK);
    }
    status reserve(uint64_t bytes, bool elastic) {
        arena.emplace(device, *fences, allocator, elastic);
        return arena->reserve(bytes, slab_bytes, &base);
    }
    device_pointer at(uint64_t offset) const {
        return reinterpret_cast<device_pointer>(base) + offset;
    }
    bool mapped(uint64_t offset, uint64_t bytes) const { return fake.is_mapped(at(offset), bytes); }
    /// What a kernel of a step does to the arena.
    void fill(uint64_t offset, uint64_t bytes, unsigned char value) {
        const current_context here(device);
        REQUIRE(fake.table().fill_bytes(at(offset), value, bytes, stream) == success);
    }
    /// Everything but the host's stream and the device's context is let go, in order.
    void end() {
        fences.reset();
        arena.reset();
        CHECK(fake.leaks().size() == 1);
        CHECK(fake.physical_bytes() == 0);
        CHECK(allocator.live_bytes == 0);
        CHECK(fake.violations.empty());
        CHECK(fake.current() == nullptr);
    }
};

}  // namespace

TEST_CASE("an elastic arena maps what is committed, where it always was") {
    world of;
    REQUIRE(of.reserve(64 * mib, true) == KV_OK);
    const std::byte* base = of.base;
    CHECK(of.at(0) % slab_bytes == 0);
    CHECK(of.fake.physical_bytes() == 0);
    REQUIRE(of.arena->commit(4 * mib, 6 * mib) == KV_OK);
    CHECK(of.arena->mapped_bytes() == 6 * mib);
    CHECK(of.fake.physical_bytes() == 6 * mib);
    CHECK(of.mapped(4 * mib, 6 * mib));
    CHECK_FALSE(of.mapped(4 * mib - 1, 2));
    CHECK_FALSE(of.mapped(10 * mib - 1, 2));

    of.arena->give_back(6 * mib, 2 * mib);  // no step is in flight
    CHECK(of.arena->mapped_bytes() == 4 * mib);
    CHECK(of.fake.physical_bytes() == 4 * mib);
    CHECK(of.mapped(4 * mib, 2 * mib));
    CHECK_FALSE(of.mapped(6 * mib, 1));
    REQUIRE(of.arena->commit(6 * mib, 2 * mib) == KV_OK);
    CHECK(of.mapped(4 * mib, 6 * mib));
    CHECK(of.base == base);
    of.end();
}

TEST_CASE("what is given back stays until the steps in flight have passed") {
    world of;
    REQUIRE(of.reserve(16 * mib, true) == KV_OK);
    REQUIRE(of.arena->commit(0, 4 * mib) == KV_OK);
    REQUIRE(of.fences->begin(1, of.stream) == KV_OK);
    of.fill(0, 4 * mib, 7);
    of.arena->give_back(0, 2 * mib);  // the step may enqueue more
    REQUIRE(of.fences->record(1) == KV_OK);
    of.arena->give_back(2 * mib, 2 * mib);
    REQUIRE(of.fences->poll() == KV_OK);
    of.arena->collect();
    CHECK(of.arena->mapped_bytes() == 4 * mib);

    of.fake.run_all();
    of.arena->collect();
    CHECK(of.arena->mapped_bytes() == 4 * mib);  // nobody has asked for the step yet
    // A step that begins later does not hold it back.
    REQUIRE(of.fences->begin(2, of.stream) == KV_OK);
    REQUIRE(of.fences->poll() == KV_OK);
    of.arena->collect();
    CHECK(of.arena->mapped_bytes() == 0);
    CHECK(of.fake.physical_bytes() == 0);
    of.end();
}

TEST_CASE("what is wanted again before that is used as it is") {
    world of;
    REQUIRE(of.reserve(16 * mib, true) == KV_OK);
    REQUIRE(of.arena->commit(0, 2 * mib) == KV_OK);
    REQUIRE(of.fences->begin(1, of.stream) == KV_OK);
    of.fill(0, 2 * mib, 7);
    of.arena->give_back(0, 2 * mib);
    REQUIRE(of.arena->commit(0, 2 * mib) == KV_OK);
    REQUIRE(of.fences->record(1) == KV_OK);
    of.fake.run_all();
    REQUIRE(of.fences->poll() == KV_OK);
    of.arena->collect();
    CHECK(of.arena->mapped_bytes() == 2 * mib);
    CHECK(*of.fake.memory_of<uint8_t>(of.at(0)) == 7);
    CHECK(of.fake.calls("cuMemCreate") == 1);

    // And given back once more, it waits for the later step.
    REQUIRE(of.fences->begin(2, of.stream) == KV_OK);
    of.arena->give_back(0, 2 * mib);
    of.arena->collect();
    CHECK(of.arena->mapped_bytes() == 2 * mib);
    REQUIRE(of.fences->record(2) == KV_OK);
    of.fake.run_all();
    REQUIRE(of.fences->poll() == KV_OK);
    of.arena->collect();
    CHECK(of.arena->mapped_bytes() == 0);
    of.end();
}

TEST_CASE("a device that maps larger pages than slabs") {
    fake_driver::options large;
    large.granularity = 8 * mib;
    world of(large);
    REQUIRE(of.reserve(20 * mib, true) == KV_OK);
    CHECK(of.arena->page_bytes() == 8 * mib);
    REQUIRE(of.arena->commit(6 * mib, 4 * mib) == KV_OK);  // of two pages
    CHECK(of.fake.physical_bytes() == 16 * mib);
    REQUIRE(of.arena->commit(0, 2 * mib) == KV_OK);
    CHECK(of.fake.physical_bytes() == 16 * mib);
    of.arena->give_back(6 * mib, 2 * mib);
    CHECK(of.fake.physical_bytes() == 16 * mib);
    of.arena->give_back(0, 2 * mib);
    CHECK(of.fake.physical_bytes() == 8 * mib);
    CHECK(of.mapped(8 * mib, 2 * mib));
    of.end();
}

TEST_CASE("a commit that fails leaves nothing behind") {
    const struct {
        const char* symbol;
        driver_result result;
        status verdict;
    } failures[] = {{"cuMemCreate", error_out_of_memory, KV_NO_MEMORY},
                    {"cuMemMap", error_invalid_value, KV_DEVICE},
                    {"cuMemSetAccess", error_invalid_value, KV_DEVICE}};
    for (const auto& failure : failures) {
        for (unsigned int skipped = 0; skipped < 3; ++skipped) {
            CAPTURE(failure.symbol);
            CAPTURE(skipped);
            world of;
            REQUIRE(of.reserve(16 * mib, true) == KV_OK);
            of.fake.inject(failure.symbol, failure.result, skipped);
            CHECK(of.arena->commit(2 * mib, 6 * mib) == failure.verdict);
            CHECK(message_has(failure.symbol));
            CHECK(of.arena->mapped_bytes() == 0);
            CHECK(of.fake.physical_bytes() == 0);
            CHECK(of.arena->commit(2 * mib, 6 * mib) == KV_OK);
            CHECK(of.mapped(2 * mib, 6 * mib));
            of.end();
        }
    }
}

TEST_CASE("a commit that fails leaves alone what steps still read") {
    world of;
    REQUIRE(of.reserve(16 * mib, true) == KV_OK);
    REQUIRE(of.arena->commit(0, 2 * mib) == KV_OK);
    REQUIRE(of.fences->begin(1, of.stream) == KV_OK);
    of.fill(0, 2 * mib, 7);
    of.arena->give_back(0, 2 * mib);
    of.fake.inject("cuMemCreate", error_out_of_memory, 0, 2);
    CHECK(of.arena->commit(0, 4 * mib) == KV_NO_MEMORY);
    CHECK(of.mapped(0, 2 * mib));
    CHECK(of.arena->mapped_bytes() == 2 * mib);
    REQUIRE(of.fences->record(1) == KV_OK);
    of.fake.run_all();
    REQUIRE(of.fences->poll() == KV_OK);
    of.arena->collect();
    CHECK(of.arena->mapped_bytes() == 0);
    of.end();
}

TEST_CASE("memory that waits to be given back is found when there is no other") {
    fake_driver::options small;
    small.memory_bytes = 4 * mib;
    world of(small);
    REQUIRE(of.reserve(16 * mib, true) == KV_OK);
    REQUIRE(of.arena->commit(0, 4 * mib) == KV_OK);
    REQUIRE(of.fences->begin(1, of.stream) == KV_OK);
    of.arena->give_back(0, 4 * mib);
    REQUIRE(of.fences->record(1) == KV_OK);
    CHECK(of.arena->commit(8 * mib, 2 * mib) == KV_NO_MEMORY);
    of.fake.run_all();
    CHECK(of.arena->commit(8 * mib, 2 * mib) == KV_OK);
    CHECK(of.fake.physical_bytes() == 2 * mib);
    of.end();
}

TEST_CASE("without virtual memory management an elastic arena is refused, and says why") {
    fake_driver::options old;
    SUBCASE("the driver has none") { old.virtual_memory = false; }
    SUBCASE("the device has none") { old.device_maps = false; }
    world of(old);
    CHECK(of.reserve(16 * mib, true) == KV_UNSUPPORTED);
    CHECK(message_has("KV_POOL_ELASTIC"));
    CHECK(message_has(old.virtual_memory ? "device" : "driver"));
    of.end();
}

TEST_CASE("an arena that is not elastic takes all its memory when it is made") {
    fake_driver::options old;
    old.virtual_memory = false;
    world of(old);
    REQUIRE(of.reserve(16 * mib, false) == KV_OK);
    CHECK(of.at(0) % slab_bytes == 0);
    CHECK(of.mapped(0, 16 * mib));
    CHECK(of.arena->mapped_bytes() == of.fake.physical_bytes());
    const uint64_t calls = of.fake.calls("cuCtxPushCurrent_v2");
    CHECK(of.arena->commit(0, 16 * mib) == KV_OK);
    of.arena->give_back(0, 16 * mib);
    CHECK(of.mapped(0, 16 * mib));
    CHECK(of.fake.calls("cuCtxPushCurrent_v2") == calls);
    of.end();
}

TEST_CASE("an arena that does not fit is refused") {
    fake_driver::options small;
    small.memory_bytes = 8 * mib;
    world of(small);
    CHECK(of.reserve(16 * mib, false) == KV_NO_MEMORY);
    CHECK(message_has("CUDA_ERROR_OUT_OF_MEMORY"));
    of.end();
}

TEST_CASE("after a fault nothing is committed, and all is let go") {
    world of;
    REQUIRE(of.reserve(16 * mib, true) == KV_OK);
    REQUIRE(of.arena->commit(0, 4 * mib) == KV_OK);
    of.fake.inject("cuMemCreate", error_launch_failed);
    CHECK(of.arena->commit(4 * mib, 2 * mib) == KV_DEVICE);
    CHECK(of.arena->commit(8 * mib, 2 * mib) == KV_DEVICE);
    CHECK(message_has("failed earlier"));
    of.arena->give_back(0, 4 * mib);
    CHECK(of.arena->mapped_bytes() == 4 * mib);
    of.end();
}

TEST_CASE("a block store on it: memory follows the slabs in use, and comes back") {
    world of;
    of.arena.emplace(of.device, *of.fences, of.allocator, true);
    host_allocator blocks_memory;
    block_store blocks;
    const block_store::class_description classes[] = {{3 << 16, 16}, {5 << 14, 16}};
    REQUIRE(blocks.create(blocks_memory, *of.arena, {16, true, false}, classes, 2) == KV_OK);
    fence_clock clock;
    std::vector<block_id> held;
    std::mt19937 random(3);
    uint64_t step = 0, most = 0;
    for (uint32_t round = 0; round < 2000; ++round) {
        const bool grow = round % 400 < 200;
        if (grow || held.empty()) {
            const block_id id = blocks.allocate(random() % 2);
            if (id != no_block) held.push_back(id);
        } else {
            const std::size_t index = random() % held.size();
            (void)blocks.drop(held[index], 0, clock);
            std::swap(held[index], held.back());
            held.pop_back();
        }
        if (round % 7 == 0) {
            ++step;
            REQUIRE(of.fences->begin(step, of.stream) == KV_OK);
            REQUIRE(of.fences->record(step) == KV_OK);
        }
        if (random() % 5 == 0) of.fake.run_all();
        REQUIRE(of.fences->poll() == KV_OK);
        of.arena->collect();
        for (const block_id id : held) {
            const uint32_t bytes = blocks.block_bytes(blocks.class_of(id));
            const std::byte* start = block_address(blocks.arena(), id);
            REQUIRE(of.fake.is_mapped(reinterpret_cast<device_pointer>(start), bytes));
        }
        REQUIRE(of.arena->mapped_bytes() >= blocks.resident_slabs() * slab_bytes);
        REQUIRE(of.arena->mapped_bytes() == of.fake.physical_bytes());
        most = std::max(most, of.arena->mapped_bytes());
    }
    CHECK(most > 8 * slab_bytes);
    for (const block_id id : held) (void)blocks.drop(id, 0, clock);
    of.fake.run_all();
    REQUIRE(of.fences->poll() == KV_OK);
    of.arena->collect();
    CHECK(of.fake.physical_bytes() == blocks.resident_slabs() * slab_bytes);
    CHECK(blocks.resident_slabs() <= kept_resident_slabs);
    of.end();
}
