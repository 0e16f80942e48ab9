// What bench_gpu times with: shapes, memory and events of the device, and pools on it that are
// full.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "api/handles.hpp"
#include "gpu/host_driver.hpp"
#include "kvrt/kv_cuda.h"

namespace kvrt::cuda {

struct bench_shape {
    uint32_t kv_heads = 8, query_heads = 32, dim = 128;
    uint32_t prompt_rows = 4096;  ///< written in one step
    uint64_t copy_bytes = uint64_t{1} << 30;
    uint64_t decode_tokens = 16 * 16384;  ///< of all sequences
    uint32_t contexts[2] = {16384, 65536};
    uint32_t decode_layers = 4;  ///< attended in turn: more than the L2 cache holds lies between
    uint32_t sequences = 256, layers = 32, context = 512;
    uint32_t round_sequences = 64, round_context = 4096;
    int repetitions = 9, rounds = 5;  ///< whose medians count
};

/// Set by main.
inline gpu_host* opened = nullptr;
inline bench_shape sizes;

inline gpu_host& gpu() { return *opened; }

[[noreturn]] inline void give_up(const char* call) {
    fmt::print(stderr, "{}: {}\n", call, message_buffer());
    std::exit(1);
}
inline void check(kv_status verdict, const char* call) {
    if (verdict < 0) give_up(call);
}
inline void check_driver(driver_result result, const char* call) { gpu().demand(result, call); }

inline double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

/// What verbs of this version refuse is a line, not an error.
inline bool is_supported(kv_status verdict, const std::string& name, const char* call) {
    if (verdict != KV_UNSUPPORTED) {
        check(verdict, call);
        return true;
    }
    std::string reason = message_buffer();
    std::replace(reason.begin(), reason.end(), '"', '\'');
    fmt::print("gpu {} unsupported=\"{}\"\n", name, reason);
    return false;
}

class device_bytes {
  public:
    explicit device_bytes(uint64_t bytes) {
        check_driver(gpu().calls().memory_allocate(&address_, bytes), "cuMemAlloc");
    }
    device_bytes(const device_bytes&) = delete;
    device_bytes& operator=(const device_bytes&) = delete;
    ~device_bytes() { (void)gpu().calls().memory_free(address_); }
    device_pointer address() const { return address_; }
    void* data() const { return reinterpret_cast<void*>(address_); }

  private:
    device_pointer address_ = 0;
};

/// [rows, heads, dim] of f16 on the device.
class random_rows {
  public:
    random_rows(uint32_t rows, uint32_t heads, uint32_t dim)
        : count_(uint64_t{rows} * heads * dim), memory_(2 * count_), heads_(heads), dim_(dim) {
        void* pinned = nullptr;
        check_driver(gpu().calls().host_allocate(&pinned, 2 * count_, 0), "cuMemHostAlloc");
        std::mt19937 random(5);
        uint16_t* const to = static_cast<uint16_t*>(pinned);
        // Halves between 0.5 and 1, of both signs.
        for (uint64_t i = 0; i < count_; ++i) {
            const uint32_t bits = static_cast<uint32_t>(random());
            to[i] = static_cast<uint16_t>(0x3800u + (bits & 0x83ffu));
        }
        check_driver(
            gpu().calls().copy_to_device(memory_.address(), pinned, 2 * count_, gpu().stream()),
            "cuMemcpyHtoDAsync");
        gpu().synchronise();
        (void)gpu().calls().host_free(pinned);
    }
    kv_tensor view(uint32_t rows) const {
        kv_tensor tensor = KV_INIT(kv_tensor);
        tensor.data = memory_.data();
        tensor.dtype = KV_DTYPE_F16;
        tensor.rows = rows;
        tensor.heads = heads_;
        tensor.dim = dim_;
        return tensor;
    }

  private:
    uint64_t count_;
    device_bytes memory_;
    uint32_t heads_, dim_;
};

/// Times what is enqueued, by the device's own events.
class device_clock {
  public:
    device_clock() : from_(sizes.copy_bytes), to_(sizes.copy_bytes) {
        check_driver(gpu().calls().event_create(&start_, event_default), "cuEventCreate");
        check_driver(gpu().calls().event_create(&end_, event_default), "cuEventCreate");
    }
    device_clock(const device_clock&) = delete;
    device_clock& operator=(const device_clock&) = delete;
    ~device_clock() {
        (void)gpu().calls().event_destroy(start_);
        (void)gpu().calls().event_destroy(end_);
    }
    void copy() const {
        check_driver(gpu().calls().copy_on_device(to_.address(), from_.address(), sizes.copy_bytes,
                                                  gpu().stream()),
                     "cuMemcpyDtoDAsync");
    }
    /// Microseconds of what `body` enqueues. A copy in front keeps the device busy until all of it
    /// has been, so that the host's own time is none of it, and takes the caches.
    template <class callable>
    double once(const callable& body) const {
        copy();
        check_driver(gpu().calls().event_record(start_, gpu().stream()), "cuEventRecord");
        body();
        check_driver(gpu().calls().event_record(end_, gpu().stream()), "cuEventRecord");
        gpu().synchronise();
        float milliseconds = 0;
        check_driver(gpu().calls().event_elapsed(&milliseconds, start_, end_),
                     "cuEventElapsedTime");
        return 1000.0 * static_cast<double>(milliseconds);
    }
    template <class callable>
    double often(const callable& body) const {
        std::vector<double> measured;
        for (int i = 0; i < sizes.repetitions; ++i) measured.push_back(once(body));
        return median(measured);
    }

  private:
    device_bytes from_, to_;
    event_handle start_ = nullptr, end_ = nullptr;
};

struct pool_shape {
    uint32_t layers = 1, format = KV_FORMAT_F16, sequences = 1, context = 0, query_heads = 0,
             kv_heads = 0, dim = 0;
};

/// A pool with sequences of the context's length, written and not attended over.
class filled_pool {
  public:
    explicit filled_pool(const pool_shape& of) : shape_(of) {
        inverse_frequencies_.assign(of.dim / 2, 0.01);
        rope_.style = KV_ROPE_INTERLEAVED;
        rope_.dimensions = of.dim;
        rope_.inverse_frequencies = inverse_frequencies_.data();
        kv_layer layer = KV_INIT(kv_layer);
        layer.query_heads = of.query_heads;
        layer.kv_heads = of.kv_heads;
        layer.key_dim = of.dim;
        layer.key_format = of.format;
        layer.value_format = of.format;
        layer.rope = &rope_;
        std::vector<kv_layer> layers(of.layers, layer);
        kv_model model = KV_INIT(kv_model);
        model.layers = layers.data();
        model.layer_count = of.layers;
        kv_pool_config config = KV_INIT(kv_pool_config);
        config.device = KV_DEVICE_CUDA;
        config.max_sequences = of.sequences;
        config.max_tokens_per_sequence = of.context + 64;
        config.max_step_tokens = std::max(sizes.prompt_rows, of.sequences);
        kv_plan_report plan = KV_INIT(kv_plan_report);
        check(kv_plan(&config, &model, &plan), "kv_plan");
        config.arena_bytes = plan.arena_bytes_needed;
        check(kv_pool_create(&config, &model, &pool_), "kv_pool_create");
    }
    filled_pool(const filled_pool&) = delete;
    filled_pool& operator=(const filled_pool&) = delete;
    ~filled_pool() { kv_pool_release(pool_); }

    void create() {
        const kv_seq_config config = KV_INIT(kv_seq_config);
        for (uint32_t i = 0; i < shape_.sequences; ++i) {
            kv_seq seq = 0;
            check(kv_seq_create(pool_, &config, &seq), "kv_seq_create");
            sequences_.push_back(seq);
        }
    }
    /// Up to the context's length. UNSUPPORTED: no kernel writes the format.
    kv_status fill() {
        if (rows_ == nullptr) {
            rows_ = std::make_unique<random_rows>(sizes.prompt_rows, shape_.kv_heads, shape_.dim);
        }
        for (const kv_seq seq : sequences_) {
            for (uint32_t held = tokens_of(seq); held < shape_.context;) {
                const uint32_t count = std::min(sizes.prompt_rows, shape_.context - held);
                kv_step* const step = begin();
                check(kv_seq_append(step, seq, nullptr, count, nullptr), "kv_seq_append");
                reserve(step);
                const kv_tensor view = rows_->view(count);
                for (uint32_t l = 0; l < shape_.layers; ++l) {
                    const kv_status verdict = kv_write(step, l, &view, &view);
                    if (verdict < 0) return verdict;
                }
                check(kv_step_end(step, nullptr), "kv_step_end");
                held += count;
            }
        }
        gpu().synchronise();
        return KV_OK;
    }
    kv_step* begin() const {
        kv_step* step = nullptr;
        check(kv_step_begin(pool_, &step), "kv_step_begin");
        kv_status verdict =
            kv_cuda_step_use_stream(step, reinterpret_cast<CUstream_st*>(gpu().stream()));
        if (verdict == KV_AGAIN) {  // too many steps in flight
            gpu().synchronise();
            verdict = kv_cuda_step_use_stream(step, reinterpret_cast<CUstream_st*>(gpu().stream()));
        }
        check(verdict, "kv_cuda_step_use_stream");
        return step;
    }
    static void reserve(kv_step* step) {
        kv_status verdict = kv_step_reserve(step, nullptr);
        for (int i = 0; verdict == KV_AGAIN && i < 64; ++i) {
            gpu().synchronise();
            verdict = kv_step_reserve(step, nullptr);
        }
        if (verdict != KV_OK) give_up("kv_step_reserve");
    }
    void append_all(kv_step* step) const {
        for (const kv_seq seq : sequences_) {
            check(kv_seq_append(step, seq, nullptr, 1, nullptr), "kv_seq_append");
        }
    }
    uint32_t tokens_of(kv_seq seq) const {
        kv_seq_layer_info info = KV_INIT(kv_seq_layer_info);
        check(kv_seq_get_layer_info(pool_, seq, 0, &info), "kv_seq_get_layer_info");
        return static_cast<uint32_t>(info.retained);
    }
    /// Words of a token's keys and values in one layer, with their scales, without padding.
    double bytes_of_token() const {
        const lane_geometry& lane = pool_->store.model.lanes[0];
        const operand_layout &keys = lane.layout.keys, &values = lane.layout.values;
        const uint32_t row = keys.words * keys.word_bytes + values.words * values.word_bytes;
        return static_cast<double>(lane.kv_heads * row);
    }

    kv_pool* handle() const { return pool_; }
    const std::vector<kv_seq>& sequences() const { return sequences_; }

  private:
    pool_shape shape_;
    std::vector<double> inverse_frequencies_;
    kv_rope rope_ = KV_INIT(kv_rope);
    kv_pool* pool_ = nullptr;
    std::vector<kv_seq> sequences_;
    std::unique_ptr<random_rows> rows_;
};

}  // namespace kvrt::cuda
