// test_gpu: pools on the GPU of this machine. Without arguments, all tests; with those of doctest,
// some. Exit status 3 where there is no GPU, with the reason.
//
//   --quick   every test, but short: for a driver that emulates
//   --device  prints what the GPU is, and ends
//   --fault   lets a kernel read what is not there, and ends; nothing works in a process after that
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>
#include <string_view>

#include "gpu_twin_device.hpp"
#include "test_length.hpp"

namespace kvrt::cuda {

namespace {

gpu_host* opened = nullptr;
bool quick = false;

constexpr int no_gpu = 3;

/// What a device's fault looks like to a host. 0: as documented.
int show_fault() {
    small_model model;
    const kv_pool_config config = small_config();
    kv_pool* pool = nullptr;
    kv_seq seq = 0;
    kv_step* step = nullptr;
    if (kv_pool_create(&config, &model.description, &pool) != KV_OK ||
        kv_seq_create(pool, nullptr, &seq) != KV_OK || kv_step_begin(pool, &step) != KV_OK ||
        kv_cuda_step_use_stream(step, as_stream(gpu().stream())) != KV_OK ||
        kv_seq_append(step, seq, nullptr, 1, nullptr) != KV_OK ||
        kv_step_reserve(step, nullptr) != KV_OK) {
        std::printf("%s\n", message_buffer());
        return 1;
    }
    kv_tensor nowhere = KV_INIT(kv_tensor);
    nowhere.data = reinterpret_cast<void*>(uint64_t{1} << 40);
    nowhere.dtype = KV_DTYPE_F32;
    nowhere.rows = 1;
    nowhere.heads = 2;
    nowhere.dim = 64;
    if (kv_write(step, 0, &nowhere, &nowhere) != KV_OK) {
        std::printf("the launch itself: %s\n", message_buffer());
        return 1;
    }
    const driver_result result = gpu().more().stream_synchronize(gpu().stream());
    bool right = is_fault(result);
    std::printf("cuStreamSynchronize: %s\n", error_name(gpu().calls(), result));
    for (int i = 0; i < 2; ++i) {
        const kv_status verdict = kv_write(step, 1, &nowhere, &nowhere);
        std::printf("kv_write: %s: %s\n", kv_status_name(verdict), message_buffer());
        right = right && verdict == KV_DEVICE && message_has("CUDA_ERROR_");
    }
    const kv_status cancelled = kv_step_cancel(step);
    std::printf("kv_step_cancel: %s\n", kv_status_name(cancelled));
    kv_pool_release(pool);
    return right ? 0 : 1;
}

}  // namespace

gpu_host& gpu() { return *opened; }
bool whole_length() { return !quick; }

}  // namespace kvrt::cuda

int main(int count, char** words) {
    using namespace kvrt::cuda;
    gpu_host host;
    opened = &host;
    if (host.open() != KV_OK) {
        std::fprintf(stderr, "no GPU here: %s\n", kvrt::message_buffer());
        return no_gpu;
    }
    const std::string_view first = count > 1 ? words[1] : "";
    if (first == "--device") {
        std::printf("%s\n", gpu().describe().c_str());
        return 0;
    }
    if (first == "--fault") return show_fault();
    quick = first == "--quick";  // which doctest does not know, and leaves alone
    doctest::Context context(count, words);
    return context.run();
}
