// The few calls of NVIDIA's driver that a host makes to keep its cache on a GPU, found in
// libcuda.so.1 at run time: no toolkit is needed to build this, and no driver to run without one.
// Types and values are those of the CUDA driver API's documentation.
#pragma once

#include <cstddef>
#include <memory>

#include "outcome.hpp"

struct CUctx_st;
struct CUstream_st;

namespace generate {

using cuda_result = int;                    // CUresult; 0 is success
using device_address = unsigned long long;  // CUdeviceptr
using cuda_context = CUctx_st*;
using cuda_stream = CUstream_st*;

// clang-format off

// call(name here, symbol in the driver, parameters)
#define GENERATE_CUDA_CALLS(call) \
    call(initialise, cuInit, (unsigned int flags)) \
    call(error_name, cuGetErrorName, (cuda_result error, const char** name)) \
    call(device_get, cuDeviceGet, (int* device, int ordinal)) \
    call(device_name, cuDeviceGetName, (char* name, int capacity, int device)) \
    call(primary_retain, cuDevicePrimaryCtxRetain, (cuda_context* context, int device)) \
    call(primary_release, cuDevicePrimaryCtxRelease_v2, (int device)) \
    call(context_push, cuCtxPushCurrent_v2, (cuda_context context)) \
    call(context_pop, cuCtxPopCurrent_v2, (cuda_context* context)) \
    call(stream_create, cuStreamCreate, (cuda_stream* stream, unsigned int flags)) \
    call(stream_destroy, cuStreamDestroy_v2, (cuda_stream stream)) \
    call(stream_synchronize, cuStreamSynchronize, (cuda_stream stream)) \
    call(memory_allocate, cuMemAlloc_v2, (device_address* memory, std::size_t bytes)) \
    call(memory_free, cuMemFree_v2, (device_address memory)) \
    call(host_allocate, cuMemHostAlloc, (void** memory, std::size_t bytes, unsigned int flags)) \
    call(host_free, cuMemFreeHost, (void* memory)) \
    call(copy_to_device, cuMemcpyHtoDAsync_v2, \
         (device_address target, const void* source, std::size_t bytes, cuda_stream stream)) \
    call(copy_to_host, cuMemcpyDtoHAsync_v2, \
         (void* target, device_address source, std::size_t bytes, cuda_stream stream))

// clang-format on

struct cuda_calls {
#define GENERATE_CUDA_FIELD(name, symbol, parameters) cuda_result(*name) parameters = nullptr;
    GENERATE_CUDA_CALLS(GENERATE_CUDA_FIELD)
#undef GENERATE_CUDA_FIELD
};

// The first GPU of this machine: its primary context, which it shares with the library, and a
// stream. Where one is missing, the error says what.
class cuda_device {
  public:
    static outcome<std::unique_ptr<cuda_device>> open();

    cuda_device(const cuda_device&) = delete;
    cuda_device& operator=(const cuda_device&) = delete;
    ~cuda_device();

    const cuda_calls& calls() const { return calls_; }
    cuda_stream stream() const { return stream_; }
    const std::string& name() const { return name_; }

    // Success, or an error of the call with the driver's name for it.
    outcome<nothing> check(const char* call, cuda_result result) const;
    // Until all that is on the stream is done.
    outcome<nothing> wait() const;

  private:
    cuda_device() = default;

    cuda_calls calls_;
    int device_ = 0;
    cuda_context context_ = nullptr;
    cuda_stream stream_ = nullptr;
    std::string name_;
};

// Room for rows of one layer, on the GPU and in host memory that copies do not wait for.
class device_rows {
  public:
    static outcome<device_rows> allocate(const cuda_device& device, std::size_t floats);

    device_rows(device_rows&& other) noexcept;
    device_rows& operator=(device_rows&&) = delete;
    ~device_rows();

    float* host() const { return host_; }
    float* device() const { return reinterpret_cast<float*>(device_); }
    // Enqueue copies of the first `floats`.
    outcome<nothing> upload(std::size_t floats) const;
    outcome<nothing> download(std::size_t floats) const;

  private:
    explicit device_rows(const cuda_device& owner) : owner_(&owner) {}

    const cuda_device* owner_;
    float* host_ = nullptr;
    device_address device_ = 0;
};

}  // namespace generate
