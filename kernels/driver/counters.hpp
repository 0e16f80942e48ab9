// Counters of 64 bits that kernels add to, and copies of them for the host: one is enqueued behind
// a step's work, and read once that step has passed. Nobody waits: what has not arrived is older.
#pragma once

#include "driver/buffer.hpp"
#include "driver/fences.hpp"

namespace kvrt::cuda {

class counter_array {
  public:
    counter_array() = default;
    counter_array(const counter_array&) = delete;
    counter_array& operator=(const counter_array&) = delete;
    /// The steps in flight have ended.
    ~counter_array();

    /// Once.
    status create(device_context& device, uint64_t count);
    /// All are 0 for what `stream` gets next, if this is the first call.
    status begin(stream_handle stream);
    /// Enqueues a copy for the step `fence`, unless an earlier one is on its way.
    status fetch(uint64_t fence, stream_handle stream);
    /// What has arrived since it was last asked, as of the last poll of `fences`: it stays until
    /// the next fetch. Null: nothing.
    const uint64_t* arrived(const fence_ring& fences);

    device_pointer address() const { return memory_.address(); }

  private:
    uint64_t bytes() const { return count_ * sizeof(uint64_t); }

    device_context* device_ = nullptr;
    device_buffer memory_;
    uint64_t* host_ = nullptr;  ///< pinned
    uint64_t count_ = 0;
    uint64_t fetching_ = 0;  ///< the step whose copy is on its way; 0: none
    bool begun_ = false;
};

}  // namespace kvrt::cuda
