#include "driver/description.hpp"

#include <cstdio>

#include "driver/images.hpp"

namespace kvrt::cuda {

namespace {

constexpr uint32_t oldest_compute_major = 8;  ///< that scripts/compile_kernels.py compiles for

status read_attribute(const driver& calls, device_number device, int attribute, uint32_t& out) {
    int value = 0;
    KVRT_TRY(
        check(calls, calls.device_attribute(&value, attribute, device), "cuDeviceGetAttribute"));
    out = static_cast<uint32_t>(value);
    return KV_OK;
}

}  // namespace

int current_device(const driver& calls) {
    device_number device = 0;
    return calls.context_device(&device) == success ? device : 0;
}

status describe_current(const driver& calls, kvrt_device_description& out) {
    out = {};
    const int ordinal = current_device(calls);
    device_number device = 0;
    size_t bytes = 0;
    int version = 0;
    KVRT_TRY(check(calls, calls.device_get(&device, ordinal), "cuDeviceGet"));
    KVRT_TRY(check(calls, calls.device_name(out.name, sizeof out.name, device), "cuDeviceGetName"));
    KVRT_TRY(check(calls, calls.total_memory(&bytes, device), "cuDeviceTotalMem"));
    KVRT_TRY(check(calls, calls.driver_version(&version), "cuDriverGetVersion"));
    KVRT_TRY(read_attribute(calls, device, attribute_compute_major, out.compute_major));
    KVRT_TRY(read_attribute(calls, device, attribute_compute_minor, out.compute_minor));
    KVRT_TRY(read_attribute(calls, device, attribute_multiprocessors, out.multiprocessors));
    KVRT_TRY(read_attribute(calls, device, attribute_virtual_memory, out.elastic));
    if (!calls.has_virtual_memory()) out.elastic = 0;
    out.name[sizeof out.name - 1] = '\0';
    out.memory_bytes = bytes;
    out.ordinal = static_cast<uint32_t>(ordinal);
    out.driver_version = static_cast<uint32_t>(version);
    if (find_images().count == 0) {
        std::snprintf(out.reason, sizeof out.reason, "this plugin was built without nvcc");
    } else if (out.compute_major < oldest_compute_major) {
        std::snprintf(out.reason, sizeof out.reason,
                      "the plugin has kernels for compute capability %u.0 and later",
                      oldest_compute_major);
    } else {
        out.has_kernels = 1;
    }
    return KV_OK;
}

}  // namespace kvrt::cuda
