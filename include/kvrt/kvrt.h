/* kvrt.h - libkvrt, the KV-cache runtime. C99; read it from top to bottom.
 *
 *   1 version and linkage      5 pool                    9 attention
 *   2 statuses and messages    6 sequences              10 retention: policies, compaction
 *   3 hooks of the host        7 steps                  11 statistics of queries
 *   4 the model                8 export of tables       12 counters, capacity, capabilities
 *
 * A program's life with the library:
 *
 *   kv_pool_create -> kv_seq_create -> [ kv_step_begin, kv_seq_append ..., kv_step_reserve,
 *       per layer: kv_write, kv_attend,  kv_step_end ] for each forward pass
 *   -> kv_compress or a policy -> kv_seq_release -> kv_pool_release
 *
 * Words. A *block* is the paging unit: block_tokens slots of one lane. A *lane* has its own block
 * table: each layer that stores keys and values is a lane, or, with KV_LAYER_LANE_PER_HEAD, each of
 * its KV heads. *position* is where a token stands
 * in the text and never changes; its *slot* may move. *retained* tokens are still stored, *seen*
 * ones have passed. Slots of a lane are always in ascending position.
 *
 * Conventions.
 * - Every call that can fail returns a kv_status; results come through out-parameters, which come
 *   last. After any error nothing has changed, unless the call says otherwise.
 * - Every struct starts with struct_size, flags, next. Set struct_size through KV_INIT(type) (or
 *   kv_struct_init from other languages), leave next NULL. Zero in a field means "the default".
 *   A smaller struct than this library knows is taken with defaults for the missing tail; a larger
 *   one only if its unknown tail is zero (else KV_UNSUPPORTED), and so are reserved fields. Structs
 *   the library fills are filled up to the caller's size.
 * - No pointer is kept past the call, unless its name says so (hooks are copied, their functions
 *   and user pointers are kept).
 * - Strides are signed 64-bit, in elements. Sizes are in bytes or tokens, as named.
 * - Threads: *safe* = any thread, any time; *external* = the caller serialises calls per pool (two
 *   at once give KV_INVALID). A pool created with KV_POOL_THREAD_SAFE turns *external* into *safe*.
 *   kv_pool_release comes last, when no other call is inside.
 */
#ifndef KVRT_KVRT_H
#define KVRT_KVRT_H

#include <stddef.h>
#include <stdint.h>

/* ---- 1. Version and linkage --------------------------------------------------------------- */

#define KVRT_VERSION_MAJOR 0
#define KVRT_VERSION_MINOR 1
#define KVRT_VERSION_PATCH 0
#define KVRT_VERSION (KVRT_VERSION_MAJOR * 10000 + KVRT_VERSION_MINOR * 100 + KVRT_VERSION_PATCH)

#if defined(_WIN32)
#define KV_API
#elif defined(__GNUC__)
#define KV_API __attribute__((visibility("default")))
#else
#define KV_API
#endif

#if defined(__GNUC__)
#define KV_MUST_CHECK __attribute__((warn_unused_result))
#else
#define KV_MUST_CHECK
#endif

#ifdef __cplusplus
/* In C++: `kv_layer layer = KV_INIT(kv_layer);` */
template <class struct_type>
inline struct_type kv_sized_struct() {
    struct_type value = struct_type();
    value.struct_size = static_cast<uint32_t>(sizeof(struct_type));
    return value;
}
#define KV_INIT(struct_type) kv_sized_struct<struct_type>()
extern "C" {
#else
/* In C: `kv_layer layer = KV_INIT(kv_layer);` */
#define KV_INIT(struct_type) \
    { .struct_size = (uint32_t)sizeof(struct_type) }
#endif

/* What every sized struct begins with. */
typedef struct kv_struct_header {
    uint32_t struct_size;
    uint32_t flags;
    const void *next; /* reserved for extensions; must be NULL */
} kv_struct_header;

/* Zeroes `object` and sets its struct_size: KV_INIT for languages without C macros.
 * Sizes below that of kv_struct_header are ignored. Threads: safe. */
KV_API void kv_struct_init(void *object, uint32_t struct_size);

/* KVRT_VERSION of the library that is loaded. Threads: safe. */
KV_API uint32_t kvrt_version(void);

/* ---- 2. Statuses and messages ------------------------------------------------------------- */

/* 0 is success, positive values are not failures, negative ones are errors in blocks of a hundred:
 * treat an unknown code as its category. */
typedef int32_t kv_status;

enum {
    KV_OK = 0,
    KV_INVALID = -100,     /* an argument or the order of calls is wrong; nothing changed */
    KV_UNSUPPORTED = -101, /* this build or this geometry cannot; also askable beforehand */
    KV_STALE = -200,       /* the handle's object is gone; nothing changed */
    KV_NO_SNAPSHOT = -201, /* what lies before that position is no longer stored; nothing changed */
    KV_AGAIN = -300,       /* not now: blocks will come back (kv_reserve_report says how many) */
    KV_TOO_LARGE = -301,   /* never fits this pool */
    KV_LIMIT = -302,       /* a limit given at creation is reached */
    KV_NO_MEMORY = -303,   /* the host's or the system's allocator refused */
    KV_DEVICE = -400,      /* the device or its driver failed */
    KV_IO = -500,          /* a file or a store could not be read or written */
    KV_CORRUPT = -501,     /* checksum, version or geometry does not match; nothing was taken */
    KV_INTERNAL = -600     /* a defect of the library: please report it */
};

enum {
    KV_CATEGORY_OK = 0,
    KV_CATEGORY_ARGUMENT = 1,
    KV_CATEGORY_STATE = 2,
    KV_CATEGORY_CAPACITY = 3,
    KV_CATEGORY_DEVICE = 4,
    KV_CATEGORY_IO = 5,
    KV_CATEGORY_INTERNAL = 6
};

/* "KV_AGAIN" and the like; "KV_UNKNOWN" for a code this library does not know. Threads: safe. */
KV_API const char *kv_status_name(kv_status status);
KV_API int32_t kv_status_category(kv_status status);

/* Copies this thread's last error message (one line, which argument, what was wrong, what would be
 * right) into `buffer`, cut to `capacity` - 1 bytes and terminated; returns the full length.
 * Every error sets it, success leaves it alone. Threads: safe. */
KV_API size_t kv_last_error(char *buffer, size_t capacity);

/* ---- 3. Hooks of the host ----------------------------------------------------------------- */

enum { KV_LOG_DEBUG = 1, KV_LOG_INFO = 2, KV_LOG_WARNING = 3, KV_LOG_ERROR = 4 };

/* Every hook is optional. They belong to one pool, and must outlive it.
 * allocate/release: all host memory of the pool but the arena. `bytes` > 0, `alignment` a power of
 *   two; NULL means refused. Called from kv_pool_create and kv_pool_release only.
 * log: one line, no newline; may come from any thread that is inside a call; must not call back.
 * now: monotonic nanoseconds, for the times in reports.
 * parallel_for: runs body(context, index) once for every index in [0, count), in any order, on any
 *   threads, and returns when all are done. Replaces the library's own thread pool. Results do not
 *   depend on it. */
typedef struct kv_hooks {
    uint32_t struct_size, flags;
    const void *next;
    void *user;
    void *(*allocate)(void *user, size_t bytes, size_t alignment);
    void (*release)(void *user, void *memory, size_t bytes, size_t alignment);
    void (*log)(void *user, int32_t level, const char *text, size_t length);
    uint64_t (*now)(void *user);
    void (*parallel_for)(void *user, uint32_t count, void (*body)(void *context, uint32_t index),
                         void *context);
} kv_hooks;

/* ---- 4. The model ------------------------------------------------------------------------- */

/* How keys and values are stored; kv_capabilities says which of these a library has. A row that
 * holds NaN or infinity becomes NaN: as a whole, or in the groups that hold them, which for keys of
 * KIVI are a channel of 32 tokens. Static fp8 keeps NaN where it is, and saturates infinity; f16,
 * bf16 and f32 keep both. KIVI and KVarN hold rows as f16 until their block is full, KVarN (and
 * KIVI with KV_STORAGE_ROTATE) rotated: what is infinite there is so for good. Rotated numbers can
 * be sqrt(dim) times as large as the largest of their row. */
enum {
    KV_FORMAT_DEFAULT = 0, /* f16 */
    KV_FORMAT_F32 = 1,
    KV_FORMAT_F16 = 2, /* magnitudes up to 65504, larger ones become infinite */
    KV_FORMAT_BF16 = 3,
    KV_FORMAT_FP8_E4M3 = 4,   /* times a static scale (kv_storage), which must be given; what is
                                 beyond 448 times the scale saturates, and is counted */
    KV_FORMAT_FP8_E5M2 = 5,   /* the same, up to 57344 times the scale */
    KV_FORMAT_FP8_TOKEN = 6,  /* e4m3 with a scale per token and head */
    KV_FORMAT_INT8_TOKEN = 7, /* 8-bit codes with a scale per token and head */
    KV_FORMAT_INT4_TOKEN = 8, /* 4-bit codes with a scale and a minimum per token and head */
    KV_FORMAT_Q8_0 = 9,       /* groups of 32 channels; in HND and NHD byte by byte as llama.cpp */
    KV_FORMAT_Q4_0 = 10,      /* stores them, in NATIVE with the scales behind the codes */
    KV_FORMAT_Q4_1 = 11,
    KV_FORMAT_NVFP4 = 12, /* e2m1, groups of 16 channels with an e4m3 scale */
    KV_FORMAT_MXFP4 = 13, /* e2m1, groups of 32 channels with a power of two */
    /* Keys of KIVI and all of KVARN share numbers among the tokens of a block: such rows are kept
       as f16 until their block is full, and are coded then (2402.02750, 2606.03458) */
    KV_FORMAT_KIVI4 = 14,  /* keys: groups of 32 tokens, by channel; values: of 32 channels */
    KV_FORMAT_KIVI2 = 15,  /* the same with 2-bit codes */
    KV_FORMAT_KVARN4 = 16, /* rotated, variances levelled over a block; block_tokens 64 or 128 */
    KV_FORMAT_KVARN2 = 17,
    KV_FORMAT_TURBO4 = 18, /* rotated; keys: norm and 16 levels of a normal distribution; values: */
    KV_FORMAT_TURBO3 = 19, /* a scale and a minimum per token and head (2504.19874); 3: 8 levels */
    KV_FORMAT_AFFINE4 = 20 /* keys alone: less a constant mean, rotated to their position (kv_rope
                              must be told), divided by a constant scale per channel (kv_storage),
                              spread by Hadamard's matrix, then as Q4_1 */
};

enum {
    KV_STORAGE_SCALE_ONE = 1u << 0, /* no static scales, and that is meant: 1.0 */
    KV_STORAGE_ROTATE = 1u << 1 /* store rows rotated by Hadamard's matrix (orthonormal, in blocks
                                   of the largest power of two that divides the dimensions), which
                                   spreads outliers; queries and outputs are rotated to match.
                                   Not for f32, f16, bf16 */
};

/* What the keys or the values of a layer are stored with, besides their format. Scales matter for
 * FP8_E4M3, FP8_E5M2 and NVFP4 only (NVFP4 takes 1.0 where none are given).
 *
 * AFFINE4 needs a mean and a scale per KV head and channel, and no other format takes them: means
 * of keys before rotation, scales for what differs from the rotated means. kv_seq_fit_affine
 * measures them. They are constants of the model, like its
 * weights: measured once, on text of its own, and the same in every pool and process that exchanges
 * bytes. A pool does not measure them on what it happens to see first: the bytes of a prompt would
 * depend on which request came first, so that a prefix could not be shared or kept, and an unlucky
 * first request would spoil all that follow. */
typedef struct kv_storage {
    uint32_t struct_size, flags; /* KV_STORAGE_* */
    const void *next;
    const float *scales;  /* [scale_count], finite and positive, copied */
    uint32_t scale_count; /* 1: of the layer; kv_heads: one each */
    uint32_t reserved0;
    const float *channel_means;  /* [channel_heads, channel_dim], before rotation, finite, copied */
    const float *channel_scales; /* the same; behind the rotation, finite and positive */
    uint32_t channel_heads;      /* kv_heads */
    uint32_t channel_dim;        /* key_dim */
} kv_storage;

enum { KV_ROPE_NONE = 0, KV_ROPE_HALF = 1, KV_ROPE_INTERLEAVED = 2 };

/* How the engine rotated the keys and queries it hands over, or, with KV_LAYER_CACHE_POSITIONS, how
 * the library is to rotate them. Needed by that, by TriAttention, and by keys in AFFINE4, where
 * style NONE must be said too.
 * HALF pairs dimension i with i + dimensions/2 (Llama, Qwen); INTERLEAVED pairs 2i with 2i+1. */
typedef struct kv_rope {
    uint32_t struct_size, flags;
    const void *next;
    uint32_t style;          /* KV_ROPE_* */
    uint32_t dimensions;     /* rotated dimensions, the first ones of a head; 0: all of key_dim */
    double theta;            /* base; 0: 10000. Ignored when inverse_frequencies is given */
    double attention_factor; /* factor on rotated queries and on rotated keys (YaRN); 0: 1 */
    const double *inverse_frequencies; /* [dimensions / 2], the model's actual ones, or NULL */
} kv_rope;

enum {
    KV_LAYER_SHARED = 1u << 0,         /* stores nothing: attends over the cache of shared_layer */
    KV_LAYER_LANE_PER_HEAD = 1u << 1,  /* each KV head is a lane of its own: policies may keep other
                                          numbers of tokens in each, and what one head gives up
                                          returns, whatever the others keep. Blocks are of one head
                                          then. Not with KV_LAYER_SHARED, whose lanes are the
                                          owner's */
    KV_LAYER_CACHE_POSITIONS = 1u << 2 /* keys and queries are handed over before rotation, keys are
                                          stored so, and kv_attend rotates them, as `rope` says, by
                                          slot: the k-th token that a KV head retains by k, a query
                                          by its own token's slot. So no distance exceeds what is
                                          retained (StreamingLLM, 2309.17453). All else goes by the
                                          text's positions: windows, ALiBi, policies, reports. Own
                                          kernels rotate by slot, too. Not with KV_LAYER_SHARED,
                                          which follows its owner */
};

/* One layer. Defaults fit a Llama-like layer once heads and dimensions are set. */
typedef struct kv_layer {
    uint32_t struct_size, flags; /* KV_LAYER_* */
    const void *next;
    uint32_t query_heads;  /* a multiple of kv_heads */
    uint32_t kv_heads;     /* 1 is MQA */
    uint32_t key_dim;      /* 32 to 256, a multiple of 8 */
    uint32_t value_dim;    /* 32 to 256, a multiple of 8; 0: key_dim */
    uint32_t key_format;   /* KV_FORMAT_* */
    uint32_t value_format; /* KV_FORMAT_*; 0: key_format's */
    uint32_t shared_layer; /* with KV_LAYER_SHARED: a layer before this one that owns its cache
                              and has the same kv_heads, key_dim and value_dim */
    uint32_t window;       /* a query at p sees positions > p - window; 0: all */
    uint32_t window_sinks; /* positions below this stay visible behind the window */
    uint32_t reserved0;
    float softmax_scale;       /* 0: 1 / sqrt(key_dim) */
    float logit_softcap;       /* logits become cap * tanh(logit / cap); 0: off */
    const float *sink_logits;  /* [query_heads]: a learned logit that only joins the denominator */
    const float *alibi_slopes; /* [query_heads]: slope * (key position - query position) is added */
    const kv_rope *rope;       /* NULL: not rotated, or not told */
    const kv_storage *key_storage;   /* NULL: the format needs nothing more */
    const kv_storage *value_storage; /* NULL: the format needs nothing more */
    /* *Demotion*: full blocks of older tokens are coded into a smaller format, in order from the
       oldest retained token, each row once, and their blocks return. Formats of the layer are F32,
       F16 or BF16 then. What is demoted stays so: compactions move its rows bit by bit. A sequence
       that goes on behind a demoted block which is not full, after kv_seq_truncate or where a
       compaction left fewer newer tokens than filled it, opens it, and codes its rows again with
       those that follow, which kv_layer_stats tells. Rows of operands whose demoted form is rotated
       are written rotated. */
    uint32_t demoted_key_format;   /* token-local, not AFFINE4; 0: nothing is demoted */
    uint32_t demoted_value_format; /* token-local, or value_format; 0: demoted_key_format's */
    uint32_t demote_after;         /* blocks behind the newest so many retained tokens are demoted
                                      at the end of steps and rounds; 0: only under pressure
                                      (kv_pool_config.pressure_percent > 0), before policies evict.
                                      Under pressure all full blocks are, of sequences that have
                                      most of them first, but for what other sequences read */
    uint32_t reserved1;
    const kv_storage *demoted_key_storage;   /* NULL: the format needs nothing more */
    const kv_storage *demoted_value_storage; /* NULL: the format needs nothing more */
} kv_layer;

typedef struct kv_model {
    uint32_t struct_size, flags;
    const void *next;
    const kv_layer *layers; /* [layer_count], all of the same struct_size */
    uint32_t layer_count;   /* 1 to 1024 */
    uint32_t reserved0;
} kv_model;

/* Formats that go well together; docs/formats.md says what they cost and lose. *Rotated* is
 * KV_STORAGE_ROTATE. *Spared* layers stay plain: in f32, f16 or bf16 as the layer says for keys and
 * for values, in f16 where it says another format, without storages. */
enum {
    KV_PRESET_NEAR_LOSSLESS = 1, /* int8_token, rotated; spared: short windows */
    KV_PRESET_BALANCED = 2,      /* keys int8_token, values int4_token, both rotated; spared: short
                                    windows, the first two and the last two layers that store */
    KV_PRESET_SMALLEST = 3       /* int4_token, rotated; spared: as in BALANCED */
};

/* Writes a preset into the caller's layers, which are as in kv_model: key_format, value_format,
 * key_storage and value_storage of each, whatever they held, and nothing else. The storages are
 * constants of the library. Layers that share another's cache are left alone. A short window is one
 * of at most 1,024 tokens. Sinks are not spared: they are stored as all tokens of their layer are.
 * Errors: INVALID, UNSUPPORTED (the preset). Threads: safe. */
KV_API KV_MUST_CHECK kv_status kv_model_apply_preset(kv_layer *layers, uint32_t layer_count,
                                                     uint32_t preset);

/* ---- 5. Pool ------------------------------------------------------------------------------ */

typedef struct kv_pool kv_pool;

enum { KV_DEVICE_DEFAULT = 0, KV_DEVICE_CPU = 1, KV_DEVICE_CUDA = 2 };

/* How the tiles of a block lie. Per block: for each KV head its key tile, then its value tile.
 * NATIVE is what this library's kernels like best: keys dim-major in groups of 16 slots
 *   ([slot / 16][dim][slot % 16]), values row-major ([slot][dim]).
 * HND and NHD are row-major for foreign kernels: [kv_head][slot][dim] and [slot][kv_head][dim],
 *   all keys of a block first, then all values. */
enum { KV_LAYOUT_NATIVE = 0, KV_LAYOUT_HND = 1, KV_LAYOUT_NHD = 2 };

enum {
    KV_POOL_ELASTIC = 1u << 0,     /* empty slabs are given back to the system */
    KV_POOL_THREAD_SAFE = 1u << 1, /* calls are serialised by a lock inside */
    KV_POOL_DEBUG = 1u << 2,       /* fill fresh and freed blocks with NaN patterns, put guards
                                      behind blocks for kv_pool_check */
    KV_POOL_HOST_FENCES = 1u << 3  /* the host's own kernels may still read after kv_step_end:
                                      a step's fence passes when kv_pool_pass_fence says so */
};

/* All that the pool will ever need besides the arena is allocated at creation, by these limits. */
typedef struct kv_pool_config {
    uint32_t struct_size, flags; /* KV_POOL_* */
    const void *next;
    uint64_t arena_bytes;             /* keys and values; rounded down to slabs of 2 MiB */
    uint32_t device;                  /* KV_DEVICE_* */
    uint32_t layout;                  /* KV_LAYOUT_* */
    uint32_t block_tokens;            /* 16 (default), 32, 64 or 128 */
    uint32_t max_sequences;           /* alive at once; default 64, at most 65536 */
    uint32_t max_tokens_per_sequence; /* retained at once; default 32768 */
    uint32_t max_step_sequences;      /* in one step; default max_sequences */
    uint32_t max_step_tokens;         /* in one step; default 8192 */
    uint32_t threads; /* of the library's own pool, the caller's included; 0: one per processor */
    const kv_hooks *hooks;           /* may be NULL */
    uint32_t max_observed_sequences; /* whose policies need observed attention, or scores of the
                                        host; default 0. Each takes host memory for 12 bytes per
                                        layer, KV head and token of max_tokens_per_sequence, of
                                        which the system backs what is used */
    uint32_t
        pressure_percent; /* when more of the arena's bytes are pinned at a step's end, sequences
                             outside of open steps give some back at once, until that is over:
                             blocks are demoted where layers say so, then policies run, of those
                             that retain most above their budget first; 0: never */
} kv_pool_config;

/* Creates a pool for one model on one device. On error *out_pool is NULL.
 * Errors: INVALID, UNSUPPORTED, TOO_LARGE (arena over 128 GiB), NO_MEMORY. Threads: safe. */
KV_API KV_MUST_CHECK kv_status kv_pool_create(const kv_pool_config *config, const kv_model *model,
                                              kv_pool **out_pool);

/* Ends the pool with all its sequences and steps. NULL is ignored. Threads: external. */
KV_API void kv_pool_release(kv_pool *pool);

/* With KV_POOL_HOST_FENCES: all steps with a fence number up to `fence` have been read to the end.
 * Blocks parked behind them become free. Errors: INVALID (no such flag, a step still open or not
 * begun). Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_pool_pass_fence(kv_pool *pool, uint64_t fence);

/* Walks everything: reference counts against tables, accounting, guards, order of positions.
 * Slow; for tests and for hunting defects. Errors: INTERNAL with what was found.
 * Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_pool_check(kv_pool *pool);

/* ---- 6. Sequences ------------------------------------------------------------------------- */

/* One request's cache: a generation-checked value, 0 is never valid. A handle of a released
 * sequence gives KV_STALE, and so does one of another pool, whose generations start elsewhere. */
typedef uint64_t kv_seq;

struct kv_policy;

enum {
    KV_SEQ_GATHER_STATISTICS = 1u << 0 /* gather query statistics also without a policy that needs
                                          them: for kv_seq_get_statistics and ..._save_... */
};

typedef struct kv_seq_config {
    uint32_t struct_size, flags; /* KV_SEQ_* */
    const void *next;
    const struct kv_policy *policy; /* copied; NULL: keep everything */
    uint64_t user_data;             /* returned by kv_seq_get_info */
} kv_seq_config;

/* Errors: INVALID, LIMIT (max_sequences), UNSUPPORTED (the policy). config may be NULL.
 * Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_seq_create(kv_pool *pool, const kv_seq_config *config,
                                             kv_seq *out_seq);

/* Ends a sequence, in any state. Inside an open step it takes effect for the host at once, and the
 * step still runs to its end. Idempotent: a stale handle returns KV_OK. Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_seq_release(kv_pool *pool, kv_seq seq);

/* Makes `count` children with the parent's accepted tokens (those of an open step not among them),
 * policy and statistics. Nothing is
 * copied until one of them writes into a block that others read. All or none are made.
 * Errors: INVALID, STALE, LIMIT. Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_seq_fork(kv_pool *pool, kv_seq parent, uint32_t count,
                                           kv_seq *out_children);

/* Forgets all tokens at positions >= `tokens_seen`, which becomes the next position. More than was
 * seen is INVALID. NO_SNAPSHOT: a window layer no longer holds what queries from there would see,
 * or a compaction has removed tokens before that position for the sake of later ones (behind the
 * last survivor of the last round, and within a prompt that was kept whole, it works).
 * INVALID inside an open step. Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_seq_truncate(kv_pool *pool, kv_seq seq, uint64_t tokens_seen);

/* Replaces the policy (NULL: none). It takes effect at the next step end or kv_compress.
 * Errors: INVALID, STALE, UNSUPPORTED. Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_seq_set_policy(kv_pool *pool, kv_seq seq,
                                                 const struct kv_policy *policy);

/* Protects positions [first, first + count) from every policy. At most 16 ranges a sequence
 * (LIMIT). kv_seq_unpin removes all of them. Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_seq_pin(kv_pool *pool, kv_seq seq, uint64_t first,
                                          uint64_t count);
KV_API KV_MUST_CHECK kv_status kv_seq_unpin(kv_pool *pool, kv_seq seq);

/* The four lengths are in tokens seen: capacity >= written >= accepted >= published. */
typedef struct kv_seq_info {
    uint32_t struct_size, flags;
    const void *next;
    uint64_t capacity;  /* positions for which slots are reserved */
    uint64_t written;   /* positions that the open step has been asked to write, or accepted */
    uint64_t accepted;  /* the next position after the last step end */
    uint64_t published; /* visible to prefix match */
    uint64_t blocks;    /* in this sequence's tables, shared ones included */
    uint64_t bytes;     /* of those blocks */
    uint64_t user_data;
    uint32_t in_step;        /* 1 while an open step holds it */
    uint32_t compactions;    /* rounds that have removed something */
    uint64_t rounds_skipped; /* rounds of its policy that were due and removed nothing */
    uint32_t last_outcome;   /* KV_COMPRESS_* of its last round; 0: none, or it failed */
    int32_t last_failure;    /* kv_status of its last round: KV_AGAIN when blocks were missing */
} kv_seq_info;

KV_API KV_MUST_CHECK kv_status kv_seq_get_info(kv_pool *pool, kv_seq seq, kv_seq_info *out_info);

typedef struct kv_seq_layer_info {
    uint32_t struct_size, flags;
    const void *next;
    uint64_t retained;      /* tokens stored now (accepted ones); of the KV head with the most */
    uint64_t blocks;        /* in this layer's tables; 0 for a layer that shares another's cache */
    uint64_t shared_blocks; /* of those, read by others too */
} kv_seq_layer_info;

KV_API KV_MUST_CHECK kv_status kv_seq_get_layer_info(kv_pool *pool, kv_seq seq, uint32_t layer,
                                                     kv_seq_layer_info *out_info);

/* What policies and kv_compress have done to one layer and KV head of a sequence. */
typedef struct kv_retention_info {
    uint32_t struct_size, flags;
    const void *next;
    uint32_t layer, kv_head;  /* in */
    uint64_t rounds;          /* that removed tokens here */
    uint64_t tokens_removed;  /* in all of them */
    uint64_t blocks_returned; /* to the allocator, by the lane: by the layer, or the head alone with
                                 KV_LAYER_LANE_PER_HEAD */
    double lost_attention;    /* share of the observed attention that the tokens had which the last
                                 round removed: 0 to 1; 0 when the policy observes none */
    double lost_attention_sum; /* of all rounds; each is a share of what was there then */
} kv_retention_info;

/* Errors: INVALID, STALE. Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_seq_get_retention(kv_pool *pool, kv_seq seq,
                                                    kv_retention_info *info);

/* Positions of the retained tokens of one KV head, ascending. Writes up to `capacity` of them
 * (out_positions may be NULL when it is 0) and the full count. Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_seq_get_positions(kv_pool *pool, kv_seq seq, uint32_t layer,
                                                    uint32_t kv_head, uint64_t capacity,
                                                    uint32_t *out_positions, uint64_t *out_count);

/* ---- 7. Steps ----------------------------------------------------------------------------- */

/* One forward pass over a batch: a transaction. Up to two steps of a pool are open at once, over
 * different sequences. A step handle dies with kv_step_end, kv_step_cancel or its pool. */
typedef struct kv_step kv_step;

/* Errors: LIMIT (two are open). Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_step_begin(kv_pool *pool, kv_step **out_step);

typedef struct kv_append_info {
    uint32_t struct_size, flags;
    const void *next;
    uint64_t first_position; /* of the appended tokens */
    uint32_t item;           /* this sequence's row in the exported tables */
    uint32_t first_row;      /* of its tokens in q, k, v and out */
} kv_append_info;

/* Adds `count` tokens of a sequence to the step: a prefill chunk, a decode token, or a token with
 * drafts to verify behind it. Their rows in q, k, v and out follow in the order of the calls.
 * token_ids may be NULL; out_info may be NULL.
 * Errors: INVALID (count 0, already in a step, after reserve), STALE, LIMIT (max_step_*).
 * Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_seq_append(kv_step *step, kv_seq seq, const uint32_t *token_ids,
                                             uint32_t count, kv_append_info *out_info);

/* kv_seq_append for a whole batch in one call, for languages where each call costs something:
 * counts[i] tokens of seqs[i], for i in [0, items). token_ids are those of all items one behind the
 * other, or NULL; out_infos is [items], all of the same struct_size, or NULL. All are appended, or
 * none; the message names the item. Errors: as kv_seq_append. Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_step_append_batch(kv_step *step, uint32_t items,
                                                    const kv_seq *seqs, const uint32_t *counts,
                                                    const uint32_t *token_ids,
                                                    kv_append_info *out_infos);

/* What reserve found. Blocks and bytes over all block classes. */
typedef struct kv_reserve_report {
    uint32_t struct_size, flags;
    const void *next;
    uint64_t need_blocks;
    uint64_t need_bytes;
    uint64_t free_bytes_now;         /* in blocks of all sizes; one size may have none */
    uint64_t free_bytes_after_fence; /* with what is parked behind open steps and fences */
    uint32_t items_that_fit;         /* the first so many items would have fitted */
    uint32_t item_status_capacity;
    kv_status *item_statuses; /* [item_status_capacity] or NULL: OK, AGAIN, TOO_LARGE, LIMIT each */
} kv_reserve_report;

/* Reserves slots for everything appended: all blocks, or none and an error. Copies the part of a
 * shared tail block that a sequence is about to write behind. On KV_AGAIN the step stays open:
 * release or compress others, or take items out with kv_step_remove, and call again.
 * report may be NULL. Errors: AGAIN, TOO_LARGE (a single sequence larger than the pool), LIMIT
 * (max_tokens_per_sequence), INVALID (twice, or nothing appended). Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_step_reserve(kv_step *step, kv_reserve_report *report);

/* Takes a sequence out of a step that has not been reserved. Items and rows behind it move up; a
 * round that kv_compress had left to the step's end is dropped. Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_step_remove(kv_step *step, kv_seq seq);

/* Accepts the first `count` of the tokens that the sequence appended in this step; the others are
 * rolled back at step end. Default: all. 0 is allowed. Errors: INVALID, STALE.
 * Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_step_accept(kv_step *step, kv_seq seq, uint32_t count);

/* kv_step_accept for several sequences in one call: the first counts[i] tokens of seqs[i]. All are
 * noted, or none; the message names the item. Errors: as kv_step_accept. Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_step_accept_batch(kv_step *step, uint32_t items,
                                                    const kv_seq *seqs, const uint32_t *counts);

typedef struct kv_step_report {
    uint32_t struct_size, flags;
    const void *next;
    uint64_t fence; /* this step's number, for kv_pool_pass_fence */
    uint64_t accepted_tokens;
    uint64_t window_blocks_returned; /* slid out of window layers */
    uint64_t compactions;            /* rounds run at this step end, by policy or deferred call */
    uint64_t compactions_skipped;    /* rounds due that had nothing to remove or no statistics */
    uint64_t blocks_returned;        /* to the allocator, by windows, rounds and what was rejected
                                        (some may wait for a fence); those that were exchanged for
                                        smaller ones count in demoted_blocks alone */
    uint64_t bytes_returned;
    uint64_t pressure_rounds;   /* rounds run because of kv_pool_config.pressure_percent */
    uint32_t last_skip_outcome; /* KV_COMPRESS_* of the last round skipped; 0: none, or it failed */
    int32_t last_skip_status;   /* its kv_status: KV_AGAIN when blocks were missing */
    uint64_t demoted_blocks;    /* coded into their layers' smaller formats */
    uint64_t demoted_bytes;     /* how many fewer are taken for that now */
} kv_step_report;

/* Ends the step: accepted tokens become part of their sequences, the rest is rolled back, blocks
 * behind windows return, policies that are due run. The step handle is gone afterwards, whatever
 * is returned, unless the call was not made at all: report is not a valid struct, or another thread
 * is inside a call. report may be NULL.
 * Errors: INVALID (not reserved, or a layer that stores was neither written through kv_write nor
 * exported to the host's kernels; the step is cancelled then).
 * Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_step_end(kv_step *step, kv_step_report *report);

/* Undoes the step: every sequence is as before kv_step_begin, and so is every counter but
 * steps_cancelled, peak_live_blocks and those of saturated elements. The handle is gone afterwards.
 * NULL is ignored. Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_step_cancel(kv_step *step);

/* ---- 8. Export of tables ------------------------------------------------------------------ */

/* For engines with their own kernels. The caller owns the buffers (NULL: not wanted) and says how
 * many elements each holds; kv_step_export fills them for one layer, and the constants below.
 *
 * A block id addresses memory: block = base + id * block_stride (ids need not be dense, and a block
 * is block_bytes long). Element [slot, head, dim] of the keys of a block lies at
 *     block + key_offset + element_size * ( (slot / slot_group) * key_stride_group
 *         + (slot % slot_group) * key_stride_slot + head * key_stride_head + dim * key_stride_dim )
 * and of the values likewise. Rows of a table count retained tokens: kv_len is not the query's
 * position + 1 once something was evicted. The rows of item i are query_start[i] to
 * query_start[i + 1], its row r sees the first kv_len[i] - (rows - 1 - r) slots. Positions of slots
 * (needed only for windows and ALiBi) come from slot_positions. */
typedef struct kv_tables {
    uint32_t struct_size, flags;
    const void *next;

    /* in: buffers and their capacities in elements */
    int32_t *block_table; /* [items, block_table_stride]; unused entries become -1 */
    uint64_t block_table_stride;
    uint64_t block_table_capacity;
    int32_t *indptr;         /* CSR: [items + 1] */
    int32_t *indices;        /* CSR: [indptr[items]] block ids */
    int32_t *last_page_len;  /* [items], 1 to block_tokens */
    int64_t *slot_mapping;   /* [tokens]: id * block_tokens + slot, where each new token goes */
    int32_t *query_start;    /* [items + 1] */
    int32_t *kv_len;         /* [items]: retained slots, this step's tokens included */
    int32_t *positions;      /* [tokens] of the new tokens */
    int32_t *slot_positions; /* [kv_heads, slot_indptr[items]] of every slot of every item */
    int32_t *slot_indptr;    /* [items + 1]: sums of kv_len */
    uint64_t indices_capacity;
    uint64_t item_capacity;  /* of last_page_len, kv_len; one more in indptr, query_start, ... */
    uint64_t token_capacity; /* of slot_mapping, positions */
    uint64_t slot_positions_capacity;

    /* out */
    uint64_t indices_count; /* needed sizes: also filled on KV_LIMIT */
    uint64_t slot_positions_count;
    uint32_t item_count;
    uint32_t token_count;
    uint32_t max_blocks; /* the longest row of block_table */
    uint32_t layout;
    uint32_t key_format;
    uint32_t value_format;
    uint32_t block_tokens;
    uint32_t slot_group;
    void *base;
    int64_t block_stride; /* bytes per id */
    int64_t block_bytes;
    int64_t key_offset; /* bytes from the block */
    int64_t value_offset;
    int64_t key_stride_group, key_stride_slot, key_stride_head, key_stride_dim;
    int64_t value_stride_group, value_stride_slot, value_stride_head, value_stride_dim;
    const float *key_scales; /* [kv_heads] static ones; NULL: the format has none */
    const float *value_scales;
    uint64_t fence; /* this step's number, for kv_pool_pass_fence, also if it is cancelled */
    uint32_t key_words, value_words;           /* of a row */
    uint32_t key_word_bytes, value_word_bytes; /* of a word: of an element, in plain formats */
    /* The first sealed_blocks of an item are in these formats, and are not to be written. All above
       is about the blocks behind them, where new rows go. Of layers with KIVI or KVARN: laid out
       [kv_head] at head_bytes from each other behind the offset (a tile each; the others as in
       `layout`); such operands are f16 before, rotated for KVARN. Of layers that demote: laid out
       as the strides at the end say; such operands are rotated before if they are so afterwards.
       In other layers nothing is sealed. */
    uint32_t sealed_key_format, sealed_value_format;
    int32_t *sealed_blocks; /* in: [item_capacity] or NULL */
    int64_t sealed_block_bytes;
    int64_t sealed_key_offset, sealed_value_offset;
    int64_t sealed_key_head_bytes, sealed_value_head_bytes;
    /* Hashes of what the bytes of a row depend on besides the row: format, dimensions, rotation,
       static scales, channel constants, (AFFINE4) kv_rope, CACHE_POSITIONS. Where they are equal,
       rows of one pool can be read in the other. They belong in keys of prefixes kept elsewhere. */
    uint64_t key_identity, value_identity;
    uint32_t kv_head; /* in: with KV_LAYER_LANE_PER_HEAD, whose lane all this is about, of one KV
                         head then; else 0 */
    uint32_t reserved0;
    /* Of sealed rows that are not in tiles; 0 of those that are. */
    uint32_t sealed_key_words, sealed_value_words;
    uint32_t sealed_key_word_bytes, sealed_value_word_bytes;
    int64_t sealed_key_stride_group, sealed_key_stride_slot;
    int64_t sealed_key_stride_head, sealed_key_stride_dim;
    int64_t sealed_value_stride_group, sealed_value_stride_slot;
    int64_t sealed_value_stride_head, sealed_value_stride_dim;
    const float *sealed_key_scales; /* [kv_heads] static ones; NULL: the format has none */
    const float *sealed_value_scales;
} kv_tables;

/* Valid from kv_step_reserve until the step's fence. A layer that shares another's cache exports
 * its owner's. Errors: INVALID (not reserved, kv_head), LIMIT (a buffer is too small; nothing but
 * the needed sizes is written). Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_step_export(kv_step *step, uint32_t layer, kv_tables *tables);

/* ---- 9. Attention ------------------------------------------------------------------------- */

enum { KV_DTYPE_F32 = 1, KV_DTYPE_F16 = 2, KV_DTYPE_BF16 = 3 };

/* [rows, heads, dim] in the caller's memory, with strides in elements: an engine's packed QKV
 * buffer is used where it lies. */
typedef struct kv_tensor {
    uint32_t struct_size, flags;
    const void *next;
    void *data;
    uint32_t dtype; /* KV_DTYPE_* */
    uint32_t reserved0;
    uint64_t rows, heads, dim;
    int64_t row_stride, head_stride, dim_stride; /* all 0: dense */
} kv_tensor;

/* Stores keys and values of all rows of the step in a layer. Keys come as attention will use them
 * (rotated, if the model rotates), or before rotation with KV_LAYER_CACHE_POSITIONS, and so do
 * queries. Call it once per layer that stores; a second call overwrites.
 * A layer that shares another's cache: INVALID. Errors: INVALID. Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_write(kv_step *step, uint32_t layer, const kv_tensor *keys,
                                        const kv_tensor *values);

enum {
    KV_ATTEND_NO_STATISTICS = 1u << 0 /* learn no query statistics from this call, and observe no
                                         attention: else each call of a step counts */
};

typedef struct kv_attend_options {
    uint32_t struct_size, flags; /* KV_ATTEND_* */
    const void *next;
    float *log_sum_exp; /* [rows, query_heads] dense, natural logarithm, or NULL */
} kv_attend_options;

/* out[row, head] = softmax(scale * q . K) V over the slots that the row may see: retained tokens at
 * positions up to its own, and within the window. q is [rows, query_heads, key_dim], out is
 * [rows, query_heads, value_dim]. The result is bit-identical for every thread count and whatever
 * else is in the batch (a prompt cut into other chunks may differ in the last bits).
 * options may be NULL. Errors: INVALID (also: the layer was not written). Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_attend(kv_step *step, uint32_t layer, const kv_tensor *queries,
                                         const kv_tensor *out, const kv_attend_options *options);

/* ---- 10. Retention ------------------------------------------------------------------------ */

enum {
    KV_SCORER_NONE = 0,
    KV_SCORER_TRIATTENTION = 1, /* expected future attention from query statistics (2604.04921) */
    KV_SCORER_STREAMING = 2,    /* sinks and the last (2309.17453; see KV_LAYER_CACHE_POSITIONS) */
    KV_SCORER_KEY_NORM = 3,     /* small key norms stay (2406.11430) */
    KV_SCORER_RANDOM = 4,       /* uniform, drawn anew each round: the baseline (2609.03430) */
    /* By what attention gave each token, which kv_attend observes (max_observed_sequences): */
    KV_SCORER_H2O = 5,          /* all of it, from all queries so far (2306.14048) */
    KV_SCORER_SCISSORHANDS = 6, /* how often, in the last queries, at least the mean (2305.17118) */
    KV_SCORER_TOVA = 7,         /* of the last query, over all heads of a layer (2401.06104) */
    KV_SCORER_SNAPKV = 8,       /* of the last queries, pooled over neighbours (2404.14469) */
    KV_SCORER_RKV = 9, /* that of the last 8 queries less redundancy of keys (2505.24133) */
    KV_SCORER_VASE_ATTENTION =
        10, /* SNAPKV, sampled, with a reserve of large values (2606.03928) */
    /* By keys and values alone: */
    KV_SCORER_VASE_SKETCH = 11, /* size of keys and values in random directions (2606.03928) */
    KV_SCORER_KEYDIFF = 12,     /* keys unlike the mean of all stay (2504.15364) */
    KV_SCORER_LAGKV = 13,       /* deviation within the ranges of the next tokens (2504.04704) */
    /* By query statistics, as TRIATTENTION: */
    KV_SCORER_EXPECTED_ATTENTION = 14, /* softmax of expected logits, times |v| (2510.00636) */
    /* By numbers that the host gives (kv_seq_set_scores): KVzap, DMS and their kin. */
    KV_SCORER_HOST = 15,
    /* Our own: what attention gave a token and its neighbours of late, what TRIATTENTION expects of
       the future, and how unlike others its key is. docs/retention.md says how it fares. */
    KV_SCORER_BLEND = 16
};

/* Which sets of survivors may differ. All keep the same number in every layer and head, whether or
 * not heads have lanes of their own. */
enum {
    KV_SELECT_DEFAULT = 0,            /* PER_LAYER_PER_HEAD; STREAMING is the same for all anyway */
    KV_SELECT_PER_LAYER_PER_HEAD = 1, /* each layer and KV head has its own set */
    KV_SELECT_PER_HEAD = 2,           /* one set per KV head, the same in all layers, by the mean of
                                         their scores */
    KV_SELECT_UNION = 3,              /* one set of tokens for the whole model, by the greatest of
                                         their scores */
    KV_SELECT_PER_LAYER = 4           /* one set per layer, for all its KV heads */
};

/* How many tokens each layer and head keeps of a round's budget. */
enum {
    KV_ALLOCATE_DEFAULT = 0,  /* UNIFORM */
    KV_ALLOCATE_UNIFORM = 1,  /* the budget, everywhere */
    KV_ALLOCATE_PYRAMID = 2,  /* falls from layer to layer around the budget (2406.02069) */
    KV_ALLOCATE_ADAPTIVE = 3, /* heads of a layer compete for their budgets' sum (Ada-KV,
                                 2407.11550): layers with KV_LAYER_LANE_PER_HEAD */
    KV_ALLOCATE_THRESHOLD = 4 /* what scores `threshold` or more, at most the budget; heads that
                                 share a lane keep what the one with the most does */
};

enum {
    KV_POLICY_PROTECT_PROMPT = 1u << 0,    /* positions below prompt_tokens, at least 1, stay */
    KV_POLICY_PROMPT_ON_TOP = 1u << 1,     /* and the protected prompt is not part of the budget */
    KV_POLICY_OFFSETS_MAX = 1u << 2,       /* TriAttention: max over future offsets, not mean */
    KV_POLICY_STATISTICS_ONLINE = 1u << 3, /* TriAttention: ignore statistics set on the pool */
    KV_POLICY_SAMPLE = 1u << 4,   /* survivors are drawn with probabilities as their scores, which
                                     must not be negative: scorers by attention but RKV,
                                     VASE_SKETCH, EXPECTED_ATTENTION, HOST. Not with THRESHOLD */
    KV_POLICY_POOL_MAX = 1u << 5, /* pool_width takes the greatest score, not the mean */
    KV_POLICY_EXACT_REDUNDANCY = 1u << 6, /* RKV: with the rule that spares the newest of similar
                                             keys; its cost is quadratic in the tokens */
    KV_POLICY_AT_PROMPT_END = 1u << 7     /* a round also when prompt_tokens are in, now or later */
};

/* Which tokens to retain in full layers; layers with a window keep it, and a model of no others is
 * refused a policy. Where protected tokens alone exceed the budget, it grows to hold them: the
 * newest are never dropped for lack of budget. Fields and flags of other scorers and allocators
 * than the policy's are INVALID, by name; `seed` may always be set. */
typedef struct kv_policy {
    uint32_t struct_size, flags; /* KV_POLICY_* */
    const void *next;
    uint32_t scorer;        /* KV_SCORER_* */
    uint32_t selection;     /* KV_SELECT_* */
    uint32_t budget;        /* tokens retained per layer and head after a round; must be > 0 */
    uint32_t every;         /* a round at step end when this many tokens were accepted since the
                               last, and more than the budget is retained; 0: kv_compress only */
    uint32_t prompt_tokens; /* the prompt's length, for PROTECT_PROMPT */
    uint32_t sinks;         /* positions below this stay */
    uint32_t recent;        /* the last so many tokens stay */
    uint32_t offset_max;    /* TriAttention: largest future offset, a power of two; 0: 65536 */
    uint32_t skip_layers;   /* the first so many layers are left whole (KEY_NORM: 2 is usual) */
    uint32_t reserved0;
    uint64_t seed;          /* of all draws: RANDOM, VASE_*, SAMPLE */
    uint32_t allocator;     /* KV_ALLOCATE_* */
    uint32_t slack;         /* a round at step end when more than this is retained above what a
                               round keeps (of heads or layers that share, in the mean); 0:
                               `every` alone decides */
    uint32_t window;        /* SCISSORHANDS, SNAPKV, RKV, VASE_ATTENTION: the last so many queries
                               count; 0: 400, 64, 8, 64. From twice as many on (and a step's rows)
                               older ones are forgotten: rounds every multiple of `window` tokens,
                               in steps of one, see exactly those. Of these and TOVA, steps of one
                               token before them are not observed where `every` or `slack` says
                               when the round comes, and pressure_percent is 0: a kv_compress
                               in between keeps the tokens that came since */
    uint32_t pool_width;    /* odd, at most 127: scores by attention, and of the host, become the
                               mean of so many neighbours; 0: the scorer's (SNAPKV, VASE_ATTENTION,
                               BLEND 5, RKV 7, maximum), else 1 */
    uint32_t observe_every; /* attention of one-token steps is observed in every so-manieth alone,
                               since that takes up to a twentieth of attention's time; 0: 4 for
                               H2O (whose authors observe all) and BLEND, 1 for the others */
    float decay;            /* H2O, BLEND: what a query counts after each one behind it; 0: 1 for
                               H2O, 0.97 for BLEND */
    float prior_share;      /* BLEND: share of what is expected; the rest is of what was; 0: 0.1 */
    float redundancy;       /* RKV: weight of redundancy, up to 1; 0: 0.9. BLEND: share of what is
                               kept for being unlike other keys (KEYDIFF), up to 1; 0: 0.3 */
    float similarity;       /* RKV, EXACT_REDUNDANCY: keys are similar above this cosine; 0: 0.5 */
    float floor_share;      /* ADAPTIVE: of its budget each head is sure of; 0: 0.2 */
    float threshold;        /* THRESHOLD */
    uint32_t steepness;     /* PYRAMID: the last layer has budget / steepness; 0: 20 */
    uint32_t value_reserve; /* so many tokens of each set whose values have the widest range stay,
                               if it holds as many; VASE_ATTENTION: 0 is a quarter of the budget */
    uint32_t segments;      /* the prompt in so many equal parts, at most 4096, of each of which */
    uint32_t segment_quota; /* at least so many tokens stay, the best, as far as there are places
                               for all parts; 0: off */
    uint32_t reserved1;
} kv_policy;

typedef struct kv_compress_options {
    uint32_t struct_size, flags;
    const void *next;
    const kv_policy *policy; /* for this round only; NULL: the sequence's own */
} kv_compress_options;

enum {
    KV_COMPRESS_DONE = 1,
    KV_COMPRESS_NOTHING = 2,  /* no more is retained than the policy keeps */
    KV_COMPRESS_DEFERRED = 3, /* the sequence is in an open step: runs at its end, after accept */
    KV_COMPRESS_NO_STATISTICS = 4,  /* TriAttention has seen no queries and has no file */
    KV_COMPRESS_NO_OBSERVATIONS = 5 /* kv_attend has observed nothing for this scorer, or the host
                                       has given no scores */
};

/* Sums over layers; tokens are counted per layer and KV head. */
typedef struct kv_compress_report {
    uint32_t struct_size, flags;
    const void *next;
    uint32_t outcome; /* KV_COMPRESS_* */
    uint32_t layers;  /* compacted */
    uint64_t tokens_before, tokens_after;
    uint64_t blocks_before, blocks_after; /* in the sequence's tables */
    uint64_t bytes_before, bytes_after;
    uint64_t blocks_returned; /* to the allocator; a block that others still read is not returned */
    uint64_t bytes_returned;
    uint64_t blocks_copied;    /* fresh ones, where the old were shared, or of another format */
    uint64_t slabs_given_back; /* elastic pools */
    uint64_t nanoseconds;
    uint64_t recoded_rows; /* of KIVI and KVARN: rows that left a tile and were coded again */
    double recoding_error; /* their change, root mean square, as a share of their own */
    double lost_attention; /* as in kv_retention_info, the mean of the heads that lost tokens */
} kv_compress_report;

/* Runs one round now: score, select, move survivors forward in order, return the emptied blocks.
 * Shared blocks are left as they are and survivors copied: KV_AGAIN if there are no blocks for
 * that, and nothing has changed then. Inside an open step the round runs at its end, if it is not
 * cancelled; the step's report counts it.
 * options and report may be NULL. Errors: INVALID (no policy; a selection common to layers or heads
 * that hold different tokens, or different numbers of KV heads), STALE, AGAIN, UNSUPPORTED.
 * Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_compress(kv_pool *pool, kv_seq seq,
                                           const kv_compress_options *options,
                                           kv_compress_report *report);

/* What a sequence under a policy takes once its rounds run, so that a scheduler can admit by it. Of
 * layers that the policy chooses of it retains at most tokens_steady per head while a step is open,
 * whatever its length (in the mean, with PYRAMID and ADAPTIVE, whose shares differ). */
typedef struct kv_policy_footprint {
    uint32_t struct_size, flags;
    const void *next;
    uint64_t step_tokens;        /* in: most tokens of the sequence in a step, a prefill chunk or a
                                    token with its drafts; 0: 1 */
    uint64_t tokens;             /* in: length of the sequence, for layers that the policy leaves
                                    whole; 0: tokens_steady, and full windows */
    uint64_t tokens_after_round; /* per layer and head: the budget, or what its guards hold; where
                                    layers or heads share, in the mean */
    uint64_t tokens_steady;      /* the most before the next one, an open step's included */
    uint64_t blocks_steady;      /* the most that it has in a step: windows hold the step's tokens
                                    besides, KIVI and KVARN have raw blocks for them */
    uint64_t bytes_steady;
} kv_policy_footprint;

/* Pinned ranges are not known here and come on top. Errors: INVALID (neither every nor slack: there
 * is no steady state), TOO_LARGE (max_tokens_per_sequence), UNSUPPORTED. Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_pool_policy_footprint(kv_pool *pool, const kv_policy *policy,
                                                        kv_policy_footprint *footprint);

/* Scores of one layer for positions [first_position, first_position + tokens), for KV_SCORER_HOST:
 * scores[kv_head * tokens + i], higher stays, NaN goes first. Positions that a head no longer
 * retains are passed over. A token that was given no score ranks above all that have one, and those
 * that came after the last call stay as the recent ones do. The sequence's policy must be one of
 * KV_SCORER_HOST. Errors: INVALID, STALE. Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_seq_set_scores(kv_pool *pool, kv_seq seq, uint32_t layer,
                                                 uint64_t first_position, uint64_t tokens,
                                                 const float *scores);

/* What a sequence's scorer has observed of one layer and KV head, or was given: a number per
 * retained token, in the order of kv_seq_get_positions. Attention is summed over the query heads of
 * the KV head, in this layer and those that share its cache, of all rows of steps that ended,
 * rejected drafts among them. Writes up to `capacity` of them (out_scores may be NULL when it is
 * 0), and the full count: 0 where nothing was observed. Errors: INVALID, STALE. Threads:
 * external. */
KV_API KV_MUST_CHECK kv_status kv_seq_get_scores(kv_pool *pool, kv_seq seq, uint32_t layer,
                                                 uint32_t kv_head, uint64_t capacity,
                                                 float *out_scores, uint64_t *out_count);

/* ---- 11. Statistics of queries ------------------------------------------------------------ */

/* Queries of all rows count that kv_attend saw in steps that ended, rejected drafts among them.
 *
 * What TriAttention knows of a layer's queries before rotation (and after q-norm): per query head
 * and band f of the rotation, the mean of the complex q_f and the mean of |q_f|. Dimensions that
 * are not rotated follow as bands of their own with a real mean. bands = rotated / 2 +
 * (key_dim - rotated). Arrays are [query_heads, bands], dense.
 *
 * Expected Attention works with the mean, and, where all three are known, with the variances of
 * the band's two dimensions (of one that is not rotated, the first) and their covariance, of all
 * queries seen. */
typedef struct kv_query_statistics {
    uint32_t struct_size, flags;
    const void *next;
    uint32_t layer;
    uint32_t query_heads;
    uint32_t bands;
    uint32_t reserved0;
    uint64_t tokens; /* how many queries were averaged */
    float *mean_real;
    float *mean_imaginary;
    float *mean_magnitude;
    float *variance_real; /* these three: all or none */
    float *variance_imaginary;
    float *covariance;
} kv_query_statistics;

/* Gives the pool a layer's statistics (copied); they serve every sequence whose policy does not
 * say STATISTICS_ONLINE. Errors: INVALID. Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_pool_set_statistics(kv_pool *pool,
                                                      const kv_query_statistics *statistics);

/* Reads what a sequence has gathered so far into the caller's arrays: set layer, query_heads, bands
 * and the pointers. Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_seq_get_statistics(kv_pool *pool, kv_seq seq,
                                                     kv_query_statistics *statistics);

/* A file with the statistics of every layer, the rotation they hold for, and a checksum.
 * save writes what `seq` has gathered; load sets them on the pool, all layers or none.
 * Errors: IO, CORRUPT (also: another geometry or rotation), STALE, INVALID. Threads: external. */
KV_API KV_MUST_CHECK kv_status kv_seq_save_statistics(kv_pool *pool, kv_seq seq, const char *path);
KV_API KV_MUST_CHECK kv_status kv_pool_load_statistics(kv_pool *pool, const char *path);

/* The constants of AFFINE4 for one layer, from keys that a sequence holds. An engine reads some
 * text with a pool that stores keys in f16, fits every layer, keeps the numbers with the model, and
 * creates its pools with them (kv_storage). Some hundred tokens suffice; texts of the kind that
 * will be read are best. */
typedef struct kv_affine_fit {
    uint32_t struct_size, flags;
    const void *next;
    uint32_t layer;    /* in */
    uint32_t kv_heads; /* in: the layer's, */
    uint32_t key_dim;  /* in: as the sizes of the arrays */
    uint32_t reserved0;
    uint64_t first_position; /* in: tokens before it are left out */
    uint64_t tokens;         /* in: positions from there on; 0: all */
    float *channel_means;    /* out: [kv_heads, key_dim] */
    float *channel_scales;   /* out: the same */
    uint64_t tokens_used;    /* out: of the KV head that holds the fewest, also on KV_LIMIT */
    uint64_t identity;       /* out: key_identity (kv_tables) of a layer stored with them, all KV
                                heads in one lane */
} kv_affine_fit;

/* Means are those of the retained keys, turned back to before rotation; a scale is the square root
 * of the standard deviation of what differs from them, behind the rotation (errors grow with the
 * scale, and with the spread that it leaves: their sum over the channels is least there), of at
 * least 1/64 of the head's, so that a channel that does not vary has one too. Both channels of a
 * rotary pair have one scale, since rotation mixes them. Sums are in double. A layer that shares
 * another's cache shows its owner's. After an error the arrays hold nothing of use. Errors:
 * INVALID (no kv_rope; keys that are not finite), STALE, LIMIT (fewer than 64 tokens). Threads:
 * external. */
KV_API KV_MUST_CHECK kv_status kv_seq_fit_affine(kv_pool *pool, kv_seq seq, kv_affine_fit *fit);

/* ---- 12. Counters, capacity, capabilities ------------------------------------------------- */

/* A snapshot. For the pool and for each class of blocks:
 *   total = free + cached + pinned + parked + loading.
 * A block class has one size; total counts the blocks carved from the slabs it holds now. */
typedef struct kv_class_stats {
    uint32_t struct_size, flags;
    const void *next;
    uint64_t block_bytes;
    uint64_t blocks_per_slab;
    uint64_t slabs;
    uint64_t total, free, cached, pinned, parked, loading;
} kv_class_stats;

typedef struct kv_pool_stats {
    uint32_t struct_size, flags;
    const void *next;
    uint64_t slab_bytes;
    uint64_t slabs_total, slabs_free, slabs_resident; /* resident: backed by memory now */
    uint64_t arena_bytes;                             /* slabs_total * slab_bytes */
    uint64_t live_bytes;                              /* of pinned blocks */
    uint64_t live_blocks, peak_live_blocks;
    uint64_t total, free, cached, pinned, parked, loading;      /* blocks, over all classes */
    uint64_t blocks_allocated, blocks_returned, bytes_returned; /* since creation */
    uint64_t blocks_returned_by_compaction, bytes_returned_by_compaction;
    uint64_t compactions, compactions_skipped;
    uint64_t slabs_given_back;
    uint64_t steps_ended, steps_cancelled, tokens_accepted;
    uint64_t host_allocations; /* through the allocator hook or the library's own allocator */
    uint32_t sequences, open_steps, classes, reserved0;
    uint64_t metadata_bytes; /* host memory besides the arena */
} kv_pool_stats;

/* Threads: safe, also without KV_POOL_THREAD_SAFE: the values belong to one moment. */
KV_API KV_MUST_CHECK kv_status kv_pool_get_stats(kv_pool *pool, kv_pool_stats *out_stats);
KV_API KV_MUST_CHECK kv_status kv_pool_get_class_stats(kv_pool *pool, uint32_t class_index,
                                                       kv_class_stats *out_stats);

/* Of one layer: how many elements written since creation, in steps that were cancelled too, were
 * beyond the largest number of their format and scale, by KV head. They were stored as that number.
 * Static fp8 is where it happens: a layer whose counts grow needs other scales, or a format that
 * scales each token. NVFP4 and MXFP4 round what is up to 8 times a group's scale to 6 times it, and
 * count only what is beyond 8. */
typedef struct kv_layer_stats {
    uint32_t struct_size, flags;
    const void *next;
    uint32_t layer;         /* in */
    uint32_t head_capacity; /* in: of the arrays */
    uint32_t kv_heads;      /* out, also on KV_LIMIT */
    uint32_t reserved0;
    uint64_t *saturated_keys;   /* [head_capacity] or NULL */
    uint64_t *saturated_values; /* [head_capacity] or NULL */
    uint64_t recoded_rows; /* since creation, as in kv_compress_report; also after going back */
    double recoding_error;
} kv_layer_stats;

/* A layer that shares another's cache shows its owner's. Errors: INVALID, LIMIT (head_capacity).
 * Threads: safe. */
KV_API KV_MUST_CHECK kv_status kv_pool_get_layer_stats(kv_pool *pool, kv_layer_stats *stats);

/* Ask before you buy. In: sequences, tokens_per_sequence (retained) and layer. Out: the rest.
 *
 * The inverse question, how much memory that takes, needs no arena: with config->arena_bytes 0 the
 * fields that say what fits in it are 0, and metadata_bytes is that of a pool with an arena of
 * arena_bytes_needed (0: larger than a pool can be). Neither sequences nor tokens_per_sequence are
 * held to the config's limits here, and what fits may be more than they allow.
 *
 * A sequence of n retained tokens takes at most full_bytes_per_token for each of n tokens, rounded
 * up to whole blocks, and constant_bytes_per_sequence. All figures are those between steps: within
 * one, a layer with a window holds the step's rows besides, and KIVI and KVARN those that are not
 * yet coded; one raw block of theirs is counted for each sequence and layer. */
typedef struct kv_plan_report {
    uint32_t struct_size, flags;
    const void *next;
    uint64_t sequences;                   /* in; 0: config's max_sequences */
    uint64_t tokens_per_sequence;         /* in; 0: config's max_tokens_per_sequence */
    uint64_t bytes_per_token;             /* over all layers, full blocks, windows not yet full */
    uint64_t bytes_per_sequence;          /* of that length, whole blocks, windows respected */
    uint64_t arena_bytes_needed;          /* for all those sequences, whole slabs */
    uint64_t sequences_that_fit;          /* of that length in config->arena_bytes */
    uint64_t tokens_that_fit;             /* of one sequence alone in config->arena_bytes */
    uint64_t metadata_bytes;              /* host memory that kv_pool_create will allocate */
    uint64_t bytes_per_block;             /* block_tokens tokens of a sequence, over all layers */
    uint64_t blocks_per_sequence;         /* of that length, over all layers */
    uint64_t full_bytes_per_token;        /* of layers without a window: what a token adds to a
                                             sequence whose windows are full */
    uint64_t constant_bytes_per_sequence; /* of full windows, and raw blocks of KIVI and KVARN */
    uint64_t tokens_that_fit_each;        /* of each of `sequences` in config->arena_bytes */
    uint64_t tokens_by_bytes;             /* config->arena_bytes / bytes_per_token: of all sequences
                                             together, were blocks not whole and no window full */
    uint32_t layer;                       /* in: the one that the last two are of */
    uint32_t reserved0;
    uint64_t layer_bytes_per_block;    /* 0: it shares another's cache */
    uint64_t layer_bytes_per_sequence; /* of that length */
} kv_plan_report;

/* Creates a pool's tables and takes them away again; of the arena it touches nothing.
 * Errors: as kv_pool_create, but for arena_bytes 0. Threads: safe. */
KV_API KV_MUST_CHECK kv_status kv_plan(const kv_pool_config *config, const kv_model *model,
                                       kv_plan_report *report);

typedef struct kv_capabilities_report {
    uint32_t struct_size, flags;
    const void *next;
    uint64_t formats;    /* bit KV_FORMAT_* set: keys can be stored so (and values, but for
                            AFFINE4) */
    uint64_t devices;    /* bit KV_DEVICE_* */
    uint64_t layouts;    /* bit KV_LAYOUT_* */
    uint64_t scorers;    /* bit KV_SCORER_* */
    uint64_t selections; /* bit KV_SELECT_* */
    uint32_t min_head_dim, max_head_dim, head_dim_multiple, max_layers;
    char simd_target[32]; /* what the kernels run on here, such as "AVX3_ZEN4" */
} kv_capabilities_report;

/* Threads: safe. */
KV_API KV_MUST_CHECK kv_status kv_capabilities(kv_capabilities_report *out_report);

enum { KV_LIVE_POOLS = 1, KV_LIVE_SEQUENCES = 2, KV_LIVE_STEPS = 3 };

/* How many objects of a kind are alive in this process, over all pools: nothing is, when a program
 * has released all that it made. 0 for an unknown kind. Threads: safe. */
KV_API uint64_t kv_live_count(uint32_t kind);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVRT_KVRT_H */
