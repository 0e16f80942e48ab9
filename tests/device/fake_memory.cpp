// The fake driver's memory: addresses, physical memory behind them, pinned host memory.
#include <fmt/format.h>
#include <sys/mman.h>

#include <cstring>

#include "fake_calls.hpp"

namespace kvrt::cuda {

namespace {

constexpr device_pointer distance = fake_driver::distance;
constexpr int garbage = 0xcd;  ///< in memory that is new

std::byte* on_host(device_pointer address) {
    return reinterpret_cast<std::byte*>(address - distance);
}

}  // namespace

device_pointer fake_driver::reserve(std::size_t bytes) {
    void* mapping = mmap(nullptr, bytes + options_.granularity, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) return 0;
    const uint64_t start = reinterpret_cast<uint64_t>(mapping);
    const uint64_t aligned =
        (start + options_.granularity - 1) / options_.granularity * options_.granularity;
    // Only whole reservations are unmapped, from where they begin.
    if (aligned != start) munmap(mapping, aligned - start);
    const uint64_t end = start + bytes + options_.granularity;
    if (end != aligned + bytes) {
        munmap(reinterpret_cast<void*>(aligned + bytes), end - aligned - bytes);
    }
    reservations_[aligned + distance] = bytes;
    return aligned + distance;
}

void fake_driver::unreserve(device_pointer address) {
    munmap(on_host(address), reservations_[address]);
    reservations_.erase(address);
}

void fake_driver::back(device_pointer address, std::size_t bytes) {
    mprotect(on_host(address), bytes, PROT_READ | PROT_WRITE);
    std::memset(on_host(address), garbage, bytes);
}

void fake_driver::unback(device_pointer address, std::size_t bytes) {
    (void)madvise(on_host(address), bytes, MADV_DONTNEED);
    mprotect(on_host(address), bytes, PROT_NONE);
}

bool fake_driver::is_mapped(device_pointer address, std::size_t bytes) const {
    const device_pointer end = address + bytes;
    while (address < end) {
        auto found = ranges_.upper_bound(address);
        if (found == ranges_.begin()) return false;
        --found;
        if (address >= found->first + found->second.bytes || !found->second.accessible) {
            return false;
        }
        address = found->first + found->second.bytes;
    }
    return true;
}

std::byte* fake_driver::memory(device_pointer address, std::size_t bytes) {
    if (!is_mapped(address, bytes)) {
        fault(error_illegal_address,
              fmt::format("{} bytes at {:#x} are not mapped", bytes, address));
        return nullptr;
    }
    return on_host(address);
}

void* fake_driver::make_pinned(std::size_t bytes) {
    std::vector<std::byte> memory(bytes);
    std::byte* start = memory.data();
    pinned_[start] = std::move(memory);
    return start;
}

bool fake_driver::is_pinned(const void* memory, std::size_t bytes) const {
    const std::byte* start = static_cast<const std::byte*>(memory);
    auto found = pinned_.upper_bound(start);
    if (found == pinned_.begin()) return false;
    --found;
    return start + bytes <= found->first + found->second.size();
}

void fake_driver::drop_handle(physical_handle handle) {
    physical& memory = handles_[handle];
    if (--memory.uses != 0) return;
    physical_bytes_ -= memory.bytes;
    handles_.erase(handle);
}

void fake_driver::fill_memory_calls() {
    using calls = fake_calls;
    table_.memory_allocate = [](device_pointer* memory, std::size_t bytes) {
        return calls::outside_capture("cuMemAlloc_v2", [&](fake_driver& self) {
            if (bytes == 0) return error_invalid_value;
            if (self.physical_bytes_ + bytes > self.options_.memory_bytes) {
                return error_out_of_memory;
            }
            const std::size_t page = self.options_.granularity;
            const std::size_t whole = (bytes + page - 1) / page * page;
            *memory = self.reserve(whole);
            self.back(*memory, whole);
            self.ranges_[*memory] = {bytes, 0, true};
            self.physical_bytes_ += bytes;
            return success;
        });
    };
    table_.memory_free = [](device_pointer memory) {
        return calls::any("cuMemFree_v2", [&](fake_driver& self) {
            const auto found = self.ranges_.find(memory);
            if (found == self.ranges_.end() || found->second.handle != 0) {
                return self.violate(error_invalid_value, "cuMemFree of what was not allocated");
            }
            self.physical_bytes_ -= found->second.bytes;
            self.ranges_.erase(found);
            self.unreserve(memory);
            return success;
        });
    };
    table_.host_allocate = [](void** memory, std::size_t bytes, unsigned int) {
        return calls::outside_capture("cuMemHostAlloc", [&](fake_driver& self) {
            *memory = self.make_pinned(bytes);
            return success;
        });
    };
    table_.host_free = [](void* memory) {
        return calls::any("cuMemFreeHost", [&](fake_driver& self) {
            if (self.pinned_.erase(static_cast<std::byte*>(memory)) == 0) {
                return self.violate(error_invalid_value, "cuMemFreeHost of what is not pinned");
            }
            return success;
        });
    };
    if (!options_.virtual_memory) return;
    table_.allocation_granularity = [](std::size_t* bytes, const physical_properties*, int) {
        return calls::any("cuMemGetAllocationGranularity", [&](fake_driver& self) {
            *bytes = self.options_.granularity;
            return success;
        });
    };
    table_.address_reserve = [](device_pointer* address, std::size_t bytes, std::size_t,
                                device_pointer, unsigned long long) {
        return calls::any("cuMemAddressReserve", [&](fake_driver& self) {
            if (bytes == 0 || bytes % self.options_.granularity != 0) return error_invalid_value;
            *address = self.reserve(bytes);
            return *address != 0 ? success : error_out_of_memory;
        });
    };
    table_.address_free = [](device_pointer address, std::size_t bytes) {
        return calls::any("cuMemAddressFree", [&](fake_driver& self) {
            const auto found = self.reservations_.find(address);
            if (found == self.reservations_.end() || found->second != bytes) {
                return self.violate(error_invalid_value, "cuMemAddressFree of another range");
            }
            const auto mapped = self.ranges_.lower_bound(address);
            if (mapped != self.ranges_.end() && mapped->first < address + bytes) {
                return self.violate(error_invalid_value, "cuMemAddressFree of a mapped range");
            }
            self.unreserve(address);
            return success;
        });
    };
    table_.physical_create = [](physical_handle* handle, std::size_t bytes,
                                const physical_properties* properties, unsigned long long) {
        return calls::any("cuMemCreate", [&](fake_driver& self) {
            if (bytes == 0 || bytes % self.options_.granularity != 0 ||
                properties->location.type != location_device) {
                return error_invalid_value;
            }
            if (self.physical_bytes_ + bytes > self.options_.memory_bytes) {
                return error_out_of_memory;
            }
            *handle = self.next_handle_++;
            self.handles_[*handle] = {bytes, 1, false};
            self.physical_bytes_ += bytes;
            return success;
        });
    };
    table_.physical_release = [](physical_handle handle) {
        return calls::any("cuMemRelease", [&](fake_driver& self) {
            const auto found = self.handles_.find(handle);
            if (found == self.handles_.end() || found->second.released) {
                return self.violate(error_invalid_value, "cuMemRelease of no handle");
            }
            found->second.released = true;
            self.drop_handle(handle);
            return success;
        });
    };
    table_.memory_map = [](device_pointer address, std::size_t bytes, std::size_t offset,
                           physical_handle handle, unsigned long long) {
        return calls::any("cuMemMap", [&](fake_driver& self) {
            const auto memory = self.handles_.find(handle);
            auto reserved = self.reservations_.upper_bound(address);
            if (memory == self.handles_.end() || memory->second.released || offset != 0 ||
                memory->second.bytes != bytes || reserved == self.reservations_.begin()) {
                return self.violate(error_invalid_value, "cuMemMap of no handle or address");
            }
            --reserved;
            if (address + bytes > reserved->first + reserved->second) {
                return self.violate(error_invalid_value, "cuMemMap beyond the reservation");
            }
            auto next = self.ranges_.lower_bound(address);
            const bool overlaps_next = next != self.ranges_.end() && next->first < address + bytes;
            const bool overlaps_last =
                next != self.ranges_.begin() && (--next)->first + next->second.bytes > address;
            if (overlaps_next || overlaps_last) {
                return self.violate(error_invalid_value, "cuMemMap of a mapped range");
            }
            self.ranges_[address] = {bytes, handle, false};
            ++memory->second.uses;
            return success;
        });
    };
    table_.memory_set_access = [](device_pointer address, std::size_t bytes,
                                  const access_description* description, std::size_t count) {
        return calls::any("cuMemSetAccess", [&](fake_driver& self) {
            const auto found = self.ranges_.find(address);
            if (found == self.ranges_.end() || found->second.bytes != bytes || count != 1 ||
                description->flags != access_read_write) {
                return self.violate(error_invalid_value, "cuMemSetAccess of no mapping");
            }
            found->second.accessible = true;
            self.back(address, bytes);
            return success;
        });
    };
    table_.memory_unmap = [](device_pointer address, std::size_t bytes) {
        return calls::any("cuMemUnmap", [&](fake_driver& self) {
            const auto found = self.ranges_.find(address);
            if (found == self.ranges_.end() || found->second.bytes != bytes) {
                return self.violate(error_invalid_value, "cuMemUnmap of no mapping");
            }
            self.unback(address, bytes);
            const physical_handle handle = found->second.handle;
            self.ranges_.erase(found);
            self.drop_handle(handle);
            return success;
        });
    };
}

}  // namespace kvrt::cuda
