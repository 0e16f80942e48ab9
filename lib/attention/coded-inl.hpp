// Decode attention over codes, however they are multiplied: as floats (records-inl.hpp,
// tiles-inl.hpp), with 8-bit dot products (codes-inl.hpp) or by AMX (amx_codes-inl.hpp,
// amx_folded-inl.hpp, amx_values-inl.hpp, amx_fp8-inl.hpp), chosen by the processor and the codes.
// Include it per target.

// Per-target include guard.
#if defined(KVRT_ATTENTION_CODED_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVRT_ATTENTION_CODED_INL_HPP
#undef KVRT_ATTENTION_CODED_INL_HPP
#else
#define KVRT_ATTENTION_CODED_INL_HPP
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "attention/amx_folded-inl.hpp"
#include "attention/amx_fp8-inl.hpp"
#include "attention/amx_values-inl.hpp"
#include "attention/codes-inl.hpp"
#include "attention/means-inl.hpp"
#include "attention/records-inl.hpp"
#include "attention/tiles-inl.hpp"
#include "base/amx.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {
namespace {

constexpr uint32_t run_groups = run_slots / slot_group;
constexpr uint32_t max_together = 8;  // query heads that share a pass over a tile

// Scores and weights of a span are [run][max_together][run_slots]: floats from run to run.
constexpr uint32_t span_stride = max_together * run_slots;

// Where the tiles of a run lie, and the ones to prefetch meanwhile.
struct run_tiles {
    const std::byte* const* keys;
    const std::byte* const* values;
    const std::byte* const* next_keys;
    const std::byte* const* next_values;
    uint32_t groups;
};

// The same of a span.
struct span_tiles {
    const std::byte* keys[span_runs * run_groups];
    const std::byte* values[span_runs * run_groups];
    const std::byte* next_keys[span_runs * run_groups];
    const std::byte* next_values[span_runs * run_groups];
    uint32_t groups;

    run_tiles of_run(uint32_t r) const {
        const uint32_t g = r * run_groups;
        return {keys + g, values + g, next_keys + g, next_values + g,
                HWY_MIN(run_groups, groups - g)};
    }
};

// ---- Which codes, which way ---------------------------------------------------------------------

template <code_kind... kinds>
struct kind_list {
    static constexpr bool has(code_kind kind) { return ((kind == kinds) || ...); }

    /// Calls body(kind) with a kind of the list as a constant.
    template <class callable>
    static void call(code_kind kind, const callable& body) {
        ((kind == kinds ? body(std::integral_constant<code_kind, kinds>()) : void()), ...);
    }
};

/// What records of keys and of values have, and tiles.
using key_kinds = kind_list<code_kind::signed_bytes, code_kind::nibbles, code_kind::e2m1_nibbles,
                            code_kind::e4m3_bytes, code_kind::e5m2_bytes, code_kind::normal_nibbles,
                            code_kind::normal_three_bits>;
using value_kinds = kind_list<code_kind::signed_bytes, code_kind::nibbles, code_kind::e2m1_nibbles,
                              code_kind::e4m3_bytes, code_kind::e5m2_bytes, code_kind::two_bits,
                              code_kind::three_bits>;
using tile_kinds = kind_list<code_kind::nibbles, code_kind::two_bits>;

#if HWY_TARGET == HWY_AVX3

/// The codes that codes-inl.hpp multiplies.
constexpr bool is_multiplied(code_kind kind) {
    return kind == code_kind::signed_bytes || kind == code_kind::nibbles ||
           kind == code_kind::e2m1_nibbles;
}

/// Whether the operand's codes are whole numbers, and multiplied as such.
bool multiplies_codes(const tile_layout& layout, const operand_layout& operand) {
    static const bool has_dot_products = __builtin_cpu_supports("avx512vnni") != 0;
    return has_dot_products && layout.arithmetic >= code_arithmetic::dot_products &&
           is_multiplied(operand.format->reading.codes);
}

/// Whether they are multiplied by AMX.
bool multiplies_tiles(const tile_layout& layout, const operand_layout& operand) {
    if (operand.plain() || layout.arithmetic < code_arithmetic::matrices) return false;
    const bool fp8 = !operand.tiled() && is_fp8(operand.format->reading.codes);
    return (fp8 ? amx_takes_fp8(operand.dim) : amx_takes(operand)) && amx_usable();
}

/// Tile registers set up for a piece, where an operand is multiplied by AMX.
class piece_shapes {
  public:
    explicit piece_shapes(const tile_layout& layout) {
        const bool keys = multiplies_tiles(layout, layout.keys);
        used_ = keys || multiplies_tiles(layout, layout.values);
        if (!used_) return;
        const bool records = keys && !layout.keys.tiled();
        amx_set_shapes(records ? amx_query_shape(coded_operand(layout.keys, 0), 0).key_bytes
                               : amx_row_bytes);
    }
    ~piece_shapes() {
        if (used_) amx_release();
    }
    piece_shapes(const piece_shapes&) = delete;
    piece_shapes& operator=(const piece_shapes&) = delete;

    /// Whether more than a run's weights are worth making at once: sums of values stay in tile
    /// registers meanwhile.
    bool long_spans() const { return used_; }

    /// Called between products.
    void stay_ready() const {
        if (used_) keep_amx_awake();
    }

  private:
    bool used_;
};

#else

struct piece_shapes {
    explicit piece_shapes(const tile_layout&) {}
    bool long_spans() const { return false; }
    void stay_ready() const {}
};

#endif

// ---- Kernels ------------------------------------------------------------------------------------

#if HWY_TARGET != HWY_SCALAR

/// Slots [first, end) of the run count.
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

/// Of slots [first, end) of a span.
void add_coded_values(const span_tiles& tiles, const tile_layout& layout, uint32_t head,
                      uint32_t heads, const float* weights, uint32_t first, uint32_t end,
                      float* out) {
    const coded_operand values(layout.values, head);
    for (uint32_t done = 0; done < heads; done += 4) {
        value_kinds::call(values.reading.codes, [&](auto kind_constant) {
            constexpr code_kind kind = decltype(kind_constant)::value;
            with_heads(std::min(4u, heads - done), [&](auto count) {
                constexpr uint32_t some = decltype(count)::value;
                const auto run = [&](auto* kernel) {
                    for (uint32_t r = first / run_slots; r * run_slots < end; ++r) {
                        const run_tiles part = tiles.of_run(r);
                        const uint32_t begin = r * run_slots;
                        kernel(part.values, part.next_values, values,
                               weights + r * span_stride + done * run_slots,
                               std::max(first, begin) - begin,
                               std::min(end, begin + run_slots) - begin, out + done * values.dim);
                    }
                };
#if HWY_TARGET == HWY_AVX3
                if (multiplies_tiles(layout, layout.values)) {
                    if constexpr (is_fp8(kind)) {
                        return run(&add_amx_fp8_values<kind, some>);
                    } else {
                        return add_amx_record_values<kind, some>(
                            tiles.values, tiles.next_values, values, weights + done * run_slots,
                            span_stride, first, end, out + done * values.dim);
                    }
                }
                if constexpr (is_multiplied(kind)) {
                    if (multiplies_codes(layout, layout.values)) {
                        // Groups of 16 nibbles are halves of a chunk.
                        if constexpr (kind == code_kind::e2m1_nibbles) {
                            if (values.group == 16) return run(&add_code_values<kind, some, 2>);
                        }
                        return run(&add_code_values<kind, some, 1>);
                    }
                }
#endif
                run(&add_record_values<kind, some>);
            });
        });
    }
}

void score_sealed(const run_tiles& tiles, const tile_layout& layout, const sealed_tile& from,
                  uint32_t place, uint32_t heads, const float* queries, float* scores) {
    for (uint32_t done = 0; done < heads; done += 4) {
        tile_kinds::call(from.operand.format->tile.reading.codes, [&](auto kind) {
            with_heads(std::min(4u, heads - done), [&](auto count) {
                const auto run = [&](auto products) {
                    score_tile<decltype(products), decltype(kind)::value, decltype(count)::value>(
                        from, place, tiles.keys, tiles.next_keys, tiles.groups,
                        queries + done * from.operand.dim, scores + done * run_slots);
                };
#if HWY_TARGET == HWY_AVX3
                if (multiplies_tiles(layout, from.operand)) return run(amx_products());
#endif
                run(float_products());
            });
        });
    }
}

void add_sealed_values(const run_tiles& tiles, const tile_layout& layout, const sealed_tile& from,
                       uint32_t place, uint32_t heads, const float* weights, uint32_t first,
                       uint32_t end, float* out) {
    for (uint32_t done = 0; done < heads; done += 4) {
        tile_kinds::call(from.operand.format->tile.reading.codes, [&](auto kind) {
            with_heads(std::min(4u, heads - done), [&](auto count) {
                const auto run = [&](auto products) {
                    add_tile_values<decltype(products), decltype(kind)::value,
                                    decltype(count)::value>(
                        from, place, tiles.values, tiles.next_values, weights + done * run_slots,
                        first, end, out + done * from.operand.dim);
                };
#if HWY_TARGET == HWY_AVX3
                if (multiplies_tiles(layout, from.operand)) return run(amx_products());
#endif
                run(float_products());
            });
        });
    }
}

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

bool reads_codes() { return true; }

#else

void score_coded(const run_tiles&, const tile_layout&, bool, uint32_t, uint32_t, const std::byte*,
                 uint32_t, uint32_t, uint32_t, float*) {}
void add_coded_values(const span_tiles&, const tile_layout&, uint32_t, uint32_t, const float*,
                      uint32_t, uint32_t, float*) {}
void encode_query_heads(const tile_layout&, uint32_t, const float*, std::byte*, uint8_t*) {}
struct sealed_tile {
    const operand_layout& operand;
    const std::byte* tile;
};
void score_sealed(const run_tiles&, const tile_layout&, const sealed_tile&, uint32_t, uint32_t,
                  const float*, float*) {}
void add_sealed_values(const run_tiles&, const tile_layout&, const sealed_tile&, uint32_t, uint32_t,
                       const float*, uint32_t, uint32_t, float*) {}

// Vectors of one lane have no pieces: records are left to the blocked kernel.
bool reads_codes() { return false; }

#endif

bool reads(const operand_layout& operand) {
    if (operand.plain()) return true;
    // A run lies in one tile.
    if (operand.tiled() && operand.tile_tokens % run_slots != 0) return false;
    const code_kind kind =
        operand.tiled() ? operand.format->tile.reading.codes : operand.format->reading.codes;
    return reads_codes() && kind != code_kind::none && operand.dim % whole_channels(kind) == 0;
}

bool reads_layout(const tile_layout& layout) {
    return layout.order == tile_order::native && reads(layout.keys) && reads(layout.values);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
