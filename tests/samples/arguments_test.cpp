// The command line: what is taken, and what each refusal says.
#include "arguments.hpp"

#include <doctest/doctest.h>

#include <vector>

using generate::parse_arguments;

namespace {

using words = std::vector<const char*>;

std::string failure(const words& given) {
    auto parsed = parse_arguments(given);
    REQUIRE_FALSE(parsed);
    return parsed.message();
}

// The refusal of one option behind a command line that is otherwise right.
std::string refusal(const char* option, const char* value) {
    return failure({"--model", "m", "--prompt", "p", option, value});
}

}  // namespace

TEST_CASE("arguments: everything is read") {
    auto parsed = parse_arguments(words{"--model",
                                        "m.gguf",
                                        "--prompt",
                                        "say so",
                                        "--tokens",
                                        "7",
                                        "--policy",
                                        "key-norm",
                                        "--budget",
                                        "64",
                                        "--every",
                                        "16",
                                        "--format",
                                        "bf16",
                                        "--temperature",
                                        "0.5",
                                        "--top-p",
                                        "0.25",
                                        "--seed",
                                        "18446744073709551615",
                                        "--repeat-penalty",
                                        "1.5",
                                        "--threads",
                                        "2",
                                        "--report",
                                        "r.json",
                                        "--raw",
                                        "--record",
                                        "t.trace",
                                        "--prompt",
                                        "and so",
                                        "--record-layers",
                                        "0,3,17",
                                        "--chunk",
                                        "16",
                                        "--drafts",
                                        "5",
                                        "--evict-prompt"});
    REQUIRE(parsed);
    CHECK(parsed->model == "m.gguf");
    CHECK(parsed->prompts == std::vector<std::string>{"say so", "and so"});
    CHECK(parsed->record == "t.trace");
    CHECK(parsed->record_layers == std::vector<std::uint32_t>{0, 3, 17});
    CHECK(parsed->writing.chunk == 16);
    CHECK(parsed->writing.drafts == 5);
    CHECK(parsed->writing.evict_prompt);
    CHECK(parsed->report == "r.json");
    CHECK(parsed->style == generate::prompt_style::raw);
    CHECK(parsed->writing.tokens == 7);
    CHECK(parsed->writing.policy == "key-norm");
    CHECK(parsed->writing.budget == 64);
    CHECK(parsed->writing.every == 16);
    CHECK(parsed->writing.format == "bf16");
    CHECK(parsed->writing.preset == "none");
    CHECK(parsed->writing.device == "cpu");
    CHECK(parsed->writing.temperature == 0.5);
    CHECK(parsed->writing.top_p == 0.25);
    CHECK(parsed->writing.repeat_penalty == 1.5);
    CHECK(parsed->writing.threads == 2);
    CHECK(parsed->writing.seed == ~std::uint64_t{0});
}

TEST_CASE("arguments: defaults") {
    auto plain = parse_arguments(words{"--model", "m", "--prompt", "p"});
    REQUIRE(plain);
    CHECK(plain->writing.policy == "full");
    CHECK(plain->writing.tokens == 200);
    CHECK(plain->writing.temperature == 0);
    CHECK(plain->writing.chunk == 128);
    CHECK(plain->writing.drafts == 0);
    CHECK_FALSE(plain->writing.evict_prompt);
    CHECK_FALSE(plain->writing.cache_positions);
    CHECK(plain->record.empty());
    CHECK(plain->record_layers.empty());
    CHECK(plain->style == generate::prompt_style::chat);
    auto endless = parse_arguments(
        words{"--model", "m", "--prompt", "p", "--policy", "streaming", "--cache-positions"});
    REQUIRE(endless);
    CHECK(endless->writing.cache_positions);
    auto demo = parse_arguments(words{"--demo", "--model", "m"});
    REQUIRE(demo);
    CHECK(demo->writing.tokens == 1500);
    CHECK(demo->writing.budget == 512);
    CHECK(demo->writing.every == 128);
    auto short_demo = parse_arguments(words{"--demo", "--model", "m", "--tokens", "9"});
    REQUIRE(short_demo);
    CHECK(short_demo->writing.tokens == 9);
    auto help = parse_arguments(words{"--help"});
    REQUIRE(help);
    CHECK(help->help);
}

TEST_CASE("arguments: each refusal says what would be right") {
    CHECK(failure({}) == "--model is missing: the path of a GGUF file");
    CHECK(failure({"--model", "m"}) == "--prompt is missing: the text to answer, or --demo");
    CHECK(failure({"--model", "m", "--prompt", "p", "--demo"}) ==
          "--demo brings its own texts, policies and sampling: leave --prompt out");
    CHECK(failure({"--demo", "--raw", "--model", "m"}) ==
          "--demo brings its own texts, policies and sampling: leave --raw out");
    CHECK(failure({"--model", "m", "--fast"}) == "'--fast' is not an option");
    CHECK(failure({"m.gguf"}) == "'m.gguf' is not an option");
    CHECK(failure({"--model"}) == "--model needs a value behind it");
    CHECK(refusal("--policy", "h2o") ==
          "--policy is 'h2o', it must be one of: full, triattention, streaming, key-norm, random");
    CHECK(refusal("--format", "q4") == "--format is 'q4', it must be one of: f16, bf16, f32");
    CHECK(refusal("--device", "gpu") == "--device is 'gpu', it must be one of: cpu, cuda");
    CHECK(refusal("--preset", "tiny") ==
          "--preset is 'tiny', it must be one of: none, near-lossless, balanced, smallest");
    CHECK(refusal("--threads", "0") == "--threads is '0', it must be a number from 1 to 1024");
    CHECK(refusal("--chunk", "0") == "--chunk is '0', it must be a number from 1 to 8192");
    CHECK(refusal("--drafts", "16") == "--drafts is '16', it must be a number from 0 to 15");
    CHECK(failure(
              {"--model", "m", "--prompt", "p", "--cache-positions", "--policy", "triattention"}) ==
          "--cache-positions takes no --policy triattention, which scores keys where they stand in "
          "the text");
    CHECK(failure({"--demo", "--cache-positions", "--model", "m"}) ==
          "--demo brings its own texts, policies and sampling: leave --cache-positions out");
    CHECK(refusal("--prompt", "") == "--prompt is missing: the text to answer, or --demo");
}

TEST_CASE("arguments: what belongs to a recording") {
    CHECK(refusal("--prompt", "q") ==
          "--prompt is there several times: that is for --record, each a request");
    CHECK(refusal("--record-layers", "1") ==
          "--record-layers says which layers --record writes: give --record FILE too");
    CHECK(failure({"--model", "m", "--demo", "--record", "t"}) ==
          "--demo brings its own texts, policies and sampling: leave --record out");
    CHECK(failure({"--model", "m", "--prompt", "p", "--record", "t", "--policy", "random"}) ==
          "--record takes no --policy random: its draws depend on which layers there are");
    CHECK(failure({"--model", "m", "--prompt", "p", "--record", "t", "--device", "cuda"}) ==
          "--record takes no --device cuda: a trace holds outputs that the CPU has bit by bit");
    CHECK(failure({"--model", "m", "--prompt", "p", "--record", "t", "--preset", "balanced"}) ==
          "--record takes no --preset: a trace names one format for all of its layers");
    CHECK(failure({"--model", "m", "--prompt", "p", "--record", "t", "--cache-positions"}) ==
          "--record takes no --cache-positions: a trace holds rotated keys");
    std::string too_many = "0";
    for (int layer = 1; layer <= 64; ++layer) {
        too_many += "," + std::to_string(layer);
    }
    for (const char* list : {"", ",", "3,", ",3", "3,,4", "3;4", "17,3", "3,3", "-1", "3, 4", "x",
                             "4294967296", too_many.c_str()}) {
        CAPTURE(list);
        CHECK(refusal("--record-layers", list)
                  .find("it must be layer numbers in ascending order, at most 64, like 3,17") !=
              std::string::npos);
    }
}

TEST_CASE("arguments: numbers are whole words in range") {
    for (const char* option : {"--tokens", "--budget", "--every"}) {
        for (const char* value : {"0", "-1", "", "12x", "1.5", "4294967296", "0x10", " 1"}) {
            CAPTURE(option);
            CAPTURE(value);
            CHECK(refusal(option, value).find("must be a number from 1 to 1048576") !=
                  std::string::npos);
        }
    }
    for (const char* value : {"nan", "inf", "-0.1", "10.5", "1e", ""}) {
        CAPTURE(value);
        CHECK(refusal("--temperature", value).find("must be a number from 0 to 10") !=
              std::string::npos);
    }
}
