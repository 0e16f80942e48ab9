#include "fake_kernels.hpp"

#include "driver/images.hpp"
#include "driver/table.hpp"
#include "fake_calls.hpp"
#include "kernels/attend_codes.hpp"
#include "kernels/attend_decode.hpp"
#include "kernels/attend_join.hpp"
#include "kernels/attend_opened.hpp"
#include "kernels/attend_rows.hpp"
#include "kernels/emulator/context.hpp"
#include "kernels/share.hpp"

namespace kvrt::cuda {

namespace {

using namespace kernels;
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
static_assert(execution_context<fake_context>);

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

template <number input, bool elaborate>
void write(const write_parameters& call) {
    write_rows<fake_context, input, elaborate>(call);
}
template <class tiles>
void attend_few(const attend_parameters& call) {
    attend_pieces<fake_context, tiles>(call);
}
template <class tiles>
void attend_many(const rows_parameters& call) {
    attend_rows<fake_context, tiles>(call);
}
template <number type>
using half = half_tiles<fake_context, type, 64>;
template <bool key_nibbles, bool value_nibbles>
using codes = code_tiles<fake_context, key_nibbles, value_nibbles, 64>;

/// Both kernels of a storage with up to 64 channels.
template <class tiles>
void add_attention(fake_driver& fake, const char* few, const char* many,
                   const kernel_faults& faults) {
    add<attend_parameters>(fake, few, attend_few<tiles>, changing(faults.attend));
    add<rows_parameters>(fake, many, attend_many<tiles>, changing(faults.attend_rows));
}
#define KVRT_ADD_ATTENTION(storage, ...)                                  \
    add_attention<__VA_ARGS__>(fake, "kvrt_attend_decode_" storage "_64", \
                               "kvrt_attend_rows_" storage "_64", faults)

constexpr const char* storages[] = {"f16", "bf16", "bytes", "nibbles", "bytes_nibbles", "opened"};

constexpr kernel_image images_of_tests[] = {{"tests", "an image"}};
constexpr kernel_images test_images{images_of_tests, 1};

}  // namespace

void add_kernels(fake_driver& fake, const kernel_faults& faults) {
    emulator::other_device_memory = [](const void* address, std::size_t bytes) {
        return fake_calls::active->is_mapped(
            reinterpret_cast<device_pointer>(address) + fake_driver::distance, bytes);
    };
    add<spread_parameters>(
        fake, spread_kernel, spread_lines<fake_context>,
        [&faults](spread_parameters& call) { return !faults.spread || faults.spread(call); });
    add<share_parameters>(fake, "kvrt_share_plans", share_plans<fake_context>,
                          changing(faults.share));
    const auto write_change = changing(faults.write);
#define KVRT_ADD_WRITE(type)                                                                    \
    add<write_parameters>(fake, "kvrt_write_" #type, write<number::type, false>, write_change); \
    add<write_parameters>(fake, "kvrt_write_elaborate_" #type, write<number::type, true>,       \
                          write_change)
    KVRT_ADD_WRITE(f32);
    KVRT_ADD_WRITE(f16);
    KVRT_ADD_WRITE(bf16);
    KVRT_ADD_ATTENTION("f16", half<number::f16>);
    KVRT_ADD_ATTENTION("bf16", half<number::bf16>);
    KVRT_ADD_ATTENTION("bytes", codes<false, false>);
    KVRT_ADD_ATTENTION("nibbles", codes<true, true>);
    KVRT_ADD_ATTENTION("bytes_nibbles", codes<false, true>);
    KVRT_ADD_ATTENTION("opened", opened_tiles<fake_context, 64>);
    add<attend_parameters>(fake, "kvrt_attend_join", join_pieces<fake_context>);
    // These are asked for, and not in these tests.
    const auto leave_out = [&fake](const std::string& name, std::size_t bytes) {
        fake.add_kernel(name.c_str(), {bytes}, [&fake, name](const kernel_launch&) {
            fake.violations.push_back(name + " is not in these tests");
        });
    };
    for (const std::string storage : storages) {
        for (const char* channels : {"_128", "_256"}) {
            leave_out("kvrt_attend_decode_" + storage + channels, sizeof(attend_parameters));
            leave_out("kvrt_attend_rows_" + storage + channels, sizeof(rows_parameters));
        }
    }
}

with_images::with_images() { replace_images(&test_images); }
with_images::~with_images() {
    replace_images(nullptr);
    emulator::other_device_memory = nullptr;
}

}  // namespace kvrt::cuda
