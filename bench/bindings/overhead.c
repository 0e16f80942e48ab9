/* The median time of a decode step, called from C: what the same program costs in the languages of
 * the bindings is compared with this. Prints
 *
 *   overhead language=c layers=32 sequences=64 median_us=...
 *
 * A step is begin, append, reserve, a write and an attend per layer, accept, end. The tensors are
 * the same in every step, so that nothing but the calls is in the loop. */
#define _POSIX_C_SOURCE 200809L

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "kvrt/kvrt.h"

enum {
    LAYERS = 32,
    SEQUENCES = 64,
    HEADS = 8,
    KV_HEADS = 2,
    DIM = 64,
    PROMPT = 128,
    PREFILL_ROWS = SEQUENCES * PROMPT, /* all prompts in one step */
    WARM_UP_STEPS = 20,
    TIMED_STEPS = 200
};

/* [rows, heads, dim]; a decode step uses the first SEQUENCES rows. */
static float queries[PREFILL_ROWS * HEADS * DIM], out[PREFILL_ROWS * HEADS * DIM];
static float keys[PREFILL_ROWS * KV_HEADS * DIM], values[PREFILL_ROWS * KV_HEADS * DIM];

static void check(kv_status status) {
    char message[512];
    if (status >= KV_OK) return;
    kv_last_error(message, sizeof message);
    fprintf(stderr, "overhead_c: %s: %s\n", kv_status_name(status), message);
    exit(1);
}

static void fill(float* data, size_t count) {
    for (size_t i = 0; i < count; ++i) data[i] = sinf(0.01f * (float)i);
}

static kv_tensor tensor(float* data, uint64_t rows, uint64_t heads) {
    kv_tensor view = KV_INIT(kv_tensor);
    view.data = data;
    view.dtype = KV_DTYPE_F32;
    view.rows = rows;
    view.heads = heads;
    view.dim = DIM;
    return view;
}

static kv_pool* create_pool(void) {
    kv_layer layers[LAYERS];
    for (int i = 0; i < LAYERS; ++i) {
        kv_struct_init(&layers[i], sizeof layers[i]);
        layers[i].query_heads = HEADS;
        layers[i].kv_heads = KV_HEADS;
        layers[i].key_dim = DIM;
        layers[i].key_format = KV_FORMAT_F16;
    }
    kv_model model = KV_INIT(kv_model);
    model.layers = layers;
    model.layer_count = LAYERS;
    kv_pool_config config = KV_INIT(kv_pool_config);
    config.arena_bytes = (uint64_t)1 << 30;
    config.block_tokens = 16;
    config.max_sequences = SEQUENCES;
    config.max_step_tokens = PREFILL_ROWS;
    config.threads = 1;
    kv_pool* pool;
    check(kv_pool_create(&config, &model, &pool));
    return pool;
}

/* One step that brings counts[i] tokens of sequence i, `rows` in all. */
static void run_step(kv_pool* pool, const kv_seq* sequences, const uint32_t* counts,
                     uint64_t rows) {
    const kv_tensor k = tensor(keys, rows, KV_HEADS), v = tensor(values, rows, KV_HEADS);
    const kv_tensor q = tensor(queries, rows, HEADS), o = tensor(out, rows, HEADS);
    kv_step* step;
    check(kv_step_begin(pool, &step));
    check(kv_step_append_batch(step, SEQUENCES, sequences, counts, NULL, NULL));
    check(kv_step_reserve(step, NULL));
    for (uint32_t layer = 0; layer < LAYERS; ++layer) {
        check(kv_write(step, layer, &k, &v));
        check(kv_attend(step, layer, &q, &o, NULL));
    }
    check(kv_step_accept_batch(step, SEQUENCES, sequences, counts));
    check(kv_step_end(step, NULL));
}

static double microseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

static int compare_times(const void* left, const void* right) {
    const double a = *(const double*)left, b = *(const double*)right;
    return (a > b) - (a < b);
}

int main(void) {
    kv_seq sequences[SEQUENCES];
    uint32_t prompts[SEQUENCES], ones[SEQUENCES];
    static double times[TIMED_STEPS];
    kv_pool* pool = create_pool();
    for (int i = 0; i < SEQUENCES; ++i) {
        check(kv_seq_create(pool, NULL, &sequences[i]));
        prompts[i] = PROMPT;
        ones[i] = 1;
    }
    fill(queries, sizeof queries / sizeof *queries);
    fill(keys, sizeof keys / sizeof *keys);
    fill(values, sizeof values / sizeof *values);

    run_step(pool, sequences, prompts, PREFILL_ROWS);
    for (int i = 0; i < WARM_UP_STEPS; ++i) run_step(pool, sequences, ones, SEQUENCES);
    for (int i = 0; i < TIMED_STEPS; ++i) {
        const double start = microseconds();
        run_step(pool, sequences, ones, SEQUENCES);
        times[i] = microseconds() - start;
    }
    qsort(times, TIMED_STEPS, sizeof *times, compare_times);
    printf("overhead language=c layers=%d sequences=%d median_us=%.1f\n", LAYERS, SEQUENCES,
           (times[TIMED_STEPS / 2 - 1] + times[TIMED_STEPS / 2]) / 2);
    kv_pool_release(pool);
    return 0;
}
