// The arena of the CPU device: anonymous memory, on huge pages when the system gives them.
#pragma once

#include "device/device.hpp"

namespace kvrt {

class cpu_memory final : public device_memory {
  public:
    cpu_memory() = default;
    cpu_memory(const cpu_memory&) = delete;
    cpu_memory& operator=(const cpu_memory&) = delete;
    ~cpu_memory() override;

    status reserve(uint64_t bytes, uint64_t alignment, std::byte** out_base) override;
    status commit(uint64_t offset, uint64_t bytes) override;
    void give_back(uint64_t offset, uint64_t bytes) override;

  private:
    void* mapping_ = nullptr;
    uint64_t mapping_bytes_ = 0;
    std::byte* base_ = nullptr;  ///< the mapping's first aligned address
};

}  // namespace kvrt
