// affine4 in a pool, through the C interface: attention against the definition in double on rows
// that the test decodes from the arena, compaction byte for byte, the fit against two passes in
// double, and identities.
#include <doctest/doctest.h>

#include <string>

#include "affine_reference.hpp"

using namespace format_test;

namespace {

constexpr uint32_t kv_heads = 2, query_heads = 4, group = 2;

void require_ok(kv_status status) {
    char message[512];
    kv_last_error(message, sizeof message);
    REQUIRE_MESSAGE(status == KV_OK, kv_status_name(status), ": ", message);
}

struct pool_shape {
    uint32_t layout = KV_LAYOUT_NATIVE;
    uint32_t dim = 64;
    rope_facts rope = rope_facts(KV_ROPE_HALF, 64, 10000.0, 1.0);
    uint32_t key_format = KV_FORMAT_AFFINE4;
    uint32_t value_format = KV_FORMAT_F32;
    uint32_t window = 0;
    uint32_t layers = 1;
};

/// Constants of all heads, as kv_storage takes them.
struct layer_channels {
    std::vector<channel_facts> heads;
    std::vector<float> means, scales;

    layer_channels(uint32_t dim, std::mt19937& random) {
        for (uint32_t head = 0; head < kv_heads; ++head) {
            heads.emplace_back(dim, random);
            means.insert(means.end(), heads[head].means.begin(), heads[head].means.end());
            scales.insert(scales.end(), heads[head].scales.begin(), heads[head].scales.end());
        }
    }
    kv_storage describe(uint32_t dim) const {
        kv_storage storage = KV_INIT(kv_storage);
        storage.channel_means = means.data();
        storage.channel_scales = scales.data();
        storage.channel_heads = kv_heads;
        storage.channel_dim = dim;
        return storage;
    }
};

/// Rows [tokens][heads][dim] of one layer.
struct rows_of_layer {
    std::vector<float> keys, values, queries;
};

struct live_pool {
    pool_shape shape;
    kv_pool* handle = nullptr;
    kv_seq sequence = 0;

    live_pool(const pool_shape& wanted, const layer_channels& channels, uint32_t threads = 1)
        : shape(wanted) {
        const kv_storage storage = channels.describe(shape.dim);
        const kv_rope rope = shape.rope.describe();
        kv_layer layer = KV_INIT(kv_layer);
        layer.query_heads = query_heads;
        layer.kv_heads = kv_heads;
        layer.key_dim = shape.dim;
        layer.value_dim = 32;
        layer.key_format = shape.key_format;
        layer.value_format = shape.value_format;
        layer.window = shape.window;
        layer.window_sinks = shape.window != 0 ? 5 : 0;
        layer.rope = &rope;
        if (shape.key_format == KV_FORMAT_AFFINE4) layer.key_storage = &storage;
        const std::vector<kv_layer> layers(shape.layers, layer);
        kv_model model = KV_INIT(kv_model);
        model.layers = layers.data();
        model.layer_count = shape.layers;
        kv_pool_config config = KV_INIT(kv_pool_config);
        config.arena_bytes = uint64_t{16} << 20;
        config.layout = shape.layout;
        config.max_tokens_per_sequence = 2048;
        config.max_sequences = 4;
        config.threads = threads;
        require_ok(kv_pool_create(&config, &model, &handle));
        require_ok(kv_seq_create(handle, nullptr, &sequence));
    }
    live_pool(const live_pool&) = delete;
    live_pool& operator=(const live_pool&) = delete;
    ~live_pool() { kv_pool_release(handle); }

    kv_tensor tensor(std::vector<float>& numbers, uint32_t rows, uint32_t heads,
                     uint32_t dim) const {
        kv_tensor made = KV_INIT(kv_tensor);
        made.data = numbers.data();
        made.dtype = KV_DTYPE_F32;
        made.rows = rows;
        made.heads = heads;
        made.dim = dim;
        return made;
    }
    std::vector<uint32_t> positions(uint32_t head) const {
        uint64_t count = 0;
        require_ok(kv_seq_get_positions(handle, sequence, 0, head, 0, nullptr, &count));
        std::vector<uint32_t> out(count);
        require_ok(kv_seq_get_positions(handle, sequence, 0, head, count, out.data(), &count));
        return out;
    }
    uint64_t next_position() const {
        kv_seq_info info = KV_INIT(kv_seq_info);
        require_ok(kv_seq_get_info(handle, sequence, &info));
        return info.accepted;
    }
};

rows_of_layer draw_rows(const live_pool& pool, const layer_channels& channels, uint64_t first,
                        uint32_t rows, std::mt19937& random) {
    rows_of_layer drawn;
    for (uint32_t r = 0; r < rows; ++r) {
        for (uint32_t head = 0; head < kv_heads; ++head) {
            const std::vector<float> key =
                channels.heads[head].key(pool.shape.rope, first + r, random);
            drawn.keys.insert(drawn.keys.end(), key.begin(), key.end());
        }
    }
    drawn.values = gauss_row(rows * kv_heads * 32, random);
    drawn.queries = gauss_row(rows * query_heads * pool.shape.dim, random);
    for (float& x : drawn.queries) x *= 0.3f;
    return drawn;
}

/// The bytes of every retained record while a step is open, [head][slot][words], and the values.
struct stored_rows {
    std::vector<std::vector<std::byte>> records[kv_heads];
    std::vector<std::vector<float>> values[kv_heads];
    std::vector<uint32_t> positions[kv_heads];
    uint64_t key_identity = 0;
};

stored_rows read_arena(kv_step* step) {
    std::vector<int32_t> table(256), slot_positions(kv_heads * 2048);
    int32_t kv_len = 0, slot_indptr[2];
    kv_tables tables = KV_INIT(kv_tables);
    tables.block_table = table.data();
    tables.block_table_stride = tables.block_table_capacity = table.size();
    tables.kv_len = &kv_len;
    tables.slot_indptr = slot_indptr;
    tables.slot_positions = slot_positions.data();
    tables.slot_positions_capacity = slot_positions.size();
    tables.item_capacity = 1;
    require_ok(kv_step_export(step, 0, &tables));
    stored_rows stored;
    stored.key_identity = tables.key_identity;
    const uint32_t slots = static_cast<uint32_t>(kv_len);
    for (uint32_t head = 0; head < kv_heads; ++head) {
        for (uint32_t slot = 0; slot < slots; ++slot) {
            const std::byte* block = static_cast<const std::byte*>(tables.base) +
                                     table[slot / tables.block_tokens] * tables.block_stride;
            const int64_t place = slot % tables.block_tokens, in_group = place % tables.slot_group;
            const int64_t of_group = place / tables.slot_group;
            std::vector<std::byte> record(tables.key_words * tables.key_word_bytes);
            for (uint32_t word = 0; word < tables.key_words; ++word) {
                const int64_t at = of_group * tables.key_stride_group +
                                   in_group * tables.key_stride_slot +
                                   head * tables.key_stride_head + word * tables.key_stride_dim;
                std::memcpy(record.data() + word * tables.key_word_bytes,
                            block + tables.key_offset + at * tables.key_word_bytes,
                            tables.key_word_bytes);
            }
            stored.records[head].push_back(record);
            std::vector<float> value(32);
            for (uint32_t i = 0; i < 32; ++i) {
                const int64_t at = of_group * tables.value_stride_group +
                                   in_group * tables.value_stride_slot +
                                   head * tables.value_stride_head + i * tables.value_stride_dim;
                std::memcpy(&value[i], block + tables.value_offset + at * 4, 4);
            }
            stored.values[head].push_back(value);
            stored.positions[head].push_back(
                static_cast<uint32_t>(slot_positions[head * slots + slot]));
        }
    }
    return stored;
}

/// Attention of the step's rows by its definition, on what lies in the arena.
std::vector<double> attend_by_definition(const live_pool& pool, const layer_channels& channels,
                                         const stored_rows& stored, const rows_of_layer& step,
                                         uint64_t first_position, uint32_t rows) {
    const uint32_t dim = pool.shape.dim;
    std::vector<double> out;
    std::vector<std::vector<double>> keys[kv_heads];
    for (uint32_t head = 0; head < kv_heads; ++head) {
        for (std::size_t slot = 0; slot < stored.records[head].size(); ++slot) {
            keys[head].push_back(decode_affine(stored.records[head][slot].data(),
                                               channels.heads[head], pool.shape.rope,
                                               stored.positions[head][slot]));
        }
    }
    for (uint32_t r = 0; r < rows; ++r) {
        for (uint32_t query_head = 0; query_head < query_heads; ++query_head) {
            const uint32_t head = query_head / group;
            const float* query = step.queries.data() + (r * query_heads + query_head) * dim;
            std::vector<double> sums(32);
            double denominator = 0;
            for (std::size_t slot = 0; slot < keys[head].size(); ++slot) {
                const uint64_t position = stored.positions[head][slot];
                if (position > first_position + r) continue;
                if (pool.shape.window != 0 && position >= 5 &&
                    position + pool.shape.window <= first_position + r) {
                    continue;
                }
                double dot = 0;
                for (uint32_t i = 0; i < dim; ++i) dot += double{query[i]} * keys[head][slot][i];
                const double weight = std::exp(dot / std::sqrt(static_cast<double>(dim)));
                denominator += weight;
                for (uint32_t i = 0; i < 32; ++i) sums[i] += weight * stored.values[head][slot][i];
            }
            for (const double sum : sums) out.push_back(sum / denominator);
        }
    }
    return out;
}

/// The last slots hold the step's keys, as exactly as 4 bits can.
void check_keys(const live_pool& pool, const layer_channels& channels, const stored_rows& stored,
                const rows_of_layer& step, uint32_t rows) {
    const uint32_t dim = pool.shape.dim;
    for (uint32_t head = 0; head < kv_heads; ++head) {
        double off = 0, size = 0;
        const std::size_t first = stored.records[head].size() - rows;
        for (uint32_t r = 0; r < rows; ++r) {
            const std::vector<double> back =
                decode_affine(stored.records[head][first + r].data(), channels.heads[head],
                              pool.shape.rope, stored.positions[head][first + r]);
            for (uint32_t i = 0; i < dim; ++i) {
                const double key = double{step.keys[(r * kv_heads + head) * dim + i]};
                off += (back[i] - key) * (back[i] - key);
                size += key * key;
            }
        }
        CHECK(std::sqrt(off / size) < 0.15);
    }
}

/// A step of `rows` tokens; its output is compared with the definition.
stored_rows run_step(const live_pool& pool, const layer_channels& channels, uint32_t rows,
                     std::mt19937& random) {
    const uint64_t first = pool.next_position();
    rows_of_layer drawn = draw_rows(pool, channels, first, rows, random);
    kv_step* step = nullptr;
    require_ok(kv_step_begin(pool.handle, &step));
    require_ok(kv_seq_append(step, pool.sequence, nullptr, rows, nullptr));
    require_ok(kv_step_reserve(step, nullptr));
    std::vector<float> out(rows * query_heads * 32);
    const kv_tensor keys = pool.tensor(drawn.keys, rows, kv_heads, pool.shape.dim);
    const kv_tensor values = pool.tensor(drawn.values, rows, kv_heads, 32);
    const kv_tensor queries = pool.tensor(drawn.queries, rows, query_heads, pool.shape.dim);
    const kv_tensor target = pool.tensor(out, rows, query_heads, 32);
    for (uint32_t layer = 0; layer < pool.shape.layers; ++layer) {
        require_ok(kv_write(step, layer, &keys, &values));
    }
    require_ok(kv_attend(step, 0, &queries, &target, nullptr));
    stored_rows stored;
    if (pool.shape.key_format == KV_FORMAT_AFFINE4) {
        stored = read_arena(step);
        check_keys(pool, channels, stored, drawn, rows);
        const std::vector<double> expected =
            attend_by_definition(pool, channels, stored, drawn, first, rows);
        double off = 0, size = 0;
        for (std::size_t i = 0; i < out.size(); ++i) {
            off += (out[i] - expected[i]) * (out[i] - expected[i]);
            size += expected[i] * expected[i];
        }
        CHECK(std::sqrt(off / size) < 1e-5);
    }
    require_ok(kv_step_end(step, nullptr));
    return stored;
}

void compress(const live_pool& pool, uint32_t scorer, uint32_t budget) {
    kv_policy policy = KV_INIT(kv_policy);
    policy.scorer = scorer;
    policy.budget = budget;
    policy.seed = 7;
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = &policy;
    kv_compress_report report = KV_INIT(kv_compress_report);
    require_ok(kv_compress(pool.handle, pool.sequence, &options, &report));
    REQUIRE(report.outcome == KV_COMPRESS_DONE);
    require_ok(kv_pool_check(pool.handle));
}

std::vector<rope_facts> ropes() {
    return {rope_facts(KV_ROPE_HALF, 64, 10000.0, 1.0),
            rope_facts(KV_ROPE_INTERLEAVED, 64, 500000.0, 1.2),
            rope_facts(KV_ROPE_HALF, 40, 10000.0, 1.0), rope_facts()};
}

}  // namespace

TEST_CASE("affine4 in a pool: attention before and after compaction, records moved as they are") {
    std::mt19937 random(21);
    for (const uint32_t layout : {KV_LAYOUT_NATIVE, KV_LAYOUT_HND, KV_LAYOUT_NHD}) {
        for (const rope_facts& rope : ropes()) {
            CAPTURE(layout);
            CAPTURE(rope.style);
            CAPTURE(rope.dimensions);
            pool_shape shape;
            shape.layout = layout;
            shape.rope = rope;
            const layer_channels channels(shape.dim, random);
            const live_pool pool(shape, channels);
            run_step(pool, channels, 150, random);
            run_step(pool, channels, 150, random);
            const stored_rows before = run_step(pool, channels, 1, random);
            compress(pool, KV_SCORER_RANDOM, 60);
            const stored_rows after = run_step(pool, channels, 1, random);
            REQUIRE(after.records[0].size() == 61);
            CHECK(after.positions[0] != after.positions[1]);
            for (uint32_t head = 0; head < kv_heads; ++head) {
                for (uint32_t slot = 0; slot < 60; ++slot) {
                    const uint32_t position = after.positions[head][slot];
                    CHECK(after.records[head][slot] == before.records[head][position]);
                }
            }
            run_step(pool, channels, 70, random);
            compress(pool, KV_SCORER_RANDOM, 40);
            run_step(pool, channels, 1, random);
        }
    }
}

TEST_CASE("affine4 behind a window that slides") {
    std::mt19937 random(22);
    pool_shape shape;
    shape.window = 50;
    const layer_channels channels(shape.dim, random);
    const live_pool pool(shape, channels);
    for (const uint32_t rows : {40u, 1u, 90u, 1u, 1u, 33u, 1u})
        run_step(pool, channels, rows, random);
}

TEST_CASE("key norms of affine4 are those of the rows it holds") {
    std::mt19937 random(23);
    pool_shape shape;
    shape.rope = rope_facts(KV_ROPE_INTERLEAVED, 64, 10000.0, 1.5);
    const layer_channels channels(shape.dim, random);
    const live_pool pool(shape, channels);
    run_step(pool, channels, 100, random);
    const stored_rows before = run_step(pool, channels, 100, random);
    compress(pool, KV_SCORER_RANDOM, 120);  // so that positions are scattered
    const auto first = std::pair(pool.positions(0), pool.positions(1));
    compress(pool, KV_SCORER_KEY_NORM, 30);
    for (uint32_t head = 0; head < kv_heads; ++head) {
        const std::vector<uint32_t>& scattered = head == 0 ? first.first : first.second;
        std::vector<std::pair<double, uint32_t>> norms;
        for (const uint32_t position : scattered) {
            double square = 0;
            for (const double x : decode_affine(before.records[head][position].data(),
                                                channels.heads[head], shape.rope, position)) {
                square += x * x;
            }
            norms.push_back({square, position});
        }
        std::sort(norms.begin(), norms.end());
        std::vector<uint32_t> expected;
        for (uint32_t i = 0; i < 30; ++i) expected.push_back(norms[i].second);
        std::sort(expected.begin(), expected.end());
        CHECK(pool.positions(head) == expected);
    }
}

TEST_CASE("TriAttention scores affine4 by the rows it holds, wherever they stand") {
    std::mt19937 random(29);
    pool_shape shape;
    shape.rope = rope_facts(KV_ROPE_HALF, 48, 10000.0, 1.0);
    const layer_channels channels(shape.dim, random);
    const live_pool pool(shape, channels);
    run_step(pool, channels, 150, random);
    const stored_rows stored = run_step(pool, channels, 150, random);
    // A second pool holds as f32 what the test decodes from the first.
    shape.key_format = KV_FORMAT_F32;
    const live_pool plain(shape, channels);
    std::vector<float> decoded, values(300 * kv_heads * 32);
    for (uint32_t position = 0; position < 300; ++position) {
        for (uint32_t head = 0; head < kv_heads; ++head) {
            const std::vector<double> row = decode_affine(
                stored.records[head][position].data(), channels.heads[head], shape.rope, position);
            decoded.insert(decoded.end(), row.begin(), row.end());
        }
    }
    kv_step* step = nullptr;
    require_ok(kv_step_begin(plain.handle, &step));
    require_ok(kv_seq_append(step, plain.sequence, nullptr, 300, nullptr));
    require_ok(kv_step_reserve(step, nullptr));
    const kv_tensor keys = plain.tensor(decoded, 300, kv_heads, 64);
    const kv_tensor zeros = plain.tensor(values, 300, kv_heads, 32);
    require_ok(kv_write(step, 0, &keys, &zeros));
    require_ok(kv_step_end(step, nullptr));

    constexpr uint32_t bands = 64 - 48 / 2;
    std::vector<float> means = gauss_row(3 * query_heads * bands, random);
    for (uint32_t i = 2 * query_heads * bands; i < means.size(); ++i) means[i] = 3.0f;
    kv_query_statistics statistics = KV_INIT(kv_query_statistics);
    statistics.query_heads = query_heads;
    statistics.bands = bands;
    statistics.tokens = 100;
    statistics.mean_real = means.data();
    statistics.mean_imaginary = means.data() + query_heads * bands;
    statistics.mean_magnitude = means.data() + 2 * query_heads * bands;
    for (const live_pool* one : {&pool, &plain}) {
        require_ok(kv_pool_set_statistics(one->handle, &statistics));
        compress(*one, KV_SCORER_RANDOM, 200);
        compress(*one, KV_SCORER_TRIATTENTION, 60);
    }
    for (uint32_t head = 0; head < kv_heads; ++head) {
        CHECK(pool.positions(head) == plain.positions(head));
        CHECK(pool.positions(head).size() == 60);
    }
}

TEST_CASE("threads and the cut of a prompt change no bit of affine4's records") {
    std::vector<std::vector<std::byte>> seen;
    for (const uint32_t chunk : {160u, 7u}) {
        std::mt19937 random(24);
        pool_shape shape;
        const layer_channels channels(shape.dim, random);
        const live_pool pool(shape, channels, chunk == 7 ? 3 : 1);
        rows_of_layer all = draw_rows(pool, channels, 0, 161, random);
        for (uint32_t at = 0; at < 161;) {
            const uint32_t rows = std::min(at == 160 ? 1u : chunk, 160 - at + (at == 160 ? 1 : 0));
            kv_step* step = nullptr;
            require_ok(kv_step_begin(pool.handle, &step));
            require_ok(kv_seq_append(step, pool.sequence, nullptr, rows, nullptr));
            require_ok(kv_step_reserve(step, nullptr));
            kv_tensor keys = pool.tensor(all.keys, rows, kv_heads, 64);
            kv_tensor values = pool.tensor(all.values, rows, kv_heads, 32);
            keys.data = all.keys.data() + at * kv_heads * 64;
            values.data = all.values.data() + at * kv_heads * 32;
            require_ok(kv_write(step, 0, &keys, &values));
            at += rows;
            if (at == 161) {
                const stored_rows stored = read_arena(step);
                std::vector<std::byte> bytes;
                for (const auto& head : stored.records) {
                    for (const auto& record : head) {
                        bytes.insert(bytes.end(), record.begin(), record.end());
                    }
                }
                seen.push_back(bytes);
            }
            require_ok(kv_step_end(step, nullptr));
        }
    }
    CHECK(seen[0] == seen[1]);
}

namespace {

struct fitted {
    std::vector<float> means, scales;
    kv_affine_fit fit = KV_INIT(kv_affine_fit);

    explicit fitted(uint32_t dim) : means(kv_heads * dim), scales(kv_heads * dim) {
        fit.kv_heads = kv_heads;
        fit.key_dim = dim;
        fit.channel_means = means.data();
        fit.channel_scales = scales.data();
    }
};

}  // namespace

TEST_CASE("the fit is what two passes in double find in the keys that are retained") {
    std::mt19937 random(25);
    for (const rope_facts& rope : ropes()) {
        for (const uint32_t format : {KV_FORMAT_F32, KV_FORMAT_F16}) {
            CAPTURE(rope.style);
            CAPTURE(rope.dimensions);
            CAPTURE(format);
            pool_shape shape;
            shape.rope = rope;
            shape.key_format = format;
            layer_channels channels(shape.dim, random);
            // A channel that does not vary: the last, which style NONE and 40 dimensions leave be.
            channels.heads[1].scales[63] = 1e-30f;
            const live_pool pool(shape, channels);
            rows_of_layer drawn = draw_rows(pool, channels, 0, 400, random);
            kv_step* step = nullptr;
            require_ok(kv_step_begin(pool.handle, &step));
            require_ok(kv_seq_append(step, pool.sequence, nullptr, 400, nullptr));
            require_ok(kv_step_reserve(step, nullptr));
            const kv_tensor keys = pool.tensor(drawn.keys, 400, kv_heads, 64);
            const kv_tensor values = pool.tensor(drawn.values, 400, kv_heads, 32);
            require_ok(kv_write(step, 0, &keys, &values));
            require_ok(kv_step_end(step, nullptr));
            for (const bool evicted : {false, true}) {
                CAPTURE(evicted);
                if (evicted) compress(pool, KV_SCORER_RANDOM, 250);
                fitted result(64);
                result.fit.first_position = 16;
                result.fit.tokens = 300;
                require_ok(kv_seq_fit_affine(pool.handle, pool.sequence, &result.fit));
                uint64_t fewest = 1000;
                for (uint32_t head = 0; head < kv_heads; ++head) {
                    std::vector<std::vector<double>> rows;
                    for (const uint32_t position : pool.positions(head)) {
                        if (position < 16 || position >= 316) continue;
                        std::vector<double> row(64);
                        for (uint32_t i = 0; i < 64; ++i) {
                            const double x =
                                double{drawn.keys[(position * kv_heads + head) * 64 + i]};
                            row[i] = format == KV_FORMAT_F32
                                         ? x
                                         : value_of(nearest_bits(x, element::f16), element::f16);
                        }
                        rows.push_back(rope.turned(row, position, -1));
                    }
                    fewest = std::min<uint64_t>(fewest, rows.size());
                    const double count = static_cast<double>(rows.size());
                    std::vector<double> means(64), deviations(64);
                    double variance = 0;
                    for (uint32_t i = 0; i < 64; ++i) {
                        for (const auto& row : rows) means[i] += row[i] / count;
                        double square = 0;
                        for (const auto& row : rows) square += std::pow(row[i] - means[i], 2);
                        deviations[i] = std::sqrt(square / count);
                        variance += square / count / 64;
                    }
                    for (uint32_t i = 0; i < 64; ++i) {
                        const double floor = std::sqrt(variance) / 64;
                        const float* mean = result.means.data() + head * 64 + i;
                        const float* scale = result.scales.data() + head * 64 + i;
                        CHECK(std::abs(*mean - means[i]) < 1e-6 * (1 + std::abs(means[i])));
                        CHECK(*scale == doctest::Approx(std::sqrt(std::max(deviations[i], floor)))
                                            .epsilon(1e-5));
                    }
                    if (head == 1 && rope.dimensions != 64) {
                        CHECK(deviations[63] * 100 < std::sqrt(variance));  // the floor was needed
                    }
                }
                CHECK(result.fit.tokens_used == fewest);
            }
        }
    }
}

TEST_CASE("the fit of keys with known means and spreads finds them") {
    std::mt19937 random(26);
    pool_shape shape;
    shape.key_format = KV_FORMAT_F16;
    const layer_channels channels(shape.dim, random);
    const live_pool pool(shape, channels);
    run_step(pool, channels, 1500, random);
    fitted result(64);
    require_ok(kv_seq_fit_affine(pool.handle, pool.sequence, &result.fit));
    CHECK(result.fit.tokens_used == 1500);
    for (uint32_t i = 0; i < kv_heads * 64; ++i) {
        const double deviation = double{channels.scales[i]};
        CHECK(std::abs(result.means[i] - channels.means[i]) < 0.15 * deviation);
        CHECK(std::pow(result.scales[i], 2) == doctest::Approx(deviation).epsilon(0.15));
    }
}

TEST_CASE("a fit's identity is that of the pool made of it, and of no other") {
    std::mt19937 random(27);
    pool_shape source_shape;
    source_shape.key_format = KV_FORMAT_F16;
    layer_channels channels(64, random);
    const live_pool source(source_shape, channels);
    run_step(source, channels, 100, random);
    fitted result(64);
    require_ok(kv_seq_fit_affine(source.handle, source.sequence, &result.fit));
    channels.means = result.means;
    channels.scales = result.scales;
    const auto identity_of = [&](const pool_shape& shape, const layer_channels& constants) {
        const live_pool pool(shape, constants);
        kv_step* step = nullptr;
        require_ok(kv_step_begin(pool.handle, &step));
        require_ok(kv_seq_append(step, pool.sequence, nullptr, 1, nullptr));
        require_ok(kv_step_reserve(step, nullptr));
        return read_arena(step).key_identity;
    };
    for (const uint32_t layout : {KV_LAYOUT_NATIVE, KV_LAYOUT_HND, KV_LAYOUT_NHD}) {
        pool_shape shape;
        shape.layout = layout;
        CHECK(identity_of(shape, channels) == result.fit.identity);
    }
    pool_shape shape;
    layer_channels other = channels;
    other.means[127] = std::nextafter(other.means[127], 100.0f);
    CHECK(identity_of(shape, other) != result.fit.identity);
    other = channels;
    other.scales[0] = std::nextafter(other.scales[0], 100.0f);
    CHECK(identity_of(shape, other) != result.fit.identity);
    shape.rope.style = KV_ROPE_INTERLEAVED;
    CHECK(identity_of(shape, channels) != result.fit.identity);
    shape = pool_shape();
    shape.rope.frequencies[31] *= 1.0000001;
    CHECK(identity_of(shape, channels) != result.fit.identity);
    shape = pool_shape();
    shape.rope.factor = 1.1;
    CHECK(identity_of(shape, channels) != result.fit.identity);
    shape = pool_shape();
    shape.value_format = KV_FORMAT_F16;
    CHECK(identity_of(shape, channels) == result.fit.identity);
}

TEST_CASE("layers of one rotation share its table") {
    std::mt19937 random(28);
    pool_shape shape;
    const layer_channels channels(shape.dim, random);
    uint64_t bytes[2];
    for (const uint32_t layers : {1u, 8u}) {
        shape.layers = layers;
        const live_pool pool(shape, channels);
        kv_pool_stats stats = KV_INIT(kv_pool_stats);
        require_ok(kv_pool_get_stats(pool.handle, &stats));
        bytes[layers == 8] = stats.metadata_bytes;
        run_step(pool, channels, 20, random);
    }
    constexpr uint64_t table = 4 * 256 * 64 * sizeof(float);
    CHECK(bytes[0] > table);
    CHECK(bytes[1] - bytes[0] < table);
}
