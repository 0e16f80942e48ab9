// The arena on a CUDA device. An elastic one reserves addresses once and maps physical memory page
// by page behind the slabs in use, so that what is given back is the system's again and no pointer
// moves. The others take all their memory when they are reserved, in one allocation.
//
//   page    what the device maps at a time: its granularity, at least a slab
//   unit    the alignment that reserve was given: ranges begin and end on it
//   given   a page none of whose units are in use; it stays mapped until every step that was in
//           flight by then has passed, and is simply used again when it is wanted before
#pragma once

#include "base/host_memory.hpp"
#include "device/device.hpp"
#include "driver/fences.hpp"

namespace kvrt::cuda {

class arena_memory final : public device_memory {
  public:
    /// `device`, `fences` and `allocator` outlive it; steps have passed when it ends.
    arena_memory(device_context& device, fence_ring& fences, host_allocator& allocator,
                 bool elastic)
        : device_(device), fences_(fences), allocator_(allocator), elastic_(elastic) {}
    arena_memory(const arena_memory&) = delete;
    arena_memory& operator=(const arena_memory&) = delete;
    ~arena_memory() override;

    /// The base is a device address, not one for the host. UNSUPPORTED: an elastic arena where
    /// driver or device have no virtual memory management. NO_MEMORY: one that is not does not fit.
    status reserve(uint64_t bytes, uint64_t alignment, std::byte** out_base) override;
    /// All of it, or none: NO_MEMORY, DEVICE.
    status commit(uint64_t offset, uint64_t bytes) override;
    void give_back(uint64_t offset, uint64_t bytes) override;

    /// Unmaps what was given back and is read by nobody any more, as of the last poll of fences.
    void collect();

    /// Device memory that this arena takes now.
    uint64_t mapped_bytes() const { return mapped_bytes_; }
    device_pointer base() const { return base_; }
    uint64_t page_bytes() const { return page_bytes_; }

  private:
    static constexpr uint32_t no_page = 0xffffffffu;

    struct page {
        uint32_t units = 0;  ///< in use
        uint32_t next_given = no_page;
        uint64_t given_order = 0;  ///< the newest of the steps that were in flight then
        bool mapped = false;
        bool used = false;    ///< committed since it was mapped
        bool listed = false;  ///< among those given back
    };

    status reserve_plain(uint64_t bytes, uint64_t alignment);
    status reserve_virtual(uint64_t bytes, uint64_t alignment);
    device_pointer address_of(uint64_t page_index) const {
        return base_ + page_index * page_bytes_;
    }
    uint32_t units_in(uint64_t page_index, uint64_t offset, uint64_t bytes) const;
    status map(uint64_t page_index);
    void unmap(uint64_t page_index);
    void list(uint64_t page_index);

    device_context& device_;
    fence_ring& fences_;
    host_allocator& allocator_;
    bool elastic_;
    device_pointer allocation_ = 0;  ///< of an arena that is not elastic
    device_pointer base_ = 0;
    uint64_t reserved_bytes_ = 0;  ///< addresses
    uint64_t page_bytes_ = 0;
    uint64_t unit_bytes_ = 0;
    uint64_t mapped_bytes_ = 0;
    host_array<page> pages_;
    uint32_t first_given_ = no_page;
};

}  // namespace kvrt::cuda
