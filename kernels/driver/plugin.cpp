// The plugin: what libkvrt.so loads as libkvrt_cuda.so, a table of functions over one device.
#include "device/plugin.h"

#include <new>

#include "driver/arena.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

/// Members end in the order that work in flight needs: fences wait for it, then memory goes.
struct kvrt_device {
    host_allocator allocator;
    device_context context;
    arena_memory arena;
    fence_ring fences;

    explicit kvrt_device(const kvrt_device_options& options)
        : arena(context, fences, allocator, options.elastic != 0) {
        allocator.user = options.allocator;
        allocator.allocate = options.allocate;
        allocator.release = options.release;
    }
    device_pointer at(uint64_t offset) const { return arena.base() + offset; }
};

namespace {

/// The current context's device; the first, where there is none.
int current_device(const driver& calls) {
    device_number device = 0;
    return calls.context_device(&device) == success ? device : 0;
}

kv_status open(const kvrt_device_options* options, kvrt_device** out_device) {
    *out_device = nullptr;
    if (options->struct_size < sizeof *options) {
        return fail(KV_INTERNAL, "options of a device: {} bytes of {}", options->struct_size,
                    sizeof *options);
    }
    const driver* calls = nullptr;
    KVRT_TRY(load_driver(calls));
    host_allocator allocator;
    allocator.user = options->allocator;
    allocator.allocate = options->allocate;
    allocator.release = options->release;
    void* memory =
        allocate(allocator, sizeof(kvrt_device), alignof(kvrt_device), memory_contents::zeroed);
    if (memory == nullptr) {
        return fail(KV_NO_MEMORY, "the allocator refused {} bytes for the device",
                    sizeof(kvrt_device));
    }
    kvrt_device* device = new (memory) kvrt_device(*options);
    status verdict = device->context.open(*calls, current_device(*calls));
    if (verdict == KV_OK) verdict = device->fences.create(device->context);
    if (verdict == KV_OK) {
        *out_device = device;
        return KV_OK;
    }
    device->~kvrt_device();
    release(allocator, memory, sizeof(kvrt_device), alignof(kvrt_device));
    return verdict;
}

void close(kvrt_device* device) {
    host_allocator allocator = device->allocator;
    device->~kvrt_device();
    release(allocator, device, sizeof(kvrt_device), alignof(kvrt_device));
}

kv_status reserve(kvrt_device* device, uint64_t bytes, uint64_t alignment, void** out_base) {
    std::byte* base = nullptr;
    const status verdict = device->arena.reserve(bytes, alignment, &base);
    *out_base = base;
    return verdict;
}

kv_status poll(kvrt_device* device) {
    const status verdict = device->fences.poll();
    if (verdict == KV_OK) device->arena.collect();
    return verdict;
}

kv_status copy(kvrt_device* device, uint64_t step, uint64_t target, uint64_t source,
               uint64_t bytes) {
    const stream_handle stream = device->fences.stream_of(step);
    if (stream == nullptr) return fail(KV_INTERNAL, "step {} has no stream", step);
    const current_context here(device->context);
    KVRT_TRY(here.state());
    return device->context.check(device->context.calls().copy_on_device(
                                     device->at(target), device->at(source), bytes, stream),
                                 "cuMemcpyDtoDAsync");
}

const kvrt_plugin table = {
    .struct_size = sizeof(kvrt_plugin),
    .version = KVRT_PLUGIN_VERSION,
    .last_message = []() -> const char* { return message_buffer(); },
    .open = open,
    .close = close,
    .reserve = reserve,
    .commit = [](kvrt_device* device, uint64_t offset,
                 uint64_t bytes) { return device->arena.commit(offset, bytes); },
    .give_back = [](kvrt_device* device, uint64_t offset,
                    uint64_t bytes) { device->arena.give_back(offset, bytes); },
    .mapped_bytes = [](const kvrt_device* device) { return device->arena.mapped_bytes(); },
    .begin_step =
        [](kvrt_device* device, uint64_t step, void* stream) {
            return device->fences.begin(step, static_cast<stream_handle>(stream));
        },
    .end_step = [](kvrt_device* device, uint64_t step) { return device->fences.record(step); },
    .poll = poll,
    .passed = [](const kvrt_device* device, uint64_t step) -> int32_t {
        return device->fences.passed(step) ? 1 : 0;
    },
    .copy = copy,
};

}  // namespace

extern "C" __attribute__((visibility("default"))) const kvrt_plugin* kvrt_cuda_plugin(void) {
    return &table;
}
