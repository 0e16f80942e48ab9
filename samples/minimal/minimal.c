/* The whole life of a cache in plain C: a pool, a sequence, a prompt, a decode loop, a compaction,
 * what came back, the end. A real engine computes keys, values and queries; here they are waves. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "kvrt/kvrt.h"

enum { LAYERS = 4, HEADS = 8, KV_HEADS = 2, DIM = 64, PROMPT = 1000, DECODED = 200, BUDGET = 256 };

static float keys[PROMPT * KV_HEADS * DIM], values[PROMPT * KV_HEADS * DIM];
static float queries[PROMPT * HEADS * DIM], out[PROMPT * HEADS * DIM];

/* Ends the program with the library's message when a call failed. */
static void check(kv_status status) {
    char message[256];
    if (status >= 0) return;
    kv_last_error(message, sizeof message);
    fprintf(stderr, "%s: %s\n", kv_status_name(status), message);
    exit(1);
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

/* One forward pass over `rows` new tokens of one sequence. */
static void forward(kv_pool* pool, kv_seq seq, uint32_t rows) {
    const kv_tensor k = tensor(keys, rows, KV_HEADS), v = tensor(values, rows, KV_HEADS);
    const kv_tensor q = tensor(queries, rows, HEADS), o = tensor(out, rows, HEADS);
    kv_append_info info = KV_INIT(kv_append_info);
    kv_step* step;
    check(kv_step_begin(pool, &step));
    check(kv_seq_append(step, seq, NULL, rows, &info));
    check(kv_step_reserve(step, NULL));
    for (uint32_t layer = 0; layer < LAYERS; ++layer) {
        for (uint32_t i = 0; i < rows * KV_HEADS * DIM; ++i) {
            keys[i] = sinf(0.01f * (float)(info.first_position + i + layer));
            values[i] = cosf(0.01f * (float)(info.first_position + i + layer));
        }
        for (uint32_t i = 0; i < rows * HEADS * DIM; ++i) queries[i] = sinf(0.02f * (float)i);
        check(kv_write(step, layer, &k, &v));
        check(kv_attend(step, layer, &q, &o, NULL));
    }
    check(kv_step_end(step, NULL));
}

int main(void) {
    kv_layer layers[LAYERS] = {KV_INIT(kv_layer)};
    for (int i = 0; i < LAYERS; ++i) {
        kv_struct_init(&layers[i], sizeof layers[i]);
        layers[i].query_heads = HEADS;
        layers[i].kv_heads = KV_HEADS;
        layers[i].key_dim = DIM;
    }
    kv_model model = KV_INIT(kv_model);
    model.layers = layers;
    model.layer_count = LAYERS;
    kv_pool_config config = KV_INIT(kv_pool_config);
    config.arena_bytes = (uint64_t)16 << 20;
    kv_pool* pool;
    check(kv_pool_create(&config, &model, &pool));

    kv_seq seq;
    check(kv_seq_create(pool, NULL, &seq));
    forward(pool, seq, PROMPT);
    for (int i = 0; i < DECODED; ++i) forward(pool, seq, 1);

    kv_policy policy = KV_INIT(kv_policy); /* sinks and the most recent tokens */
    policy.scorer = KV_SCORER_STREAMING;
    policy.budget = BUDGET;
    policy.sinks = 4;
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = &policy;
    kv_compress_report report = KV_INIT(kv_compress_report);
    check(kv_compress(pool, seq, &options, &report));
    printf("tokens %" PRIu64 " -> %" PRIu64 ", blocks %" PRIu64 " -> %" PRIu64 ", %" PRIu64
           " bytes returned\n",
           report.tokens_before, report.tokens_after, report.blocks_before, report.blocks_after,
           report.bytes_returned);

    check(kv_seq_release(pool, seq));
    kv_pool_release(pool);
    return 0;
}
