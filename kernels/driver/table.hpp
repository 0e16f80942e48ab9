// An array of 32-bit words on the device at an address that never changes, so that captured graphs
// may read it, and its image on the host. What differs since the last upload goes there in lines of
// 64 bytes, through the staging ring: few runs of lines each by a copy, many in one copy that a
// kernel spreads out. Uploads take their place in the stream: work before them sees the old words,
// work behind them the new.
#pragma once

#include "base/host_memory.hpp"
#include "driver/staging.hpp"
#include "kernels/copy.hpp"

namespace kvrt::cuda {

using kernels::line_bytes;
using kernels::line_words;

inline constexpr const char* spread_kernel = "kvrt_spread_lines";

class device_table {
  public:
    device_table() = default;
    device_table(const device_table&) = delete;
    device_table& operator=(const device_table&) = delete;
    /// The ring and the steps in flight have ended: they wait for whoever uses the table.
    ~device_table();

    /// All words are -1, on the device from the first upload on. `spread` may be null: then every
    /// run of lines is a copy.
    status create(device_context& device, host_allocator& allocator, uint64_t words,
                  function_handle spread);

    /// What the device shall have from the next upload on. Costs nothing where it has a whole line
    /// of it already.
    void write(uint64_t first, const uint32_t* words, uint64_t count);
    void write(uint64_t index, uint32_t word) { write(index, &word, 1); }
    uint32_t read(uint64_t index) const { return image_[index]; }
    const uint32_t* words_at(uint64_t index) const { return image_.data() + index; }
    /// Something else may have written to [first, first + count): all become -1, with the next
    /// upload on the device too. `first` begins a line.
    void forget(uint64_t first, uint64_t count);

    /// Lines that the device does not have yet.
    uint64_t pending_lines() const { return pending_; }

    /// Enqueues what is pending. AGAIN: the ring had no room for all of it; what had found room is
    /// on its way, the rest is pending, and a later call goes on from there.
    status upload(staging_ring& ring, stream_handle stream);

    device_pointer address() const { return memory_; }
    uint64_t words() const { return image_.size(); }

  private:
    uint64_t find_line(uint64_t from) const;
    uint32_t runs_up_to(uint32_t most) const;
    status begin(stream_handle stream);
    void mark(uint64_t line);
    void unmark(uint64_t line);
    status copy_runs(staging_ring& ring, stream_handle stream);
    status spread_lines(staging_ring& ring, stream_handle stream);
    status launch_spread(staging_ring& ring, stream_handle stream, uint32_t count);

    device_context* device_ = nullptr;
    function_handle spread_ = nullptr;
    device_pointer memory_ = 0;
    host_array<uint32_t> image_;   ///< whole lines
    host_array<uint64_t> marks_;   ///< a bit for each line that is pending,
    host_array<uint64_t> groups_;  ///< and one for each word of marks that has any
    uint64_t pending_ = 0;
    bool begun_ = false;
};

}  // namespace kvrt::cuda
