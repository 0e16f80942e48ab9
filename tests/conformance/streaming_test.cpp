// Layers with KV_LAYER_CACHE_POSITIONS: keys before rotation, turned by their slots. Attention of
// evicted sequences is that of the kept tokens at positions 0, 1, 2 ..., after a million tokens as
// after a thousand. Plain layers beside them: of the kept tokens as the engine turned them.
#include "tables.hpp"

using namespace conformance;

namespace {

layer_shape by_slot() {
    layer_shape layer;
    layer.cache_positions = true;
    return layer;
}

/// The numbers of a token's key (or value, query), in double.
std::vector<double> numbers(uint64_t stream, uint64_t content, uint32_t head, uint32_t dim,
                            uint64_t kind) {
    std::vector<double> row(dim);
    for (uint32_t d = 0; d < dim; ++d) row[d] = double{drawn(stream, content, 0, head, d, kind)};
    return row;
}

// ---- A million tokens
// -----------------------------------------------------------------------------

constexpr uint64_t stream = 9;
constexpr uint32_t sinks = 4, budget = 252, chunk = 63;
constexpr uint64_t period = 315 * chunk;  // of the text, and of what is retained

/// A text that repeats itself, all but its first tokens, read through a cache of `budget` tokens
/// and a chunk.
struct reader {
    bool by_slots;  ///< keys are turned by their slots; else they come as the engine turned them
    engine host;
    kv_seq sequence;
    uint64_t seen = 0;
    uint64_t most_blocks = 0;

    static pool_shape shape(bool by_slots) {
        layer_shape layer;
        layer.cache_positions = by_slots;
        layer.query_heads = 2;
        layer.kv_heads = 1;
        layer.value_dim = 32;
        layer.key_format = layer.value_format = KV_FORMAT_F32;
        pool_shape made;
        made.layers = {layer};
        made.slabs = 1;
        made.max_tokens = budget + chunk;
        return made;
    }
    static kv_policy policy() {
        kv_policy made = policy_of(KV_SCORER_STREAMING, budget);
        made.sinks = sinks;
        made.every = chunk;
        return made;
    }
    explicit reader(bool turned) : by_slots(turned), host(shape(turned)) {
        const kv_policy streaming = policy();
        sequence = host.create(&streaming);
    }

    static uint64_t content_of(uint64_t position) { return position % period; }

    /// Reads that many tokens, of which none crosses a period; what attention gives, if asked.
    std::vector<float> read(uint32_t rows, bool attends = true) {
        part next{sequence, stream, rows};
        next.content_shift = content_of(seen) - seen;
        kv_step* step = host.begin({next});
        host.write(step, 0);
        std::vector<float> out;
        if (attends) out = host.attend(step, 0);
        require_ok(kv_step_end(step, nullptr));
        seen += rows;
        most_blocks = std::max(most_blocks, host.info(sequence).blocks);
        return out;
    }

    /// A key or query as attention sees it.
    std::vector<double> seen_at(const std::vector<double>& row, std::size_t slot) const {
        return by_slots ? rotated_half(row, static_cast<double>(slot)) : row;
    }

    /// What attention has to give for the next rows, from the positions that are retained now.
    std::vector<double> expected(uint32_t rows) {
        std::vector<uint64_t> kept;
        for (const uint32_t position : host.positions(sequence, 0, 0)) kept.push_back(position);
        const std::size_t before = kept.size();
        for (uint32_t r = 0; r < rows; ++r) kept.push_back(seen + r);
        std::vector<std::vector<double>> keys, values;
        for (std::size_t slot = 0; slot < kept.size(); ++slot) {
            const uint64_t content = content_of(kept[slot]);
            keys.push_back(seen_at(numbers(stream, content, 0, 32, 0), slot));
            values.push_back(numbers(stream, content, 0, 32, 1));
        }
        std::vector<double> out, logs;
        for (uint32_t r = 0; r < rows; ++r) {
            for (uint32_t head = 0; head < 2; ++head) {
                const std::vector<double> query =
                    seen_at(numbers(stream, content_of(seen + r), head, 32, 2), before + r);
                std::vector<double> sums(32);
                double denominator = 0.0;
                for (std::size_t slot = 0; slot <= before + r; ++slot) {
                    double dot = 0.0;
                    for (uint32_t d = 0; d < 32; ++d) dot += query[d] * keys[slot][d];
                    const double weight = std::exp(dot / std::sqrt(32.0));
                    denominator += weight;
                    for (uint32_t d = 0; d < 32; ++d) sums[d] += weight * values[slot][d];
                }
                for (const double sum : sums) out.push_back(sum / denominator);
                logs.push_back(std::log(denominator));
            }
        }
        out.insert(out.end(), logs.begin(), logs.end());
        return out;
    }
};

}  // namespace

TEST_CASE("streaming through 1,000,000 tokens: the same attention at the end as near the start") {
    bool by_slots = true;
    SUBCASE("positions in the cache") {}
    SUBCASE("positions in the text") { by_slots = false; }
    reader text(by_slots);
    constexpr uint64_t end = 1'000'000, end_of_chunks = end - 200;
    // Beyond the first period everything repeats itself, to the last bit.
    std::vector<float> second_period;
    double largest = 0.0;
    uint32_t looks = 0, periods = 0;
    while (text.seen + chunk <= end_of_chunks) {
        const bool looks_here =
            text.seen % period == 5 * chunk || text.seen + 2 * chunk > end_of_chunks;
        if (!looks_here) {
            text.read(chunk, text.seen % (8 * chunk) == 0);  // the others only take time
            continue;
        }
        const std::vector<double> expected = text.expected(chunk);
        const std::vector<float> found = text.read(chunk);
        const double off = largest_difference(found, expected);
        CHECK_MESSAGE(off < 1e-5, "behind ", text.seen, " tokens");
        largest = std::max(largest, off);
        ++looks;
        if ((text.seen - chunk) % period != 5 * chunk || text.seen < period) continue;
        ++periods;
        if (second_period.empty()) second_period = found;
        CHECK(std::memcmp(found.data(), second_period.data(), found.size() * sizeof(float)) == 0);
    }
    // The rest one by one, as an engine decodes.
    while (text.seen < end) {
        const std::vector<double> expected = text.expected(1);
        const double off = largest_difference(text.read(1), expected);
        CHECK_MESSAGE(off < 1e-5, "behind ", text.seen, " tokens");
        ++looks;
    }
    CHECK(text.seen == end);
    CHECK(looks > 250);
    CHECK(periods == end / period);
    CHECK(largest > 0.0);
    // The sinks, then the last ones; a round leaves so many, and a chunk comes on top.
    const std::vector<uint32_t> kept = text.host.positions(text.sequence, 0, 0);
    REQUIRE(kept.size() >= budget);
    for (uint32_t i = 0; i < sinks; ++i) CHECK(kept[i] == i);
    for (std::size_t i = sinks; i < kept.size(); ++i) CHECK(kept[i] == end - kept.size() + i);
    CHECK(text.most_blocks <= (budget + chunk + 15) / 16);
    CHECK(text.host.stats().peak_live_blocks <= (budget + chunk + 15) / 16 + 1);
    require_ok(kv_pool_check(text.host.pool()));
}

// ---- Whatever is dropped
// --------------------------------------------------------------------------

namespace {

std::vector<layer_shape> all_kinds_of_layers() {
    layer_shape plain = by_slot();
    layer_shape sharing = by_slot();
    sharing.shared_layer = 0;
    sharing.query_heads = 6;
    layer_shape windowed = by_slot();
    windowed.window = 37;
    windowed.window_sinks = 5;
    windowed.key_format = KV_FORMAT_F32;
    layer_shape biased = by_slot();
    biased.alibi_slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
    biased.sink_logits = {0.0f, 1.0f, -2.0f, 3.0f};
    biased.value_format = KV_FORMAT_F32;
    layer_shape apart = by_slot();
    apart.lane_per_head = true;
    apart.key_dim = 64;
    apart.softcap = 5.0f;
    layer_shape rotated_by_engine;
    return {plain, sharing, windowed, biased, apart, rotated_by_engine};
}

/// Of [rows][heads][dim], heads [first, first + count).
std::vector<float> of_heads(const float* numbers, uint32_t rows, uint32_t heads, uint32_t dim,
                            uint32_t first, uint32_t count) {
    std::vector<float> part;
    for (uint32_t row = 0; row < rows; ++row) {
        const float* from = numbers + (std::size_t{row} * heads + first) * dim;
        part.insert(part.end(), from, from + std::size_t{count} * dim);
    }
    return part;
}

/// A step, each of whose layers attends as its tables say, those of each KV head where it has its
/// own.
void compare_layers(engine& host, const std::vector<part>& parts) {
    kv_step* step = host.begin(parts);
    const uint32_t rows = host.rows();
    for (uint32_t layer = 0; layer < host.shape().layers.size(); ++layer) {
        CAPTURE(layer);
        const layer_shape& s = host.shape().layers[layer];
        if (s.shared_layer < 0) host.write(step, layer);
        const std::vector<float> found = host.attend(step, layer);
        const float* logs = found.data() + std::size_t{rows} * s.query_heads * s.value_dim;
        const std::vector<float> queries = host.queries(layer);
        layer_shape of_lane = s;
        const uint32_t lanes = s.lane_per_head ? s.kv_heads : 1;
        of_lane.kv_heads /= lanes;
        of_lane.query_heads /= lanes;
        for (uint32_t lane = 0; lane < lanes; ++lane) {
            const exported tables(step, layer, lane);
            const auto of_this = [&](const float* numbers, uint32_t dim) {
                return of_heads(numbers, rows, s.query_heads, dim, lane * of_lane.query_heads,
                                of_lane.query_heads);
            };
            std::vector<float> out = of_this(found.data(), s.value_dim);
            const std::vector<float> denominators = of_this(logs, 1);
            out.insert(out.end(), denominators.begin(), denominators.end());
            const std::vector<double> expected = attend_from_tables(
                tables, of_lane, of_this(queries.data(), s.key_dim), table_kind::dense, keep_all);
            CHECK(largest_difference(out, expected) < 1e-5);
        }
    }
    require_ok(kv_step_end(step, nullptr));
}

}  // namespace

TEST_CASE("keys are turned by the slots they have come to, whoever dropped the others") {
    struct round {
        uint32_t scorer, layout;
    };
    for (const round& by :
         {round{KV_SCORER_STREAMING, KV_LAYOUT_NATIVE}, round{KV_SCORER_RANDOM, KV_LAYOUT_HND},
          round{KV_SCORER_H2O, KV_LAYOUT_NATIVE}, round{KV_SCORER_KEYDIFF, KV_LAYOUT_NHD}}) {
        CAPTURE(by.scorer);
        pool_shape shape;
        shape.layers = all_kinds_of_layers();
        shape.layout = by.layout;
        shape.threads = 3;
        shape.max_observed_sequences = 4;
        engine host(shape);
        kv_policy policy = policy_of(by.scorer, 60);
        policy.recent = 8;
        policy.sinks = 3;
        const kv_seq parent = host.create(&policy);
        compare_layers(host, {{parent, 4, 150}});
        require_ok(kv_compress(host.pool(), parent, nullptr, nullptr));
        compare_layers(host, {{parent, 4, 1}});
        compare_layers(host, {{parent, 4, 6}});
        kv_seq child = 0;
        require_ok(kv_seq_fork(host.pool(), parent, 1, &child));
        compare_layers(host, {{parent, 4, 30}, {child, 5, 1}});
        require_ok(kv_compress(host.pool(), parent, nullptr, nullptr));
        require_ok(kv_seq_truncate(host.pool(), child, host.info(child).accepted - 1));
        compare_layers(host, {{child, 6, 3}, {parent, 4, 1}});
        require_ok(kv_pool_check(host.pool()));
    }
}

TEST_CASE("what nothing was dropped of attends as where the engine rotates") {
    layer_shape plain;
    plain.key_format = plain.value_format = KV_FORMAT_F32;
    layer_shape turned = plain;
    turned.cache_positions = true;
    pool_shape shape;
    shape.layers = {plain};
    engine by_engine(shape);
    shape.layers = {turned};
    engine by_library(shape);
    const kv_seq a = by_engine.create(), b = by_library.create();
    uint32_t first = 0;
    for (const uint32_t rows : {70u, 1u, 5u, 1u}) {
        const std::vector<float> found = by_library.run({{b, 2, rows}})[0];
        kv_step* step = by_engine.begin({{a, 2, rows}});
        std::vector<float> keys = by_engine.tensor(0, false), values = by_engine.tensor(0, true);
        std::vector<float> queries = by_engine.queries(0);
        const auto rotate = [&](std::vector<float>& rotated, uint32_t heads) {
            for (uint32_t i = 0; i < rows * heads; ++i) {
                const auto at = rotated.begin() + i * 32;
                const std::vector<double> row = rotated_half({at, at + 32}, first + i / heads);
                std::transform(row.begin(), row.end(), at,
                               [](double x) { return static_cast<float>(x); });
            }
        };
        rotate(keys, plain.kv_heads);
        rotate(queries, plain.query_heads);
        std::vector<float> out(rows * plain.query_heads * plain.value_dim);
        const kv_tensor k = engine::view(keys, rows, plain.kv_heads, 32);
        const kv_tensor v = engine::view(values, rows, plain.kv_heads, plain.value_dim);
        const kv_tensor q = engine::view(queries, rows, plain.query_heads, 32);
        const kv_tensor o = engine::view(out, rows, plain.query_heads, plain.value_dim);
        require_ok(kv_write(step, 0, &k, &v));
        require_ok(kv_attend(step, 0, &q, &o, nullptr));
        require_ok(kv_step_end(step, nullptr));
        const std::vector<float> attended(found.begin(),
                                          found.begin() + static_cast<std::ptrdiff_t>(out.size()));
        CHECK(largest_difference(attended, out) < 1e-5);
        first += rows;
    }
}
