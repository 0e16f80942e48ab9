// A fibre: a stack of its own that runs a function and may be left in its middle. Sanitizers are
// told of every switch; the thread sanitizer takes each fibre for a thread of its own, and learns
// nothing of order from a switch. What a fibre did is over for whoever destroys it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator {

/// How fibres are switched: by a few lines of assembly (x86-64), or by the C library's ucontext,
/// which enters the system each time.
enum class fibre_switch { assembly, portable };
fibre_switch fastest_switch();

/// All fibres of a process live on one thread. Not copied: the sanitizers know addresses.
class fibre {
  public:
    fibre(fibre_switch kind, void (*body)());
    ~fibre();
    fibre(const fibre&) = delete;
    fibre& operator=(const fibre&) = delete;

    /// From outside of fibres: runs it until it leaves, or body returns.
    void resume();
    bool finished() const { return finished_; }

    /// From inside: back to whoever resumed it.
    static void leave();

  private:
    struct portable_state;
    static void enter();
    void switch_out(bool for_good);

    void (*body_)();
    std::byte* stack_ = nullptr;
    void* stack_pointer_ = nullptr;
    portable_state* portable_ = nullptr;
    void* sanitizer_stack_ = nullptr;   ///< the address sanitizer's, while it is left
    void* sanitizer_thread_ = nullptr;  ///< the thread sanitizer's
    bool finished_ = false;
};

}  // namespace emulator
