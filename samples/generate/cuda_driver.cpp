#include "cuda_driver.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <utility>

namespace generate {

namespace {

constexpr unsigned int stream_non_blocking = 1;  // it does not wait for the default stream

}  // namespace

outcome<std::unique_ptr<cuda_device>> cuda_device::open() {
    // Stays loaded: threads of the driver do not survive a dlclose.
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        return error{
            fmt::format("--device cuda needs NVIDIA's driver, which this machine does not have: {}",
                        dlerror())};
    }
    std::unique_ptr<cuda_device> made(new cuda_device);
    cuda_calls& calls = made->calls_;
    const char* missing = nullptr;
#define GENERATE_CUDA_FIND(name, symbol, parameters)                                   \
    calls.name = reinterpret_cast<cuda_result(*) parameters>(dlsym(library, #symbol)); \
    if (calls.name == nullptr) missing = #symbol;
    GENERATE_CUDA_CALLS(GENERATE_CUDA_FIND)
#undef GENERATE_CUDA_FIND
    if (missing != nullptr) {
        return error{fmt::format("--device cuda: the driver of this machine has no {}", missing)};
    }
    for (const auto& [call, result] :
         {std::pair{"--device cuda: cuInit", calls.initialise(0)},
          std::pair{"--device cuda: cuDeviceGet", calls.device_get(&made->device_, 0)}}) {
        if (auto done = made->check(call, result); !done) {
            return done.failure();
        }
    }
    char name[128] = {};
    static_cast<void>(calls.device_name(name, sizeof(name) - 1, made->device_));
    made->name_ = name;
    auto done = made->check("cuDevicePrimaryCtxRetain",
                            calls.primary_retain(&made->context_, made->device_));
    if (done) {
        done = made->check("cuCtxPushCurrent", calls.context_push(made->context_));
    }
    if (done) {
        done =
            made->check("cuStreamCreate", calls.stream_create(&made->stream_, stream_non_blocking));
    }
    if (!done) {
        return done.failure();
    }
    return made;
}

cuda_device::~cuda_device() {
    if (stream_ != nullptr) {
        static_cast<void>(calls_.stream_destroy(stream_));
    }
    if (context_ != nullptr) {
        cuda_context popped = nullptr;
        static_cast<void>(calls_.context_pop(&popped));
        static_cast<void>(calls_.primary_release(device_));
    }
}

outcome<nothing> cuda_device::check(const char* call, cuda_result result) const {
    if (result == 0) {
        return nothing{};
    }
    const char* name = nullptr;
    if (calls_.error_name(result, &name) != 0 || name == nullptr) {
        name = "an error that the driver has no name for";
    }
    return error{fmt::format("{}: {} ({})", call, name, result)};
}

outcome<nothing> cuda_device::wait() const {
    return check("cuStreamSynchronize", calls_.stream_synchronize(stream_));
}

outcome<device_rows> device_rows::allocate(const cuda_device& device, std::size_t floats) {
    device_rows made(device);
    const std::size_t bytes = floats * sizeof(float);
    void* memory = nullptr;
    auto done = device.check("cuMemHostAlloc", device.calls().host_allocate(&memory, bytes, 0));
    made.host_ = static_cast<float*>(memory);
    if (done) {
        done = device.check("cuMemAlloc", device.calls().memory_allocate(&made.device_, bytes));
    }
    if (!done) {
        return done.failure();
    }
    return made;
}

device_rows::device_rows(device_rows&& other) noexcept
    : owner_(other.owner_),
      host_(std::exchange(other.host_, nullptr)),
      device_(std::exchange(other.device_, 0)) {}

device_rows::~device_rows() {
    if (device_ != 0) {
        static_cast<void>(owner_->calls().memory_free(device_));
    }
    if (host_ != nullptr) {
        static_cast<void>(owner_->calls().host_free(host_));
    }
}

outcome<nothing> device_rows::upload(std::size_t floats) const {
    return owner_->check(
        "cuMemcpyHtoDAsync",
        owner_->calls().copy_to_device(device_, host_, floats * sizeof(float), owner_->stream()));
}

outcome<nothing> device_rows::download(std::size_t floats) const {
    return owner_->check(
        "cuMemcpyDtoHAsync",
        owner_->calls().copy_to_host(host_, device_, floats * sizeof(float), owner_->stream()));
}

}  // namespace generate
