#include "fake_kernels.hpp"

#include "driver/images.hpp"
#include "driver/table.hpp"
#include "fake_calls.hpp"
#include "fake_context.hpp"
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
template <number type, uint32_t channels = 64>
using half = half_tiles<fake_context, type, channels>;
template <bool key_nibbles, bool value_nibbles>
using codes = code_tiles<fake_context, key_nibbles, value_nibbles, 64>;

/// Both kernels of a storage.
template <class tiles>
void add_attention(fake_driver& fake, const char* few, const char* many,
                   const kernel_faults& faults) {
    add<attend_parameters>(fake, few, attend_few<tiles>, changing(faults.attend));
    add<rows_parameters>(fake, many, attend_many<tiles>, changing(faults.attend_rows));
}
#define KVRT_ADD_ATTENTION(storage, ...)                                                         \
    add_attention<__VA_ARGS__>(fake, "kvrt_attend_decode_" storage, "kvrt_attend_rows_" storage, \
                               faults)

constexpr const char* not_here[] = {
    "f16_256",     "bf16_128",    "bf16_256",          "bytes_128",         "bytes_256",
    "nibbles_128", "nibbles_256", "bytes_nibbles_128", "bytes_nibbles_256", "opened_256"};

constexpr kernel_image images_of_tests[] = {{"tests", "an image"}};
constexpr kernel_images test_images{images_of_tests, 1};

}  // namespace

void add_kernels(fake_driver& fake, const kernel_faults& faults) {
    emulator::other_device_memory = [](const void* address, std::size_t bytes) {
        const device_pointer place = reinterpret_cast<device_pointer>(address);
        // Pinned memory of the host has one address for both.
        return fake_calls::active->is_mapped(place + fake_driver::distance, bytes) ||
               fake_calls::active->is_pinned(address, bytes);
    };
    add<spread_parameters>(
        fake, spread_kernel, spread_lines<fake_context>,
        [&faults](spread_parameters& call) { return !faults.spread || faults.spread(call); });
    add<share_parameters>(fake, "kvrt_share_plans", share_plans<fake_context>,
                          changing(faults.share));
    const auto write_change = changing(faults.write);
    add<seal_parameters>(fake, "kvrt_seal_blocks", seal_listed_blocks<fake_context>,
                         changing(faults.seal));
#define KVRT_ADD_WRITE(type)                                                                    \
    add<write_parameters>(fake, "kvrt_write_" #type, write<number::type, false>, write_change); \
    add<write_parameters>(fake, "kvrt_write_elaborate_" #type, write<number::type, true>,       \
                          write_change)
    KVRT_ADD_WRITE(f32);
    KVRT_ADD_WRITE(f16);
    KVRT_ADD_WRITE(bf16);
    KVRT_ADD_ATTENTION("f16_64", half<number::f16>);
    KVRT_ADD_ATTENTION("bf16_64", half<number::bf16>);
    KVRT_ADD_ATTENTION("bytes_64", codes<false, false>);
    KVRT_ADD_ATTENTION("nibbles_64", codes<true, true>);
    KVRT_ADD_ATTENTION("bytes_nibbles_64", codes<false, true>);
    KVRT_ADD_ATTENTION("opened_64", opened_tiles<fake_context, 64>);
    KVRT_ADD_ATTENTION("f16_128", half<number::f16, 128>);
    KVRT_ADD_ATTENTION("opened_128", opened_tiles<fake_context, 128>);
    add<attend_parameters>(fake, "kvrt_attend_join", join_pieces<fake_context>);
    add<observe_parameters>(fake, "kvrt_observe_rows", observe_rows<fake_context>,
                            changing(faults.observe));
    add_round_kernels(fake, faults);
    // These are asked for, and not in these tests.
    const auto leave_out = [&fake](const std::string& name, std::size_t bytes) {
        fake.add_kernel(name.c_str(), {bytes}, [&fake, name](const kernel_launch&) {
            fake.violations.push_back(name + " is not in these tests");
        });
    };
    for (const std::string storage : not_here) {
        leave_out("kvrt_attend_decode_" + storage, sizeof(attend_parameters));
        leave_out("kvrt_attend_rows_" + storage, sizeof(rows_parameters));
    }
}

with_images::with_images() { replace_images(&test_images); }
with_images::~with_images() {
    replace_images(nullptr);
    emulator::other_device_memory = nullptr;
}

}  // namespace kvrt::cuda
