// Decode attention over every storage format against f16, in turn within one run:
//
//   formats decode q8_0 kv=16384 threads=1 target=AVX3 f16_us=... us=... ratio=... low=... high=...
//       best=... append_us=... append_share=...
//
// ratio         how many times as fast as f16: the median over rounds of f16, format, f16, ...;
//               low and high are the quartiles
// best          the same of the fastest rounds of either
// append_us     storing one token's key and value of all heads, rounding or quantising included
// append_share  that, as a share of the attention of the step that it belongs to
//
// 8 KV heads of 128 dimensions, 4 query heads each, blocks of 16 tokens of normal numbers. Values
// beside formats of keys alone are q4_1.
// Times are the thread's own where there is one, and of the wall where there are more.
// Sequences are taken in turn; in f16 they hold 768 MiB, so that nothing comes from caches. --hot
// takes one sequence only, which comes from where it fits: what is computed is left.
//
// --arithmetic is the most that codes are multiplied with (format/tile.hpp, code_arithmetic).
//
//   bench_formats [--quick] [--hot] [--threads N] [--target NAME] [--kv TOKENS]
//                 [--arithmetic floats|dot_products|matrices] [FORMAT ...]
#include <fmt/format.h>
#include <sys/mman.h>

#include "base/simd_targets.hpp"
// After it.
#include <hwy/targets.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "attention/attend.hpp"
#include "format/encode.hpp"
#include "format/retile.hpp"

namespace kvrt {
namespace {

constexpr uint32_t kv_heads = 8, query_heads = 32, dim = 128;
/// Blocks that are written and coded, if there are so many; the others are copies of them.
constexpr uint32_t drawn_blocks = 16;
constexpr uint64_t cold_bytes = uint64_t{768} << 20;

constexpr uint32_t all_formats[] = {
    KV_FORMAT_F32,       KV_FORMAT_BF16,       KV_FORMAT_FP8_E4M3, KV_FORMAT_FP8_E5M2,
    KV_FORMAT_FP8_TOKEN, KV_FORMAT_INT8_TOKEN, KV_FORMAT_Q8_0,     KV_FORMAT_INT4_TOKEN,
    KV_FORMAT_Q4_0,      KV_FORMAT_Q4_1,       KV_FORMAT_NVFP4,    KV_FORMAT_MXFP4,
    KV_FORMAT_KIVI4,     KV_FORMAT_KIVI2,      KV_FORMAT_KVARN4,   KV_FORMAT_KVARN2,
    KV_FORMAT_TURBO4,    KV_FORMAT_TURBO3,     KV_FORMAT_AFFINE4,
};

struct options {
    bool quick = false;
    bool hot = false;
    uint32_t threads = 1;
    code_arithmetic arithmetic = code_arithmetic::matrices;
    std::vector<uint32_t> contexts = {16384, 65536};
    std::vector<std::string_view> formats;
};

/// Of the clock on the wall; with one thread of its own time, which others do not take from it.
double now(const executor& threads) {
    timespec time;
    clock_gettime(threads.concurrency() == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

template <class callable>
double seconds(const executor& threads, const callable& body) {
    const double start = now(threads);
    body();
    return now(threads) - start;
}

double quantile(std::vector<double> values, double share) {
    std::sort(values.begin(), values.end());
    return values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1) + 0.5)];
}

/// Rows of normal numbers in the caller's memory, as an engine hands them over.
struct normal_rows {
    normal_rows(uint32_t rows, uint32_t heads, uint32_t seed)
        : numbers(std::size_t{rows} * heads * dim), per_row(int64_t{heads} * dim) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        for (float& number : numbers) number = normal(random);
    }
    tensor_view view() {
        return {reinterpret_cast<std::byte*>(numbers.data()), element::f32, per_row, dim, 1};
    }
    std::vector<float> numbers;
    int64_t per_row;
};

/// Constants of a layer's keys, which are rotated as Llama 3 does.
struct key_constants {
    key_constants() : table(turning_table_floats(dim / 2)) {
        std::mt19937 random(21);
        std::normal_distribution<float> normal;
        for (uint32_t i = 0; i < kv_heads * dim; ++i) {
            means.push_back(normal(random));
            scales.push_back(std::exp2(normal(random)));
        }
        double frequencies[dim / 2];
        for (uint32_t b = 0; b < dim / 2; ++b) frequencies[b] = std::pow(500000.0, -2.0 * b / dim);
        fill_turning_table(frequencies, dim / 2, table.data());
        turning.pairs = dim / 2;
        turning.table = table.data();
    }
    void give(operand_layout& keys) const {
        if (keys.format->needs_channels) {
            keys.channel_means = means.data();
            keys.channel_scales = scales.data();
        }
        if (keys.format->needs_positions) keys.turning = &turning;
    }
    std::vector<float> means, scales, table;
    position_rotation turning;
};

/// Sequences of one format, in an arena of huge pages.
class stored_sequences {
  public:
    stored_sequences(const format_description& keys, const format_description& values,
                     uint32_t tokens, uint32_t count, code_arithmetic arithmetic, executor& threads)
        : tokens_(tokens), count_(count), threads_(threads), out_(1, query_heads, 1) {
        const auto is_tiled = [](const format_description& format) {
            return format.kind == format_class::tile_local;
        };
        const auto written = [&](const format_description& format) -> const format_description& {
            return is_tiled(format) ? *find_format(KV_FORMAT_F16, operand_role::keys) : format;
        };
        seals_ = is_tiled(keys) || is_tiled(values);
        block_tokens_ = seals_ ? 64 : 16;
        const auto layout_of = [&](const format_description& k, const format_description& v) {
            return make_tile_layout(tile_order::native, block_tokens_, kv_heads, dim, dim, k, v);
        };
        layer_.layout = layout_of(keys, values);
        layer_.layout.arithmetic = arithmetic;
        constants_.give(layer_.layout.keys);
        raw_layout_ = layout_of(written(keys), written(values));
        raw_layout_.keys.share_constants(layer_.layout.keys);
        raw_layout_.values.share_constants(layer_.layout.values);
        layer_.query_heads = query_heads;
        layer_.kv_heads = kv_heads;
        layer_.scale = 0.08838835f;
        const uint32_t block_bytes = layer_.layout.block_bytes;
        blocks_.resize(std::size_t{count} * tokens / block_tokens_);
        for (uint32_t i = 0; i < blocks_.size(); ++i) blocks_[i] = i * (block_bytes / block_unit);
        stored_bytes_ = blocks_.size() * uint64_t{block_bytes};
        drawn_ = std::min<uint32_t>(drawn_blocks, static_cast<uint32_t>(blocks_.size()));
        raw_blocks_.resize(drawn_);
        for (uint32_t i = 0; i < drawn_; ++i) {
            raw_blocks_[i] = static_cast<block_id>(
                (stored_bytes_ + uint64_t{i} * raw_layout_.block_bytes) / block_unit);
        }
        bytes_ = stored_bytes_ + uint64_t{drawn_} * raw_layout_.block_bytes;
        void* memory =
            mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) {
            fmt::print(stderr, "no memory for {} bytes\n", bytes_);
            std::exit(1);
        }
        madvise(memory, bytes_, MADV_HUGEPAGE);
        arena_ = static_cast<std::byte*>(memory);
        fill();
        workspace_.resize(attend_workspace_bytes(layer_, tokens));
    }
    ~stored_sequences() { munmap(arena_, bytes_); }
    stored_sequences(const stored_sequences&) = delete;
    stored_sequences& operator=(const stored_sequences&) = delete;

    /// One query row over sequence `index`.
    double attend_seconds(uint32_t index, normal_rows& query) {
        attend_item item;
        item.blocks = table(index);
        item.rows = 1;
        item.slots = tokens_;
        item.next_position = tokens_;
        attend_call call;
        call.layer = &layer_;
        call.arena = arena_;
        call.items = &item;
        call.item_count = 1;
        call.workspace = workspace_.data();
        call.workspace_bytes = workspace_.size();
        call.queries = query.view();
        call.out = out_.view();
        return seconds(threads_, [&] { attend(call, threads_); });
    }

    /// Storing one token, averaged over the slots of the sequence's last block, which is sealed
    /// then where the format wants that.
    double append_seconds(uint32_t index, normal_rows& keys, normal_rows& values) {
        const block_id* blocks = seals_ ? raw_blocks_.data() : table(index);
        const uint32_t first = seals_ ? 0 : tokens_ - block_tokens_;
        const double time = seconds(threads_, [&] {
            for (uint32_t slot = 0; slot < block_tokens_; ++slot) {
                write(blocks, first + slot, slot % 16, 1, keys, values);
            }
            if (seals_) seal(0, table(index)[0]);
        });
        return time / block_tokens_;
    }

    uint32_t count() const { return count_; }

  private:
    const block_id* table(uint32_t index) const {
        return blocks_.data() + std::size_t{index} * tokens_ / block_tokens_;
    }
    void write(const block_id* blocks, uint32_t first_slot, uint32_t first_row, uint32_t rows,
               normal_rows& keys, normal_rows& values) {
        write_item item;
        item.blocks = blocks;
        item.first_slot = first_slot;
        item.first_row = first_row;
        item.rows = rows;
        write_rows(seals_ ? raw_layout_ : layer_.layout, arena_, &item, 1, keys.view(),
                   values.view(), {}, threads_);
    }
    void seal(uint32_t raw_block, block_id target) {
        const block_run from{&raw_layout_, &layer_.layout, raw_blocks_.data(), 0};
        for (uint32_t head = 0; head < kv_heads; ++head) {
            recoding recoded;
            fill_block(from, arena_, nullptr, raw_block * block_tokens_, block_tokens_, head,
                       layer_.layout, target, 0, recoded);
        }
    }
    void fill() {
        const uint32_t rows = drawn_ * block_tokens_;
        normal_rows keys(rows, kv_heads, 11), values(rows, kv_heads, 12);
        write(seals_ ? raw_blocks_.data() : blocks_.data(), 0, 0, rows, keys, values);
        for (uint32_t i = 0; seals_ && i < drawn_; ++i) seal(i, blocks_[i]);
        const uint64_t some = uint64_t{drawn_} * layer_.layout.block_bytes;
        for (uint64_t at = some; at < stored_bytes_; at += some) {
            std::memcpy(arena_ + at, arena_, std::min(some, stored_bytes_ - at));
        }
    }

    key_constants constants_;
    attend_layer layer_;
    tile_layout raw_layout_;  ///< of what is not sealed yet, where the format wants that
    bool seals_ = false;
    uint32_t block_tokens_ = 16;
    uint32_t drawn_ = 0;  ///< blocks that are written
    uint64_t stored_bytes_ = 0;
    std::vector<block_id> raw_blocks_;
    uint32_t tokens_, count_;
    executor& threads_;
    std::byte* arena_ = nullptr;
    uint64_t bytes_ = 0;
    std::vector<block_id> blocks_;
    std::vector<std::byte> workspace_;
    normal_rows out_;
};

void compare(const format_description& format, stored_sequences& plain, stored_sequences& stored,
             uint32_t tokens, const options& chosen) {
    normal_rows query(1, query_heads, 13), keys(16, kv_heads, 14), values(16, kv_heads, 15);
    // Short contexts, which take microseconds, more often.
    const uint32_t rounds = (chosen.quick ? 8 : 32) * std::max(1u, 16384 / tokens);
    std::vector<double> plain_times, times, ratios, append_times, shares;
    for (uint32_t round = 0; round < rounds; ++round) {
        const uint32_t sequence = round % plain.count();
        const double before = plain.attend_seconds(sequence, query);
        const double time = stored.attend_seconds(sequence, query);
        const double append = stored.append_seconds(sequence, keys, values);
        plain_times.push_back(before);
        times.push_back(time);
        ratios.push_back(before / time);
        append_times.push_back(append);
        shares.push_back(append / time);
    }
    fmt::print(
        "formats decode {} kv={} threads={} target={} f16_us={:.0f} us={:.0f} ratio={:.2f} "
        "low={:.2f} high={:.2f} best={:.2f} append_us={:.2f} append_share={:.4f}\n",
        format.name, tokens, chosen.threads, attend_target_name(), quantile(plain_times, 0.5) * 1e6,
        quantile(times, 0.5) * 1e6, quantile(ratios, 0.5), quantile(ratios, 0.25),
        quantile(ratios, 0.75), quantile(plain_times, 0.0) / quantile(times, 0.0),
        quantile(append_times, 0.5) * 1e6, quantile(shares, 0.5));
    std::fflush(stdout);
}

bool named(const options& chosen, const char* name) {
    return chosen.formats.empty() ||
           std::find(chosen.formats.begin(), chosen.formats.end(), name) != chosen.formats.end();
}

int run(const options& chosen) {
    host_allocator allocator;
    executor threads;
    if (threads.start(allocator, chosen.threads, nullptr) < 0) return 1;
    for (const uint32_t tokens : chosen.contexts) {
        const format_description& f16 = *find_format(KV_FORMAT_F16, operand_role::keys);
        const uint64_t bytes = uint64_t{tokens} * kv_heads * 2 * dim * 2;
        const uint32_t count =
            chosen.hot ? 1 : static_cast<uint32_t>(std::max<uint64_t>(1, cold_bytes / bytes));
        stored_sequences plain(f16, f16, tokens, count, chosen.arithmetic, threads);
        for (const uint32_t id : all_formats) {
            const format_description* keys = find_format(id, operand_role::keys);
            const format_description* values = find_format(id, operand_role::values);
            if (values == nullptr) values = find_format(KV_FORMAT_Q4_1, operand_role::values);
            if (keys == nullptr || !named(chosen, keys->name)) continue;
            stored_sequences stored(*keys, *values, tokens, count, chosen.arithmetic, threads);
            compare(*keys, plain, stored, tokens, chosen);
        }
    }
    return 0;
}

bool choose_target(std::string_view name) {
    for (int64_t rest = hwy::SupportedTargets() & HWY_TARGETS; rest != 0; rest &= rest - 1) {
        const int64_t target = rest & -rest;
        if (name != hwy::TargetName(target)) continue;
        hwy::GetChosenTarget().Update(target);
        return true;
    }
    return false;
}

bool choose_arithmetic(std::string_view name, code_arithmetic& chosen) {
    constexpr std::string_view names[] = {"floats", "dot_products", "matrices"};
    const auto* found = std::find(std::begin(names), std::end(names), name);
    if (found == std::end(names)) return false;
    chosen = static_cast<code_arithmetic>(found - std::begin(names));
    return true;
}

bool parse(int count, char** words, options& chosen) {
    for (int i = 1; i < count; ++i) {
        const std::string_view word = words[i];
        const bool more = i + 1 < count;
        if (word == "--quick") {
            chosen.quick = true;
        } else if (word == "--hot") {
            chosen.hot = true;
        } else if (word == "--arithmetic" && more) {
            if (!choose_arithmetic(words[++i], chosen.arithmetic)) return false;
        } else if (word == "--threads" && more) {
            chosen.threads = static_cast<uint32_t>(std::max(1, std::atoi(words[++i])));
        } else if (word == "--kv" && more) {
            const int tokens = std::max(256, std::atoi(words[++i]));
            chosen.contexts = {static_cast<uint32_t>(tokens) / 256 * 256};
        } else if (word == "--target" && more) {
            if (!choose_target(words[++i])) return false;
        } else if (word.substr(0, 2) == "--") {
            return false;
        } else {
            chosen.formats.push_back(word);
        }
    }
    return true;
}

}  // namespace
}  // namespace kvrt

int main(int count, char** words) {
    kvrt::options chosen;
    if (!kvrt::parse(count, words, chosen)) {
        fmt::print(stderr,
                   "usage: bench_formats [--quick] [--hot] [--threads N] [--target NAME] "
                   "[--arithmetic floats|dot_products|matrices] [--kv TOKENS] [FORMAT ...]\n");
        return 2;
    }
    return kvrt::run(chosen);
}
