// Decode attention's scores of keys in records: which kernel takes which codes, and queries as the
// kernels take them. Kernels of each kind of codes are compiled here, once per instruction set.

#include "base/simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/decode_keys.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>

#include "attention/amx_folded-inl.hpp"
#include "attention/coded-inl.hpp"
#include "attention/means-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR

namespace {

/// What records of keys have.
using key_kinds = kind_list<code_kind::signed_bytes, code_kind::nibbles, code_kind::e2m1_nibbles,
                            code_kind::e4m3_bytes, code_kind::e5m2_bytes, code_kind::normal_nibbles,
                            code_kind::normal_three_bits>;

}  // namespace

void score_coded(const run_tiles& tiles, const tile_layout& layout, bool float_queries,
                 uint32_t head, uint32_t heads, const std::byte* queries, uint32_t query_bytes,
                 [[maybe_unused]] uint32_t first, [[maybe_unused]] uint32_t end, float* scores) {
    const coded_operand keys(layout.keys, head);
    for (uint32_t done = 0; done < heads; done += 4) {
        key_kinds::call(keys.reading.codes, [&](auto kind_constant) {
            constexpr code_kind kind = decltype(kind_constant)::value;
            with_heads(std::min(4u, heads - done), [&](auto count) {
                constexpr uint32_t some = decltype(count)::value;
                const auto run = [&](auto* kernel) {
                    kernel(tiles.keys, tiles.next_keys, tiles.groups, keys,
                           queries + done * query_bytes, query_bytes, scores + done * run_slots);
                };
#if HWY_TARGET == HWY_AVX3
                if (!float_queries && multiplies_tiles(layout, layout.keys)) {
                    if constexpr (is_fp8(kind)) {
                        return run(&score_amx_fp8<kind, some>);
                    } else {
                        if constexpr (kind == code_kind::e2m1_nibbles) {
                            if (has_folded_keys(keys) &&
                                score_folded<some>(tiles.keys, tiles.next_keys, tiles.groups, keys,
                                                   queries + done * query_bytes, query_bytes, first,
                                                   end, scores + done * run_slots)) {
                                return;
                            }
                        }
                        return run(&score_amx_codes<kind, some>);
                    }
                }
#endif
                if constexpr (is_fp8(kind)) {
                    run(&score_fp8<kind, some>);
                } else {
#if HWY_TARGET == HWY_AVX3
                    if constexpr (is_multiplied(kind)) {
                        if (!float_queries && multiplies_codes(layout, layout.keys)) {
                            return run(&score_codes<kind, some>);
                        }
                    }
#endif
                    run(&score_records<kind, some>);
                }
            });
        });
    }
}

void score_means(const tile_layout& layout, const uint32_t* positions, uint32_t count,
                 uint32_t heads, const std::byte* queries, uint32_t query_bytes, float* scores) {
    const position_rotation& turning = *layout.keys.turning;
    bool beside_amx = false;
#if HWY_TARGET == HWY_AVX3
    beside_amx = multiplies_tiles(layout, layout.keys);
#endif
    for (uint32_t done = 0; done < heads; done += 4) {
        const mean_queries some{queries + done * query_bytes + mean_query_offset(layout),
                                query_bytes, turning.pairs, beside_amx};
        with_heads(HWY_MIN(4, heads - done), [&](auto together) {
            add_means<decltype(together)::value>(turning, some, positions, count,
                                                 scores + done * run_slots);
        });
    }
}

namespace {

/// Whether a channel is so far above the others of its group that 24 bits for the largest leave the
/// others too few: 1e-5 of a score would be lost from about 300 times on.
bool has_large_channel(const float* group, uint32_t count) {
    constexpr float large = 64.0f;
    float largest = 0.0f, sum = 0.0f;
    for (uint32_t i = 0; i < count; ++i) {
        const float magnitude = std::abs(group[i]);
        largest = std::max(largest, magnitude);
        sum += magnitude;
    }
    const float others = (sum - largest) / static_cast<float>(count);
    return largest > large * others && others > 0.0f;
}
bool has_large_channel(const float* query, const coded_operand& keys) {
    for (uint32_t g = 0; g < keys.groups; ++g) {
        if (has_large_channel(query + g * keys.group, keys.channels(g))) return true;
    }
    return false;
}

/// What a query head of such keys is multiplied as: without the constants of the model in them.
const float* level_head(const tile_layout& layout, uint32_t kv_head, const float* query,
                        std::byte* means, float* levelled) {
    if (!layout.keys.format->needs_channels) return query;
    level_query(query, layout.keys, kv_head, means, levelled);
    return levelled;
}

}  // namespace

// Each KV head decides for itself, so that what is in other heads does not show in its scores.
void encode_query_heads(const tile_layout& layout, uint32_t query_heads, const float* queries,
                        std::byte* out, uint8_t* as_floats) {
    const coded_operand keys(layout.keys, 0);
    const uint32_t bytes = coded_query_bytes(layout);
    const uint32_t group = query_heads / layout.kv_heads;
    alignas(64) float levelled[widest_row];
    bool never_whole = true;
#if HWY_TARGET == HWY_AVX3
    const bool tiles = multiplies_tiles(layout, layout.keys);
    never_whole = !tiles && !multiplies_codes(layout, layout.keys);
#endif
    const auto level = [&](uint32_t head) {
        std::byte* means = out + uint64_t{head} * bytes + mean_query_offset(layout);
        return level_head(layout, head / group, queries + uint64_t{head} * keys.dim, means,
                          levelled);
    };
    std::fill_n(as_floats, layout.kv_heads, uint8_t{never_whole});
    // Of fp8 each channel is taken by itself.
    const bool together = !never_whole && !is_fp8(keys.reading.codes);
    for (uint32_t head = 0; head < query_heads && together; ++head) {
        if (has_large_channel(level(head), keys)) as_floats[head / group] = 1;
    }
    for (uint32_t head = 0; head < query_heads; ++head) {
        const float* query = level(head);
        std::byte* target = out + uint64_t{head} * bytes;
        if (as_floats[head / group] != 0) {
            prepare_query(query, keys, target);
            continue;
        }
#if HWY_TARGET == HWY_AVX3
        if (tiles && keys.reading.codes == code_kind::e4m3_bytes) {
            encode_fp8_query<code_kind::e4m3_bytes>(query, keys, bytes, target);
        } else if (tiles && keys.reading.codes == code_kind::e5m2_bytes) {
            encode_fp8_query<code_kind::e5m2_bytes>(query, keys, bytes, target);
        } else if (tiles) {
            encode_amx_query(query, keys, bytes, target);
            if (has_folded_keys(keys)) {
                encode_folded_query(query, keys, bytes, has_large_channel(query, keys.dim), target);
            }
        } else {
            encode_query(query, keys, target);
        }
#endif
    }
}

#else

void score_coded(const run_tiles&, const tile_layout&, bool, uint32_t, uint32_t, const std::byte*,
                 uint32_t, uint32_t, uint32_t, float*) {}
void score_means(const tile_layout&, const uint32_t*, uint32_t, uint32_t, const std::byte*,
                 uint32_t, float*) {}
void encode_query_heads(const tile_layout&, uint32_t, const float*, std::byte*, uint8_t*) {}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();
