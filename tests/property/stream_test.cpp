// Random streams over every geometry, and the proof that they can fail.
//
//   KVRT_STREAM_OPERATIONS   operations in all (default 200,000; 20,000 under sanitizers)
//   KVRT_STREAM_SEED         first seed (default 1); a failure prints the seed to repeat it with
#include "stream.hpp"

#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>

#include "checked.hpp"

namespace {

using namespace property;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t default_operations = 20000;
#else
constexpr uint64_t default_operations = 200000;
#endif

uint64_t from_environment(const char* name, uint64_t otherwise) {
    const char* text = std::getenv(name);
    return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

/// A stream for each geometry and filling, each with its share of the operations.
void run_streams(content filling, const char* name) {
    const uint64_t seed = from_environment("KVRT_STREAM_SEED", 1);
    const uint64_t operations =
        from_environment("KVRT_STREAM_OPERATIONS", default_operations) / 2 + 1;
    const std::vector<pool_spec> specs = stream_specs(seed);
    // Several short lives of a pool find more than a long one, but each must be long enough to fill
    // it.
    const uint64_t lives = operations >= 50000 ? 3 : 1;
    const uint64_t share = operations / (specs.size() * lives) + 1;
    stream_result all;
    for (const pool_spec& spec : specs) {
        for (uint64_t life = 0; life < lives; ++life) {
            stream_options options;
            options.seed = seed + life;
            options.operations = share;
            options.filling = filling;
            check_no_mismatch([&] {
                const stream_result one = run_stream(spec, options);
                all.operations += one.operations;
                all.attention_rows += one.attention_rows;
                all.bytes_compared += one.bytes_compared;
                all.rounds += one.rounds;
                all.scored_rounds += one.scored_rounds;
                all.again += one.again;
                all.cancelled += one.cancelled;
                all.tokens += one.tokens;
            });
        }
    }
    std::printf(
        "stream of %s: %llu operations, %llu tokens, %llu attention rows, %llu bytes compared, "
        "%llu rounds, %llu of them by what was observed or given, %llu full pools, %llu cancelled "
        "steps\n",
        name, static_cast<unsigned long long>(all.operations),
        static_cast<unsigned long long>(all.tokens),
        static_cast<unsigned long long>(all.attention_rows),
        static_cast<unsigned long long>(all.bytes_compared),
        static_cast<unsigned long long>(all.rounds),
        static_cast<unsigned long long>(all.scored_rounds),
        static_cast<unsigned long long>(all.again), static_cast<unsigned long long>(all.cancelled));
    CHECK(all.operations >= operations);
    // The stream reaches what it is there for.
    CHECK(all.rounds > operations / 2000);
    CHECK(all.scored_rounds > operations / 2000);
    CHECK(all.again > operations / 2000);
    CHECK(all.cancelled > operations / 2000);
    CHECK(all.attention_rows > operations / 100);
    CHECK(all.bytes_compared > operations);
}

/// Does some geometry notice this defect of the oracle?
bool notices(mutation defect) {
    for (const pool_spec& spec : stream_specs()) {
        stream_options options;
        options.operations = 4000;
        options.filling = content::fingerprints;
        options.defect = defect;
        try {
            run_stream(spec, options);
        } catch (const mismatch&) {
            return true;
        }
    }
    return false;
}

}  // namespace

TEST_CASE("random operations agree with the oracle: fingerprints") {
    run_streams(content::fingerprints, "fingerprints");
}

TEST_CASE("random operations agree with the oracle: real numbers") {
    run_streams(content::real_numbers, "real numbers");
}

TEST_CASE("the streams notice a wrong oracle") {
    CHECK(notices(mutation::wide_window));
    CHECK(notices(mutation::overwritten_tail));
    CHECK(notices(mutation::forgotten_block));
    CHECK(notices(mutation::late_protection));
    CHECK(notices(mutation::accepted_draft));
    CHECK(notices(mutation::unmoved_scores));
    CHECK(notices(mutation::kept_scores));
}
