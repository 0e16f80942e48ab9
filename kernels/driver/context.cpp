#include "driver/context.hpp"

namespace kvrt::cuda {

device_context::~device_context() {
    if (context_ != nullptr) (void)calls_->primary_release(device_);
}

status device_context::open(const driver& table, int ordinal) {
    int devices = 0;
    KVRT_TRY(cuda::check(table, table.device_count(&devices), "cuDeviceGetCount"));
    if (ordinal < 0 || ordinal >= devices) {
        return fail(KV_UNSUPPORTED, "CUDA device {} is not there: the driver finds {}", ordinal,
                    devices);
    }
    KVRT_TRY(cuda::check(table, table.device_get(&device_, ordinal), "cuDeviceGet"));
    calls_ = &table;
    return check(table.primary_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
}

status device_context::healthy() const {
    if (fault_ == success) return KV_OK;
    return fail(KV_DEVICE, "the device failed earlier, at {}: {}: release the pool and create anew",
                faulted_call_, error_name(*calls_, fault_));
}

status device_context::check(driver_result result, const char* call) {
    if (fault_ == success && is_fault(result)) {
        fault_ = result;
        faulted_call_ = call;
    }
    return cuda::check(*calls_, result, call);
}

namespace {

constexpr std::size_t memory_alignment = 256;  ///< the driver's

}  // namespace

status device_context::allocate(uint64_t bytes, const char* what, device_pointer& out) {
    if (hooks_.allocate == nullptr) return check(calls_->memory_allocate(&out, bytes), what);
    void* const memory = hooks_.allocate(hooks_.user, bytes, memory_alignment);
    if (memory == nullptr) {
        return fail(KV_NO_MEMORY, "{}: the host's allocator refused {} bytes of device memory",
                    what, bytes);
    }
    out = reinterpret_cast<device_pointer>(memory);
    if (out % memory_alignment == 0) return KV_OK;
    hooks_.release(hooks_.user, memory, bytes, memory_alignment);
    const device_pointer odd = out;
    out = 0;
    return fail(KV_INVALID, "{}: the host's allocator gave {:#x}, which is no multiple of {}", what,
                odd, memory_alignment);
}

void device_context::release(device_pointer memory, uint64_t bytes) {
    if (hooks_.allocate == nullptr) {
        (void)calls_->memory_free(memory);
    } else {
        hooks_.release(hooks_.user, reinterpret_cast<void*>(memory), bytes, memory_alignment);
    }
}

current_context::current_context(device_context& device) : device_(device) {
    state_ = device.healthy();
    const driver_result result = device.calls().context_push(device.handle());
    pushed_ = result == success;
    if (!pushed_ && state_ == KV_OK) state_ = device.check(result, "cuCtxPushCurrent");
    (void)device.calls().exchange_capture_mode(&capture_mode_);
}

current_context::~current_context() {
    (void)device_.calls().exchange_capture_mode(&capture_mode_);
    context_handle popped = nullptr;
    if (pushed_) (void)device_.calls().context_pop(&popped);
}

}  // namespace kvrt::cuda
