#include "driver/arena.hpp"

#include <algorithm>

namespace kvrt::cuda {

namespace {

physical_properties properties_on(device_number device) {
    physical_properties properties;
    properties.location.id = device;
    return properties;
}

}  // namespace

arena_memory::~arena_memory() {
    if (base_ == 0) return;
    const current_context here(device_);  // after a fault too
    if (!elastic_) {
        device_.release(allocation_, mapped_bytes_);
        return;
    }
    for (uint64_t i = 0; i < pages_.size(); ++i) {
        if (pages_[i].mapped) unmap(i);
    }
    (void)device_.calls().address_free(base_, reserved_bytes_);
}

status arena_memory::reserve(uint64_t bytes, uint64_t alignment, std::byte** out_base) {
    const current_context here(device_);
    KVRT_TRY(here.state());
    unit_bytes_ = alignment;
    KVRT_TRY(elastic_ ? reserve_virtual(bytes, alignment) : reserve_plain(bytes, alignment));
    *out_base = reinterpret_cast<std::byte*>(base_);
    return KV_OK;
}

status arena_memory::reserve_plain(uint64_t bytes, uint64_t alignment) {
    // The driver aligns to 256 bytes, whatever it is asked for.
    const uint64_t whole = bytes + alignment;
    KVRT_TRY(device_.allocate(whole, "cuMemAlloc (arena)", allocation_));
    base_ = round_up<uint64_t>(allocation_, alignment);
    mapped_bytes_ = whole;
    return KV_OK;
}

status arena_memory::reserve_virtual(uint64_t bytes, uint64_t alignment) {
    const driver& calls = device_.calls();
    int device_maps = 0;
    KVRT_TRY(device_.check(
        calls.device_attribute(&device_maps, attribute_virtual_memory, device_.device()),
        "cuDeviceGetAttribute"));
    if (!calls.has_virtual_memory() || device_maps == 0) {
        return fail(KV_UNSUPPORTED,
                    "KV_POOL_ELASTIC: this {} has no virtual memory management, without which "
                    "device memory cannot be given back in parts",
                    calls.has_virtual_memory() ? "device" : "driver");
    }
    const physical_properties properties = properties_on(device_.device());
    size_t granularity = 0;
    KVRT_TRY(
        device_.check(calls.allocation_granularity(&granularity, &properties, granularity_minimum),
                      "cuMemGetAllocationGranularity"));
    page_bytes_ = std::max<uint64_t>(granularity, alignment);
    reserved_bytes_ = round_up(bytes, page_bytes_);
    KVRT_TRY(pages_.allocate(allocator_, reserved_bytes_ / page_bytes_, "pages of the arena"));
    return device_.check(calls.address_reserve(&base_, reserved_bytes_, page_bytes_, 0, 0),
                         "cuMemAddressReserve (arena)");
}

uint32_t arena_memory::units_in(uint64_t page_index, uint64_t offset, uint64_t bytes) const {
    const uint64_t first = std::max(offset, page_index * page_bytes_);
    const uint64_t end = std::min(offset + bytes, (page_index + 1) * page_bytes_);
    return static_cast<uint32_t>((end - first) / unit_bytes_);
}

status arena_memory::map(uint64_t page_index) {
    const driver& calls = device_.calls();
    const physical_properties properties = properties_on(device_.device());
    const device_pointer address = address_of(page_index);
    physical_handle memory = 0;
    driver_result created = calls.physical_create(&memory, page_bytes_, &properties, 0);
    if (created == error_out_of_memory && first_given_ != no_page) {
        KVRT_TRY(fences_.poll());
        collect();
        created = calls.physical_create(&memory, page_bytes_, &properties, 0);
    }
    KVRT_TRY(device_.check(created, "cuMemCreate"));
    const driver_result mapped = calls.memory_map(address, page_bytes_, 0, memory, 0);
    // The mapping keeps the memory; without one it goes back here.
    (void)calls.physical_release(memory);
    KVRT_TRY(device_.check(mapped, "cuMemMap"));
    access_description access;
    access.location.id = device_.device();
    const driver_result opened = calls.memory_set_access(address, page_bytes_, &access, 1);
    if (opened != success) (void)calls.memory_unmap(address, page_bytes_);
    KVRT_TRY(device_.check(opened, "cuMemSetAccess"));
    pages_[page_index].mapped = true;
    pages_[page_index].used = false;
    mapped_bytes_ += page_bytes_;
    return KV_OK;
}

void arena_memory::unmap(uint64_t page_index) {
    const driver_result result = device_.calls().memory_unmap(address_of(page_index), page_bytes_);
    if (device_.check(result, "cuMemUnmap") != KV_OK) return;  // it is still there
    pages_[page_index].mapped = false;
    mapped_bytes_ -= page_bytes_;
}

status arena_memory::commit(uint64_t offset, uint64_t bytes) {
    if (!elastic_ || bytes == 0) return KV_OK;
    const uint64_t first = offset / page_bytes_;
    const uint64_t end = (offset + bytes - 1) / page_bytes_ + 1;
    const current_context here(device_);
    KVRT_TRY(here.state());
    for (uint64_t i = first; i < end; ++i) {
        // Counted first: whoever collects meanwhile must see that the page is wanted.
        pages_[i].units += units_in(i, offset, bytes);
        const status verdict = pages_[i].mapped ? KV_OK : map(i);
        if (verdict == KV_OK) continue;
        for (uint64_t done = first; done <= i; ++done) {
            page& undone = pages_[done];
            undone.units -= units_in(done, offset, bytes);
            if (undone.units != 0 || !undone.mapped) continue;
            if (undone.used) {
                list(done);
            } else {
                unmap(done);
            }
        }
        return verdict;
    }
    for (uint64_t i = first; i < end; ++i) pages_[i].used = true;
    return KV_OK;
}

void arena_memory::give_back(uint64_t offset, uint64_t bytes) {
    if (!elastic_ || bytes == 0) return;
    const uint64_t end = (offset + bytes - 1) / page_bytes_ + 1;
    for (uint64_t i = offset / page_bytes_; i < end; ++i) {
        pages_[i].units -= units_in(i, offset, bytes);
        if (pages_[i].units == 0) list(i);
    }
    collect();
}

void arena_memory::list(uint64_t page_index) {
    page& given = pages_[page_index];
    given.given_order = fences_.newest();
    if (given.listed) return;
    given.listed = true;
    given.next_given = first_given_;
    first_given_ = static_cast<uint32_t>(page_index);
}

void arena_memory::collect() {
    if (first_given_ == no_page) return;
    const current_context here(device_);
    if (here.state() != KV_OK) return;
    uint32_t next = first_given_;
    first_given_ = no_page;
    while (next != no_page) {
        const uint32_t index = next;
        page& given = pages_[index];
        next = given.next_given;
        given.listed = false;
        if (given.units != 0) continue;  // used again
        if (fences_.passed_all(given.given_order)) unmap(index);
        if (given.mapped) {
            given.listed = true;
            given.next_given = first_given_;
            first_given_ = index;
        }
    }
}

}  // namespace kvrt::cuda
