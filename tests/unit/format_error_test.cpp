// How much each format loses: relative errors over 4096 rows of 128 channels, normal ones and ones
// like keys, against the figures of independent simulations of the formulas.
#include <doctest/doctest.h>

#include <string>

#include "format/format.hpp"
#include "format/rotation.hpp"
#include "format_reference.hpp"

using namespace format_test;

namespace {

constexpr uint32_t dim = 128, vectors = 4096;

/// Root mean square of the errors by that of the numbers.
template <class draw_function>
double relative_error(const facts& format, bool rotated, const draw_function& draw) {
    const kvrt::format_description& description = *kvrt::find_format(format.id, format.role);
    std::vector<std::byte> record(format.padded_bytes(dim));
    double error = 0, size = 0;
    for (uint32_t v = 0; v < vectors; ++v) {
        const std::vector<float> row = draw();
        std::vector<float> stored = row;
        if (rotated) kvrt::rotate_row(stored.data(), dim);
        description.encode(stored.data(), dim, {}, record.data());
        std::vector<double> back = decode(format, record.data(), dim, 1.0);
        if (rotated) back = hadamard(back);
        for (uint32_t i = 0; i < dim; ++i) {
            error += (back[i] - double{row[i]}) * (back[i] - double{row[i]});
            size += double{row[i]} * double{row[i]};
        }
    }
    return std::sqrt(error / size);
}

struct floor_of_error {
    uint32_t id;
    bool rotated;
    double gauss, keys;
    operand_role role = operand_role::keys;
};

constexpr floor_of_error floors[] = {
    {KV_FORMAT_FP8_E4M3, false, 0.0267, 0.0266},  {KV_FORMAT_FP8_E5M2, false, 0.0529, 0.0521},
    {KV_FORMAT_FP8_TOKEN, false, 0.0257, 0.0223}, {KV_FORMAT_INT8_TOKEN, false, 0.0065, 0.0134},
    {KV_FORMAT_Q8_0, false, 0.0054, 0.0102},      {KV_FORMAT_Q4_0, false, 0.0861, 0.1635},
    {KV_FORMAT_Q4_0, true, 0.0861, 0.0802},       {KV_FORMAT_Q4_1, false, 0.0783, 0.1263},
    {KV_FORMAT_Q4_1, true, 0.0782, 0.0761},       {KV_FORMAT_INT4_TOKEN, false, 0.0999, 0.2096},
    {KV_FORMAT_INT4_TOKEN, true, 0.0997, 0.0987}, {KV_FORMAT_NVFP4, false, 0.0951, 0.0916},
    {KV_FORMAT_NVFP4, true, 0.0951, 0.0963},      {KV_FORMAT_MXFP4, false, 0.1147, 0.1704},
    {KV_FORMAT_MXFP4, true, 0.1152, 0.1142},      {KV_FORMAT_TURBO4, true, 0.0960, 0.0932},
    {KV_FORMAT_TURBO3, true, 0.1842, 0.1776},
};

}  // namespace

TEST_CASE("errors stay at their floors, with and without rotation") {
    for (const floor_of_error& floor : floors) {
        const facts& format = facts_of(floor.id, floor.role);
        std::mt19937 random(61);
        const double gauss =
            relative_error(format, floor.rotated, [&] { return gauss_row(dim, random); });
        const key_like_rows source(dim, random);
        const double keys =
            relative_error(format, floor.rotated, [&] { return source.draw(random); });
        CAPTURE(std::string(format.name));
        CAPTURE(floor.rotated);
        CHECK(gauss == doctest::Approx(floor.gauss).epsilon(0.02));
        CHECK(keys < 1.1 * floor.keys);
    }
}
