#include "driver/staging.hpp"

#include <algorithm>

#include "base/checked.hpp"

namespace kvrt::cuda {

staging_ring::~staging_ring() {
    if (device_ == nullptr) return;
    const driver& calls = device_->calls();
    const current_context here(*device_);
    for (uint32_t i = 0; i < count_ && here.state() == KV_OK; ++i) {
        (void)calls.event_synchronize(at(i).event);
    }
    for (const batch& each : batches_) {
        if (each.event != nullptr) (void)calls.event_destroy(each.event);
    }
    if (device_memory_ != 0) device_->release(device_memory_, bytes_);
    if (host_ != nullptr) (void)calls.host_free(host_);
}

status staging_ring::create(device_context& device, uint64_t bytes, bool joins) {
    device_ = &device;
    bytes_ = bytes;
    joins_ = joins;
    const driver& calls = device.calls();
    const current_context here(device);
    KVRT_TRY(here.state());
    if (host_ == nullptr) {
        void* memory = nullptr;
        KVRT_TRY(device.check(calls.host_allocate(&memory, bytes, 0), "cuMemHostAlloc (staging)"));
        host_ = static_cast<std::byte*>(memory);
    }
    if (device_memory_ == 0) {
        KVRT_TRY(device.allocate(bytes, "cuMemAlloc (staging)", device_memory_));
    }
    for (batch& each : batches_) {
        if (each.event != nullptr) continue;
        KVRT_TRY(
            device.check(calls.event_create(&each.event, event_disable_timing), "cuEventCreate"));
    }
    return KV_OK;
}

/// Batches end in the order in which they were enqueued, as far as the ring can use their room.
status staging_ring::poll() {
    while (count_ != 0 && at(0).recorded) {
        const driver_result result = device_->calls().event_query(at(0).event);
        if (result == error_not_ready) return KV_OK;
        KVRT_TRY(device_->check(result, "cuEventQuery"));
        first_ = (first_ + 1) % most_batches;
        --count_;
    }
    return KV_OK;
}

status staging_ring::open(uint64_t least, uint64_t wanted, stream_handle stream) {
    if (least > bytes_) {
        return fail(KV_TOO_LARGE, "staging: {} bytes at once, the ring has {}", least, bytes_);
    }
    const current_context here(*device_);
    KVRT_TRY(here.state());
    KVRT_TRY(check_stream(*device_, stream, "upload"));
    KVRT_TRY(poll());
    // Free are [end of the newest, begin of the oldest), around the ring's end.
    const uint64_t begin = count_ == 0 ? 0 : at(count_ - 1).end;
    const uint64_t oldest = count_ == 0 ? bytes_ : at(0).begin;
    const bool wraps = count_ != 0 && oldest >= begin;  // what is in flight goes around the end
    const uint64_t behind = (wraps ? oldest : bytes_) - begin;
    const uint64_t in_front = count_ == 0 || wraps ? 0 : oldest;
    const bool at_front = behind < std::min(wanted, std::max(in_front, least));
    const uint64_t room = at_front ? in_front : behind;
    const bool full = joins_ ? count_ >= most_batches / 2 : count_ == most_batches;
    joined_ =
        full && joins_ && !at_front && at(count_ - 1).stream == stream && at(count_ - 1).recorded;
    if ((count_ == most_batches && !joined_) || room < least) {
        return fail(KV_AGAIN,
                    "staging: {} bytes at once, {} are free of {} and {} uploads in flight: let "
                    "the device catch up",
                    least, room, bytes_, count_);
    }
    stream_ = stream;
    batch_begin_ = at_front ? 0 : begin;
    batch_bytes_ = std::min(room, round_up(wanted, alignment));
    return KV_OK;
}

status staging_ring::copy(device_pointer target, uint64_t offset, uint64_t bytes) {
    const current_context here(*device_);
    KVRT_TRY(here.state());
    return device_->check(device_->calls().copy_to_device(target, data() + offset, bytes, stream_),
                          "cuMemcpyHtoDAsync");
}

status staging_ring::copy_back(device_pointer source, uint64_t offset, uint64_t bytes) {
    const current_context here(*device_);
    KVRT_TRY(here.state());
    return device_->check(device_->calls().copy_to_host(data() + offset, source, bytes, stream_),
                          "cuMemcpyDtoHAsync");
}

status staging_ring::drain() {
    const current_context here(*device_);
    KVRT_TRY(here.state());
    for (uint32_t i = 0; i < count_; ++i) {
        if (!at(i).recorded) continue;
        KVRT_TRY(
            device_->check(device_->calls().event_synchronize(at(i).event), "cuEventSynchronize"));
    }
    return poll();
}

status staging_ring::close(uint64_t used) {
    const current_context here(*device_);
    batch& closed = at(joined_ ? count_ - 1 : count_);
    if (!joined_) closed.begin = batch_begin_;
    closed.stream = stream_;
    closed.end = batch_begin_ + std::max(round_up(used, alignment), alignment);
    closed.recorded = false;
    if (!joined_) ++count_;  // even when it cannot be recorded: the device may be reading it
    KVRT_TRY(here.state());
    KVRT_TRY(device_->check(device_->calls().event_record(closed.event, stream_), "cuEventRecord"));
    closed.recorded = true;
    return KV_OK;
}

}  // namespace kvrt::cuda
