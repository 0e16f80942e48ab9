// TriAttention: the golden vector, and the kernel against the definition in double.
#include "retention/triattention.hpp"

#include <doctest/doctest.h>

#include <complex>
#include <functional>

#include "format/rotation.hpp"
#include "paged_fixture.hpp"
#include "retention/scores.hpp"

using namespace kvrt;
using namespace paged_test;
using complex = std::complex<double>;

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

uint32_t real_place(const rope_description& rope, uint32_t band) {
    return rope.style == KV_ROPE_HALF ? band : 2 * band;
}
uint32_t imaginary_place(const rope_description& rope, uint32_t band) {
    return rope.style == KV_ROPE_HALF ? band + rope.dimensions / 2 : 2 * band + 1;
}

struct head_means {
    std::vector<complex> mean;      // [bands]
    std::vector<double> magnitude;  // [bands]
};

// The definition, term by term: angles between positions, key before rotation.
double defined_score(const rope_description& rope, const head_means& query,
                     const std::vector<complex>& key, double position, double next_position,
                     uint32_t offset_max, bool maximum) {
    const double sigma = rope.attention_factor * rope.attention_factor;
    double norm = 0, sum = 0, best = -INFINITY;
    const uint32_t rotated = rope.dimensions / 2;
    for (uint32_t f = 0; f < key.size(); ++f) {
        norm += (f < rotated ? sigma : 1.0) * (query.magnitude[f] - std::abs(query.mean[f])) *
                std::abs(key[f]);
    }
    int offsets = 0;
    for (uint64_t offset = 1; offset <= offset_max; offset *= 2, ++offsets) {
        double trig = 0;
        for (uint32_t f = 0; f < key.size(); ++f) {
            const double frequency = f < rotated ? rope.inverse_frequencies[f] : 0.0;
            const double angle = frequency * (next_position - position + double(offset)) +
                                 std::arg(query.mean[f]) - std::arg(key[f]);
            trig += (f < rotated ? sigma : 1.0) * std::abs(query.mean[f]) * std::abs(key[f]) *
                    std::cos(angle);
        }
        sum += trig;
        best = std::max(best, trig);
    }
    return (maximum ? best : sum / offsets) + norm;
}

// A layer's means as the arrays that the library takes.
struct mean_arrays {
    std::vector<float> real, imaginary, magnitude;

    explicit mean_arrays(const std::vector<head_means>& heads) {
        for (const head_means& head : heads) {
            for (uint32_t f = 0; f < head.mean.size(); ++f) {
                real.push_back(static_cast<float>(head.mean[f].real()));
                imaginary.push_back(static_cast<float>(head.mean[f].imag()));
                magnitude.push_back(static_cast<float>(head.magnitude[f]));
            }
        }
    }
    query_means view() const { return {real.data(), imaginary.data(), magnitude.data()}; }
};

std::vector<float> score(const paged_cache& cache, const triattention_shape& shape,
                         const rope_description& rope, const query_means& means,
                         uint64_t next_position, uint32_t slots, uint32_t kv_head,
                         uint32_t cut = ~0u) {
    std::vector<double> phases(triattention_phase_count(shape, rope));
    std::vector<float> weights(triattention_weight_count(shape, rope), NAN);
    std::vector<float> scores(std::size_t{shape.group} * (slots + 5), -77.0f);
    triattention_phases(shape, rope, next_position, phases.data());
    triattention_weights(shape, rope, phases.data(), means, weights.data());
    for (uint32_t first = 0; first < slots; first += std::min(cut, slots)) {
        const stored_rows rows{&cache.layout,       nullptr, 0,      cache.arena,
                               cache.blocks.data(), kv_head, nullptr};
        score_triattention(rows, first, first + std::min({cut, slots, slots - first}), shape, rope,
                           weights.data(), scores.data(), slots + 5);
    }
    return scores;
}

// Scores a cache of random keys in every head and compares with the definition on what is stored.
void check_random(tile_order order, element stored, uint32_t block_tokens, uint32_t key_dim,
                  const rope_description& rope, uint32_t group, bool maximum, uint32_t seed) {
    constexpr uint32_t slots = 75, kv_heads = 2;
    paged_cache cache(order, block_tokens, kv_heads, key_dim, 32, stored, element::f16, slots);
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    const uint32_t rotated = rope.dimensions / 2, bands = key_dim - rotated;
    const uint64_t next_position = 3000;
    // Positions with holes; the key before rotation follows from what the cache stores.
    std::vector<double> positions(slots);
    for (uint32_t s = 0; s < slots; ++s) positions[s] = s * 40.0 + double(random() % 40);
    std::vector<head_means> queries(group);
    for (head_means& query : queries) {
        for (uint32_t f = 0; f < bands; ++f) {
            const complex mean(float(normal(random)), f < rotated ? float(normal(random)) : 0.0f);
            query.mean.push_back(mean);
            query.magnitude.push_back(
                float(std::abs(mean) * (1.0 + std::abs(normal(random)) * 0.3) + 1e-6));
        }
    }
    const mean_arrays means(queries);
    triattention_shape shape;
    shape.key_dim = key_dim;
    shape.group = group;
    shape.maximum = maximum;
    shape.offset_max = 4096;

    for (uint32_t head = 0; head < kv_heads; ++head) {
        std::vector<std::vector<complex>> keys(slots);
        for (uint32_t s = 0; s < slots; ++s) {
            for (uint32_t f = 0; f < rotated; ++f) {
                const complex stored_key(
                    cache.set(false, s, head, real_place(rope, f), normal(random)),
                    cache.set(false, s, head, imaginary_place(rope, f), normal(random)));
                keys[s].push_back(stored_key / rope.attention_factor *
                                  std::polar(1.0, -rope.inverse_frequencies[f] * positions[s]));
            }
            for (uint32_t d = rope.dimensions; d < key_dim; ++d) {
                keys[s].emplace_back(cache.set(false, s, head, d, normal(random)));
            }
        }
        const std::vector<float> scores =
            score(cache, shape, rope, means.view(), next_position, slots, head);
        const std::vector<float> in_pieces =
            score(cache, shape, rope, means.view(), next_position, slots, head, 32);
        CHECK(scores == in_pieces);
        double worst = 0;
        for (uint32_t h = 0; h < group; ++h) {
            for (uint32_t s = 0; s < slots; ++s) {
                const double expected =
                    defined_score(rope, queries[h], keys[s], positions[s], double(next_position),
                                  shape.offset_max, maximum);
                worst = std::max(worst, std::abs(expected - scores[h * (slots + 5) + s]));
            }
            for (uint32_t s = slots; s < slots + 5; ++s) {
                CHECK(scores[h * (slots + 5) + s] == -77.0f);  // nothing behind the end is written
            }
        }
        CHECK(worst < 2e-4);  // f32 sums of some hundred terms of size 1 to 5
    }
}

}  // namespace

TEST_CASE("the golden vector: phases, scores of both heads, z-scores, group maximum") {
    rope_description rope;
    rope.style = KV_ROPE_HALF;
    rope.dimensions = 8;
    const double frequencies[] = {1, 0.1, 0.01, 0.001};
    std::copy(std::begin(frequencies), std::end(frequencies), rope.inverse_frequencies);
    const std::vector<head_means> queries = {
        {{{1, 0.5}, {0.3, -0.2}, {-0.7, 0.1}, {0.2, 0.9}}, {1.3, 0.5, 0.9, 1.0}},
        {{{-0.4, 0.8}, {0.6, 0.1}, {0.5, -0.5}, {1.1, 0.2}}, {1.0, 0.7, 0.8, 1.2}}};
    const std::vector<std::pair<double, std::vector<complex>>> keys = {
        {0, {{0.5, -1}, {1, 0}, {0.2, 0.4}, {2, -1}}},
        {3, {{-1, 0.3}, {0.1, 0.9}, {-0.6, 0.6}, {0.4, 0.4}}},
        {5, {{0.7, 0.7}, {-0.5, 0.2}, {1.5, -0.3}, {-1, 0.1}}},
        {9, {{0.1, 0.2}, {0.3, 0.3}, {-0.2, -0.9}, {0.6, 1.4}}}};
    const complex phases[] = {{0.077990199, -0.090051789},
                              {-0.105861901, 0.387907113},
                              {0.380855891, 0.299318358},
                              {0.439618077, 0.218627711}};
    const double trig[2][4] = {{-0.626558, 0.469780, -0.161733, 0.786983},
                               {0.422706, 0.283980, 0.144331, 0.794571}};
    const double norm[2][4] = {{0.603669, 0.524075, 0.628735, 0.396564},
                               {0.434582, 0.318470, 0.378381, 0.273012}};
    const double group_maximum[] = {0.440511, 0.717947, -0.399568, 1.417898};
    const double z[2][4] = {{-1.438684, 0.717947, -0.399568, 1.120306},
                            {0.440511, -0.743905, -1.114505, 1.417898}};

    triattention_shape shape;
    shape.key_dim = 8;
    shape.group = 2;
    std::vector<double> computed(triattention_phase_count(shape, rope));
    REQUIRE(computed.size() == 8);
    triattention_phases(shape, rope, 10, computed.data());
    for (int f = 0; f < 4; ++f) {
        CHECK(computed[2 * f] == doctest::Approx(phases[f].real()).epsilon(1e-8));
        CHECK(computed[2 * f + 1] == doctest::Approx(phases[f].imag()).epsilon(1e-8));
    }
    const mean_arrays means(queries);
    on_every_target([&] {
        for (tile_order order : all_orders) {
            paged_cache cache(order, 16, 1, 8, 32, element::f32, element::f32, 4);
            for (uint32_t s = 0; s < 4; ++s) {
                for (uint32_t f = 0; f < 4; ++f) {
                    const complex rotated =
                        keys[s].second[f] * std::polar(1.0, frequencies[f] * keys[s].first);
                    cache.set(false, s, 0, f, rotated.real());
                    cache.set(false, s, 0, f + 4, rotated.imag());
                }
            }
            std::vector<float> scores = score(cache, shape, rope, means.view(), 10, 4, 0);
            for (int h = 0; h < 2; ++h) {
                for (int s = 0; s < 4; ++s) {
                    CHECK(std::abs(scores[h * 9 + s] - (trig[h][s] + norm[h][s])) < 1e-5);
                }
            }
            slot_ranges all;
            all.range[all.count++] = {0, 4};
            for (int h = 0; h < 2; ++h) {
                float alone[4];
                normalise_and_reduce(scores.data() + h * 9, 9, 1, all, alone);
                for (int s = 0; s < 4; ++s) CHECK(std::abs(alone[s] - z[h][s]) < 1e-5);
            }
            normalise_and_reduce(scores.data(), 9, 2, all, scores.data());
            for (int s = 0; s < 4; ++s) CHECK(std::abs(scores[s] - group_maximum[s]) < 1e-5);
        }
    });
}

TEST_CASE("scores are the definition's, for every layout, format, rotation and group") {
    on_every_target([] {
        uint32_t seed = 0;
        for (bool maximum : {false, true}) {
            for (tile_order order : all_orders) {
                for (element stored : all_elements) {
                    CAPTURE(maximum);
                    CAPTURE(int(order));
                    CAPTURE(int(stored));
                    check_random(order, stored, 16, 64, make_rope(KV_ROPE_HALF, 64, 1e4, 1.0), 3,
                                 maximum, ++seed);
                    check_random(order, stored, 32, 72,
                                 make_rope(KV_ROPE_INTERLEAVED, 72, 1e6, 1.37), 1, maximum, ++seed);
                }
            }
            // Partial rotation with YaRN, many query heads on one KV head, and no rotation at all.
            check_random(tile_order::native, element::f16, 16, 64,
                         make_rope(KV_ROPE_HALF, 20, 1e4, 1.2), 4, maximum, ++seed);
            check_random(tile_order::nhd, element::bf16, 16, 40,
                         make_rope(KV_ROPE_INTERLEAVED, 16, 1e4, 0.8), 2, maximum, ++seed);
            check_random(tile_order::native, element::bf16, 64, 128,
                         make_rope(KV_ROPE_HALF, 128, 5e5, 1.0), 19, maximum, ++seed);
            check_random(tile_order::native, element::f16, 16, 32, rope_description(), 2, maximum,
                         ++seed);
        }
    });
}

TEST_CASE("phases stay exact at a million tokens") {
    const rope_description rope = make_rope(KV_ROPE_HALF, 128, 1e6, 1.0);
    for (bool maximum : {false, true}) {
        triattention_shape shape;
        shape.key_dim = 128;
        shape.maximum = maximum;
        std::vector<double> phases(triattention_phase_count(shape, rope));
        triattention_phases(shape, rope, 1048576, phases.data());
        for (uint32_t f = 0; f < 64; ++f) {
            std::complex<long double> sum = 0;
            for (uint32_t k = 0; k < 17; ++k) {
                const long double angle =
                    static_cast<long double>(rope.inverse_frequencies[f]) * (1048576 + (1 << k));
                const std::complex<long double> phase(std::cos(angle), std::sin(angle));
                sum += phase;
                if (maximum) {
                    CHECK(std::abs(phases[2 * (k * 64 + f)] - phase.real()) < 1e-9);
                    CHECK(std::abs(phases[2 * (k * 64 + f) + 1] - phase.imag()) < 1e-9);
                }
            }
            if (maximum) continue;
            CHECK(std::abs(phases[2 * f] - sum.real() / 17) < 1e-9);
            CHECK(std::abs(phases[2 * f + 1] - sum.imag() / 17) < 1e-9);
        }
    }
}

TEST_CASE("a mean magnitude below the mean's own counts as no spread") {
    triattention_shape shape;
    shape.key_dim = 32;
    const rope_description rope = make_rope(KV_ROPE_HALF, 32, 1e4, 1.0);
    std::vector<float> real(16, 1.0f), imaginary(16, 1.0f), magnitude(16, 1.0f);
    std::vector<double> phases(triattention_phase_count(shape, rope));
    std::vector<float> weights(triattention_weight_count(shape, rope));
    triattention_phases(shape, rope, 5, phases.data());
    triattention_weights(shape, rope, phases.data(),
                         {real.data(), imaginary.data(), magnitude.data()}, weights.data());
    for (uint32_t f = 0; f < 16; ++f) CHECK(weights[f] == 0.0f);
}

TEST_CASE("keys that are kept rotated by Hadamard's matrix score as the rows they stand for") {
    constexpr uint32_t slots = 40, dim = 64;
    rope_description rope;
    rope.style = KV_ROPE_HALF;
    rope.dimensions = dim;
    for (uint32_t f = 0; f < dim / 2; ++f) rope.inverse_frequencies[f] = std::pow(0.7, double(f));
    std::mt19937 random(4);
    std::normal_distribution<double> normal;
    head_means query;
    for (uint32_t f = 0; f < dim / 2; ++f) {
        query.mean.emplace_back(normal(random), normal(random));
        query.magnitude.push_back(std::abs(query.mean.back()) * 1.2);
    }
    const mean_arrays means({query});
    triattention_shape shape;
    shape.key_dim = dim;
    shape.group = 1;
    shape.offset_max = 4096;
    on_every_target([&] {
        paged_cache plain(tile_order::native, 32, 1, dim, 32, element::f32, element::f32, slots);
        paged_cache rotated(tile_order::native, 32, 1, dim, 32, element::f32, element::f32, slots);
        rotated.layout.keys.rotated = true;
        for (uint32_t s = 0; s < slots; ++s) {
            float row[dim];
            for (uint32_t d = 0; d < dim; ++d) {
                row[d] = static_cast<float>(plain.set(false, s, 0, d, normal(random)));
            }
            rotate_row(row, dim);
            for (uint32_t d = 0; d < dim; ++d) rotated.set(false, s, 0, d, double{row[d]});
        }
        const auto expected = score(plain, shape, rope, means.view(), 500, slots, 0);
        const auto found = score(rotated, shape, rope, means.view(), 500, slots, 0);
        for (uint32_t s = 0; s < slots; ++s) {
            CHECK(found[s] == doctest::Approx(expected[s]).epsilon(1e-4).scale(1.0));
        }
    });
}
