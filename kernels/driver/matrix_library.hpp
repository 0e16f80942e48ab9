// cuBLASLt as a table of function pointers, as driver.hpp has the driver: opened when a host asks
// for matrix products, never before, so that nothing here links to it or needs a header of its.
// Types and values are those of cublasLt.h, checked against it where it is found
// (tests/device/matrix_library_abi_test.cpp).
#pragma once

#include <cstddef>
#include <cstdint>

#include "driver/driver.hpp"

namespace kvrt::cuda {

using matrix_result = int;  ///< cublasStatus_t

using matrix_handle = struct matrix_object*;          ///< cublasLtHandle_t
using layout_handle = struct layout_object*;          ///< cublasLtMatrixLayout_t
using product_handle = struct product_object*;        ///< cublasLtMatmulDesc_t
using preference_handle = struct preference_object*;  ///< cublasLtMatmulPreference_t

inline constexpr matrix_result matrix_success = 0;
inline constexpr matrix_result matrix_not_initialised = 1;
inline constexpr matrix_result matrix_allocation_failed = 3;
inline constexpr matrix_result matrix_invalid_value = 7;
inline constexpr matrix_result matrix_architecture_mismatch = 8;
inline constexpr matrix_result matrix_execution_failed = 13;
inline constexpr matrix_result matrix_internal_error = 14;
inline constexpr matrix_result matrix_not_supported = 15;

inline constexpr int matrix_f32 = 0;            ///< CUDA_R_32F
inline constexpr int compute_f32 = 68;          ///< CUBLAS_COMPUTE_32F
inline constexpr int compute_tf32 = 77;         ///< CUBLAS_COMPUTE_32F_FAST_TF32
inline constexpr int layout_batch_count = 5;    ///< CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: int32_t
inline constexpr int layout_batch_stride = 6;   ///< ..._STRIDED_BATCH_OFFSET: int64_t, in elements
inline constexpr int preference_workspace = 1;  ///< CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
                                                ///< uint64_t

/// cublasLtMatmulAlgo_t: how a product is computed.
struct matrix_algorithm {
    uint64_t data[8] = {};
};
/// cublasLtMatmulHeuristicResult_t.
struct matrix_proposal {
    matrix_algorithm algorithm;
    size_t workspace_bytes = 0;
    matrix_result state = matrix_not_supported;  ///< of the others, when it is a success
    float waves = 0.0f;
    int reserved[4] = {};
};

// clang-format off

/// call(name here, symbol in the library, what it returns, parameters).
#define KVRT_MATRIX_CALLS(call) \
    call(version, cublasLtGetVersion, size_t, ()) \
    call(status_name, cublasLtGetStatusName, const char*, (matrix_result status)) \
    call(create, cublasLtCreate, matrix_result, (matrix_handle* handle)) \
    call(destroy, cublasLtDestroy, matrix_result, (matrix_handle handle)) \
    call(layout_create, cublasLtMatrixLayoutCreate, matrix_result, \
         (layout_handle* layout, int type, uint64_t rows, uint64_t columns, int64_t leading)) \
    call(layout_destroy, cublasLtMatrixLayoutDestroy, matrix_result, (layout_handle layout)) \
    call(layout_set, cublasLtMatrixLayoutSetAttribute, matrix_result, \
         (layout_handle layout, int attribute, const void* value, size_t bytes)) \
    call(product_create, cublasLtMatmulDescCreate, matrix_result, \
         (product_handle* product, int compute, int scale_type)) \
    call(product_destroy, cublasLtMatmulDescDestroy, matrix_result, (product_handle product)) \
    call(preference_create, cublasLtMatmulPreferenceCreate, matrix_result, \
         (preference_handle* preference)) \
    call(preference_destroy, cublasLtMatmulPreferenceDestroy, matrix_result, \
         (preference_handle preference)) \
    call(preference_set, cublasLtMatmulPreferenceSetAttribute, matrix_result, \
         (preference_handle preference, int attribute, const void* value, size_t bytes)) \
    call(propose, cublasLtMatmulAlgoGetHeuristic, matrix_result, \
         (matrix_handle handle, product_handle product, layout_handle a, layout_handle b, \
          layout_handle c, layout_handle d, preference_handle preference, int wanted, \
          matrix_proposal* proposals, int* found)) \
    call(multiply, cublasLtMatmul, matrix_result, \
         (matrix_handle handle, product_handle product, const void* alpha, const void* a, \
          layout_handle a_layout, const void* b, layout_handle b_layout, const void* beta, \
          const void* c, layout_handle c_layout, void* d, layout_handle d_layout, \
          const matrix_algorithm* algorithm, void* workspace, size_t workspace_bytes, \
          stream_handle stream))

// clang-format on

struct matrix_library {
#define KVRT_MATRIX_FIELD(name, symbol, result, parameters) result(*name) parameters = nullptr;
    KVRT_MATRIX_CALLS(KVRT_MATRIX_FIELD)
#undef KVRT_MATRIX_FIELD
};

/// cuBLASLt of CUDA 13 or 12: one that this process has already, else one that the system finds;
/// at the first call, and kept. UNSUPPORTED says what was looked for. Threads: safe.
status load_matrix_library(const matrix_library*& out);
/// For tests: what load_matrix_library gives from now on; null: what it finds.
void replace_matrix_library(const matrix_library* table);

/// What load_matrix_library does: the first of these that is loaded, else that is found.
status open_matrix_library(const char* const (&names)[2], matrix_library& table);

/// Fills a table by asking for each symbol: what load_matrix_library does with what it opens.
status fill_matrix_library(void* library, find_symbol find, const char* name, matrix_library& out);

/// KV_OK, or a status with the call and the library's name for what went wrong: NO_MEMORY,
/// UNSUPPORTED (there is no such product on this device), else DEVICE.
status check(const matrix_library& table, matrix_result result, const char* call);

}  // namespace kvrt::cuda
