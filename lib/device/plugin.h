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
    /* Memory of the device, as kv_cuda_memory; allocate_device may be NULL: the driver's. */
    void* device_user;
    void* (*allocate_device)(void* user, size_t bytes, size_t alignment);
    void (*release_device)(void* user, void* memory, size_t bytes, size_t alignment);
} kvrt_device_options;

/* As kv_cuda_device of kv_cuda.h. */
typedef struct kvrt_device_description {
    uint64_t memory_bytes;
    uint32_t ordinal, compute_major, compute_minor, multiprocessors, driver_version;
    uint32_t elastic, has_kernels, unused;
    char name[64];
    char reason[128];
} kvrt_device_description;

/* Keys or values of a lane's blocks, as operand_layout of format/tile.hpp: strides in words. */
typedef struct kvrt_operand {
    uint32_t format, kind; /* KV_FORMAT_*, format_class */
    uint32_t type, dim, words, word_bytes;
    uint32_t rotated, inline_form;
    int64_t offset, group_stride, slot_stride, head_stride, word_stride;
    /* Not 0: rows are stored with constants that are not here, so nothing reads or writes them. */
    uint32_t more_constants;
    uint32_t unused;
    const float* scales; /* of the device: [kv_heads]; NULL: all are 1 */
} kvrt_operand;

typedef struct kvrt_lane {
    const void* arena; /* of the device */
    uint32_t order;    /* tile_order */
    uint32_t block_tokens, kv_heads, block_bytes;
    uint32_t id_shift; /* ids of block tables count 64 bytes, shifted so far to the right */
    uint32_t unused;
    kvrt_operand keys, values;
} kvrt_lane;

/* A tensor of the caller on the device: [rows, heads, dim], strides in elements. */
typedef struct kvrt_device_tensor {
    void* data;
    uint32_t type, unused; /* KV_DTYPE_* */
    int64_t row_stride, head_stride, dim_stride;
} kvrt_device_tensor;

/* Rows of a step into a lane. What is a pointer to words is an address in the device's table. */
typedef struct kvrt_write_rows {
    const kvrt_lane* lane;
    const uint32_t* block_table; /* [sequences][block_table_stride] */
    uint64_t block_table_stride;
    const uint32_t* targets; /* [rows][3]: row of block_table, slot, position; -1: no row */
    uint32_t rows, unused;
    kvrt_device_tensor keys, values;
} kvrt_write_rows;

/* What the lists of an attention are made of, by words: attend_sequence and attend_piece of
 * kernels/attend.hpp. */
typedef struct kvrt_attend_sequence {
    uint32_t table, first_row, rows, slots, explicit_slots, next_position;
    int32_t window_first;
    uint32_t first_partial, pieces, unused[3];
} kvrt_attend_sequence;
typedef struct kvrt_attend_piece {
    uint32_t sequence, first_slot, end_slot, partial;
} kvrt_attend_piece;

/* Rows of a step over a lane. A launch that is captured has a grid for captured_pieces, any other
 * for those of the step: which pieces there are is in the table. */
typedef struct kvrt_attend_rows {
    const kvrt_lane* lane;
    const uint32_t* block_table;
    uint64_t block_table_stride;
    const kvrt_attend_sequence* sequences; /* [sequence_count] */
    const kvrt_attend_piece* pieces;       /* [captured_pieces] */
    uint32_t sequence_count, piece_count, captured_pieces, most_rows;
    uint64_t most_partials; /* that the workspace is used for */
    void* workspace;
    kvrt_device_tensor queries, out;
    float* log_sum_exp; /* or NULL */
    uint32_t query_heads, row_heads;
    float scale, softcap;
    const float* sink_logits; /* of the device: [query_heads], or NULL; slopes too */
    const float* alibi_slopes;
    uint32_t window, window_sinks;
    uint32_t captured, unused; /* out: it was captured, instead of enqueued */
} kvrt_attend_rows;

typedef struct kvrt_plugin {
    uint32_t struct_size;
    uint32_t version; /* KVRT_PLUGIN_VERSION */

    /* Of the last error on this thread. */
    const char* (*last_message)(void);

    /* The device that is current for the calling thread, or the first. UNSUPPORTED: no driver, no
     * such device. */
    kv_status (*describe)(kvrt_device_description* description);
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

    /* Kernels: UNSUPPORTED says why there are none, and so do the verbs. */
    kv_status (*kernels)(const kvrt_device* device);
    /* Slots of a piece of a sequence of so many. */
    uint32_t (*attend_piece_slots)(uint32_t slots);
    /* Memory for partial results; once per device. */
    kv_status (*create_workspace)(kvrt_device* device, uint64_t bytes, void** out_address);
    /* Enqueued for an open step, also while its stream is captured. UNSUPPORTED: no kernel reads or
     * writes this. */
    kv_status (*write_rows)(kvrt_device* device, uint64_t step, const kvrt_write_rows* call);
    kv_status (*attend_rows)(kvrt_device* device, uint64_t step, kvrt_attend_rows* call);
} kvrt_plugin;

/* The symbol: a function that returns the table. */
typedef const kvrt_plugin* (*kvrt_plugin_entry)(void);
#define KVRT_CUDA_PLUGIN_ENTRY "kvrt_cuda_plugin"

#ifdef __cplusplus
}
#endif

#endif /* KVRT_DEVICE_PLUGIN_H */
