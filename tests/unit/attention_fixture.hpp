// Attention by its definition on dense vectors in double, for tests: it knows nothing of tiles,
// pieces or partial softmaxes.
#pragma once

#include <limits>
#include <memory>

#include "affine_reference.hpp"
#include "attention/attend.hpp"
#include "paged_fixture.hpp"

namespace attention_test {

using paged_test::paged_cache;

/// How a layer's keys are turned by their slots, and what the kernels are given for it.
struct slot_rotation {
    format_test::rope_facts rope;
    std::vector<float> table;
    kvrt::position_rotation turning;

    explicit slot_rotation(format_test::rope_facts facts) : rope(std::move(facts)) {
        turning.pairs = rope.dimensions / 2;
        turning.interleaved = rope.style == KV_ROPE_INTERLEAVED;
        turning.gain = static_cast<float>(rope.factor);
        turning.inverse_frequencies = rope.frequencies.data();
        table.resize(kvrt::turning_table_floats(turning.pairs));
        kvrt::fill_turning_table(rope.frequencies.data(), turning.pairs, table.data());
        turning.table = table.data();
    }
};

/// One sequence: its cache, its queries, and what the layer adds.
struct problem {
    paged_cache cache;
    kvrt::attend_layer layer;
    uint32_t rows;
    uint32_t slots;
    std::vector<float> sinks, slopes;
    std::vector<float> queries;                     // [rows][query_heads][key_dim]
    std::shared_ptr<const slot_rotation> rotation;  // null: keys are as attention uses them
    uint64_t skipped = 0;  // positions of the text before the one that is in slot 0

    problem(paged_cache stored, uint32_t group, uint32_t row_count, uint32_t slot_count,
            std::mt19937& random)
        : cache(std::move(stored)), rows(row_count), slots(slot_count) {
        layer.layout = cache.layout;
        layer.kv_heads = cache.layout.kv_heads;
        layer.query_heads = group * layer.kv_heads;
        layer.scale = 1.0f / std::sqrt(static_cast<float>(cache.layout.keys.dim));
        cache.fill(slots, random);
        std::normal_distribution<float> normal;
        queries.resize(std::size_t{rows} * layer.query_heads * cache.layout.keys.dim);
        for (float& value : queries) value = normal(random);
    }

    void add_sinks(std::mt19937& random) {
        std::normal_distribution<float> normal;
        sinks.resize(layer.query_heads);
        for (float& value : sinks) value = normal(random);
        layer.sink_logits = sinks.data();
    }
    void add_slopes() {
        slopes.resize(layer.query_heads);
        for (uint32_t h = 0; h < layer.query_heads; ++h) {
            slopes[h] = 0.25f / static_cast<float>(h + 1);
        }
        layer.alibi_slopes = slopes.data();
    }

    void rotate_by_slots(const format_test::rope_facts& rope) {
        rotation = std::make_shared<slot_rotation>(rope);
        layer.slot_turning = &rotation->turning;
    }

    kvrt::attend_item item(uint32_t first_row = 0) const {
        kvrt::attend_item made;
        made.blocks = cache.blocks.data();
        made.first_row = first_row;
        made.rows = rows;
        made.slots = slots;
        made.next_position = skipped + slots;
        made.window_first = int64_t{slots} - rows - int64_t{layer.window} + 1;
        return made;
    }

    /// Row r stands at position slots - rows + r, slot s at position s, less what is skipped.
    bool sees(uint32_t row, uint32_t slot) const {
        const uint32_t position = slots - rows + row;
        if (slot > position) return false;
        return layer.window == 0 || slot < layer.window_sinks || slot + layer.window > position;
    }

    /// Logits of all slots, -infinity where the row does not see.
    std::vector<double> logits_of(uint32_t row, uint32_t head) const {
        const uint32_t kv_head = head / (layer.query_heads / layer.kv_heads);
        const uint32_t key_dim = cache.layout.keys.dim;
        const auto first =
            queries.begin() +
            static_cast<std::ptrdiff_t>((std::size_t{row} * layer.query_heads + head) * key_dim);
        std::vector<double> query(first, first + key_dim), key(key_dim);
        if (rotation) query = rotation->rope.turned(query, slots - rows + row, 1);
        std::vector<double> logits(slots, -std::numeric_limits<double>::infinity());
        for (uint32_t slot = 0; slot < slots; ++slot) {
            if (!sees(row, slot)) continue;
            double dot = 0;
            for (uint32_t i = 0; i < key_dim; ++i) key[i] = cache.get(false, slot, kv_head, i);
            if (rotation) key = rotation->rope.turned(key, slot, 1);
            for (uint32_t i = 0; i < key_dim; ++i) dot += query[i] * key[i];
            dot *= double{layer.scale};
            if (layer.softcap != 0) dot = double{layer.softcap} * std::tanh(dot / layer.softcap);
            if (!slopes.empty()) {
                dot += double{slopes[head]} * (double(slot) - double(slots - rows + row));
            }
            logits[slot] = dot;
        }
        return logits;
    }

    void attend_row(uint32_t row, uint32_t head, double* out, double& log_sum_exp) const {
        const uint32_t kv_head = head / (layer.query_heads / layer.kv_heads);
        const uint32_t value_dim = cache.layout.values.dim;
        const std::vector<double> logits = logits_of(row, head);
        double largest = sinks.empty() ? -std::numeric_limits<double>::infinity() : sinks[head];
        for (const double logit : logits) largest = std::max(largest, logit);
        double sum = sinks.empty() ? 0.0 : std::exp(sinks[head] - largest);
        std::fill_n(out, value_dim, 0.0);
        for (uint32_t slot = 0; slot < slots; ++slot) {
            if (!sees(row, slot)) continue;
            const double weight = std::exp(logits[slot] - largest);
            sum += weight;
            for (uint32_t i = 0; i < value_dim; ++i) {
                out[i] += weight * cache.get(true, slot, kv_head, i);
            }
        }
        for (uint32_t i = 0; i < value_dim; ++i) out[i] /= sum;
        log_sum_exp = largest + std::log(sum);
    }
};

/// Output of a call: [rows][query_heads][value_dim] and [rows][query_heads].
struct result {
    std::vector<float> out, log_sum_exp;
    bool operator==(const result& other) const {
        return std::memcmp(out.data(), other.out.data(), out.size() * sizeof(float)) == 0 &&
               std::memcmp(log_sum_exp.data(), other.log_sum_exp.data(),
                           log_sum_exp.size() * sizeof(float)) == 0;
    }
};

enum class path { kernels, reference };

/// Attends over one problem; `spare` adds workspace beyond what one sequence needs at least.
inline result run(const problem& from, kvrt::executor& threads, path which = path::kernels,
                  uint64_t spare = 0) {
    const uint32_t value_dim = from.cache.layout.values.dim;
    const uint32_t key_dim = from.cache.layout.keys.dim;
    const uint32_t heads = from.layer.query_heads;
    result made;
    made.out.assign(std::size_t{from.rows} * heads * value_dim, -1.0f);
    made.log_sum_exp.assign(std::size_t{from.rows} * heads, -1.0f);
    std::vector<std::byte> workspace(kvrt::attend_workspace_bytes(from.layer, from.slots) + spare);
    const kvrt::attend_item item = from.item();
    kvrt::attend_call call;
    call.layer = &from.layer;
    call.arena = from.cache.arena;
    call.items = &item;
    call.item_count = 1;
    call.queries = {reinterpret_cast<std::byte*>(const_cast<float*>(from.queries.data())),
                    kvrt::element::f32, int64_t{heads} * key_dim, key_dim, 1};
    call.out = {reinterpret_cast<std::byte*>(made.out.data()), kvrt::element::f32,
                int64_t{heads} * value_dim, value_dim, 1};
    call.log_sum_exp = made.log_sum_exp.data();
    call.workspace = workspace.data();
    call.workspace_bytes = workspace.size();
    if (which == path::reference) {
        kvrt::attend_reference(call);
    } else {
        kvrt::attend(call, threads);
    }
    return made;
}

/// What a problem's output has to be, in double.
struct definition {
    std::vector<double> out, log_sum_exp;

    explicit definition(const problem& from) {
        const uint32_t value_dim = from.cache.layout.values.dim;
        const std::size_t vectors = std::size_t{from.rows} * from.layer.query_heads;
        out.resize(vectors * value_dim);
        log_sum_exp.resize(vectors);
        for (std::size_t index = 0; index < vectors; ++index) {
            const uint32_t row = static_cast<uint32_t>(index / from.layer.query_heads);
            const uint32_t head = static_cast<uint32_t>(index % from.layer.query_heads);
            from.attend_row(row, head, out.data() + index * value_dim, log_sum_exp[index]);
        }
    }
};

/// Relative L2 distance over all rows; the worst log-sum-exp comes in too.
inline double distance(const definition& expected, const result& got) {
    double difference = 0, size = 0, worst = 0;
    for (std::size_t i = 0; i < expected.out.size(); ++i) {
        const double off = got.out[i] - expected.out[i];
        difference += off * off;
        size += expected.out[i] * expected.out[i];
    }
    for (std::size_t i = 0; i < expected.log_sum_exp.size(); ++i) {
        const double off = std::abs(got.log_sum_exp[i] - expected.log_sum_exp[i]);
        worst = std::max(worst, off / (1 + std::abs(expected.log_sum_exp[i])));
    }
    return std::max(std::sqrt(difference / size), worst);
}
inline double distance(const problem& from, const result& got) {
    return distance(definition(from), got);
}

}  // namespace attention_test
