// What a step costs besides attention, and what a block costs:
//
//   step bookkeeping layers=32 sequences=64 ns_per_sequence=... us_per_step=...
//   step bookkeeping_with_blocks ...      the same, all sequences at the edge of a block
//   block allocate_free pattern=... ns=...
//
// A decode step through the public calls: begin, an append per sequence, reserve, end. Marking the
// layers as written by the host (an export without buffers for each) is not in the time.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <vector>

#include "device/cpu_memory.hpp"
#include "kvrt/kvrt.h"
#include "memory/blocks.hpp"

using namespace kvrt;

namespace {

constexpr uint32_t layers = 32, sequences = 64, block_tokens = 128;
constexpr uint32_t piece = 4096;  ///< blocks that are timed together

using clock_type = std::chrono::steady_clock;

double nanoseconds(clock_type::duration time) {
    return std::chrono::duration<double, std::nano>(time).count();
}

double median(std::vector<double> times) {
    std::nth_element(times.begin(), times.begin() + static_cast<long>(times.size() / 2),
                     times.end());
    return times[times.size() / 2];
}

void check(kv_status status) {
    if (status >= 0) return;
    char message[256];
    kv_last_error(message, sizeof message);
    fmt::print(stderr, "{}: {}\n", kv_status_name(status), message);
    std::exit(1);
}

kv_pool* create_pool() {
    std::vector<kv_layer> description(layers, KV_INIT(kv_layer));
    for (kv_layer& layer : description) {
        layer.query_heads = 8;
        layer.kv_heads = 2;
        layer.key_dim = 64;
    }
    kv_model model = KV_INIT(kv_model);
    model.layers = description.data();
    model.layer_count = layers;
    kv_pool_config config = KV_INIT(kv_pool_config);
    config.arena_bytes = uint64_t{16} << 30;  // address space; nothing is written to it
    config.block_tokens = block_tokens;
    config.max_sequences = sequences;
    config.max_tokens_per_sequence = 8192;
    config.threads = 1;
    kv_pool* pool = nullptr;
    check(kv_pool_create(&config, &model, &pool));
    return pool;
}

/// One decode step of all sequences; returns its bookkeeping in nanoseconds.
double run_step(kv_pool* pool, const std::vector<kv_seq>& batch) {
    const auto start = clock_type::now();
    kv_step* step = nullptr;
    check(kv_step_begin(pool, &step));
    for (const kv_seq seq : batch) check(kv_seq_append(step, seq, nullptr, 1, nullptr));
    check(kv_step_reserve(step, nullptr));
    const auto reserved = clock_type::now();
    kv_tables tables = KV_INIT(kv_tables);
    for (uint32_t layer = 0; layer < layers; ++layer) check(kv_step_export(step, layer, &tables));
    const auto written = clock_type::now();
    check(kv_step_end(step, nullptr));
    return nanoseconds(reserved - start) + nanoseconds(clock_type::now() - written);
}

void print_step(const char* name, double per_step) {
    fmt::print("step {} layers={} sequences={} ns_per_sequence={:.1f} us_per_step={:.2f}\n", name,
               layers, sequences, per_step / sequences, per_step / 1000);
}

void measure_steps() {
    kv_pool* pool = create_pool();
    std::vector<kv_seq> batch(sequences);
    for (kv_seq& seq : batch) check(kv_seq_create(pool, nullptr, &seq));
    std::vector<double> inside, crossing;
    for (int block = 0; block < 60; ++block) {
        for (uint32_t token = 0; token < block_tokens; ++token) {
            const double time = run_step(pool, batch);
            if (block >= 4) (token == 0 ? crossing : inside).push_back(time);
        }
    }
    print_step("bookkeeping", median(inside));
    print_step("bookkeeping_with_blocks", median(crossing));
    kv_pool_release(pool);
}

/// Allocates and frees `batch` blocks at a time; nanoseconds for one of each. Timed in short
/// pieces, so that the median leaves out those in which something else ran.
double allocate_and_free(block_store& blocks, std::vector<block_id>& batch, bool backwards) {
    constexpr int pieces = 500;
    const fence_clock none;
    std::vector<double> times;
    for (int i = 0; i < pieces; ++i) {
        const auto start = clock_type::now();
        for (uint32_t done = 0; done < piece; done += static_cast<uint32_t>(batch.size())) {
            for (block_id& id : batch) id = blocks.allocate(0);
            if (backwards) std::reverse(batch.begin(), batch.end());
            for (const block_id id : batch) blocks.drop(id, 0, none);
        }
        times.push_back(nanoseconds(clock_type::now() - start) / piece);
    }
    return median(times);
}

void measure_blocks() {
    host_allocator allocator;
    cpu_memory memory;
    block_store blocks;
    const block_store::class_description one{65536, 128};
    check(blocks.create(allocator, memory, {4096, false, false}, &one, 1));
    const block_id held = blocks.allocate(0);  // so that its slab stays
    std::vector<block_id> single(1), many(piece);
    fmt::print("block allocate_free pattern=one_at_a_time ns={:.1f}\n",
               allocate_and_free(blocks, single, false));
    fmt::print("block allocate_free pattern=4096_in_order ns={:.1f}\n",
               allocate_and_free(blocks, many, false));
    fmt::print("block allocate_free pattern=4096_backwards ns={:.1f}\n",
               allocate_and_free(blocks, many, true));
    blocks.drop(held, 0, fence_clock());
}

}  // namespace

int main() {
    measure_steps();
    measure_blocks();
    return 0;
}
