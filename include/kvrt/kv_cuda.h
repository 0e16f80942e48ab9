/* kv_cuda.h: what pools on KV_DEVICE_CUDA have besides kvrt.h. It includes no CUDA header: a stream
 * is a pointer to the struct that CUstream and cudaStream_t point to.
 *
 * A pool is made on the device that is current for the calling thread, or on the first, in that
 * device's primary context (the one that the runtime API uses). Streams belong to that context. No
 * call leaves another context current than the caller's, none uses the default stream, and none
 * waits for the device, but kv_pool_release.
 *
 * A step's work, the library's and that of the host's own kernels, is enqueued on one stream
 * between kv_cuda_step_use_stream and kv_step_end, which puts an event behind it. Blocks that the
 * step has read or written are reused only once that event has completed, so KV_POOL_HOST_FENCES is
 * needed only by hosts whose kernels still read afterwards. Steps begin and end outside of graph
 * captures.
 *
 * What this version does there: blocks, tables, forks and their copies, truncation, windows,
 * elastic memory, export to the host's own kernels (kv_tables.base is a device address; scales are
 * the host's). kv_write, kv_attend, policies, kv_compress, kv_seq_fit_affine, formats that are
 * sealed, demotion, KV_POOL_DEBUG, max_observed_sequences and pressure_percent are UNSUPPORTED.
 *
 * kv_plan answers as for the CPU, and needs no device; its metadata_bytes leave out what the plugin
 * takes itself, some 3 KiB and, in an elastic pool, 24 bytes for each 2 MiB of the arena.
 *
 * Once the device has failed, every call that needs it returns KV_DEVICE with the name of the first
 * CUDA error: release the pool. */
#ifndef KVRT_KV_CUDA_H
#define KVRT_KV_CUDA_H

#include "kvrt/kvrt.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;

/* The stream of a step, before kv_step_reserve: what the step will enqueue is behind all that
 * earlier steps have, on whatever stream. Once per step.
 * Errors: INVALID (the pool is on the CPU, the step is reserved or has one; a stream that is being
 * captured, or the default stream; another open step is on another stream), AGAIN (too many steps
 * are in flight), DEVICE. Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_cuda_step_use_stream(kv_step *step, struct CUstream_st *stream);

/* Bytes of device memory behind the pool's arena now. Elastic pools give theirs back once no step
 * in flight can read them. Errors: INVALID (the pool is on the CPU). Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_cuda_pool_memory(kv_pool *pool, uint64_t *out_bytes);

#ifdef __cplusplus
}
#endif

#endif /* KVRT_KV_CUDA_H */
