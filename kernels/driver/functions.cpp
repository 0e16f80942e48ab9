#include "driver/functions.hpp"

#include <cstdio>
#include <mutex>

#include "driver/table.hpp"
#include "kernels/attend_codes.hpp"
#include "kernels/attend_decode.hpp"
#include "kernels/attend_opened.hpp"
#include "kernels/attend_rows.hpp"

namespace kvrt::cuda {

namespace {

using namespace kernels;

std::mutex images_lock;
const kernel_images* replaced_images = nullptr;

/// How much shared memory a kernel takes depends on no execution context.
template <number type, uint32_t channels>
using half = half_tiles<void, type, channels>;
template <bool key_nibbles, bool value_nibbles, uint32_t channels>
using codes = code_tiles<void, key_nibbles, value_nibbles, channels>;
template <uint32_t channels>
using opened = opened_tiles<void, channels>;

bool in_bytes(const operand_place& operand) {
    return operand.codes == coding::int8_token || operand.codes == coding::fp8_token ||
           operand.codes == coding::fp8_e4m3 || operand.codes == coding::fp8_e5m2;
}
template <number type>
bool reads_half(const block_place& place) {
    const auto fits = [](const operand_place& operand) {
        return operand.codes == coding::plain && operand.type == type;
    };
    return fits(place.keys) && fits(place.values) && place.values.by_rows();
}
/// Codes are read from native tiles: words of keys side by side, records of values in one piece.
template <bool key_nibbles, bool value_nibbles>
bool reads_codes(const block_place& place) {
    const auto fits = [](const operand_place& operand, bool nibbles) {
        return nibbles ? operand.codes == coding::int4_token : in_bytes(operand);
    };
    return fits(place.keys, key_nibbles) && fits(place.values, value_nibbles) &&
           place.keys.slot_stride == place.keys.word_bytes &&
           place.values.slot_stride == place.values.row_bytes();
}

/// All that is stored, with the constants it is stored with.
bool reads_any(const block_place& place) {
    const bool levelled = place.keys.codes == coding::affine4;
    return place.values.codes != coding::affine4 &&
           (!levelled || place.keys.channel_means != nullptr);
}

/// Kernels end in the storage's name.
template <class tiles>
attend_functions entry(const char* few, const char* many, bool (*reads)(const block_place&)) {
    return {{few},
            {many},
            tiles::channels,
            tiles::turns,
            reads,
            attend_memory<tiles>::bytes,
            rows_memory<tiles>::bytes};
}
#define KVRT_ATTEND_ENTRY(storage, reads, ...) \
    entry<__VA_ARGS__>("kvrt_attend_decode_" storage, "kvrt_attend_rows_" storage, reads)

/// By storage, the narrowest first; what reads any last.
std::array<attend_functions, 18> functions_of_attention() {
    constexpr auto f16 = number::f16, bf16 = number::bf16;
    return {
        KVRT_ATTEND_ENTRY("f16_64", reads_half<f16>, half<f16, 64>),
        KVRT_ATTEND_ENTRY("f16_128", reads_half<f16>, half<f16, 128>),
        KVRT_ATTEND_ENTRY("f16_256", reads_half<f16>, half<f16, 256>),
        KVRT_ATTEND_ENTRY("bf16_64", reads_half<bf16>, half<bf16, 64>),
        KVRT_ATTEND_ENTRY("bf16_128", reads_half<bf16>, half<bf16, 128>),
        KVRT_ATTEND_ENTRY("bf16_256", reads_half<bf16>, half<bf16, 256>),
        KVRT_ATTEND_ENTRY("bytes_64", (reads_codes<false, false>), codes<false, false, 64>),
        KVRT_ATTEND_ENTRY("bytes_128", (reads_codes<false, false>), codes<false, false, 128>),
        KVRT_ATTEND_ENTRY("bytes_256", (reads_codes<false, false>), codes<false, false, 256>),
        KVRT_ATTEND_ENTRY("nibbles_64", (reads_codes<true, true>), codes<true, true, 64>),
        KVRT_ATTEND_ENTRY("nibbles_128", (reads_codes<true, true>), codes<true, true, 128>),
        KVRT_ATTEND_ENTRY("nibbles_256", (reads_codes<true, true>), codes<true, true, 256>),
        KVRT_ATTEND_ENTRY("bytes_nibbles_64", (reads_codes<false, true>), codes<false, true, 64>),
        KVRT_ATTEND_ENTRY("bytes_nibbles_128", (reads_codes<false, true>), codes<false, true, 128>),
        KVRT_ATTEND_ENTRY("bytes_nibbles_256", (reads_codes<false, true>), codes<false, true, 256>),
        KVRT_ATTEND_ENTRY("opened_64", reads_any, opened<64>),
        KVRT_ATTEND_ENTRY("opened_128", reads_any, opened<128>),
        KVRT_ATTEND_ENTRY("opened_256", reads_any, opened<256>),
    };
}
#undef KVRT_ATTEND_ENTRY

}  // namespace

void replace_images(const kernel_images* images) {
    const std::lock_guard<std::mutex> guard(images_lock);
    replaced_images = images;
}

const kernel_images& find_images() {
    const std::lock_guard<std::mutex> guard(images_lock);
    return replaced_images != nullptr ? *replaced_images : built_images;
}

kernel_functions::kernel_functions()
    : spread_{spread_kernel},
      seal_{"kvrt_seal_blocks"},
      share_{"kvrt_share_plans"},
      join_{"kvrt_attend_join"},
      observe_{"kvrt_observe_rows"},
      write_{kernel_function{"kvrt_write_f32"},
             kernel_function{"kvrt_write_f16"},
             kernel_function{"kvrt_write_bf16"},
             kernel_function{"kvrt_write_elaborate_f32"},
             kernel_function{"kvrt_write_elaborate_f16"},
             kernel_function{"kvrt_write_elaborate_bf16"}},
      attend_(functions_of_attention()) {}

kernel_functions::~kernel_functions() {
    if (device_ == nullptr) return;
    const current_context here(*device_);
    for (uint32_t i = 0; i < module_count_; ++i) (void)device_->calls().module_unload(modules_[i]);
}

status kernel_functions::load(device_context& device) {
    device_ = &device;
    const kernel_images& images = find_images();
    if (images.count == 0) {
        std::snprintf(reason_, sizeof reason_,
                      "this plugin was built without nvcc (scripts/fetch_cuda.sh gets one; build "
                      "again with -DKVRT_CUDA=ON)");
        return KV_OK;
    }
    if (images.count > most_images) {
        return fail(KV_INTERNAL, "the plugin has {} files of kernels", images.count);
    }
    const current_context here(device);
    KVRT_TRY(here.state());
    for (uint32_t i = 0; i < images.count; ++i) {
        const driver_result result =
            device.calls().module_load(&modules_[module_count_], images.images[i].data);
        if (result == success) {
            ++module_count_;
        } else if (result == error_no_binary_for_device) {
            std::snprintf(reason_, sizeof reason_,
                          "no kernels for this device in the plugin: it has those for compute "
                          "capability 8.x, 9.0, 10.0 and later");
            return KV_OK;
        } else {
            return device.check(result, "cuModuleLoadData");
        }
    }
    KVRT_TRY(find(spread_));
    KVRT_TRY(find(seal_));
    KVRT_TRY(find(share_));
    KVRT_TRY(find(join_));
    KVRT_TRY(find(observe_));
    for (kernel_function& each : write_) KVRT_TRY(find(each));
    for (attend_functions& each : attend_) {
        KVRT_TRY(find(each.few));
        KVRT_TRY(find(each.many));
    }
    reason_[0] = '\0';
    return KV_OK;
}

status kernel_functions::find(kernel_function& function) {
    driver_result result = error_not_found;
    for (uint32_t i = 0; i < module_count_ && result == error_not_found; ++i) {
        result = device_->calls().module_function(&function.handle, modules_[i], function.name);
    }
    if (result == success) return KV_OK;
    if (result == error_not_found) {
        return fail(KV_INTERNAL, "the plugin's kernels have no {}", function.name);
    }
    return device_->check(result, "cuModuleGetFunction");
}

status kernel_functions::state() const {
    if (reason_[0] == '\0') return KV_OK;
    return fail(KV_UNSUPPORTED, "KV_DEVICE_CUDA has no kernels: {}", reason_);
}

attend_functions* kernel_functions::attend(const block_place& place, bool turns) {
    const uint32_t dim = place.keys.dim > place.values.dim ? place.keys.dim : place.values.dim;
    for (attend_functions& each : attend_) {
        if (each.channels >= dim && each.turns >= turns && each.reads(place)) return &each;
    }
    return nullptr;
}

status kernel_functions::launch(kernel_function& function, uint32_t blocks, uint32_t threads,
                                uint32_t shared_bytes, stream_handle stream, void* parameters) {
    const driver& calls = device_->calls();
    const current_context here(*device_);
    KVRT_TRY(here.state());
    if (shared_bytes > function.shared_bytes) {
        KVRT_TRY(device_->check(
            calls.function_set_attribute(function.handle, function_dynamic_shared_bytes,
                                         static_cast<int>(shared_bytes)),
            "cuFuncSetAttribute (shared memory)"));
        function.shared_bytes = shared_bytes;
    }
    void* list[] = {parameters};
    return device_->check(calls.launch(function.handle, blocks, 1, 1, threads, 1, 1, shared_bytes,
                                       stream, list, nullptr),
                          function.name);
}

}  // namespace kvrt::cuda
