#include "driver/matrix_library.hpp"

#include <dlfcn.h>

#include <mutex>

namespace kvrt::cuda {

namespace {

/// What is called is declared alike in both.
constexpr const char* library_names[] = {"libcublasLt.so.13", "libcublasLt.so.12"};

std::mutex library_lock;
const matrix_library* replaced_library = nullptr;

void* find_in_library(void* library, const char* symbol) { return dlsym(library, symbol); }

}  // namespace

/// It stays loaded, as the driver does.
status open_matrix_library(const char* const (&names)[2], matrix_library& table) {
    for (const int only_if_loaded : {RTLD_NOLOAD, 0}) {
        for (const char* const name : names) {
            void* const library = dlopen(name, RTLD_NOW | RTLD_LOCAL | only_if_loaded);
            if (library != nullptr) {
                return fill_matrix_library(library, find_in_library, name, table);
            }
        }
    }
    return fail(KV_UNSUPPORTED,
                "matrix products: there is no {} or {} where the system looks for libraries: {}",
                names[0], names[1], dlerror());
}

status fill_matrix_library(void* library, find_symbol find, const char* name, matrix_library& out) {
    matrix_library table;
    const char* missing = nullptr;
#define KVRT_MATRIX_FIND(call, symbol, result, parameters)                       \
    table.call = reinterpret_cast<result(*) parameters>(find(library, #symbol)); \
    if (table.call == nullptr) missing = #symbol;
    KVRT_MATRIX_CALLS(KVRT_MATRIX_FIND)
#undef KVRT_MATRIX_FIND
    if (missing != nullptr) {
        return fail(KV_UNSUPPORTED, "matrix products: {} has no {}", name, missing);
    }
    out = table;
    return KV_OK;
}

void replace_matrix_library(const matrix_library* table) {
    const std::lock_guard<std::mutex> guard(library_lock);
    replaced_library = table;
}

status load_matrix_library(const matrix_library*& out) {
    static matrix_library table;
    static bool loaded = false;
    const std::lock_guard<std::mutex> guard(library_lock);
    if (replaced_library == nullptr && !loaded) {
        KVRT_TRY(open_matrix_library(library_names, table));
        loaded = true;
    }
    out = replaced_library != nullptr ? replaced_library : &table;
    return KV_OK;
}

status check(const matrix_library& table, matrix_result result, const char* call) {
    if (result == matrix_success) return KV_OK;
    const bool refused = result == matrix_not_supported || result == matrix_architecture_mismatch;
    return fail(result == matrix_allocation_failed ? KV_NO_MEMORY
                : refused                          ? KV_UNSUPPORTED
                                                   : KV_DEVICE,
                "{}: {} ({})", call, table.status_name(result), result);
}

}  // namespace kvrt::cuda
