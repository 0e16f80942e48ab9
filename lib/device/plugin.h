/* What libkvrt.so and a device's plugin know of each other: one C struct of functions, which the
 * plugin hands out through the only symbol that it exports. C, so that both sides may be built by
 * different compilers, with different standard libraries.
 *
 * Offsets are into the arena, bytes. Every function that can fail returns a kv_status and leaves a
 * message; none waits for the device, but close, read and read_words. One thread at a time is
 * inside a device. */
#ifndef KVRT_DEVICE_PLUGIN_H
#define KVRT_DEVICE_PLUGIN_H

#include <stddef.h>
#include <stdint.h>

#include "kvrt/kvrt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rises with every change of what is below that an older side would not understand. */
#define KVRT_PLUGIN_VERSION 6u

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
    uint32_t tile_tokens;                      /* of tile-local formats: rows of a tile */
    uint32_t turned_pairs, turned_interleaved; /* how positions turn keys (affine4) */
    float turning_gain;
    /* Of the device. */
    const float* scales;        /* [kv_heads]; NULL: all are 1 */
    const float* channel_means; /* [kv_heads][dim], of affine4; the others of its constants, too */
    const float* channel_scales;
    const float* turning_table; /* [4][256][cosines, sines][turned_pairs] */
} kvrt_operand;

/* Where positions of slots that rounds have placed are, as position_store of memory/block_id.hpp.
 */
typedef struct kvrt_positions {
    uint32_t* base; /* of the device; NULL: no round has run */
    uint64_t reciprocal;
    uint32_t units_per_slab, blocks_per_slab, block_stride, block_tokens;
} kvrt_positions;

typedef struct kvrt_lane {
    const void* arena; /* of the device */
    uint32_t order;    /* tile_order */
    uint32_t block_tokens, kv_heads, block_bytes;
    uint32_t id_shift; /* ids of block tables count 64 bytes, shifted so far to the right */
    uint32_t unused;
    kvrt_operand keys, values;
    kvrt_positions positions;
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
    uint64_t* saturated_keys; /* of the device: [kv_heads], added to */
    uint64_t* saturated_values;
} kvrt_write_rows;

/* Leading slots of blocks into blocks of another layout: sealed, or opened again. Words of items
 * are an address in the device's table: block ids of source and target, which count 64 bytes, how
 * many slots, and how many of those hold rows that were coded before, which nobody counts anew. */
typedef struct kvrt_seal_blocks {
    const kvrt_lane* from;
    const kvrt_lane* to;
    const uint32_t* items; /* [count][4] */
    uint32_t count, unused;
    uint64_t* saturated_keys; /* as kvrt_write_rows */
    uint64_t* saturated_values;
} kvrt_seal_blocks;

/* How rows look at a lane: which layers do so alike shares a plan. */
typedef struct kvrt_attend_view {
    uint32_t group; /* query heads of a KV head */
    uint32_t window, window_sinks;
    uint32_t seals; /* first slots may lie in sealed blocks, which are launched apart */
} kvrt_attend_view;

/* What the lists of an attention are made of, by words: attend_sequence, attend_piece and
 * rows_piece of kernels/. */
typedef struct kvrt_attend_sequence {
    uint32_t table, first_row, rows, slots, explicit_slots, next_position;
    int32_t window_first;
    uint32_t first_partial, pieces;
    uint32_t sealed_slots; /* of whole blocks; kernels do not ask */
    uint32_t kept;         /* where weights are kept; of items: unused */
    uint32_t kept_rows;    /* of so many rows, the last ones */
} kvrt_attend_sequence;
typedef struct kvrt_attend_piece {
    uint32_t sequence, first_slot, end_slot, partial;
} kvrt_attend_piece;
typedef struct kvrt_rows_piece {
    uint32_t sequence, first_vector, vectors, first_slot, end_slot, partial;
} kvrt_rows_piece;

/* Parts of the lists that are launched together. What is [2] is of blocks as they are written, then
 * of sealed ones. */
typedef struct kvrt_attend_wave {
    uint32_t first_sequence, sequences;
    uint32_t first_piece[2], pieces[2];
    uint32_t first_row_piece[2], row_pieces[2];
    uint32_t joined_rows; /* most of a sequence with partial results; 0: nothing is joined */
    uint32_t kept;        /* entries for weights, of all query heads */
    uint32_t stretches;   /* of observed slots, which the library adds; plan_attention says 0 */
} kvrt_attend_wave;

/* The most that a step of so many items, rows, rows of an item and slots is cut into. */
typedef struct kvrt_attend_bounds {
    kvrt_attend_view view;
    uint32_t items, rows, item_rows, slots;
    uint32_t most_kept; /* entries for weights, as in kvrt_attend_plan */
    uint32_t sequences, pieces, row_pieces, joined_rows; /* out: entries of each list */
    uint32_t piece_slots;                                /* out: of the smallest piece */
    uint64_t partials;                                   /* out: partial results of a sequence */
} kvrt_attend_bounds;

/* A step's items are listed as sequences, and cut into pieces, in waves whose partial results
 * most_partials has room for: at least that of the bounds. By an item's own rows and slots alone.
 * Where weights of an item's last rows are kept, so many rows are a sequence that most_kept has
 * room for: an entry for each row and group of 16 slots, and one more for each row. */
typedef struct kvrt_attend_plan {
    kvrt_attend_view view;
    const kvrt_attend_sequence* items; /* but for first_partial and pieces */
    uint32_t item_count;
    uint32_t most_kept; /* at least kvrt_least_kept(most slots); 0: items keep nothing */
    uint64_t most_partials;
    kvrt_attend_sequence* sequences; /* out, all with room for what bounds say */
    kvrt_attend_piece* pieces[2];
    kvrt_rows_piece* row_pieces[2];
    kvrt_attend_wave* waves; /* [as sequences] */
    uint32_t sequence_count, piece_count[2], row_piece_count[2], wave_count;
} kvrt_attend_plan;

/* What a sequence's rows pay to slots of a lane, as attend_observer of attention/attend.hpp, from
 * the weights that were kept of them: a list, of one wave's behind the other's, and one of waves.
 * By words: observe_item and observe_wave of kernels/. */
typedef struct kvrt_observe_item {
    uint32_t array, before; /* of sums; before: -1 for none */
    uint32_t slots, slots_before, rows_of_decay;
    uint32_t first_sequence, sequences, first_stretch;
    uint32_t counts;
    float log2_decay;
} kvrt_observe_item;
typedef struct kvrt_observe_wave {
    uint32_t first_item, items, stretches, step;
} kvrt_observe_wave;
#define KVRT_OBSERVE_STRETCH 256u /* slots */

/* Sums of observed attention: arrays of `heads` rows of `slots` floats. In: sizes. */
typedef struct kvrt_sums_memory {
    uint64_t arrays, heads, slots;
    float* sums;     /* out, of the device: [arrays][heads][slots], not filled */
    uint32_t* marks; /* likewise, which step has written what; the kernel's */
} kvrt_sums_memory;

/* Rows of a step over a lane. A launch that is captured has grids for any step within `bounds`, but
 * for most_pieces at most, and LIMIT is returned where this one does not fit them, or takes more
 * than one wave; any other has grids for what the step has. The lists are in the table. */
typedef struct kvrt_attend_rows {
    const kvrt_lane* lane;
    const kvrt_lane* sealed; /* NULL: the lane does not seal */
    const uint32_t* block_table;
    uint64_t block_table_stride;
    const kvrt_attend_sequence* sequences;
    const kvrt_attend_piece* pieces[2];
    const kvrt_rows_piece* row_pieces[2];
    const kvrt_attend_wave* waves; /* of the host */
    uint32_t wave_count, most_pieces;
    kvrt_attend_bounds bounds;
    uint64_t most_partials; /* that the workspace is used for; even */
    void* workspace;        /* partial results, then as much as kept_entries say: 36 bytes each */
    uint64_t kept_at, kept_entries; /* bytes into the workspace; of one query head each */
    /* What is observed is in the lists. Where it is asked for, a launch that is captured is there
     * for any step, others if this one has items. */
    uint32_t observes, first_head; /* of the lane, in the sums */
    kvrt_sums_memory sums;
    const kvrt_observe_item* observe_items;
    const kvrt_observe_wave* observe_waves;
    kvrt_device_tensor queries, out;
    float* log_sum_exp; /* or NULL */
    uint32_t query_heads, row_heads;
    float scale, softcap;
    const float* sink_logits; /* of the device: [query_heads], or NULL; slopes too */
    const float* alibi_slopes;
    uint32_t window, window_sinks;
    uint32_t turned_pairs, turned_interleaved; /* by slots; 0: keys come rotated */
    float turning_gain;
    uint32_t unused;
    const float* turning_table;    /* of the device: [4][256][cosines, sines][turned_pairs] */
    uint32_t captured, unused_end; /* out: it was captured, instead of enqueued */
} kvrt_attend_rows;

#define KVRT_MOST_POSITIONS 16u

/* Statistics of queries on the device, as query_memory of kernels/gather_queries.hpp. In: sizes. */
typedef struct kvrt_query_memory {
    uint64_t length, heads; /* bands and query heads of all layers that have statistics */
    double* totals;         /* out, of the device: [places][6][length] */
    float* pending;         /* likewise; what rounds leave moments in */
    void* counts;           /* [places][heads][16 bytes] */
} kvrt_query_memory;

/* An item of a step in a layer, by words as gathered_item of kernels/: of a list in the table. */
typedef struct kvrt_gather_item {
    uint32_t place;   /* -1: it gathers nothing; the highest bit: nothing of what is there counts */
    uint32_t counted; /* the step whose pending sums count */
} kvrt_gather_item;
#define KVRT_GATHER_BEGINS (1u << 31)

/* What kv_attend gathers of a layer: a launch that is captured is there for any step of up to
 * `count` items, others if this one gathers. */
typedef struct kvrt_gather_queries {
    kvrt_query_memory memory;
    uint64_t first_band, first_head; /* of the layer */
    kvrt_device_tensor queries;
    uint32_t heads, bands, rotated, interleaved;
    double attention_factor;
    const double* inverse_frequencies; /* of the host */
    const kvrt_gather_item* items;     /* of the device, with what follows: in its table */
    const uint32_t* step;              /* its number */
    const uint32_t* query_start;       /* [count + 1] */
    const uint32_t* positions;         /* of rows */
    uint32_t count;
    uint32_t gathers;  /* 1: some items do */
    uint32_t captured; /* out: it was captured, instead of enqueued */
    uint32_t unused;
} kvrt_gather_queries;

/* What rounds of eviction work in: once per device. In: what the largest round is. */
typedef struct kvrt_round_memory {
    uint32_t most_slots, most_blocks;             /* of a lane */
    uint32_t lanes, most_rounds;                  /* of a sequence; sequences at once */
    uint32_t most_heads, most_rows;               /* of a lane: KV heads, rows of scores */
    uint32_t most_dim, unused;                    /* of keys and values */
    uint64_t phases;                              /* doubles of a sequence */
    uint64_t position_words[KVRT_MOST_POSITIONS]; /* of arrays; 0: none */
    uint32_t* positions[KVRT_MOST_POSITIONS];     /* out: of the device */
    uint64_t count_words;
    uint32_t* counts; /* out: of the host, and the device writes there */
} kvrt_round_memory;

/* What guards hold of a sequence, as guard_rules of retention/select.hpp; and what stays of the
 * candidates of a set whatever the others score: of each of `segments` equal parts of the positions
 * below segmented_tokens the best segment_quota, then value_reserve with values of widest range. */
typedef struct kvrt_round_guards {
    uint64_t next_position, prompt_tokens, sinks, recent;
    const uint64_t* pinned; /* of the host: [pinned_count][first, count] */
    uint32_t pinned_count, value_reserve;
    uint32_t segments, segment_quota; /* 0: none */
    uint64_t segmented_tokens;
} kvrt_round_guards;

/* How the rows of a sequence's lane are scored; what a scorer does not ask for is 0. */
typedef struct kvrt_round_scores {
    uint32_t scorer; /* KV_SCORER_* */
    uint32_t group, rotated, variants, interleaved;
    uint32_t layer, first_head; /* of draws, with the next two */
    uint32_t sinks;             /* LAGKV */
    uint64_t seed, round;
    double attention_factor;
    const double* phases; /* of the host */
    uint64_t phase_count;
    /* Of the device: what is known of the lane's queries, in arrays kvrt_round.moment_stride apart,
     * as query_moments of retention/query_statistics.hpp; with covariances where `spread` is not 0.
     */
    const float* moments;
    uint32_t pool_width, pool_maximum; /* of scorers by observed attention */
    uint32_t spread;
    /* 1: they are made first, of what kvrt_round.queries has in this place; `counted` as in
     * kvrt_gather_item. */
    uint32_t gathered, counted, place;
    uint64_t first_band, first_query_head; /* of the lane */
    float prior_share, redundancy; /* BLEND's; RKV has the latter. As the policy says, or default */
    uint32_t samples;              /* 1: survivors are drawn, by scores */
    float similarity;              /* RKV's, where its redundancy is exact; 0: it is linear */
} kvrt_round_scores;

/* Sums of observed attention of a lane: places of KV head 0 in kvrt_round.sums, and how many slots
 * have one; `before` are those of the window before. */
typedef struct kvrt_round_sums {
    uint64_t present, before; /* -1: none */
    uint32_t slots, slots_before;
    float unknown; /* what slots without one have: 0; of scores that the host gives +infinity */
    uint32_t unused;
} kvrt_round_sums;

/* One lane of one sequence. Tables are the host's, read in the call. */
typedef struct kvrt_round_lane {
    const kvrt_lane* lane;
    const kvrt_round_guards* guards;
    kvrt_round_scores scores;
    kvrt_round_sums sums;         /* move with their slots */
    const uint32_t* source_table; /* [blocks of `slots`] */
    const uint32_t* target_table; /* [blocks of `keep`]; may be the same */
    uint32_t slots, explicit_slots, keep;
    /* Of a lane that seals: the layout of blocks that the first slots are in, which are so many
     * before and afterwards; rows of slots below coded_slots were coded before. Counts as in
     * kvrt_seal_blocks. */
    uint32_t sealed_slots, sealed_after, coded_slots, unused;
    const kvrt_lane* sealed; /* NULL: it does not seal */
    uint64_t* saturated_keys;
    uint64_t* saturated_values;
    uint32_t kind; /* lanes of one kind are stored and scored alike but for the constants above */
    /* Sets of survivors, KV_SELECT_*: each head has its own, or all heads of lanes with one number
     * have one (PER_LAYER: sums of their scores; UNION: the greatest), or head h has that of number
     * set + h (PER_HEAD: sums). They hold the same tokens. */
    uint32_t selection;
    /* 0: lanes with one number lie side by side, and are of one kind. Else a bundle of lanes side
     * by side, of whatever kinds but of one selection, has sets in common, which are numbered from
     * 0; its scores join in the order of its lanes before any of it is compacted. */
    uint32_t bundle;
    uint64_t set;
    uint32_t places; /* what quotas and reserves are to fit in, with what guards hold: `keep`, or,
                      * where scores say that, what they may say at most */
    /* Where kvrt_round counts: the lane's own budget, slots of it that it keeps whatever others
     * have, budgets of heads of its layer that have no slots, and where the count goes. */
    uint32_t budget, floor, absent_budget;
    float threshold;
    uint32_t* count;
} kvrt_round_lane;

/* Words on the device. */
typedef struct kvrt_words {
    const uint32_t* words;
    uint64_t count;
} kvrt_words;

/* Lanes of one kind side by side; bundles behind the others. `counts`, an allocator that goes by
 * scores: lanes, all of which are in bundles, are not compacted. What each would keep is written to
 * its `count` when the step gets there; with ADAPTIVE a bundle has the lanes of a layer, a head
 * each, sequence by sequence. */
typedef struct kvrt_round {
    const kvrt_round_lane* lanes;
    uint32_t count;
    uint32_t done; /* out: so many were compacted, also when the call fails */
    uint64_t moment_stride;
    float* sums;          /* of the device: of observed attention */
    uint64_t sums_stride; /* floats between KV heads */
    kvrt_query_memory queries;
    uint32_t counts, unused; /* KV_ALLOCATE_*; 0: compacts */
} kvrt_round;

/* A lane of the layer that is scored. */
typedef struct kvrt_given_lane {
    const uint32_t* block_table; /* of the host: [blocks of `slots`], read in the call */
    uint64_t sums;               /* place of KV head 0 in kvrt_given_scores.sums */
    uint32_t slots, explicit_slots;
    uint32_t known; /* slots that have a score since an earlier call */
    uint32_t unused;
} kvrt_given_lane;

/* Scores of positions, of all KV heads of a layer, as give_scores of retention/observations.hpp. */
typedef struct kvrt_given_scores {
    const kvrt_lane* lane; /* all are stored alike */
    const kvrt_given_lane* lanes;
    uint32_t count;
    uint32_t on_device; /* 1: scores is an address of the device */
    uint64_t next_position, first_position, tokens;
    const float* scores; /* [count * kv_heads][tokens] */
    float* sums;         /* of the device, as in kvrt_round */
    uint64_t sums_stride;
} kvrt_given_scores;

/* As kv_cuda_scoring and kv_cuda_scoring_report of kv_cuda.h. */
typedef struct kvrt_scoring {
    uint32_t method, flags;
    uint64_t workspace_bytes;
} kvrt_scoring;
typedef struct kvrt_scoring_report {
    uint32_t method, flags;
    uint64_t workspace_bytes, kernel_cohorts, product_cohorts, shape_hits, shape_misses;
    uint32_t kernel_kinds, product_kinds, open_kinds, library_version;
    char reason[128];
} kvrt_scoring_report;

/* Of a table, in lines of 64 bytes: `lines` of them from `source` on become those from `target` on
 * too. */
typedef struct kvrt_plan_copy {
    uint32_t source, target, lines, unused;
} kvrt_plan_copy;

/* Where a lane's rows go: [rows] places of 64 bits from the line `mapping` on, of targets as those
 * of kvrt_write_rows from one line on, and of the lane's block table. */
typedef struct kvrt_lane_mapping {
    uint32_t targets, mapping, block_table, unused;
} kvrt_lane_mapping;

typedef struct kvrt_share_plans {
    uint64_t copies, mappings; /* words of the table where these lists are */
    uint32_t copy_count, most_lines;
    uint32_t lanes, rows;
    uint32_t block_table_stride, block_tokens;
} kvrt_share_plans;

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
                              void** out_address, const uint32_t** out_image);
    void (*write_table)(kvrt_device* device, uint64_t first, const uint32_t* words, uint64_t count);
    /* The device may have other words there than the image: all become -1 with the next upload. */
    void (*forget_table)(kvrt_device* device, uint64_t first, uint64_t count);
    kv_status (*upload_table)(kvrt_device* device, uint64_t step);

    /* Kernels: UNSUPPORTED says why there are none, and so do the verbs. */
    kv_status (*kernels)(const kvrt_device* device);
    void (*bound_attention)(kvrt_attend_bounds* bounds);
    void (*plan_attention)(kvrt_attend_plan* plan);
    /* The same, where the lists of the step before differ only in sequences' lengths: those lie in
     * the table, at word `sequences`, as many as the plan's counts say. 1: they are the plan's now,
     * its pieces and waves as they were. 0: nothing has changed. */
    uint32_t (*advance_attention)(kvrt_device* device, const kvrt_attend_plan* plan,
                                  uint64_t sequences);
    /* Copies within the table, and slot mappings, enqueued for an open step: none of the words that
     * are written is read. */
    kv_status (*share_plans)(kvrt_device* device, uint64_t step, const kvrt_share_plans* call);
    /* Memory for partial results; once per device. */
    kv_status (*create_workspace)(kvrt_device* device, uint64_t bytes, void** out_address);
    /* Memory for sums of observed attention; once per device. */
    kv_status (*create_sums)(kvrt_device* device, kvrt_sums_memory* memory);
    /* Enqueued for an open step, also while its stream is captured. UNSUPPORTED: no kernel reads or
     * writes this. */
    kv_status (*write_rows)(kvrt_device* device, uint64_t step, const kvrt_write_rows* call);
    kv_status (*attend_rows)(kvrt_device* device, uint64_t step, kvrt_attend_rows* call);

    /* Rounds of eviction. `open_round` goes on with a step that has ended, or begins one that the
     * host has no stream for: on that of an open step, else on one of the device's own; end_step
     * ends it. UNSUPPORTED: no kernel scores or moves such lanes. AGAIN, and TOO_LARGE for several
     * sequences: there is no room to upload all of it, or for what they have in common; nothing was
     * done. */
    kv_status (*create_rounds)(kvrt_device* device, kvrt_round_memory* memory);
    /* `sealed`: NULL, or the layout of blocks that are sealed. */
    kv_status (*check_round)(kvrt_device* device, const kvrt_lane* lane, const kvrt_lane* sealed,
                             uint32_t scorer);
    /* Memory for rows of lanes that seal, in f32, which are opened before they are scored, or coded
     * into other tiles: so many bytes, the first time it is asked for. At least those of a layer's
     * lanes, with all their slots. */
    kv_status (*create_opened)(kvrt_device* device, uint64_t bytes);
    kv_status (*open_round)(kvrt_device* device, uint64_t step);
    kv_status (*run_round)(kvrt_device* device, uint64_t step, kvrt_round* call);
    /* Into memory of the host, one behind the other: waits for the step. */
    kv_status (*read_words)(kvrt_device* device, uint64_t step, const kvrt_words* pieces,
                            uint64_t count, uint32_t* out);
    /* As copy, between addresses of the device. */
    kv_status (*copy_words)(kvrt_device* device, uint64_t step, uint32_t* target,
                            const uint32_t* source, uint64_t words);
    /* Not while the step's stream is captured: INVALID. */
    /* Memory for the statistics of so many sequences; and rows that are gathered into it. */
    kv_status (*create_queries)(kvrt_device* device, uint64_t places, kvrt_query_memory* memory);
    kv_status (*gather_queries)(kvrt_device* device, uint64_t step, kvrt_gather_queries* call);
    kv_status (*seal_blocks)(kvrt_device* device, uint64_t step, const kvrt_seal_blocks* call);

    /* Counters that kernels add to, 0 from the first step on: once per device. fetch enqueues a
     * copy of them for the host, unless one is on its way; arrived gives what has come since it was
     * last asked, as of the last poll, which stays until the next fetch; else NULL. */
    kv_status (*create_counters)(kvrt_device* device, uint64_t count, uint64_t** out_address);
    kv_status (*fetch_counters)(kvrt_device* device, uint64_t step);
    const uint64_t* (*arrived_counters)(kvrt_device* device);

    /* As check_round: does a kernel find the range of the lane's values? */
    kv_status (*check_value_ranges)(kvrt_device* device, const kvrt_lane* lane,
                                    const kvrt_lane* sealed);
    /* UNSUPPORTED: there is no library of matrix products, or no kernels. */
    kv_status (*set_scoring)(kvrt_device* device, const kvrt_scoring* wanted);
    void (*report_scoring)(const kvrt_device* device, kvrt_scoring_report* report);

    /* Scores by slot that the host gives by position, enqueued for an open step: once per device,
     * for so many bytes in flight, then as they come. AGAIN: there is no room until the device has
     * read what is on its way. */
    kv_status (*create_given)(kvrt_device* device, uint64_t bytes);
    kv_status (*give_scores)(kvrt_device* device, uint64_t step, const kvrt_given_scores* call);

    /* As inspected_memory (device/device.hpp), of the arena. A fill that fails is told by the next
     * call that enqueues. */
    void (*fill)(kvrt_device* device, uint64_t offset, uint64_t bytes, uint32_t value);
    kv_status (*read)(kvrt_device* device, uint64_t first, uint64_t stride, uint64_t count,
                      uint64_t bytes, void* out);
} kvrt_plugin;

/* The symbol: a function that returns the table. */
typedef const kvrt_plugin* (*kvrt_plugin_entry)(void);
#define KVRT_CUDA_PLUGIN_ENTRY "kvrt_cuda_plugin"

#ifdef __cplusplus
}
#endif

#endif /* KVRT_DEVICE_PLUGIN_H */
