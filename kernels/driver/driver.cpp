#include "driver/driver.hpp"

#include <dlfcn.h>

#include <mutex>

namespace kvrt::cuda {

namespace {

constexpr const char* driver_library = "libcuda.so.1";

std::mutex driver_lock;
const driver* replaced_driver = nullptr;

void* find_in_library(void* library, const char* symbol) { return dlsym(library, symbol); }

/// The driver stays loaded: its threads and handlers do not survive a dlclose.
status load_once(driver& table) {
    void* library = dlopen(driver_library, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        return fail(KV_UNSUPPORTED, "no CUDA driver on this machine: {}", dlerror());
    }
    KVRT_TRY(fill_driver(library, find_in_library, table));
    return initialise(table);
}

}  // namespace

status fill_driver(void* library, find_symbol find, driver& out) {
    driver table;
    const char* missing = nullptr;
    bool virtual_memory = true;
#define KVRT_CUDA_FIND(name, symbol, parameters)                                        \
    table.name = reinterpret_cast<driver_result(*) parameters>(find(library, #symbol)); \
    if (table.name == nullptr) missing = #symbol;
    KVRT_CUDA_CALLS(KVRT_CUDA_FIND)
#undef KVRT_CUDA_FIND
    if (missing != nullptr) {
        return fail(KV_UNSUPPORTED, "the CUDA driver has no {}: it is too old", missing);
    }
#define KVRT_CUDA_FIND(name, symbol, parameters)                                        \
    table.name = reinterpret_cast<driver_result(*) parameters>(find(library, #symbol)); \
    virtual_memory = virtual_memory && table.name != nullptr;
    KVRT_CUDA_VIRTUAL_MEMORY_CALLS(KVRT_CUDA_FIND)
#undef KVRT_CUDA_FIND
    if (!virtual_memory) {
#define KVRT_CUDA_FORGET(name, symbol, parameters) table.name = nullptr;
        KVRT_CUDA_VIRTUAL_MEMORY_CALLS(KVRT_CUDA_FORGET)
#undef KVRT_CUDA_FORGET
    }
    out = table;
    return KV_OK;
}

status initialise(const driver& table) {
    const driver_result result = table.initialise(0);
    if (result != success) {
        return fail(KV_UNSUPPORTED, "the CUDA driver does not start: cuInit: {}",
                    error_name(table, result));
    }
    int devices = 0;
    KVRT_TRY(check(table, table.device_count(&devices), "cuDeviceGetCount"));
    if (devices == 0) return fail(KV_UNSUPPORTED, "the CUDA driver finds no device");
    return KV_OK;
}

void replace_driver(const driver* table) {
    const std::lock_guard<std::mutex> guard(driver_lock);
    replaced_driver = table;
}

status load_driver(const driver*& out) {
    static driver table;
    static bool loaded = false;
    const std::lock_guard<std::mutex> guard(driver_lock);
    if (replaced_driver == nullptr && !loaded) {
        KVRT_TRY(load_once(table));
        loaded = true;
    }
    out = replaced_driver != nullptr ? replaced_driver : &table;
    return KV_OK;
}

bool is_fault(driver_result result) {
    switch (result) {
        case error_deinitialized:
        case error_ecc_uncorrectable:
        case error_nvlink_uncorrectable:
        case error_contained:
        case error_illegal_address:
        case error_launch_timeout:
        case error_context_is_destroyed:
        case error_assert:
        case error_hardware_stack:
        case error_illegal_instruction:
        case error_misaligned_address:
        case error_invalid_address_space:
        case error_invalid_pc:
        case error_launch_failed:
        case error_tensor_memory_leak:
        case error_external_device:
        case error_unknown:
            return true;
        default:
            return false;
    }
}

const char* error_name(const driver& table, driver_result result) {
    const char* name = nullptr;
    if (table.error_name(result, &name) != success || name == nullptr) {
        return "an error that this driver has no name for";
    }
    return name;
}

status check(const driver& table, driver_result result, const char* call) {
    if (result == success) return KV_OK;
    const char* text = nullptr;
    if (table.error_text(result, &text) != success || text == nullptr) text = "no description";
    return fail(result == error_out_of_memory ? KV_NO_MEMORY : KV_DEVICE, "{}: {} ({}): {}", call,
                error_name(table, result), result, text);
}

}  // namespace kvrt::cuda
