// Keys before rotation in tile-local formats: attention over sealed and raw blocks together against
// the definition in double, on the rows that a pool holds.
#include "affine_reference.hpp"
#include "tiles_fixture.hpp"

using namespace tiles_test;

namespace {

/// Attends with `rows` drawn queries in an open step whose rows are written; the largest difference
/// from the definition.
double off_by(const world& w, kv_step* step, kv_seq seq, uint32_t layer, uint32_t rows) {
    const shape& of = w.shapes[layer];
    const uint32_t query_heads = of.group * of.kv_heads;
    const format_test::rope_facts rope(KV_ROPE_HALF, of.dim, 10000.0, 1.0);
    std::mt19937 random(layer * 100 + rows);
    std::vector<float> queries = format_test::gauss_row(rows * query_heads * of.dim, random);
    std::vector<float> out(queries.size());
    kv_tensor in = KV_INIT(kv_tensor);
    in.data = queries.data();
    in.dtype = KV_DTYPE_F32;
    in.rows = rows;
    in.heads = query_heads;
    in.dim = of.dim;
    kv_tensor result = in;
    result.data = out.data();
    ok(kv_attend(step, layer, &in, &result, nullptr));
    const uint32_t before = w.lane(seq, layer).slots;
    double largest = 0.0;
    for (uint32_t head = 0; head < of.kv_heads; ++head) {
        std::vector<std::vector<double>> keys;
        std::vector<std::vector<float>> values;
        for (uint32_t slot = 0; slot < before + rows; ++slot) {
            const std::vector<float> key = w.stored(seq, layer, false, head, slot);
            keys.push_back(rope.turned({key.begin(), key.end()}, slot, 1));
            values.push_back(w.stored(seq, layer, true, head, slot));
        }
        for (uint32_t i = 0; i < rows * of.group; ++i) {
            const uint32_t r = i / of.group;
            const std::size_t at =
                (std::size_t{r} * query_heads + head * of.group + i % of.group) * of.dim;
            const auto from = queries.begin() + static_cast<std::ptrdiff_t>(at);
            const std::vector<double> query = rope.turned({from, from + of.dim}, before + r, 1);
            std::vector<double> sums(of.dim);
            double denominator = 0.0;
            for (uint32_t slot = 0; slot <= before + r; ++slot) {
                double dot = 0.0;
                for (uint32_t d = 0; d < of.dim; ++d) dot += query[d] * keys[slot][d];
                const double weight = std::exp(dot / std::sqrt(double{of.dim * 1.0}));
                denominator += weight;
                for (uint32_t d = 0; d < of.dim; ++d) sums[d] += weight * double{values[slot][d]};
            }
            for (uint32_t d = 0; d < of.dim; ++d) {
                largest = std::max(largest, std::abs(sums[d] / denominator - double{out[at + d]}));
            }
        }
    }
    return largest;
}

void step_and_compare(const world& w, kv_seq seq, uint32_t rows) {
    kv_step* open = nullptr;
    ok(kv_step_begin(w.pool, &open));
    kv_append_info info = KV_INIT(kv_append_info);
    ok(kv_seq_append(open, seq, nullptr, rows, &info));
    ok(kv_step_reserve(open, nullptr));
    w.write(open, 3, info.first_position, rows);
    for (uint32_t layer = 0; layer < w.shapes.size(); ++layer) {
        CAPTURE(layer);
        CHECK(off_by(w, open, seq, layer, rows) < 3e-5);
    }
    ok(kv_step_end(open, nullptr));
}

}  // namespace

TEST_CASE("keys turned by slots: tiles beside raw blocks, before and after a round") {
    std::vector<shape> shapes = mixed;
    shapes.push_back({KV_FORMAT_TURBO3, KV_FORMAT_KIVI4});
    shapes.push_back({KV_FORMAT_FP8_TOKEN, KV_FORMAT_KVARN2});
    for (const uint32_t layout : {KV_LAYOUT_NATIVE, KV_LAYOUT_HND}) {
        pool_options options;
        options.layout = layout;
        options.by_slot = true;
        const world w(shapes, options);
        const kv_seq seq = w.create();
        ok(w.step(seq, 3, 150, 150));
        step_and_compare(w, seq, 1);
        step_and_compare(w, seq, 7);
        kv_compress_report report;
        compress(w, seq, KV_SCORER_RANDOM, 90, report);
        CHECK(report.outcome == KV_COMPRESS_DONE);
        step_and_compare(w, seq, 1);
        step_and_compare(w, seq, 40);
        step_and_compare(w, seq, 1);
        w.check();
    }
}
