// The rule of sized structs, on one with fields of its own.
#include "base/sized_struct.hpp"

#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <vector>

using namespace kvrt;

namespace {

struct sample {
    uint32_t struct_size, flags;
    const void* next;
    uint64_t first;
    uint32_t second, third;
};
static_assert(sizeof(sample) == 32);

sample good() { return {sizeof(sample), 0, nullptr, 1, 2, 3}; }

/// A struct of `size` bytes that begins with `value`, its tail filled with `tail`.
std::vector<uint64_t> sized(const sample& value, uint32_t size, unsigned char tail = 0) {
    std::vector<uint64_t> words(16, 0);
    unsigned char* bytes = reinterpret_cast<unsigned char*>(words.data());
    std::memset(bytes, tail, 128);
    std::memcpy(bytes, &value, sizeof value);
    std::memcpy(bytes, &size, sizeof size);
    return words;
}

const sample* as_sample(const std::vector<uint64_t>& words) {
    return reinterpret_cast<const sample*>(words.data());
}

TEST_CASE("adopting: what is missing is zero, what is unknown must be") {
    sample local;
    for (const uint32_t size : {16u, 24u, 28u, 32u}) {
        CAPTURE(size);
        std::memset(static_cast<void*>(&local), 0xee, sizeof local);
        const std::vector<uint64_t> words = sized(good(), size, 0xff);
        REQUIRE(adopt(as_sample(words), 0, "sample", local) == KV_OK);
        CHECK(local.struct_size == size);
        CHECK(local.first == (size >= 24 ? 1u : 0u));
        CHECK(local.second == (size >= 28 ? 2u : 0u));
        CHECK(local.third == (size == 32 ? 3u : 0u));
    }
    for (const uint32_t size : {33u, 64u, 128u}) {
        REQUIRE(adopt(as_sample(sized(good(), size)), 0, "sample", local) == KV_OK);
        CHECK(local.third == 3);
        CHECK(adopt(as_sample(sized(good(), size, 1)), 0, "sample", local) == KV_UNSUPPORTED);
        CHECK(std::string(message_buffer()).find("byte 32") != std::string::npos);
    }
}

TEST_CASE("adopting: wrong sizes, chains and flags") {
    sample local;
    const sample* volatile nothing = nullptr;  // the compiler must not look through it
    CHECK(adopt<sample>(nothing, 0, "sample", local) == KV_INVALID);
    for (const uint32_t size : {0u, 15u, max_struct_size + 1, UINT32_MAX}) {
        CHECK(adopt(as_sample(sized(good(), size)), 0, "sample", local) == KV_INVALID);
        CHECK(std::string(message_buffer()).find("KV_INIT") != std::string::npos);
    }
    sample chained = good();
    chained.next = &chained;
    CHECK(adopt(&chained, 0, "sample", local) == KV_UNSUPPORTED);
    sample flagged = good();
    flagged.flags = 5;
    CHECK(adopt(&flagged, 5, "sample", local) == KV_OK);
    CHECK(local.flags == 5);
    CHECK(adopt(&flagged, 4, "sample", local) == KV_UNSUPPORTED);
    CHECK(std::string(message_buffer()).find("0x1 ") != std::string::npos);
}

TEST_CASE("delivering fills up to the caller's size and keeps its header") {
    for (const uint32_t size : {16u, 24u, 28u, 32u, 40u, 128u}) {
        CAPTURE(size);
        sample empty = good();
        empty.flags = 9;
        empty.first = 77;
        std::vector<uint64_t> words = sized(empty, size, 0xee);
        deliver(good(), reinterpret_cast<sample*>(words.data()));
        const sample* filled = as_sample(words);
        const unsigned char* bytes = reinterpret_cast<const unsigned char*>(words.data());
        CHECK(filled->struct_size == size);
        CHECK(filled->flags == 9);
        CHECK(filled->first == (size >= 24 ? 1u : 77u));
        for (uint32_t at = 32; at < size; ++at) CHECK(bytes[at] == 0);
        for (uint32_t at = std::max(size, 32u); at < 128; ++at) CHECK(bytes[at] == 0xee);
    }
}

}  // namespace
