// The driver's types, values and signatures as this library declares them, against cuda.h where it
// is found.
#include <doctest/doctest.h>

#include "driver/driver.hpp"

#if defined(KVRT_CUDA_HEADER)
#include <cuda.h>

#include "called_alike.hpp"
#include "gpu/host_driver.hpp"
#include "samples/generate/cuda_driver.hpp"

namespace {

using namespace kvrt;
using cuda::called_alike;

#define CALLED_ALIKE(name, symbol, parameters)                                     \
    static_assert(called_alike<decltype(cuda::driver::name), decltype(&symbol)>(), \
                  "parameters of " #symbol);
KVRT_CUDA_CALLS(CALLED_ALIKE)
KVRT_CUDA_VIRTUAL_MEMORY_CALLS(CALLED_ALIKE)
#undef CALLED_ALIKE

// The same of the calls that hosts make: programs for a GPU, and samples/generate.
#define CALLED_ALIKE(name, symbol, parameters)                                         \
    static_assert(called_alike<decltype(cuda::host_calls::name), decltype(&symbol)>(), \
                  "parameters of " #symbol);
KVRT_HOST_CUDA_CALLS(CALLED_ALIKE)
#undef CALLED_ALIKE
#define CALLED_ALIKE(name, symbol, parameters)                                             \
    static_assert(called_alike<decltype(generate::cuda_calls::name), decltype(&symbol)>(), \
                  "parameters of " #symbol);
GENERATE_CUDA_CALLS(CALLED_ALIKE)
#undef CALLED_ALIKE
static_assert(cuda::event_default == CU_EVENT_DEFAULT);
static_assert(cuda::host_memory_mapped == CU_MEMHOSTALLOC_DEVICEMAP);
static_assert(cuda::capture_mode_thread_local == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);

// That the comparison sees a difference.
static_assert(!called_alike<int (*)(int, void*), CUresult (*)(int)>());
static_assert(!called_alike<int (*)(int), CUresult (*)(size_t)>());
static_assert(!called_alike<int (*)(int*), CUresult (*)(size_t*)>());

static_assert(cuda::success == CUDA_SUCCESS);
static_assert(cuda::error_invalid_value == CUDA_ERROR_INVALID_VALUE);
static_assert(cuda::error_out_of_memory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(cuda::error_deinitialized == CUDA_ERROR_DEINITIALIZED);
static_assert(cuda::error_no_device == CUDA_ERROR_NO_DEVICE);
static_assert(cuda::error_invalid_context == CUDA_ERROR_INVALID_CONTEXT);
static_assert(cuda::error_ecc_uncorrectable == CUDA_ERROR_ECC_UNCORRECTABLE);
static_assert(cuda::error_nvlink_uncorrectable == CUDA_ERROR_NVLINK_UNCORRECTABLE);
static_assert(cuda::error_contained == CUDA_ERROR_CONTAINED);
static_assert(cuda::error_invalid_handle == CUDA_ERROR_INVALID_HANDLE);
static_assert(cuda::error_no_binary_for_device == CUDA_ERROR_NO_BINARY_FOR_GPU);
static_assert(cuda::error_not_found == CUDA_ERROR_NOT_FOUND);
static_assert(cuda::error_not_ready == CUDA_ERROR_NOT_READY);
static_assert(cuda::error_illegal_address == CUDA_ERROR_ILLEGAL_ADDRESS);
static_assert(cuda::error_launch_timeout == CUDA_ERROR_LAUNCH_TIMEOUT);
static_assert(cuda::error_context_is_destroyed == CUDA_ERROR_CONTEXT_IS_DESTROYED);
static_assert(cuda::error_assert == CUDA_ERROR_ASSERT);
static_assert(cuda::error_hardware_stack == CUDA_ERROR_HARDWARE_STACK_ERROR);
static_assert(cuda::error_illegal_instruction == CUDA_ERROR_ILLEGAL_INSTRUCTION);
static_assert(cuda::error_misaligned_address == CUDA_ERROR_MISALIGNED_ADDRESS);
static_assert(cuda::error_invalid_address_space == CUDA_ERROR_INVALID_ADDRESS_SPACE);
static_assert(cuda::error_invalid_pc == CUDA_ERROR_INVALID_PC);
static_assert(cuda::error_launch_failed == CUDA_ERROR_LAUNCH_FAILED);
static_assert(cuda::error_tensor_memory_leak == CUDA_ERROR_TENSOR_MEMORY_LEAK);
static_assert(cuda::error_capture_unsupported == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
static_assert(cuda::error_captured_event == CUDA_ERROR_CAPTURED_EVENT);
static_assert(cuda::error_external_device == CUDA_ERROR_EXTERNAL_DEVICE);
static_assert(cuda::error_unknown == CUDA_ERROR_UNKNOWN);

static_assert(cuda::attribute_multiprocessors == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(cuda::attribute_compute_major == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(cuda::attribute_compute_minor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(cuda::attribute_shared_bytes_opt_in ==
              CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
static_assert(cuda::attribute_virtual_memory ==
              CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
static_assert(cuda::stream_non_blocking == CU_STREAM_NON_BLOCKING);
static_assert(cuda::event_disable_timing == CU_EVENT_DISABLE_TIMING);
static_assert(cuda::capture_none == CU_STREAM_CAPTURE_STATUS_NONE);
static_assert(cuda::capture_mode_relaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(cuda::allocation_pinned == CU_MEM_ALLOCATION_TYPE_PINNED);
static_assert(cuda::location_device == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(cuda::access_read_write == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(cuda::granularity_minimum == CU_MEM_ALLOC_GRANULARITY_MINIMUM);
static_assert(cuda::function_dynamic_shared_bytes ==
              CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);

#define SAME_PLACE(ours, our_field, theirs, their_field) \
    static_assert(offsetof(ours, our_field) == offsetof(theirs, their_field))
static_assert(sizeof(cuda::memory_location) == sizeof(CUmemLocation));
SAME_PLACE(cuda::memory_location, id, CUmemLocation, id);
static_assert(sizeof(cuda::physical_properties) == sizeof(CUmemAllocationProp));
SAME_PLACE(cuda::physical_properties, requested_handle_types, CUmemAllocationProp,
           requestedHandleTypes);
SAME_PLACE(cuda::physical_properties, location, CUmemAllocationProp, location);
SAME_PLACE(cuda::physical_properties, windows_metadata, CUmemAllocationProp, win32HandleMetaData);
SAME_PLACE(cuda::physical_properties, usage, CUmemAllocationProp, allocFlags.usage);
static_assert(sizeof(cuda::access_description) == sizeof(CUmemAccessDesc));
SAME_PLACE(cuda::access_description, flags, CUmemAccessDesc, flags);
#undef SAME_PLACE

}  // namespace

TEST_CASE("the driver is declared as in cuda.h") {
    MESSAGE("compared at compile time with CUDA_VERSION ", CUDA_VERSION);
}
#else
TEST_CASE("the driver is declared as in cuda.h") {
    MESSAGE("skipped: cuda.h was not found when this was configured");
}
#endif
