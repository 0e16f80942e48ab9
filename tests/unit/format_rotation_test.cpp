// The rotation against Hadamard's matrix, written out.
#include <doctest/doctest.h>

#include "format/rotation.hpp"
#include "format_reference.hpp"

using namespace kvrt;

namespace {

std::vector<float> rotated(std::vector<float> row) {
    rotate_row(row.data(), static_cast<uint32_t>(row.size()));
    return row;
}

double norm(const std::vector<float>& row) {
    double sum = 0;
    for (const float x : row) sum += double{x} * double{x};
    return std::sqrt(sum);
}

template <class a, class b>
double distance(const std::vector<a>& left, const std::vector<b>& right) {
    double sum = 0;
    for (std::size_t i = 0; i < left.size(); ++i) {
        const double off = double{left[i]} - double{right[i]};
        sum += off * off;
    }
    return std::sqrt(sum);
}

}  // namespace

TEST_CASE("the matrix of order four, by hand") {
    // Rows of dimension 36 = 9 blocks of 4: sums and differences, halved.
    std::vector<double> row(36, 0.0);
    row[4] = 1.0, row[5] = 2.0, row[6] = 4.0, row[7] = 8.0;
    const std::vector<double> out = format_test::hadamard(row);
    CHECK(out[4] == 7.5);
    CHECK(out[5] == -2.5);
    CHECK(out[6] == -4.5);
    CHECK(out[7] == 1.5);
    CHECK(out[3] == 0.0);
    CHECK(out[8] == 0.0);
}

TEST_CASE("rotated rows are Hadamard's, in every dimension; twice is the row, products are kept") {
    std::mt19937 random(31);
    for (uint32_t dim = 32; dim <= 256; dim += 8) {
        CAPTURE(dim);
        const format_test::key_like_rows keys(dim, random);
        for (int trial = 0; trial < 4; ++trial) {
            const std::vector<float> row = keys.draw(random);
            const std::vector<float> once = rotated(row);
            const std::vector<double> exact =
                format_test::hadamard(std::vector<double>(row.begin(), row.end()));
            CHECK(distance(once, exact) < 1e-6 * norm(row));
            CHECK(distance(rotated(once), row) < 1e-6 * norm(row));

            const std::vector<float> query = format_test::gauss_row(dim, random);
            const std::vector<float> rotated_query = rotated(query);
            double plain = 0, turned = 0;
            for (uint32_t i = 0; i < dim; ++i) {
                plain += double{row[i]} * double{query[i]};
                turned += double{once[i]} * double{rotated_query[i]};
            }
            CHECK(std::abs(plain - turned) < 1e-6 * norm(row) * norm(query));
        }
    }
}

TEST_CASE("one outlier spreads evenly over its block") {
    for (const uint32_t dim : {64u, 72u, 80u, 96u}) {
        const uint32_t block = dim & (~dim + 1);
        std::vector<float> row(dim, 0.0f);
        row[dim - 1] = 1000.0f;
        const std::vector<float> out = rotated(row);
        for (uint32_t i = 0; i < dim; ++i) {
            const double expected = i < dim - block ? 0.0 : 1000.0 / std::sqrt(double(block));
            CHECK(std::abs(double{out[i]}) == doctest::Approx(expected).epsilon(1e-6));
        }
    }
}
