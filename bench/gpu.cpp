// Pools on the GPU of this machine against the bandwidth at which it copies, in one run:
//
//   gpu device ...                        what it is
//   gpu copy gbps=...                     read and written, device to device
//   gpu decode bf16 kv=16384 sequences=16 us=... gbps=... of_copy=... wanted=0.85
//   gpu bookkeeping sequences=256 layers=32 us=... wanted_below=30
//   gpu tables sequences=256 layers=32 us=... wanted_below=30
//   gpu compact f16 kept=0.10 us=... gbps=... of_copy=... wanted=0.60
//   gpu triattention sequences=64 kv=4096 us=... wanted_below=1000
//   gpu triattention offsets=max by=products sequences=64 kv=4096 us=...
//   gpu triattention offsets=max by=measured sequences=64 kv=4096 chosen=kernel
//
// gbps     of decode: keys and values with their scales, each read once; of compact: what is kept,
//          read and written
// us       by the device's events; of bookkeeping, the host's clock around begin, use_stream, the
//          appends, reserve and end, of steps that begin when the device has nothing to do
// tables   what kv_step_reserve puts on the stream
// compact, triattention: one layer, all sequences' kv_compress behind each other, but for a first
//          one, which is not timed; with offsets=max the greatest over 17 offsets counts. Scored by
//          a kernel, by=products of matrices by cuBLASLt, or by=tf32, products of rounded factors
//
// Medians of nine. What this version does not do on the device has unsupported="..." instead.
// 8 KV heads of 128 dimensions, 4 query heads each. With --quick, small shapes: to try the program
// itself. Exit status 3 where there is no GPU, with the reason.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string_view>
#include <vector>

#include "gpu/host_driver.hpp"
#include "kvrt/kv_cuda.h"

using namespace kvrt;
using namespace kvrt::cuda;

namespace {

constexpr int no_gpu = 3, repetitions = 9;

struct shape {
    uint32_t kv_heads = 8, query_heads = 32, dim = 128;
    uint32_t prompt_rows = 4096;  ///< written in one step
    uint64_t copy_bytes = uint64_t{1} << 30;
    uint64_t decode_tokens = 16 * 16384;  ///< of all sequences
    uint32_t contexts[2] = {16384, 65536};
    uint32_t sequences = 256, layers = 32, context = 512;
    uint32_t round_sequences = 64, round_context = 4096;
};

gpu_host* opened = nullptr;
shape sizes;

gpu_host& gpu() { return *opened; }

[[noreturn]] void give_up(const char* call) {
    fmt::print(stderr, "{}: {}\n", call, message_buffer());
    std::exit(1);
}
void check(kv_status verdict, const char* call) {
    if (verdict < 0) give_up(call);
}
void check_driver(driver_result result, const char* call) { gpu().demand(result, call); }

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

/// What verbs of this version refuse is a line, not an error.
bool is_supported(kv_status verdict, const std::string& name, const char* call) {
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

/// [rows, heads, dim] of f16 on the device, of normally distributed numbers.
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

/// Microseconds on the device of what `body` enqueues.
template <class callable>
double device_microseconds(const callable& body, int times = repetitions) {
    event_handle start = nullptr, end = nullptr;
    check_driver(gpu().calls().event_create(&start, event_default), "cuEventCreate");
    check_driver(gpu().calls().event_create(&end, event_default), "cuEventCreate");
    std::vector<double> measured;
    for (int i = 0; i < times; ++i) {
        check_driver(gpu().calls().event_record(start, gpu().stream()), "cuEventRecord");
        body();
        check_driver(gpu().calls().event_record(end, gpu().stream()), "cuEventRecord");
        gpu().synchronise();
        float milliseconds = 0;
        check_driver(gpu().calls().event_elapsed(&milliseconds, start, end), "cuEventElapsedTime");
        measured.push_back(1000.0 * static_cast<double>(milliseconds));
    }
    (void)gpu().calls().event_destroy(start);
    (void)gpu().calls().event_destroy(end);
    return median(measured);
}

double gigabytes_per_second(double bytes, double microseconds) {
    return bytes / microseconds / 1e3;
}

double measure_copy() {
    const device_bytes from(sizes.copy_bytes), to(sizes.copy_bytes);
    const double us = device_microseconds([&] {
        check_driver(gpu().calls().copy_on_device(to.address(), from.address(), sizes.copy_bytes,
                                                  gpu().stream()),
                     "cuMemcpyDtoDAsync");
    });
    const double gbps = gigabytes_per_second(2.0 * static_cast<double>(sizes.copy_bytes), us);
    fmt::print("gpu copy bytes={} us={:.1f} gbps={:.0f}\n", sizes.copy_bytes, us, gbps);
    return gbps;
}

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
        bytes_per_token_ = static_cast<double>(plan.bytes_per_token);
        config.arena_bytes = plan.arena_bytes_needed;
        check(kv_pool_create(&config, &model, &pool_), "kv_pool_create");
    }
    filled_pool(const filled_pool&) = delete;
    filled_pool& operator=(const filled_pool&) = delete;
    ~filled_pool() { kv_pool_release(pool_); }

    /// UNSUPPORTED: a policy that the device does not run.
    kv_status create(const kv_policy* policy) {
        kv_seq_config config = KV_INIT(kv_seq_config);
        config.policy = policy;
        for (uint32_t i = 0; i < shape_.sequences; ++i) {
            kv_seq seq = 0;
            const kv_status verdict = kv_seq_create(pool_, &config, &seq);
            if (verdict < 0) return verdict;
            sequences_.push_back(seq);
        }
        return KV_OK;
    }
    kv_status fill() {
        const random_rows rows(sizes.prompt_rows, shape_.kv_heads, shape_.dim);
        for (const kv_seq seq : sequences_) {
            for (uint32_t done = 0; done < shape_.context;) {
                const uint32_t count = std::min(sizes.prompt_rows, shape_.context - done);
                kv_step* const step = begin();
                check(kv_seq_append(step, seq, nullptr, count, nullptr), "kv_seq_append");
                reserve(step);
                const kv_tensor view = rows.view(count);
                for (uint32_t l = 0; l < shape_.layers; ++l) {
                    const kv_status verdict = kv_write(step, l, &view, &view);
                    if (verdict < 0) return verdict;
                }
                check(kv_step_end(step, nullptr), "kv_step_end");
                done += count;
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

    kv_pool* handle() const { return pool_; }
    const std::vector<kv_seq>& sequences() const { return sequences_; }
    double bytes_per_token() const { return bytes_per_token_; }

  private:
    pool_shape shape_;
    std::vector<double> inverse_frequencies_;
    kv_rope rope_ = KV_INIT(kv_rope);
    kv_pool* pool_ = nullptr;
    std::vector<kv_seq> sequences_;
    double bytes_per_token_ = 0;
};

void measure_decode(const char* name, uint32_t format, uint32_t context, double copy_gbps) {
    const uint32_t sequences =
        static_cast<uint32_t>(std::max<uint64_t>(1, sizes.decode_tokens / context));
    const std::string words = fmt::format("decode {} kv={} sequences={}", name, context, sequences);
    filled_pool pool({1, format, sequences, context, sizes.query_heads, sizes.kv_heads, sizes.dim});
    check(pool.create(nullptr), "kv_seq_create");
    if (!is_supported(pool.fill(), words, "kv_write")) return;
    const random_rows rows(sequences, sizes.kv_heads, sizes.dim);
    const random_rows queries(sequences, sizes.query_heads, sizes.dim);
    const random_rows out(sequences, sizes.query_heads, sizes.dim);
    kv_step* const step = pool.begin();
    pool.append_all(step);
    filled_pool::reserve(step);
    const kv_tensor written = rows.view(sequences), asked = queries.view(sequences),
                    answered = out.view(sequences);
    check(kv_write(step, 0, &written, &written), "kv_write");
    const kv_status verdict = kv_attend(step, 0, &asked, &answered, nullptr);
    if (is_supported(verdict, words, "kv_attend")) {
        constexpr int calls = 10;
        const double us =
            device_microseconds([&] {
                for (int i = 0; i < calls; ++i) {
                    check(kv_attend(step, 0, &asked, &answered, nullptr), "kv_attend");
                }
            }) /
            calls;
        const double bytes = pool.bytes_per_token() * sequences * (context + 1.0);
        const double gbps = gigabytes_per_second(bytes, us);
        fmt::print("gpu {} us={:.1f} gbps={:.0f} of_copy={:.2f} wanted=0.85\n", words, us, gbps,
                   gbps / copy_gbps);
    }
    check(kv_step_end(step, nullptr), "kv_step_end");
}

void measure_steps() {
    filled_pool pool({sizes.layers, KV_FORMAT_F16, sizes.sequences, sizes.context, 4, 1, 64});
    check(pool.create(nullptr), "kv_seq_create");
    const std::string of = fmt::format("sequences={} layers={}", sizes.sequences, sizes.layers);
    if (!is_supported(pool.fill(), "bookkeeping " + of, "kv_write")) return;
    const random_rows rows(sizes.sequences, 1, 64);
    const kv_tensor view = rows.view(sizes.sequences);
    std::vector<double> host;
    double device = 0;
    // More than a block's tokens, so that steps at the edge of blocks are among them.
    for (int i = 0; i < 32; ++i) {
        using clock = std::chrono::steady_clock;
        const auto start = clock::now();
        kv_step* const step = pool.begin();
        pool.append_all(step);
        clock::duration time{};
        if (i + 1 < 32) {
            filled_pool::reserve(step);
            time = clock::now() - start;
        } else {
            device = device_microseconds([&] { filled_pool::reserve(step); }, 1);
        }
        for (uint32_t l = 0; l < sizes.layers; ++l) {
            check(kv_write(step, l, &view, &view), "kv_write");
        }
        const auto written = clock::now();
        check(kv_step_end(step, nullptr), "kv_step_end");
        time += clock::now() - written;
        if (i > 0 && i + 1 < 32) {
            host.push_back(std::chrono::duration<double, std::micro>(time).count());
        }
        gpu().synchronise();
    }
    fmt::print("gpu bookkeeping {} us={:.1f} most={:.1f} wanted_below=30\n", of, median(host),
               *std::max_element(host.begin(), host.end()));
    fmt::print("gpu tables {} us={:.1f} wanted_below=30\n", of, device);
}

/// Statistics that pull in no direction: rounds take as long as with any others.
kv_status set_statistics(const filled_pool& pool) {
    std::vector<float> numbers(uint64_t{sizes.query_heads} * sizes.dim / 2, 1.0f);
    kv_query_statistics statistics = KV_INIT(kv_query_statistics);
    statistics.query_heads = sizes.query_heads;
    statistics.bands = sizes.dim / 2;
    statistics.tokens = 1000;
    statistics.mean_real = statistics.mean_imaginary = statistics.mean_magnitude = numbers.data();
    return kv_pool_set_statistics(pool.handle(), &statistics);
}

struct round_case {
    std::string name;
    uint32_t scorer = 0;
    double kept = 0;
    uint32_t flags = 0;  ///< of the policy
    uint32_t method = KV_CUDA_SCORE_KERNEL;
    uint32_t scoring_flags = 0;
    bool wanted = true;
};

/// A round of all sequences, once: what is kept of them is less afterwards.
void measure_round(const round_case& of, double copy_gbps) {
    const uint32_t context = sizes.round_context, sequences = sizes.round_sequences;
    const std::string& name = of.name;
    filled_pool pool(
        {1, KV_FORMAT_F16, sequences + 1, context, sizes.query_heads, sizes.kv_heads, sizes.dim});
    kv_policy policy = KV_INIT(kv_policy);
    policy.scorer = of.scorer;
    policy.flags = of.flags;
    policy.budget = std::max(1u, static_cast<uint32_t>(of.kept * context));
    policy.seed = 1;
    const bool by_statistics = of.scorer == KV_SCORER_TRIATTENTION;
    if (by_statistics && !is_supported(set_statistics(pool), name, "kv_pool_set_statistics")) {
        return;
    }
    kv_cuda_scoring scoring = KV_INIT(kv_cuda_scoring);
    scoring.method = of.method;
    scoring.flags = of.scoring_flags;
    if (!is_supported(kv_cuda_pool_set_scoring(pool.handle(), &scoring), name,
                      "kv_cuda_pool_set_scoring")) {
        return;
    }
    if (!is_supported(pool.create(&policy), name, "kv_seq_create")) return;
    if (!is_supported(pool.fill(), name, "kv_write")) return;
    kv_status verdict = KV_OK;
    kv_step* const step = pool.begin();  // whose stream rounds go to
    const bool measured = of.method == KV_CUDA_SCORE_MEASURED;
    const auto compress = [&](std::size_t first, std::size_t end) {
        for (std::size_t i = first; i < end && verdict >= 0; ++i) {
            verdict = kv_compress(pool.handle(), pool.sequences()[i], nullptr, nullptr);
            if (measured) gpu().synchronise();  // so that the next round finds it timed
        }
    };
    compress(0, 1);
    gpu().synchronise();
    const double us = device_microseconds([&] { compress(1, sequences + 1); }, 1);
    check(kv_step_cancel(step), "kv_step_cancel");
    if (!is_supported(verdict, name, "kv_compress")) return;
    if (measured) {
        kv_cuda_scoring_report report = KV_INIT(kv_cuda_scoring_report);
        check(kv_cuda_pool_get_scoring(pool.handle(), &report), "kv_cuda_pool_get_scoring");
        fmt::print("gpu {} chosen={}\n", name,
                   report.product_kinds != 0  ? "products"
                   : report.kernel_kinds != 0 ? "kernel"
                                              : "nothing_yet");
        return;
    }
    if (by_statistics) {
        fmt::print("gpu {} us={:.1f}{}\n", name, us, of.wanted ? " wanted_below=1000" : "");
        return;
    }
    const double bytes = 2 * pool.bytes_per_token() * policy.budget * sequences;
    const double gbps = gigabytes_per_second(bytes, us);
    fmt::print("gpu {} us={:.1f} gbps={:.0f} of_copy={:.2f} wanted=0.60\n", name, us, gbps,
               gbps / copy_gbps);
}

void make_small() { sizes = {2, 4, 64, 32, uint64_t{1} << 20, 128, {64, 128}, 3, 2, 40, 2, 64}; }

}  // namespace

int main(int count, char** words) {
    for (int i = 1; i < count; ++i) {
        if (std::string_view(words[i]) != "--quick") {
            fmt::print(stderr, "usage: bench_gpu [--quick]\n");
            return 2;
        }
        make_small();
    }
    gpu_host host;
    opened = &host;
    if (host.open() != KV_OK) {
        fmt::print(stderr, "no GPU here: {}\n", message_buffer());
        return no_gpu;
    }
    fmt::print("gpu device {}\n", gpu().describe());
    const double copy_gbps = measure_copy();
    struct {
        const char* name;
        uint32_t format;
    } const formats[] = {
        {"bf16", KV_FORMAT_BF16}, {"fp8", KV_FORMAT_FP8_TOKEN}, {"int4", KV_FORMAT_INT4_TOKEN}};
    for (const auto& each : formats) {
        for (const uint32_t context : sizes.contexts) {
            measure_decode(each.name, each.format, context, copy_gbps);
        }
    }
    measure_steps();
    measure_round({"compact f16 kept=0.10", KV_SCORER_RANDOM, 0.1}, copy_gbps);
    struct {
        const char* name;
        uint32_t method, flags;
    } const ways[] = {{"", KV_CUDA_SCORE_KERNEL, 0},
                      {" by=products", KV_CUDA_SCORE_PRODUCTS, 0},
                      {" by=tf32", KV_CUDA_SCORE_PRODUCTS, KV_CUDA_SCORING_TF32},
                      {" by=measured", KV_CUDA_SCORE_MEASURED, 0}};
    for (const uint32_t flags : {0u, uint32_t{KV_POLICY_OFFSETS_MAX}}) {
        for (const auto& way : ways) {
            const std::string name =
                fmt::format("triattention{}{} sequences={} kv={}", flags != 0 ? " offsets=max" : "",
                            way.name, sizes.round_sequences, sizes.round_context);
            measure_round({name, KV_SCORER_TRIATTENTION, 0.5, flags, way.method, way.flags,
                           flags == 0 && way.method == KV_CUDA_SCORE_KERNEL},
                          copy_gbps);
        }
    }
    return 0;
}
