// How fast a compaction moves survivors, against gathering plain rows of 256 bytes with prefetch:
//
//   compact f16 kv=65536 survivors=0.10 order=adjacent threads=1 us=... gbps=... of_gather=...
//
// Payload (keys and values of the survivors) is counted once. Both run on the same machine in turn;
// the best of several runs counts. 8 KV heads of 128 dimensions, blocks of 16 tokens, survivors
// drawn anew for each head, in place.
//
// And what a round of TriAttention costs, in decode attention passes over the same cache:
//
//   triattention round kv=65536 threads=1 us=... score_us=... attend_us=... of_attend=...
//
// A round is one layer's: score for 32 query heads, normalise, keep the best tenth, move it.
#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "attention/attend.hpp"
#include "base/executor.hpp"
#include "format/move.hpp"
#include "retention/scores.hpp"
#include "retention/select.hpp"
#include "retention/triattention.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

using namespace kvrt;

namespace {

constexpr uint32_t heads = 8, group = 4, dim = 128, block_tokens = 16, row_bytes = 2 * dim;
constexpr int repetitions = 9;

std::byte* map_pages(std::size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        fmt::print(stderr, "no memory\n");
        std::exit(1);
    }
    madvise(memory, bytes, MADV_HUGEPAGE);
    std::memset(memory, 1, bytes);
    return static_cast<std::byte*>(memory);
}

template <class callable>
double seconds(const callable& body) {
    const auto start = std::chrono::steady_clock::now();
    body();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double best(const std::vector<double>& times) {
    return *std::min_element(times.begin(), times.end());
}

using survivor_lists = std::vector<std::vector<uint32_t>>;

survivor_lists draw_survivors(uint32_t slots, double share) {
    std::mt19937 random(1);
    std::bernoulli_distribution stays(share);
    survivor_lists lists(heads);
    for (std::vector<uint32_t>& list : lists) {
        for (uint32_t slot = 0; slot < slots; ++slot) {
            if (stays(random)) list.push_back(slot);
        }
    }
    return lists;
}

uint64_t payload(const survivor_lists& lists) {
    uint64_t rows = 0;
    for (const std::vector<uint32_t>& list : lists) rows += list.size();
    return rows * 2 * row_bytes;
}

void copy_row(std::byte* target, const std::byte* source) {
#if defined(__AVX__)
    for (uint32_t i = 0; i < row_bytes; i += 32) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(target + i),
                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i)));
    }
#elif defined(__x86_64__)
    for (uint32_t i = 0; i < row_bytes; i += 16) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(target + i),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i)));
    }
#else
    std::memcpy(target, source, row_bytes);
#endif
}

// The yardstick: keys and values as rows [head][token] of 256 bytes each, gathered into dense rows.
void gather_head(const std::byte* rows, const std::vector<uint32_t>& list, std::byte* out) {
    constexpr uint32_t ahead = 16;
    for (std::size_t i = 0; i < list.size(); ++i) {
        if (i + ahead < list.size()) {
            const std::byte* later = rows + std::size_t{list[i + ahead]} * row_bytes;
            for (uint32_t k = 0; k < row_bytes; k += 64) __builtin_prefetch(later + k);
        }
        copy_row(out + i * row_bytes, rows + std::size_t{list[i]} * row_bytes);
    }
}

void compare(uint32_t slots, double share, bool shuffled, uint32_t thread_count) {
    host_allocator allocator;
    executor threads;
    if (threads.start(allocator, thread_count, nullptr) != KV_OK) std::exit(1);
    const tile_layout layout = make_tile_layout(tile_order::native, block_tokens, heads, dim, dim,
                                                element::f16, element::f16);
    const std::size_t cache_bytes = std::size_t{slots} / block_tokens * layout.block_bytes;
    std::byte* arena = map_pages(cache_bytes);
    std::byte* rows = map_pages(cache_bytes);
    std::byte* dense = map_pages(cache_bytes / 4);
    std::vector<block_id> blocks(slots / block_tokens);
    for (uint32_t i = 0; i < blocks.size(); ++i) blocks[i] = i * (layout.block_bytes / block_unit);
    if (shuffled) std::shuffle(blocks.begin(), blocks.end(), std::mt19937(2));
    const survivor_lists lists = draw_survivors(slots, share);

    const auto gather = [&] {
        threads.for_each(2 * heads, [&](uint32_t part) {
            gather_head(rows + std::size_t{part} * slots * row_bytes, lists[part / 2],
                        dense + std::size_t{part} * (slots / 4) * row_bytes);
        });
    };
    const auto compact = [&] {
        threads.for_each(heads, [&](uint32_t head) {
            move_list moves;
            moves.source = moves.target = blocks.data();
            moves.survivors = lists[head].data();
            moves.count = static_cast<uint32_t>(lists[head].size());
            moves.kv_head = head;
            move_slots(layout, arena, moves);
        });
    };
    std::vector<double> gather_times, compact_times;
    for (int i = 0; i < repetitions; ++i) {
        gather_times.push_back(seconds(gather));
        compact_times.push_back(seconds(compact));
    }
    const double gather_time = best(gather_times), compact_time = best(compact_times);
    const double bytes = static_cast<double>(payload(lists));
    fmt::print("gather rows kv={} survivors={:.2f} threads={} us={:.0f} gbps={:.2f}\n", slots,
               share, thread_count, gather_time * 1e6, bytes / gather_time * 1e-9);
    fmt::print(
        "compact f16 kv={} survivors={:.2f} order={} threads={} us={:.0f} gbps={:.2f} "
        "of_gather={:.2f}\n",
        slots, share, shuffled ? "random" : "adjacent", thread_count, compact_time * 1e6,
        bytes / compact_time * 1e-9, gather_time / compact_time);
    munmap(arena, cache_bytes);
    munmap(rows, cache_bytes);
    munmap(dense, cache_bytes / 4);
}

// f16 numbers of size 1/8 to 2, so that scores differ.
void fill_numbers(std::byte* arena, std::size_t bytes) {
    uint64_t state = 1;
    for (std::size_t i = 0; i < bytes; i += 8) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        const uint64_t word = ((state ^ state >> 29) & 0x8fff8fff8fff8fffu) + 0x3000300030003000u;
        std::memcpy(arena + i, &word, 8);
    }
}

struct round_buffers {
    std::vector<double> phases;
    std::vector<float> means[3];
    std::vector<float> weights;  // [heads]
    std::vector<float> scores;   // [heads][group][slots]
    std::vector<uint32_t> survivors;
};

void score_cache(const tile_layout& layout, const std::byte* arena,
                 const std::vector<block_id>& blocks, uint32_t slots, const rope_description& rope,
                 round_buffers& buffers, executor& threads) {
    triattention_shape shape;
    shape.key_dim = dim;
    shape.group = group;
    buffers.phases.resize(triattention_phase_count(shape, rope));
    const std::size_t weight_count = triattention_weight_count(shape, rope);
    buffers.weights.resize(heads * weight_count);
    triattention_phases(shape, rope, slots, buffers.phases.data());
    for (uint32_t head = 0; head < heads; ++head) {
        const std::size_t first = head * group * rope.bands(dim);
        triattention_weights(shape, rope, buffers.phases.data(),
                             {buffers.means[0].data() + first, buffers.means[1].data() + first,
                              buffers.means[2].data() + first},
                             buffers.weights.data() + head * weight_count);
    }
    constexpr uint32_t stretch = 2048;
    const uint32_t stretches = (slots + stretch - 1) / stretch;
    threads.for_each(heads * stretches, [&](uint32_t unit) {
        const uint32_t head = unit / stretches, first = unit % stretches * stretch;
        const stored_rows rows{&layout, nullptr, 0, arena, blocks.data(), head, nullptr};
        score_triattention(rows, first, std::min(first + stretch, slots), shape, rope,
                           buffers.weights.data() + head * weight_count,
                           buffers.scores.data() + std::size_t{head} * group * slots, slots);
    });
}

void select_and_move(const tile_layout& layout, std::byte* arena,
                     const std::vector<block_id>& blocks, uint32_t slots, round_buffers& buffers,
                     executor& threads) {
    const uint32_t keep = slots / 10;
    slot_ranges all;
    all.range[all.count++] = {0, slots};
    threads.for_each(heads, [&](uint32_t head) {
        float* scores = buffers.scores.data() + std::size_t{head} * group * slots;
        uint32_t* survivors = buffers.survivors.data() + std::size_t{head} * keep;
        normalise_and_reduce(scores, slots, group, all, scores);
        move_list moves;
        moves.source = moves.target = blocks.data();
        moves.survivors = survivors;
        moves.count = select_top(scores, all, slots, keep, survivors);
        moves.kv_head = head;
        move_slots(layout, arena, moves);
    });
}

void measure_round(uint32_t slots, uint32_t thread_count) {
    host_allocator allocator;
    executor threads;
    if (threads.start(allocator, thread_count, nullptr) != KV_OK) std::exit(1);
    attend_layer layer;
    layer.layout = make_tile_layout(tile_order::native, block_tokens, heads, dim, dim, element::f16,
                                    element::f16);
    layer.query_heads = heads * group;
    layer.kv_heads = heads;
    layer.scale = 0.088f;
    const std::size_t cache_bytes = std::size_t{slots} / block_tokens * layer.layout.block_bytes;
    std::byte* arena = map_pages(cache_bytes);
    fill_numbers(arena, cache_bytes);
    std::vector<block_id> blocks(slots / block_tokens);
    for (uint32_t i = 0; i < blocks.size(); ++i) {
        blocks[i] = i * (layer.layout.block_bytes / block_unit);
    }

    std::vector<float> queries(heads * group * dim, 0.1f), out(heads * group * dim);
    attend_item item;
    item.blocks = blocks.data();
    item.rows = 1;
    item.slots = slots;
    item.next_position = slots;
    attend_call call;
    call.layer = &layer;
    call.arena = arena;
    call.items = &item;
    call.item_count = 1;
    call.queries = {reinterpret_cast<std::byte*>(queries.data()), element::f32, heads * group * dim,
                    dim, 1};
    call.out = {reinterpret_cast<std::byte*>(out.data()), element::f32, heads * group * dim, dim,
                1};
    call.workspace_bytes = attend_workspace_bytes(layer, slots);
    call.workspace = map_pages(call.workspace_bytes);

    rope_description rope;
    rope.style = KV_ROPE_HALF;
    rope.dimensions = dim;
    round_buffers buffers;
    std::mt19937 random(4);
    std::normal_distribution<float> normal;
    for (uint32_t band = 0; band < dim / 2; ++band) {
        rope.inverse_frequencies[band] = std::pow(1e6, -2.0 * band / dim);
    }
    for (std::vector<float>& array : buffers.means) array.resize(heads * group * dim / 2);
    for (float& mean : buffers.means[0]) mean = normal(random);
    for (float& mean : buffers.means[1]) mean = normal(random);
    for (float& mean : buffers.means[2]) mean = 3.0f;
    buffers.scores.resize(std::size_t{heads} * group * slots);
    buffers.survivors.resize(std::size_t{heads} * (slots / 10));

    std::vector<double> attend_times, score_times, round_times;
    for (int i = 0; i < repetitions; ++i) {
        attend_times.push_back(seconds([&] { attend(call, threads); }));
        const double score_time = seconds(
            [&] { score_cache(layer.layout, arena, blocks, slots, rope, buffers, threads); });
        score_times.push_back(score_time);
        round_times.push_back(score_time + seconds([&] {
                                  select_and_move(layer.layout, arena, blocks, slots, buffers,
                                                  threads);
                              }));
    }
    fmt::print(
        "triattention round kv={} threads={} us={:.0f} score_us={:.0f} attend_us={:.0f} "
        "of_attend={:.2f}\n",
        slots, thread_count, best(round_times) * 1e6, best(score_times) * 1e6,
        best(attend_times) * 1e6, best(round_times) / best(attend_times));
    munmap(arena, cache_bytes);
    munmap(call.workspace, call.workspace_bytes);
}

}  // namespace

int main() {
    for (uint32_t thread_count : {1u, std::max(2u, std::thread::hardware_concurrency())}) {
        for (uint32_t slots : {16384u, 65536u}) {
            compare(slots, 0.10, false, thread_count);
            compare(slots, 0.10, true, thread_count);
        }
        measure_round(16384, thread_count);
        measure_round(65536, thread_count);
    }
    return 0;
}
