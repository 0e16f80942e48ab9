// The sample on the library: the same numbers as another engine has, in any chunks and company, and
// texts whose caches shrink as their policies say.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "chat.hpp"
#include "golden.hpp"
#include "kv_cache.hpp"
#include "real_model.hpp"
#include "sampler.hpp"
#include "writer.hpp"

using generate::kv_cache;
using generate::token_id;

namespace {

struct golden_run {
    std::vector<token_id> prompt;
    std::vector<std::vector<std::pair<std::uint32_t, float>>> top;  // per position
    std::vector<token_id> greedy;
};

golden_run read_golden() {
    golden_run read;
    for (const golden::line& line : golden::read_lines("logits_f32.txt")) {
        if (line.word == "tokens") {
            read.prompt = golden::numbers(line.content);
        } else if (line.word == "top") {
            read.top.push_back(golden::pairs(line.content));
        } else if (line.word == "greedy") {
            read.greedy = golden::numbers(line.content);
        }
    }
    return read;
}

kv_cache make_cache(std::uint32_t format, std::uint32_t sequences = 1,
                    bool cache_positions = false) {
    generate::cache_options options;
    options.cache_positions = cache_positions;
    options.storage = {{{format}, {format}}};
    options.most_sequences = sequences;
    options.most_tokens = 256;
    options.most_step_rows = 128;
    options.threads = 2;
    auto cache = kv_cache::create(real_model().model.config, options);
    REQUIRE_MESSAGE(cache, (cache ? std::string() : cache.message()));
    return std::move(*cache);
}

kv_seq make_sequence(kv_cache& cache) {
    auto sequence = cache.create_sequence(nullptr);
    REQUIRE_MESSAGE(sequence, (sequence ? std::string() : sequence.message()));
    return *sequence;
}

// One step; returns the logits of all its rows.
std::vector<float> run_step(generate::forward_pass& pass, kv_cache& cache,
                            std::span<const kv_cache::item> items) {
    auto positions = cache.begin(items);
    REQUIRE_MESSAGE(positions, (positions ? std::string() : positions.message()));
    std::vector<token_id> tokens;
    std::vector<std::uint32_t> rows;
    for (const kv_cache::item& item : items) {
        tokens.insert(tokens.end(), item.tokens.begin(), item.tokens.end());
    }
    for (std::uint32_t row = 0; row < tokens.size(); ++row) {
        rows.push_back(row);
    }
    std::vector<float> logits(tokens.size() * real_model().model.config.vocabulary);
    auto done = pass.run({tokens, *positions, rows}, cache, logits);
    REQUIRE_MESSAGE(done, (done ? std::string() : done.message()));
    auto ended = cache.end();
    REQUIRE_MESSAGE(ended, (ended ? std::string() : ended.message()));
    return logits;
}

std::vector<float> run_chunked(generate::forward_pass& pass, kv_cache& cache, kv_seq sequence,
                               std::span<const token_id> tokens, std::size_t chunk) {
    std::vector<float> logits;
    while (!tokens.empty()) {
        const kv_cache::item item = {sequence, tokens.first(std::min(chunk, tokens.size()))};
        const auto part = run_step(pass, cache, {&item, 1});
        logits.insert(logits.end(), part.begin(), part.end());
        tokens = tokens.subspan(item.tokens.size());
    }
    return logits;
}

double largest_difference(const golden_run& golden, const std::vector<float>& logits) {
    const std::size_t vocabulary = real_model().model.config.vocabulary;
    REQUIRE(logits.size() == golden.top.size() * vocabulary);
    double largest = 0;
    for (std::size_t position = 0; position < golden.top.size(); ++position) {
        for (const auto& [token, expected] : golden.top[position]) {
            const float value = logits[position * vocabulary + token];
            largest = std::max(largest, std::fabs(static_cast<double>(value - expected)));
        }
    }
    return largest;
}

std::vector<token_id> write_greedily(generate::forward_pass& pass, kv_cache& cache, kv_seq sequence,
                                     std::span<const float> logits, std::size_t count) {
    std::vector<float> last(logits.end() - real_model().model.config.vocabulary, logits.end());
    std::vector<token_id> written;
    while (written.size() < count) {
        const token_id token = generate::greedy_token(last);
        written.push_back(token);
        const kv_cache::item item = {sequence, {&token, 1}};
        last = run_step(pass, cache, {&item, 1});
    }
    return written;
}

std::vector<token_id> question(std::string_view text) {
    auto tokens = generate::prompt_tokens(real_model().file, real_model().words, text,
                                          generate::prompt_style::chat);
    REQUIRE(tokens);
    return *tokens;
}

generate::writing_options short_text(const char* policy) {
    generate::writing_options options;
    options.policy = policy;
    options.tokens = 110;
    options.budget = 64;
    options.every = 24;
    options.temperature = 0.7;
    options.threads = 1;
    options.stop_at_end = false;
    return options;
}

generate::writing_result write(const generate::writing_options& options) {
    auto result = generate::write_text(real_model().model, real_model().words,
                                       question("What does a lighthouse keeper do?"), options, {});
    REQUIRE_MESSAGE(result, (result ? std::string() : result.message()));
    return *result;
}

}  // namespace

TEST_CASE("cache: logits and 64 greedy tokens are another engine's, in chunks of any size") {
    const golden_run golden = read_golden();
    generate::forward_pass pass(real_model().model, 128);
    for (const std::size_t chunk : {golden.prompt.size(), std::size_t{16}, std::size_t{7}}) {
        CAPTURE(chunk);
        kv_cache cache = make_cache(KV_FORMAT_F32);
        const kv_seq sequence = make_sequence(cache);
        const auto logits = run_chunked(pass, cache, sequence, golden.prompt, chunk);
        // As in logits_test.cpp: the same f32 arithmetic in another order.
        CHECK(largest_difference(golden, logits) < 5e-4);
        if (chunk == 7) {
            CHECK(write_greedily(pass, cache, sequence, logits, 64) == golden.greedy);
        }
    }
}

TEST_CASE("cache: with rotation left to the library, the same logits and greedy tokens") {
    const golden_run golden = read_golden();
    generate::forward_pass pass(real_model().model, 128);
    kv_cache cache = make_cache(KV_FORMAT_F32, 1, true);
    const kv_seq sequence = make_sequence(cache);
    const auto logits = run_chunked(pass, cache, sequence, golden.prompt, 16);
    CHECK(largest_difference(golden, logits) < 5e-4);
    CHECK(write_greedily(pass, cache, sequence, logits, 64) == golden.greedy);
}

TEST_CASE("cache: half precision moves logits by its rounding, not more") {
    const golden_run golden = read_golden();
    generate::forward_pass pass(real_model().model, 128);
    const auto difference = [&](std::uint32_t format) {
        kv_cache cache = make_cache(format);
        const kv_seq sequence = make_sequence(cache);
        return largest_difference(
            golden, run_chunked(pass, cache, sequence, golden.prompt, golden.prompt.size()));
    };
    // Keys and values are rounded once, to 11 and 8 significant bits: relative errors of up to
    // 2^-12 and 2^-9. On logits of up to 40, through 30 layers, a few hundredths and a few tenths.
    const double of_f16 = difference(KV_FORMAT_F16);
    const double of_bf16 = difference(KV_FORMAT_BF16);
    MESSAGE("f16 ", of_f16, ", bf16 ", of_bf16);
    CHECK(of_f16 < 0.1);
    CHECK(of_bf16 < 0.8);
    CHECK(of_f16 > 0);
    CHECK(of_bf16 > of_f16);
}

TEST_CASE("cache: presets take the bytes of their formats, and move logits by their coarseness") {
    const golden_run golden = read_golden();
    generate::forward_pass pass(real_model().model, 128);
    // 30 layers of 3 KV heads with 64 dimensions. Of a token and layer f16 takes 3 * 256 bytes,
    // int8_token 3 * 68 of keys or values, int4_token 3 * 36. Logits go up to 40.
    struct preset_case {
        std::uint32_t preset;
        std::uint64_t bytes_per_token;
        double most;
    };
    for (const preset_case& one : {preset_case{KV_PRESET_NEAR_LOSSLESS, 30 * 408, 1.0},
                                   preset_case{KV_PRESET_BALANCED, 4 * 768 + 26 * 312, 3.0},
                                   preset_case{KV_PRESET_SMALLEST, 4 * 768 + 26 * 216, 8.0}}) {
        CAPTURE(one.preset);
        generate::cache_options options;
        options.preset = one.preset;
        options.most_tokens = 256;
        options.most_step_rows = 128;
        options.threads = 2;
        auto cache = kv_cache::create(real_model().model.config, options);
        REQUIRE_MESSAGE(cache, (cache ? std::string() : cache.message()));
        const kv_seq sequence = make_sequence(*cache);
        const double difference = largest_difference(
            golden, run_chunked(pass, *cache, sequence, golden.prompt, golden.prompt.size()));
        MESSAGE("preset ", one.preset, ": ", difference);
        CHECK(difference < one.most);
        CHECK(difference > 0.01);
        const auto info = cache->info(sequence);
        REQUIRE(info);
        CHECK(info->bytes == (golden.prompt.size() + 15) / 16 * 16 * one.bytes_per_token);
    }
}

TEST_CASE("cache: sequences in one batch do not see each other") {
    const golden_run golden = read_golden();
    const auto other = question("Tell me a story.");
    generate::forward_pass pass(real_model().model, 128);
    kv_cache cache = make_cache(KV_FORMAT_F32, 2);
    const kv_seq first = make_sequence(cache);
    const kv_seq second = make_sequence(cache);
    // Steps that hold a chunk of the one and a few tokens of the other, in turn first and last.
    std::vector<float> logits;
    const std::size_t vocabulary = real_model().model.config.vocabulary;
    std::span<const token_id> left = golden.prompt;
    std::span<const token_id> other_left = other;
    while (!left.empty()) {
        kv_cache::item items[] = {{first, left.first(std::min<std::size_t>(9, left.size()))},
                                  {second, other_left.first(3)}};
        const std::size_t rows = items[0].tokens.size();
        left = left.subspan(rows);
        other_left = other_left.subspan(3);
        const bool swapped = left.size() % 2 == 0;
        if (swapped) {
            std::swap(items[0], items[1]);
        }
        const auto part = run_step(pass, cache, items);
        const auto start = part.begin() + static_cast<std::ptrdiff_t>(swapped ? 3 * vocabulary : 0);
        logits.insert(logits.end(), start, start + static_cast<std::ptrdiff_t>(rows * vocabulary));
    }
    CHECK(largest_difference(golden, logits) < 5e-4);
    REQUIRE(cache.release_sequence(second));
    CHECK(write_greedily(pass, cache, first, logits, 16) ==
          std::vector<token_id>(golden.greedy.begin(), golden.greedy.begin() + 16));
}

TEST_CASE("cache: a step that fails or is left is undone by the next one") {
    const golden_run golden = read_golden();
    generate::forward_pass pass(real_model().model, 128);
    kv_cache cache = make_cache(KV_FORMAT_F32);
    const kv_seq sequence = make_sequence(cache);
    const kv_cache::item all = {sequence, golden.prompt};
    REQUIRE(cache.begin({&all, 1}));  // reserved, and never run
    const kv_cache::item stale = {sequence + 1, golden.prompt};
    auto refused = cache.begin({&stale, 1});
    REQUIRE_FALSE(refused);
    CHECK(refused.message().find("kv_seq_append: KV_") != std::string::npos);
    CHECK(largest_difference(golden, run_step(pass, cache, {&all, 1})) < 5e-4);
    auto retained = cache.retained(sequence, 0);
    REQUIRE(retained);
    CHECK(*retained == golden.prompt.size());
}

TEST_CASE("writer: a full cache keeps every token") {
    const auto result = write(short_text("full"));
    CHECK(result.policy == "full");
    CHECK(result.generated_tokens == 110);
    CHECK(result.prompt_tokens == question("What does a lighthouse keeper do?").size());
    CHECK(result.retained == std::vector<std::uint64_t>(30, result.prompt_tokens + 110));
    const std::uint64_t blocks = 30 * ((result.prompt_tokens + 110 + 15) / 16);
    CHECK(result.final_blocks == blocks);
    CHECK(result.peak_blocks == blocks);
    CHECK(result.blocks_returned == 0);
    CHECK(result.bytes_returned == 0);
}

TEST_CASE("writer: policies bound the cache and return whole blocks") {
    for (const char* policy : {"triattention", "streaming", "key-norm", "random"}) {
        CAPTURE(policy);
        const auto result = write(short_text(policy));
        CHECK(result.generated_tokens == 110);
        for (const std::uint64_t retained : result.retained) {
            CHECK(retained >= 64);
            CHECK(retained < 64 + 24);
        }
        CHECK(result.blocks_returned > 0);
        CHECK(result.bytes_returned > 0);
        CHECK(result.final_blocks <= 30 * 6);  // 87 tokens at most, in blocks of 16
        CHECK(result.peak_blocks >= result.final_blocks);
        CHECK(result.peak_blocks <= 30 * 7);  // and a block for the step that triggers
        // Each round gives back whole blocks, as many bytes as they hold.
        CHECK(result.bytes_returned == result.blocks_returned * (16 * 3 * 64 * 2 * 2));
    }
}

TEST_CASE("writer: rotated by places in the cache, texts are as long as one likes") {
    generate::writing_options options = short_text("streaming");
    options.cache_positions = true;
    const auto bounded = write(options);
    CHECK(bounded.generated_tokens == 110);
    for (const std::uint64_t retained : bounded.retained) {
        CHECK(retained >= 64);
        CHECK(retained < 64 + 24);
    }
    // The model ends its answer long before.
    options.tokens = 1u << 20;
    options.temperature = 0;
    options.stop_at_end = true;
    CHECK(write(options).generated_tokens < 1000);
    options.policy = "full";
    auto refused = generate::write_text(real_model().model, real_model().words, question("Hello."),
                                        options, {});
    REQUIRE_FALSE(refused);
    CHECK(refused.message().find("--cache-positions") != std::string::npos);
}

TEST_CASE("writer: the same seed writes the same text, another one another") {
    generate::writing_options options = short_text("triattention");
    options.tokens = 60;
    options.budget = 48;
    options.every = 16;
    const std::string text = write(options).text;
    CHECK(text == write(options).text);
    options.seed = 2;
    CHECK(text != write(options).text);
}

TEST_CASE("writer: follow-up questions are read where an answer ends") {
    generate::writing_options options = short_text("full");
    options.temperature = 0;
    options.tokens = 60;
    for (const char* text : {"And of Italy?", "And of Spain?", "And of Japan?"}) {
        options.follow_ups.push_back({text, generate::follow_up_tokens(real_model().words, text)});
    }
    const auto prompt = question("What is the capital of France? Answer with one word.");
    auto result = generate::write_text(real_model().model, real_model().words, prompt, options, {});
    REQUIRE_MESSAGE(result, (result ? std::string() : result.message()));
    CHECK(result->generated_tokens == 60);
    CHECK(result->text.find("\n\n> And of Italy?\n\n") != std::string::npos);
    CHECK(result->prompt_tokens > prompt.size());
    CHECK(result->retained.front() == result->prompt_tokens + 60);
}

TEST_CASE("writer: a text longer than the model's context is refused") {
    generate::writing_options options = short_text("full");
    options.tokens = 8192;
    auto refused = generate::write_text(real_model().model, real_model().words, question("Hello."),
                                        options, {});
    REQUIRE_FALSE(refused);
    CHECK(refused.message().find("ask for fewer with --tokens") != std::string::npos);
}
