#include "matrix_products.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>

namespace generate {

namespace {

// The newest kernels for single precision that OpenBLAS has and that this processor runs; null
// leaves the choice to OpenBLAS.
const char* kernels_for_processor() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
        return "SkylakeX";
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        return "Haswell";
    }
#endif
    return nullptr;
}

outcome<matrix_products> open_library() {
    if (const char* kernels = kernels_for_processor(); kernels != nullptr) {
        setenv("OPENBLAS_CORETYPE", kernels, 0);  // not where the user has
    }
    void* library = dlopen(KVRT_OPENBLAS_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        return error{
            fmt::format("OpenBLAS cannot be loaded ({}): install it again, or build the "
                        "samples against another one",
                        dlerror())};
    }
    matrix_products found;
    found.with_matrix =
        reinterpret_cast<decltype(found.with_matrix)>(dlsym(library, "cblas_sgemm"));
    found.with_vector =
        reinterpret_cast<decltype(found.with_vector)>(dlsym(library, "cblas_sgemv"));
    found.set_threads =
        reinterpret_cast<decltype(found.set_threads)>(dlsym(library, "openblas_set_num_threads"));
    if (found.with_matrix == nullptr || found.with_vector == nullptr ||
        found.set_threads == nullptr) {
        return error{
            fmt::format("{} has no cblas_sgemm, cblas_sgemv or openblas_set_num_threads: "
                        "it is not OpenBLAS",
                        KVRT_OPENBLAS_LIBRARY)};
    }
    return found;
}

}  // namespace

outcome<const matrix_products*> load_matrix_products() {
    static const outcome<matrix_products> loaded = open_library();
    if (!loaded) {
        return loaded.failure();
    }
    return &*loaded;
}

}  // namespace generate
