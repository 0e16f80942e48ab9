// Pools on the GPU of this machine against the bandwidth at which it copies, in one run:
//
//   gpu device ...                        what it is
//   gpu shape kv_heads=8 query_heads=32 dim=128   of everything below but bookkeeping
//   gpu copy bytes=... us=... gbps=...    read and written, device to device
//   gpu decode bf16 kv=16384 sequences=16 bytes=... us=... gbps=... of_copy=0.871 wanted=0.85
//   met=yes gpu bookkeeping sequences=256 layers=32 us=... most=... tables=... wanted_below=30
//   met=no gpu compact f16 kept=0.10 bytes=... us=... gbps=... of_copy=... wanted=0.60 met=... gpu
//   triattention sequences=64 kv=4096 us=... host=... wanted_below=1000 met=... gpu triattention
//   offsets=max by=products sequences=64 kv=4096 us=... host=... gpu triattention offsets=max
//   by=measured sequences=64 kv=4096 chosen=kernel
//
// us       by the device's events, behind a copy that keeps the device busy until all is enqueued
// bytes    of decode: keys and values of all slots with their scales, each read once, and no
//          padding; of compact: what is kept, read once and written once
// of_copy  bytes by time, of what the copy reads and writes by its own
// decode   one layer of several whose keys are read in turn
// bookkeeping  us: the host's clock around begin, use_stream, the appends, reserve and end, of
// steps
//          that begin when the device has nothing to do; tables: what kv_step_reserve has put on
//          the stream, by the device's events; their sum has to be below what is wanted
// compact, triattention  one layer: all of a round of all sequences at once, behind a step in which
//          their policies are due, and nothing else of the step; host: kv_step_end, by its clock,
//          which has to be below what is wanted, too. With offsets=max the greatest over 17 offsets
//          counts. Scored by a kernel, by=products of matrices by cuBLASLt, or by=tf32, products of
//          rounded factors
//
// Medians. What this version does not do on the device has unsupported="..." instead. With --quick,
// small shapes: to try the program itself. Exit status 3 where there is no GPU, with the reason.
#include <chrono>
#include <string_view>

#include "gpu_pools.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

namespace {

using clock_type = std::chrono::steady_clock;

constexpr int no_gpu = 3;

double microseconds(clock_type::duration time) {
    return std::chrono::duration<double, std::micro>(time).count();
}
double gigabytes_per_second(double bytes, double us) { return bytes / us / 1e3; }
const char* yes_or_no(bool met) { return met ? "yes" : "no"; }

/// The rest of a line: how fast that is, and whether it is as fast as it has to be.
void print_rate(const std::string& name, double bytes, double us, double copy_gbps, double wanted) {
    const double gbps = gigabytes_per_second(bytes, us), share = gbps / copy_gbps;
    fmt::print("gpu {} bytes={:.0f} us={:.1f} gbps={:.0f} of_copy={:.3f} wanted={:.2f} met={}\n",
               name, bytes, us, gbps, share, wanted, yes_or_no(share >= wanted));
}

double measure_copy(const device_clock& clock) {
    const double us = clock.often([&] { clock.copy(); });
    const double gbps = gigabytes_per_second(2.0 * static_cast<double>(sizes.copy_bytes), us);
    fmt::print("gpu copy bytes={} us={:.1f} gbps={:.0f}\n", sizes.copy_bytes, us, gbps);
    return gbps;
}

void measure_decode(const device_clock& clock, const char* name, uint32_t format, uint32_t context,
                    double copy_gbps) {
    const uint32_t sequences =
        static_cast<uint32_t>(std::max<uint64_t>(1, sizes.decode_tokens / context));
    const std::string words = fmt::format("decode {} kv={} sequences={}", name, context, sequences);
    filled_pool pool({sizes.decode_layers, format, sequences, context, sizes.query_heads,
                      sizes.kv_heads, sizes.dim});
    pool.create();
    if (!is_supported(pool.fill(), words, "kv_write")) return;
    const random_rows rows(sequences, sizes.kv_heads, sizes.dim);
    const random_rows queries(sequences, sizes.query_heads, sizes.dim);
    const random_rows out(sequences, sizes.query_heads, sizes.dim);
    kv_step* const step = pool.begin();
    pool.append_all(step);
    filled_pool::reserve(step);
    const kv_tensor written = rows.view(sequences), asked = queries.view(sequences),
                    answered = out.view(sequences);
    kv_status verdict = KV_OK;
    const auto attend = [&] {
        for (uint32_t l = 0; l < sizes.decode_layers && verdict >= 0; ++l) {
            verdict = kv_attend(step, l, &asked, &answered, nullptr);
        }
    };
    for (uint32_t l = 0; l < sizes.decode_layers; ++l) {
        check(kv_write(step, l, &written, &written), "kv_write");
    }
    attend();
    if (is_supported(verdict, words, "kv_attend")) {
        const double us = clock.often([&] {
            attend();
            attend();
        });
        check(verdict, "kv_attend");
        print_rate(words, pool.bytes_of_token() * sequences * (context + 1.0),
                   us / (2 * sizes.decode_layers), copy_gbps, 0.85);
    }
    check(kv_step_end(step, nullptr), "kv_step_end");
}

void measure_steps(const device_clock& clock) {
    filled_pool pool({sizes.layers, KV_FORMAT_F16, sizes.sequences, sizes.context, 4, 1, 64});
    pool.create();
    const std::string name =
        fmt::format("bookkeeping sequences={} layers={}", sizes.sequences, sizes.layers);
    if (!is_supported(pool.fill(), name, "kv_write")) return;
    const random_rows rows(sizes.sequences, 1, 64);
    const kv_tensor view = rows.view(sizes.sequences);
    std::vector<double> host, device;
    // Several blocks' tokens, so that steps at the edge of blocks are among them.
    for (int i = 0; i < 64; ++i) {
        const bool on_device = i % 2 != 0;
        clock_type::duration time{};
        const auto start = clock_type::now();
        kv_step* const step = pool.begin();
        pool.append_all(step);
        if (on_device) {
            device.push_back(clock.once([&] { filled_pool::reserve(step); }));
        } else {
            filled_pool::reserve(step);
            time = clock_type::now() - start;
        }
        for (uint32_t l = 0; l < sizes.layers; ++l) {
            check(kv_write(step, l, &view, &view), "kv_write");
        }
        const auto written = clock_type::now();
        check(kv_step_end(step, nullptr), "kv_step_end");
        time += clock_type::now() - written;
        if (i > 0 && !on_device) host.push_back(microseconds(time));
        gpu().synchronise();
    }
    constexpr double wanted = 30;
    const double us = median(host), tables = median(device);
    fmt::print("gpu {} us={:.1f} most={:.1f} tables={:.1f} wanted_below={:.0f} met={}\n", name, us,
               *std::max_element(host.begin(), host.end()), tables, wanted,
               yes_or_no(us + tables <= wanted));
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

/// What a round of all sequences at once takes, on the device and of kv_step_end.
struct round_times {
    std::vector<double> device, host;
};

/// A step of one token for each, in which the policies of all are due, and then their tokens again.
kv_status run_round(const device_clock& clock, filled_pool& pool, const kv_policy& policy,
                    round_times& times) {
    const uint32_t sequences = static_cast<uint32_t>(pool.sequences().size());
    const random_rows rows(sequences, sizes.kv_heads, sizes.dim);
    const kv_tensor view = rows.view(sequences);
    for (const kv_seq seq : pool.sequences()) {
        const kv_status verdict = kv_seq_set_policy(pool.handle(), seq, &policy);
        if (verdict < 0) return verdict;
    }
    kv_step* const step = pool.begin();
    pool.append_all(step);
    filled_pool::reserve(step);
    check(kv_write(step, 0, &view, &view), "kv_write");
    kv_step_report report = KV_INIT(kv_step_report);
    times.device.push_back(clock.once([&] {
        const auto start = clock_type::now();
        check(kv_step_end(step, &report), "kv_step_end");
        times.host.push_back(microseconds(clock_type::now() - start));
    }));
    if (report.compactions != sequences) {
        fmt::print(stderr, "{} rounds of {} sequences ran: outcome {}, {}\n", report.compactions,
                   sequences, report.last_skip_outcome, kv_status_name(report.last_skip_status));
        std::exit(1);
    }
    for (const kv_seq seq : pool.sequences()) {
        check(kv_seq_set_policy(pool.handle(), seq, nullptr), "kv_seq_set_policy");
    }
    return pool.fill();
}

void measure_round(const device_clock& clock, const round_case& of, double copy_gbps) {
    const uint32_t context = sizes.round_context, sequences = sizes.round_sequences;
    const std::string& name = of.name;
    filled_pool pool(
        {1, KV_FORMAT_F16, sequences, context, sizes.query_heads, sizes.kv_heads, sizes.dim});
    kv_policy policy = KV_INIT(kv_policy);
    policy.scorer = of.scorer;
    policy.flags = of.flags;
    policy.budget = std::max(1u, static_cast<uint32_t>(of.kept * context));
    policy.every = 1;
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
    pool.create();
    if (!is_supported(pool.fill(), name, "kv_write")) return;
    round_times times;
    if (of.method == KV_CUDA_SCORE_MEASURED) {
        kv_cuda_scoring_report report = KV_INIT(kv_cuda_scoring_report);
        for (int i = 0; i < 2 * sizes.rounds; ++i) {  // three of each way are timed
            if (!is_supported(run_round(clock, pool, policy, times), name, "a round")) return;
            check(kv_cuda_pool_get_scoring(pool.handle(), &report), "kv_cuda_pool_get_scoring");
            if (report.product_kinds + report.kernel_kinds != 0) break;
        }
        fmt::print("gpu {} chosen={}\n", name,
                   report.product_kinds != 0  ? "products"
                   : report.kernel_kinds != 0 ? "kernel"
                                              : "nothing_yet");
        return;
    }
    round_times first;
    if (!is_supported(run_round(clock, pool, policy, first), name, "a round")) return;
    for (int i = 0; i < sizes.rounds; ++i) {
        check(run_round(clock, pool, policy, times), "a round");
    }
    const double us = median(times.device), host = median(times.host);
    if (!by_statistics) {
        print_rate(name, 2 * pool.bytes_of_token() * policy.budget * sequences, us, copy_gbps,
                   0.60);
        return;
    }
    constexpr double wanted = 1000;
    fmt::print("gpu {} us={:.1f} host={:.1f}", name, us, host);
    if (of.wanted) {
        fmt::print(" wanted_below={:.0f} met={}", wanted, yes_or_no(std::max(us, host) <= wanted));
    }
    fmt::print("\n");
}

void make_small() {
    sizes = {2, 4, 64, 32, uint64_t{1} << 20, 128, {64, 128}, 2, 3, 2, 40, 2, 64, 2, 1};
}

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
    // Lines of what is done are there, should the rest be stopped.
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    fmt::print("gpu device {}\n", gpu().describe());
    fmt::print("gpu shape kv_heads={} query_heads={} dim={}\n", sizes.kv_heads, sizes.query_heads,
               sizes.dim);
    const device_clock clock;
    const double copy_gbps = measure_copy(clock);
    struct {
        const char* name;
        uint32_t format;
    } const formats[] = {
        {"bf16", KV_FORMAT_BF16}, {"fp8", KV_FORMAT_FP8_TOKEN}, {"int4", KV_FORMAT_INT4_TOKEN}};
    for (const auto& each : formats) {
        for (const uint32_t context : sizes.contexts) {
            measure_decode(clock, each.name, each.format, context, copy_gbps);
        }
    }
    measure_steps(clock);
    for (const double kept : {0.1, 0.5}) {
        measure_round(clock, {fmt::format("compact f16 kept={:.2f}", kept), KV_SCORER_RANDOM, kept},
                      copy_gbps);
    }
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
            measure_round(clock,
                          {name, KV_SCORER_TRIATTENTION, 0.5, flags, way.method, way.flags,
                           flags == 0 && way.method == KV_CUDA_SCORE_KERNEL},
                          copy_gbps);
        }
    }
    return 0;
}
