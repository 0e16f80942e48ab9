/* kv_cuda.h: what pools on KV_DEVICE_CUDA have besides kvrt.h. It includes no CUDA header: a stream
 * is a pointer to the struct that CUstream and cudaStream_t point to.
 *
 * A pool is made on the device that is current for the calling thread, or on the first, in that
 * device's primary context (the one that the runtime API uses). Streams belong to that context. No
 * call leaves another context current than the caller's, none uses the default stream, and none
 * waits for the device, but kv_pool_release, kv_seq_get_scores, kv_seq_get_statistics,
 * kv_seq_save_statistics, kv_seq_fit_affine, kv_seq_get_positions where a policy has chosen tokens
 * by scores, and kv_pool_check of pools with KV_POOL_DEBUG.
 *
 * A step's work, the library's and that of the host's own kernels, is enqueued on one stream
 * between kv_cuda_step_use_stream and kv_step_end, which puts an event behind it. Blocks that the
 * step has read or written are reused only once that event has completed, so KV_POOL_HOST_FENCES is
 * needed only by hosts whose kernels still read afterwards. Steps begin and end outside of graph
 * captures.
 *
 * What this version does there: blocks, tables, forks and their copies, truncation, windows,
 * elastic memory, export to the host's own kernels (kv_tables.base is a device address; scales are
 * the host's), and kv_write and kv_attend, whose tensors and log_sum_exp are in device memory then:
 * for the formats that docs/device.md names, with plugins that have kernels for the device; others
 * are UNSUPPORTED. Both may be captured (LIMIT: the step has more than one launch takes). Formats
 * that are sealed and demotion need such a plugin, too; kv_layer_stats counts what the device had
 * done when a step last began or was reserved, and has a recoding_error of NaN where rows were
 * coded again. Under pressure_percent a step's end demotes, and runs rounds of policies, as on the
 * CPU; what they give up comes back once the step has passed.
 *
 * Policies and kv_compress: STREAMING, RANDOM, KEY_NORM, TRIATTENTION, KEYDIFF, LAGKV, VASE_SKETCH,
 * EXPECTED_ATTENTION, H2O, SCISSORHANDS, TOVA, SNAPKV, RKV, VASE_ATTENTION, HOST and BLEND, with
 * every selection, as docs/device.md says; their rounds are enqueued behind the step, on its
 * stream, and blocks return with it. kv_compress outside of steps goes to a stream of the pool's,
 * or that of an open step, which must not be captured then. The first policy takes device memory
 * for positions and scores, the first that reads layers that seal for opened rows,
 * kv_cuda_pool_set_scoring for matrix products. Of demoted layers a round may demote early what
 * guards do not hold; of what it codes again recoded_rows is the most that it may be, and
 * recoding_error NaN. Where scores say how many tokens stay (ADAPTIVE, THRESHOLD), the device
 * counts them first: kv_compress is AGAIN then, and a step that ends skips the round with it. It
 * moves when the counts have come, at the end of the sequence's next step or when kv_compress is
 * called again, and each head keeps as many; until then the sequence holds what it got in between,
 * too. Another policy, another round or kv_seq_truncate ends a count.
 *
 * Attention is observed there, as kv_attend enqueues it, or as a graph is replayed that it was
 * captured in: see KV_CUDA_TABLES_ATTENDED. What a step observes is settled when it is reserved: a
 * policy that is set later, with its sequence in the step, is observed from the next one on.
 * lost_attention is NaN then, and a fork copies what was observed, on the stream of an open step
 * (which must not be captured) or one of the pool's. max_observed_sequences takes device memory
 * when the pool is created: for each of them 12 bytes for every KV head and token of
 * max_tokens_per_sequence that a policy may choose, and room for a step's weights.
 *
 * Scores that the host gives (kv_seq_set_scores) are copied in the call, and go up behind all that
 * was enqueued: on the stream of an open step, which must not be captured, of the last one, or on
 * one of the pool's. AGAIN: there is no room until the device has read what is on its way; nothing
 * has changed then. The first policy of HOST takes pinned memory, and as much of the device, for
 * two calls with scores of max_tokens_per_sequence positions; one with more than both is TOO_LARGE.
 *
 * Statistics of queries are gathered as kv_attend is called. The first sequence that may gather
 * them takes device memory: for each of max_sequences 72 bytes for every band of every query head,
 * and 16 for the head. Graphs that kv_attend was captured in after that gather them, too. A fork
 * copies them, on the stream of an open step (which must not be captured then) or one of the
 * pool's.
 *
 * With KV_POOL_DEBUG blocks are filled on a stream of the pool's while no step uses them, which
 * whatever is enqueued next waits for. Where that is captured, and where an elastic pool gives
 * memory back, the host waits for the fills, which wait for no step.
 *
 * kv_plan answers as for the CPU, and needs no device. Its metadata_bytes leave out the image of
 * the tables on the device (see kv_cuda_tables), which takes as much there: for each of two steps
 * and each lane, max_step_sequences rows of max_tokens_per_sequence / block_tokens words of 4
 * bytes, and max_step_tokens of 20; for each layer up to 64 pieces of 16 to 40 bytes a sequence, of
 * what kv_attend does, 8 of what it gathers and, in pools that observe, 56 of that. Nor do they
 * count what the first policy takes, or matrix products.
 *
 * Once the device has failed, every call that needs it returns KV_DEVICE with the name of the first
 * CUDA error: release the pool. kv_step_end does so also where the step has ended, and only rounds
 * behind it met the failure. */
#ifndef KVRT_KV_CUDA_H
#define KVRT_KV_CUDA_H

#include "kvrt/kvrt.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;

/* A CUDA device that pools can be made on: the one that is current for the calling thread, or the
 * first. */
typedef struct kv_cuda_device {
    uint32_t struct_size, flags;
    const void *next;
    uint64_t memory_bytes; /* of the device */
    uint32_t ordinal;      /* as the driver counts */
    uint32_t compute_major, compute_minor;
    uint32_t multiprocessors;
    uint32_t driver_version; /* 13000: made for CUDA 13.0 */
    uint32_t elastic;        /* 1: it can map memory piece by piece, as KV_POOL_ELASTIC needs */
    uint32_t has_kernels;    /* 1: the plugin has code for it; 0: reason says why not */
    uint32_t reserved0;
    char name[64];
    char reason[128];
} kv_cuda_device;

/* Fills `device`, or says what is missing. Loads plugin and driver and starts the driver, so that
 * processes forked from this one afterwards cannot use CUDA; it takes no memory of the device.
 * Errors: UNSUPPORTED (there is no plugin, no driver or no device: kv_last_error says which, and
 * where it was looked for), DEVICE. Threads: safe. */
KV_API KV_MUST_CHECK kv_status kv_cuda_get_device(kv_cuda_device *device);

/* Whose device memory a pool lives in, instead of the driver's: that of an engine's own allocator,
 * for one. Called with the device's primary context current, by the thread that is inside
 * kv_cuda_pool_create or kv_pool_release, or inside the call that needs more for the first time, as
 * the first policy does; what is released is used by nothing any more. */
typedef struct kv_cuda_memory {
    uint32_t struct_size, flags;
    const void *next;
    void *user;
    /* An address of the device, or NULL: there is no room. */
    void *(*allocate)(void *user, size_t bytes, size_t alignment);
    void (*release)(void *user, void *memory, size_t bytes, size_t alignment);
} kv_cuda_memory;

/* As kv_pool_create, for a config on KV_DEVICE_CUDA, with all of the pool's device memory (arena,
 * tables, workspaces) from `memory`, which may be NULL; its functions are kept until the pool ends.
 * Errors: as kv_pool_create; INVALID (a config on the CPU, one of the two functions alone, an
 * address that is not aligned), UNSUPPORTED (KV_POOL_ELASTIC with `memory`: what was allocated
 * cannot be given back in parts), NO_MEMORY (allocate gave NULL). Threads: safe. */
KV_API KV_MUST_CHECK kv_status kv_cuda_pool_create(const kv_pool_config *config,
                                                   const kv_model *model,
                                                   const kv_cuda_memory *memory,
                                                   kv_pool **out_pool);

/* The stream of a step, before kv_step_reserve: what the step will enqueue is behind all that
 * earlier steps have, on whatever stream. Once per step.
 * Errors: INVALID (the pool is on the CPU, the step is reserved or has one; a stream that is being
 * captured, or the default stream; another open step is on another stream), AGAIN (too many steps
 * are in flight), DEVICE. Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_cuda_step_use_stream(kv_step *step, struct CUstream_st *stream);

enum {
    /* in: this step replays a graph in which the layer's kv_attend was captured without
       KV_ATTEND_NO_STATISTICS: what it observes and gathers counts. INVALID where none was, in this
       place, or only before a sequence first gathered statistics of queries, as one does now */
    KV_CUDA_TABLES_ATTENDED = 1u << 0
};

/* Tables of a step in device memory, as kv_step_export fills them, for a layer's lane. There are
 * two sets of them, one for each step that can be open at once; the addresses of a set never
 * change, so that kernels on them can be captured in a graph, one for each set. kv_step_reserve
 * enqueues what differs from the step before in the same set, in front of whatever the step's
 * stream gets next. What items, rows and blocks a step does not have is marked. Constants come from
 * kv_step_export (with no buffers: once, they stay too). */
typedef struct kv_cuda_tables {
    uint32_t struct_size, flags; /* KV_CUDA_TABLES_* */
    const void *next;
    uint32_t kv_head;            /* in: as in kv_tables */
    uint32_t place;              /* out: which set, 0 or 1 */
    const int32_t *block_table;  /* [max_step_sequences, block_table_stride]; -1 behind its end */
    const int64_t *slot_mapping; /* [max_step_tokens]; -1: no row */
    const int32_t *query_start;  /* [max_step_sequences + 1]; items that are not have no rows */
    const int32_t *kv_len;       /* [max_step_sequences]; 0: no item */
    const int32_t *positions;    /* [max_step_tokens] */
    uint64_t block_table_stride;
} kv_cuda_tables;

/* From kv_step_reserve until the step's end, for whatever is enqueued on its stream. The layer
 * counts as exported. kv_step_reserve returns AGAIN also when the device has too many uploads in
 * flight: nothing has changed then, and once it has caught up the call can be repeated.
 * Errors: INVALID. Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_cuda_step_tables(kv_step *step, uint32_t layer,
                                                   kv_cuda_tables *tables);

/* Bytes of device memory behind the pool's arena now. Elastic pools give theirs back once no step
 * in flight can read them. Errors: INVALID (the pool is on the CPU). Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_cuda_pool_memory(kv_pool *pool, uint64_t *out_bytes);

/* As kv_seq_set_scores, for scores in device memory: they are read behind all that `stream` has,
 * on which nothing may overwrite them before that. Errors: as kv_seq_set_scores (on the device
 * AGAIN, too: nothing has changed then); INVALID (the pool is on the CPU, a stream as
 * kv_cuda_step_use_stream refuses it), DEVICE. Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_cuda_seq_set_scores(kv_pool *pool, kv_seq seq, uint32_t layer,
                                                      uint64_t first_position, uint64_t tokens,
                                                      const float *scores,
                                                      struct CUstream_st *stream);

/* Who scores keys by TriAttention, for KV_SCORER_TRIATTENTION and in KV_SCORER_BLEND: a kernel of
 * the library's own, which a pool begins with; or matrix products by cuBLASLt of CUDA 13 or 12
 * (libcublasLt.so, which is loaded when a host first asks for it, and stays); or, by kinds of work
 * (format, dimensions, and amount in powers of 2), whichever of the two is faster on this device.
 * For that each is timed three times as rounds come, the fastest counts, and the choice is for
 * good; nobody waits for it. */
enum { KV_CUDA_SCORE_KERNEL = 0, KV_CUDA_SCORE_PRODUCTS = 1, KV_CUDA_SCORE_MEASURED = 2 };

/* Products may round keys and weights to 11 bits (TF32), where the device is faster then. */
enum { KV_CUDA_SCORING_TF32 = 1u << 0 };

typedef struct kv_cuda_scoring {
    uint32_t struct_size, flags; /* KV_CUDA_SCORING_* */
    const void *next;
    uint32_t method; /* KV_CUDA_SCORE_* */
    uint32_t reserved0;
    uint64_t workspace_bytes; /* of products, in device memory; 0: 32 MiB; at least 1 MiB */
} kv_cuda_scoring;

/* From the next round on. Scores of both are the formula's to f32's rounding of a sum (with 256
 * dimensions 3e-5 of the sum of its terms' magnitudes), with KV_CUDA_SCORING_TF32 those of products
 * to 1.1e-3 of it. KV_CUDA_SCORE_MEASURED may make another choice in another run, and of tokens
 * whose scores are as near as that keep others; the other two keep the same ones in each run.
 *
 * Workspace and flags are those of the first call with products, and stay until the pool ends. A
 * round by KV_CUDA_SCORE_PRODUCTS for which the library has no algorithm fails (UNSUPPORTED), and
 * so does one of which the workspace does not hold a head (LIMIT, with what it takes); a measured
 * one is the kernel's then, and the report says why.
 * Errors: INVALID (the pool is on the CPU, an unknown method, another workspace than before),
 * UNSUPPORTED (there is no such library, or no kernels: kv_last_error says which; the pool goes on
 * as before), NO_MEMORY, DEVICE. Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_cuda_pool_set_scoring(kv_pool *pool,
                                                        const kv_cuda_scoring *scoring);

typedef struct kv_cuda_scoring_report {
    uint32_t struct_size, flags;
    const void *next;
    uint32_t method;          /* KV_CUDA_SCORE_* */
    uint32_t library_version; /* as cublasLtGetVersion counts; 0: products were never asked for */
    uint64_t workspace_bytes; /* of device memory that products have */
    uint64_t kernel_cohorts, product_cohorts; /* lanes of one kind that were scored together */
    uint64_t shape_hits, shape_misses;        /* of products: descriptors that were there, or not */
    uint32_t kernel_kinds, product_kinds;     /* of work, whose choice has been made */
    uint32_t open_kinds;                      /* that are still being timed */
    uint32_t scoring_flags;                   /* KV_CUDA_SCORING_* */
    char reason[128]; /* why a measured round last was the kernel's without being timed; or "" */
} kv_cuda_scoring_report;

/* Errors: INVALID (the pool is on the CPU). Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_cuda_pool_get_scoring(kv_pool *pool,
                                                        kv_cuda_scoring_report *report);

#ifdef __cplusplus
}
#endif

#endif /* KVRT_KV_CUDA_H */
