// Query statistics: what comes out of rotated queries against the queries before rotation, and the
// file that keeps the means.
#include "retention/query_statistics.hpp"

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <complex>
#include <cstdio>
#include <string>

#include "paged_fixture.hpp"
#include "retention/statistics_file.hpp"

using namespace kvrt;
using namespace paged_test;
using complex = std::complex<double>;

namespace {

rope_description make_rope(uint32_t style, uint32_t dimensions, double theta, double factor) {
    rope_description rope;
    rope.style = style;
    rope.dimensions = dimensions;
    rope.attention_factor = factor;
    for (uint32_t f = 0; f < dimensions / 2; ++f) {
        rope.inverse_frequencies[f] = std::pow(theta, -2.0 * f / dimensions);
    }
    return rope;
}

template <class number>
struct owned_sums {
    std::vector<number> real, imaginary, magnitude, real_square, imaginary_square, product;

    explicit owned_sums(uint64_t length)
        : real(length),
          imaginary(length),
          magnitude(length),
          real_square(length),
          imaginary_square(length),
          product(length) {}
    query_sums<number> view() {
        return {real.data(),        imaginary.data(),        magnitude.data(),
                real_square.data(), imaginary_square.data(), product.data()};
    }
    bool operator==(const owned_sums&) const = default;
};

struct owned_moments {
    std::vector<float> arrays[6];

    explicit owned_moments(uint64_t length) {
        for (std::vector<float>& array : arrays) array.assign(length, -9.0f);
    }
    query_moments<float> view(bool covariances = true) {
        query_moments<float> found = {arrays[0].data(), arrays[1].data(), arrays[2].data()};
        if (!covariances) return found;
        found.variance_real = arrays[3].data();
        found.variance_imaginary = arrays[4].data();
        found.covariance = arrays[5].data();
        return found;
    }
};

void store(std::vector<std::byte>& bytes, int64_t place, element type, double value) {
    std::byte* address = bytes.data() + place * size_of(type);
    if (type == element::f32) {
        const float single = static_cast<float>(value);
        std::memcpy(address, &single, 4);
    } else {
        const uint16_t bits = nearest_bits(value, type);
        std::memcpy(address, &bits, 2);
    }
}

// Queries before rotation are drawn, rotated here in double, and handed over as `type`. The sums
// have to be those of the queries before rotation, to the rounding of the type.
void check_gathering(const rope_description& rope, uint32_t key_dim, element type, bool strided,
                     uint32_t rows, uint64_t first_position) {
    constexpr uint32_t heads = 3, first_row = 2;
    const uint32_t rotated = rope.dimensions / 2, bands = key_dim - rotated;
    tensor_view view;
    view.type = type;
    view.dim_stride = strided ? 2 : 1;
    view.head_stride = view.dim_stride * key_dim + 8;
    view.row_stride = view.head_stride * heads + 16;
    std::vector<std::byte> bytes(
        static_cast<std::size_t>(view.row_stride) * (rows + first_row) * 4 + 64);
    view.data = bytes.data();

    std::mt19937 random(17);
    std::normal_distribution<double> normal;
    std::vector<complex> sums(heads * bands);
    std::vector<double> magnitudes(heads * bands), squares[3];
    for (std::vector<double>& square : squares) square.resize(heads * bands);
    for (uint32_t r = 0; r < rows; ++r) {
        for (uint32_t h = 0; h < heads; ++h) {
            const int64_t start = (first_row + r) * view.row_stride + h * view.head_stride;
            for (uint32_t f = 0; f < bands; ++f) {
                const complex q(1.0 + normal(random), f < rotated ? normal(random) - 0.5 : 0.0);
                sums[h * bands + f] += q;
                magnitudes[h * bands + f] += std::abs(q);
                squares[0][h * bands + f] += q.real() * q.real();
                squares[1][h * bands + f] += q.imag() * q.imag();
                squares[2][h * bands + f] += q.real() * q.imag();
                if (f >= rotated) {
                    store(bytes, start + (rotated + f) * view.dim_stride, type, q.real());
                    continue;
                }
                const long double angle = static_cast<long double>(rope.inverse_frequencies[f]) *
                                          static_cast<long double>(first_position + r);
                const complex turned = q * rope.attention_factor *
                                       complex(static_cast<double>(std::cos(angle)),
                                               static_cast<double>(std::sin(angle)));
                const bool half = rope.style == KV_ROPE_HALF;
                const int64_t a = half ? f : 2 * f, b = half ? f + rotated : 2 * f + 1;
                store(bytes, start + a * view.dim_stride, type, turned.real());
                store(bytes, start + b * view.dim_stride, type, turned.imag());
            }
        }
    }
    owned_sums<float> pending(heads * bands), by_head(heads * bands);
    add_queries(rope, key_dim, view, first_row, rows, first_position, 0, heads, pending.view());
    for (uint32_t h = 0; h < heads; ++h) {
        add_queries(rope, key_dim, view, first_row, rows, first_position, h, 1, by_head.view());
    }
    CHECK(by_head == pending);

    const double step = type == element::f32 ? 2e-6 : type == element::f16 ? 1e-3 : 8e-3;
    double worst = 0, worst_square = 0;
    for (uint32_t i = 0; i < heads * bands; ++i) {
        worst_square = std::max({worst_square, std::abs(squares[0][i] - pending.real_square[i]),
                                 std::abs(squares[1][i] - pending.imaginary_square[i]),
                                 std::abs(squares[2][i] - pending.product[i])});
        worst = std::max({worst, std::abs(sums[i].real() - pending.real[i]),
                          std::abs(sums[i].imag() - pending.imaginary[i]),
                          std::abs(magnitudes[i] - pending.magnitude[i])});
    }
    CHECK(worst / rows < step);
    CHECK(worst_square / rows < 8 * step);
}

// Three layers of different shape; the second has no statistics.
struct file_fixture {
    rope_description ropes[3] = {make_rope(KV_ROPE_HALF, 64, 1e4, 1.0),
                                 make_rope(KV_ROPE_INTERLEAVED, 16, 1e6, 1.25), rope_description()};
    std::vector<float> arrays[3][6];
    layer_statistics layers[3];

    explicit file_fixture(bool fill, bool covariances = true) {
        const uint32_t query_heads[] = {4, 2, 1}, key_dims[] = {64, 40, 32};
        for (int i = 0; i < 3; ++i) {
            layer_statistics& layer = layers[i];
            layer.query_heads = query_heads[i];
            layer.key_dim = key_dims[i];
            layer.rope = &ropes[i];
            layer.tokens = fill && i != 1 ? 1000 + i : 0;
            const uint64_t length = statistics_length(ropes[i], query_heads[i], key_dims[i]);
            for (int which = 0; which < 6; ++which) {
                arrays[i][which].assign(length, fill ? 0.0f : -9.0f);
                const bool there = i != 1 && (which < 3 || covariances);
                const float sign = which >= 2 && which < 5 ? 1.0f : -1.0f;
                for (uint64_t k = 0; fill && there && k < length; ++k) {
                    arrays[i][which][k] = float(k + 1) * 0.125f * sign * float(1 + which / 3);
                }
            }
            layer.moments = {arrays[i][0].data(), arrays[i][1].data(), arrays[i][2].data()};
            if (fill && !covariances) continue;
            layer.moments.variance_real = arrays[i][3].data();
            layer.moments.variance_imaginary = arrays[i][4].data();
            layer.moments.covariance = arrays[i][5].data();
        }
    }
    bool untouched() const {
        for (int i = 0; i < 3; ++i) {
            if (layers[i].tokens != 0) return false;
            for (const std::vector<float>& array : arrays[i]) {
                for (float value : array) {
                    if (value != -9.0f) return false;
                }
            }
        }
        return true;
    }
    bool same_as(const file_fixture& other) const {
        for (int i = 0; i < 3; ++i) {
            if (layers[i].tokens != other.layers[i].tokens) return false;
            for (int which = 0; which < 6; ++which) {
                if (arrays[i][which] != other.arrays[i][which]) return false;
            }
        }
        return true;
    }
};

std::vector<std::byte> encoded(const file_fixture& fixture) {
    std::vector<std::byte> bytes(statistics_bytes(fixture.layers, 3));
    encode_statistics(fixture.layers, 3, bytes.data());
    return bytes;
}

}  // namespace

TEST_CASE("sums are those of the queries before rotation") {
    on_every_target([] {
        for (element type : all_elements) {
            for (bool strided : {false, true}) {
                CAPTURE(int(type));
                check_gathering(make_rope(KV_ROPE_HALF, 64, 1e4, 1.0), 64, type, strided, 37, 0);
                check_gathering(make_rope(KV_ROPE_INTERLEAVED, 72, 1e6, 1.3), 72, type, strided, 1,
                                1000);
            }
        }
        check_gathering(make_rope(KV_ROPE_HALF, 20, 1e4, 0.7), 48, element::f32, false, 50, 77);
        check_gathering(rope_description(), 32, element::f32, false, 50, 77);
        check_gathering(make_rope(KV_ROPE_HALF, 256, 1e6, 1.0), 256, element::f32, false, 20, 9);
    });
}

TEST_CASE("positions of a million and of four billion are rotated back exactly") {
    on_every_target([] {
        const rope_description rope = make_rope(KV_ROPE_HALF, 128, 1e4, 1.0);
        check_gathering(rope, 128, element::f32, false, 33, 1048576);
        check_gathering(rope, 128, element::f32, false, 33, 4000000000u);
    });
}

TEST_CASE("a committed step joins the total, one that is not finite is refused") {
    owned_sums<float> pending(3);
    owned_sums<double> total(3);
    pending.real = {1, 2, 3};
    pending.imaginary = {-1, 0, 0.5f};
    pending.magnitude = {2, 2, 4};
    CHECK(commit_queries(pending.view(), 3, total.view()));
    CHECK(pending.real == std::vector<float>{0, 0, 0});
    pending.real = {1, 1, 1};
    pending.magnitude = {1, NAN, 1};
    CHECK(!commit_queries(pending.view(), 3, total.view()));
    CHECK(pending.magnitude == std::vector<float>{0, 0, 0});
    CHECK(total.real == std::vector<double>{1, 2, 3});
    pending.real = {7, 6, 5};
    CHECK(commit_queries(pending.view(), 3, total.view()));
    CHECK(total.real == std::vector<double>{8, 8, 8});

    total.real_square = {20, 16, 15};  // the last is less than rounding may make of it
    total.imaginary_square = {1.25, 4, 8};
    total.product = {0, 1, 100};
    owned_moments found(3);
    query_moments_of(total.view(), 3, 4, found.view(false));
    CHECK(found.arrays[0] == std::vector<float>{2, 2, 2});
    CHECK(found.arrays[1] == std::vector<float>{-0.25f, 0, 0.125f});
    CHECK(found.arrays[2] == std::vector<float>{0.5f, 0.5f, 1});
    CHECK(found.arrays[3] == std::vector<float>{-9, -9, -9});
    query_moments_of(total.view(), 3, 4, found.view());
    CHECK(found.arrays[0] == std::vector<float>{2, 2, 2});
    CHECK(found.arrays[3] == std::vector<float>{1, 0, 0});
    CHECK(found.arrays[4] == std::vector<float>{0.25f, 1, 1.984375f});
    CHECK(found.arrays[5] == std::vector<float>{0.5f, 0, 0});  // no more than the variances allow
}

TEST_CASE("covariances of drawn queries") {
    std::mt19937 random(3);
    std::normal_distribution<double> normal;
    owned_sums<float> pending(1);
    owned_sums<double> total(1);
    double sums[2] = {}, squares[3] = {};
    const uint32_t tokens = 500;
    for (uint32_t i = 0; i < tokens; ++i) {
        const double x = 3.0 + normal(random), y = -1.0 + 0.5 * normal(random) + 0.25 * x;
        sums[0] += x;
        sums[1] += y;
        squares[0] += x * x;
        squares[1] += y * y;
        squares[2] += x * y;
        pending.real[0] = static_cast<float>(x);
        pending.imaginary[0] = static_cast<float>(y);
        pending.real_square[0] = static_cast<float>(x * x);
        pending.imaginary_square[0] = static_cast<float>(y * y);
        pending.product[0] = static_cast<float>(x * y);
        REQUIRE(commit_queries(pending.view(), 1, total.view()));
    }
    owned_moments found(1);
    query_moments_of(total.view(), 1, tokens, found.view());
    const double mean_x = sums[0] / tokens, mean_y = sums[1] / tokens;
    CHECK(std::abs(found.arrays[3][0] - (squares[0] / tokens - mean_x * mean_x)) < 1e-5);
    CHECK(std::abs(found.arrays[4][0] - (squares[1] / tokens - mean_y * mean_y)) < 1e-5);
    CHECK(std::abs(found.arrays[5][0] - (squares[2] / tokens - mean_x * mean_y)) < 1e-5);
}

TEST_CASE("a million single steps lose nothing") {
    owned_sums<float> pending(1);
    owned_sums<double> total(1);
    for (int i = 0; i < 1000000; ++i) {
        pending.real[0] = 0.1f;
        pending.magnitude[0] = i % 2 ? 3.0f : 1e-3f;
        REQUIRE(commit_queries(pending.view(), 1, total.view()));
    }
    owned_moments found(1);
    query_moments_of(total.view(), 1, 1000000, found.view());
    CHECK(found.arrays[0][0] == 0.1f);
    CHECK(found.arrays[1][0] == 0.0f);
    CHECK(found.arrays[2][0] == doctest::Approx(1.5005).epsilon(1e-7));
}

TEST_CASE("a statistics file comes back as it was written") {
    const file_fixture written(true);
    file_fixture found(false);
    const std::vector<std::byte> bytes = encoded(written);
    CHECK(bytes.size() == 24 + 8 + 3 * 40 + (32 + 8 + 0) * 8 + 6 * 4 * (4 * 32 + 2 * 32 + 1 * 32));
    CHECK(std::memcmp(bytes.data(), "KVRTQST1", 8) == 0);
    REQUIRE(decode_statistics(bytes.data(), bytes.size(), found.layers, 3) == KV_OK);
    CHECK(found.same_as(written));
    CHECK(found.layers[0].has_covariances);
    CHECK(!found.layers[1].has_covariances);

    const file_fixture means_alone(true, false);
    const std::vector<std::byte> without = encoded(means_alone);
    REQUIRE(decode_statistics(without.data(), without.size(), found.layers, 3) == KV_OK);
    CHECK(found.same_as(means_alone));
    CHECK(!found.layers[0].has_covariances);
}

TEST_CASE("a statistics file of version 1, which has no covariances, is read") {
    // Written byte by byte as it was then; the trailer's checksum is XXH3-64 of all before it.
    const file_fixture means_alone(true, false);
    std::vector<std::byte> bytes;
    const auto put = [&](const auto& value) {
        const std::byte* from = reinterpret_cast<const std::byte*>(&value);
        bytes.insert(bytes.end(), from, from + sizeof value);
    };
    const std::size_t whole = 24 + 8 + 3 * 40 + (32 + 8) * 8 + 3 * 4 * (4 * 32 + 2 * 32 + 32);
    for (const char c : {'K', 'V', 'R', 'T', 'Q', 'S', 'T', '1'}) put(c);
    put(uint32_t{1});
    put(uint32_t{3});
    put(uint64_t{whole});
    for (int i = 0; i < 3; ++i) {
        const layer_statistics& layer = means_alone.layers[i];
        const rope_description& rope = *layer.rope;
        const uint32_t rotated = rope.dimensions / 2;
        put(layer.query_heads);
        put(layer.key_dim);
        put(layer.key_dim - rotated);
        put(rope.style);
        put(rope.dimensions);
        put(uint32_t{0});
        put(layer.tokens);
        put(rope.attention_factor);
        for (uint32_t band = 0; band < rotated; ++band) put(rope.inverse_frequencies[band]);
        for (int which = 0; which < 3; ++which) {
            for (const float value : means_alone.arrays[i][which]) put(value);
        }
    }
    put(uint64_t{XXH3_64bits(bytes.data(), bytes.size())});
    REQUIRE(bytes.size() == whole);
    file_fixture found(false);
    REQUIRE(decode_statistics(bytes.data(), bytes.size(), found.layers, 3) == KV_OK);
    CHECK(found.same_as(means_alone));
    CHECK(!found.layers[0].has_covariances);
    CHECK(!found.layers[2].has_covariances);
}

TEST_CASE("every damaged byte and every cut of a statistics file is noticed") {
    const std::vector<std::byte> bytes = encoded(file_fixture(true));
    file_fixture found(false);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
        std::vector<std::byte> damaged = bytes;
        damaged[i] ^= std::byte{0x10};
        if (decode_statistics(damaged.data(), damaged.size(), found.layers, 3) != KV_CORRUPT) {
            FAIL_CHECK("damage at byte ", i, " was taken");
        }
        if (decode_statistics(bytes.data(), i, found.layers, 3) != KV_CORRUPT) {
            FAIL_CHECK("a cut at byte ", i, " was taken");
        }
    }
    CHECK(found.untouched());
}

TEST_CASE("statistics of another model are refused, whatever differs") {
    const auto refused = [](const file_fixture& other) {
        const std::vector<std::byte> bytes = encoded(other);
        file_fixture found(false);
        return decode_statistics(bytes.data(), bytes.size(), found.layers, 3) == KV_CORRUPT &&
               found.untouched();
    };
    file_fixture other(true);
    CHECK(!refused(other));
    other.layers[0].query_heads = 3;
    CHECK(refused(other));
    other = file_fixture(true);
    for (int i = 0; i < 3; ++i) other.layers[i].rope = &other.ropes[i];
    std::swap(other.layers[0], other.layers[1]);
    CHECK(refused(other));

    file_fixture theta(true);
    theta.ropes[0] = make_rope(KV_ROPE_HALF, 64, 1.001e4, 1.0);
    CHECK(refused(theta));
    file_fixture factor(true);
    factor.ropes[1].attention_factor = 1.2501;
    CHECK(refused(factor));
    file_fixture style(true);
    style.ropes[0].style = KV_ROPE_INTERLEAVED;
    CHECK(refused(style));
    file_fixture single_precision(true);  // the same numbers, computed in f32
    for (double& frequency : single_precision.ropes[0].inverse_frequencies) {
        frequency = static_cast<float>(frequency);
    }
    CHECK(!refused(single_precision));
    file_fixture impossible(true);
    impossible.arrays[2][2][5] = -1.0f;
    CHECK(refused(impossible));
    file_fixture less_than_nothing(true);
    less_than_nothing.arrays[2][4][5] = -1.0f;
    CHECK(refused(less_than_nothing));
    file_fixture not_finite(true);
    not_finite.arrays[2][0][5] = INFINITY;
    CHECK(refused(not_finite));

    file_fixture found(false);
    const std::vector<std::byte> bytes = encoded(file_fixture(true));
    CHECK(decode_statistics(bytes.data(), bytes.size(), found.layers, 2) == KV_CORRUPT);
}

TEST_CASE("statistics files on disk") {
    const std::string path =
        "/tmp/kvrt_statistics_test_" + std::to_string(getpid()) + ".statistics";
    const file_fixture written(true);
    file_fixture found(false);
    CHECK(load_statistics(path.c_str(), found.layers, 3) == KV_IO);
    REQUIRE(save_statistics(written.layers, 3, path.c_str()) == KV_OK);
    REQUIRE(save_statistics(written.layers, 3, path.c_str()) == KV_OK);  // replaces
    REQUIRE(load_statistics(path.c_str(), found.layers, 3) == KV_OK);
    CHECK(found.same_as(written));

    // Longer than it should be.
    std::FILE* file = std::fopen(path.c_str(), "ab");
    REQUIRE(file != nullptr);
    std::fputc(0, file);
    std::fclose(file);
    file_fixture clean(false);
    CHECK(load_statistics(path.c_str(), clean.layers, 3) == KV_CORRUPT);
    CHECK(clean.untouched());
    std::remove(path.c_str());
    CHECK(save_statistics(written.layers, 3, "/tmp/no-such-folder/x") == KV_IO);
    // A link stays a link to the new file; a device stays a device.
    const std::string link = path + ".link";
    REQUIRE(std::fclose(std::fopen(path.c_str(), "wb")) == 0);
    REQUIRE(symlink(path.c_str(), link.c_str()) == 0);
    CHECK(save_statistics(written.layers, 3, link.c_str()) == KV_OK);
    struct stat status_of;
    REQUIRE(lstat(link.c_str(), &status_of) == 0);
    CHECK(S_ISLNK(status_of.st_mode));
    REQUIRE(stat(path.c_str(), &status_of) == 0);
    CHECK(status_of.st_size > 0);
    REQUIRE(unlink(link.c_str()) == 0);
    REQUIRE(unlink(path.c_str()) == 0);
    const std::string pipe = path + ".pipe";
    REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
    CHECK(save_statistics(written.layers, 3, pipe.c_str()) == KV_IO);
    REQUIRE(lstat(pipe.c_str(), &status_of) == 0);
    CHECK(S_ISFIFO(status_of.st_mode));
    REQUIRE(unlink(pipe.c_str()) == 0);
    CHECK(save_statistics(written.layers, 3, std::string(5000, 'x').c_str()) == KV_INVALID);
    CHECK(load_statistics("/tmp", clean.layers, 3) == KV_IO);
}
