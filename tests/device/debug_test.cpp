// KV_POOL_DEBUG on the device: blocks are filled while no step uses them, whatever is late, and
// what lies behind them is looked at by kv_pool_check.
#include "twin_cases.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

namespace {

std::unique_ptr<twin_model> two_layers() {
    auto made = std::make_unique<twin_model>();
    made->add(KV_FORMAT_F16, KV_FORMAT_F16);
    made->add(KV_FORMAT_INT8_TOKEN, KV_FORMAT_INT4_TOKEN);
    return made;
}

/// A sequence of one block in each lane, whose leading slots are written.
struct one_block {
    static constexpr uint32_t tokens = 5;
    twin_pools pools{KV_POOL_DEBUG, two_layers()};
    twin_sequence sequence = pools.create();
    const tile_layout* layout = nullptr;
    device_pointer block = 0;

    one_block() {
        pools.step({{&sequence, tokens, tokens}}, true);
        pools.host.fake.run_all();
        cache& store = pools.pools[0]->store;
        const lane_state& state = store.sequences.find(sequence.of[0])->lanes[0];
        layout = &store.model.lanes[0].layout;
        block = reinterpret_cast<device_pointer>(store.blocks.arena()) +
                uint64_t{state.table[0]} * block_unit;
    }
    uint8_t* bytes(uint64_t offset, uint64_t count) {
        uint8_t* const found = pools.host.fake.memory_of<uint8_t>(block + offset, count);
        REQUIRE(found != nullptr);
        return found;
    }
    bool filled(uint32_t slot) {
        for (const operand_layout* operand : {&layout->keys, &layout->values}) {
            for (uint32_t word = 0; word < operand->words; ++word) {
                const uint8_t* const at =
                    bytes(static_cast<uint64_t>(operand->at(slot, 1, word)), operand->word_bytes);
                const auto is_ones = [](uint8_t byte) { return byte == 0xff; };
                if (!std::all_of(at, at + operand->word_bytes, is_ones)) return false;
            }
        }
        return true;
    }
};

}  // namespace

TEST_CASE("debug pools on the device do what those on the CPU do, and their guards stay") {
    twin_pools pools(KV_POOL_DEBUG | KV_POOL_ELASTIC, two_layers());
    drive(pools, 7);
    CHECK(pools.differences == 0);
    CHECK(pools.compared_words > 1000);
    for (kv_pool* pool : pools.pools) CHECK(kv_pool_check(pool) == KV_OK);
}

TEST_CASE("fresh blocks are NaN but for what is written, and freed ones all over") {
    one_block of;
    for (uint32_t slot = 0; slot < 16; ++slot) {
        CAPTURE(slot);
        CHECK(of.filled(slot) == (slot >= one_block::tokens));
    }
    of.pools.release(of.sequence);
    of.pools.host.fake.run_all();
    twin_sequence other = of.pools.create();
    kv_step* steps[2];
    of.pools.begin({{&other, 1, 1}}, steps);  // asks the device how far it is
    of.pools.cancel(steps);
    of.pools.host.fake.run_all();
    CHECK(of.filled(0));
}

TEST_CASE("what is written behind a block is found by kv_pool_check") {
    one_block of;
    CHECK(kv_pool_check(of.pools.pools[0]) == KV_OK);
    of.bytes(of.layout->block_bytes, guard_bytes)[guard_bytes - 1] = 0;
    CHECK(kv_pool_check(of.pools.pools[0]) == KV_INTERNAL);
    CHECK(message_has("behind block"));
}

TEST_CASE("a block that cannot be filled is told by the next call that needs the device") {
    one_block of;
    twin_sequence other = of.pools.create();
    kv_step* step = nullptr;
    REQUIRE(kv_step_begin(of.pools.pools[0], &step) == KV_OK);
    REQUIRE(kv_cuda_step_use_stream(step, as_stream(of.pools.host.stream)) == KV_OK);
    REQUIRE(kv_seq_append(step, other.of[0], nullptr, 1, nullptr) == KV_OK);
    of.pools.host.fake.inject("cuMemsetD8Async", error_out_of_memory, 0);
    CHECK(kv_step_reserve(step, nullptr) == KV_NO_MEMORY);
    CHECK(message_has("KV_POOL_DEBUG"));
    CHECK(message_has("cuMemsetD8Async"));
    CHECK(message_has("CUDA_ERROR_OUT_OF_MEMORY"));
    REQUIRE(kv_step_cancel(step) == KV_OK);
}
