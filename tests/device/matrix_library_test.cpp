// cuBLASLt as this library declares it, against cublasLt.h where that is found, and against the
// library itself where there is one: descriptors need no device. And what is said where there is
// none.
#include "driver/matrix_library.hpp"

#include <dlfcn.h>
#include <doctest/doctest.h>

#include <cstring>
#include <string>

using namespace kvrt;
using namespace kvrt::cuda;

#if defined(KVRT_CUBLAS_LT_HEADER)
#include <cublasLt.h>

#include "called_alike.hpp"

namespace {

#define CALLED_ALIKE(name, symbol, result, parameters)                               \
    static_assert(called_alike<decltype(matrix_library::name), decltype(&symbol)>(), \
                  "parameters of " #symbol);
KVRT_MATRIX_CALLS(CALLED_ALIKE)
#undef CALLED_ALIKE

static_assert(matrix_success == CUBLAS_STATUS_SUCCESS);
static_assert(matrix_not_initialised == CUBLAS_STATUS_NOT_INITIALIZED);
static_assert(matrix_allocation_failed == CUBLAS_STATUS_ALLOC_FAILED);
static_assert(matrix_invalid_value == CUBLAS_STATUS_INVALID_VALUE);
static_assert(matrix_architecture_mismatch == CUBLAS_STATUS_ARCH_MISMATCH);
static_assert(matrix_execution_failed == CUBLAS_STATUS_EXECUTION_FAILED);
static_assert(matrix_internal_error == CUBLAS_STATUS_INTERNAL_ERROR);
static_assert(matrix_not_supported == CUBLAS_STATUS_NOT_SUPPORTED);
static_assert(matrix_f32 == CUDA_R_32F);
static_assert(compute_f32 == CUBLAS_COMPUTE_32F);
static_assert(compute_tf32 == CUBLAS_COMPUTE_32F_FAST_TF32);
static_assert(layout_batch_count == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT);
static_assert(layout_batch_stride == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET);
static_assert(preference_workspace == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
// What a product is where nothing else is set: not transposed, by columns.
static_assert(CUBLAS_OP_N == 0 && CUBLASLT_ORDER_COL == 0);

using theirs = cublasLtMatmulHeuristicResult_t;
static_assert(sizeof(matrix_algorithm) == sizeof(cublasLtMatmulAlgo_t));
static_assert(sizeof(matrix_proposal) == sizeof(theirs));
static_assert(offsetof(matrix_proposal, algorithm) == offsetof(theirs, algo));
static_assert(offsetof(matrix_proposal, workspace_bytes) == offsetof(theirs, workspaceSize));
static_assert(offsetof(matrix_proposal, state) == offsetof(theirs, state));
static_assert(offsetof(matrix_proposal, waves) == offsetof(theirs, wavesCount));

}  // namespace

TEST_CASE("cuBLASLt is declared as in cublasLt.h") {
    MESSAGE("compared at compile time with CUBLAS_VERSION ", CUBLAS_VERSION);
}
#else
TEST_CASE("cuBLASLt is declared as in cublasLt.h") {
    MESSAGE("skipped: cublasLt.h was not found when this was configured");
}
#endif

TEST_CASE("cuBLASLt itself makes descriptors of what it is told") {
    const matrix_library* table = nullptr;
    if (load_matrix_library(table) != KV_OK) {
        const std::string reason = message_buffer();
        CHECK(reason.find("libcublasLt.so.13") != std::string::npos);
        CHECK(reason.find("libcublasLt.so.12") != std::string::npos);
        MESSAGE("skipped: ", reason);
        return;
    }
    CHECK(table->version() >= 120000);
    CHECK(std::string(table->status_name(matrix_not_supported)) == "CUBLAS_STATUS_NOT_SUPPORTED");
    layout_handle layout = nullptr;
    REQUIRE(table->layout_create(&layout, matrix_f32, 512, 6, 520) == matrix_success);
    const int32_t batch = 7;
    const int64_t stride = 4096;
    CHECK(table->layout_set(layout, layout_batch_count, &batch, sizeof batch) == matrix_success);
    CHECK(table->layout_set(layout, layout_batch_stride, &stride, sizeof stride) == matrix_success);
    // Sizes of attributes are checked there, as the fake library does.
    CHECK(table->layout_set(layout, layout_batch_count, &stride, sizeof stride) ==
          matrix_invalid_value);
    CHECK(table->layout_set(layout, layout_batch_stride, &batch, sizeof batch) ==
          matrix_invalid_value);
    using ask_layout = matrix_result (*)(layout_handle, int, void*, size_t, size_t*);
    const auto ask = reinterpret_cast<ask_layout>(dlsym(
        dlopen("libcublasLt.so.13", RTLD_NOW | RTLD_NOLOAD), "cublasLtMatrixLayoutGetAttribute"));
    if (ask != nullptr) {
        const struct {
            int attribute;
            uint64_t value;
            size_t bytes;
        } told[] = {{0, matrix_f32, 4}, {2, 512, 8}, {3, 6, 8},
                    {4, 520, 8},        {5, 7, 4},   {6, 4096, 8}};
        for (const auto& each : told) {
            uint64_t value = 0;
            size_t written = 0;
            CAPTURE(each.attribute);
            CHECK(ask(layout, each.attribute, &value, each.bytes, &written) == matrix_success);
            CHECK(value == each.value);
            CHECK(written == each.bytes);
        }
    }
    CHECK(table->layout_destroy(layout) == matrix_success);
    product_handle product = nullptr;
    REQUIRE(table->product_create(&product, compute_f32, matrix_f32) == matrix_success);
    CHECK(table->product_destroy(product) == matrix_success);
    REQUIRE(table->product_create(&product, compute_tf32, matrix_f32) == matrix_success);
    CHECK(table->product_destroy(product) == matrix_success);
    preference_handle preference = nullptr;
    REQUIRE(table->preference_create(&preference) == matrix_success);
    const uint64_t bytes = 1 << 20;
    CHECK(table->preference_set(preference, preference_workspace, &bytes, sizeof bytes) ==
          matrix_success);
    CHECK(table->preference_set(preference, preference_workspace, &batch, sizeof batch) ==
          matrix_invalid_value);
    CHECK(table->preference_destroy(preference) == matrix_success);
}

TEST_CASE("where there is no library, both names are said") {
    matrix_library table;
    CHECK(open_matrix_library({"libnowhere.so.13", "libnowhere.so.12"}, table) == KV_UNSUPPORTED);
    const std::string reason = message_buffer();
    CHECK(reason.find("there is no libnowhere.so.13 or libnowhere.so.12") != std::string::npos);
    CHECK(!table.version);
    // One that is there, and is another.
    CHECK(open_matrix_library({"libnowhere.so.13", "libc.so.6"}, table) == KV_UNSUPPORTED);
    CHECK(std::string(message_buffer()).find("libc.so.6 has no cublasLt") != std::string::npos);
}

TEST_CASE("a library without one of the calls is none") {
    static const char* absent = nullptr;
    const find_symbol find = [](void*, const char* symbol) {
        return absent != nullptr && std::strcmp(absent, symbol) == 0
                   ? nullptr
                   : reinterpret_cast<void*>(&absent);
    };
    matrix_library table;
    CHECK(fill_matrix_library(nullptr, find, "libthis.so", table) == KV_OK);
    CHECK(bool(table.multiply));
    absent = "cublasLtMatmul";
    matrix_library none;
    CHECK(fill_matrix_library(nullptr, find, "libthis.so", none) == KV_UNSUPPORTED);
    CHECK(std::string(message_buffer()) == "matrix products: libthis.so has no cublasLtMatmul");
    CHECK(!none.version);
}
