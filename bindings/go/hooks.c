/* Trampolines: hooks in C that call the exported functions of hooks.go. Pointers travel as
 * integers, which Go's checks of pointers between the languages leave alone. */
#include "_cgo_export.h"
#include "shims.h"

static void* allocate(void* user, size_t bytes, size_t alignment) {
    return (void*)kvgoHookAllocate((uintptr_t)user, bytes, alignment);
}

static void release(void* user, void* memory, size_t bytes, size_t alignment) {
    kvgoHookRelease((uintptr_t)user, (uintptr_t)memory, bytes, alignment);
}

static void log_line(void* user, int32_t level, const char* text, size_t length) {
    kvgoHookLog((uintptr_t)user, level, (char*)text, length);
}

static uint64_t now(void* user) { return kvgoHookNow((uintptr_t)user); }

static void parallel_for(void* user, uint32_t count, void (*body)(void* context, uint32_t index),
                         void* context) {
    kvgoHookParallelFor((uintptr_t)user, count, (uintptr_t)body, (uintptr_t)context);
}

void kvgo_set_hooks(kv_hooks* hooks, uintptr_t user, uint32_t wanted) {
    hooks->user = (void*)user;
    if ((wanted & KVGO_HOOK_ALLOCATE) != 0) {
        hooks->allocate = allocate;
        hooks->release = release;
    }
    if ((wanted & KVGO_HOOK_LOG) != 0) hooks->log = log_line;
    if ((wanted & KVGO_HOOK_NOW) != 0) hooks->now = now;
    if ((wanted & KVGO_HOOK_PARALLEL_FOR) != 0) hooks->parallel_for = parallel_for;
}

void kvgo_run_body(uintptr_t body, uintptr_t context, uint32_t index) {
    ((void (*)(void*, uint32_t))body)((void*)context, index);
}
