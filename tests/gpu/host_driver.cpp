#include "host_driver.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>

namespace kvrt::cuda {

namespace {

/// The driver is loaded: this finds the same one.
status find_more(host_calls& more) {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return fail(KV_UNSUPPORTED, "{}", dlerror());
    const char* missing = nullptr;
#define KVRT_HOST_FIND(name, symbol, parameters)                                        \
    more.name = reinterpret_cast<driver_result(*) parameters>(dlsym(library, #symbol)); \
    if (more.name == nullptr) missing = #symbol;
    KVRT_HOST_CUDA_CALLS(KVRT_HOST_FIND)
#undef KVRT_HOST_FIND
    if (missing == nullptr) return KV_OK;
    return fail(KV_UNSUPPORTED, "the CUDA driver has no {}: it is too old", missing);
}

}  // namespace

status gpu_host::open() {
    KVRT_TRY(load_driver(calls_));
    KVRT_TRY(find_more(more_));
    KVRT_TRY(check(*calls_, calls_->device_get(&device_, 0), "cuDeviceGet"));
    KVRT_TRY(
        check(*calls_, calls_->primary_retain(&context_, device_), "cuDevicePrimaryCtxRetain"));
    KVRT_TRY(check(*calls_, more_.context_set(context_), "cuCtxSetCurrent"));
    return check(*calls_, calls_->stream_create(&stream_, stream_non_blocking), "cuStreamCreate");
}

gpu_host::~gpu_host() {
    if (stream_ != nullptr) (void)calls_->stream_destroy(stream_);
    if (context_ != nullptr) {
        (void)more_.context_set(nullptr);
        (void)calls_->primary_release(device_);
    }
}

std::string gpu_host::describe() const {
    char name[128] = "a device";
    int version = 0, major = 0, minor = 0, multiprocessors = 0;
    (void)calls_->device_name(name, sizeof name, device_);
    (void)calls_->driver_version(&version);
    (void)calls_->device_attribute(&major, attribute_compute_major, device_);
    (void)calls_->device_attribute(&minor, attribute_compute_minor, device_);
    (void)calls_->device_attribute(&multiprocessors, attribute_multiprocessors, device_);
    return fmt::format("{}, compute capability {}.{}, {} multiprocessors, driver for CUDA {}.{}",
                       name, major, minor, multiprocessors, version / 1000, version % 1000 / 10);
}

uint64_t gpu_host::free_bytes() const {
    size_t available = 0, total = 0;
    demand(more_.memory_info(&available, &total), "cuMemGetInfo");
    return available;
}

void gpu_host::demand(driver_result result, const char* call) const {
    if (check(*calls_, result, call) == KV_OK) return;
    std::fprintf(stderr, "%s\n", message_buffer());
    std::exit(1);
}

}  // namespace kvrt::cuda
