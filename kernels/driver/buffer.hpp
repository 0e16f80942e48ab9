// Memory of the device that is a pool's from its creation to its end.
#pragma once

#include "driver/context.hpp"

namespace kvrt::cuda {

class device_buffer {
  public:
    device_buffer() = default;
    device_buffer(const device_buffer&) = delete;
    device_buffer& operator=(const device_buffer&) = delete;
    /// Nothing that uses it is in flight any more.
    ~device_buffer() {
        if (memory_ == 0) return;
        const current_context here(*device_);
        device_->release(memory_, bytes_);
    }

    /// Once; not initialised.
    status allocate(device_context& device, uint64_t bytes) {
        device_ = &device;
        const current_context here(device);
        KVRT_TRY(here.state());
        bytes_ = bytes;
        return device.allocate(bytes, "cuMemAlloc (workspace)", memory_);
    }
    device_pointer address() const { return memory_; }

  private:
    device_context* device_ = nullptr;
    device_pointer memory_ = 0;
    uint64_t bytes_ = 0;
};

}  // namespace kvrt::cuda
