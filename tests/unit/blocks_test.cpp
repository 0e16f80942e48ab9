// Blocks: order of ids, slabs shared by classes, fences, accounting, guards, elastic slabs. A
// device of the test's own records what the store asks for.
#include "memory/blocks.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

using namespace kvrt;

namespace {

class recording_memory final : public device_memory {
  public:
    bool refuses = false;
    std::vector<uint64_t> committed, given_back;  // offsets

    status reserve(uint64_t bytes, uint64_t alignment, std::byte** out_base) override {
        memory_.resize(bytes + alignment);
        const uint64_t start = reinterpret_cast<uint64_t>(memory_.data());
        base_ = memory_.data() + (alignment - start % alignment) % alignment;
        *out_base = base_;
        return KV_OK;
    }
    status commit(uint64_t offset, uint64_t bytes) override {
        CHECK(bytes == slab_bytes);
        if (refuses) return fail(KV_DEVICE, "no memory");
        committed.push_back(offset);
        return KV_OK;
    }
    void give_back(uint64_t offset, uint64_t bytes) override {
        CHECK(bytes == slab_bytes);
        given_back.push_back(offset);
        std::memset(base_ + offset, 0, bytes);
    }

  private:
    std::vector<std::byte> memory_;
    std::byte* base_ = nullptr;
};

struct world {
    host_allocator allocator;
    recording_memory memory;
    block_store blocks;
    fence_clock clock;

    world(uint64_t slabs, std::vector<uint32_t> sizes, bool elastic = false, bool debug = false) {
        std::vector<block_store::class_description> classes;
        for (const uint32_t size : sizes) classes.push_back({size, 16});
        REQUIRE(blocks.create(allocator, memory, {slabs, elastic, debug}, classes.data(),
                              static_cast<uint32_t>(classes.size())) == KV_OK);
    }

    void check() const { CHECK(blocks.check(nullptr) == KV_OK); }
    bool drop(block_id id, uint64_t fence = 0) { return blocks.drop(id, fence, clock); }
};

TEST_CASE("ids ascend within a slab, for every number of blocks a slab can hold") {
    for (const uint32_t per_slab : {1u, 2u, 3u, 63u, 64u, 65u, 127u, 128u, 341u, 992u, 1024u}) {
        CAPTURE(per_slab);
        const uint32_t units = units_per_slab / per_slab;
        world w(2, {units * block_unit});
        REQUIRE(w.blocks.blocks_per_slab(0) == per_slab);
        for (uint32_t slab = 0; slab < 2; ++slab) {
            for (uint32_t i = 0; i < per_slab; ++i) {
                REQUIRE(w.blocks.allocate(0) == slab * units_per_slab + i * units);
            }
        }
        CHECK(w.blocks.allocate(0) == no_block);
        w.check();
        CHECK(w.blocks.counters(0).pinned == 2 * per_slab);
        CHECK(w.blocks.counters(0).free == 0);
        CHECK(w.blocks.free_slabs() == 0);

        // Holes of a slab are filled from the front.
        std::vector<uint32_t> holes;
        for (uint32_t i = 0; i < per_slab; i += 3) holes.push_back(units_per_slab + i * units);
        if (holes.size() == per_slab) holes.clear();  // the slab would be empty and go back
        std::vector<uint32_t> order = holes;
        std::shuffle(order.begin(), order.end(), std::mt19937(per_slab));
        for (const block_id id : order) CHECK(w.drop(id));
        w.check();
        for (const block_id id : holes) CHECK(w.blocks.allocate(0) == id);
        CHECK(w.blocks.allocate(0) == no_block);
        for (uint32_t slab = 0; slab < 2; ++slab) {
            for (uint32_t i = per_slab; i-- > 0;) w.drop(slab * units_per_slab + i * units);
        }
        w.check();
        CHECK(w.blocks.free_slabs() == 2);
        CHECK(w.blocks.counters(0).total == 0);
    }
}

TEST_CASE("numbering: the same as a division, for every size of block and place in a slab") {
    uint64_t wrong = 0;
    for (uint32_t units = 1; units <= units_per_slab; ++units) {
        const block_numbering numbering(units);
        const uint32_t step = units < 64 ? 1 : 61;
        for (uint32_t place = 0; place < units_per_slab; place += step) {
            wrong += numbering.in_slab(5 * units_per_slab + place) == place / units ? 0 : 1;
        }
        wrong += numbering.in_slab(units - 1) == 0 && numbering.in_slab(units % units_per_slab) ==
                                                          (units == units_per_slab ? 0u : 1u)
                     ? 0
                     : 1;
    }
    CHECK(wrong == 0);
    CHECK(block_numbering(100).index(3 * units_per_slab + 700) == 3 * 327 + 7);
}

TEST_CASE("an empty slab serves another class") {
    world w(2, {4096, 8192});
    std::vector<block_id> small;
    for (uint32_t i = 0; i < 2 * 512; ++i) small.push_back(w.blocks.allocate(0));
    CHECK(w.blocks.allocate(1) == no_block);
    const uint64_t one_large[2] = {0, 1};
    CHECK_FALSE(w.blocks.can_allocate(one_large, false));
    CHECK(w.blocks.could_ever_allocate(one_large));
    for (uint32_t i = 0; i < 511; ++i) w.drop(small[i]);
    CHECK(w.blocks.allocate(1) == no_block);
    CHECK(w.blocks.free_bytes(false) == 511 * 4096);
    w.drop(small[511]);
    CHECK(w.blocks.free_bytes(false) == slab_bytes);
    CHECK(w.blocks.can_allocate(one_large, false));
    CHECK(w.blocks.allocate(1) == 0);
    CHECK(w.blocks.counters(1).free == 255);
    CHECK(w.blocks.counters(0).total == 512);
    CHECK(w.blocks.counters(1).total == 256);
    w.check();
}

TEST_CASE("what can be allocated counts whole slabs of each class") {
    world w(3, {4096, 8192});
    const auto fits = [&](uint64_t a, uint64_t b) {
        const uint64_t needed[2] = {a, b};
        const bool now = w.blocks.can_allocate(needed, false);
        CHECK(w.blocks.could_ever_allocate(needed) == now);
        return now;
    };
    CHECK(fits(0, 0));
    CHECK(fits(3 * 512, 0));
    CHECK_FALSE(fits(3 * 512 + 1, 0));
    CHECK(fits(512, 512));
    CHECK(fits(1, 512));
    CHECK_FALSE(fits(513, 257));
    CHECK_FALSE(fits(UINT64_MAX, UINT64_MAX));
}

TEST_CASE("a block with several readers returns with the last") {
    world w(1, {4096});
    const block_id id = w.blocks.allocate(0);
    w.blocks.retain(id);
    w.blocks.retain(id);
    CHECK(w.blocks.references(id) == 3);
    CHECK_FALSE(w.drop(id));
    CHECK_FALSE(w.drop(id));
    CHECK(w.blocks.totals().returned == 0);
    CHECK(w.drop(id));
    CHECK(w.blocks.totals().returned == 1);
    CHECK(w.blocks.totals().returned_bytes == 4096);
    CHECK(w.blocks.totals().pinned_bytes == 0);
    CHECK(w.blocks.totals().peak_pinned == 1);
    w.check();
}

TEST_CASE("a block waits for the last step of all its readers") {
    world w(1, {slab_bytes / 2});
    const block_id mine = w.blocks.allocate(0);
    const block_id shared = w.blocks.allocate(0);
    w.blocks.retain(shared);
    w.clock.open = {5, 6};
    CHECK_FALSE(w.drop(shared, 6));
    CHECK(w.drop(shared, 5));  // the reader of step 6 let go first
    CHECK(w.drop(mine, 5));
    CHECK(w.blocks.counters(0).parked == 2);
    CHECK(w.blocks.counters(0).pinned == 0);
    CHECK(w.blocks.allocate(0) == no_block);
    const uint64_t one[1] = {1};
    CHECK_FALSE(w.blocks.can_allocate(one, false));
    CHECK(w.blocks.can_allocate(one, true));
    CHECK(w.blocks.free_bytes(false) == 0);
    CHECK(w.blocks.free_bytes(true) == slab_bytes);
    w.check();

    w.clock.open = {0, 6};
    w.blocks.collect(w.clock);
    CHECK(w.blocks.counters(0).parked == 1);
    CHECK(w.blocks.allocate(0) == mine);
    CHECK(w.blocks.allocate(0) == no_block);
    w.clock.open = {0, 0};
    w.blocks.collect(w.clock);
    CHECK(w.blocks.allocate(0) == shared);
    w.check();
}

TEST_CASE("an earlier step may end after a later one, and blocks come back in that order") {
    world w(1, {slab_bytes / 4});
    block_id ids[3];
    for (block_id& id : ids) id = w.blocks.allocate(0);
    w.clock.open = {7, 8};
    w.drop(ids[0], 7);
    w.drop(ids[1], 8);
    w.drop(ids[2], 7);
    w.clock.open = {7, 0};
    w.blocks.collect(w.clock);
    CHECK(w.blocks.counters(0).parked == 2);
    CHECK(w.blocks.references(ids[1]) == 0);
    CHECK(w.blocks.allocate(0) == ids[1]);
    w.check();
}

TEST_CASE("fences of the host: a block comes back when its number has passed, in any order") {
    world w(1, {slab_bytes / 4});
    w.clock.by_host = true;
    w.clock.last_begun = 9;
    w.clock.host_passed = 2;
    block_id ids[4];
    for (block_id& id : ids) id = w.blocks.allocate(0);
    CHECK(w.drop(ids[0], 2));
    CHECK(w.blocks.counters(0).free == 1);
    w.drop(ids[1], 5);
    w.drop(ids[2], 3);
    w.drop(ids[3], 4);
    CHECK(w.blocks.counters(0).parked == 3);
    w.blocks.collect(w.clock);
    CHECK(w.blocks.counters(0).parked == 3);
    w.clock.host_passed = 3;
    w.blocks.collect(w.clock);
    CHECK(w.blocks.counters(0).parked == 2);
    CHECK(w.blocks.allocate(0) == ids[0]);
    CHECK(w.blocks.allocate(0) == ids[2]);
    CHECK(w.blocks.allocate(0) == no_block);
    w.clock.host_passed = 9;
    w.blocks.collect(w.clock);
    CHECK(w.blocks.counters(0).parked == 0);
    CHECK(w.blocks.counters(0).free == 2);
    w.check();
}

TEST_CASE("a block that was taken back was never handed out") {
    world w(1, {4096});
    w.blocks.allocate(0);
    const block_counters before = w.blocks.totals();
    const block_id id = w.blocks.allocate(0);
    w.blocks.take_back(id, 0, w.clock);
    CHECK(w.blocks.totals().allocated == before.allocated);
    CHECK(w.blocks.totals().returned == before.returned);
    CHECK(w.blocks.totals().returned_bytes == before.returned_bytes);
    CHECK(w.blocks.totals().pinned == before.pinned);
    CHECK(w.blocks.allocate(0) == id);
    w.check();
}

TEST_CASE("debug: fresh and freed blocks are NaN patterns, and an overrun is found") {
    world w(1, {4096}, false, true);
    // 64 bytes of guard behind each block.
    CHECK(w.blocks.blocks_per_slab(0) == slab_bytes / (4096 + 64));
    const block_id first = w.blocks.allocate(0);
    const block_id second = w.blocks.allocate(0);
    CHECK((second - first) * block_unit == 4096 + 64);
    std::byte* block = block_address(w.blocks.arena(), first);
    CHECK(std::all_of(block, block + 4096, [](std::byte b) { return b == std::byte{0xff}; }));
    std::memset(block, 0, 4096);
    w.check();
    for (const uint32_t at : {0u, 63u}) {
        const std::byte kept = block[4096 + at];
        block[4096 + at] = std::byte{0};
        CHECK(w.blocks.check(nullptr) == KV_INTERNAL);
        CHECK(std::string(message_buffer()).find("overwritten") != std::string::npos);
        block[4096 + at] = kept;
        w.check();
    }
    w.drop(first);
    CHECK(std::all_of(block, block + 4096, [](std::byte b) { return b == std::byte{0xff}; }));
}

TEST_CASE("an elastic store gives back all but two empty slabs, and takes resident ones first") {
    world w(8, {slab_bytes}, true);
    block_id ids[8];
    for (block_id& id : ids) id = w.blocks.allocate(0);
    CHECK(w.memory.committed.size() == 8);
    CHECK(w.blocks.resident_slabs() == 8);
    for (const block_id id : ids) w.drop(id);
    CHECK(w.memory.given_back.size() == 6);
    CHECK(w.blocks.totals().slabs_given_back == 6);
    CHECK(w.blocks.resident_slabs() == 2);
    CHECK(w.blocks.free_slabs() == 8);
    w.check();
    CHECK(w.blocks.allocate(0) != no_block);
    CHECK(w.blocks.allocate(0) != no_block);
    CHECK(w.memory.committed.size() == 8);
    CHECK(w.blocks.allocate(0) != no_block);
    CHECK(w.memory.committed.size() == 9);
    CHECK(w.blocks.resident_slabs() == 3);
    w.check();
}

TEST_CASE("a plain store keeps its slabs") {
    world w(4, {slab_bytes});
    block_id ids[4];
    for (block_id& id : ids) id = w.blocks.allocate(0);
    for (const block_id id : ids) w.drop(id);
    CHECK(w.memory.given_back.empty());
    CHECK(w.blocks.resident_slabs() == 4);
}

TEST_CASE("a device without memory refuses the slab, and nothing has changed") {
    world w(2, {4096});
    w.memory.refuses = true;
    CHECK(w.blocks.allocate(0) == no_block);
    CHECK(w.blocks.free_slabs() == 2);
    CHECK(w.blocks.counters(0).total == 0);
    w.check();
    w.memory.refuses = false;
    CHECK(w.blocks.allocate(0) == 0);
    w.check();
}

TEST_CASE("creation names what the allocator refused") {
    for (uint64_t allowed = 0;; ++allowed) {
        struct budget {
            uint64_t left;
        } left{allowed};
        host_allocator allocator;
        allocator.user = &left;
        allocator.allocate = [](void* user, std::size_t bytes, std::size_t alignment) -> void* {
            budget& self = *static_cast<budget*>(user);
            if (self.left == 0) return nullptr;
            --self.left;
            return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
        };
        allocator.release = [](void*, void* memory, std::size_t, std::size_t) {
            std::free(memory);
        };
        recording_memory memory;
        block_store blocks;
        const block_store::class_description one{4096, 16};
        const status verdict = blocks.create(allocator, memory, {1, false, false}, &one, 1);
        if (verdict == KV_OK) {
            CHECK(allowed == 3);
            break;
        }
        CHECK(verdict == KV_NO_MEMORY);
        CHECK(std::string(message_buffer()).find("refused") != std::string::npos);
        REQUIRE(allowed < 3);
    }
}

// The same operations on a plain map beside the store: every count is kept twice.
TEST_CASE("random operations add up") {
    world w(6, {4096, 12288, 65536}, true, true);
    struct shadow {
        uint32_t class_index = 0;
        uint32_t references = 0;
        uint64_t fence = 0;
    };
    std::map<block_id, shadow> pinned, parked;
    std::mt19937 random(7);
    uint64_t allocated = 0;
    uint64_t returned = 0;
    const auto draw = [&](uint64_t below) { return static_cast<uint32_t>(random() % below); };
    const auto pick = [&](std::map<block_id, shadow>& from) {
        return std::next(from.begin(), draw(from.size()));
    };
    const auto collect = [&] {
        w.blocks.collect(w.clock);
        for (auto at = parked.begin(); at != parked.end();) {
            at = w.clock.passed(at->second.fence) ? parked.erase(at) : std::next(at);
        }
    };
    for (int i = 0; i < 60000; ++i) {
        const uint32_t verb = draw(100);
        if (verb < 45) {
            const uint32_t c = draw(3);
            uint64_t needed[3] = {};
            needed[c] = 1;
            const bool fits = w.blocks.can_allocate(needed, false);
            const block_id id = w.blocks.allocate(c);
            REQUIRE((id != no_block) == fits);
            if (!fits) continue;
            REQUIRE(pinned.count(id) + parked.count(id) == 0);
            pinned[id] = {c, 1, 0};
            ++allocated;
        } else if (verb < 50 && !pinned.empty()) {
            const auto at = pick(pinned);
            w.blocks.retain(at->first);
            ++at->second.references;
        } else if (verb < 96 && !pinned.empty()) {
            const auto at = pick(pinned);
            shadow& block = at->second;
            const uint64_t fence = draw(static_cast<uint32_t>(w.clock.last_begun) + 1);
            block.fence = std::max(block.fence, fence);
            const bool last = --block.references == 0;
            REQUIRE(w.blocks.drop(at->first, fence, w.clock) == last);
            if (!last) continue;
            ++returned;
            if (!w.clock.passed(block.fence)) parked.insert(*at);
            pinned.erase(at);
        } else {
            // A step begins or ends.
            uint64_t& open = w.clock.open[draw(2)];
            open = open != 0 ? 0 : ++w.clock.last_begun;
            collect();
        }
        if (i % 500 != 0) continue;
        w.check();
        uint64_t pinned_in[3] = {}, parked_in[3] = {}, bytes = 0;
        for (const auto& [id, block] : pinned) {
            ++pinned_in[block.class_index];
            bytes += w.blocks.block_bytes(block.class_index);
            REQUIRE(w.blocks.references(id) == block.references);
        }
        for (const auto& [id, block] : parked) ++parked_in[block.class_index];
        uint64_t slabs = 0;
        for (uint32_t c = 0; c < 3; ++c) {
            const class_counters& counters = w.blocks.counters(c);
            CHECK(counters.pinned == pinned_in[c]);
            CHECK(counters.parked == parked_in[c]);
            CHECK(counters.total == counters.slabs * w.blocks.blocks_per_slab(c));
            CHECK(counters.free == counters.total - pinned_in[c] - parked_in[c]);
            slabs += counters.slabs;
        }
        CHECK(w.blocks.free_slabs() == 6 - slabs);
        CHECK(w.blocks.totals().allocated == allocated);
        CHECK(w.blocks.totals().returned == returned);
        CHECK(w.blocks.totals().pinned_bytes == bytes);
        CHECK(w.blocks.totals().pinned == pinned.size());
        CHECK(w.memory.committed.size() - w.memory.given_back.size() == w.blocks.resident_slabs());
    }
}

}  // namespace
