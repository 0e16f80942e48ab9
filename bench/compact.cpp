// How fast a compaction moves survivors, against gathering plain rows of 256 bytes with prefetch:
//
//   compact f16 kv=65536 survivors=0.10 order=adjacent threads=1 us=... gbps=... of_gather=...
//
// Payload (keys and values of the survivors) is counted once. Both run on the same machine in turn;
// the best of several runs counts. 8 KV heads of 128 dimensions, blocks of 16 tokens, survivors
// drawn anew for each head, in place.
#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "base/executor.hpp"
#include "format/move.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

using namespace kvrt;

namespace {

constexpr uint32_t heads = 8, dim = 128, block_tokens = 16, row_bytes = 2 * dim;
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

}  // namespace

int main() {
    for (uint32_t thread_count : {1u, std::max(2u, std::thread::hardware_concurrency())}) {
        compare(65536, 0.10, false, thread_count);
        compare(65536, 0.10, true, thread_count);
    }
    return 0;
}
