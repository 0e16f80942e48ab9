// One device as a pool uses it: its primary context, which it shares with everybody else in the
// process, made current for the length of a call and no longer; and the fault that ended it, if one
// has. Nothing works after a fault: it is told with every call until the pool is made anew.
#pragma once

#include "driver/driver.hpp"

namespace kvrt::cuda {

/// Whoever hands out device memory instead of the driver; nobody where `allocate` is null.
struct memory_hooks {
    void* user = nullptr;
    void* (*allocate)(void* user, std::size_t bytes, std::size_t alignment) = nullptr;
    void (*release)(void* user, void* memory, std::size_t bytes, std::size_t alignment) = nullptr;
};

class device_context {
  public:
    device_context() = default;
    device_context(const device_context&) = delete;
    device_context& operator=(const device_context&) = delete;
    ~device_context();

    /// Retains the primary context of device `ordinal`. UNSUPPORTED when there is no such device.
    status open(const driver& table, int ordinal);

    void use_hooks(const memory_hooks& hooks) { hooks_ = hooks; }
    /// Device memory of the driver's alignment, while the context is current; `what` it is for.
    status allocate(uint64_t bytes, const char* what, device_pointer& out);
    void release(device_pointer memory, uint64_t bytes);

    const driver& calls() const { return *calls_; }
    device_number device() const { return device_; }
    context_handle handle() const { return context_; }

    /// KV_OK, or DEVICE with the fault.
    status healthy() const;
    /// As cuda::check; a fault is kept.
    status check(driver_result result, const char* call);

  private:
    const driver* calls_ = nullptr;
    device_number device_ = 0;
    context_handle context_ = nullptr;
    driver_result fault_ = success;
    const char* faulted_call_ = nullptr;
    memory_hooks hooks_;
};

/// Makes the device's context current while it lives. The caller's comes back afterwards, whichever
/// it was, or none. Meanwhile the thread may also make calls that a capture of some other stream
/// would forbid, asking for an event for one: none of them touches what is captured.
class current_context {
  public:
    explicit current_context(device_context& device);
    current_context(const current_context&) = delete;
    current_context& operator=(const current_context&) = delete;
    ~current_context();

    /// KV_OK when the device can be used. After a fault its context is current all the same, so
    /// that what it holds can be let go.
    status state() const { return state_; }

  private:
    device_context& device_;
    bool pushed_ = false;
    int capture_mode_ = capture_mode_relaxed;  ///< the caller's, once it is exchanged
    status state_ = KV_OK;
};

}  // namespace kvrt::cuda
