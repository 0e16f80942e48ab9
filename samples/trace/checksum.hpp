// FNV-1a, 64 bits: the checksum of traces and of replayed outputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace trace {

class checksum {
  public:
    void add(std::span<const std::byte> bytes) {
        for (const std::byte byte : bytes) {
            value_ = (value_ ^ std::to_integer<std::uint64_t>(byte)) * 0x100000001b3u;
        }
    }
    std::uint64_t value() const { return value_; }

  private:
    std::uint64_t value_ = 0xcbf29ce484222325u;
};

}  // namespace trace
