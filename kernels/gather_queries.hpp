// Statistics of queries, gathered as kv_attend passes over them (retention/query_statistics.hpp
// says what they are): each row is rotated back to before its position, and summed by query head
// and band. A step's sums are pending until the next launch, which adds them to the totals of their
// sequence if they are those of the step that the list names, which a cancelled one is not; or
// until a round, when means and covariances are made.
//
// A block of threads has one query head of one sequence, and its sums: nobody else reads or writes
// them. Sums of up to 16 rows have the bits of the CPU's.
#pragma once

#include <cmath>

#include "kernels/row.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t gather_threads = 128;
inline constexpr uint32_t gather_rows = 16;  ///< that are summed in a register
inline constexpr uint32_t query_sums = 6;    ///< arrays, as query_sums of the library
inline constexpr uint32_t most_bands = most_dim;
inline constexpr uint32_t begins_anew = 1u << 31;

/// What is known of one query head of a sequence.
struct query_count {
    uint64_t tokens;   ///< in the totals; 0: they hold nothing
    uint32_t pending;  ///< rows in the pending sums; 0: there are none
    uint32_t step;     ///< whose they are
};

/// Sums of all sequences: each place has query_sums arrays of `length` bands, and `heads` counts.
struct query_memory {
    double* totals = nullptr;
    float* pending = nullptr;  ///< what moments are left in, too
    query_count* counts = nullptr;
    uint64_t length = 0;
    uint64_t heads = 0;  ///< of all layers
};

/// An item of a step in a layer, as listed.
struct gathered_item {
    /// no_sequence: it gathers nothing. With begins_anew: nothing of what is there is this
    /// sequence's.
    uint32_t place;
    uint32_t counted;  ///< the step whose pending sums count
};

/// Launch gather_queries with a block of gather_threads threads and gather_shared_bytes for each
/// query head of as many items as the step may have.
struct query_parameters {
    query_memory memory;
    uint64_t first_band = 0;  ///< of the layer, in each array
    uint64_t first_head = 0;  ///< of the layer, among the counts
    tensor_place queries;
    number type = number::f16;
    uint32_t heads = 0;  ///< query heads
    uint32_t bands = 0;  ///< of a head
    uint32_t rotated = 0;
    bool interleaved = false;
    float inverse_factor = 1.0f;  ///< of the attention factor
    const gathered_item* items = nullptr;
    const uint32_t* step = nullptr;         ///< its number, of which items have those before
    const uint32_t* query_start = nullptr;  ///< first rows of items, and of the one behind them
    const uint32_t* positions = nullptr;    ///< of rows
    double turns[most_dim / 2] = {};        ///< [rotated], of a position
};
inline constexpr uint32_t gather_shared_bytes = (1 + query_sums * gather_threads) * sizeof(float);

/// Where the arrays of a query head begin.
struct head_sums_place {
    uint64_t sums, count;
};
KVRT_BOTH head_sums_place place_of_head(const query_memory& memory, uint64_t first_band,
                                        uint64_t first_head, uint32_t bands, uint32_t place,
                                        uint32_t head) {
    return {uint64_t{place} * query_sums * memory.length + first_band + uint64_t{head} * bands,
            uint64_t{place} * memory.heads + first_head + head};
}

/// Adds pending sums to the totals, if they are of the step that counts and all are finite. All
/// threads call it; returns the tokens that the totals are of. Shared memory is free behind it.
template <class Cx>
KVRT_DEVICE uint64_t fold_pending(const query_memory& memory, const head_sums_place& at,
                                  uint32_t bands, bool begins, uint32_t counted) {
    const query_count known{Cx::template load<uint64_t>(&memory.counts[at.count].tokens),
                            Cx::template load<uint32_t>(&memory.counts[at.count].pending),
                            Cx::template load<uint32_t>(&memory.counts[at.count].step)};
    const uint64_t tokens = begins ? 0 : known.tokens;
    if (begins || known.step != counted || known.pending == 0) return tokens;
    uint32_t* const odd = reinterpret_cast<uint32_t*>(Cx::shared());
    if (Cx::thread() == 0) Cx::store(odd, 0u);
    Cx::barrier();
    for (uint32_t i = Cx::thread(); i < query_sums * bands; i += gather_threads) {
        const float sum = Cx::template load<float>(memory.pending + at.sums +
                                                   i / bands * memory.length + i % bands);
        if (!is_finite<Cx>(sum)) Cx::atomic_add(odd, 1u);
    }
    Cx::barrier();
    const bool finite = Cx::template load<uint32_t>(odd) == 0;
    Cx::barrier();
    for (uint32_t i = Cx::thread(); finite && i < query_sums * bands; i += gather_threads) {
        const uint64_t place = at.sums + i / bands * memory.length + i % bands;
        const double before = tokens == 0 ? 0.0 : Cx::template load<double>(memory.totals + place);
        Cx::store(memory.totals + place,
                  before + double{Cx::template load<float>(memory.pending + place)});
    }
    return finite ? tokens + known.pending : tokens;
}

/// cos and sin of 2 pi x, |x| <= 1/2, as retention/query_statistics.cpp has them.
template <class Cx>
KVRT_DEVICE void turn_to_cos_sin(float turn, float& cosine, float& sine) {
    constexpr float to_integer = 0x1.8p23f;  // adding and taking it off rounds to an integer
    const float quarter = (turn * 4.0f + to_integer) - to_integer;
    const float rest = Cx::multiply_add(-quarter, 0.25f, turn);
    const float x = rest * 6.283185307179586f, xx = x * x;
    float s = 1.0f / 362880.0f;
    s = Cx::multiply_add(s, xx, -1.0f / 5040.0f);
    s = Cx::multiply_add(s, xx, 1.0f / 120.0f);
    s = Cx::multiply_add(s, xx, -1.0f / 6.0f);
    s = Cx::multiply_add(s * xx, x, x);
    float c = 1.0f / 40320.0f;
    c = Cx::multiply_add(c, xx, -1.0f / 720.0f);
    c = Cx::multiply_add(c, xx, 1.0f / 24.0f);
    c = Cx::multiply_add(c, xx, -0.5f);
    c = Cx::multiply_add(c, xx, 1.0f);
    const int32_t count = static_cast<int32_t>(quarter);
    const bool odd = (count & 1) != 0;
    sine = (odd ? c : s) * ((count & 2) != 0 ? -1.0f : 1.0f);
    cosine = (odd ? s : c) * (((count + 1) & 2) != 0 ? -1.0f : 1.0f);
}

/// Rows of an item, the first at a position.
struct gathered_rows {
    uint64_t position;
    uint32_t first_row, rows;
};

/// Sums of one band.
struct band_sums {
    float of[query_sums] = {};
};

template <class Cx>
KVRT_DEVICE float query_at(const query_parameters& call, uint32_t row, uint32_t head,
                           uint32_t channel) {
    const tensor_place& tensor = call.queries;
    const int64_t element = int64_t{row} * tensor.row_stride + int64_t{head} * tensor.head_stride +
                            int64_t{channel} * tensor.dim_stride;
    const std::byte* const at = tensor.data + element * int64_t{number_bytes(call.type)};
    if (call.type == number::f32) return load_number<Cx, number::f32>(at);
    if (call.type == number::f16) return load_number<Cx, number::f16>(at);
    return load_number<Cx, number::bf16>(at);
}

/// Adds up to gather_rows rows, from row `first` of the item on.
template <class Cx>
KVRT_DEVICE void add_rows(const query_parameters& call, const gathered_rows& item, uint32_t head,
                          uint32_t band, uint32_t first, band_sums& sums) {
    const uint32_t left = item.rows - first, rows = left < gather_rows ? left : gather_rows;
    const bool rotated = band < call.rotated;
    const uint32_t channel = !rotated ? call.rotated + band : call.interleaved ? 2 * band : band;
    const uint32_t other = call.interleaved ? channel + 1 : channel + call.rotated;
    float re = 0.0f, im = 0.0f, size = 0.0f, re_square = 0.0f, im_square = 0.0f, product = 0.0f;
    for (uint32_t r = 0; r < rows; ++r) {
        const uint32_t row = item.first_row + first + r;
        const float a = query_at<Cx>(call, row, head, channel);
        if (!rotated) {
            re += a;
            size += magnitude_of<Cx>(a);
            re_square = Cx::multiply_add(a, a, re_square);
            continue;
        }
        const float b = query_at<Cx>(call, row, head, other);
        constexpr double to_integer = 0x1.8p52;
        const double turn = call.turns[band] * static_cast<double>(item.position + first + r);
        float cosine, sine;
        turn_to_cos_sin<Cx>(static_cast<float>(turn - ((turn + to_integer) - to_integer)), cosine,
                            sine);
        cosine *= call.inverse_factor;
        sine *= call.inverse_factor;
        const float x = Cx::multiply_add(a, cosine, b * sine);
        const float y = Cx::multiply_add(b, cosine, -(a * sine));
        re += x;
        im += y;
        re_square = Cx::multiply_add(x, x, re_square);
        im_square = Cx::multiply_add(y, y, im_square);
        product = Cx::multiply_add(x, y, product);
        size += std::sqrt(Cx::multiply_add(a, a, b * b));
    }
    sums.of[0] += re;
    sums.of[1] += im;
    sums.of[2] += rotated ? size * call.inverse_factor : size;
    sums.of[3] += re_square;
    sums.of[4] += im_square;
    sums.of[5] += product;
}

/// The kernel.
template <class Cx>
KVRT_DEVICE void gather_queries(const query_parameters& call) {
    const uint32_t head = Cx::block() % call.heads, index = Cx::block() / call.heads;
    const auto load = [](const uint32_t* from) {
        return Cx::template load_constant<uint32_t>(from);
    };
    const uint32_t place = load(&call.items[index].place);
    if (place == no_sequence) return;
    const uint32_t first_row = load(call.query_start + index);
    const gathered_rows item{load(call.positions + first_row), first_row,
                             load(call.query_start + index + 1) - first_row};
    const query_memory& memory = call.memory;
    const head_sums_place at = place_of_head(memory, call.first_band, call.first_head, call.bands,
                                             place & ~begins_anew, head);
    const uint64_t tokens = fold_pending<Cx>(memory, at, call.bands, (place & begins_anew) != 0,
                                             load(&call.items[index].counted));
    // Parts of the threads have a band each, and sixteen rows after sixteen rows in turn.
    const uint32_t width = call.bands < gather_threads ? call.bands : gather_threads;
    const uint32_t parts = gather_threads / width;
    const uint32_t part = Cx::thread() / width, mine = Cx::thread() % width;
    float* const shared = reinterpret_cast<float*>(Cx::shared()) + 1;  // [query_sums][threads]
    for (uint32_t first_band = 0; first_band < call.bands; first_band += width) {
        const uint32_t band = first_band + mine;
        Cx::barrier();  // nobody reads what is pending, nor partial sums, any more
        if (part < parts && band < call.bands) {
            band_sums sums;
            for (uint32_t row = part * gather_rows; row < item.rows; row += parts * gather_rows) {
                add_rows<Cx>(call, item, head, band, row, sums);
            }
            KVRT_UNROLL
            for (uint32_t s = 0; s < query_sums; ++s) {
                Cx::store(shared + s * gather_threads + Cx::thread(), sums.of[s]);
            }
        }
        Cx::barrier();
        if (part != 0 || band >= call.bands) continue;
        KVRT_UNROLL
        for (uint32_t s = 0; s < query_sums; ++s) {
            float sum = Cx::template load<float>(shared + s * gather_threads + mine);
            for (uint32_t p = 1; p < parts; ++p) {
                sum += Cx::template load<float>(shared + s * gather_threads + p * width + mine);
            }
            Cx::store(memory.pending + at.sums + s * memory.length + band, sum);
        }
    }
    if (Cx::thread() != 0) return;
    Cx::store(&memory.counts[at.count].tokens, tokens);
    Cx::store(&memory.counts[at.count].pending, item.rows);
    Cx::store(&memory.counts[at.count].step, load(call.step));
}

/// One lane of one sequence in a round: its query heads' sums become means and covariances, in the
/// place of what was pending.
struct moments_lane {
    uint64_t first_band;  ///< of the lane's first query head
    uint64_t first_head;
    uint32_t place;
    uint32_t counted;  ///< as gathered_item's; no_sequence: the lane's are given
};

/// Launch make_moments with count * heads blocks of gather_threads threads and gather_shared_bytes.
struct moments_parameters {
    query_memory memory;
    const moments_lane* lanes = nullptr;  ///< [count]
    uint32_t count = 0;
    uint32_t heads = 0;  ///< query heads of a lane
    uint32_t bands = 0;
};

/// The kernel of moments. Of no tokens all are 0.
template <class Cx>
KVRT_DEVICE void make_moments(const moments_parameters& call) {
    const moments_lane& lane = call.lanes[Cx::block() / call.heads];
    const uint32_t counted = Cx::template load_constant<uint32_t>(&lane.counted);
    if (counted == no_sequence) return;
    const query_memory& memory = call.memory;
    const head_sums_place at =
        place_of_head(memory, Cx::template load_constant<uint64_t>(&lane.first_band),
                      Cx::template load_constant<uint64_t>(&lane.first_head), call.bands,
                      Cx::template load_constant<uint32_t>(&lane.place), Cx::block() % call.heads);
    const uint64_t tokens = fold_pending<Cx>(memory, at, call.bands, false, counted);
    Cx::barrier();  // what was pending has been added
    const double inverse = tokens == 0 ? 0.0 : 1.0 / static_cast<double>(tokens);
    for (uint32_t band = Cx::thread(); band < call.bands; band += gather_threads) {
        double mean[query_sums];
        KVRT_UNROLL
        for (uint32_t s = 0; s < query_sums; ++s) {
            const double* const total = memory.totals + at.sums + s * memory.length + band;
            mean[s] = tokens == 0 ? 0.0 : Cx::template load<double>(total) * inverse;
        }
        const double first = mean[3] - mean[0] * mean[0], second = mean[4] - mean[1] * mean[1];
        const double both = mean[5] - mean[0] * mean[1];
        mean[3] = first > 0.0 ? first : 0.0;
        mean[4] = second > 0.0 ? second : 0.0;
        const double most = Cx::square_root(mean[3] * mean[4]);
        mean[5] = both < -most ? -most : both > most ? most : both;
        KVRT_UNROLL
        for (uint32_t s = 0; s < query_sums; ++s) {
            Cx::store(memory.pending + at.sums + s * memory.length + band,
                      static_cast<float>(mean[s]));
        }
    }
    if (Cx::thread() != 0) return;
    Cx::store(&memory.counts[at.count].tokens, tokens);
    Cx::store(&memory.counts[at.count].pending, 0u);
}

}  // namespace kvrt::kernels
