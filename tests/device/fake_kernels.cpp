#include "fake_kernels.hpp"

#include "driver/images.hpp"
#include "driver/table.hpp"
#include "fake_calls.hpp"
#include "fake_context.hpp"
#include "kernels/attend_codes.hpp"
#include "kernels/attend_decode.hpp"
#include "kernels/attend_join.hpp"

namespace kvrt::cuda {

namespace {

using namespace kernels;

template <number input, bool elaborate>
void write(const write_parameters& call) {
    write_rows<fake_context, input, elaborate>(call);
}
template <class tiles>
void attend(const attend_parameters& call) {
    attend_pieces<fake_context, tiles>(call);
}
template <number type>
using half = half_tiles<fake_context, type, 64>;
template <bool key_nibbles, bool value_nibbles>
using codes = code_tiles<fake_context, key_nibbles, value_nibbles, 64>;

constexpr const char* not_here[] = {
    "kvrt_attend_decode_f16_128",           "kvrt_attend_decode_f16_256",
    "kvrt_attend_decode_bf16_128",          "kvrt_attend_decode_bf16_256",
    "kvrt_attend_decode_bytes_128",         "kvrt_attend_decode_bytes_256",
    "kvrt_attend_decode_nibbles_128",       "kvrt_attend_decode_nibbles_256",
    "kvrt_attend_decode_bytes_nibbles_128", "kvrt_attend_decode_bytes_nibbles_256"};

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
    const auto write_change = changing(faults.write);
    add<write_parameters>(fake, "kvrt_write_f32", write<number::f32, false>, write_change);
    add<write_parameters>(fake, "kvrt_write_f16", write<number::f16, false>, write_change);
    add<write_parameters>(fake, "kvrt_write_bf16", write<number::bf16, false>, write_change);
    add<write_parameters>(fake, "kvrt_write_elaborate_f32", write<number::f32, true>, write_change);
    add<write_parameters>(fake, "kvrt_write_elaborate_f16", write<number::f16, true>, write_change);
    add<write_parameters>(fake, "kvrt_write_elaborate_bf16", write<number::bf16, true>,
                          write_change);
    add<seal_parameters>(fake, "kvrt_seal_blocks", seal_listed_blocks<fake_context>,
                         changing(faults.seal));
    const auto attend_change = changing(faults.attend);
    add<attend_parameters>(fake, "kvrt_attend_decode_f16_64", attend<half<number::f16>>,
                           attend_change);
    add<attend_parameters>(fake, "kvrt_attend_decode_bf16_64", attend<half<number::bf16>>,
                           attend_change);
    add<attend_parameters>(fake, "kvrt_attend_decode_bytes_64", attend<codes<false, false>>,
                           attend_change);
    add<attend_parameters>(fake, "kvrt_attend_decode_nibbles_64", attend<codes<true, true>>,
                           attend_change);
    add<attend_parameters>(fake, "kvrt_attend_decode_bytes_nibbles_64", attend<codes<false, true>>,
                           attend_change);
    add<attend_parameters>(fake, "kvrt_attend_join", join_pieces<fake_context>);
    add_round_kernels(fake, faults);
    for (const char* name : not_here) {
        fake.add_kernel(name, {sizeof(attend_parameters)}, [&fake, name](const kernel_launch&) {
            fake.violations.push_back(std::string(name) + " is not in these tests");
        });
    }
}

with_images::with_images() { replace_images(&test_images); }
with_images::~with_images() {
    replace_images(nullptr);
    emulator::other_device_memory = nullptr;
}

}  // namespace kvrt::cuda
