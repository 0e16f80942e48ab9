#include "driver/fences.hpp"

#include <utility>

namespace kvrt::cuda {

status check_stream(device_context& device, stream_handle stream, const char* verb) {
    // CU_STREAM_LEGACY and CU_STREAM_PER_THREAD are 1 and 2.
    if (reinterpret_cast<uintptr_t>(stream) <= 2) {
        return fail(KV_INVALID, "{}: the default stream is not used: create one", verb);
    }
    int capturing = capture_none;
    KVRT_TRY(device.check(device.calls().stream_is_capturing(stream, &capturing),
                          "cuStreamIsCapturing"));
    if (capturing == capture_none) return KV_OK;
    return fail(KV_INVALID, "{}: the stream is being captured: steps begin and end outside of it",
                verb);
}

fence_ring::~fence_ring() {
    if (device_ == nullptr) return;
    const driver& calls = device_->calls();
    const current_context here(*device_);
    for (entry& step : entries_) {
        if (step.event == nullptr) continue;
        const bool in_flight = static_cast<uint32_t>(&step - entries_.data()) < count_;
        if (in_flight && !step.recorded) (void)calls.event_record(step.event, step.stream);
        if (in_flight && here.state() == KV_OK) (void)calls.event_synchronize(step.event);
        (void)calls.event_destroy(step.event);
    }
}

status fence_ring::create(device_context& device) {
    device_ = &device;
    const current_context here(device);
    KVRT_TRY(here.state());
    for (entry& step : entries_) {
        KVRT_TRY(device.check(device.calls().event_create(&step.event, event_disable_timing),
                              "cuEventCreate"));
    }
    return KV_OK;
}

fence_ring::entry* fence_ring::find(uint64_t fence) {
    for (uint32_t i = 0; i < count_; ++i) {
        if (entries_[i].fence == fence) return &entries_[i];
    }
    return nullptr;
}

stream_handle fence_ring::stream_of(uint64_t fence) {
    const entry* step = find(fence);
    return step != nullptr ? step->stream : nullptr;
}

status fence_ring::begin(uint64_t fence, stream_handle stream) {
    const current_context here(*device_);
    KVRT_TRY(here.state());
    entry* const begun = find(fence);
    if (begun != nullptr) {
        if (begun->stream == stream) return reopen(*begun);
        return fail(KV_INVALID, "step {} is on another stream already", fence);
    }
    KVRT_TRY(check_stream(*device_, stream, "begin of a step"));
    if (count_ == capacity) KVRT_TRY(poll());
    if (count_ == capacity) {
        return fail(KV_AGAIN, "{} steps are in flight: let the device finish some", capacity);
    }
    for (uint32_t i = 0; i < count_; ++i) {
        if (entries_[i].stream == stream || entries_[i].recorded) continue;
        return fail(KV_INVALID, "step {} is open on another stream: end it first",
                    entries_[i].fence);
    }
    for (uint32_t i = 0; i < count_; ++i) {
        if (entries_[i].stream == stream) continue;
        KVRT_TRY(device_->check(device_->calls().stream_wait_event(stream, entries_[i].event, 0),
                                "cuStreamWaitEvent"));
    }
    entry& step = entries_[count_++];
    step.fence = fence;
    step.stream = stream;
    step.order = next_order_++;
    step.recorded = false;
    return KV_OK;
}

/// Behind all that others have enqueued, too: those that began later may be on other streams.
status fence_ring::reopen(entry& step) {
    KVRT_TRY(check_stream(*device_, step.stream, "round of a step"));
    if (!step.recorded) return KV_OK;
    for (uint32_t i = 0; i < count_; ++i) {
        const entry& other = entries_[i];
        if (other.stream == step.stream || other.order < step.order) continue;
        if (!other.recorded) {
            return fail(KV_INVALID, "step {} is open on another stream: end it first", other.fence);
        }
        KVRT_TRY(device_->check(device_->calls().stream_wait_event(step.stream, other.event, 0),
                                "cuStreamWaitEvent"));
    }
    step.recorded = false;
    return KV_OK;
}

status fence_ring::go_on(uint64_t fence, stream_handle stream) {
    entry* const step = find(fence);
    if (step == nullptr) {
        for (uint32_t i = 0; i < count_; ++i) {
            if (!entries_[i].recorded) stream = entries_[i].stream;
        }
        return begin(fence, stream);
    }
    const current_context here(*device_);
    KVRT_TRY(here.state());
    return reopen(*step);
}

status fence_ring::record(uint64_t fence) {
    entry* step = find(fence);
    if (step == nullptr) return KV_OK;
    const current_context here(*device_);
    KVRT_TRY(here.state());
    KVRT_TRY(check_stream(*device_, step->stream, "end of a step"));
    KVRT_TRY(
        device_->check(device_->calls().event_record(step->event, step->stream), "cuEventRecord"));
    step->recorded = true;
    return KV_OK;
}

status fence_ring::poll() {
    if (count_ == 0) return device_->healthy();
    const current_context here(*device_);
    KVRT_TRY(here.state());
    for (uint32_t i = 0; i < count_;) {
        const driver_result result = entries_[i].recorded
                                         ? device_->calls().event_query(entries_[i].event)
                                         : error_not_ready;
        if (result == error_not_ready) {
            ++i;
        } else {
            KVRT_TRY(device_->check(result, "cuEventQuery"));
            std::swap(entries_[i], entries_[--count_]);
        }
    }
    return KV_OK;
}

bool fence_ring::passed(uint64_t fence) const {
    for (uint32_t i = 0; i < count_; ++i) {
        if (entries_[i].fence == fence) return false;
    }
    return true;
}

bool fence_ring::passed_all(uint64_t order) const {
    for (uint32_t i = 0; i < count_; ++i) {
        if (entries_[i].order <= order) return false;
    }
    return true;
}

}  // namespace kvrt::cuda
