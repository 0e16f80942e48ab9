/* Uses the public header the way programs do, in C and C++ alike, after klib's kvec.h and its kin
 * have claimed their names. */
#ifdef WITH_KLIB_MACROS
#define kv_roundup32(x) (--(x), (x) |= (x) >> 1, (x) |= (x) >> 2, ++(x))
#define kvec_t(type) \
    struct {         \
        size_t n, m; \
        type *a;     \
    }
#define kv_init(v) ((v).n = (v).m = 0, (v).a = 0)
#define kv_destroy(v) free((v).a)
#define kv_A(v, i) ((v).a[(i)])
#define kv_a(type, v, i) ((v).a[(i)])
#define kv_pop(v) ((v).a[--(v).n])
#define kv_size(v) ((v).n)
#define kv_max(v) ((v).m)
#define kv_last(v) ((v).a[(v).n - 1])
#define kv_resize(type, v, s) ((v).m = (s))
#define kv_reserve(type, v, s) ((v).m = (s))
#define kv_copy(type, v1, v0) ((v1).n = (v0).n)
#define kv_push(type, v, x) ((v).a[(v).n++] = (x))
#define kv_pushp(type, v) ((v).a + (v).n++)
#define kv_insert(type, v, i, x) ((v).a[(i)] = (x))
#define kv_clear(v) ((v).n = 0)
#define kv_new(x) kv_other_new(x)
#define kv_free(x) kv_other_free(x)
#define kv_release(x) kv_other_release(x)
#define kv_retain(x) kv_other_retain(x)
#define kv_get(x, k) kv_other_get((x), (k))
#define kv_set(x, k, v) kv_other_set((x), (k), (v))
#endif

#include <kvrt/kvrt.h>

kv_status use_of_the_header(kv_pool **pool, char *text, size_t capacity);

kv_status use_of_the_header(kv_pool **pool, char *text, size_t capacity) {
    kv_status status;
    kv_layer layer = KV_INIT(kv_layer);
    kv_model model = KV_INIT(kv_model);
    kv_pool_config config = KV_INIT(kv_pool_config);
    layer.query_heads = 8;
    layer.kv_heads = 2;
    layer.key_dim = 64;
    model.layers = &layer;
    model.layer_count = 1;
    config.arena_bytes = (uint64_t)1 << 24;
    status = kv_pool_create(&config, &model, pool);
    if (status != KV_OK) (void)kv_last_error(text, capacity);
    return status;
}
