// The CUDA driver as a table of function pointers: the only way in which this library reaches it.
// The table is filled from libcuda.so.1 at first use, so that nothing here links to a driver or
// needs a CUDA header; tests fill one of their own. Types and values are those of cuda.h, checked
// against it where it is found (tests/device/driver_abi_test.cpp).
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.hpp"

namespace kvrt::cuda {

using driver_result = int;  ///< CUresult
using device_number = int;  ///< CUdevice
/// CUdeviceptr: an address that the host must not follow.
using device_pointer = unsigned long long;
using physical_handle = unsigned long long;  ///< CUmemGenericAllocationHandle

using context_handle = struct context_object*;
using stream_handle = struct stream_object*;
using event_handle = struct event_object*;
using module_handle = struct module_object*;
using function_handle = struct function_object*;

inline constexpr driver_result success = 0;
inline constexpr driver_result error_invalid_value = 1;
inline constexpr driver_result error_out_of_memory = 2;
inline constexpr driver_result error_deinitialized = 4;
inline constexpr driver_result error_no_device = 100;
inline constexpr driver_result error_invalid_context = 201;
inline constexpr driver_result error_ecc_uncorrectable = 214;
inline constexpr driver_result error_nvlink_uncorrectable = 220;
inline constexpr driver_result error_contained = 226;
inline constexpr driver_result error_invalid_handle = 400;
inline constexpr driver_result error_no_binary_for_device = 209;
inline constexpr driver_result error_not_found = 500;
inline constexpr driver_result error_not_ready = 600;
inline constexpr driver_result error_illegal_address = 700;
inline constexpr driver_result error_launch_timeout = 702;
inline constexpr driver_result error_context_is_destroyed = 709;
inline constexpr driver_result error_assert = 710;
inline constexpr driver_result error_hardware_stack = 714;
inline constexpr driver_result error_illegal_instruction = 715;
inline constexpr driver_result error_misaligned_address = 716;
inline constexpr driver_result error_invalid_address_space = 717;
inline constexpr driver_result error_invalid_pc = 718;
inline constexpr driver_result error_launch_failed = 719;
inline constexpr driver_result error_tensor_memory_leak = 721;
inline constexpr driver_result error_capture_unsupported = 900;
inline constexpr driver_result error_captured_event = 907;
inline constexpr driver_result error_external_device = 911;
inline constexpr driver_result error_unknown = 999;

// CUdevice_attribute
inline constexpr int attribute_multiprocessors = 16;
inline constexpr int attribute_compute_major = 75;
inline constexpr int attribute_compute_minor = 76;
inline constexpr int attribute_shared_bytes_opt_in = 97;  ///< per block
inline constexpr int attribute_virtual_memory = 102;

inline constexpr unsigned int stream_non_blocking = 1;   ///< CU_STREAM_NON_BLOCKING
inline constexpr unsigned int event_default = 0;         ///< CU_EVENT_DEFAULT
inline constexpr unsigned int event_disable_timing = 2;  ///< CU_EVENT_DISABLE_TIMING
inline constexpr int capture_none = 0;                   ///< CU_STREAM_CAPTURE_STATUS_NONE
inline constexpr int capture_mode_relaxed = 2;           ///< CU_STREAM_CAPTURE_MODE_RELAXED
inline constexpr int allocation_pinned = 1;              ///< CU_MEM_ALLOCATION_TYPE_PINNED
inline constexpr int location_device = 1;                ///< CU_MEM_LOCATION_TYPE_DEVICE
inline constexpr int access_read_write = 3;              ///< ..._ACCESS_FLAGS_PROT_READWRITE
inline constexpr int granularity_minimum = 0;            ///< ..._ALLOC_GRANULARITY_MINIMUM
inline constexpr int function_dynamic_shared_bytes = 8;  ///< ..._MAX_DYNAMIC_SHARED_SIZE_BYTES

struct memory_location {
    int type = location_device;
    int id = 0;  ///< the device's number
};

/// CUmemAllocationProp.
struct physical_properties {
    int type = allocation_pinned;
    int requested_handle_types = 0;
    memory_location location;
    void* windows_metadata = nullptr;
    unsigned char compression_type = 0;
    unsigned char remote_access_capable = 0;
    unsigned short usage = 0;
    unsigned char reserved[4] = {};
};

/// CUmemAccessDesc.
struct access_description {
    memory_location location;
    int flags = access_read_write;
};

// clang-format off

/// call(name here, symbol in the driver, parameters). Without one of these a driver is not used.
#define KVRT_CUDA_CALLS(call) \
    call(initialise, cuInit, (unsigned int flags)) \
    call(driver_version, cuDriverGetVersion, (int* version)) \
    call(error_name, cuGetErrorName, (driver_result error, const char** name)) \
    call(error_text, cuGetErrorString, (driver_result error, const char** text)) \
    call(device_count, cuDeviceGetCount, (int* count)) \
    call(device_get, cuDeviceGet, (device_number* device, int ordinal)) \
    call(device_name, cuDeviceGetName, (char* name, int capacity, device_number device)) \
    call(total_memory, cuDeviceTotalMem_v2, (size_t* bytes, device_number device)) \
    call(device_attribute, cuDeviceGetAttribute, \
         (int* value, int attribute, device_number device)) \
    call(primary_retain, cuDevicePrimaryCtxRetain, (context_handle* context, device_number)) \
    call(primary_release, cuDevicePrimaryCtxRelease_v2, (device_number device)) \
    call(context_push, cuCtxPushCurrent_v2, (context_handle context)) \
    call(context_pop, cuCtxPopCurrent_v2, (context_handle* context)) \
    call(context_device, cuCtxGetDevice, (device_number* device)) \
    call(memory_allocate, cuMemAlloc_v2, (device_pointer* memory, size_t bytes)) \
    call(memory_free, cuMemFree_v2, (device_pointer memory)) \
    call(host_allocate, cuMemHostAlloc, (void** memory, size_t bytes, unsigned int flags)) \
    call(host_free, cuMemFreeHost, (void* memory)) \
    call(copy_to_device, cuMemcpyHtoDAsync_v2, \
         (device_pointer target, const void* source, size_t bytes, stream_handle stream)) \
    call(copy_to_host, cuMemcpyDtoHAsync_v2, \
         (void* target, device_pointer source, size_t bytes, stream_handle stream)) \
    call(copy_on_device, cuMemcpyDtoDAsync_v2, \
         (device_pointer target, device_pointer source, size_t bytes, stream_handle stream)) \
    call(fill_bytes, cuMemsetD8Async, \
         (device_pointer target, unsigned char value, size_t bytes, stream_handle stream)) \
    call(stream_create, cuStreamCreate, (stream_handle* stream, unsigned int flags)) \
    call(stream_destroy, cuStreamDestroy_v2, (stream_handle stream)) \
    call(stream_wait_event, cuStreamWaitEvent, \
         (stream_handle stream, event_handle event, unsigned int flags)) \
    call(stream_is_capturing, cuStreamIsCapturing, (stream_handle stream, int* capture_status)) \
    call(exchange_capture_mode, cuThreadExchangeStreamCaptureMode, (int* mode)) \
    call(event_create, cuEventCreate, (event_handle* event, unsigned int flags)) \
    call(event_destroy, cuEventDestroy_v2, (event_handle event)) \
    call(event_record, cuEventRecord, (event_handle event, stream_handle stream)) \
    call(event_query, cuEventQuery, (event_handle event)) \
    call(event_synchronize, cuEventSynchronize, (event_handle event)) \
    call(event_elapsed, cuEventElapsedTime, \
         (float* milliseconds, event_handle start, event_handle end)) \
    call(module_load, cuModuleLoadData, (module_handle* module, const void* image)) \
    call(module_unload, cuModuleUnload, (module_handle module)) \
    call(module_function, cuModuleGetFunction, \
         (function_handle* function, module_handle module, const char* name)) \
    call(function_set_attribute, cuFuncSetAttribute, \
         (function_handle function, int attribute, int value)) \
    call(launch, cuLaunchKernel, \
         (function_handle function, unsigned int grid_x, unsigned int grid_y, \
          unsigned int grid_z, unsigned int block_x, unsigned int block_y, unsigned int block_z, \
          unsigned int shared_bytes, stream_handle stream, void** parameters, void** extra))

/// Virtual memory management: all of these are null, or none is.
#define KVRT_CUDA_VIRTUAL_MEMORY_CALLS(call) \
    call(address_reserve, cuMemAddressReserve, \
         (device_pointer* address, size_t bytes, size_t alignment, device_pointer wanted, \
          unsigned long long flags)) \
    call(address_free, cuMemAddressFree, (device_pointer address, size_t bytes)) \
    call(physical_create, cuMemCreate, \
         (physical_handle* handle, size_t bytes, const physical_properties* properties, \
          unsigned long long flags)) \
    call(physical_release, cuMemRelease, (physical_handle handle)) \
    call(memory_map, cuMemMap, \
         (device_pointer address, size_t bytes, size_t offset, physical_handle handle, \
          unsigned long long flags)) \
    call(memory_unmap, cuMemUnmap, (device_pointer address, size_t bytes)) \
    call(memory_set_access, cuMemSetAccess, \
         (device_pointer address, size_t bytes, const access_description* description, \
          size_t count)) \
    call(allocation_granularity, cuMemGetAllocationGranularity, \
         (size_t* granularity, const physical_properties* properties, int option))

// clang-format on

struct driver {
#define KVRT_CUDA_FIELD(name, symbol, parameters) driver_result(*name) parameters = nullptr;
    KVRT_CUDA_CALLS(KVRT_CUDA_FIELD)
    KVRT_CUDA_VIRTUAL_MEMORY_CALLS(KVRT_CUDA_FIELD)
#undef KVRT_CUDA_FIELD

    bool has_virtual_memory() const { return address_reserve != nullptr; }
};

/// The driver of this machine, loaded and initialised at the first call and kept. UNSUPPORTED says
/// why there is none: no libcuda.so.1, one that is too old, or no device. Threads: safe.
status load_driver(const driver*& out);
/// For tests: what load_driver gives from now on; null: the machine's own.
void replace_driver(const driver* table);

/// Fills a table by asking for each symbol: what load_driver does with libcuda.so.1.
using find_symbol = void* (*)(void* library, const char* symbol);
status fill_driver(void* library, find_symbol find, driver& out);

/// What the calls of a table must be asked before any other; UNSUPPORTED as load_driver's.
status initialise(const driver& table);

/// Does this result mean that the device's context is lost, for all work after it too?
bool is_fault(driver_result result);

/// "CUDA_ERROR_ILLEGAL_ADDRESS", or a name that says that the driver knows none.
const char* error_name(const driver& table, driver_result result);

/// KV_OK, or DEVICE (NO_MEMORY, when that is what it is) with the call and the CUDA error's name.
status check(const driver& table, driver_result result, const char* call);

}  // namespace kvrt::cuda
