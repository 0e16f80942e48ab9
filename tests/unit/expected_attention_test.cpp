// Expected Attention against the definition with whole rotation matrices.
#include "retention/expected_attention.hpp"

#include <complex>

#include "retention/measures.hpp"
#include "retention/transform.hpp"
#include "scorer_fixture.hpp"

using namespace scorer_test;
using matrix = std::vector<double>;  // [dim][dim]

namespace {

rope_description make_rope(uint32_t style, uint32_t dimensions, double theta, double factor) {
    rope_description rope;
    rope.style = style;
    rope.dimensions = dimensions;
    rope.attention_factor = factor;
    for (uint32_t f = 0; f < dimensions / 2; ++f) {
        rope.inverse_frequencies[f] = std::pow(theta, -2.0 * f / dimensions);
    }
    return rope;
}

// Dimensions of a band; a band that is not rotated has one.
std::vector<uint32_t> places(const rope_description& rope, uint32_t band) {
    const uint32_t rotated = rope.dimensions / 2;
    if (band >= rotated) return {rotated + band};
    if (rope.style == KV_ROPE_HALF) return {band, band + rotated};
    return {2 * band, 2 * band + 1};
}

// What a query at `position` is multiplied with, factor and all.
matrix rotation(const rope_description& rope, uint32_t dim, double position) {
    matrix out(std::size_t{dim} * dim);
    for (uint32_t band = 0; band < rope.bands(dim); ++band) {
        const std::vector<uint32_t> at = places(rope, band);
        if (at.size() == 1) {
            out[at[0] * dim + at[0]] = 1;
            continue;
        }
        const double angle = rope.inverse_frequencies[band] * position;
        out[at[0] * dim + at[0]] = out[at[1] * dim + at[1]] =
            rope.attention_factor * std::cos(angle);
        out[at[1] * dim + at[0]] = rope.attention_factor * std::sin(angle);
        out[at[0] * dim + at[1]] = -out[at[1] * dim + at[0]];
    }
    return out;
}

matrix product(const matrix& a, const matrix& b, uint32_t dim, bool transpose_b) {
    matrix out(std::size_t{dim} * dim);
    for (uint32_t i = 0; i < dim; ++i) {
        for (uint32_t j = 0; j < dim; ++j) {
            for (uint32_t k = 0; k < dim; ++k) {
                out[i * dim + j] +=
                    a[i * dim + k] * (transpose_b ? b[j * dim + k] : b[k * dim + j]);
            }
        }
    }
    return out;
}

// Queries before rotation: mean, and a covariance whose blocks are random and positive.
struct query_model {
    std::vector<double> mean;
    matrix covariance;
};

query_model draw_queries(const rope_description& rope, uint32_t dim, std::mt19937& random) {
    std::normal_distribution<float> normal;
    query_model model{std::vector<double>(dim), matrix(std::size_t{dim} * dim)};
    for (double& x : model.mean) x = double{normal(random)};
    for (uint32_t band = 0; band < rope.bands(dim); ++band) {
        const std::vector<uint32_t> at = places(rope, band);
        const double a = double{normal(random)}, b = double{normal(random)};
        const double c = double{normal(random)};
        model.covariance[at[0] * dim + at[0]] = double(float(a * a));
        if (at.size() == 1) continue;
        model.covariance[at[1] * dim + at[1]] = double(float(b * b + c * c));
        model.covariance[at[0] * dim + at[1]] = model.covariance[at[1] * dim + at[0]] =
            double(float(a * b));
    }
    return model;
}

// The arrays that the library takes, for a group.
struct query_arrays {
    std::vector<float> real, imaginary, first, second, cross;

    query_arrays(const std::vector<query_model>& heads, const rope_description& rope,
                 uint32_t dim) {
        for (const query_model& head : heads) {
            for (uint32_t band = 0; band < rope.bands(dim); ++band) {
                const std::vector<uint32_t> at = places(rope, band);
                const bool pair = at.size() == 2;
                const auto put = [](std::vector<float>& to, double x) {
                    to.push_back(static_cast<float>(x));
                };
                put(real, head.mean[at[0]]);
                put(imaginary, pair ? head.mean[at[1]] : NAN);
                put(first, head.covariance[at[0] * dim + at[0]]);
                put(second, pair ? head.covariance[at[1] * dim + at[1]] : NAN);
                put(cross, pair ? head.covariance[at[0] * dim + at[1]] : NAN);
            }
        }
    }
    query_means means() const { return {real.data(), imaginary.data(), nullptr}; }
    query_covariances covariances() const { return {first.data(), second.data(), cross.data()}; }
};

std::vector<float> score(const row_set& set, uint32_t head, const expected_shape& shape,
                         const rope_description& rope, const query_arrays& queries, bool spread,
                         uint64_t next_position, uint32_t cut = ~0u) {
    std::vector<double> phases(expected_phase_count(rope));
    std::vector<float> weights(expected_weight_count(shape, rope, spread) + 1, -123.0f);
    std::vector<float> logits(std::size_t{shape.group} * (set.slots + 5), -77.0f);
    expected_phases(shape, rope, next_position, phases.data());
    expected_weights(shape, rope, phases.data(), queries.means(),
                     spread ? queries.covariances() : query_covariances(), weights.data());
    CHECK(weights.back() == -123.0f);
    for (uint32_t first = 0; first < set.slots; first += std::min(cut, set.slots)) {
        score_expected_logits(set.view(head), first,
                              first + std::min({cut, set.slots, set.slots - first}), shape, rope,
                              weights.data(), spread, logits.data(), set.slots + 5);
    }
    return logits;
}

// Means over positions, one by one.
struct expected_queries {
    std::vector<double> mean;
    matrix covariance;
};

expected_queries expect(const query_model& query, const expected_shape& shape,
                        const rope_description& rope, double next_position) {
    const uint32_t dim = shape.key_dim;
    matrix turn(std::size_t{dim} * dim), spread(std::size_t{dim} * dim);
    for (uint32_t t = 0; t < shape.positions; ++t) {
        const matrix here = rotation(rope, dim, next_position + t);
        for (std::size_t i = 0; i < turn.size(); ++i) turn[i] += here[i] / shape.positions;
        if (shape.turning == covariance_turning::mean_rotation) continue;
        const matrix turned = product(product(here, query.covariance, dim, false), here, dim, true);
        for (std::size_t i = 0; i < turn.size(); ++i) spread[i] += turned[i] / shape.positions;
    }
    if (shape.turning == covariance_turning::mean_rotation) {
        spread = product(product(turn, query.covariance, dim, false), turn, dim, true);
    }
    expected_queries out{std::vector<double>(dim), spread};
    for (uint32_t i = 0; i < dim; ++i) {
        for (uint32_t j = 0; j < dim; ++j) out.mean[i] += turn[i * dim + j] * query.mean[j];
    }
    return out;
}

void check(const row_set& set, const rope_description& rope, uint32_t group, bool spread,
           covariance_turning turning, uint32_t positions, std::mt19937& random) {
    const uint32_t dim = set.dims[0], slots = set.slots;
    constexpr uint64_t next_position = 4321;
    expected_shape shape;
    shape.key_dim = dim;
    shape.group = group;
    shape.positions = positions;
    shape.turning = turning;
    std::vector<query_model> queries;
    std::vector<expected_queries> expected;
    for (uint32_t h = 0; h < group; ++h) {
        queries.push_back(draw_queries(rope, dim, random));
        expected.push_back(expect(queries[h], shape, rope, double(next_position)));
    }
    const query_arrays arrays(queries, rope, dim);
    const uint32_t head = group % 2;
    const std::vector<float> logits = score(set, head, shape, rope, arrays, spread, next_position);
    CHECK(score(set, head, shape, rope, arrays, spread, next_position, 48) == logits);
    for (uint32_t h = 0; h < group; ++h) {
        for (uint32_t slot = 0; slot < slots; ++slot) {
            const double* key = set.row(false, slot, head);
            double z = dot(expected[h].mean.data(), key, dim) / std::sqrt(dim);
            double scale = std::sqrt(dot(key, key, dim));
            if (spread) {
                for (uint32_t i = 0; i < dim; ++i) {
                    z += key[i] * dot(expected[h].covariance.data() + i * dim, key, dim) /
                         (2.0 * dim);
                }
                scale += dot(key, key, dim) / dim;
            }
            CHECK(close(double{logits[h * (slots + 5) + slot]}, z, 2e-5, scale));
        }
        for (uint32_t i = slots; i < slots + 5; ++i) CHECK(logits[h * (slots + 5) + i] == -77.0f);
    }
}

}  // namespace

TEST_CASE("expected logits are those of the definition, in every kind of storage") {
    std::mt19937 random(21);
    const rope_description rope = make_rope(KV_ROPE_HALF, 32, 1e4, 1.0);
    bool spread = false;
    for_each_row_set(75, 32, 32, [&](const row_set& set) {
        check(set, rope, 2, spread = !spread, covariance_turning::mean_rotation, 16, random);
    });
}

TEST_CASE("expected logits for every rotation and group") {
    std::mt19937 random(22);
    const row_set set({tile_order::native, 16, KV_FORMAT_F16, KV_FORMAT_F16}, 37, 40, 32,
                      drawn_rows(40, 32, random));
    const rope_description ropes[] = {
        make_rope(KV_ROPE_HALF, 40, 1e4, 1.0), make_rope(KV_ROPE_INTERLEAVED, 40, 1e6, 1.37),
        make_rope(KV_ROPE_HALF, 20, 1e4, 1.2), make_rope(KV_ROPE_INTERLEAVED, 16, 1e4, 0.8),
        rope_description()};
    for (const rope_description& rope : ropes) {
        for (const auto turning :
             {covariance_turning::mean_rotation, covariance_turning::each_rotation}) {
            uint32_t group = 0;
            for (uint32_t positions : {1u, 2u, 33u, 2u, 9u, 3u}) {
                ++group;
                check(set, rope, group, group != 2, turning, positions, random);
            }
        }
    }
}

TEST_CASE("mean phases in closed form, far out and for any frequency") {
    rope_description rope = make_rope(KV_ROPE_HALF, 128, 1e6, 1.0);
    // A whole turn, half a turn, no turn: where a quotient of sines has no value or an edge.
    rope.inverse_frequencies[1] = 0.0;
    rope.inverse_frequencies[2] = 2.0 * std::acos(-1.0);
    rope.inverse_frequencies[3] = std::acos(-1.0);
    rope.inverse_frequencies[4] = 1e-15;
    expected_shape shape;
    for (const auto& [positions, first] :
         {std::pair<uint32_t, uint64_t>{512, 1000000}, {1, 7}, {7, 0}, {65536, 131072}}) {
        shape.positions = positions;
        std::vector<double> phases(expected_phase_count(rope));
        REQUIRE(phases.size() == 256);
        expected_phases(shape, rope, first, phases.data());
        for (uint32_t band = 0; band < 64; ++band) {
            std::complex<long double> sums[2] = {};
            for (uint32_t t = 0; t < positions; ++t) {
                const long double angle =
                    static_cast<long double>(rope.inverse_frequencies[band]) * (first + t);
                sums[0] += std::polar(1.0L, angle);
                sums[1] += std::polar(1.0L, 2 * angle);
            }
            for (uint32_t which = 0; which < 2; ++which) {
                CHECK(std::abs(phases[4 * band + 2 * which] - sums[which].real() / positions) <
                      2e-9);
                CHECK(std::abs(phases[4 * band + 2 * which + 1] - sums[which].imag() / positions) <
                      2e-9);
            }
        }
    }
}

TEST_CASE("from logits to Expected Attention's score") {
    std::mt19937 random(23);
    const rope_description rope = make_rope(KV_ROPE_HALF, 32, 1e4, 1.0);
    const row_set set({tile_order::native, 16, KV_FORMAT_F32, KV_FORMAT_F32}, 60, 32, 64,
                      drawn_rows(32, 64, random));
    expected_shape shape;
    shape.key_dim = 32;
    shape.group = 2;
    std::vector<query_model> queries = {draw_queries(rope, 32, random),
                                        draw_queries(rope, 32, random)};
    const slot_ranges candidates = ranges_of({{4, 50}});
    std::vector<double> expected(60);
    for (const query_model& query : queries) {
        const expected_queries ahead = expect(query, shape, rope, 60);
        std::vector<double> power(60);
        double sum = 0;
        for (uint32_t s = 4; s < 50; ++s) {
            const double* key = set.row(false, s, 0);
            double z = dot(ahead.mean.data(), key, 32) / std::sqrt(32.0);
            for (uint32_t i = 0; i < 32; ++i) {
                z += key[i] * dot(ahead.covariance.data() + i * 32, key, 32) / 64;
            }
            sum += power[s] = std::exp(z);
        }
        for (uint32_t s = 4; s < 50; ++s) expected[s] += power[s] / sum / 2;
    }
    std::vector<float> logits =
        score(set, 0, shape, rope, query_arrays(queries, rope, 32), true, 60);
    std::vector<float> scores(60), norms(60);
    softmax_mean(logits.data(), 65, 2, candidates, scores.data());
    measure_slots(set.view(0), 0, 60, {nullptr, norms.data(), nullptr});
    scale_by_norm(candidates, norms.data(), 0.01f, scores.data());
    for (uint32_t s = 4; s < 50; ++s) {
        const double norm = std::sqrt(dot(set.row(true, s, 0), set.row(true, s, 0), 64));
        CHECK(scores[s] == doctest::Approx((expected[s] + 0.01) * norm).epsilon(2e-5));
    }
}
