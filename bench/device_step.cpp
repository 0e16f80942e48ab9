// What a step on a device costs the host, but for the driver: its calls do nothing here, and return
// at once.
//
//   device_step sequences=256 layers=32 us_per_step=... with_blocks_us=... lines=... calls=...
//
// A decode step of sequences of 4,000 tokens through the public calls, from kv_step_begin to
// kv_step_end: bookkeeping, the plans of kernels, and packing what is uploaded of them. us_per_step
// is of steps in which no sequence needs a block, with_blocks_us of those in which 1 in 16 does, as
// sequences out of step with each other do.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "device/plugin_device.hpp"
#include "driver/driver.hpp"
#include "driver/images.hpp"
#include "kvrt/kv_cuda.h"

extern "C" const kvrt_plugin* kvrt_cuda_plugin(void);

using namespace kvrt;
using namespace kvrt::cuda;

namespace {

constexpr uint32_t layers = 32, sequences = 256, block_tokens = 16, tokens = 4000;

using clock_type = std::chrono::steady_clock;

/// Driver calls of a step, and bytes that they upload.
uint64_t calls = 0, uploaded = 0;

// ---- A driver that does nothing -----------------------------------------------------------------

device_pointer next_address = device_pointer{1} << 44;
device_pointer take_addresses(size_t bytes, size_t alignment) {
    next_address = (next_address + alignment - 1) / alignment * alignment;
    const device_pointer taken = next_address;
    next_address += bytes;
    return taken;
}
/// Objects of the driver are told apart by nobody here.
char object;
template <class handle>
handle any() {
    return reinterpret_cast<handle>(&object);
}

driver make_driver() {
    driver made;
    made.initialise = [](unsigned int) { return success; };
    made.driver_version = [](int* version) {
        *version = 13000;
        return success;
    };
    made.error_name = made.error_text = [](driver_result, const char** text) {
        *text = "no error";
        return success;
    };
    made.device_count = [](int* count) {
        *count = 1;
        return success;
    };
    made.device_get = [](device_number* device, int) {
        *device = 0;
        return success;
    };
    made.device_name = [](char* name, int capacity, device_number) {
        std::strncpy(name, "none", static_cast<size_t>(capacity));
        return success;
    };
    made.device_attribute = [](int* value, int, device_number) {
        *value = 9;
        return success;
    };
    made.primary_retain = [](context_handle* context, device_number) {
        *context = any<context_handle>();
        return success;
    };
    made.primary_release = [](device_number) { return success; };
    made.context_push = [](context_handle) { return success; };
    made.context_pop = [](context_handle* context) {
        *context = any<context_handle>();
        return success;
    };
    made.context_device = [](device_number* device) {
        *device = 0;
        return success;
    };
    made.memory_allocate = [](device_pointer* memory, size_t bytes) {
        *memory = take_addresses(bytes, 256);
        return success;
    };
    made.memory_free = [](device_pointer) { return success; };
    made.host_allocate = [](void** memory, size_t bytes, unsigned int) {
        *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
        return success;
    };
    made.host_free = [](void* memory) {
        std::free(memory);
        return success;
    };
    made.copy_to_device = [](device_pointer, const void*, size_t bytes, stream_handle) {
        ++calls;
        uploaded += bytes;
        return success;
    };
    made.copy_to_host = [](void*, device_pointer, size_t, stream_handle) { return success; };
    made.copy_on_device = [](device_pointer, device_pointer, size_t, stream_handle) {
        ++calls;
        return success;
    };
    made.fill_bytes = [](device_pointer, unsigned char, size_t, stream_handle) { return success; };
    made.stream_create = [](stream_handle* stream, unsigned int) {
        *stream = any<stream_handle>();
        return success;
    };
    made.stream_destroy = [](stream_handle) { return success; };
    made.stream_wait_event = [](stream_handle, event_handle, unsigned int) {
        ++calls;
        return success;
    };
    made.stream_is_capturing = [](stream_handle, int* status) {
        *status = capture_none;
        return success;
    };
    made.exchange_capture_mode = [](int*) { return success; };
    made.event_create = [](event_handle* event, unsigned int) {
        *event = any<event_handle>();
        return success;
    };
    made.event_destroy = [](event_handle) { return success; };
    made.event_record = [](event_handle, stream_handle) {
        ++calls;
        return success;
    };
    made.event_query = [](event_handle) {
        ++calls;
        return success;
    };
    made.event_synchronize = [](event_handle) { return success; };
    made.module_load = [](module_handle* module, const void*) {
        *module = any<module_handle>();
        return success;
    };
    made.module_unload = [](module_handle) { return success; };
    made.module_function = [](function_handle* function, module_handle, const char*) {
        *function = any<function_handle>();
        return success;
    };
    made.function_set_attribute = [](function_handle, int, int) { return success; };
    made.launch = [](function_handle, unsigned int, unsigned int, unsigned int, unsigned int,
                     unsigned int, unsigned int, unsigned int, stream_handle, void**, void**) {
        ++calls;
        return success;
    };
    return made;
}

// ---- Steps --------------------------------------------------------------------------------------

void check(kv_status status) {
    if (status >= 0) return;
    char message[512];
    kv_last_error(message, sizeof message);
    fmt::print(stderr, "{}: {}\n", kv_status_name(status), message);
    std::exit(1);
}

kv_pool* create_pool() {
    std::vector<kv_layer> description(layers, KV_INIT(kv_layer));
    for (kv_layer& layer : description) {
        layer.query_heads = 32;
        layer.kv_heads = 4;
        layer.key_dim = 128;
        layer.key_format = KV_FORMAT_BF16;
    }
    kv_model model = KV_INIT(kv_model);
    model.layers = description.data();
    model.layer_count = layers;
    kv_pool_config config = KV_INIT(kv_pool_config);
    config.device = KV_DEVICE_CUDA;
    config.arena_bytes = uint64_t{96} << 30;  // addresses
    config.block_tokens = block_tokens;
    config.max_sequences = sequences;
    config.max_tokens_per_sequence = 8192;
    config.max_step_sequences = sequences;
    config.max_step_tokens = 8192;
    config.layout = KV_LAYOUT_NHD;
    config.threads = 1;
    kv_pool* pool = nullptr;
    check(kv_pool_create(&config, &model, &pool));
    return pool;
}

/// A step of `rows` tokens of each; returns microseconds but for the marks that layers are written.
double run_step(kv_pool* pool, const std::vector<kv_seq>& batch,
                const std::vector<uint32_t>& rows) {
    const auto start = clock_type::now();
    kv_step* step = nullptr;
    check(kv_step_begin(pool, &step));
    check(kv_cuda_step_use_stream(step, any<CUstream_st*>()));
    check(kv_step_append_batch(step, static_cast<uint32_t>(batch.size()), batch.data(), rows.data(),
                               nullptr, nullptr));
    check(kv_step_reserve(step, nullptr));
    const auto reserved = clock_type::now();
    kv_cuda_tables tables = KV_INIT(kv_cuda_tables);
    for (uint32_t layer = 0; layer < layers; ++layer) {
        check(kv_cuda_step_tables(step, layer, &tables));
    }
    const auto written = clock_type::now();
    check(kv_step_end(step, nullptr));
    const auto ended = clock_type::now();
    return std::chrono::duration<double, std::micro>((reserved - start) + (ended - written))
        .count();
}

double median(std::vector<double> times) {
    std::nth_element(times.begin(), times.begin() + static_cast<long>(times.size() / 2),
                     times.end());
    return times[times.size() / 2];
}

/// Prints the decode steps of sequences of which every `apart`-th crosses into a block at once.
void measure(const char* name, uint32_t apart) {
    kv_pool* pool = create_pool();
    std::vector<kv_seq> batch(sequences);
    for (uint32_t i = 0; i < sequences; ++i) {
        check(kv_seq_create(pool, nullptr, &batch[i]));
        // Prompts in steps of their own: longer by one from one sequence to the next.
        const uint32_t length = tokens + i % apart;
        run_step(pool, {batch[i]}, {length});
    }
    const std::vector<uint32_t> one(sequences, 1);
    std::vector<double> times;
    for (uint32_t step = 0; step < 400; ++step) {
        calls = uploaded = 0;
        const double time = run_step(pool, batch, one);
        // Where all cross at once, the steps in between.
        const bool crosses = (tokens + step) % block_tokens == 0;
        if (step >= 64 && (apart != 1 || !crosses)) times.push_back(time);
    }
    fmt::print(
        "device_step {} sequences={} layers={} us_per_step={:.1f} calls={} upload_bytes={}\n", name,
        sequences, layers, median(times), calls, uploaded);
    kv_pool_release(pool);
}

}  // namespace

int main() {
    const driver nothing = make_driver();
    const kernel_image image{"kernels", &object};
    const kernel_images images{&image, 1};
    replace_driver(&nothing);
    replace_images(&images);
    replace_cuda_plugin(kvrt_cuda_plugin());
    measure("within_blocks", 1);
    measure("with_blocks", block_tokens);
    return 0;
}
