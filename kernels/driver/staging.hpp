// Pinned host memory through which small things go to the device without anybody waiting: a ring of
// batches, each behind an event that says when the device has read it. A batch is never written
// again before that, whatever else is enqueued; when there is no room, the call says so.
#pragma once

#include <array>

#include "driver/fences.hpp"

namespace kvrt::cuda {

class staging_ring {
  public:
    static constexpr uint32_t most_batches = 16;  ///< in flight
    static constexpr uint64_t alignment = 64;

    staging_ring() = default;
    staging_ring(const staging_ring&) = delete;
    staging_ring& operator=(const staging_ring&) = delete;
    /// Waits for the batches in flight.
    ~staging_ring();

    /// `bytes` is a multiple of the alignment, at least 1024; the device has as many, at the same
    /// offsets. After a failure it can be called again, for as many. `joins`: many small batches
    /// of one stream become one where half of most_batches are in flight, which room alone limits.
    status create(device_context& device, uint64_t bytes, bool joins = false);

    /// Opens a batch of up to `wanted` bytes, of at least `least`: a multiple of the alignment.
    /// AGAIN: there is no room for so many now. TOO_LARGE: there never is. Nothing is enqueued.
    status open(uint64_t least, uint64_t wanted, stream_handle stream);
    /// Of the open batch: what to write, how much there is room for, and where the device will have
    /// it once copied.
    std::byte* data() const { return host_ + batch_begin_; }
    uint64_t size() const { return batch_bytes_; }
    device_pointer on_device(uint64_t offset) const {
        return device_memory_ + batch_begin_ + offset;
    }

    /// Enqueues a copy of [offset, offset + bytes) of the open batch.
    status copy(device_pointer target, uint64_t offset, uint64_t bytes);

    /// The other way: into the open batch, for after drain.
    status copy_back(device_pointer source, uint64_t offset, uint64_t bytes);

    /// Waits until nothing is in flight.
    status drain();

    /// Ends the batch, of which the first `used` bytes may have been written. It is in flight until
    /// all that the stream has got since open has run.
    status close(uint64_t used);

    uint64_t bytes() const { return bytes_; }
    uint32_t in_flight() const { return count_; }

  private:
    struct batch {
        event_handle event = nullptr;
        stream_handle stream = nullptr;
        uint64_t begin = 0, end = 0;  ///< in the ring
        bool recorded = false;        ///< or else in flight for ever
    };

    status poll();
    batch& at(uint32_t index) { return batches_[(first_ + index) % most_batches]; }

    device_context* device_ = nullptr;
    std::byte* host_ = nullptr;
    device_pointer device_memory_ = 0;
    uint64_t bytes_ = 0;
    std::array<batch, most_batches> batches_;
    bool joins_ = false;
    uint32_t first_ = 0;  ///< the oldest in flight
    uint32_t count_ = 0;
    stream_handle stream_ = nullptr;  ///< of the open batch
    uint64_t batch_begin_ = 0;
    uint64_t batch_bytes_ = 0;
    bool joined_ = false;  ///< the open batch is more of the newest in flight
};

}  // namespace kvrt::cuda
