/* The example of README.md, word for word, between the functions' braces. */
#include "abi/readme_example.h"

int readme_example(float *k, float *v, float *q, float *o) {
/* clang-format off */
/* README begins */
kv_layer layer = KV_INIT(kv_layer);                  /* Llama-like; say more where yours differs */
layer.query_heads = 8, layer.kv_heads = 2, layer.key_dim = 64;
kv_model model = KV_INIT(kv_model);
model.layers = &layer, model.layer_count = 1;
kv_pool_config config = KV_INIT(kv_pool_config);
config.arena_bytes = 64u << 20;
kv_tensor keys = KV_INIT(kv_tensor), values, queries, results; /* [rows, heads, dim], strided */
keys.data = k, keys.dtype = KV_DTYPE_F32, keys.rows = 1, keys.heads = 2, keys.dim = 64;
values = queries = results = keys;
values.data = v, queries.data = q, results.data = o, queries.heads = results.heads = 8;

kv_pool *pool; kv_seq seq; kv_step *step;
if (kv_pool_create(&config, &model, &pool) || kv_seq_create(pool, NULL, &seq)) return 1;
for (int token = 0; token < 100; ++token) {
    if (kv_step_begin(pool, &step) || kv_seq_append(step, seq, NULL, 1, NULL) ||
        kv_step_reserve(step, NULL) || kv_write(step, 0, &keys, &values) ||
        kv_attend(step, 0, &queries, &results, NULL) || kv_step_end(step, NULL)) return 1;
}
kv_pool_release(pool);
/* README ends */
    /* clang-format on */
    return 0;
}
