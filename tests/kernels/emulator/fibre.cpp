// Compiled without sanitizers, whose functions it calls itself: KVRT_EMULATE_ADDRESS or
// KVRT_EMULATE_THREAD says which of them the program runs under.
#include "fibre.hpp"

#include <pthread.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <new>

#if defined(KVRT_EMULATE_ADDRESS)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(KVRT_EMULATE_THREAD)
#include <sanitizer/tsan_interface.h>
#endif

namespace emulator {

namespace {

constexpr size_t stack_bytes = 256 << 10;  // reserved; pages come when they are touched

// Where fibres were resumed from.
struct host_side {
    fibre* running = nullptr;
    void* stack_pointer = nullptr;
    ucontext_t portable;
    void* sanitizer_stack = nullptr;
    void* sanitizer_thread = nullptr;
    const void* stack = nullptr;
    size_t bytes = 0;
};
host_side host;

// Stacks are used again, but not under the thread sanitizer: it would take what two fibres write to
// the same stack, one after the other, for a race. A fresh mapping is clean to it.
#if defined(KVRT_EMULATE_THREAD)
constexpr uint32_t most_kept_stacks = 0;
#else
constexpr uint32_t most_kept_stacks = 1024;
#endif
std::byte* kept_stacks[most_kept_stacks + 1];
uint32_t kept_stack_count = 0;

std::byte* take_stack() {
    if (kept_stack_count != 0) return kept_stacks[--kept_stack_count];
    void* stack = mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) throw std::bad_alloc();
    return static_cast<std::byte*>(stack);
}

void return_stack(std::byte* stack) {
#if defined(KVRT_EMULATE_ADDRESS)
    // A thread that was left in the middle of its body leaves its frames' redzones behind.
    __asan_unpoison_memory_region(stack, stack_bytes);
#endif
    if (kept_stack_count < most_kept_stacks) {
        kept_stacks[kept_stack_count++] = stack;
    } else {
        munmap(stack, stack_bytes);
    }
}

}  // namespace

#if defined(__x86_64__)
// void kvrt_switch_stacks(void** save, void* load): saves what a call must preserve on the stack
// that is left, and takes it from the other.
extern "C" void kvrt_switch_stacks(void** save, void* load);
asm(R"(
.text
.globl kvrt_switch_stacks
.hidden kvrt_switch_stacks
.type kvrt_switch_stacks, @function
kvrt_switch_stacks:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size kvrt_switch_stacks, .-kvrt_switch_stacks
)");
fibre_switch fastest_switch() { return fibre_switch::assembly; }
#else
static void kvrt_switch_stacks(void**, void*) { __builtin_trap(); }
fibre_switch fastest_switch() { return fibre_switch::portable; }
#endif

struct fibre::portable_state {
    ucontext_t context;
};

fibre::fibre(fibre_switch kind, void (*body)()) : body_(body), stack_(take_stack()) {
    if (kind == fibre_switch::portable || fastest_switch() == fibre_switch::portable) {
        portable_ = new portable_state;
        getcontext(&portable_->context);
        portable_->context.uc_stack.ss_sp = stack_;
        portable_->context.uc_stack.ss_size = stack_bytes;
        portable_->context.uc_link = nullptr;
        makecontext(&portable_->context, &fibre::enter, 0);
    } else {
        // As if it had been left at the first instruction of enter, called from nowhere.
        uint64_t* top = reinterpret_cast<uint64_t*>(stack_ + stack_bytes);
        *--top = 0;
        *--top = reinterpret_cast<uint64_t>(&fibre::enter);
        for (int i = 0; i < 6; ++i) *--top = 0;
        stack_pointer_ = top;
    }
#if defined(KVRT_EMULATE_THREAD)
    sanitizer_thread_ = __tsan_create_fiber(0);
#endif
}

fibre::~fibre() {
#if defined(KVRT_EMULATE_THREAD)
    // It can only be destroyed once it has run. Coming back is the one switch that says that all it
    // did lies behind.
    void* const here = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(sanitizer_thread_, __tsan_switch_to_fiber_no_sync);
    __tsan_switch_to_fiber(here, 0);
    __tsan_destroy_fiber(sanitizer_thread_);
#endif
    delete portable_;
    return_stack(stack_);
}

void fibre::resume() {
    host.running = this;
#if defined(KVRT_EMULATE_THREAD)
    host.sanitizer_thread = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(sanitizer_thread_, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(KVRT_EMULATE_ADDRESS)
    __sanitizer_start_switch_fiber(&host.sanitizer_stack, stack_, stack_bytes);
#endif
    if (portable_ != nullptr) {
        swapcontext(&host.portable, &portable_->context);
    } else {
        kvrt_switch_stacks(&host.stack_pointer, stack_pointer_);
    }
#if defined(KVRT_EMULATE_ADDRESS)
    __sanitizer_finish_switch_fiber(host.sanitizer_stack, nullptr, nullptr);
#endif
    host.running = nullptr;
}

void fibre::switch_out(bool for_good) {
#if defined(KVRT_EMULATE_THREAD)
    __tsan_switch_to_fiber(host.sanitizer_thread, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(KVRT_EMULATE_ADDRESS)
    __sanitizer_start_switch_fiber(for_good ? nullptr : &sanitizer_stack_, host.stack, host.bytes);
#endif
    if (portable_ != nullptr) {
        swapcontext(&portable_->context, &host.portable);
    } else {
        kvrt_switch_stacks(&stack_pointer_, host.stack_pointer);
    }
#if defined(KVRT_EMULATE_ADDRESS)
    __sanitizer_finish_switch_fiber(sanitizer_stack_, nullptr, nullptr);
#endif
    (void)for_good;
}

void fibre::leave() { host.running->switch_out(false); }

void fibre::enter() {
    fibre* const self = host.running;
#if defined(KVRT_EMULATE_ADDRESS)
    __sanitizer_finish_switch_fiber(nullptr, &host.stack, &host.bytes);
#endif
    self->body_();
    self->finished_ = true;
    self->switch_out(true);
    __builtin_trap();  // nobody resumes what has finished
}

}  // namespace emulator
