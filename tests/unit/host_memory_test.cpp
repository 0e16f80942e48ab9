// Host memory: alignment, contents, accounting, refusals.
#include "base/host_memory.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <string>

using namespace kvrt;

namespace {

TEST_CASE("arrays are aligned, zeroed when asked, and counted") {
    host_allocator allocator;
    {
        host_array<uint16_t> array;
        REQUIRE(array.allocate(allocator, 1001, "numbers") == KV_OK);
        CHECK(array.size() == 1001);
        CHECK(reinterpret_cast<uintptr_t>(array.data()) % 64 == 0);
        CHECK(std::all_of(array.begin(), array.end(), [](uint16_t v) { return v == 0; }));
        CHECK(allocator.allocations == 1);
        CHECK(allocator.live_bytes == 2002);

        host_array<uint16_t> moved = std::move(array);
        CHECK(moved.size() == 1001);
        CHECK(allocator.live_bytes == 2002);

        host_array<double> raw;
        REQUIRE(raw.allocate(allocator, 3, "numbers", memory_contents::undefined) == KV_OK);
        CHECK(allocator.live_bytes == 2002 + 24);

        host_array<double> none;
        REQUIRE(none.allocate(allocator, 0, "nothing") == KV_OK);
        CHECK(none.size() == 0);
        CHECK(none.begin() == none.end());
        CHECK(allocator.allocations == 2);
    }
    CHECK(allocator.live_bytes == 0);
}

TEST_CASE("sizes that do not fit are refused by name") {
    host_allocator allocator;
    host_array<uint64_t> array;
    for (const uint64_t count : {UINT64_MAX, UINT64_MAX / 8 + 2, uint64_t{1} << 44}) {
        CHECK(array.allocate(allocator, count, "slot positions") == KV_TOO_LARGE);
        CHECK(std::string(message_buffer()).find("slot positions") != std::string::npos);
    }
    CHECK(array.size() == 0);
    CHECK(allocator.allocations == 0);
}

TEST_CASE("the host's hooks get size and alignment both times; a refusal counts as nothing") {
    struct record {
        std::size_t bytes = 0, alignment = 0, released = 0;
        bool refuses = false;
    } seen;
    host_allocator allocator;
    allocator.user = &seen;
    allocator.allocate = [](void* user, std::size_t bytes, std::size_t alignment) -> void* {
        record& self = *static_cast<record*>(user);
        if (self.refuses) return nullptr;
        self.bytes = bytes;
        self.alignment = alignment;
        void* memory = std::aligned_alloc(alignment, (bytes + 63) / 64 * 64);
        std::memset(memory, 0xcc, bytes);
        return memory;
    };
    allocator.release = [](void* user, void* memory, std::size_t bytes, std::size_t alignment) {
        record& self = *static_cast<record*>(user);
        CHECK(bytes == self.bytes);
        CHECK(alignment == self.alignment);
        ++self.released;
        std::free(memory);
    };
    {
        host_array<uint32_t> array;
        REQUIRE(array.allocate(allocator, 100, "numbers") == KV_OK);
        CHECK(seen.bytes == 400);
        CHECK(seen.alignment == 64);
        CHECK(std::all_of(array.begin(), array.end(), [](uint32_t v) { return v == 0; }));
    }
    CHECK(seen.released == 1);
    seen.refuses = true;
    host_array<uint32_t> array;
    CHECK(array.allocate(allocator, 100, "block tables") == KV_NO_MEMORY);
    CHECK(std::string(message_buffer()).find("block tables") != std::string::npos);
    CHECK(allocator.live_bytes == 0);
    CHECK(allocator.allocations == 1);
}

TEST_CASE("checked arithmetic") {
    uint64_t out = 0;
    CHECK(checked_multiply(UINT64_MAX, 1, out));
    CHECK(out == UINT64_MAX);
    CHECK_FALSE(checked_multiply(uint64_t{1} << 32, uint64_t{1} << 32, out));
    CHECK(checked_add(UINT64_MAX - 1, 1, out));
    CHECK_FALSE(checked_add(UINT64_MAX, 1, out));
    CHECK(ceil_divide(0u, 16u) == 0);
    CHECK(ceil_divide(1u, 16u) == 1);
    CHECK(ceil_divide(16u, 16u) == 1);
    CHECK(ceil_divide(UINT32_MAX, 16u) == (1u << 28));
    CHECK(round_up(65u, 64u) == 128);
    CHECK(round_up(0u, 64u) == 0);
}

}  // namespace
