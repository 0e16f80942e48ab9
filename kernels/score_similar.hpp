// R-KV's redundancy in its exact form (retention/unit_keys.hpp says what it is): cosines of all
// keys with all others, tile by tile, then each key's mean without the terms of those whose newest
// similar one it is. Products are added in another order than the CPU's.
#pragma once

#include <cmath>

#include "kernels/content.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t similar_threads = 256;
inline constexpr uint32_t similar_rows = 64;      ///< of a block; each tile has as many columns
inline constexpr uint32_t similar_channels = 32;  ///< in shared memory at once
inline constexpr uint32_t similar_stride =
    similar_rows + 4;  ///< of channels, against bank conflicts
inline constexpr uint32_t similar_parts = similar_channels / lane_channels;
/// Of rows, or of columns: channels, parts of squares, and inverse norms.
inline constexpr uint32_t similar_floats =
    similar_channels * similar_stride + (similar_parts + 1) * similar_rows;
inline constexpr uint32_t similar_shared_bytes =
    2 * similar_floats * static_cast<uint32_t>(sizeof(float));

/// Entries of KV head h of lane i begin at (i * kv_heads + h) * parts_stride. Rows of scores as in
/// score.hpp, one for each KV head.
///
/// Launch compare_keys with similar_blocks(...) blocks of similar_threads threads and
/// similar_shared_bytes; spare_newest with score_blocks(...) of score_threads.
struct similarity_parameters {
    const std::byte* arena = nullptr;
    block_place place;
    const score_lane* lanes = nullptr;  ///< [count]; means and phases are not looked at
    const uint32_t* tables = nullptr;
    float* scores = nullptr;     ///< of compare_keys: sums of cosines with all others
    uint32_t* newest = nullptr;  ///< 1 + the newest slot that is similar to this one; 0: none
    float* cosines = nullptr;    ///< with that one
    uint64_t parts_stride = 0;
    uint64_t score_stride = 0;
    uint32_t count = 0;
    uint32_t most_slots = 0;  ///< of a lane
    float similarity = 0.0f;  ///< keys are similar above this cosine
};

constexpr uint32_t similar_blocks(uint32_t lanes, uint32_t kv_heads, uint32_t most_slots) {
    return lanes * kv_heads * ((most_slots + similar_rows - 1) / similar_rows);
}

/// Keys of a tile's rows or columns in shared memory, by channels, and what their squares add up
/// to. A thread brings eight channels of one key at a time.
template <class Cx>
struct similar_keys {
    float* channels;  ///< [similar_channels][similar_stride]
    float square = 0.0f, odd = 0.0f;

    explicit KVRT_DEVICE similar_keys(float* shared) : channels(shared) {}

    static KVRT_DEVICE uint32_t key() { return Cx::thread() % similar_rows; }
    static KVRT_DEVICE uint32_t part() { return Cx::thread() / similar_rows; }
    KVRT_DEVICE float* squares() const { return channels + similar_channels * similar_stride; }
    KVRT_DEVICE float* inverse_norms() const { return squares() + similar_parts * similar_rows; }

    /// Channels [first, first + similar_channels) of the thread's row.
    KVRT_DEVICE void bring(const opened_row<Cx>& row, uint32_t first) {
        const uint32_t channel = first + part() * lane_channels;
        if (channel >= row.operand.dim) return;
        float x[lane_channels];
        row.read(channel, x);
        KVRT_UNROLL
        for (uint32_t i = 0; i < lane_channels; ++i) {
            square = Cx::multiply_add(x[i], x[i], square);
            odd = Cx::multiply_add(x[i], 0.0f, odd);  // NaN of what is not finite
            Cx::store(channels + (part() * lane_channels + i) * similar_stride + key(), x[i]);
        }
    }
    /// Of `value` in each part of a key, their sum, for threads below similar_rows. All threads.
    KVRT_DEVICE float join_parts(float value) const {
        Cx::store(squares() + part() * similar_rows + key(), value);
        Cx::barrier();
        float sum = 0.0f;
        if (part() == 0) {
            for (uint32_t p = 0; p < similar_parts; ++p) {
                sum += Cx::template load<float>(squares() + p * similar_rows + key());
            }
        }
        return sum;
    }
    /// Once all channels have been brought. A key that is not finite has no direction.
    KVRT_DEVICE void invert_norms() const {
        const float sum = join_parts(square);
        if (part() != 0) return;
        const float by = sum == 0.0f ? 0.0f : 1.0f / std::sqrt(sum);
        Cx::store(inverse_norms() + key(), by > 0.0f ? by : 0.0f);
    }
    KVRT_DEVICE void four_at(const float* from, float (&out)[4]) const {
        const word4 words = Cx::template load<word4>(from);
        out[0] = Cx::bits_to_f32(words.x);
        out[1] = Cx::bits_to_f32(words.y);
        out[2] = Cx::bits_to_f32(words.z);
        out[3] = Cx::bits_to_f32(words.w);
    }
};

/// What a thread has found of its four rows, among its columns so far.
struct similar_rows_found {
    float sums[4] = {};
    float cosines[4] = {};
    uint32_t newest[4] = {};
};

/// Products of a thread's four rows and four columns.
template <class Cx>
KVRT_DEVICE void multiply_keys(const similar_keys<Cx>& rows, const similar_keys<Cx>& columns,
                               uint32_t channels, float (&products)[4][4]) {
    const uint32_t row = Cx::thread() / 16 * 4, column = Cx::thread() % 16 * 4;
    KVRT_ROLLED
    for (uint32_t c = 0; c < channels; ++c) {
        float of_rows[4], of_columns[4];
        rows.four_at(rows.channels + c * similar_stride + row, of_rows);
        columns.four_at(columns.channels + c * similar_stride + column, of_columns);
        KVRT_UNROLL
        for (uint32_t r = 0; r < 4; ++r) {
            KVRT_UNROLL
            for (uint32_t k = 0; k < 4; ++k) {
                products[r][k] = Cx::multiply_add(of_rows[r], of_columns[k], products[r][k]);
            }
        }
    }
}

/// The kernel of cosines: 16 x 16 threads, each with four rows and four columns of a tile.
template <class Cx>
KVRT_DEVICE void compare_keys(const similarity_parameters& call) {
    const uint32_t dim = call.place.keys.dim;
    const score_share share = share_of_stretch<Cx, similar_rows>(
        call.lanes, call.count, call.place.kv_heads, call.most_slots);
    if (share.end == 0) return;
    const score_lane& lane = call.lanes[share.index];
    const uint32_t* const table = call.tables + Cx::template load_constant<uint64_t>(&lane.table);
    const uint32_t slots = Cx::template load_constant<uint32_t>(&lane.slots);
    float* const shared = reinterpret_cast<float*>(Cx::shared());
    const uint32_t first_row = Cx::thread() / 16 * 4, first_column = Cx::thread() % 16 * 4;
    // Threads behind the last slot repeat it, and what comes of that is left out.
    const auto row_at = [&](uint32_t first) {
        const uint32_t slot = first + similar_keys<Cx>::key();
        return opened_row<Cx>(call.place, call.place.keys, call.arena, table,
                              slot < slots ? slot : slots - 1, share.head);
    };
    const opened_row<Cx> mine = row_at(share.first);
    similar_rows_found found;
    float odd = 0.0f;
    KVRT_ROLLED
    for (uint32_t tile = 0; tile < slots; tile += similar_rows) {
        similar_keys<Cx> rows(shared), columns(shared + similar_floats);
        const opened_row<Cx> theirs = row_at(tile);
        float products[4][4] = {};
        KVRT_ROLLED
        for (uint32_t channel = 0; channel < dim; channel += similar_channels) {
            rows.bring(mine, channel);
            columns.bring(theirs, channel);
            Cx::barrier();
            const uint32_t left = dim - channel;
            multiply_keys<Cx>(rows, columns, left < similar_channels ? left : similar_channels,
                              products);
            Cx::barrier();
        }
        rows.invert_norms();
        columns.invert_norms();
        odd = rows.odd;
        Cx::barrier();
        float by_row[4], by_column[4];
        rows.four_at(rows.inverse_norms() + first_row, by_row);
        columns.four_at(columns.inverse_norms() + first_column, by_column);
        KVRT_UNROLL
        for (uint32_t r = 0; r < 4; ++r) {
            KVRT_UNROLL
            for (uint32_t k = 0; k < 4; ++k) {
                const uint32_t column = tile + first_column + k;
                const bool counts = column < slots && column != share.first + first_row + r &&
                                    by_row[r] > 0.0f && by_column[k] > 0.0f;
                const float cosine = counts ? products[r][k] * by_row[r] * by_column[k] : 0.0f;
                found.sums[r] += cosine;
                if (counts && cosine > call.similarity) {
                    found.newest[r] = column + 1;
                    found.cosines[r] = cosine;
                }
            }
        }
    }
    const uint64_t head = uint64_t{share.index} * call.place.kv_heads + share.head;
    float* const scores = call.scores + Cx::template load_constant<uint64_t>(&lane.scores) +
                          uint64_t{share.head} * call.score_stride;
    const similar_keys<Cx> rows(shared);
    const float odds = rows.join_parts(odd);
    if (rows.part() == 0) Cx::store(rows.inverse_norms() + rows.key(), odds);
    Cx::barrier();
    KVRT_UNROLL
    for (uint32_t r = 0; r < 4; ++r) {
        float sum = found.sums[r], cosine = found.cosines[r];
        uint32_t newest = found.newest[r];
        KVRT_UNROLL
        for (uint32_t bits = 8; bits != 0; bits /= 2) {
            sum += Cx::shuffle_xor(sum, bits);
            const float other = Cx::shuffle_xor(cosine, bits);
            const uint32_t slot = Cx::shuffle_xor(newest, bits);
            if (slot > newest) cosine = other;
            newest = slot > newest ? slot : newest;
        }
        const uint32_t slot = share.first + first_row + r;
        if (first_column != 0 || slot >= slots) continue;
        Cx::store(scores + slot,
                  sum + Cx::template load<float>(rows.inverse_norms() + first_row + r));
        Cx::store(call.newest + head * call.parts_stride + slot, newest);
        Cx::store(call.cosines + head * call.parts_stride + slot, cosine);
    }
}

/// The kernel of redundancy: the mean of a key's cosines, without those of rows that spare it.
template <class Cx>
KVRT_DEVICE void spare_newest(const similarity_parameters& call) {
    const score_share share =
        share_of_stretch<Cx>(call.lanes, call.count, call.place.kv_heads, call.most_slots);
    if (share.end == 0) return;
    const score_lane& lane = call.lanes[share.index];
    const uint32_t slots = Cx::template load_constant<uint32_t>(&lane.slots);
    float* const scores = call.scores + Cx::template load_constant<uint64_t>(&lane.scores) +
                          uint64_t{share.head} * call.score_stride;
    const uint64_t head = uint64_t{share.index} * call.place.kv_heads + share.head;
    const uint32_t* const newest = call.newest + head * call.parts_stride;
    const float* const cosines = call.cosines + head * call.parts_stride;
    const float mean = 1.0f / static_cast<float>(slots);
    for (uint32_t slot = share.first + Cx::thread(); slot < share.end; slot += score_threads) {
        float sum = Cx::template load<float>(scores + slot);
        for (uint32_t row = 0; row < slots; ++row) {
            if (Cx::template load<uint32_t>(newest + row) != slot + 1) continue;
            sum -= Cx::template load<float>(cosines + row);
        }
        Cx::store(scores + slot, sum * mean);
    }
}

}  // namespace kvrt::kernels
