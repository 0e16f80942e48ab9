// Recording a real model: the trace is exactly what the library was handed and gave back, so that a
// replay on the same machine, in batches and without the other layers, comes to the same bits.
#include "recorder.hpp"

#include <doctest/doctest.h>

#include <sstream>

#include "chat.hpp"
#include "golden.hpp"
#include "program.hpp"
#include "real_model.hpp"
#include "trace/checksum.hpp"
#include "trace/trace.hpp"
#include "trace_builder.hpp"
#include "writer.hpp"

namespace {

const char* const prompts[] = {
    "one two three one two three one two",
    "The cat sat on the mat, the dog sat on the log, and the cat sat",
    "x = 1\ny = 2\nz = 3\nprint(x, y",
};

generate::writing_options options_of(const char* policy, const char* format) {
    generate::writing_options options;
    options.policy = policy;
    options.format = format;
    options.tokens = 24;
    options.budget = 16;
    options.every = 8;
    options.evict_prompt = true;
    options.chunk = 8;
    options.drafts = 3;
    options.threads = 1;
    return options;
}

trace::recording record(const std::string& path, std::span<const std::uint32_t> layers,
                        const generate::writing_options& options) {
    auto recorder = generate::trace_recorder::open(path);
    REQUIRE_MESSAGE(recorder, (recorder ? std::string() : recorder.message()));
    REQUIRE((*recorder)->describe_model(real_model().model.config, layers));
    for (const char* text : prompts) {
        const auto prompt = generate::prompt_tokens(real_model().file, real_model().words, text,
                                                    generate::prompt_style::raw);
        REQUIRE(prompt);
        const auto result = generate::write_text(real_model().model, real_model().words, *prompt,
                                                 options, {}, recorder->get());
        REQUIRE_MESSAGE(result, (result ? std::string() : result.message()));
    }
    const auto saved = (*recorder)->save();
    REQUIRE_MESSAGE(saved, (saved ? std::string() : saved.message()));
    return trace::read_trace(path);
}

// The checksum that a replay prints if it comes to the recorded bits.
std::string checksum_of(const trace::request& request) {
    trace::checksum sum;
    for (const trace::turn& turn : request.turns) {
        for (const trace::layer_rows& rows : turn.layers) {
            sum.add(std::as_bytes(std::span(rows.outputs)));
        }
    }
    char text[17];
    std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(sum.value()));
    return text;
}

}  // namespace

TEST_CASE("recorder: a replay in batches comes to the recorded bits") {
    const scratch_folder scratch;
    const std::string path = scratch.path("t.trace");
    struct run {
        const char* policy;
        const char* format;
        std::vector<std::uint32_t> layers;
    };
    for (const run& one : {run{"triattention", "f16", {0, 29}}, run{"triattention", "bf16", {5}},
                           run{"key-norm", "f32", {1, 2, 28}}, run{"streaming", "f16", {}},
                           run{"full", "f16", {11}}}) {
        CAPTURE(std::string(one.policy));
        CAPTURE(std::string(one.format));
        const trace::recording recorded =
            record(path, one.layers, options_of(one.policy, one.format));
        std::uint32_t rounds = 0;
        for (const trace::request& request : recorded.requests) {
            rounds += request.rounds;
        }
        CHECK((rounds > 3) == (std::string_view(one.policy) != "full"));
        for (const char* slots : {"1", "3"}) {
            const program_result replayed = run_program(
                "batching", {path, "--slots", slots, "--threads", slots[0] == '1' ? "1" : "2"});
            CHECK(replayed.status == 0);
            CHECK(replayed.err == "");
            for (const trace::request& request : recorded.requests) {
                CHECK(replayed.out.find(" " + checksum_of(request) + " equal\n") !=
                      std::string::npos);
            }
        }
    }
    CHECK(scratch.names() == std::vector<std::string>{"t.trace"});
}

TEST_CASE("recorder: what it records is a text with its turns, cut as asked") {
    const scratch_folder scratch;
    const trace::recording recorded =
        record(scratch.path("t.trace"), {}, options_of("triattention", "f16"));
    CHECK(recorded.layer_numbers == std::vector<std::uint32_t>{7, 22});  // of 30
    CHECK(recorded.query_heads == 9);
    CHECK(recorded.kv_heads == 3);
    CHECK(recorded.head_dim == 64);
    CHECK(recorded.format == KV_FORMAT_F16);
    CHECK(recorded.rope_style == KV_ROPE_INTERLEAVED);
    CHECK(recorded.inverse_frequencies == real_model().model.config.inverse_frequencies);
    CHECK(recorded.scorer == KV_SCORER_TRIATTENTION);
    CHECK(recorded.policy_flags == KV_POLICY_STATISTICS_ONLINE);
    CHECK(recorded.budget == 16);
    CHECK(recorded.every == 8);
    CHECK(recorded.recent == 2);
    REQUIRE(recorded.requests.size() == std::size(prompts));
    bool right = false;
    bool wrong = false;
    for (std::size_t i = 0; i < std::size(prompts); ++i) {
        const trace::request& request = recorded.requests[i];
        const auto prompt = generate::prompt_tokens(real_model().file, real_model().words,
                                                    prompts[i], generate::prompt_style::raw);
        REQUIRE(prompt);
        CHECK(request.prompt_tokens == prompt->size());
        CHECK(request.seen > prompt->size());
        CHECK(request.seen <= prompt->size() + 24);
        std::vector<generate::token_id> text;
        for (const trace::turn& turn : request.turns) {
            const bool in_prompt = text.size() < prompt->size();
            CHECK(turn.rows() <= (in_prompt ? 8 : 4));
            CHECK(turn.output_rows == turn.rows());
            right = right || (!in_prompt && turn.accepted > 1);
            wrong = wrong || (!in_prompt && turn.accepted < turn.rows());
            text.insert(text.end(), turn.token_ids.begin(), turn.token_ids.begin() + turn.accepted);
        }
        CHECK(text.size() == request.seen);
        CHECK(std::equal(prompt->begin(), prompt->end(), text.begin()));
    }
    CHECK(right);
    CHECK(wrong);
}

// Only the last row of a longer turn has outputs; what they are is a softmax over all rows.
TEST_CASE("recorder: outputs are attention over the recorded keys and values") {
    const scratch_folder scratch;
    generate::writing_options options = options_of("full", "f16");
    options.chunk = 128;
    options.tokens = 6;
    const trace::recording recorded = record(scratch.path("t.trace"), {}, options);
    CHECK(recorded.scorer == KV_SCORER_NONE);
    CHECK(recorded.budget == 0);
    for (const trace::request& request : recorded.requests) {
        CHECK(request.turns[0].output_rows ==
              (request.prompt_tokens <= 8 ? request.prompt_tokens : 1));
        for (std::size_t turn = 0; turn < request.turns.size(); ++turn) {
            for (std::size_t layer = 0; layer < 2; ++layer) {
                const auto expected = softmax_outputs(recorded, request, turn, layer);
                const auto& found = request.turns[turn].layers[layer].outputs;
                REQUIRE(found.size() == expected.size());
                for (std::size_t i = 0; i < found.size(); ++i) {
                    CHECK(found[i] == doctest::Approx(expected[i]).epsilon(1e-5));
                }
            }
        }
    }
}

TEST_CASE("recorder: layers that the model does not have are refused") {
    const scratch_folder scratch;
    auto recorder = generate::trace_recorder::open(scratch.path("t.trace"));
    REQUIRE(recorder);
    const std::uint32_t layers[] = {3, 30};
    const auto described = (*recorder)->describe_model(real_model().model.config, layers);
    REQUIRE_FALSE(described);
    CHECK(described.message() == "--record-layers names layer 30, the model has 0 to 29");
    // Nothing was recorded: that is not a trace.
    REQUIRE((*recorder)->describe_model(real_model().model.config, {}));
    const auto saved = (*recorder)->save();
    REQUIRE_FALSE(saved);
    CHECK(saved.message() == "requests is 0, it must be 1 to 4096");
    recorder->reset();
    CHECK(scratch.names().empty());
}

TEST_CASE("recorder: the program writes the file, or leaves what was there") {
    const scratch_folder scratch;
    const std::string path = scratch.path("t.trace");
    const auto generate_text = [&](const std::string& model, const std::string& record,
                                   const std::string& layers) {
        return run_program("generate", {"--model", model, "--record", record, "--record-layers",
                                        layers, "--prompt", "Hello", "--prompt", "Hello there",
                                        "--raw", "--tokens", "3", "--threads", "1"});
    };
    const std::string model = golden::model_path();
    // The place of the file is looked at before the model is.
    program_result failed = generate_text("no model", scratch.path("none/t.trace"), "3");
    CHECK(failed.status == 1);
    CHECK(failed.err == "generate: cannot write '" + scratch.path("none/t.trace.part") +
                            "': No such file or directory\n");
    failed = generate_text("no model", path, "3");
    CHECK(failed.status == 1);
    CHECK(failed.err.find("no model") != std::string::npos);
    CHECK(scratch.names().empty());

    program_result written = generate_text(model, path, "3");
    CHECK(written.status == 0);
    CHECK(scratch.names() == std::vector<std::string>{"t.trace"});
    const auto content = trace::encode(trace::read_trace(path));
    CHECK(trace::read_trace(path).requests.size() == 2);

    failed = generate_text(model, path, "3,99");
    CHECK(failed.status == 1);
    CHECK(failed.err == "generate: --record-layers names layer 99, the model has 0 to 29\n");
    CHECK(scratch.names() == std::vector<std::string>{"t.trace"});
    CHECK(trace::encode(trace::read_trace(path)) == content);
}
