// A CUDA device as a host of the library has it: the primary context, current in this thread, a
// stream, and the driver's calls that hosts make and the library does not. From libcuda.so.1,
// opened at run time, like the library's own (kernels/driver/driver.hpp); no CUDA header.
#pragma once

#include <cstddef>
#include <string>

#include "driver/driver.hpp"

namespace kvrt::cuda {

using graph_handle = struct graph_object*;
using executable_handle = struct executable_object*;
using host_function = void (*)(void* data);

inline constexpr unsigned int host_memory_mapped = 2;  ///< CU_MEMHOSTALLOC_DEVICEMAP
inline constexpr int capture_mode_thread_local = 1;    ///< CU_STREAM_CAPTURE_MODE_*

// clang-format off

/// call(name here, symbol in the driver, parameters).
#define KVRT_HOST_CUDA_CALLS(call) \
    call(context_set, cuCtxSetCurrent, (context_handle context)) \
    call(memory_info, cuMemGetInfo_v2, (size_t* free, size_t* total)) \
    call(host_device_pointer, cuMemHostGetDevicePointer_v2, \
         (device_pointer* address, void* memory, unsigned int flags)) \
    call(stream_synchronize, cuStreamSynchronize, (stream_handle stream)) \
    call(launch_host, cuLaunchHostFunc, \
         (stream_handle stream, host_function function, void* data)) \
    call(begin_capture, cuStreamBeginCapture_v2, (stream_handle stream, int mode)) \
    call(end_capture, cuStreamEndCapture, (stream_handle stream, graph_handle* graph)) \
    call(graph_instantiate, cuGraphInstantiateWithFlags, \
         (executable_handle* executable, graph_handle graph, unsigned long long flags)) \
    call(graph_launch, cuGraphLaunch, (executable_handle executable, stream_handle stream)) \
    call(graph_destroy, cuGraphDestroy, (graph_handle graph)) \
    call(executable_destroy, cuGraphExecDestroy, (executable_handle executable))

// clang-format on

struct host_calls {
#define KVRT_HOST_FIELD(name, symbol, parameters) driver_result(*name) parameters = nullptr;
    KVRT_HOST_CUDA_CALLS(KVRT_HOST_FIELD)
#undef KVRT_HOST_FIELD
};

/// The first device, for as long as it lives. One at a time.
class gpu_host {
  public:
    gpu_host() = default;
    gpu_host(const gpu_host&) = delete;
    gpu_host& operator=(const gpu_host&) = delete;
    ~gpu_host();

    /// UNSUPPORTED: there is no driver, or no device, and why.
    status open();

    const driver& calls() const { return *calls_; }
    const host_calls& more() const { return more_; }
    stream_handle stream() const { return stream_; }

    /// "NVIDIA H200, compute capability 9.0, 132 multiprocessors, driver 13.0".
    std::string describe() const;
    /// Device memory that nobody has.
    uint64_t free_bytes() const;

    /// Ends the program, with the call and the error's name, unless `result` is a success: for
    /// what a test or a benchmark cannot go on without.
    void demand(driver_result result, const char* call) const;
    void synchronise() const { demand(more_.stream_synchronize(stream_), "cuStreamSynchronize"); }

  private:
    const driver* calls_ = nullptr;
    host_calls more_;
    device_number device_ = 0;
    context_handle context_ = nullptr;
    stream_handle stream_ = nullptr;
};

}  // namespace kvrt::cuda
