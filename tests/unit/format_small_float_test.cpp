// Numbers of eight bits and less: every code against its definition, conversions against the
// nearest of all codes.
#include <doctest/doctest.h>

#include <string>

#include "format/small_float.hpp"
#include "format_reference.hpp"

using namespace kvrt;
using namespace format_test;

namespace {

struct small_float {
    const char* name;
    uint32_t bits;
    uint32_t finite;  // codes without sign that are finite numbers
    double (*defined)(uint32_t code);
    uint8_t (*from_f32)(float);
};

constexpr small_float with_sign[] = {
    {"e4m3", 8, 127, e4m3_value, f32_to_e4m3},
    {"e5m2", 8, 124, e5m2_value, f32_to_e5m2},
    {"e2m1", 4, 8, e2m1_value, f32_to_e2m1},
};

/// The nearest code with the number's sign, zero's among them.
uint32_t expected_code(const small_float& format, float value) {
    const uint32_t sign = std::signbit(value) ? 1u << (format.bits - 1) : 0;
    return sign | nearest_code(std::abs(double{value}), format.finite, format.defined);
}

void check_number(const small_float& format, float value) {
    for (const float signed_value : {value, -value}) {
        const uint32_t got = format.from_f32(signed_value);
        const uint32_t expected = expected_code(format, signed_value);
        if (got != expected) {
            CAPTURE(std::string(format.name));
            CAPTURE(signed_value);
            CHECK(got == expected);
        }
    }
}

bool same(float got, double defined) {
    if (std::isnan(defined)) return std::isnan(got);
    return double{got} == defined && std::signbit(got) == std::signbit(defined);
}

}  // namespace

TEST_CASE("every code stands for the number that its definition says") {
    for (uint32_t code = 0; code < 256; ++code) {
        CAPTURE(code);
        const uint8_t byte = static_cast<uint8_t>(code);
        CHECK(same(e4m3_to_f32(byte), e4m3_value(code)));
        CHECK(same(e5m2_to_f32(byte), e5m2_value(code)));
        CHECK(same(e8m0_to_f32(byte), e8m0_value(code)));
    }
    for (uint32_t code = 0; code < 16; ++code) {
        CHECK(static_cast<double>(e2m1_doubled[code]) == 2.0 * e2m1_value(code));
    }
    // The definitions' own landmarks.
    CHECK(e4m3_value(0x7e) == 448.0);
    CHECK(e4m3_value(0x01) == 0x1p-9);
    CHECK(std::isnan(e4m3_value(0xff)));
    CHECK(e5m2_value(0x7b) == 57344.0);
    CHECK(std::isinf(e5m2_value(0xfc)));
    CHECK(e2m1_value(7) == 6.0);
    CHECK(e8m0_value(127) == 1.0);
}

TEST_CASE("codes come back from their numbers") {
    for (const small_float& format : with_sign) {
        CAPTURE(std::string(format.name));
        for (uint32_t code = 0; code < format.finite; ++code) {
            check_number(format, static_cast<float>(format.defined(code)));
        }
    }
}

TEST_CASE("ties go to even, their neighbours to the nearer side") {
    for (const small_float& format : with_sign) {
        for (uint32_t code = 0; code + 1 < format.finite; ++code) {
            // Exact in f32: one more bit of mantissa.
            const float tie =
                static_cast<float>((format.defined(code) + format.defined(code + 1)) / 2);
            check_number(format, tie);
            check_number(format, std::nextafter(tie, 0.0f));
            check_number(format, std::nextafter(tie, INFINITY));
        }
    }
}

TEST_CASE("random numbers of all magnitudes round to the nearest") {
    std::mt19937 random(21);
    std::normal_distribution<float> normal;
    for (const small_float& format : with_sign) {
        for (int trial = 0; trial < 20000; ++trial) {
            check_number(format, std::ldexp(normal(random), static_cast<int>(random() % 44) - 22));
        }
        for (int trial = 0; trial < 20000; ++trial) {
            const float any = std::bit_cast<float>(static_cast<uint32_t>(random()));
            if (std::isfinite(any)) check_number(format, any);
        }
    }
}

TEST_CASE("beyond the largest number and below the least") {
    for (const small_float& format : with_sign) {
        CAPTURE(std::string(format.name));
        const float largest = static_cast<float>(format.defined(format.finite - 1));
        const float least = static_cast<float>(format.defined(1));
        for (const float value :
             {std::nextafter(largest, INFINITY), largest * 1.01f, largest * 2.0f, 1e30f,
              std::nextafter(largest, 0.0f), std::numeric_limits<float>::max(), least, least / 2,
              std::nextafter(least / 2, 1.0f), least / 4, std::numeric_limits<float>::min(),
              std::numeric_limits<float>::denorm_min(), 0.0f}) {
            check_number(format, value);
        }
        const uint32_t sign = 1u << (format.bits - 1);
        CHECK(format.from_f32(INFINITY) == format.finite - 1);
        CHECK(format.from_f32(-INFINITY) == (sign | (format.finite - 1)));
    }
    for (const float nan : {NAN, -NAN, std::bit_cast<float>(0x7f800001u)}) {
        CHECK(std::isnan(e4m3_value(f32_to_e4m3(nan))));
        CHECK(std::isnan(e5m2_value(f32_to_e5m2(nan))));
    }
}
