// Where the emulator puts the elements of fragments, against places copied by hand from the tables
// of the PTX manual ("mma.m16n8k16", "ldmatrix"), and products against sums in double.
#include <doctest/doctest.h>

#include <vector>

#include "emulator/context.hpp"

using namespace emulator;
using kvrt::kernels::number;

namespace {

struct place {
    uint32_t row, column;
};

// A, 16 x 16: a0,a1 | a2,a3 | a4,a5 | a6,a7, first elements; the second is one column on.
struct lane_of_a {
    uint32_t lane;
    place pairs[4];
};
constexpr lane_of_a places_of_a[] = {
    {0, {{0, 0}, {8, 0}, {0, 8}, {8, 8}}},      {1, {{0, 2}, {8, 2}, {0, 10}, {8, 10}}},
    {2, {{0, 4}, {8, 4}, {0, 12}, {8, 12}}},    {3, {{0, 6}, {8, 6}, {0, 14}, {8, 14}}},
    {4, {{1, 0}, {9, 0}, {1, 8}, {9, 8}}},      {7, {{1, 6}, {9, 6}, {1, 14}, {9, 14}}},
    {13, {{3, 2}, {11, 2}, {3, 10}, {11, 10}}}, {18, {{4, 4}, {12, 4}, {4, 12}, {12, 12}}},
    {28, {{7, 0}, {15, 0}, {7, 8}, {15, 8}}},   {31, {{7, 6}, {15, 6}, {7, 14}, {15, 14}}},
};

// B, 16 x 8: b0,b1 | b2,b3; the second of a pair is one row on.
struct lane_of_b {
    uint32_t lane;
    place pairs[2];
};
constexpr lane_of_b places_of_b[] = {
    {0, {{0, 0}, {8, 0}}},   {1, {{2, 0}, {10, 0}}},  {2, {{4, 0}, {12, 0}}},
    {3, {{6, 0}, {14, 0}}},  {4, {{0, 1}, {8, 1}}},   {7, {{6, 1}, {14, 1}}},
    {13, {{2, 3}, {10, 3}}}, {18, {{4, 4}, {12, 4}}}, {31, {{6, 7}, {14, 7}}},
};

// C and D, 16 x 8: c0,c1 | c2,c3; the second of a pair is one column on.
constexpr lane_of_b places_of_c[] = {
    {0, {{0, 0}, {8, 0}}}, {1, {{0, 2}, {8, 2}}},   {3, {{0, 6}, {8, 6}}},
    {4, {{1, 0}, {9, 0}}}, {13, {{3, 2}, {11, 2}}}, {31, {{7, 6}, {15, 6}}},
};

bool operator==(element_place x, place y) { return x.row == y.row && x.column == y.column; }

/// D = A B + C by one warp, A and B by ldmatrix from row-major shared memory.
template <class Cx, number type>
void multiply_tile(const uint16_t* a, const uint16_t* b, const float* c, float* d) {
    uint16_t* const shared_a = reinterpret_cast<uint16_t*>(Cx::shared());
    uint16_t* const shared_b = shared_a + 256;
    const uint32_t lane = Cx::thread();
    for (uint32_t i = lane; i < 256; i += 32) shared_a[i] = Cx::template load<uint16_t>(a + i);
    for (uint32_t i = lane; i < 128; i += 32) shared_b[i] = Cx::template load<uint16_t>(b + i);
    Cx::warp_barrier();
    uint32_t in_a[4], in_b[4];
    // The four 8 x 8 parts of A: rows 0 and 8 of columns 0, then of columns 8.
    Cx::load_matrices(in_a, shared_a + lane % 16 * 16 + lane / 16 * 8);
    // B lies by rows of k, so it is turned; parts 2 and 3 repeat 0 and 1.
    Cx::load_matrices_transposed(in_b, shared_b + lane % 16 * 8);
    float sums[4];
    const uint32_t row = lane / 4, column = lane % 4 * 2;
    const uint32_t at[4] = {row * 8 + column, row * 8 + column + 1, (row + 8) * 8 + column,
                            (row + 8) * 8 + column + 1};
    for (uint32_t i = 0; i < 4; ++i) sums[i] = Cx::template load<float>(c + at[i]);
    const uint32_t only_b[2] = {in_b[0], in_b[1]};
    Cx::template multiply<type>(sums, in_a, only_b);
    for (uint32_t i = 0; i < 4; ++i) Cx::store(d + at[i], sums[i]);
}

template <number type>
void check_products() {
    std::vector<uint16_t> a(256), b(128);
    std::vector<float> c(128);
    uint32_t state = 1;
    const auto next = [&] {
        state = state * 1664525u + 1013904223u;
        return static_cast<float>(static_cast<int>(state >> 16) % 257 - 128) / 64.0f;
    };
    const auto bits = [](float value) {
        return type == number::f16 ? kvrt::f32_to_f16(value) : kvrt::f32_to_bf16(value);
    };
    const auto back = [](uint16_t value) {
        return double{type == number::f16 ? kvrt::f16_to_f32(value) : kvrt::bf16_to_f32(value)};
    };
    for (uint16_t& each : a) each = bits(next());
    for (uint16_t& each : b) each = bits(next());
    for (float& each : c) each = next();
    for (const thread_order order : all_orders) {
        const device_array<uint16_t> on_a(a), on_b(b);
        const device_array<float> on_c(c);
        device_array<float> d(128);
        const launch_report report = launch(
            {.threads = 32, .shared_bytes = 768, .order = order},
            [&] { multiply_tile<context, type>(on_a.data(), on_b.data(), on_c.data(), d.data()); });
        REQUIRE_MESSAGE(report.clean(), report.text());
        for (uint32_t row = 0; row < 16; ++row) {
            for (uint32_t column = 0; column < 8; ++column) {
                double expected = c[row * 8 + column];
                for (uint32_t k = 0; k < 16; ++k) {
                    expected += back(a[row * 16 + k]) * back(b[k * 8 + column]);
                }
                REQUIRE(d[row * 8 + column] == doctest::Approx(expected).epsilon(1e-5));
            }
        }
    }
}

}  // namespace

TEST_CASE("emulator: fragments of mma lie where the PTX manual says") {
    for (const lane_of_a& each : places_of_a) {
        CAPTURE(each.lane);
        for (uint32_t pair = 0; pair < 4; ++pair) {
            const auto [row, column] = each.pairs[pair];
            CHECK(place_in_a(each.lane, 2 * pair) == place{row, column});
            CHECK(place_in_a(each.lane, 2 * pair + 1) == place{row, column + 1});
        }
    }
    for (const lane_of_b& each : places_of_b) {
        CAPTURE(each.lane);
        for (uint32_t pair = 0; pair < 2; ++pair) {
            const auto [row, column] = each.pairs[pair];
            CHECK(place_in_b(each.lane, 2 * pair) == place{row, column});
            CHECK(place_in_b(each.lane, 2 * pair + 1) == place{row + 1, column});
        }
    }
    for (const lane_of_b& each : places_of_c) {
        CAPTURE(each.lane);
        for (uint32_t pair = 0; pair < 2; ++pair) {
            const auto [row, column] = each.pairs[pair];
            CHECK(place_in_c(each.lane, 2 * pair) == place{row, column});
            CHECK(place_in_c(each.lane, 2 * pair + 1) == place{row, column + 1});
        }
    }
}

TEST_CASE("emulator: ldmatrix gives each lane the elements that the PTX manual says") {
    // Element e of row r of matrix m holds 100 m + 10 r + e.
    struct part {                  // one 32-bit register
        uint32_t lane, low, high;  // of matrix 0
    };
    constexpr part plain[] = {{0, 0, 1}, {1, 2, 3}, {3, 6, 7}, {4, 10, 11}, {31, 76, 77}};
    constexpr part turned[] = {{0, 0, 10}, {1, 20, 30}, {3, 60, 70}, {4, 1, 11}, {31, 67, 77}};
    device_array<uint32_t> got(2 * 32 * 4);
    const launch_report report = launch({.threads = 32, .shared_bytes = 4 * 8 * 16}, [&] {
        uint16_t* const shared = reinterpret_cast<uint16_t*>(context::shared());
        const uint32_t lane = context::lane();
        const uint32_t matrix = lane / 8, row = lane % 8;
        for (uint32_t e = 0; e < 8; ++e) {
            shared[lane * 8 + e] = static_cast<uint16_t>(100 * matrix + 10 * row + e);
        }
        context::warp_barrier();
        uint32_t out[4];
        context::load_matrices(out, shared + lane * 8);
        for (uint32_t m = 0; m < 4; ++m) context::store(&got[lane * 4 + m], out[m]);
        context::load_matrices_transposed(out, shared + lane * 8);
        for (uint32_t m = 0; m < 4; ++m) context::store(&got[(32 + lane) * 4 + m], out[m]);
    });
    REQUIRE_MESSAGE(report.clean(), report.text());
    for (uint32_t m = 0; m < 4; ++m) {
        for (const part& each : plain) {
            CHECK(got[each.lane * 4 + m] == (100 * m + each.low) + ((100 * m + each.high) << 16));
        }
        for (const part& each : turned) {
            CHECK(got[(32 + each.lane) * 4 + m] ==
                  (100 * m + each.low) + ((100 * m + each.high) << 16));
        }
    }
}

TEST_CASE("emulator: products of matrices are those of the definition") {
    check_products<number::f16>();
    check_products<number::bf16>();
}
