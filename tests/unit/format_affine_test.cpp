// affine4, one row at a time: the rotation by a table of digits, records against the formulas in
// double, and how much the format loses.
#include <doctest/doctest.h>

#include <string>

#include "affine_reference.hpp"
#include "format/format.hpp"
#include "format/position_rotation.hpp"

using namespace format_test;

namespace {

constexpr uint64_t last_position = (uint64_t{1} << 31) - 1;
constexpr uint64_t positions[] = {0,     1,     2,       255,      256,       257,
                                  65535, 65536, 1000000, 16777216, 123456789, last_position};

struct turning {
    std::vector<float> table;
    kvrt::position_rotation rotation;

    explicit turning(const rope_facts& rope) {
        rotation.pairs = rope.dimensions / 2;
        rotation.interleaved = rope.style == KV_ROPE_INTERLEAVED;
        rotation.gain = static_cast<float>(rope.factor);
        table.resize(kvrt::turning_table_floats(rotation.pairs));
        kvrt::fill_turning_table(rope.frequencies.data(), rotation.pairs, table.data());
        rotation.table = table.data();
    }
    turning(const turning&) = delete;
    turning& operator=(const turning&) = delete;
};

struct shape {
    uint32_t dim;
    rope_facts rope;
};

/// Halves, neighbours, a part of the dimensions, none; with and without a factor.
std::vector<shape> shapes() {
    return {{64, rope_facts(KV_ROPE_HALF, 64, 10000.0, 1.0)},
            {128, rope_facts(KV_ROPE_INTERLEAVED, 128, 500000.0, 1.0)},
            {80, rope_facts(KV_ROPE_HALF, 32, 10000.0, 1.25)},
            {96, rope_facts(KV_ROPE_INTERLEAVED, 24, 1000000.0, 0.5)},
            {256, rope_facts(KV_ROPE_HALF, 256, 10000.0, 1.0)},
            {72, rope_facts()}};
}

std::string in_words(const shape& what) {
    return std::to_string(what.dim) + " dimensions, style " + std::to_string(what.rope.style) +
           " of " + std::to_string(what.rope.dimensions);
}

kvrt::row_constants constants_of(const channel_facts& channels, const turning& turned,
                                 uint64_t position) {
    kvrt::row_constants constants;
    constants.channel_mean = channels.means.data();
    constants.channel_scale = channels.scales.data();
    constants.turning = &turned.rotation;
    constants.position = static_cast<uint32_t>(position);
    return constants;
}

const kvrt::format_description& affine4() {
    return *kvrt::find_format(KV_FORMAT_AFFINE4, kvrt::operand_role::keys);
}

double distance(const std::vector<double>& expected, const float* got) {
    double off = 0, size = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
        off += (got[i] - expected[i]) * (got[i] - expected[i]);
        size += expected[i] * expected[i];
    }
    return std::sqrt(off / size);
}

}  // namespace

TEST_CASE("a row is turned by its position, at any position, to a part in a million") {
    std::mt19937 random(11);
    for (const shape& what : shapes()) {
        CAPTURE(in_words(what));
        const turning turned(what.rope);
        std::vector<uint64_t> places(std::begin(positions), std::end(positions));
        for (int i = 0; i < 200; ++i) places.push_back(random() >> (1 + random() % 31));
        for (const uint64_t position : places) {
            CAPTURE(position);
            // A pair alone, so that no other hides its error.
            for (uint32_t b = 0; b < what.rope.dimensions / 2; ++b) {
                std::vector<float> row(what.dim);
                row[what.rope.first_of(b)] = 0.6f;
                row[what.rope.second_of(b)] = -0.8f;
                const std::vector<double> before(row.begin(), row.end());
                kvrt::turn_row(turned.rotation, static_cast<uint32_t>(position), row.data());
                CHECK(distance(what.rope.turned(before, position, 1), row.data()) < 1e-6);
            }
            std::vector<float> row = gauss_row(what.dim, random);
            const std::vector<double> before(row.begin(), row.end());
            kvrt::turn_row(turned.rotation, static_cast<uint32_t>(position), row.data());
            CHECK(distance(what.rope.turned(before, position, 1), row.data()) < 1e-6);
            for (uint32_t i = what.rope.dimensions; i < what.dim; ++i) {
                CHECK(double{row[i]} == before[i]);
            }
        }
    }
}

TEST_CASE("a record is that of q4_1 of what differs from the turned mean, levelled and spread") {
    std::mt19937 random(12);
    const facts& q4_1 = facts_of(KV_FORMAT_Q4_1);
    for (const shape& what : shapes()) {
        CAPTURE(in_words(what));
        const turning turned(what.rope);
        const channel_facts channels(what.dim, random);
        REQUIRE(kvrt::record_bytes(affine4(), what.dim) == q4_1.padded_bytes(what.dim));
        std::vector<std::byte> record(q4_1.padded_bytes(what.dim));
        for (const uint64_t position : positions) {
            CAPTURE(position);
            const std::vector<float> row = channels.key(what.rope, position, random);
            REQUIRE(affine4().encode(row.data(), what.dim, constants_of(channels, turned, position),
                                     record.data()) == 0);
            const std::vector<double> spread =
                hadamard(channels.levelled({row.begin(), row.end()}, what.rope, position));
            const std::vector<double> stored = decode(q4_1, record.data(), what.dim, 1.0);
            for (uint32_t index = 0; index < q4_1.groups(what.dim); ++index) {
                const uint32_t first = 32 * index, count = q4_1.count_of(what.dim, index);
                const auto [least, largest] =
                    std::minmax_element(spread.begin() + first, spread.begin() + first + count);
                const group_numbers group = group_at(q4_1, record.data(), what.dim, index, 1.0);
                // Metadata are rounded to f16, and a row's f32 is coarse at far positions.
                CHECK(group.least == doctest::Approx(*least).epsilon(1.0 / 1024));
                CHECK(group.step == doctest::Approx((*largest - *least) / 15).epsilon(1.0 / 1024));
                for (uint32_t i = first; i < first + count; ++i) {
                    CHECK(std::abs(stored[i] - spread[i]) <
                          0.5 * group.step + (std::abs(*least) + *largest - *least) / 1024);
                }
            }
        }
    }
}

TEST_CASE("a decoded row is what the formulas make of its record") {
    std::mt19937 random(13);
    for (const shape& what : shapes()) {
        CAPTURE(in_words(what));
        const turning turned(what.rope);
        const channel_facts channels(what.dim, random);
        std::vector<std::byte> record(kvrt::record_bytes(affine4(), what.dim));
        for (const uint64_t position : positions) {
            CAPTURE(position);
            const std::vector<float> row = channels.key(what.rope, position, random);
            const kvrt::row_constants constants = constants_of(channels, turned, position);
            affine4().encode(row.data(), what.dim, constants, record.data());
            std::vector<float> back(what.dim);
            affine4().decode(record.data(), what.dim, constants, back.data());
            CHECK(distance(decode_affine(record.data(), channels, what.rope, position),
                           back.data()) < 2e-6);
        }
    }
}

TEST_CASE("a key as far from the turned mean leaves the same codes wherever it stands") {
    std::mt19937 random(14);
    const rope_facts rope(KV_ROPE_HALF, 64, 10000.0, 1.0);
    const turning turned(rope);
    const channel_facts channels(64, random);
    std::vector<std::byte> records[2];
    // A row whose numbers lie in the middle of their codes: rounding of the turns changes none.
    std::vector<double> spread(64);
    for (uint32_t i = 0; i < 64; ++i) spread[i] = 0.25 * (i * 7 % 16) - 2.0;
    for (const uint64_t position : {uint64_t{3}, uint64_t{70000}}) {
        const std::vector<double> key = channels.raised(hadamard(spread), rope, position);
        const std::vector<float> row(key.begin(), key.end());
        std::vector<std::byte>& record = records[position == 3 ? 0 : 1];
        record.resize(kvrt::record_bytes(affine4(), 64));
        affine4().encode(row.data(), 64, constants_of(channels, turned, position), record.data());
        for (uint32_t i = 0; i < 64; ++i) {
            CHECK(code_at(facts_of(KV_FORMAT_Q4_1), record.data(), 64, i) == i * 7 % 16);
        }
    }
    CHECK(std::equal(records[0].begin(), records[0].begin() + 32, records[1].begin()));
}

TEST_CASE("a row that is not finite becomes NaN, one far out is counted") {
    std::mt19937 random(15);
    const rope_facts rope(KV_ROPE_HALF, 64, 10000.0, 1.0);
    const turning turned(rope);
    const channel_facts channels(64, random);
    const kvrt::row_constants constants = constants_of(channels, turned, 1000);
    std::vector<std::byte> record(kvrt::record_bytes(affine4(), 64));
    for (const float flaw : {NAN, INFINITY, -INFINITY}) {
        std::vector<float> row = channels.key(rope, 1000, random);
        row[17] = flaw;
        affine4().encode(row.data(), 64, constants, record.data());
        affine4().decode(record.data(), 64, constants, row.data());
        for (const float x : row) CHECK(std::isnan(x));
    }
    std::vector<float> row(64);
    for (uint32_t i = 0; i < 64; ++i) row[i] = 1e7f * static_cast<float>(i % 5);
    CHECK(affine4().encode(row.data(), 64, constants, record.data()) > 0);
}

TEST_CASE("constants fitted on 128 keys keep the others' error at its floor") {
    std::mt19937 random(16);
    constexpr uint32_t dim = 128, fitted = 128, vectors = 4096;
    for (const rope_facts& rope : {rope_facts(), rope_facts(KV_ROPE_HALF, dim, 10000.0, 1.0),
                                   rope_facts(KV_ROPE_INTERLEAVED, dim, 500000.0, 1.0)}) {
        CAPTURE(rope.style);
        const turning turned(rope);
        const key_like_rows source(dim, random);
        std::vector<std::vector<float>> rows;
        for (uint32_t v = 0; v < vectors; ++v) rows.push_back(source.draw(random));
        channel_facts channels(dim, random);
        std::vector<double> variances(dim);
        for (uint32_t i = 0; i < dim; ++i) {
            double mean = 0;
            for (uint32_t v = 0; v < fitted; ++v) mean += double{rows[v][i]} / fitted;
            for (uint32_t v = 0; v < fitted; ++v) {
                variances[i] += std::pow(rows[v][i] - mean, 2) / fitted;
            }
            channels.means[i] = static_cast<float>(mean);
        }
        variances = rope.mixed(variances);
        for (uint32_t i = 0; i < dim; ++i) {
            channels.scales[i] = static_cast<float>(std::sqrt(variances[i]));
        }
        std::vector<std::byte> record(kvrt::record_bytes(affine4(), dim));
        double off = 0, size = 0;
        for (uint32_t v = fitted; v < vectors; ++v) {
            const std::vector<double> key = rope.turned({rows[v].begin(), rows[v].end()}, v, 1);
            std::vector<float> row(key.begin(), key.end());
            const kvrt::row_constants constants = constants_of(channels, turned, v);
            affine4().encode(row.data(), dim, constants, record.data());
            affine4().decode(record.data(), dim, constants, row.data());
            for (uint32_t i = 0; i < dim; ++i) {
                off += (row[i] - key[i]) * (row[i] - key[i]);
                size += key[i] * key[i];
            }
        }
        CHECK(std::sqrt(off / size) == doctest::Approx(0.0309).epsilon(0.05));
    }
}
