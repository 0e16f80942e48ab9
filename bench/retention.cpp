// What retention costs and gives, through kvrt.h as an engine sees it, each in turn within one run:
//
//   retention tracking h2o kv=16384 every=4 format=f16 threads=1 without_us=... with_us=...
//       slower=...
//   retention round h2o kv=32768 threads=1 us=... decode_us=... passes=... tokens_removed=...
//   retention decode kv=32768 budget=3276 threads=1 full_us=... us=... speedup=... full_bytes=...
//       bytes=...
//
// tracking  kv_attend of one token, of sequences whose policy observes attention, in every step,
//           every fourth, or before rounds every 128 tokens, and of others: means of as many steps
// round     kv_compress to a tenth, over a sequence that has its blocks to itself, in decode passes
//           over the full cache; `amortised` is its share of the decode time of the 128 tokens
//           between rounds, at the tenth that is left
// decode    kv_attend of one token over a tenth of the cache and over all of it
//
// One layer of 8 KV heads of 128 dimensions with 4 query heads each.
//
//   bench_retention [--quick] [--threads N] [--format NAME] [--only tracking|decode|SCORER]
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "kvrt/kvrt.h"

namespace {

constexpr uint32_t kv_heads = 8, query_heads = 32, dim = 128;
constexpr uint32_t chunk = 2048;        // rows of a prefill step
constexpr uint32_t observed_rows = 64;  // of the last one, which attends
constexpr uint32_t often = 128;         // tokens between rounds
constexpr uint32_t seldom = 256;        // where docs/integration.md advises it

struct options {
    bool quick = false;
    uint32_t threads = 1;
    std::string_view format_name = "f16";
    uint32_t format = KV_FORMAT_F16;
    std::string_view only;  // a part, or the round of a scorer

    bool wants(std::string_view part) const { return only.empty() || only == part; }
};

void check(kv_status verdict) {
    if (verdict == KV_OK) return;
    char text[512];
    kv_last_error(text, sizeof text);
    fmt::print(stderr, "{}: {}\n", kv_status_name(verdict), text);
    std::exit(1);
}

/// Of the thread where there is one, which others do not take from it; else of the wall.
double now(uint32_t threads) {
    timespec time;
    clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double quantile(std::vector<double> values, double share) {
    std::sort(values.begin(), values.end());
    return values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1) + 0.5)];
}

double mean_of_medians(const std::vector<std::vector<double>>& sets) {
    double sum = 0.0;
    for (const std::vector<double>& set : sets) sum += quantile(set, 0.5);
    return sum / static_cast<double>(sets.size());
}

std::vector<float> normal_numbers(std::size_t count, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> numbers(count);
    for (float& number : numbers) number = normal(random);
    return numbers;
}

kv_tensor tensor(std::vector<float>& numbers, uint64_t rows, uint64_t heads) {
    kv_tensor made = KV_INIT(kv_tensor);
    made.data = numbers.data();
    made.dtype = KV_DTYPE_F32;
    made.rows = rows;
    made.heads = heads;
    made.dim = dim;
    return made;
}

class engine {
  public:
    engine(const options& chosen, uint32_t tokens, uint32_t sequences)
        : threads_(chosen.threads),
          keys_(normal_numbers(std::size_t{chunk} * kv_heads * dim, 1)),
          values_(normal_numbers(std::size_t{chunk} * kv_heads * dim, 2)),
          queries_(normal_numbers(std::size_t{chunk} * query_heads * dim, 3)),
          out_(std::size_t{chunk} * query_heads * dim) {
        kv_rope rope = KV_INIT(kv_rope);
        rope.style = KV_ROPE_HALF;
        kv_layer layer = KV_INIT(kv_layer);
        layer.query_heads = query_heads;
        layer.kv_heads = kv_heads;
        layer.key_dim = dim;
        layer.key_format = chosen.format;
        layer.rope = &rope;
        kv_model model = KV_INIT(kv_model);
        model.layers = &layer;
        model.layer_count = 1;
        kv_pool_config config = KV_INIT(kv_pool_config);
        config.max_sequences = sequences;
        config.max_observed_sequences = sequences;
        config.max_tokens_per_sequence = tokens + chunk;
        config.max_step_tokens = chunk;
        config.threads = chosen.threads;
        kv_plan_report plan = KV_INIT(kv_plan_report);
        plan.tokens_per_sequence = tokens + chunk;
        check(kv_plan(&config, &model, &plan));
        config.arena_bytes = plan.arena_bytes_needed;
        check(kv_pool_create(&config, &model, &pool_));
    }
    ~engine() { kv_pool_release(pool_); }
    engine(const engine&) = delete;
    engine& operator=(const engine&) = delete;

    kv_pool* pool() { return pool_; }

    kv_seq create(const kv_policy* policy) {
        kv_seq_config config = KV_INIT(kv_seq_config);
        config.policy = policy;
        kv_seq made = 0;
        check(kv_seq_create(pool_, &config, &made));
        return made;
    }

    /// `tokens` of a sequence; the last few of them attend.
    void fill(kv_seq sequence, uint32_t tokens) {
        const uint32_t attending = std::min(tokens, observed_rows);
        for (uint32_t left = tokens - attending; left != 0;) {
            const uint32_t rows = std::min(left, chunk);
            step(sequence, rows, false, true);
            left -= rows;
        }
        step(sequence, attending, true, true);
    }

    /// Seconds of kv_attend over one more token, which does not stay unless `keeps`.
    double decode(kv_seq sequence, bool keeps = false) { return step(sequence, 1, true, keeps); }

    double compress(kv_seq sequence, kv_compress_report& report) {
        const double start = now(threads_);
        check(kv_compress(pool_, sequence, nullptr, &report));
        return now(threads_) - start;
    }

    uint64_t bytes(kv_seq sequence) {
        kv_seq_info info = KV_INIT(kv_seq_info);
        check(kv_seq_get_info(pool_, sequence, &info));
        return info.bytes;
    }

  private:
    double step(kv_seq sequence, uint32_t rows, bool attends, bool keeps) {
        kv_step* made = nullptr;
        kv_reserve_report reserved = KV_INIT(kv_reserve_report);
        check(kv_step_begin(pool_, &made));
        check(kv_seq_append(made, sequence, nullptr, rows, nullptr));
        check(kv_step_reserve(made, &reserved));
        const kv_tensor keys = tensor(keys_, rows, kv_heads);
        const kv_tensor values = tensor(values_, rows, kv_heads);
        check(kv_write(made, 0, &keys, &values));
        double time = 0.0;
        if (attends) {
            const kv_tensor queries = tensor(queries_, rows, query_heads);
            const kv_tensor out = tensor(out_, rows, query_heads);
            const double start = now(threads_);
            check(kv_attend(made, 0, &queries, &out, nullptr));
            time = now(threads_) - start;
        }
        if (!keeps) {
            check(kv_step_cancel(made));
        } else {
            check(kv_step_end(made, nullptr));
        }
        return time;
    }

    uint32_t threads_;
    std::vector<float> keys_, values_, queries_, out_;
    kv_pool* pool_ = nullptr;
};

kv_policy policy_of(uint32_t scorer, uint32_t budget) {
    kv_policy policy = KV_INIT(kv_policy);
    policy.scorer = scorer;
    policy.budget = budget;
    policy.sinks = 4;
    policy.recent = 64;
    return policy;
}

struct tracking {
    const char* name;
    uint32_t scorer;
    uint32_t observe_every, rounds_every;
};

constexpr tracking all_tracking[] = {
    {"h2o", KV_SCORER_H2O, 1, 0},           {"h2o", KV_SCORER_H2O, 4, 0},
    {"snapkv", KV_SCORER_SNAPKV, 1, often}, {"snapkv", KV_SCORER_SNAPKV, 1, seldom},
    {"rkv", KV_SCORER_RKV, 1, often},       {"tova", KV_SCORER_TOVA, 1, often},
};

void bench_tracking(const options& chosen, uint32_t tokens, const tracking& method) {
    // Two of either, so that none finds its cache where the last one left it. Both change roles
    // half-way: memory is not alike everywhere.
    const uint32_t pairs = 2;
    engine host(chosen, tokens, 2 * pairs);
    kv_policy observes = policy_of(method.scorer, tokens);
    observes.observe_every = method.observe_every;
    observes.every = method.rounds_every;
    std::vector<kv_seq> plain, observed;
    for (uint32_t i = 0; i < pairs; ++i) {
        plain.push_back(host.create(nullptr));
        observed.push_back(host.create(&observes));
        host.fill(plain.back(), tokens);
        host.fill(observed.back(), tokens);
    }
    // Which steps are observed comes in turns, of which each sequence has whole ones. A turn is cut
    // into phases; a phase counts with its median, so that what else ran meanwhile does not.
    const uint32_t turn = method.rounds_every == 0 ? method.observe_every : method.rounds_every;
    const uint32_t phases = std::min(turn, 8u);
    const uint32_t steps = (chosen.quick ? 20 : 60) * std::max(1u, 16384 / tokens);
    const uint32_t whole = pairs * turn;  // turns
    const uint32_t rounds = method.rounds_every == 0 ? (steps + whole - 1) / whole * whole : whole;
    std::vector<std::vector<double>> without(2 * phases), with(2 * phases);
    for (uint32_t half = 0; half < 2; ++half) {
        std::vector<uint32_t> steps_of(pairs, 0);
        for (uint32_t round = 0; round < rounds; ++round) {
            const uint32_t which = round / 2 % pairs;
            const uint32_t place = half * phases + steps_of[which]++ % turn / (turn / phases);
            for (uint32_t k = 0; k < 2; ++k) {  // in turn, either first
                const bool observing = (k + round) % 2 == 0;
                (observing ? with : without)[place].push_back(
                    host.decode(observing ? observed[which] : plain[which], true));
            }
        }
        for (uint32_t i = 0; i < pairs; ++i) {
            check(kv_seq_set_policy(host.pool(), observed[i], nullptr));
            check(kv_seq_set_policy(host.pool(), plain[i], &observes));
        }
        std::swap(plain, observed);
    }
    const double plain_time = mean_of_medians(without), observed_time = mean_of_medians(with);
    fmt::print(
        "retention tracking {} kv={} every={} rounds={} format={} threads={} without_us={:.0f} "
        "with_us={:.0f} slower={:.3f}\n",
        method.name, tokens, method.observe_every, method.rounds_every, chosen.format_name,
        chosen.threads, plain_time * 1e6, observed_time * 1e6, observed_time / plain_time - 1.0);
    std::fflush(stdout);
}

struct named_scorer {
    const char* name;
    uint32_t scorer;
    uint32_t rounds_every = often;
};

constexpr named_scorer all_scorers[] = {
    {"streaming", KV_SCORER_STREAMING},
    {"random", KV_SCORER_RANDOM},
    {"key_norm", KV_SCORER_KEY_NORM},
    {"keydiff", KV_SCORER_KEYDIFF},
    {"lagkv", KV_SCORER_LAGKV},
    {"vase_sketch", KV_SCORER_VASE_SKETCH},
    {"triattention", KV_SCORER_TRIATTENTION},
    {"expected_attention", KV_SCORER_EXPECTED_ATTENTION},
    {"h2o", KV_SCORER_H2O},
    {"scissorhands", KV_SCORER_SCISSORHANDS},
    {"tova", KV_SCORER_TOVA},
    {"snapkv", KV_SCORER_SNAPKV},
    {"rkv", KV_SCORER_RKV},
    {"vase_attention", KV_SCORER_VASE_ATTENTION},
    {"blend", KV_SCORER_BLEND, seldom},
};

void bench_round(const options& chosen, const named_scorer& method, uint32_t tokens) {
    engine host(chosen, tokens, 2);
    const uint32_t budget = tokens / 10;
    const kv_policy policy = policy_of(method.scorer, budget);
    const kv_seq full = host.create(nullptr);
    host.fill(full, tokens);
    std::vector<double> rounds, passes, decodes, kept;
    kv_compress_report report = KV_INIT(kv_compress_report);
    for (uint32_t i = 0; i < (chosen.quick ? 3u : 7u); ++i) {
        const kv_seq sequence = host.create(&policy);
        host.fill(sequence, tokens);
        const double decode = host.decode(full);
        const double round = host.compress(sequence, report);
        rounds.push_back(round);
        decodes.push_back(decode);
        passes.push_back(round / decode);
        kept.push_back(host.decode(sequence));
        check(kv_seq_release(host.pool(), sequence));
    }
    // A round finds a tenth of the cache and the tokens that came since, not all of it.
    const double share = static_cast<double>(budget + method.rounds_every) / tokens;
    const double amortised = quantile(rounds, 0.5) * share /
                             (quantile(kept, 0.5) * static_cast<double>(method.rounds_every));
    fmt::print(
        "retention round {} kv={} format={} threads={} us={:.0f} decode_us={:.0f} passes={:.2f} "
        "rounds={} amortised={:.4f} tokens_removed={}\n",
        method.name, tokens, chosen.format_name, chosen.threads, quantile(rounds, 0.5) * 1e6,
        quantile(decodes, 0.5) * 1e6, quantile(passes, 0.5), method.rounds_every, amortised,
        report.tokens_before - report.tokens_after);
    std::fflush(stdout);
}

void bench_decode(const options& chosen, uint32_t tokens) {
    engine host(chosen, tokens, 2);
    const kv_policy policy = policy_of(KV_SCORER_H2O, tokens / 10);
    const kv_seq full = host.create(nullptr), small = host.create(&policy);
    host.fill(full, tokens);
    host.fill(small, tokens);
    const uint64_t full_bytes = host.bytes(small);
    kv_compress_report report = KV_INIT(kv_compress_report);
    host.compress(small, report);
    std::vector<double> before, after, ratios;
    for (uint32_t round = 0; round < (chosen.quick ? 20u : 60u); ++round) {
        before.push_back(host.decode(full));
        after.push_back(host.decode(small));
        ratios.push_back(before.back() / after.back());
    }
    fmt::print(
        "retention decode kv={} budget={} format={} threads={} full_us={:.0f} us={:.0f} "
        "speedup={:.2f} full_bytes={} bytes={} bytes_returned={}\n",
        tokens, tokens / 10, chosen.format_name, chosen.threads, quantile(before, 0.5) * 1e6,
        quantile(after, 0.5) * 1e6, quantile(ratios, 0.5), full_bytes, host.bytes(small),
        report.bytes_returned);
    std::fflush(stdout);
}

bool parse(int count, char** words, options& chosen) {
    constexpr struct {
        std::string_view name;
        uint32_t format;
    } formats[] = {{"f16", KV_FORMAT_F16},
                   {"int8_token", KV_FORMAT_INT8_TOKEN},
                   {"int4_token", KV_FORMAT_INT4_TOKEN}};
    for (int i = 1; i < count; ++i) {
        const std::string_view word = words[i];
        if (word == "--quick") {
            chosen.quick = true;
        } else if (word == "--threads" && i + 1 < count) {
            chosen.threads = static_cast<uint32_t>(std::atoi(words[++i]));
        } else if (word == "--only" && i + 1 < count) {
            chosen.only = words[++i];
        } else if (word == "--format" && i + 1 < count) {
            chosen.format_name = words[++i];
            const auto found =
                std::find_if(std::begin(formats), std::end(formats),
                             [&](const auto& one) { return one.name == chosen.format_name; });
            if (found == std::end(formats)) return false;
            chosen.format = found->format;
        } else {
            return false;
        }
    }
    return true;
}

}  // namespace

int main(int count, char** words) {
    options chosen;
    if (!parse(count, words, chosen)) {
        fmt::print(stderr,
                   "usage: bench_retention [--quick] [--threads N] "
                   "[--format f16|int8_token|int4_token] [--only tracking|decode|SCORER]\n");
        return 2;
    }
    for (const uint32_t tokens : {4096u, 16384u, 65536u}) {
        if (!chosen.wants("tracking")) break;
        for (const tracking& method : all_tracking) bench_tracking(chosen, tokens, method);
    }
    for (const named_scorer& method : all_scorers) {
        if (chosen.wants(method.name)) bench_round(chosen, method, 32768);
    }
    if (chosen.wants("decode")) bench_decode(chosen, 32768);
    return 0;
}
