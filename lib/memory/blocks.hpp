// The blocks of a pool: the arena's slabs, cut into equal blocks of a class, with reference counts
// and fences.
//
//   arena      slabs of 2 MiB; a slab without blocks in use returns to the arena at once, and an
//              elastic pool gives its memory back to the system (it keeps two empty ones resident,
//              so that a sequence at a slab's edge does not cost a system call a step)
//   class      all lanes whose blocks have one size; a slab belongs to one class while it has
//   blocks block      free | pinned (references > 0) | parked (references 0, a reader's fence not
//   passed)
//
// allocate and free are O(1): a bitmap per slab, a list of slabs with free blocks per class. Blocks
// of a slab go out in ascending order, so a sequence that grows by itself lies in one piece.
// Invariant after every call, per class: total = free + pinned + parked.
#pragma once

#include <array>

#include "base/host_memory.hpp"
#include "device/device.hpp"
#include "memory/block_id.hpp"

namespace kvrt {

inline constexpr uint32_t max_block_classes = 16;
/// The smallest block that a model can ask for, 16 tokens of one KV head with 32 dimensions in a
/// 4-bit format, has 640 bytes: 3276 of them lie in a slab.
inline constexpr uint32_t max_blocks_per_slab = 4096;
inline constexpr uint32_t guard_bytes = 64;
inline constexpr uint32_t kept_resident_slabs = 2;

/// Which steps may still read. A step's number rises with every begin.
struct fence_clock {
    uint64_t last_begun = 0;
    uint64_t host_passed = 0;               ///< with host fences: all up to here have passed
    std::array<uint64_t, 2> open = {0, 0};  ///< numbers of the open steps, 0: none
    bool by_host = false;
    const step_clock* device = nullptr;  ///< of one that works on behind the host's back

    bool passed(uint64_t fence) const {
        if (fence == 0) return true;
        if (fence == open[0] || fence == open[1]) return false;
        if (device != nullptr && !device->passed(fence)) return false;
        return !by_host || fence <= host_passed;
    }
};

struct class_counters {
    uint64_t slabs = 0, total = 0, free = 0, pinned = 0, parked = 0;
};

/// What callers want to know of what happened; all since creation.
struct block_counters {
    uint64_t allocated = 0, returned = 0, returned_bytes = 0, slabs_given_back = 0;
    uint64_t pinned_bytes = 0, pinned = 0, peak_pinned = 0;
};

class block_store {
  public:
    struct class_description {
        uint32_t block_bytes = 0;          ///< a multiple of 64, without guard
        uint32_t positions_per_block = 0;  ///< kv_heads * block_tokens of its widest lane
    };
    struct options {
        uint64_t slabs = 0;
        bool elastic = false;
        bool debug = false;
        inspected_memory* inspected = nullptr;  ///< of an arena that the host cannot look into
    };

    status create(host_allocator& allocator, device_memory& device, const options& settings,
                  const class_description* classes, uint32_t class_count);

    std::byte* arena() const { return arena_; }
    uint32_t class_count() const { return class_count_; }
    uint32_t block_bytes(uint32_t class_index) const { return classes_[class_index].block_bytes; }
    uint32_t blocks_per_slab(uint32_t class_index) const {
        return classes_[class_index].numbering.blocks_per_slab;
    }
    uint32_t units_per_block(uint32_t class_index) const {
        return classes_[class_index].numbering.units_per_block;
    }
    position_store positions(uint32_t class_index, uint32_t block_tokens) const;

    /// A block with one reference, or no_block. With debug its bytes are 0xff.
    block_id allocate(uint32_t class_index);
    /// The class of a block that is not free.
    uint32_t class_of(block_id id) const { return slabs_[id / units_per_slab].class_index; }
    void retain(block_id id);
    uint32_t references(block_id id) const;
    /// The latest fence of those readers that have dropped this block since it was handed out.
    uint64_t last_reader(block_id id) const;

    /// Drops one reference of a reader whose last step was `fence`. True when it was the last: the
    /// block is then free, or parked until all its readers' fences have passed.
    bool drop(block_id id, uint64_t fence, const fence_clock& clock);

    /// Undoes an allocate whose block nobody else has seen: as drop, but counted as never handed
    /// out.
    void take_back(block_id id, uint64_t fence, const fence_clock& clock);

    /// Frees parked blocks whose fences have passed.
    void collect(const fence_clock& clock);

    /// Sets `count` blocks of a class aside for whoever allocates them later: can_allocate answers
    /// without them. redeem takes the promise back, at the latest just before those allocations.
    void promise(uint32_t class_index, uint64_t count) { promised_[class_index] += count; }
    void redeem(uint32_t class_index, uint64_t count) { promised_[class_index] -= count; }

    /// Can `needed[class]` blocks be handed out now / once every parked block is free?
    bool can_allocate(const uint64_t* needed, bool after_fences) const;
    /// Could they, in an empty arena?
    bool could_ever_allocate(const uint64_t* needed) const;

    class_counters counters(uint32_t class_index) const;
    block_counters totals() const;
    uint64_t slab_count() const { return slabs_.size(); }
    uint64_t free_slabs() const { return free_slab_count_; }
    uint64_t resident_slabs() const { return resident_slab_count_; }
    uint64_t free_bytes(bool after_fences) const;

    /// Walks bitmaps, lists, references and guards. `expected[class]` (may be null) are reference
    /// counts by block index that the tables add up to.
    status check(const host_array<uint32_t>* expected) const;
    uint64_t blocks_in_class(uint32_t class_index) const {
        return slabs_.size() * classes_[class_index].numbering.blocks_per_slab;
    }
    uint64_t block_index(uint32_t class_index, block_id id) const {
        return classes_[class_index].numbering.index(id);
    }

  private:
    static constexpr uint32_t no_slab = 0xffffffffu;
    static constexpr uint32_t no_class = 0xffffffffu;
    static constexpr uint64_t no_fence = ~uint64_t{0};

    /// A slab in a class. `summary` has a bit for each word of `free_bits` that is not zero.
    struct slab {
        uint32_t class_index;
        uint32_t free_blocks;
        uint32_t next, previous;  ///< class list of slabs with free blocks, or arena's free list
        bool resident;
        uint64_t summary;
        uint64_t free_bits[max_blocks_per_slab / 64];
    };
    struct block_record {
        uint32_t references;
        block_id next_parked;
        uint64_t last_reader;  ///< fence after which a dropped block may be reissued
    };
    struct block_class {
        uint32_t block_bytes = 0;
        block_numbering numbering;
        uint32_t positions_per_block = 0;
        uint32_t first_partial = no_slab;
        // Few counts, so that handing out a block is cheap; the others follow from them.
        uint64_t slabs = 0, total = 0, parked = 0;
        uint64_t allocated = 0, returned = 0;
        host_array<block_record> records;  ///< by block index
        host_array<uint32_t> positions;
    };

    block_record& record_of(block_id id) {
        const uint32_t class_index = class_of(id);
        return classes_[class_index].records[block_index(class_index, id)];
    }
    const block_record& record_of(block_id id) const {
        const uint32_t class_index = class_of(id);
        return classes_[class_index].records[block_index(class_index, id)];
    }
    bool take_slab(uint32_t class_index);
    void free_block(block_id id);
    void park(block_id id);
    void return_slab(uint32_t slab_index);
    void link_partial(uint32_t slab_index);
    void unlink_partial(uint32_t slab_index);
    bool fits(const uint64_t* needed, uint64_t slabs, bool count_free, bool count_parked) const;
    void fill(block_id id, uint64_t offset, uint64_t bytes, unsigned char value);
    status check_slab(uint32_t slab_index, uint64_t* free_blocks) const;
    status check_guards(uint32_t slab_index) const;

    std::byte* arena_ = nullptr;
    device_memory* device_ = nullptr;
    options settings_;
    std::array<block_class, max_block_classes> classes_;
    uint32_t class_count_ = 0;
    std::array<uint64_t, max_block_classes> promised_ = {};
    host_array<slab> slabs_;
    mutable host_array<std::byte> guards_;    ///< of a slab's blocks, where they are read back
    uint32_t first_resident_free_ = no_slab;  ///< taken first
    uint32_t first_empty_free_ = no_slab;     ///< without memory behind them
    uint64_t free_slab_count_ = 0;
    uint64_t resident_free_count_ = 0;
    uint64_t resident_slab_count_ = 0;
    block_id first_parked_ = no_block;
    block_id last_parked_ = no_block;
    uint64_t oldest_parked_fence_ = no_fence;
    uint64_t pinned_ = 0;
    uint64_t peak_pinned_ = 0;
    uint64_t slabs_given_back_ = 0;
};

}  // namespace kvrt
