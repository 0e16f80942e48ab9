// Attention against what the machine can do, all measured in turn in one run:
//
//   attend decode f16 kv=16384 order=adjacent threads=1 us=... gbps=... fraction=... of_blocks=...
//   attend prefill bf16 rows=512 kv=4096 threads=2 us=... gflops=... peak=...
//   attend by_slot f16 rows=1 kv=4096 threads=1 us=... of_plain=...
//
// fraction   share of the best sequential read (1 or 4 streams per thread)
// of_blocks  share of the rate at which the same blocks are merely read (xor) through the same
//            tables, with the same prefetch
// peak       share of the machine's f32 multiply-add peak; 4 * heads * dim * rows * kv operations
//            are counted, no causal half is credited
// of_plain   time with keys that attention turns by slots (KV_LAYER_CACHE_POSITIONS), over that
//            with keys as it uses them, of the same format, measured in turn; least to greatest
//            of the repetitions behind it
//
// 8 KV heads of 128 dimensions, 4 query heads each, blocks of 16 tokens. Sequences together hold
// 512 MiB or more and are taken in turn, so that keys and values come from memory, not from caches.
// A word on the command line (decode, prefill, by_slot) leaves the other lines out.
#include <fmt/format.h>
#include <sys/mman.h>

#include "base/simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "../bench/attend.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string_view>
#include <thread>
#include <vector>

#include "attention/attend.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// Xor of `bytes` bytes at each of `streams` places, a multiple of 256.
uint64_t read_streams(const std::byte* const* places, uint32_t streams, uint64_t bytes) {
    const hn::CappedTag<uint64_t, 8> d;
    constexpr uint32_t lanes = static_cast<uint32_t>(hn::MaxLanes(d));
    auto sum = hn::Zero(d), other = hn::Zero(d);
    for (uint64_t i = 0; i < bytes; i += 256) {
        for (uint32_t s = 0; s < streams; ++s) {
            const uint64_t* from = reinterpret_cast<const uint64_t*>(places[s] + i);
            for (uint32_t x = 0; x < 32; x += 2 * lanes) {
                sum = hn::Xor(sum, hn::LoadU(d, from + x));
                other = hn::Xor(other, hn::LoadU(d, from + x + lanes));
            }
        }
    }
    return hn::GetLane(hn::SumOfLanes(d, hn::Xor(sum, other)));
}

// The same over blocks, the lines of the block after next prefetched meanwhile.
uint64_t read_blocks(const std::byte* arena, const block_id* blocks, uint32_t count,
                     uint32_t bytes) {
    uint64_t sum = 0;
    for (uint32_t b = 0; b < count; ++b) {
        const std::byte* block = block_address(arena, blocks[b]);
        const std::byte* ahead = block_address(arena, blocks[b + 1 < count ? b + 1 : b]);
        for (uint32_t i = 0; i < bytes; i += 1024) {
            for (uint32_t line = 0; line < 1024; line += 64) {
                __builtin_prefetch(ahead + i + line, 0, 2);
            }
            const std::byte* place = block + i;
            sum += read_streams(&place, 1, 1024);
        }
    }
    return sum;
}

// Multiply-adds: 24 chains of vectors, `rounds` times; returns floating-point operations.
double multiply_add(uint64_t rounds, float* out) {
    const hn::CappedTag<float, 16> d;
    constexpr uint32_t chains = hn::MaxLanes(hn::CappedTag<float, 16>()) == 16 ? 24 : 12;
    hn::Vec<decltype(d)> sums[chains];
    for (uint32_t c = 0; c < chains; ++c) sums[c] = hn::Set(d, static_cast<float>(c));
    const auto a = hn::Set(d, 0.999f), b = hn::Set(d, 0.001f);
    for (uint64_t r = 0; r < rounds; ++r) {
        HWY_UNROLL(24)
        for (uint32_t c = 0; c < chains; ++c) sums[c] = hn::MulAdd(sums[c], a, b);
    }
    auto total = sums[0];
    for (uint32_t c = 1; c < chains; ++c) total = hn::Add(total, sums[c]);
    *out += hn::GetLane(hn::SumOfLanes(d, total));
    return 2.0 * static_cast<double>(rounds) * chains * static_cast<double>(hn::Lanes(d));
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvrt {
namespace {

HWY_EXPORT(read_streams);
HWY_EXPORT(read_blocks);
HWY_EXPORT(multiply_add);

constexpr uint32_t kv_heads = 8, query_heads = 32, dim = 128, block_tokens = 16;
constexpr uint64_t cold_bytes = uint64_t{768} << 20;
constexpr int repetitions = 9;

volatile uint64_t sink;

template <class callable>
double seconds(const callable& body) {
    const auto start = std::chrono::steady_clock::now();
    body();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

/// Memory on huge pages, filled with small 16-bit numbers of either format.
struct arena_pages {
    explicit arena_pages(uint64_t bytes) {
        void* memory =
            mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) {
            fmt::print(stderr, "no memory for {} bytes\n", bytes);
            std::exit(1);
        }
        madvise(memory, bytes, MADV_HUGEPAGE);
        auto* words = static_cast<uint16_t*>(memory);
        std::mt19937 random(1);
        for (uint64_t i = 0; i < bytes / 2; ++i) {
            words[i] = static_cast<uint16_t>(0x3000u + (random() & 0x81ffu));
        }
        base = static_cast<std::byte*>(memory);
    }
    std::byte* base;
};

struct machine {
    executor threads;
    uint32_t count;
    double read_gbps = 0, flops = 0;
};

/// Best of one and four streams per thread.
double measure_read(machine& on, const arena_pages& pages) {
    double best = 0;
    for (const uint32_t streams : {1u, 4u}) {
        std::vector<double> times;
        const uint64_t each = cold_bytes / on.count / streams / 4096 * 4096;
        for (int r = 0; r < repetitions; ++r) {
            times.push_back(seconds([&] {
                on.threads.for_each(on.count, [&](uint32_t t) {
                    const std::byte* places[4];
                    for (uint32_t s = 0; s < streams; ++s) {
                        places[s] = pages.base + (uint64_t{t} * streams + s) * each;
                    }
                    sink = HWY_DYNAMIC_DISPATCH(read_streams)(places, streams, each);
                });
            }));
        }
        best = std::max(best, static_cast<double>(each) * on.count * streams / 1e9 /
                                  *std::min_element(times.begin(), times.end()));
    }
    return best;
}

double measure_flops(machine& on) {
    double best = 0;
    for (int r = 0; r < 5; ++r) {
        std::vector<float> out(on.count * 64);
        double operations = 0;
        const double time = seconds([&] {
            on.threads.for_each(on.count, [&](uint32_t t) {
                const double mine = HWY_DYNAMIC_DISPATCH(multiply_add)(2'000'000, &out[t * 64]);
                if (t == 0) operations = mine;
            });
        });
        best = std::max(best, operations * on.count / time / 1e9);
    }
    return best;
}

attend_layer make_layer(element type) {
    attend_layer layer;
    layer.layout =
        make_tile_layout(tile_order::native, block_tokens, kv_heads, dim, dim, type, type);
    layer.query_heads = query_heads;
    layer.kv_heads = kv_heads;
    layer.scale = 0.08838835f;
    return layer;
}

struct query_rows {
    explicit query_rows(uint32_t rows) : in(uint64_t{rows} * query_heads * dim), out(in.size()) {
        std::mt19937 random(2);
        std::normal_distribution<float> normal;
        for (float& value : in) value = normal(random);
    }
    void attach(attend_call& call) {
        call.queries = {reinterpret_cast<std::byte*>(in.data()), element::f32,
                        int64_t{query_heads} * dim, dim, 1};
        call.out = {reinterpret_cast<std::byte*>(out.data()), element::f32,
                    int64_t{query_heads} * dim, dim, 1};
    }
    std::vector<float> in, out;
};

void bench_decode(machine& on, const arena_pages& pages, element type, uint32_t kv, bool random) {
    const attend_layer layer = make_layer(type);
    const uint32_t bytes = layer.layout.block_bytes;
    const uint32_t per_sequence = kv / block_tokens;
    const uint32_t sequences = static_cast<uint32_t>(cold_bytes / bytes / per_sequence);
    std::vector<block_id> blocks(sequences * per_sequence);
    for (uint32_t i = 0; i < blocks.size(); ++i) blocks[i] = i * (bytes / block_unit);
    if (random) std::shuffle(blocks.begin(), blocks.end(), std::mt19937(3));

    query_rows rows(1);
    std::vector<std::byte> workspace(attend_workspace_bytes(layer, kv));
    attend_item item;
    item.rows = 1;
    item.slots = kv;
    item.next_position = kv;
    attend_call call;
    call.layer = &layer;
    call.arena = pages.base;
    call.items = &item;
    call.item_count = 1;
    call.workspace = workspace.data();
    call.workspace_bytes = workspace.size();
    rows.attach(call);

    std::vector<double> attend_times, read_times, shares;
    for (int r = 0; r < repetitions; ++r) {
        double attending = 0, reading = 0;
        for (uint32_t s = 0; s < sequences; ++s) {
            const block_id* table = blocks.data() + s * per_sequence;
            item.blocks = table;
            attending += seconds([&] { attend(call, on.threads); });
            const block_id* other = blocks.data() + (s + sequences / 2) % sequences * per_sequence;
            reading += seconds([&] {
                constexpr uint32_t piece = 32;
                on.threads.for_each(per_sequence / piece, [&](uint32_t p) {
                    sink = HWY_DYNAMIC_DISPATCH(read_blocks)(pages.base, other + p * piece, piece,
                                                             bytes);
                });
            });
        }
        attend_times.push_back(attending / sequences);
        read_times.push_back(reading / sequences);
        shares.push_back(reading / attending);
    }
    const double time = median(attend_times);
    const double gbps = static_cast<double>(per_sequence) * bytes / 1e9 / time;
    fmt::print(
        "attend decode {} kv={} order={} threads={} us={:.0f} gbps={:.1f} fraction={:.2f} "
        "of_blocks={:.2f}\n",
        type == element::f16 ? "f16" : "bf16", kv, random ? "random" : "adjacent", on.count,
        time * 1e6, gbps, gbps / on.read_gbps, median(shares));
    std::fflush(stdout);
}

void bench_prefill(machine& on, const arena_pages& pages, element type) {
    constexpr uint32_t rows = 512, kv = 4096;
    const attend_layer layer = make_layer(type);
    std::vector<block_id> blocks(kv / block_tokens);
    for (uint32_t i = 0; i < blocks.size(); ++i) {
        blocks[i] = i * (layer.layout.block_bytes / block_unit);
    }
    query_rows queries(rows);
    std::vector<std::byte> workspace(
        std::max<uint64_t>(attend_workspace_bytes(layer, kv), 16 << 20));
    attend_item item;
    item.blocks = blocks.data();
    item.rows = rows;
    item.slots = kv;
    item.next_position = kv;
    attend_call call;
    call.layer = &layer;
    call.arena = pages.base;
    call.items = &item;
    call.item_count = 1;
    call.workspace = workspace.data();
    call.workspace_bytes = workspace.size();
    queries.attach(call);
    std::vector<double> times;
    for (int r = 0; r < repetitions; ++r) {
        times.push_back(seconds([&] { attend(call, on.threads); }));
    }
    const double time = median(times);
    // The first row sees kv - rows + 1 slots, the last all: nothing is credited for the rest.
    const double flops = 4.0 * query_heads * dim * rows * kv / time / 1e9;
    fmt::print("attend prefill {} rows={} kv={} threads={} us={:.0f} gflops={:.0f} peak={:.2f}\n",
               type == element::f16 ? "f16" : "bf16", rows, kv, on.count, time * 1e6, flops,
               flops / on.flops);
    std::fflush(stdout);
}

/// All of a head's dimensions, as KV_ROPE_HALF with theta 10000.
struct rotation_by_slots {
    rotation_by_slots() : table(turning_table_floats(dim / 2)) {
        std::vector<double> frequencies(dim / 2);
        for (uint32_t b = 0; b < dim / 2; ++b) frequencies[b] = std::pow(10000.0, -2.0 * b / dim);
        fill_turning_table(frequencies.data(), dim / 2, table.data());
        turning.pairs = dim / 2;
        turning.table = table.data();
    }
    std::vector<float> table;
    position_rotation turning;
};

void bench_by_slot(machine& on, const arena_pages& pages, uint32_t format, uint32_t rows) {
    constexpr uint32_t kv = 4096;
    const rotation_by_slots rotation;
    attend_layer layers[2] = {make_layer(element::f16), make_layer(element::f16)};
    const format_description& stored = *find_format(format, operand_role::keys);
    for (attend_layer& layer : layers) {
        layer.layout =
            make_tile_layout(tile_order::native, block_tokens, kv_heads, dim, dim, stored, stored);
    }
    layers[1].slot_turning = &rotation.turning;
    const uint32_t bytes = layers[0].layout.block_bytes;
    const uint32_t per_sequence = kv / block_tokens;
    const uint32_t sequences =
        rows == 1 ? static_cast<uint32_t>(cold_bytes / bytes / per_sequence) : 1;
    std::vector<block_id> blocks(sequences * per_sequence);
    for (uint32_t i = 0; i < blocks.size(); ++i) blocks[i] = i * (bytes / block_unit);
    query_rows queries(rows);
    std::vector<std::byte> workspace(
        std::max<uint64_t>(attend_workspace_bytes(layers[0], kv), 16 << 20));
    attend_item item;
    item.rows = rows;
    item.slots = kv;
    item.next_position = kv;
    attend_call call;
    call.arena = pages.base;
    call.items = &item;
    call.item_count = 1;
    call.workspace = workspace.data();
    call.workspace_bytes = workspace.size();
    queries.attach(call);
    std::vector<double> times, ratios;
    for (int r = 0; r < repetitions; ++r) {
        double spent[2] = {0, 0};
        for (uint32_t s = 0; s < sequences; ++s) {
            for (uint32_t which : {0u, 1u}) {
                call.layer = &layers[which];
                item.blocks =
                    blocks.data() + (s + which * (sequences / 2)) % sequences * per_sequence;
                spent[which] += seconds([&] { attend(call, on.threads); });
            }
        }
        times.push_back(spent[1] / sequences);
        ratios.push_back(spent[1] / spent[0]);
    }
    std::sort(ratios.begin(), ratios.end());
    fmt::print(
        "attend by_slot {} rows={} kv={} threads={} us={:.0f} of_plain={:.2f} [{:.2f} "
        "{:.2f}]\n",
        stored.name, rows, kv, on.count, median(times) * 1e6, median(ratios), ratios.front(),
        ratios.back());
    std::fflush(stdout);
}

int run(std::string_view only) {
    const auto wanted = [only](std::string_view name) { return only.empty() || only == name; };
    const arena_pages pages(cold_bytes);
    const uint32_t processors = std::max(1u, std::thread::hardware_concurrency());
    host_allocator allocator;
    for (const uint32_t count : {1u, processors}) {
        machine on;
        on.count = count;
        if (on.threads.start(allocator, count, nullptr) < 0) return 1;
        on.read_gbps = measure_read(on, pages);
        on.flops = measure_flops(on);
        fmt::print("machine threads={} read_gbps={:.1f} f32_gflops={:.0f} target={}\n", count,
                   on.read_gbps, on.flops, attend_target_name());
        for (const element type : {element::f16, element::bf16}) {
            for (const uint32_t kv : {16384u, 65536u}) {
                if (!wanted("decode")) break;
                bench_decode(on, pages, type, kv, false);
                bench_decode(on, pages, type, kv, true);
            }
            if (wanted("prefill")) bench_prefill(on, pages, type);
        }
        for (const uint32_t rows : {1u, 512u}) {
            if (!wanted("by_slot")) break;
            for (const uint32_t format :
                 {KV_FORMAT_F16, KV_FORMAT_INT8_TOKEN, KV_FORMAT_FP8_TOKEN}) {
                bench_by_slot(on, pages, format, rows);
            }
        }
        if (processors == 1) break;
    }
    return 0;
}

}  // namespace
}  // namespace kvrt

int main(int count, char** words) { return kvrt::run(count > 1 ? words[1] : ""); }
#endif
