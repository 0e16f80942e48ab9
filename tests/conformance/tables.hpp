// Exported tables with their buffers, and attention computed from them alone: addresses, lengths
// and positions as kvrt.h describes them, in double.
#pragma once

#include "engine.hpp"

namespace conformance {

struct exported {
    kv_tables tables = KV_INIT(kv_tables);
    std::vector<int32_t> block_table, indptr, indices, last_page_len, query_start, kv_len,
        positions, slot_positions, slot_indptr, sealed_blocks;
    std::vector<int64_t> slot_mapping;

    exported(kv_step* step, uint32_t layer, uint32_t kv_head = 0) {
        tables.kv_head = kv_head;
        require_ok(kv_step_export(step, layer, &tables));  // sizes first
        const std::size_t items = tables.item_count, tokens = tables.token_count;
        block_table.assign(items * (tables.max_blocks + 2), 7);
        indptr.resize(items + 1);
        indices.resize(tables.indices_count);
        last_page_len.resize(items);
        query_start.resize(items + 1);
        kv_len.resize(items);
        positions.resize(tokens);
        slot_positions.resize(tables.slot_positions_count);
        slot_indptr.resize(items + 1);
        slot_mapping.resize(tokens);
        sealed_blocks.resize(items);
        tables.block_table = block_table.data();
        tables.block_table_stride = tables.max_blocks + 2;
        tables.block_table_capacity = block_table.size();
        tables.indptr = indptr.data();
        tables.indices = indices.data();
        tables.indices_capacity = indices.size();
        tables.last_page_len = last_page_len.data();
        tables.query_start = query_start.data();
        tables.kv_len = kv_len.data();
        tables.positions = positions.data();
        tables.slot_positions = slot_positions.data();
        tables.slot_positions_capacity = slot_positions.size();
        tables.slot_indptr = slot_indptr.data();
        tables.slot_mapping = slot_mapping.data();
        tables.sealed_blocks = sealed_blocks.data();
        tables.item_capacity = items;
        tables.token_capacity = tokens;
        require_ok(kv_step_export(step, layer, &tables));
    }

    /// Of an element, or of a word of a record.
    char* address(int64_t block, uint32_t slot, uint32_t head, uint32_t dim, bool value) const {
        const int64_t group = slot / tables.slot_group, in_group = slot % tables.slot_group;
        const int64_t element =
            value ? group * tables.value_stride_group + in_group * tables.value_stride_slot +
                        head * tables.value_stride_head + dim * tables.value_stride_dim
                  : group * tables.key_stride_group + in_group * tables.key_stride_slot +
                        head * tables.key_stride_head + dim * tables.key_stride_dim;
        return static_cast<char*>(tables.base) + block * tables.block_stride +
               (value ? tables.value_offset : tables.key_offset) +
               element * (value ? tables.value_word_bytes : tables.key_word_bytes);
    }

    double load(int64_t block, uint32_t slot, uint32_t head, uint32_t dim, bool value) const {
        const uint32_t format = value ? tables.value_format : tables.key_format;
        const char* at = address(block, slot, head, dim, value);
        if (format == KV_FORMAT_F32) {
            float number;
            std::memcpy(&number, at, sizeof number);
            return double{number};
        }
        uint16_t bits;
        std::memcpy(&bits, at, sizeof bits);
        const int mantissa_bits = format == KV_FORMAT_F16 ? 10 : 7;
        const int bias = format == KV_FORMAT_F16 ? 15 : 127;
        const int exponent = (bits & 0x7fff) >> mantissa_bits;
        const int mantissa = bits & ((1 << mantissa_bits) - 1);
        const int whole = exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits);
        const double magnitude =
            std::ldexp(whole, (exponent == 0 ? 1 : exponent) - bias - mantissa_bits);
        return (bits & 0x8000) != 0 ? -magnitude : magnitude;
    }
};

/// A row as KV_ROPE_HALF turns it at `place`, all of its dimensions, with theta 10000.
inline std::vector<double> rotated_half(std::vector<double> row, double place) {
    const std::size_t half = row.size() / 2;
    for (std::size_t b = 0; b < half; ++b) {
        const double angle =
            place * std::pow(10000.0, -static_cast<double>(b) / static_cast<double>(half));
        const double x = row[b], y = row[half + b];
        row[b] = x * std::cos(angle) - y * std::sin(angle);
        row[half + b] = x * std::sin(angle) + y * std::cos(angle);
    }
    return row;
}

enum class table_kind { dense, compressed };

/// Attention of all rows: [rows][query_heads][value_dim], then the logarithms of denominators. With
/// cache_positions queries and keys are turned by slot, as rotated_half does.
/// `keep(item, kv head, position)` says whether a token may be seen.
template <class predicate>
std::vector<double> attend_from_tables(const exported& e, const layer_shape& s,
                                       const std::vector<float>& queries, table_kind kind,
                                       const predicate& keep) {
    const std::size_t rows = e.tables.token_count;
    const uint32_t group = s.query_heads / s.kv_heads;
    std::vector<double> out(rows * s.query_heads * s.value_dim);
    std::vector<double> logs(rows * s.query_heads);
    for (uint32_t item = 0; item < e.tables.item_count; ++item) {
        const int32_t first = e.query_start[item], end = e.query_start[item + 1];
        const auto block_of = [&](uint32_t slot) {
            const uint32_t i = slot / e.tables.block_tokens;
            return kind == table_kind::dense ? e.block_table[item * e.tables.block_table_stride + i]
                                             : e.indices[static_cast<uint32_t>(e.indptr[item]) + i];
        };
        // As attention uses them: [kv_head][slot][key_dim].
        std::vector<std::vector<std::vector<double>>> keys(s.kv_heads);
        for (uint32_t kv_head = 0; kv_head < s.kv_heads; ++kv_head) {
            for (uint32_t slot = 0; slot < static_cast<uint32_t>(e.kv_len[item]); ++slot) {
                std::vector<double> key;
                for (uint32_t d = 0; d < s.key_dim; ++d) {
                    key.push_back(
                        e.load(block_of(slot), slot % e.tables.block_tokens, kv_head, d, false));
                }
                keys[kv_head].push_back(s.cache_positions ? rotated_half(key, slot) : key);
            }
        }
        for (int32_t row = first; row < end; ++row) {
            const uint32_t seen = static_cast<uint32_t>(e.kv_len[item] - (end - 1 - row));
            const int64_t own = e.positions[static_cast<uint32_t>(row)];
            for (uint32_t head = 0; head < s.query_heads; ++head) {
                const uint32_t kv_head = head / group;
                const int32_t* slot_position =
                    e.slot_positions.data() +
                    kv_head * static_cast<std::size_t>(e.slot_indptr[e.tables.item_count]) +
                    e.slot_indptr[item];
                const float* given =
                    queries.data() +
                    (static_cast<std::size_t>(row) * s.query_heads + head) * s.key_dim;
                std::vector<double> q(given, given + s.key_dim);
                if (s.cache_positions) q = rotated_half(q, seen - 1);
                const double scale = double{1.0f / std::sqrt(static_cast<float>(s.key_dim))};
                std::vector<std::pair<uint32_t, double>> logits;
                double largest = s.sink_logits.empty() ? -INFINITY : double{s.sink_logits[head]};
                for (uint32_t slot = 0; slot < seen; ++slot) {
                    const int64_t position = slot_position[slot];
                    const bool inside = s.window == 0 || position < s.window_sinks ||
                                        position > own - int64_t{s.window};
                    if (!inside || !keep(item, kv_head, position)) continue;
                    const std::vector<double>& key = keys[kv_head][slot];
                    double logit = 0.0;
                    for (uint32_t d = 0; d < s.key_dim; ++d) logit += q[d] * key[d];
                    logit *= scale;
                    if (s.softcap != 0.0f) {
                        logit = double{s.softcap} * std::tanh(logit / double{s.softcap});
                    }
                    if (!s.alibi_slopes.empty()) {
                        logit += double{s.alibi_slopes[head]} * static_cast<double>(position - own);
                    }
                    logits.emplace_back(slot, logit);
                    largest = std::max(largest, logit);
                }
                double denominator =
                    s.sink_logits.empty() ? 0.0 : std::exp(double{s.sink_logits[head]} - largest);
                const std::size_t at = static_cast<std::size_t>(row) * s.query_heads + head;
                double* result = out.data() + at * s.value_dim;
                for (const auto& [slot, logit] : logits) {
                    const double weight = std::exp(logit - largest);
                    denominator += weight;
                    for (uint32_t d = 0; d < s.value_dim; ++d) {
                        result[d] += weight * e.load(block_of(slot), slot % e.tables.block_tokens,
                                                     kv_head, d, true);
                    }
                }
                for (uint32_t d = 0; d < s.value_dim; ++d) result[d] /= denominator;
                logs[at] = largest + std::log(denominator);
            }
        }
    }
    out.insert(out.end(), logs.begin(), logs.end());
    return out;
}

inline bool keep_all(uint32_t, uint32_t, int64_t) { return true; }

/// The largest difference, relative to the larger of 1 and the numbers themselves.
template <class number>
double largest_difference(const std::vector<float>& found, const std::vector<number>& expected) {
    if (found.size() != expected.size()) return INFINITY;
    double largest = 0.0;
    for (std::size_t i = 0; i < found.size(); ++i) {
        const double wanted = static_cast<double>(expected[i]);
        const double difference =
            std::abs(double{found[i]} - wanted) / std::max(1.0, std::abs(wanted));
        if (!(difference <= largest)) largest = std::isnan(difference) ? INFINITY : difference;
    }
    return largest;
}

}  // namespace conformance
