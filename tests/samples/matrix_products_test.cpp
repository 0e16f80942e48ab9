// Products as the samples make them: what they compute, and with which kernels of OpenBLAS.
#include "matrix_products.hpp"

#include <dlfcn.h>
#include <doctest/doctest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

TEST_CASE("products are those of double precision") {
    const auto products = generate::load_matrix_products();
    REQUIRE(products);
    constexpr int rows = 5, inputs = 37, outputs = 23;
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> left(rows * inputs), right(inputs * outputs), out(rows * outputs, 1.0f);
    for (float& number : left) number = normal(random);
    for (float& number : right) number = normal(random);
    const auto expected = [&](int row, int column) {
        double sum = 0.0;
        for (int i = 0; i < inputs; ++i) {
            sum += double{left[static_cast<std::size_t>(row * inputs + i)]} *
                   double{right[static_cast<std::size_t>(i * outputs + column)]};
        }
        return sum;
    };
    (*products)->with_matrix(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, outputs, inputs, 1.0f,
                             left.data(), inputs, right.data(), outputs, 0.0f, out.data(), outputs);
    for (int row = 0; row < rows; ++row) {
        for (int column = 0; column < outputs; ++column) {
            const float found = out[static_cast<std::size_t>(row * outputs + column)];
            CHECK(std::abs(double{found} - expected(row, column)) < 1e-4);
        }
    }
    (*products)->with_vector(CblasColMajor, CblasNoTrans, outputs, inputs, 1.0f, right.data(),
                             outputs, left.data(), 1, 1.0f, out.data(), 1);
    for (int column = 0; column < outputs; ++column) {
        const float found = out[static_cast<std::size_t>(column)];
        CHECK(std::abs(double{found} - 2.0 * expected(0, column)) < 2e-4);
    }
}

#if defined(__x86_64__)
TEST_CASE("a processor that OpenBLAS does not know does not get the kernels of 2004") {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
        MESSAGE("skipped: it wants a processor with AVX2");
        return;
    }
    REQUIRE(generate::load_matrix_products());
    void* library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_NOLOAD);
    REQUIRE(library != nullptr);
    const auto name =
        reinterpret_cast<decltype(&openblas_get_corename)>(dlsym(library, "openblas_get_corename"));
    const bool names_kernels = name != nullptr;
    REQUIRE(names_kernels);
    const std::string kernels = name();
    CHECK(kernels != "Prescott");
    dlclose(library);
}
#endif
