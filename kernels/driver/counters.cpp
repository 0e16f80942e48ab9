#include "driver/counters.hpp"

namespace kvrt::cuda {

counter_array::~counter_array() {
    if (host_ == nullptr) return;
    const current_context here(*device_);
    (void)device_->calls().host_free(host_);
}

status counter_array::create(device_context& device, uint64_t count) {
    device_ = &device;
    count_ = count;
    KVRT_TRY(memory_.allocate(device, bytes()));
    const current_context here(device);
    KVRT_TRY(here.state());
    void* memory = nullptr;
    KVRT_TRY(device.check(device.calls().host_allocate(&memory, bytes(), 0),
                          "cuMemHostAlloc (counters)"));
    host_ = static_cast<uint64_t*>(memory);
    return KV_OK;
}

status counter_array::begin(stream_handle stream) {
    if (begun_ || host_ == nullptr) return KV_OK;
    const current_context here(*device_);
    KVRT_TRY(here.state());
    KVRT_TRY(device_->check(device_->calls().fill_bytes(address(), 0, bytes(), stream),
                            "cuMemsetD8Async (counters)"));
    begun_ = true;
    return KV_OK;
}

status counter_array::fetch(uint64_t fence, stream_handle stream) {
    if (fetching_ != 0 || host_ == nullptr) return KV_OK;
    const current_context here(*device_);
    KVRT_TRY(here.state());
    KVRT_TRY(check_stream(*device_, stream, "end of a step"));
    KVRT_TRY(device_->check(device_->calls().copy_to_host(host_, address(), bytes(), stream),
                            "cuMemcpyDtoHAsync (counters)"));
    fetching_ = fence;
    return KV_OK;
}

const uint64_t* counter_array::arrived(const fence_ring& fences) {
    if (fetching_ == 0 || !fences.passed(fetching_)) return nullptr;
    fetching_ = 0;
    return host_;
}

}  // namespace kvrt::cuda
