// Which steps a device has finished: an event for each step that has enqueued anything, from when
// it begins to do so until the device has come that far. Nobody waits for one: they are asked.
//
//   begun      work is being enqueued; the event is not recorded yet
//   recorded   behind the step's last work
//   passed     the device is done with it; so is a step that never began
//
// What a step has read or written may be used for something else, or given back, once it has
// passed. Steps on different streams are put in order when they begin.
#pragma once

#include <array>

#include "driver/context.hpp"

namespace kvrt::cuda {

/// A caller's stream may not be one of the driver's implicit ones, which wait for each other.
status check_stream(device_context& device, stream_handle stream, const char* verb);

class fence_ring {
  public:
    static constexpr uint32_t capacity = 64;  ///< steps in flight

    fence_ring() = default;
    fence_ring(const fence_ring&) = delete;
    fence_ring& operator=(const fence_ring&) = delete;
    /// Waits for all that has begun: whatever it uses is freed next.
    ~fence_ring();

    status create(device_context& device);

    /// The step `fence` will enqueue work on `stream`, behind that of all steps before it. Once is
    /// enough. INVALID: a stream that captures, or another step still enqueues on another stream.
    /// AGAIN: too many steps are in flight.
    status begin(uint64_t fence, stream_handle stream);

    /// The step `fence` enqueues more, behind what it has, until it is recorded again. One that has
    /// not begun begins: on the stream of a step that is open, else on `stream`. It is behind steps
    /// that began later, too. INVALID as begin.
    status go_on(uint64_t fence, stream_handle stream);

    /// The step has enqueued all it will. One that has not begun has nothing to wait for.
    status record(uint64_t fence);

    /// Asks for the steps in flight. DEVICE when the device has failed: nothing passes any more.
    status poll();

    /// As of the last poll.
    bool passed(uint64_t fence) const;

    /// Everything that has begun by now: passed_all answers for that, whatever begins later.
    uint64_t newest() const { return next_order_ - 1; }
    bool passed_all(uint64_t order) const;

    /// Where a step that has begun enqueues; null for others.
    stream_handle stream_of(uint64_t fence);

    uint32_t in_flight() const { return count_; }

  private:
    struct entry {
        event_handle event = nullptr;
        stream_handle stream = nullptr;
        uint64_t fence = 0;
        uint64_t order = 0;  ///< in which it has begun
        bool recorded = false;
    };

    entry* find(uint64_t fence);
    status reopen(entry& step);

    device_context* device_ = nullptr;
    std::array<entry, capacity> entries_;  ///< first those in flight; the others' events are spare
    uint32_t count_ = 0;
    uint64_t next_order_ = 1;
};

}  // namespace kvrt::cuda
