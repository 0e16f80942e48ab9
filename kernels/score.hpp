// What keys are worth by themselves, for a whole cohort in one launch: TriAttention's scores
// (retention/triattention.hpp says what they are), and norms and ranges of rows
// (retention/measures.hpp). A thread has a slot, and sums over its channels in the order in which
// the CPU does for tiles, so where that has fused multiply-adds the scores have the same bits.
//
// Keys are scored as cached: no position is needed. Formats whose rows depend on positions are none
// that kernels read.
#pragma once

#include <cmath>
#include <type_traits>

#include "kernels/read.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t score_threads = 128;
inline constexpr uint32_t score_stretch = 512;  ///< slots of a block of threads

/// One lane of one sequence.
struct score_lane {
    uint64_t table;   ///< place in tables
    uint64_t scores;  ///< place of the row of its first KV head's first query head
    uint64_t means;   ///< place of its first query head's means
    uint64_t phases;  ///< place of its sequence's phases
    uint32_t slots;
    uint32_t unused;
};

/// Query head g of KV head h of a lane has row h * group + g of its scores, rows score_stride
/// apart; entries [0, slots) are written.
///
/// Launch with score_blocks(count, kv_heads, most_slots) blocks of score_threads threads and
/// score_shared_bytes(bands, heads); `heads` of the kernel is heads_at_once(group).
struct triattention_parameters {
    const std::byte* arena = nullptr;
    block_place place;
    const score_lane* lanes = nullptr;  ///< [count]
    const uint32_t* tables = nullptr;
    /// [query heads of a lane][bands], of query_moments.
    const float* mean_real = nullptr;
    const float* mean_imaginary = nullptr;
    const float* mean_magnitude = nullptr;
    const double* phases = nullptr;  ///< what triattention_phases wrote, per sequence and rotation
    float* scores = nullptr;
    uint64_t score_stride = 0;
    double attention_factor = 1.0;
    uint32_t count = 0;
    uint32_t most_slots = 0;  ///< of a lane
    uint32_t group = 1;       ///< query heads of a KV head
    uint32_t rotated = 0;     ///< bands
    uint32_t variants = 1;    ///< offsets whose maximum counts; 1: the phases are means over them
    bool interleaved = false;

    KVRT_BOTH uint32_t bands() const { return place.keys.dim - rotated; }
};

KVRT_BOTH constexpr uint32_t score_stretches(uint32_t most_slots) {
    return most_slots / score_stretch + (most_slots % score_stretch != 0 ? 1 : 0);
}
constexpr uint32_t score_blocks(uint32_t lanes, uint32_t kv_heads, uint32_t most_slots) {
    return lanes * kv_heads * score_stretches(most_slots);
}
/// Query heads that a kernel scores in one pass over the keys: there are kernels of 2, 4 and 8.
constexpr uint32_t heads_at_once(uint32_t group) { return group <= 2 ? 2 : group <= 4 ? 4 : 8; }
KVRT_BOTH constexpr uint32_t score_shared_bytes(uint32_t bands, uint32_t heads) {
    return bands * heads * 3 * static_cast<uint32_t>(sizeof(float));
}

/// What slots of what head this block of threads has; `end` is 0 where there are none.
struct score_share {
    uint32_t index;
    uint32_t head;
    uint32_t first, end;
};
template <class Cx>
KVRT_DEVICE score_share share_of_stretch(const score_lane* lanes, uint32_t count, uint32_t kv_heads,
                                         uint32_t most_slots) {
    const uint32_t stretches = score_stretches(most_slots);
    score_share share;
    share.first = Cx::block() % stretches * score_stretch;
    share.head = Cx::block() / stretches % kv_heads;
    share.index = Cx::block() / stretches / kv_heads;
    share.end = 0;
    if (share.index >= count) return share;
    const uint32_t slots = Cx::template load_constant<uint32_t>(&lanes[share.index].slots);
    if (share.first >= slots) return share;
    share.end = slots - share.first < score_stretch ? slots : share.first + score_stretch;
    return share;
}

template <class Cx>
KVRT_DEVICE const std::byte* block_of_slot(const std::byte* arena, const uint32_t* table,
                                           uint32_t slot, uint32_t block_tokens) {
    return block_at(arena, Cx::template load_constant<uint32_t>(table + slot / block_tokens));
}

/// What a query head's scores weigh a band of keys with: its magnitude, and its one dimension or
/// two.
struct band_weight {
    float norm = 0.0f, real = 0.0f, imaginary = 0.0f;
};
/// Of means and phases, in double, as triattention_weights does. `means` and `phases` are places,
/// of the query head's means and of its sequence's phases.
template <class Cx>
KVRT_DEVICE band_weight weight_of_band(const triattention_parameters& call, uint64_t means,
                                       uint64_t phases, uint32_t variant, uint32_t band) {
    const uint64_t at = means + band;
    const double real = double{Cx::template load_constant<float>(call.mean_real + at)};
    const double imaginary = double{Cx::template load_constant<float>(call.mean_imaginary + at)};
    const double magnitude = double{Cx::template load_constant<float>(call.mean_magnitude + at)};
    const double above = magnitude - std::sqrt(real * real + imaginary * imaginary);
    const double spread = above > 0.0 ? above : 0.0;
    band_weight made;
    if (band < call.rotated) {
        const double* const phase =
            call.phases + phases + 2 * (uint64_t{variant} * call.rotated + band);
        const double c = Cx::template load_constant<double>(phase);
        const double s = Cx::template load_constant<double>(phase + 1);
        const double factor = call.attention_factor;
        made.norm = static_cast<float>(factor * spread);
        made.real = static_cast<float>(factor * (real * c - imaginary * s));
        made.imaginary = static_cast<float>(factor * (real * s + imaginary * c));
    } else {
        made.norm = static_cast<float>(spread);
        made.real = static_cast<float>(real);
    }
    return made;
}

/// Weights of `heads` query heads lie in shared memory by band: [heads] for magnitudes, then
/// [heads][real, imaginary] for products; those of heads beyond the group are 0.
template <class Cx, uint32_t heads>
struct band_weights {
    static constexpr uint32_t per_band = heads * 3;

    static KVRT_DEVICE const float* of(uint32_t band) {
        return reinterpret_cast<const float*>(Cx::shared()) + band * per_band;
    }

    static KVRT_DEVICE void make(const triattention_parameters& call, uint64_t means,
                                 uint64_t phases, uint32_t first_head, uint32_t variant) {
        float* const shared = reinterpret_cast<float*>(Cx::shared());
        const uint32_t bands = call.bands();
        for (uint32_t i = Cx::thread(); i < bands * heads; i += score_threads) {
            const uint32_t band = i / heads, h = i % heads;
            band_weight made;
            if (first_head + h < call.group) {
                made = weight_of_band<Cx>(call, means + uint64_t{first_head + h} * bands, phases,
                                          variant, band);
            }
            float* const weights = shared + band * per_band;
            Cx::store(weights + h, made.norm);
            Cx::store(weights + heads + 2 * h, made.real);
            Cx::store(weights + heads + 2 * h + 1, made.imaginary);
        }
    }
};

/// Magnitude of a band of one dimension or two.
template <class Cx, bool rotated>
KVRT_DEVICE float magnitude_of(float a, float b) {
    return rotated ? std::sqrt(Cx::multiply_add(a, a, b * b))
                   : Cx::bits_to_f32(Cx::f32_to_bits(a) & 0x7fffffffu);
}

/// Sums of a slot, per query head.
template <class Cx, uint32_t heads>
struct head_sums {
    float dot[heads] = {};
    float norm[heads] = {};

    /// A band of one dimension or two; magnitudes are summed with the first variant alone.
    template <bool rotated>
    KVRT_DEVICE void add(const float* weights, float a, float b, bool first_variant) {
        using pair = word2;
        if (first_variant) {
            const float magnitude = magnitude_of<Cx, rotated>(a, b);
            KVRT_UNROLL
            for (uint32_t h = 0; h < heads; h += 2) {
                const pair two = Cx::template load<pair>(weights + h);
                norm[h] = Cx::multiply_add(Cx::bits_to_f32(two.x), magnitude, norm[h]);
                norm[h + 1] = Cx::multiply_add(Cx::bits_to_f32(two.y), magnitude, norm[h + 1]);
            }
        }
        KVRT_UNROLL
        for (uint32_t h = 0; h < heads; ++h) {
            const pair both = Cx::template load<pair>(weights + heads + 2 * h);
            dot[h] = Cx::multiply_add(Cx::bits_to_f32(both.x), a, dot[h]);
            if constexpr (rotated) dot[h] = Cx::multiply_add(Cx::bits_to_f32(both.y), b, dot[h]);
        }
    }
};

/// Calls visit(band, a, b, does it rotate) for the bands of a row, in order; b is 0 where a band
/// has one dimension.
template <class reader, class callable>
KVRT_DEVICE void visit_bands(const triattention_parameters& call, const reader& row,
                             const callable& visit) {
    using turned = std::true_type;
    const uint32_t rotated = call.rotated, bands = call.bands();
    const auto left = [](uint32_t from, uint32_t end, uint32_t most) {
        return end - from < most ? end - from : most;
    };
    if (call.interleaved) {
        constexpr uint32_t at_once = read_channels / 2;
        for (uint32_t band = 0; band < rotated; band += at_once) {
            const uint32_t count = left(band, rotated, at_once);
            float both[read_channels];
            row.read(2 * band, 2 * count, both);
            KVRT_UNROLL
            for (uint32_t i = 0; i < at_once; ++i) {
                if (i >= count) continue;
                visit(band + i, both[2 * i], both[2 * i + 1], turned());
            }
        }
    } else {
        for (uint32_t band = 0; band < rotated; band += read_channels) {
            const uint32_t count = left(band, rotated, read_channels);
            float a[read_channels], b[read_channels];
            row.read(band, count, a);
            row.read(rotated + band, count, b);
            KVRT_UNROLL
            for (uint32_t i = 0; i < read_channels; ++i) {
                if (i >= count) continue;
                visit(band + i, a[i], b[i], turned());
            }
        }
    }
    for (uint32_t band = rotated; band < bands; band += read_channels) {
        const uint32_t count = left(band, bands, read_channels);
        float a[read_channels];
        row.read(rotated + band, count, a);
        KVRT_UNROLL
        for (uint32_t i = 0; i < read_channels; ++i) {
            if (i >= count) continue;
            visit(band + i, a[i], 0.0f, std::false_type());
        }
    }
}

/// The kernel of TriAttention, for keys that are stored so.
template <class Cx, coding codes, number type, uint32_t heads>
KVRT_DEVICE void score_keys(const triattention_parameters& call) {
    using weights = band_weights<Cx, heads>;
    const uint32_t kv_heads = call.place.kv_heads;
    const score_share share =
        share_of_stretch<Cx>(call.lanes, call.count, kv_heads, call.most_slots);
    if (share.end == 0) return;
    const score_lane& lane = call.lanes[share.index];
    const uint32_t* const table = call.tables + Cx::template load_constant<uint64_t>(&lane.table);
    const uint64_t phases = Cx::template load_constant<uint64_t>(&lane.phases);
    const uint64_t means = Cx::template load_constant<uint64_t>(&lane.means) +
                           uint64_t{share.head} * call.group * call.bands();
    float* const scores = call.scores + Cx::template load_constant<uint64_t>(&lane.scores) +
                          uint64_t{share.head} * call.group * call.score_stride;

    for (uint32_t first_head = 0; first_head < call.group; first_head += heads) {
        for (uint32_t part = share.first; part < share.end; part += score_threads) {
            // Threads behind the end score its last slot, since all are needed at barriers.
            const uint32_t wanted = part + Cx::thread();
            const uint32_t slot = wanted < share.end ? wanted : share.end - 1;
            const uint32_t tokens = call.place.block_tokens;
            const row_reader<Cx, codes, type> row(
                call.place.keys, block_of_slot<Cx>(call.arena, table, slot, tokens), slot % tokens,
                share.head);
            float best[heads], norm[heads];
            for (uint32_t variant = 0; variant < call.variants; ++variant) {
                if (call.variants != 1 || part == share.first) {
                    Cx::barrier();  // nobody reads the weights before any more
                    weights::make(call, means, phases, first_head, variant);
                    Cx::barrier();
                }
                head_sums<Cx, heads> sums;
                const bool first_variant = variant == 0;
                visit_bands(call, row, [&](uint32_t band, float a, float b, auto turns) {
                    sums.template add<decltype(turns)::value>(weights::of(band), a, b,
                                                              first_variant);
                });
                KVRT_UNROLL
                for (uint32_t h = 0; h < heads; ++h) {
                    if (variant == 0) norm[h] = sums.norm[h];
                    if (variant == 0 || best[h] < sums.dot[h]) best[h] = sums.dot[h];
                }
            }
            if (wanted >= share.end) continue;
            KVRT_UNROLL
            for (uint32_t h = 0; h < heads; ++h) {
                if (first_head + h >= call.group) continue;
                Cx::store(scores + (first_head + h) * call.score_stride + slot, best[h] + norm[h]);
            }
        }
    }
}

/// Norms of rows, and the greatest channel minus the least (VaSE's range). Row h of a lane's out is
/// KV head h's, rows `stride` apart, from lane.scores on; a null pointer asks for nothing.
///
/// Launch with score_blocks(count, kv_heads, most_slots) blocks of score_threads threads.
struct measure_parameters {
    const std::byte* arena = nullptr;
    block_place place;
    const score_lane* lanes = nullptr;  ///< [count]; means and phases are not looked at
    const uint32_t* tables = nullptr;
    float* norm = nullptr;
    float* range = nullptr;
    uint64_t stride = 0;
    uint32_t count = 0;
    uint32_t most_slots = 0;
    bool values = false;   ///< rows of values instead of keys
    bool negates = false;  ///< norms: the smaller the better, as KEY_NORM scores keys
};

template <class Cx, coding codes, number type>
KVRT_DEVICE void measure_rows(const measure_parameters& call) {
    const score_share share =
        share_of_stretch<Cx>(call.lanes, call.count, call.place.kv_heads, call.most_slots);
    if (share.end == 0) return;
    const score_lane& lane = call.lanes[share.index];
    const uint32_t* const table = call.tables + Cx::template load_constant<uint64_t>(&lane.table);
    const uint64_t out =
        Cx::template load_constant<uint64_t>(&lane.scores) + uint64_t{share.head} * call.stride;
    const operand_place& operand = call.values ? call.place.values : call.place.keys;
    const uint32_t tokens = call.place.block_tokens;
    for (uint32_t slot = share.first + Cx::thread(); slot < share.end; slot += score_threads) {
        const row_reader<Cx, codes, type> row(
            operand, block_of_slot<Cx>(call.arena, table, slot, tokens), slot % tokens, share.head);
        float even = 0.0f, odd = 0.0f;
        float least = Cx::bits_to_f32(0x7f800000u), greatest = Cx::bits_to_f32(0xff800000u);
        for (uint32_t channel = 0; channel < operand.dim; channel += read_channels) {
            float x[read_channels];
            row.read(channel, read_channels, x);
            KVRT_UNROLL
            for (uint32_t i = 0; i < read_channels; ++i) {
                float& sum = i % 2 == 0 ? even : odd;
                sum = Cx::multiply_add(x[i], x[i], sum);
                least = x[i] < least ? x[i] : least;
                greatest = greatest < x[i] ? x[i] : greatest;
            }
        }
        const float norm = std::sqrt(even + odd);
        if (call.norm != nullptr) Cx::store(call.norm + out + slot, call.negates ? -norm : norm);
        if (call.range != nullptr) Cx::store(call.range + out + slot, greatest - least);
    }
}

}  // namespace kvrt::kernels
