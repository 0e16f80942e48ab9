// The batching example as its user runs it: its table for the committed trace and for made ones,
// and what it says when something is wrong. docs/trace.md has the rules.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <sstream>

#include "program.hpp"
#include "trace/output_file.hpp"
#include "trace/trace.hpp"
#include "trace_builder.hpp"

namespace {

constexpr const char* header =
    "request prompt  rows dropped  seen retained rounds blocks checksum         outputs";

std::string committed() {
    return std::string(KVRT_TEST_DIR) + "/../samples/batching/smollm2.trace";
}

std::vector<std::string> lines_of(const std::string& text) {
    std::istringstream stream(text);
    std::vector<std::string> lines;
    for (std::string line; std::getline(stream, line);) {
        lines.push_back(line);
    }
    return lines;
}

std::string last_line(const std::string& text) {
    const auto lines = lines_of(text);
    return lines.empty() ? "" : lines.back();
}

// A request's line without its checksum and verdict, from what the trace says.
std::string line_start(const trace::recording& from, std::size_t index, std::size_t block_tokens) {
    const trace::request& request = from.requests[index];
    unsigned rows = 0;
    unsigned dropped = 0;
    unsigned retained = 0;
    unsigned blocks = 0;
    for (const trace::turn& turn : request.turns) {
        rows += turn.rows();
        dropped += turn.rows() - turn.accepted;
    }
    for (const std::uint32_t count : request.retained) {
        retained += count;
        blocks += static_cast<unsigned>((count + block_tokens - 1) / block_tokens);
    }
    char line[80];
    std::snprintf(line, sizeof(line), "%7u %6u %5u %7u %5u %8u %6u %6u ",
                  static_cast<unsigned>(index), request.prompt_tokens, rows, dropped, request.seen,
                  retained, request.rounds, blocks);
    return line;
}

// Steps of a run in which blocks are never short: a request takes a slot as soon as one is free.
std::size_t steps_of(const trace::recording& from, std::size_t slots) {
    std::vector<std::size_t> free_at(slots, 0);
    for (const trace::request& request : from.requests) {
        *std::min_element(free_at.begin(), free_at.end()) += request.turns.size();
    }
    return *std::max_element(free_at.begin(), free_at.end());
}

std::string save(const scratch_folder& scratch, const trace::recording& content) {
    const std::string path = scratch.path("t.trace");
    trace::output_file(path).commit(trace::encode(content));
    return path;
}

// A key-value block is 256 KiB: an arena of 2 MiB holds 8 of them, 128 tokens.
trace_shape large_blocks() {
    trace_shape shape;
    shape.layers = 1;
    shape.query_heads = 16;
    shape.kv_heads = 16;
    shape.head_dim = 128;
    shape.format = 1;  // KV_FORMAT_F32
    return shape;
}

}  // namespace

TEST_CASE("batching: the committed trace gives the same table, however it is batched") {
    const trace::recording recorded = trace::read_trace(committed());
    std::vector<std::string> first;
    for (const std::size_t slots : {1u, 2u, 3u, 4u, 9u}) {
        for (const char* threads : {"1", "2"}) {
            CAPTURE(slots);
            CAPTURE(std::string(threads));
            const program_result run = run_program(
                "batching", {committed(), "--slots", std::to_string(slots), "--threads", threads});
            CHECK(run.status == 0);
            CHECK(run.err == "");
            const auto lines = lines_of(run.out);
            REQUIRE(lines.size() == recorded.requests.size() + 2);
            CHECK(lines[0] == header);
            for (std::size_t i = 0; i < recorded.requests.size(); ++i) {
                const std::string start = line_start(recorded, i, 16);
                CHECK(lines[i + 1].substr(0, start.size()) == start);
                CHECK(lines[i + 1].substr(start.size() + 16) == " equal");
            }
            first = first.empty() ? lines : first;
            CHECK(std::equal(lines.begin(), lines.end() - 1, first.begin()));
            const std::string steps =
                "steps " + std::to_string(steps_of(recorded, slots)) + ", tokens 145, rounds 6, ";
            CHECK(lines.back().find(steps) == 0);
            const std::size_t returned = first.back().find(", returned ");
            CHECK(lines.back().substr(lines.back().find(", returned ")) ==
                  first.back().substr(returned));
        }
    }
}

TEST_CASE("batching: the committed trace is what its document says, and attention") {
    const trace::recording recorded = trace::read_trace(committed());
    CHECK(std::filesystem::file_size(committed()) <= 1u << 20);
    CHECK(recorded.layer_numbers == std::vector<std::uint32_t>{3, 17});
    REQUIRE(recorded.requests.size() == 4);
    for (const trace::request& request : recorded.requests) {
        bool right = false;
        bool wrong = false;
        std::uint32_t seen = 0;
        for (const trace::turn& turn : request.turns) {
            right = right || (seen >= request.prompt_tokens && turn.accepted > 1);
            wrong = wrong || turn.accepted < turn.rows();
            seen += turn.accepted;
        }
        CHECK(right);
        CHECK(wrong);
    }
    CHECK(recorded.requests[3].rounds == 3);
    // The first is not evicted from, so that a plain softmax over its own keys and values is right.
    const trace::request& whole = recorded.requests[0];
    REQUIRE(whole.rounds == 0);
    for (std::size_t turn = 0; turn < whole.turns.size(); ++turn) {
        for (std::size_t layer = 0; layer < 2; ++layer) {
            const auto expected = softmax_outputs(recorded, whole, turn, layer);
            const auto& found = whole.turns[turn].layers[layer].outputs;
            REQUIRE(found.size() == expected.size());
            for (std::size_t i = 0; i < found.size(); ++i) {
                REQUIRE(std::fabs(found[i] - expected[i]) <= 2e-6 + 2e-6 * std::fabs(expected[i]));
            }
        }
    }
}

TEST_CASE("batching: made traces, whose outputs are a plain softmax, are equal") {
    const scratch_folder scratch;
    trace_shape shape;
    shape.requests = {{{20, 20}, {1, 1}, {4, 2}, {4, 4}, {3, 0}, {1, 1}},
                      {{3, 3}, {5, 1}},
                      {{1, 1}},
                      {{9, 9}, {9, 9}, {2, 1}}};
    for (const std::uint32_t format : {1u, 2u}) {
        shape.format = format;
        const trace::recording made = make_trace(shape);
        const program_result run = run_program("batching", {save(scratch, made), "--slots", "2"});
        CHECK(run.status == 0);
        const auto lines = lines_of(run.out);
        REQUIRE(lines.size() == 6);
        for (std::size_t i = 0; i < 4; ++i) {
            const std::string start = line_start(made, i, 16);
            CHECK(lines[i + 1].substr(0, start.size()) == start);
            CHECK(lines[i + 1].substr(start.size() + 16) == " equal");
        }
        CHECK(lines[5].find("steps 6, tokens 52, rounds 0, ") == 0);
    }
}

TEST_CASE("batching: where blocks are short, the youngest wait") {
    const scratch_folder scratch;
    trace_shape shape = large_blocks();
    // Seven blocks, then an eighth for the first; the second needs two from the start.
    shape.requests = {{{112, 112}, {1, 1}, {2, 1}, {1, 1}}, {{32, 32}, {1, 1}}};
    const std::string path = save(scratch, make_trace(shape));
    const program_result roomy = run_program("batching", {path});
    CHECK(roomy.status == 0);
    CHECK(last_line(roomy.out).find("steps 4, tokens 148, rounds 0, blocks at most 11, ") == 0);
    const program_result narrow = run_program("batching", {path, "--arena-mib", "2"});
    CHECK(narrow.status == 0);
    CHECK(narrow.err == "");
    CHECK(last_line(narrow.out).find("steps 6, tokens 148, rounds 0, blocks at most 8, ") == 0);
    const auto rows = [](const std::string& out) { return out.substr(0, out.find("steps")); };
    CHECK(rows(narrow.out) == rows(roomy.out));

    // Seven blocks for the first three, and one each for their next tokens: two wait until the
    // first is done.
    shape.requests = {{{64, 64}, {1, 1}, {1, 1}}, {{32, 32}, {1, 1}}, {{16, 16}, {1, 1}}, {{1, 1}}};
    const program_result three =
        run_program("batching", {save(scratch, make_trace(shape)), "--arena-mib", "2"});
    CHECK(three.status == 0);
    CHECK(last_line(three.out).find("steps 4, tokens 117, rounds 0, blocks at most 8, ") == 0);
}

TEST_CASE("batching: what never fits, or waits for itself, is an error") {
    const scratch_folder scratch;
    trace_shape shape = large_blocks();
    shape.requests = {{{129, 129}}};
    program_result run =
        run_program("batching", {save(scratch, make_trace(shape)), "--arena-mib", "2"});
    CHECK(run.status == 1);
    CHECK(run.out == "");
    CHECK(run.err.find("batching: KV_TOO_LARGE: ") == 0);
    // Both hold four blocks and want a fifth.
    shape.requests = {{{64, 64}, {1, 1}}, {{64, 64}, {1, 1}}};
    run = run_program("batching", {save(scratch, make_trace(shape)), "--arena-mib", "2"});
    CHECK(run.status == 1);
    CHECK(run.out == "");
    CHECK(run.err.find("batching: KV_AGAIN: ") == 0);
}

TEST_CASE("batching: what is not as recorded is DIFFERENT") {
    const scratch_folder scratch;
    trace_shape shape;
    shape.requests = {{{3, 3}, {2, 1}}, {{4, 4}, {1, 1}}};
    const trace::recording good = make_trace(shape);
    const auto verdicts = [&](const trace::recording& content) {
        const program_result run = run_program("batching", {save(scratch, content)});
        const auto lines = lines_of(run.out);
        REQUIRE(lines.size() == 4);
        const bool equal = lines[1].ends_with(" equal") && lines[2].ends_with(" equal");
        CHECK(run.status == (equal ? 0 : 1));
        CHECK(run.err == (equal ? "" : "batching: what came out differs from the recording\n"));
        return lines[1].substr(lines[1].rfind(' ') + 1) + lines[2].substr(lines[2].rfind(' '));
    };
    CHECK(verdicts(good) == "equal equal");

    trace::recording changed = good;
    float& output = changed.requests[1].turns[1].layers[1].outputs.back();
    const float right = output;
    output = right + 3e-5f + 3e-5f * std::fabs(right);
    CHECK(verdicts(changed) == "equal DIFFERENT");
    output = right + 4e-6f;
    CHECK(verdicts(changed) == "equal equal");
    output = NAN;
    CHECK(verdicts(changed) == "equal DIFFERENT");

    changed = good;
    changed.requests[0].turns[0].layers[0].outputs.front() += 1;
    CHECK(verdicts(changed) == "DIFFERENT equal");
    changed = good;
    changed.requests[0].seen += 1;
    CHECK(verdicts(changed) == "DIFFERENT equal");
    changed = good;
    changed.requests[1].rounds = 1;
    CHECK(verdicts(changed) == "equal DIFFERENT");
    changed = good;
    changed.requests[1].retained[1] -= 1;
    CHECK(verdicts(changed) == "equal DIFFERENT");
    changed = good;
    changed.requests[0].turns[1].accepted = 2;  // one token more than was recorded as seen
    CHECK(verdicts(changed) == "DIFFERENT equal");
}

TEST_CASE("batching: wrong arguments and files are refused with a message") {
    const auto refused = [](const std::vector<std::string>& arguments, const std::string& message) {
        const program_result run = run_program("batching", arguments);
        CHECK(run.status == 2);
        CHECK(run.out == "");
        CAPTURE(run.err);
        CHECK(run.err.find("batching: " + message + "\n\nusage: batching TRACE ") == 0);
    };
    refused({}, "give the path of a trace");
    refused({"a", "b"}, "give the path of one trace");
    refused({""}, "give the path of one trace");
    refused({"a", "--slots"}, "--slots needs a value behind it");
    refused({"a", "--fast", "1"}, "'--fast' is not an option");
    refused({"a", "--slots", "0"}, "--slots is '0', it must be a number from 1 to 4096");
    refused({"a", "--slots", "2x"}, "--slots is '2x', it must be a number from 1 to 4096");
    refused({"a", "--arena-mib", "1"}, "--arena-mib is '1', it must be a number from 2 to 131072");
    refused({"a", "--threads", "257"}, "--threads is '257', it must be a number from 1 to 256");
    refused({"a", "--threads", "-1"}, "--threads is '-1', it must be a number from 1 to 256");

    const scratch_folder scratch;
    const auto failed = [](const std::string& path, const std::string& message) {
        const program_result run = run_program("batching", {path});
        CHECK(run.status == 1);
        CHECK(run.out == "");
        CAPTURE(run.err);
        CHECK(run.err.find(message) != std::string::npos);
    };
    failed(scratch.path("none"), "No such file or directory\n");
    failed(scratch.path(""), "cannot read '");
    std::ofstream(scratch.path("text")) << "not a trace, but long enough to be one";
    failed(scratch.path("text"), "this is not a trace: it does not begin with KVTRACE1\n");

    // What only the library can judge: it does, before anything runs.
    trace_shape shape;
    shape.requests = {{{1, 1}}};
    trace::recording content = make_trace(shape);
    content.format = 77;
    failed(save(scratch, content), "batching: KV_");
    content = make_trace(shape);
    content.scorer = 99;
    failed(save(scratch, content), "batching: KV_");
    content = make_trace(shape);
    content.rope_style = 3;
    content.inverse_frequencies = {1.0, INFINITY};
    failed(save(scratch, content), "batching: KV_INVALID: ");
}

// A turn of 8192 rows, 1024 heads and 256 dimensions is 4 GiB of queries alone: where it is only
// said and not there, the file is refused also by a process that may not have a tenth of that.
TEST_CASE("batching: a hostile trace costs no more memory than it is long") {
    const scratch_folder scratch;
    trace_shape shape;
    shape.query_heads = 1024;
    shape.kv_heads = 1024;
    shape.head_dim = 256;
    shape.layers = 1;
    shape.requests = {{{1, 1}}};
    std::vector<std::byte> bytes = trace::encode(make_trace(shape));
    const std::size_t rows_at = 8 + 16 * 4 + 8 + 4 + 5 * 4;  // behind the header and the request
    bytes[rows_at] = std::byte{0x00};
    bytes[rows_at + 1] = std::byte{0x20};
    seal(bytes);
    trace::output_file(scratch.path("t.trace")).commit(bytes);
    const program_result run =
        run_program("/bin/sh", {"-c", "ulimit -v 400000; exec \"$0\" \"$1\"",
                                program_path("batching"), scratch.path("t.trace")});
    CHECK(run.status == 1);
    CHECK(run.err.find("the file ends within queries: 4294967296 bytes are needed") !=
          std::string::npos);
}
