/* Trampolines: hooks in C that call the exported functions of hooks.go. Pointers travel as
 * integers, which Go's checks of pointers between the languages leave alone. */
#include "_cgo_export.h"
#include "shims.h"

/* A hook that this thread is inside. A goroutine keeps its thread while it runs one, so these are
 * also the hooks that the goroutine is inside: the innermost first, for a hook may call another
 * pool. */
typedef struct running_hook {
    uintptr_t user;
    const struct running_hook* outer;
} running_hook;

static _Thread_local const running_hook* innermost_hook;

int kvgo_inside_hook(uintptr_t user) {
    for (const running_hook* hook = innermost_hook; hook != NULL; hook = hook->outer)
        if (hook->user == user) return 1;
    return 0;
}

/* A panic does not leave the exported functions, so what follows the call always runs. */
#define RUN_HOOK(user, call)                                         \
    const running_hook hook = {(uintptr_t)(user), innermost_hook};   \
    innermost_hook = &hook;                                          \
    call;                                                            \
    innermost_hook = hook.outer

static void* allocate(void* user, size_t bytes, size_t alignment) {
    uintptr_t memory;
    RUN_HOOK(user, memory = kvgoHookAllocate((uintptr_t)user, bytes, alignment));
    return (void*)memory;
}

static void release(void* user, void* memory, size_t bytes, size_t alignment) {
    RUN_HOOK(user, kvgoHookRelease((uintptr_t)user, (uintptr_t)memory, bytes, alignment));
}

static void log_line(void* user, int32_t level, const char* text, size_t length) {
    RUN_HOOK(user, kvgoHookLog((uintptr_t)user, level, (char*)text, length));
}

static uint64_t now(void* user) {
    uint64_t nanoseconds;
    RUN_HOOK(user, nanoseconds = kvgoHookNow((uintptr_t)user));
    return nanoseconds;
}

static void parallel_for(void* user, uint32_t count, void (*body)(void* context, uint32_t index),
                         void* context) {
    RUN_HOOK(user,
             kvgoHookParallelFor((uintptr_t)user, count, (uintptr_t)body, (uintptr_t)context));
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
