// What a device must implement for a pool's arena and its steps. The CPU is here; CUDA comes as a
// shared object of its own, behind plugin.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.hpp"

namespace kvrt {

/// The memory behind an arena. Addresses never move between reserve and the destructor.
class device_memory {
  public:
    virtual ~device_memory() = default;

    /// Reserves address space on a multiple of `alignment`; nothing is resident yet. Called once.
    virtual status reserve(uint64_t bytes, uint64_t alignment, std::byte** out_base) = 0;

    /// [offset, offset + bytes) will be used. Fails when the system has no memory for it.
    virtual status commit(uint64_t offset, uint64_t bytes) = 0;

    /// Gives the memory of a range back to the system; its bytes are lost, its addresses stay.
    virtual void give_back(uint64_t offset, uint64_t bytes) = 0;
};

/// Bytes of an arena that is not in the host's memory, for pools that look for errors
/// (KV_POOL_DEBUG).
class inspected_memory {
  public:
    virtual ~inspected_memory() = default;

    /// Before whatever a step does next; of bytes that no step uses now.
    virtual void fill(uint64_t offset, uint64_t bytes, unsigned char value) = 0;

    /// `count` pieces of `bytes` each, `stride` apart, one behind the other: waits for fills, and
    /// for no step.
    virtual status read(uint64_t first, uint64_t stride, uint64_t count, uint64_t bytes,
                        std::byte* out) = 0;
};

/// Which steps a device has finished that works on behind the host's back.
class step_clock {
  public:
    virtual ~step_clock() = default;
    virtual bool passed(uint64_t step) const = 0;
};

}  // namespace kvrt
