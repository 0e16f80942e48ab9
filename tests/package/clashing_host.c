/* Definitions a host may have of its own: a mimalloc, a Highway, a klib. Linking libkvrt.a must
 * neither fail over them nor call them. */
#include <stddef.h>
#include <stdlib.h>

void *mi_malloc(size_t bytes);
void *mi_zalloc_aligned(size_t bytes, size_t alignment);
void mi_free(void *memory);
void mi_process_init(void);
void kvec_push(void);

void *mi_malloc(size_t bytes) {
    (void)bytes;
    abort();
}
void *mi_zalloc_aligned(size_t bytes, size_t alignment) {
    (void)bytes;
    (void)alignment;
    abort();
}
void mi_free(void *memory) {
    (void)memory;
    abort();
}
void mi_process_init(void) { abort(); }
void kvec_push(void) { abort(); }
