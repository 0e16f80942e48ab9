// The constants of affine4: the fit against two passes in double, identities, shared tables.
#include "affine_pool_fixture.hpp"

using namespace affine_test;

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
                    std::vector<double> means(64), variances(64);
                    for (uint32_t i = 0; i < 64; ++i) {
                        for (const auto& row : rows) means[i] += row[i] / count;
                        for (const auto& row : rows) {
                            variances[i] += std::pow(row[i] - means[i], 2) / count;
                        }
                    }
                    variances = rope.mixed(variances);
                    double variance = 0;
                    for (const double one : variances) variance += one / 64;
                    for (uint32_t i = 0; i < 64; ++i) {
                        const double floor = std::sqrt(variance) / 64;
                        const float* mean = result.means.data() + head * 64 + i;
                        const float* scale = result.scales.data() + head * 64 + i;
                        CHECK(std::abs(*mean - means[i]) < 1e-6 * (1 + std::abs(means[i])));
                        const double deviation = std::sqrt(variances[i]);
                        CHECK(*scale ==
                              doctest::Approx(std::sqrt(std::max(deviation, floor))).epsilon(1e-5));
                    }
                    if (head == 1 && rope.dimensions != 64) {
                        CHECK(variances[63] * 10000 < variance);  // the floor was needed
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
    for (uint32_t head = 0; head < kv_heads; ++head) {
        std::vector<double> variances;
        for (const float scale : channels.heads[head].scales) {
            variances.push_back(double{scale} * double{scale});
        }
        variances = shape.rope.mixed(variances);
        for (uint32_t i = 0; i < 64; ++i) {
            const double deviation = std::sqrt(variances[i]);
            const uint32_t at = head * 64 + i;
            CHECK(std::abs(result.means[at] - channels.means[at]) < 0.15 * deviation);
            CHECK(std::pow(result.scales[at], 2) == doctest::Approx(deviation).epsilon(0.15));
            const uint32_t pair = i < 32 ? at + 32 : at - 32;
            CHECK(result.scales[at] == result.scales[pair]);
        }
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
    CHECK(bytes[1] - bytes[0] < 7 * table);  // what seven more would take alone
}

TEST_CASE("a fit of keys before rotation is that of keys that are not rotated") {
    std::mt19937 random(28);
    pool_shape by_slot, plain;
    by_slot.key_format = plain.key_format = KV_FORMAT_F16;
    by_slot.flags = KV_LAYER_CACHE_POSITIONS;
    plain.rope = rope_facts();
    layer_channels channels(64, random);
    std::mt19937 same = random;
    const live_pool first(by_slot, channels), second(plain, channels);
    run_step(first, channels, 200, random);
    run_step(second, channels, 200, same);
    fitted of_first(64), of_second(64);
    require_ok(kv_seq_fit_affine(first.handle, first.sequence, &of_first.fit));
    require_ok(kv_seq_fit_affine(second.handle, second.sequence, &of_second.fit));
    CHECK(of_first.means == of_second.means);
    CHECK(of_first.scales == of_second.scales);
    // Records mean the same numbers, but those are other keys.
    CHECK(of_first.fit.identity != of_second.fit.identity);
    channels.means = of_first.means;
    channels.scales = of_first.scales;
    by_slot.key_format = KV_FORMAT_AFFINE4;
    const live_pool made(by_slot, channels);
    kv_step* step = nullptr;
    require_ok(kv_step_begin(made.handle, &step));
    require_ok(kv_seq_append(step, made.sequence, nullptr, 1, nullptr));
    require_ok(kv_step_reserve(step, nullptr));
    CHECK(read_arena(step).key_identity == of_first.fit.identity);
}
