// Launches on the fake driver as the block emulator runs them: device addresses are followed where
// they lie on the host.
#pragma once

#include "fake_driver.hpp"
#include "kernels/emulator/context.hpp"

namespace kvrt::cuda {

using emulator::context;

/// Pointers of the device are followed where they lie on the host; all others are shared memory.
template <class pointer>
pointer* on_host(pointer* address) {
    const uintptr_t place = reinterpret_cast<uintptr_t>(address);
    if (place < fake_driver::distance) return address;
    return reinterpret_cast<pointer*>(place - fake_driver::distance);
}

struct fake_context : context {
    static void copy_async(void* target, const void* source, uint32_t bytes = 16, KVRT_FROM_SITE) {
        context::copy_async(target, on_host(source), bytes, function, line);
    }
    template <class value>
    static value load(const void* address, KVRT_FROM_SITE) {
        return context::load<value>(on_host(address), function, line);
    }
    template <class value>
    static value load_constant(const void* address, KVRT_FROM_SITE) {
        return load<value>(address, function, line);
    }
    template <class value>
    static value load_once(const void* address, KVRT_FROM_SITE) {
        return load<value>(address, function, line);
    }
    template <class value>
    static void store(void* address, value what, KVRT_FROM_SITE) {
        context::store(on_host(address), what, function, line);
    }
    template <class value>
    static void store_once(void* address, value what, KVRT_FROM_SITE) {
        store(address, what, function, line);
    }
    template <class value>
    static void atomic_add(value* address, value what, KVRT_FROM_SITE) {
        context::atomic_add(on_host(address), what, function, line);
    }
};
static_assert(kernels::execution_context<fake_context>);

template <class parameters>
void add(fake_driver& fake, const char* name, void (*body)(const parameters&),
         std::function<bool(parameters&)> change = {}) {
    fake.add_kernel(name, {sizeof(parameters)},
                    [&fake, name, body, change](const kernel_launch& launch) {
                        parameters call = launch.parameter<parameters>(0);
                        if (change && !change(call)) return;
                        const emulator::launch_report report =
                            emulator::launch({.blocks = launch.grid[0],
                                              .threads = launch.block[0],
                                              .shared_bytes = launch.shared_bytes,
                                              .order = emulator::thread_order::ascending},
                                             [&] { body(call); });
                        if (!report.clean())
                            fake.violations.push_back(name + (": " + report.text()));
                    });
}

template <class changed>
std::function<bool(changed&)> changing(const std::function<void(changed&)>& change) {
    return [&change](changed& call) {
        if (change) change(call);
        return true;
    };
}

}  // namespace kvrt::cuda
