// Scalar conversions against the definition of the formats, worked in double: all 65536 numbers of
// each, and every way a float can round.
#include "format/element.hpp"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <random>

#include "paged_fixture.hpp"

using namespace kvrt;
using paged_test::nearest_bits;
using paged_test::value_of;

namespace {

float load(uint16_t bits, element type) {
    return type == element::f16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}
uint16_t round(float value, element type) {
    return type == element::f16 ? f32_to_f16(value) : f32_to_bf16(value);
}

TEST_CASE("every 16-bit number becomes its float and back") {
    for (const element type : {element::f16, element::bf16}) {
        uint32_t wrong = 0;
        for (uint32_t bits = 0; bits < 65536; ++bits) {
            const uint16_t half = static_cast<uint16_t>(bits);
            const double expected = value_of(half, type);
            const float got = load(half, type);
            if (std::isnan(expected)) {
                // NaN stays NaN both ways, and its sign stays.
                const uint16_t back = round(got, type);
                wrong += std::isnan(got) && std::isnan(value_of(back, type)) &&
                                 (back & 0x8000) == (half & 0x8000)
                             ? 0
                             : 1;
                continue;
            }
            wrong += static_cast<double>(got) == expected &&
                             std::signbit(got) == std::signbit(expected) && round(got, type) == half
                         ? 0
                         : 1;
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("between two neighbours: to the nearer, ties to even") {
    for (const element type : {element::f16, element::bf16}) {
        const uint16_t infinity = type == element::f16 ? 0x7c00 : 0x7f80;
        uint32_t wrong = 0;
        for (uint32_t bits = 0; bits + 1 < infinity; ++bits) {
            const double below = value_of(static_cast<uint16_t>(bits), type);
            const double above = value_of(static_cast<uint16_t>(bits + 1), type);
            const float middle = static_cast<float>((below + above) / 2);
            const bool exact = static_cast<double>(middle) == (below + above) / 2;
            const uint16_t even = static_cast<uint16_t>(bits + (bits & 1));
            if (exact) wrong += round(middle, type) == even ? 0 : 1;
            if (exact) wrong += round(-middle, type) == (even | 0x8000) ? 0 : 1;
            const float less = std::nextafter(middle, 0.0f);
            const float more = std::nextafter(middle, INFINITY);
            if (static_cast<double>(less) >= below) wrong += round(less, type) == bits ? 0 : 1;
            if (static_cast<double>(more) <= above) wrong += round(more, type) == bits + 1 ? 0 : 1;
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("the ends: overflow, underflow, infinities, NaN") {
    CHECK(f32_to_f16(65504.0f) == 0x7bff);
    CHECK(f32_to_f16(65519.996f) == 0x7bff);
    CHECK(f32_to_f16(65520.0f) == 0x7c00);
    CHECK(f32_to_f16(-1e30f) == 0xfc00);
    CHECK(f32_to_f16(INFINITY) == 0x7c00);
    CHECK(f32_to_f16(0x1p-25f) == 0x0000);
    CHECK(f32_to_f16(std::nextafter(0x1p-25f, 1.0f)) == 0x0001);
    CHECK(f32_to_f16(-0.0f) == 0x8000);
    CHECK(f32_to_f16(1e-40f) == 0x0000);
    CHECK(f32_to_bf16(INFINITY) == 0x7f80);
    CHECK(f32_to_bf16(std::bit_cast<float>(0x7f7fffffu)) == 0x7f80);
    CHECK(f32_to_bf16(-0.0f) == 0x8000);
    // A NaN whose payload is all in the bits that go must not become infinity.
    for (const uint32_t nan : {0x7f800001u, 0xff800001u, 0x7fc00000u, 0xffffffffu}) {
        const float value = std::bit_cast<float>(nan);
        CHECK(std::isnan(f16_to_f32(f32_to_f16(value))));
        CHECK(std::isnan(bf16_to_f32(f32_to_bf16(value))));
    }
}

TEST_CASE("random floats of every exponent round as the definition says") {
    std::mt19937 random(3);
    for (const element type : {element::f16, element::bf16}) {
        uint32_t wrong = 0;
        for (int i = 0; i < 200000; ++i) {
            const float value = std::bit_cast<float>(static_cast<uint32_t>(random()));
            if (std::isnan(value)) continue;
            wrong += round(value, type) == nearest_bits(value, type) ? 0 : 1;
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("loading and storing by type, at any alignment") {
    std::byte bytes[8] = {};
    for (const element type : {element::f32, element::f16, element::bf16}) {
        store_element(bytes + 1, type, -1.5f);
        CHECK(load_element(bytes + 1, type) == -1.5f);
    }
    CHECK(element_bytes(element::f32) == 4);
    CHECK(element_bytes(element::f16) == 2);
    CHECK(element_bytes(element::bf16) == 2);
}

TEST_CASE("tensor addresses follow their strides") {
    float numbers[64];
    tensor_view view{reinterpret_cast<std::byte*>(numbers + 32), element::f32, -8, 4, 1};
    CHECK(view.at(0, 0, 0) == reinterpret_cast<std::byte*>(numbers + 32));
    CHECK(view.at(3, 1, 2) == reinterpret_cast<std::byte*>(numbers + 32 - 24 + 4 + 2));
}

}  // namespace
