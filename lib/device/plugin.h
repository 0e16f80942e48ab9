/* What libkvrt.so and a device's plugin know of each other: one C struct of functions, which the
 * plugin hands out through the only symbol that it exports. C, so that both sides may be built by
 * different compilers, with different standard libraries.
 *
 * Offsets are into the arena, bytes. Every function that can fail returns a kv_status and leaves a
 * message; none waits for the device, but close. One thread at a time is inside a device. */
#ifndef KVRT_DEVICE_PLUGIN_H
#define KVRT_DEVICE_PLUGIN_H

#include <stddef.h>
#include <stdint.h>

#include "kvrt/kvrt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rises with every change of what is below that an older side would not understand. */
#define KVRT_PLUGIN_VERSION 1u

typedef struct kvrt_device kvrt_device;

typedef struct kvrt_device_options {
    uint32_t struct_size;
    uint32_t elastic; /* memory goes back to the system slab by slab */
    /* Memory of the host, as kv_hooks; allocate may be NULL. They outlive the device. */
    void* allocator;
    void* (*allocate)(void* allocator, size_t bytes, size_t alignment);
    void (*release)(void* allocator, void* memory, size_t bytes, size_t alignment);
} kvrt_device_options;

typedef struct kvrt_plugin {
    uint32_t struct_size;
    uint32_t version; /* KVRT_PLUGIN_VERSION */

    /* Of the last error on this thread. */
    const char* (*last_message)(void);

    /* The device that is current for the calling thread, or the first. UNSUPPORTED: no driver, no
     * such device. */
    kv_status (*open)(const kvrt_device_options* options, kvrt_device** out_device);
    /* Waits until the device is done with everything that was begun. */
    void (*close)(kvrt_device* device);

    /* The arena, as device_memory (device/device.hpp). The base is an address of the device. */
    kv_status (*reserve)(kvrt_device* device, uint64_t bytes, uint64_t alignment, void** out_base);
    kv_status (*commit)(kvrt_device* device, uint64_t offset, uint64_t bytes);
    void (*give_back)(kvrt_device* device, uint64_t offset, uint64_t bytes);
    uint64_t (*mapped_bytes)(const kvrt_device* device);

    /* Steps, by their numbers. All that a step enqueues, here or by the host's own kernels, is on
     * one stream, between begin_step and end_step. */
    kv_status (*begin_step)(kvrt_device* device, uint64_t step, void* stream);
    kv_status (*end_step)(kvrt_device* device, uint64_t step);
    /* Asks the device how far it is. DEVICE: it has failed, for good. */
    kv_status (*poll)(kvrt_device* device);
    /* Is the device done with the step? As of the last poll; 1 for one that never began. */
    int32_t (*passed)(const kvrt_device* device, uint64_t step);

    /* Enqueued for an open step. */
    kv_status (*copy)(kvrt_device* device, uint64_t step, uint64_t target, uint64_t source,
                      uint64_t bytes);

    /* An array of 32-bit words at an address that stays, all -1, with an image on the host: once
     * per device. write changes the image; upload enqueues for an open step what differs from the
     * last upload. AGAIN: there is no room for all of it in `staging_bytes` of pinned memory until
     * the device has read what is on its way; a later call goes on from there. */
    kv_status (*create_table)(kvrt_device* device, uint64_t words, uint64_t staging_bytes,
                              void** out_address);
    void (*write_table)(kvrt_device* device, uint64_t first, const uint32_t* words, uint64_t count);
    kv_status (*upload_table)(kvrt_device* device, uint64_t step);
} kvrt_plugin;

/* The symbol: a function that returns the table. */
typedef const kvrt_plugin* (*kvrt_plugin_entry)(void);
#define KVRT_CUDA_PLUGIN_ENTRY "kvrt_cuda_plugin"

#ifdef __cplusplus
}
#endif

#endif /* KVRT_DEVICE_PLUGIN_H */
