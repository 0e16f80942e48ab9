// affine4 in a pool: attention against the definition in double on rows that the test decodes from
// the arena, compaction byte for byte, scores.
#include "affine_pool_fixture.hpp"

using namespace affine_test;

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

TEST_CASE("affine4 of keys before rotation: means are not turned, attention rotates by slots") {
    std::mt19937 random(24);
    for (const uint32_t layout : {KV_LAYOUT_NATIVE, KV_LAYOUT_NHD}) {
        for (const rope_facts& rope : ropes()) {
            CAPTURE(rope.style);
            CAPTURE(rope.dimensions);
            pool_shape shape;
            shape.layout = layout;
            shape.rope = rope;
            shape.flags = KV_LAYER_CACHE_POSITIONS;
            const layer_channels channels(shape.dim, random);
            const live_pool pool(shape, channels);
            run_step(pool, channels, 150, random);
            run_step(pool, channels, 1, random);
            compress(pool, KV_SCORER_RANDOM, 60);
            run_step(pool, channels, 1, random);
            run_step(pool, channels, 70, random);
            compress(pool, KV_SCORER_KEY_NORM, 40);
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

TEST_CASE("affine4 beside values that are sealed: as f32 keys of the same numbers do") {
    std::mt19937 random(30);
    for (const uint32_t layout : {KV_LAYOUT_NATIVE, KV_LAYOUT_HND}) {
        CAPTURE(layout);
        pool_shape shape;
        shape.layout = layout;
        shape.rope = rope_facts(KV_ROPE_HALF, 40, 10000.0, 1.2);
        shape.block_tokens = 64;
        const layer_channels channels(shape.dim, random);
        constexpr uint32_t chunk = 150, most = 3 * chunk + 2;
        const live_pool alone(shape, channels);
        const rows_of_layer drawn = draw_rows(alone, channels, 0, most, random);
        shape.value_format = KV_FORMAT_KVARN4;
        const live_pool sealed(shape, channels);
        shape.key_format = KV_FORMAT_F32;
        const live_pool plain(shape, channels);

        // One step of all three; the last of them holds what the test decodes from the first, whose
        // values let its records be read.
        const auto take = [&](uint32_t first, uint32_t rows) {
            const auto part = [&](const std::vector<float>& all, uint32_t width) {
                return std::vector<float>(all.begin() + first * width,
                                          all.begin() + (first + rows) * width);
            };
            rows_of_layer now;
            now.keys = part(drawn.keys, kv_heads * 64);
            now.values = part(drawn.values, kv_heads * 32);
            now.queries = part(drawn.queries, query_heads * 64);
            std::vector<float> out[2];
            for (const live_pool* pool : {&alone, &sealed, &plain}) {
                kv_step* step = nullptr;
                require_ok(kv_step_begin(pool->handle, &step));
                require_ok(kv_seq_append(step, pool->sequence, nullptr, rows, nullptr));
                require_ok(kv_step_reserve(step, nullptr));
                const kv_tensor keys = pool->tensor(now.keys, rows, kv_heads, 64);
                const kv_tensor values = pool->tensor(now.values, rows, kv_heads, 32);
                require_ok(kv_write(step, 0, &keys, &values));
                if (pool == &alone) {
                    const stored_rows stored = read_arena(step);
                    for (uint32_t r = 0; r < rows; ++r) {
                        for (uint32_t head = 0; head < kv_heads; ++head) {
                            const std::size_t slot = stored.records[head].size() - rows + r;
                            const std::vector<double> row =
                                decode_affine(stored.records[head][slot].data(),
                                              channels.heads[head], shape.rope, first + r);
                            std::copy(row.begin(), row.end(),
                                      now.keys.begin() + (r * kv_heads + head) * 64);
                        }
                    }
                } else {
                    std::vector<float>& result = out[pool == &plain];
                    result.resize(rows * query_heads * 32);
                    const kv_tensor queries = pool->tensor(now.queries, rows, query_heads, 64);
                    const kv_tensor target = pool->tensor(result, rows, query_heads, 32);
                    require_ok(kv_attend(step, 0, &queries, &target, nullptr));
                }
                require_ok(kv_step_end(step, nullptr));
            }
            double off = 0, size = 0;
            for (std::size_t i = 0; i < out[0].size(); ++i) {
                off += std::pow(double{out[0][i]} - double{out[1][i]}, 2);
                size += double{out[1][i]} * double{out[1][i]};
            }
            CHECK(std::sqrt(off / size) < 1e-5);
        };
        uint32_t next = 0;
        const auto run = [&](uint32_t rows) {
            take(next, rows);
            next += rows;
        };
        run(chunk);
        run(1);
        run(chunk);
        for (const live_pool* pool : {&alone, &sealed, &plain}) {
            compress(*pool, KV_SCORER_RANDOM, 200);
        }
        for (uint32_t head = 0; head < kv_heads; ++head) {
            REQUIRE(sealed.positions(head) == plain.positions(head));
            CHECK(sealed.positions(head).size() == 200);
        }
        run(1);
        run(chunk);
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
