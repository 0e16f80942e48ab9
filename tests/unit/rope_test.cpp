// Resolving a rotation.
#include "model/rope.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

using namespace kvrt;

TEST_CASE("a rotation's defaults are filled in") {
    rope_description rope;
    kv_rope given = KV_INIT(kv_rope);
    given.style = KV_ROPE_HALF;
    REQUIRE(describe_rope(&given, 64, 0, rope) == KV_OK);
    CHECK(rope.dimensions == 64);
    CHECK(rope.bands(64) == 32);
    CHECK(rope.attention_factor == 1.0);
    for (int f = 0; f < 32; ++f) {
        CHECK(rope.inverse_frequencies[f] == doctest::Approx(std::exp(-f / 32.0 * std::log(1e4))));
    }
    given.dimensions = 16;
    given.theta = 5e5;
    given.attention_factor = 1.5;
    REQUIRE(describe_rope(&given, 64, 0, rope) == KV_OK);
    CHECK(rope.bands(64) == 8 + 48);
    CHECK(rope.attention_factor == 1.5);
    CHECK(rope.inverse_frequencies[4] == doctest::Approx(1 / std::sqrt(5e5)));
    CHECK(rope.inverse_frequencies[8] == 0.0);

    const double frequencies[] = {0.5, 0.25, 0, 3};
    given.dimensions = 8;
    given.inverse_frequencies = frequencies;
    REQUIRE(describe_rope(&given, 64, 0, rope) == KV_OK);
    CHECK(rope.inverse_frequencies[3] == 3.0);

    REQUIRE(describe_rope(nullptr, 64, 0, rope) == KV_OK);
    CHECK(rope.style == KV_ROPE_NONE);
    CHECK(rope.bands(64) == 64);
    given.style = KV_ROPE_NONE;
    REQUIRE(describe_rope(&given, 64, 0, rope) == KV_OK);
    CHECK(rope.dimensions == 0);
}

TEST_CASE("a rotation that cannot be is refused") {
    const double infinity = std::numeric_limits<double>::infinity();
    const auto refused = [](auto change) {
        kv_rope given = KV_INIT(kv_rope);
        given.style = KV_ROPE_INTERLEAVED;
        change(given);
        rope_description rope;
        return describe_rope(&given, 64, 0, rope) == KV_INVALID;
    };
    CHECK(!refused([](kv_rope&) {}));
    CHECK(refused([](kv_rope& r) { r.style = 3; }));
    CHECK(refused([](kv_rope& r) { r.dimensions = 65; }));
    CHECK(refused([](kv_rope& r) { r.dimensions = 66; }));
    CHECK(refused([](kv_rope& r) { r.dimensions = 31; }));
    CHECK(refused([](kv_rope& r) { r.theta = 0.5; }));
    CHECK(refused([](kv_rope& r) { r.theta = -1e4; }));
    CHECK(refused([&](kv_rope& r) { r.theta = infinity; }));
    CHECK(refused([](kv_rope& r) { r.attention_factor = -1; }));
    CHECK(refused([](kv_rope& r) { r.attention_factor = std::nan(""); }));
    CHECK(refused([&](kv_rope& r) { r.attention_factor = infinity; }));
    double frequencies[32] = {};
    frequencies[31] = infinity;
    CHECK(refused([&](kv_rope& r) { r.inverse_frequencies = frequencies; }));
}

TEST_CASE("rotations are the same up to the precision they were computed in") {
    rope_description a;
    kv_rope given = KV_INIT(kv_rope);
    given.style = KV_ROPE_HALF;
    REQUIRE(describe_rope(&given, 128, 0, a) == KV_OK);
    rope_description b = a;
    CHECK(same_rotation(a, b));
    for (double& frequency : b.inverse_frequencies) frequency = static_cast<float>(frequency);
    CHECK(same_rotation(a, b));
    b.inverse_frequencies[40] *= 1.00001;
    CHECK(!same_rotation(a, b));
    b = a;
    b.style = KV_ROPE_INTERLEAVED;
    CHECK(!same_rotation(a, b));
    b = a;
    b.dimensions = 126;
    CHECK(!same_rotation(a, b));
    b = a;
    b.attention_factor = 1.00001;
    CHECK(!same_rotation(a, b));
    b.attention_factor = 1.0 + 1e-8;
    CHECK(same_rotation(a, b));
}
