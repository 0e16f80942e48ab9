#include "driver/fills.hpp"

#include <algorithm>
#include <cstring>

namespace kvrt::cuda {

block_fills::~block_fills() {
    if (device_ == nullptr) return;
    (void)wait();
    const driver& calls = device_->calls();
    const current_context here(*device_);
    if (event_ != nullptr) (void)calls.event_destroy(event_);
    if (stream_ != nullptr) (void)calls.stream_destroy(stream_);
    if (host_ != nullptr) (void)calls.host_free(host_);
}

/// While the context is current.
status block_fills::prepare(device_context& device) {
    device_ = &device;
    const driver& calls = device.calls();
    if (stream_ == nullptr) {
        KVRT_TRY(
            device.check(calls.stream_create(&stream_, stream_non_blocking), "cuStreamCreate"));
    }
    if (event_ == nullptr) {
        KVRT_TRY(device.check(calls.event_create(&event_, event_disable_timing), "cuEventCreate"));
    }
    if (host_ != nullptr) return KV_OK;
    void* memory = nullptr;
    KVRT_TRY(
        device.check(calls.host_allocate(&memory, staging_bytes, 0), "cuMemHostAlloc (debug)"));
    host_ = static_cast<std::byte*>(memory);
    return KV_OK;
}

status block_fills::enqueue_fill(device_context& device, device_pointer target, uint64_t bytes,
                                 uint32_t value) {
    const current_context here(device);
    KVRT_TRY(here.state());
    KVRT_TRY(prepare(device));
    KVRT_TRY(device.check(
        device.calls().fill_bytes(target, static_cast<unsigned char>(value), bytes, stream_),
        "cuMemsetD8Async (debug)"));
    pending_ = true;
    return device.check(device.calls().event_record(event_, stream_), "cuEventRecord");
}

void block_fills::fill(device_context& device, device_pointer target, uint64_t bytes,
                       uint32_t value) {
    const status verdict = enqueue_fill(device, target, bytes, value);
    if (verdict == KV_OK || failed_ < 0) return;
    failed_ = verdict;
    std::strncpy(reason_, message_buffer(), sizeof reason_ - 1);
}

status block_fills::settle(stream_handle stream) {
    if (failed_ < 0) {
        return fail(failed_, "KV_POOL_DEBUG: blocks could not be filled on the device: {}",
                    static_cast<const char*>(reason_));
    }
    if (!pending_) return KV_OK;
    const current_context here(*device_);
    KVRT_TRY(here.state());
    int capturing = capture_none;
    KVRT_TRY(device_->check(device_->calls().stream_is_capturing(stream, &capturing),
                            "cuStreamIsCapturing"));
    if (capturing != capture_none) return wait();  // what is captured has no business with it
    KVRT_TRY(
        device_->check(device_->calls().stream_wait_event(stream, event_, 0), "cuStreamWaitEvent"));
    pending_ = false;
    return KV_OK;
}

status block_fills::wait() {
    if (!pending_) return KV_OK;
    const current_context here(*device_);
    KVRT_TRY(here.state());
    KVRT_TRY(device_->check(device_->calls().event_synchronize(event_), "cuEventSynchronize"));
    pending_ = false;
    return KV_OK;
}

status block_fills::read(device_context& device, device_pointer first, uint64_t stride,
                         uint64_t count, uint64_t bytes, std::byte* out) {
    const current_context here(device);
    KVRT_TRY(here.state());
    KVRT_TRY(prepare(device));
    const driver& calls = device.calls();
    const uint64_t at_once = staging_bytes / bytes;
    for (uint64_t done = 0; done < count;) {
        const uint64_t now = std::min(at_once, count - done);
        for (uint64_t i = 0; i < now; ++i) {
            KVRT_TRY(device.check(
                calls.copy_to_host(host_ + i * bytes, first + (done + i) * stride, bytes, stream_),
                "cuMemcpyDtoHAsync (debug)"));
        }
        KVRT_TRY(device.check(calls.event_record(event_, stream_), "cuEventRecord"));
        KVRT_TRY(device.check(calls.event_synchronize(event_), "cuEventSynchronize"));
        std::memcpy(out + done * bytes, host_, now * bytes);
        done += now;
    }
    pending_ = false;
    return KV_OK;
}

}  // namespace kvrt::cuda
