/* A program outside the tree: makes a pool, looks at it, lets it go, and asks for one on a GPU,
 * which is there or is refused: a line on stdout says which. Exit status 0 when all is well. */
#include <kvrt/kvrt.h>
#include <stdio.h>

int main(void) {
    kv_layer layer = KV_INIT(kv_layer);
    kv_model model = KV_INIT(kv_model);
    kv_pool_config config = KV_INIT(kv_pool_config);
    kv_pool_stats stats = KV_INIT(kv_pool_stats);
    kv_pool *pool = NULL;

    layer.query_heads = 4;
    layer.kv_heads = 2;
    layer.key_dim = 32;
    model.layers = &layer;
    model.layer_count = 1;
    config.arena_bytes = 4u << 20;
    config.threads = 1;

    if (kvrt_version() != KVRT_VERSION) return 1;
    if (kv_pool_create(&config, &model, &pool) != KV_OK) {
        char text[256];
        kv_last_error(text, sizeof text);
        fprintf(stderr, "%s\n", text);
        return 2;
    }
    if (kv_pool_get_stats(pool, &stats) != KV_OK || stats.arena_bytes != 4u << 20) return 3;
    kv_pool_release(pool);
    config.device = KV_DEVICE_CUDA;
    if (kv_pool_create(&config, &model, &pool) == KV_OK) {
        kv_pool_release(pool);
        puts("GPU ok");
    } else {
        char text[512];
        kv_last_error(text, sizeof text);
        printf("no GPU: %s\n", text);
    }
    puts("consumer ok");
    return 0;
}
