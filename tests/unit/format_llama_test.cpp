// q8_0, q4_0 and q4_1 byte for byte against a transcription of llama.cpp's reference quantisers
// (quantize_row_*_ref), in the same float operations.
#include <doctest/doctest.h>

#include <cfloat>
#include <string>

#include "format/format.hpp"
#include "format_reference.hpp"

using namespace format_test;

namespace {

constexpr uint32_t block = 32;  // QK8_0, QK4_0, QK4_1

void put_f16(float value, std::vector<std::byte>& out) {
    const uint16_t bits = nearest_bits(double{value}, element::f16);
    out.push_back(static_cast<std::byte>(bits & 255u));
    out.push_back(static_cast<std::byte>(bits >> 8));
}

void quantize_q8_0(const float* x, uint32_t count, std::vector<std::byte>& out) {
    float amax = 0.0f;
    for (uint32_t j = 0; j < count; ++j) amax = std::max(amax, fabsf(x[j]));
    const float d = amax / ((1 << 7) - 1);
    const float id = d != 0.0f ? 1.0f / d : 0.0f;
    put_f16(d, out);
    for (uint32_t j = 0; j < count; ++j) {
        const float x0 = x[j] * id;
        out.push_back(static_cast<std::byte>(static_cast<int8_t>(roundf(x0))));
    }
}

void quantize_q4_0(const float* x, uint32_t count, std::vector<std::byte>& out) {
    float amax = 0.0f, max = 0.0f;
    for (uint32_t j = 0; j < count; ++j) {
        const float v = x[j];
        if (amax < fabsf(v)) {
            amax = fabsf(v);
            max = v;
        }
    }
    const float d = max / -8;
    const float id = d != 0.0f ? 1.0f / d : 0.0f;
    put_f16(d, out);
    for (uint32_t j = 0; j < count / 2; ++j) {
        const float x0 = x[j] * id;
        const float x1 = x[count / 2 + j] * id;
        const int8_t first = std::min<int8_t>(15, static_cast<int8_t>(x0 + 8.5f));
        const int8_t second = std::min<int8_t>(15, static_cast<int8_t>(x1 + 8.5f));
        out.push_back(static_cast<std::byte>(first | second << 4));
    }
}

void quantize_q4_1(const float* x, uint32_t count, std::vector<std::byte>& out) {
    float min = FLT_MAX, max = -FLT_MAX;
    for (uint32_t j = 0; j < count; ++j) {
        if (x[j] < min) min = x[j];
        if (x[j] > max) max = x[j];
    }
    const float d = (max - min) / ((1 << 4) - 1);
    const float id = d != 0.0f ? 1.0f / d : 0.0f;
    put_f16(d, out);
    put_f16(min, out);
    for (uint32_t j = 0; j < count / 2; ++j) {
        const float x0 = (x[j] - min) * id;
        const float x1 = (x[count / 2 + j] - min) * id;
        const int8_t first = std::min<int8_t>(15, static_cast<int8_t>(x0 + 0.5f));
        const int8_t second = std::min<int8_t>(15, static_cast<int8_t>(x1 + 0.5f));
        out.push_back(static_cast<std::byte>(first | second << 4));
    }
}

struct llama_type {
    uint32_t id;
    uint32_t block_bytes;
    void (*quantize)(const float*, uint32_t, std::vector<std::byte>&);
};

constexpr llama_type types[] = {
    {KV_FORMAT_Q8_0, 34, quantize_q8_0},
    {KV_FORMAT_Q4_0, 18, quantize_q4_0},
    {KV_FORMAT_Q4_1, 20, quantize_q4_1},
};

/// A row as llama.cpp holds it: blocks in sequence. What is left over makes a shorter one.
std::vector<std::byte> blocks_of(const llama_type& type, const std::vector<float>& row) {
    std::vector<std::byte> out;
    for (std::size_t at = 0; at < row.size(); at += block) {
        const std::size_t count = std::min<std::size_t>(block, row.size() - at);
        type.quantize(row.data() + at, static_cast<uint32_t>(count), out);
    }
    return out;
}

void check_row(const llama_type& type, const std::vector<float>& row) {
    const kvrt::format_description& format = *kvrt::find_format(type.id, kvrt::operand_role::keys);
    const uint32_t dim = static_cast<uint32_t>(row.size());
    const std::vector<std::byte> expected = blocks_of(type, row);
    if (dim % block == 0) CHECK(expected.size() == dim / block * type.block_bytes);
    std::vector<std::byte> record(facts_of(type.id).padded_bytes(dim));
    format.encode(row.data(), dim, {}, record.data());

    // Rows end where they should: bytes behind them are kept.
    std::vector<std::byte> foreign(expected.size() + 8, std::byte{0x5a});
    kvrt::to_inline(format, dim, record.data(), foreign.data());
    CHECK(std::equal(expected.begin(), expected.end(), foreign.begin()));
    for (std::size_t i = expected.size(); i < foreign.size(); ++i) {
        CHECK(foreign[i] == std::byte{0x5a});
    }
    std::vector<std::byte> back(record.size());
    kvrt::from_inline(format, dim, expected.data(), back.data());
    CHECK(back == record);
    CHECK(from_foreign_form(facts_of(type.id), expected.data(), dim) == record);
    CHECK(foreign_form(facts_of(type.id), record.data(), dim) == expected);
}

template <class callable>
void for_all_types(const callable& body) {
    for (const llama_type& type : types) {
        CAPTURE(std::string(facts_of(type.id).name));
        for (const uint32_t dim : {32u, 64u, 72u, 80u, 96u, 128u, 256u}) {
            CAPTURE(dim);
            body(type, dim);
        }
    }
}

}  // namespace

TEST_CASE("random rows become llama.cpp's blocks") {
    std::mt19937 random(51);
    for_all_types([&](const llama_type& type, uint32_t dim) {
        const key_like_rows keys(dim, random);
        for (int trial = 0; trial < 50; ++trial) {
            check_row(type, gauss_row(dim, random));
            check_row(type, keys.draw(random));
            std::vector<float> row = gauss_row(dim, random);
            // Down to where the step is a denormal of f16, or nothing in it.
            const float factor = std::ldexp(1.0f, static_cast<int>(random() % 60) - 48);
            for (float& x : row) x *= factor;
            check_row(type, row);
        }
    });
}

TEST_CASE("rows in which codes are ties become llama.cpp's blocks") {
    std::mt19937 random(52);
    for_all_types([&](const llama_type& type, uint32_t dim) {
        for (int trial = 0; trial < 50; ++trial) {
            // Halves, with extremes that make the step 1 in each of the types.
            std::vector<float> row(dim);
            for (float& x : row) x = static_cast<float>(random() % 30) * 0.5f - 7.0f;
            for (std::size_t at = 0; at < dim; at += 8) {
                row[at] = type.id == KV_FORMAT_Q8_0 ? 127.0f : -8.0f;
                row[at + 3] = type.id == KV_FORMAT_Q4_1 ? 7.0f : row[at + 3];
            }
            check_row(type, row);
        }
    });
}

TEST_CASE("zeros, constants, equal magnitudes and outliers become llama.cpp's blocks") {
    std::mt19937 random(53);
    for_all_types([&](const llama_type& type, uint32_t dim) {
        for (const float constant : {0.0f, -0.0f, 3.0f, -3.0f, 1e-7f, 60000.0f}) {
            check_row(type, std::vector<float>(dim, constant));
        }
        std::vector<float> row(dim);
        for (uint32_t i = 0; i < dim; ++i) row[i] = i % 3 == 0 ? -2.0f : 2.0f;
        check_row(type, row);
        for (float& x : row) x = -x;
        check_row(type, row);
        for (const float outlier : {500.0f, -500.0f, 60000.0f}) {
            row = gauss_row(dim, random);
            row[random() % dim] = outlier;
            check_row(type, row);
        }
    });
}

TEST_CASE("a block of q4_0, by hand") {
    // The largest magnitude is -16: the step is 2, codes are x / 2 + 8.
    std::vector<float> row(32, 0.0f);
    row[0] = -16.0f;
    row[1] = 14.0f;
    row[16] = 1.0f;   // 8.5 + 0.5 is cut to 9
    row[17] = -1.0f;  // 7.5 + 0.5: 8
    const std::vector<std::byte> made = blocks_of(types[1], row);
    CHECK(made[0] == std::byte{0x00});  // 2.0 in f16 is 0x4000
    CHECK(made[1] == std::byte{0x40});
    CHECK(made[2] == std::byte{0x90});
    CHECK(made[3] == std::byte{0x8f});
    CHECK(made[4] == std::byte{0x88});
    check_row(types[1], row);
}
