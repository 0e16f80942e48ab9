// VaSE-DKV: the numbers drawn, and sizes in their directions.
#include "retention/sketch.hpp"

#include <numbers>

#include "retention/sampling.hpp"
#include "scorer_fixture.hpp"

using namespace scorer_test;

namespace {

void check_sizes(uint32_t key_dim, uint32_t value_dim) {
    random_key key;
    key.seed = 5;
    std::vector<float> sketch(sketch_count(96));
    draw_sketch(key, 96, sketch.data());
    for_each_row_set(77, key_dim, value_dim, [&](const row_set& set) {
        const auto square = [&](const double* row, uint32_t dim) {
            double sum = 0;
            for (uint32_t c = 0; c < sketch_directions; ++c) {
                double product = 0;
                for (uint32_t i = 0; i < dim; ++i) {
                    product += row[i] * double{sketch[i * sketch_directions + c]};
                }
                sum += product * product;
            }
            return sum;
        };
        for (uint32_t head = 0; head < row_set::heads; ++head) {
            std::vector<float> scores(set.slots + 3, -1.0f), pieces(set.slots, -1.0f);
            score_sketch(set.view(head), 0, set.slots, sketch.data(), scores.data());
            score_sketch(set.view(head), 0, 48, sketch.data(), pieces.data());
            score_sketch(set.view(head), 48, set.slots, sketch.data(), pieces.data());
            for (uint32_t slot = 0; slot < set.slots; ++slot) {
                const double expected = square(set.row(false, slot, head), key_dim) *
                                        square(set.row(true, slot, head), value_dim);
                CHECK(close(double{scores[slot]}, expected, 1e-5));
                CHECK(pieces[slot] == scores[slot]);
            }
            CHECK(scores[set.slots] == -1.0f);
        }
    });
}

}  // namespace

TEST_CASE("sizes in random directions, in every kind of storage") {
    check_sizes(64, 96);
    check_sizes(32, 32);
}

TEST_CASE("sizes in random directions, of channels that matrix units do not take") {
    check_sizes(96, 48);
}

TEST_CASE("the sketch is normal, and of its key alone") {
    random_key key;
    key.seed = 77;
    key.round = 3;
    key.layer = 2;
    key.head = 1;
    constexpr uint32_t dim = 256;
    std::vector<float> sketch(sketch_count(dim)), other(sketch_count(dim));
    draw_sketch(key, dim, sketch.data());
    // Moments of 5120 numbers, times sqrt(20); bounds are five deviations of each.
    double moments[5] = {};
    for (float x : sketch) {
        const double z = double{x} * std::sqrt(20.0);
        for (int power = 1; power < 5; ++power) moments[power] += std::pow(z, power) / 5120;
    }
    CHECK(std::abs(moments[1]) < 5 * std::sqrt(1.0 / 5120));
    CHECK(std::abs(moments[2] - 1) < 5 * std::sqrt(2.0 / 5120));
    CHECK(std::abs(moments[3]) < 5 * std::sqrt(15.0 / 5120));
    CHECK(std::abs(moments[4] - 3) < 5 * std::sqrt(96.0 / 5120));
    // Neighbours, which share a draw, and directions are independent.
    double neighbours = 0, directions = 0;
    for (uint32_t i = 0; i < sketch.size(); i += 2) {
        neighbours += double{sketch[i]} * double{sketch[i + 1]} * 20;
    }
    for (uint32_t i = 0; i + 20 < sketch.size(); ++i) {
        directions += double{sketch[i]} * double{sketch[i + 20]} * 20;
    }
    CHECK(std::abs(neighbours) < 5 * std::sqrt(2560.0));
    CHECK(std::abs(directions) < 5 * std::sqrt(5120.0));

    // Fewer channels: the front of the same numbers.
    draw_sketch(key, 64, other.data());
    for (uint32_t i = 0; i < sketch_count(64); ++i) REQUIRE(other[i] == sketch[i]);
    for (int part = 0; part < 4; ++part) {
        random_key changed = key;
        changed.seed += part == 0 ? 1 : 0;
        changed.round += part == 1 ? 1 : 0;
        changed.layer += part == 2 ? 1 : 0;
        changed.head += part == 3 ? 1 : 0;
        draw_sketch(changed, dim, other.data());
        double product = 0;
        for (uint32_t i = 0; i < sketch.size(); ++i) {
            product += double{sketch[i]} * double{other[i]} * 20;
        }
        CHECK(std::abs(product) < 5 * std::sqrt(5120.0));
    }
}

TEST_CASE("a draw becomes two normal numbers by Box and Muller's formula") {
    random_key key;
    key.seed = 9;
    std::vector<float> sketch(sketch_count(32));
    draw_sketch(key, 32, sketch.data());
    const uint64_t bits = draw_bits(key, draw_purpose::sketch, 7);  // of elements 14 and 15
    const double u = (double(bits >> 32) + 0.5) / 4294967296.0;
    const double turn = double(bits & 0xffffffffu) / 4294967296.0;
    // Of 8 significant bits.
    const double radius = std::sqrt(-2 * std::log(u)) / std::sqrt(20);
    const double of_14 = radius * std::cos(2 * std::numbers::pi * turn);
    const double of_15 = radius * std::sin(2 * std::numbers::pi * turn);
    CHECK(std::abs(sketch[14] - of_14) <= std::abs(of_14) * 0x1p-8);
    CHECK(std::abs(sketch[15] - of_15) <= std::abs(of_15) * 0x1p-8);
}
