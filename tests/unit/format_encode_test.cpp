// Records against their formulas: what decoding makes of bytes, and that the bytes which encoding
// leaves are the nearest ones that the metadata admit.
#include <doctest/doctest.h>

#include <limits>
#include <string>

#include "format/format.hpp"
#include "format/record.hpp"
#include "format_reference.hpp"

using namespace format_test;

namespace {

constexpr uint32_t dims[] = {32, 64, 72, 80, 96, 128, 256};
constexpr double f16_largest = 65504.0;

// Steps below 2^-128 have no reciprocal in f32: what would need them becomes zero (448 steps).
constexpr double negligible = 448 * 0x1p-128;

struct encoded {
    std::vector<std::byte> record;  // padded
    uint32_t saturated = 0;
};

/// Encodes over bytes that were something else, as in a recycled block; padding is the caller's.
encoded encode(const facts& format, const std::vector<float>& row, float scale,
               std::byte before = std::byte{0}) {
    const uint32_t dim = static_cast<uint32_t>(row.size());
    const kvrt::format_description& description = *kvrt::find_format(format.id, format.role);
    encoded made;
    made.record.assign(format.padded_bytes(dim), before);
    kvrt::row_constants constants;
    constants.scale = scale;
    made.saturated = description.encode(row.data(), dim, constants, made.record.data());
    return made;
}

std::vector<float> decode_here(const facts& format, const std::vector<std::byte>& record,
                               uint32_t dim, float scale) {
    kvrt::row_constants constants;
    constants.scale = scale;
    std::vector<float> row(dim);
    kvrt::find_format(format.id, format.role)->decode(record.data(), dim, constants, row.data());
    return row;
}

struct extremes {
    double least = INFINITY, largest = -INFINITY;
    double magnitude() const { return std::max(std::abs(least), std::abs(largest)); }
};

extremes extremes_of(const float* row, uint32_t count) {
    extremes out;
    for (uint32_t i = 0; i < count; ++i) {
        out.least = std::min(out.least, double{row[i]});
        out.largest = std::max(out.largest, double{row[i]});
    }
    return out;
}

/// Half a unit in the last place of a number in f16, subnormals included.
double f16_rounding(double value) {
    return std::max(std::abs(value) * 0x1p-11, 0x1p-25) * (1 + 1e-6);
}

/// What a group's metadata should be, and how far they may be off.
struct wanted_metadata {
    double step, step_off, least, least_off;
};

wanted_metadata wanted(const facts& format, const extremes& reach, double scale) {
    const double steps = format.code == coding::int8   ? 127
                         : format.code == coding::e4m3 ? 448
                                                       : double{(1u << format.code_bits()) - 1.0};
    switch (format.meta) {
        case metadata::f32_scale: {
            const double step = reach.magnitude() / steps;
            return {step, std::max(step * 0x1p-23, 0x1p-149), 0, 0};
        }
        case metadata::f16_scale: {  // q4_0's may be negative: its sign is checked elsewhere
            const double range = reach.magnitude() / (format.code == coding::int8 ? 127 : 8);
            const double step = std::min(range, f16_largest);
            return {step, f16_rounding(step), 0, 0};
        }
        case metadata::f16_scale_and_least: {
            const double step = std::min((reach.largest - reach.least) / steps, f16_largest);
            const double least = std::clamp(reach.least, -f16_largest, f16_largest);
            return {step, f16_rounding(step), least, f16_rounding(least)};
        }
        case metadata::e4m3_scale: {
            const double exact = reach.magnitude() / 6 / scale;
            const double step = e4m3_value(nearest_code(exact, 127, e4m3_value));
            // At a tie the quotient's own rounding decides: one step of e4m3 either way.
            const double off =
                std::abs(std::abs(exact - step) - std::max(step / 16, 0x1p-10)) < exact * 1e-6
                    ? std::max(step / 8, 0x1p-9)
                    : 0;
            return {step * scale, off * scale + step * scale * 1e-7, 0, 0};
        }
        case metadata::e8m0_scale: {
            const double magnitude = reach.magnitude();
            const int exponent = magnitude > 0 ? std::ilogb(magnitude) - 2 : -127;
            return {std::ldexp(1.0, std::clamp(exponent, -127, 127)), 0, 0, 0};
        }
        default:
            return {scale, 0, 0, 0};
    }
}

/// The least error of a number in a group, over all codes.
double least_error(const facts& format, const group_numbers& group, double x) {
    double best = INFINITY;
    for (uint32_t code = 0; code < format.codes(); ++code) {
        const double value = group.step * code_value(format, code) + group.least;
        if (std::isfinite(value)) best = std::min(best, std::abs(value - x));
    }
    return best;
}

/// A factor that gives the decoded row the row's norm, and each code the nearest to what the row
/// is of its root mean square; where no factor of f16 does, the largest, and the nearest codes to
/// it.
void check_norm(const facts& format, const std::vector<float>& row, const encoded& made) {
    const uint32_t dim = static_cast<uint32_t>(row.size());
    double squares = 0, centroid_squares = 0;
    std::vector<double> values(dim);
    for (uint32_t i = 0; i < dim; ++i) {
        values[i] = code_value(format, code_at(format, made.record.data(), dim, i));
        centroid_squares += values[i] * values[i];
        squares += double{row[i]} * double{row[i]};
    }
    const double factor = group_at(format, made.record.data(), dim, 0, 1.0).step;
    const double exact = std::sqrt(squares / centroid_squares);
    const bool largest = factor == f16_largest;
    if (!largest) {
        CHECK(std::abs(factor - exact) <= f16_rounding(exact));
        CHECK(made.saturated == 0);
    }
    if (squares == 0) return;
    const double unit = largest ? f16_largest : std::sqrt(squares / dim);
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < dim; ++i) {
        const double x = double{row[i]} / unit;
        wrong += !(std::abs(values[i] - x) <=
                   least_error(format, {1.0, 0.0}, x) + std::abs(x) * 1e-6 + 1e-7);
    }
    CHECK(wrong == 0);
}

/// Metadata as wanted, each code the nearest; codes were chosen for metadata before their rounding.
void check_row(const facts& format, const std::vector<float>& row, float scale) {
    const uint32_t dim = static_cast<uint32_t>(row.size());
    const encoded made = encode(format, row, scale);
    const std::byte* record = made.record.data();
    uint32_t wrong_metadata = 0, wrong_codes = 0, beyond = 0, unsure = 0;
    bool too_large = false;  // for metadata in f16
    const bool by_norm = format.meta == metadata::f16_norm;
    if (by_norm) check_norm(format, row, made);
    for (uint32_t g = 0; g < format.groups(dim) && !by_norm; ++g) {
        const uint32_t first = g * format.group_of(dim), count = format.count_of(dim, g);
        const group_numbers group = group_at(format, record, dim, g, double{scale});
        const wanted_metadata want =
            wanted(format, extremes_of(row.data() + first, count), double{scale});
        too_large = too_large || want.step == f16_largest || std::abs(want.least) == f16_largest;
        wrong_metadata += !(std::abs(std::abs(group.step) - want.step) <= want.step_off);
        wrong_metadata += !(std::abs(group.least - want.least) <= want.least_off);
        for (uint32_t i = first; i < first + count; ++i) {
            const double x = double{row[i]};
            const double value = code_value(format, code_at(format, record, dim, i));
            const double got = group.step * value + group.least;
            const double slack = 2 * (want.step_off * std::abs(value) + want.least_off) +
                                 std::abs(x) * 1e-6 + negligible;
            wrong_codes += !(std::abs(got - x) <= least_error(format, group, x) + slack);
            const double bound = (format.code == coding::e4m3 ? 448.0 : 57344.0) * double{scale};
            beyond += std::abs(x) > bound ? 1 : 0;
            unsure += std::abs(std::abs(x) - bound) < bound * 1e-6 ? 1 : 0;
        }
    }
    CHECK(wrong_metadata == 0);
    CHECK(wrong_codes == 0);
    if (format.meta == metadata::none && unsure == 0) CHECK(made.saturated == beyond);
    if (format.meta == metadata::f32_scale) CHECK(made.saturated == 0);
    if (format.meta == metadata::f16_scale || format.meta == metadata::f16_scale_and_least) {
        CHECK((made.saturated == 0 || too_large));
    }

    const std::vector<double> exact = decode(format, record, dim, double{scale});
    const std::vector<float> got = decode_here(format, made.record, dim, scale);
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < dim; ++i) {
        const group_numbers group =
            group_at(format, record, dim, i / format.group_of(dim), double{scale});
        const double product = std::abs(exact[i] - group.least);
        const double rounding = (product + std::abs(group.least)) * 0x1p-23 + 0x1p-149;
        wrong += !(std::abs(double{got[i]} - exact[i]) <= rounding);
    }
    CHECK(wrong == 0);
    const encoded again = encode(format, row, scale, std::byte{0xa5});
    CHECK(std::equal(record, record + format.bytes(dim), again.record.begin()));
    for (uint32_t i = format.bytes(dim); i < format.padded_bytes(dim); ++i) {
        CHECK(again.record[i] == std::byte{0xa5});  // not the encoder's to touch
    }
}

template <class callable>
void for_all_formats(const callable& body) {
    for (const facts& format : all_record_facts()) {
        CAPTURE(std::string(format.name));
        for (const uint32_t dim : dims) {
            CAPTURE(dim);
            for (const float scale : {1.0f, 0.5f, 3.0f}) {
                if (scale != 1.0f && !format.static_scale) continue;
                CAPTURE(scale);
                body(format, dim, scale);
            }
        }
    }
}

}  // namespace

TEST_CASE("the library describes its formats as the reference does") {
    std::vector<facts> known(std::begin(all_facts), std::end(all_facts));
    for (const facts& format : all_record_facts()) known.push_back(format);
    for (const facts& format : known) {
        CAPTURE(std::string(format.name));
        const kvrt::format_description* found = kvrt::find_format(format.id, format.role);
        REQUIRE(found != nullptr);
        CHECK(found->id == format.id);
        CHECK(std::string(found->name) == format.name);
        CHECK(found->takes_scales == format.static_scale);
        CHECK(found->always_rotated == format.always_rotated);
        CHECK((found->kind == kvrt::format_class::plain) == format.plain());
        for (uint32_t dim = 32; dim <= 256; dim += 8) {
            CHECK(kvrt::record_bytes(*found, dim) == format.padded_bytes(dim));
            CHECK(kvrt::inline_bytes(*found, dim) == format.bytes(dim));
        }
    }
    for (const facts& format : all_facts) {
        CHECK(kvrt::find_format(format.id, operand_role::keys) ==
              kvrt::find_format(format.id, operand_role::values));
    }
    CHECK(kvrt::find_format(KV_FORMAT_DEFAULT, kvrt::operand_role::values) ==
          kvrt::find_format(KV_FORMAT_F16, kvrt::operand_role::values));
    CHECK(kvrt::find_format(99, kvrt::operand_role::keys) == nullptr);
    CHECK(kvrt::find_format(0xffffffffu, kvrt::operand_role::keys) == nullptr);
    // Published sizes: bytes of a row of 128.
    CHECK(facts_of(KV_FORMAT_Q8_0).bytes(128) == 136);
    CHECK(facts_of(KV_FORMAT_Q4_0).bytes(128) == 72);
    CHECK(facts_of(KV_FORMAT_Q4_1).bytes(128) == 80);
    CHECK(facts_of(KV_FORMAT_FP8_TOKEN).bytes(128) == 132);
    CHECK(facts_of(KV_FORMAT_INT4_TOKEN).bytes(128) == 68);
    CHECK(facts_of(KV_FORMAT_NVFP4).bytes(128) == 72);
    CHECK(facts_of(KV_FORMAT_MXFP4).bytes(128) == 68);
    CHECK(facts_of(KV_FORMAT_KIVI4, operand_role::values).bytes(128) == 80);
    CHECK(facts_of(KV_FORMAT_KIVI2, operand_role::values).bytes(128) == 48);
    for (const auto& [id, bytes] : {std::pair{KV_FORMAT_TURBO4, 134}, {KV_FORMAT_TURBO3, 102}}) {
        CHECK(facts_of(id, operand_role::keys).bytes(128) +
                  facts_of(id, operand_role::values).bytes(128) ==
              static_cast<uint32_t>(bytes));
    }
}

TEST_CASE("ordinary rows: metadata as their formulas, the nearest codes, decoded to the formula") {
    std::mt19937 random(41);
    for_all_formats([&](const facts& format, uint32_t dim, float scale) {
        const key_like_rows keys(dim, random);
        for (int trial = 0; trial < 8; ++trial) {
            check_row(format, gauss_row(dim, random), scale);
            check_row(format, keys.draw(random), scale);
            std::vector<float> scaled = gauss_row(dim, random);
            const float factor = std::ldexp(1.0f, static_cast<int>(random() % 24) - 12);
            for (float& x : scaled) x *= factor;
            check_row(format, scaled, scale);
        }
    });
}

TEST_CASE("unusual rows: zeros, constants, outliers, numbers near the ends of f32") {
    std::mt19937 random(42);
    for_all_formats([&](const facts& format, uint32_t dim, float scale) {
        for (const float constant : {0.0f, -0.0f, 1.0f, -2.5f, 1000.0f, 1e-30f, 1e-40f, 3e38f}) {
            CAPTURE(constant);
            check_row(format, std::vector<float>(dim, constant), scale);
        }
        for (const float outlier :
             {100.0f, -7000.0f, 1e6f, 1e30f, -1e30f, std::numeric_limits<float>::max()}) {
            CAPTURE(outlier);
            std::vector<float> row = gauss_row(dim, random);
            row[random() % dim] = outlier;
            check_row(format, row, scale);
        }
        for (const float size : {1e-36f, 1e-38f, 1e-40f, 1e-44f}) {  // down to f32's denormals
            CAPTURE(size);
            std::vector<float> row = gauss_row(dim, random);
            for (float& x : row) x *= size;
            row[3] = 0.0f;
            check_row(format, row, scale);
        }
        if (format.static_scale) {
            check_row(format, gauss_row(dim, random), 1e-40f);
            check_row(format, std::vector<float>(dim, 0.0f), 1e-40f);
            check_row(format, gauss_row(dim, random), 1e30f);
        }
        std::vector<float> both_ends(dim, std::numeric_limits<float>::max());
        for (uint32_t i = 0; i < dim; i += 2) both_ends[i] = -both_ends[i];
        check_row(format, both_ends, scale);
    });
}

TEST_CASE("rows of zeros come back as zeros") {
    for_all_formats([&](const facts& format, uint32_t dim, float scale) {
        const encoded made = encode(format, std::vector<float>(dim, 0.0f), scale);
        for (const float x : decode_here(format, made.record, dim, scale)) REQUIRE(x == 0.0f);
        CHECK(made.saturated == 0);
    });
}

TEST_CASE("a number that no metadata reach is counted, and the nearest is kept") {
    std::mt19937 random(45);
    for_all_formats([&](const facts& format, uint32_t dim, float scale) {
        // Scales per token, and powers of two, reach everything in f32.
        const bool reaches =
            format.meta == metadata::f32_scale || format.meta == metadata::e8m0_scale;
        for (const float outlier : {1e30f, -1e30f}) {
            std::vector<float> row = gauss_row(dim, random);
            const uint32_t place = static_cast<uint32_t>(random()) % dim;
            row[place] = outlier;
            const encoded made = encode(format, row, scale);
            CHECK(made.saturated == (reaches ? 0 : 1));
            const float got = decode_here(format, made.record, dim, scale)[place];
            CHECK(std::isfinite(got));
            CHECK(std::signbit(got) == std::signbit(outlier));
            CHECK(encode(format, std::vector<float>(dim, outlier), scale).saturated ==
                  (reaches ? 0 : dim));
            if (reaches) CHECK(std::abs(got) > 0.7e30f);
        }
    });
}

TEST_CASE("NaN and infinity: NaN in its group or row; static fp8 keeps one, bounds the other") {
    std::mt19937 random(43);
    for_all_formats([&](const facts& format, uint32_t dim, float scale) {
        const double bound = (format.code == coding::e4m3 ? 448.0 : 57344.0) * double{scale};
        for (const float flaw : {NAN, -NAN, INFINITY, -INFINITY}) {
            for (const uint32_t place : {0u, dim / 2, dim - 1}) {
                CAPTURE(flaw);
                CAPTURE(place);
                std::vector<float> row = gauss_row(dim, random), clean = row;
                row[place] = flaw;
                clean[place] = 0.0f;
                const encoded flawed = encode(format, row, scale);
                const std::vector<float> got = decode_here(format, flawed.record, dim, scale);
                const std::vector<float> expected =
                    decode_here(format, encode(format, clean, scale).record, dim, scale);
                const uint32_t group = format.group_of(dim);
                uint32_t wrong = 0;
                for (uint32_t i = 0; i < dim; ++i) {
                    if (format.meta == metadata::none && i == place) {
                        wrong += std::isnan(flaw)
                                     ? !std::isnan(got[i])
                                     : double{got[i]} != std::copysign(bound, double{flaw});
                    } else if (format.meta != metadata::none && i / group == place / group) {
                        wrong += !std::isnan(got[i]);
                    } else {
                        wrong += got[i] != expected[i];
                    }
                }
                CHECK(wrong == 0);
                CHECK(flawed.saturated ==
                      (format.meta == metadata::none && std::isinf(flaw) ? 1 : 0));
            }
        }
        // The bytes do not tell which flaw it was.
        std::vector<float> nan = gauss_row(dim, random), infinite = nan;
        nan[5] = -NAN;
        infinite[5] = INFINITY;
        if (format.meta != metadata::none) {
            CHECK(encode(format, nan, scale).record == encode(format, infinite, scale).record);
        }
        // NaN everywhere, and a lone infinity among NaN.
        std::vector<float> row(dim, NAN);
        row[1] = INFINITY;
        const std::vector<float> got =
            decode_here(format, encode(format, row, scale).record, dim, scale);
        for (uint32_t i = 2; i < dim; ++i) REQUIRE(std::isnan(got[i]));
    });
}

TEST_CASE("every byte decodes by the formula, whatever it is") {
    std::mt19937 random(44);
    for_all_formats([&](const facts& format, uint32_t dim, float scale) {
        std::vector<std::byte> record(format.padded_bytes(dim));
        for (int trial = 0; trial < 20; ++trial) {
            for (std::byte& byte : record) byte = static_cast<std::byte>(random());
            const std::vector<double> exact = decode(format, record.data(), dim, double{scale});
            const std::vector<float> got = decode_here(format, record, dim, scale);
            uint32_t wrong = 0;
            for (uint32_t i = 0; i < dim; ++i) {
                if (!std::isfinite(exact[i])) {
                    wrong += std::isfinite(got[i]);
                    continue;
                }
                if (std::abs(exact[i]) > 3.4e38) continue;  // rounds to infinity, or just not
                const group_numbers group =
                    group_at(format, record.data(), dim, i / format.group_of(dim), double{scale});
                const double size = std::abs(exact[i] - group.least) + std::abs(group.least);
                wrong += !(std::abs(double{got[i]} - exact[i]) <= size * 0x1p-23 + 0x1p-149);
            }
            CHECK(wrong == 0);
        }
    });
}
