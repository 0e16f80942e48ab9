// Block types against hand-worked blocks and against the values of another implementation.
#include "dequantize.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "golden.hpp"

using generate::weight_type;

namespace {

std::vector<float> decode(weight_type type, const std::string& bytes, std::size_t count) {
    std::vector<float> out(count);
    auto done = generate::dequantize(
        type, std::as_bytes(std::span<const char>(bytes.data(), bytes.size())), out);
    REQUIRE_MESSAGE(done, (done ? std::string() : done.message()));
    return out;
}

std::string half(std::uint16_t bits) {
    return {static_cast<char>(bits & 0xff), static_cast<char>(bits >> 8)};
}

constexpr std::uint16_t half_2 = 0x4000;    // 2.0
constexpr std::uint16_t half_m3 = 0xc200;   // -3.0
constexpr std::uint16_t half_0_5 = 0x3800;  // 0.5

}  // namespace

TEST_CASE("dequantize: all 65536 halves follow the formula of the format") {
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
        const int exponent = static_cast<int>((bits >> 10) & 31);
        const double fraction = static_cast<double>(bits & 0x3ff) / 1024;
        const float value = generate::half_to_float(static_cast<std::uint16_t>(bits));
        CAPTURE(bits);
        if (exponent == 31) {
            const bool kept = fraction == 0 ? std::isinf(value) : std::isnan(value);
            REQUIRE(kept);
            continue;
        }
        const double magnitude =
            exponent == 0 ? std::ldexp(fraction, -14) : std::ldexp(1 + fraction, exponent - 15);
        REQUIRE(static_cast<double>(value) == ((bits & 0x8000) != 0 ? -magnitude : magnitude));
        REQUIRE(std::signbit(value) == ((bits & 0x8000) != 0));
    }
}

TEST_CASE("dequantize: blocks of 32 worked by hand") {
    // Byte i holds the low half i and the high half 15 - i.
    std::string halves;
    for (int i = 0; i < 16; ++i) {
        halves.push_back(static_cast<char>(i | ((15 - i) << 4)));
    }
    // Fifth bits of weights 0, 16 and 31.
    const std::string high = {'\x01', '\x00', '\x01', '\x80'};
    const auto fifth = [](int i) { return i == 0 || i == 16 || i == 31 ? 16 : 0; };
    std::string signed_bytes;
    for (int i = 0; i < 32; ++i) {
        signed_bytes.push_back(static_cast<char>(i * 8 - 128));
    }
    const auto q4_0 = decode(weight_type::q4_0, half(half_2) + halves, 32);
    const auto q4_1 = decode(weight_type::q4_1, half(half_2) + half(half_m3) + halves, 32);
    const auto q5_0 = decode(weight_type::q5_0, half(half_0_5) + high + halves, 32);
    const auto q5_1 = decode(weight_type::q5_1, half(half_2) + half(half_m3) + high + halves, 32);
    const auto q8_0 = decode(weight_type::q8_0, half(half_0_5) + signed_bytes, 32);
    for (int i = 0; i < 32; ++i) {
        const int low = i < 16 ? i : 15 - (i - 16);
        const auto at = static_cast<std::size_t>(i);
        CAPTURE(i);
        CHECK(q4_0[at] == static_cast<float>(2 * (low - 8)));
        CHECK(q4_1[at] == static_cast<float>(2 * low - 3));
        CHECK(q5_0[at] == 0.5f * static_cast<float>(low + fifth(i) - 16));
        CHECK(q5_1[at] == static_cast<float>(2 * (low + fifth(i)) - 3));
        CHECK(q8_0[at] == static_cast<float>(i * 4 - 64));
    }
}

TEST_CASE("dequantize: every type agrees with another implementation") {
    const auto lines = golden::read_lines("dequantize.txt");
    int kinds = 0;
    for (std::size_t i = 0; i + 2 < lines.size(); i += 3) {
        REQUIRE(lines[i].word == "type");
        const auto type = static_cast<weight_type>(golden::numbers(lines[i].content).front());
        const std::string bytes = golden::from_hex(lines[i + 1].content);
        const std::vector<float> expected = golden::floats(lines[i + 2].content);
        const std::vector<float> values = decode(type, bytes, expected.size());
        CAPTURE(lines[i].content);
        for (std::size_t k = 0; k < expected.size(); ++k) {
            // Both multiply in f32, in another order: a few roundings of terms that may cancel.
            const double bound = 4e-7 * std::max(1.0, std::fabs(static_cast<double>(expected[k])));
            const double difference = std::fabs(static_cast<double>(values[k] - expected[k]));
            REQUIRE(difference <= bound);
        }
        ++kinds;
    }
    CHECK(kinds == 11);
}

TEST_CASE("dequantize: sizes that do not fit are errors") {
    std::vector<std::byte> bytes(36);
    std::vector<float> out(32);
    CHECK_FALSE(generate::dequantize(weight_type::q4_0, std::span(bytes).first(17), out));
    CHECK_FALSE(generate::dequantize(weight_type::q4_0, std::span(bytes).first(36), out));
    CHECK_FALSE(generate::dequantize(weight_type::q4_0, std::span(bytes).first(18),
                                     std::span(out).first(31)));
    CHECK_FALSE(generate::dequantize(static_cast<weight_type>(99), bytes, out));
    CHECK(generate::dequantize(weight_type::q4_0, std::span(bytes).first(18), out));
    CHECK(generate::dequantize(weight_type::q4_0, {}, {}));
    CHECK(generate::find_weight_layout(10) == nullptr);
}
