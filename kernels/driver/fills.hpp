// What pools with KV_POOL_DEBUG do to the bytes of their blocks: they are filled on a stream of
// their own while no step uses them, and whatever a step enqueues next waits for that there.
#pragma once

#include "driver/fences.hpp"

namespace kvrt::cuda {

class block_fills {
  public:
    block_fills() = default;
    block_fills(const block_fills&) = delete;
    block_fills& operator=(const block_fills&) = delete;
    /// Waits for fills.
    ~block_fills();

    void fill(device_context& device, device_pointer target, uint64_t bytes, uint32_t value);

    /// What `stream` gets next is behind all fills. An error of one of them is told here.
    status settle(stream_handle stream);
    /// Waits for them.
    status wait();

    /// `count` pieces of `bytes`, `stride` apart: waits for fills and for the copy.
    status read(device_context& device, device_pointer first, uint64_t stride, uint64_t count,
                uint64_t bytes, std::byte* out);

  private:
    static constexpr uint64_t staging_bytes = uint64_t{64} << 10;

    status prepare(device_context& device);
    status enqueue_fill(device_context& device, device_pointer target, uint64_t bytes,
                        uint32_t value);

    device_context* device_ = nullptr;
    stream_handle stream_ = nullptr;
    event_handle event_ = nullptr;  ///< behind the last fill
    std::byte* host_ = nullptr;     ///< pinned
    bool pending_ = false;          ///< no step waits for the last fill yet
    status failed_ = KV_OK;
    char reason_[256] = {};  ///< of the first fill that failed
};

}  // namespace kvrt::cuda
