// Configurations as text, and the command line of evaluate: what is taken, and what refusals say.
#include <doctest/doctest.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "evaluate/configuration.hpp"
#include "evaluate/options.hpp"

using evaluate::configuration;
using evaluate::parse_configuration;
using evaluate::parse_configurations;

namespace {

configuration parsed(std::string_view text) {
    auto read = parse_configuration(text);
    REQUIRE_MESSAGE(read, (read ? std::string() : read.message()));
    return *read;
}

bool refuses(std::string_view text, std::string_view part) {
    auto read = parse_configuration(text);
    REQUIRE_FALSE(read);
    CAPTURE(read.message());
    return read.message().find(part) != std::string::npos;
}

using words = std::vector<const char*>;

bool fails(words given, std::string_view part) {
    auto read = evaluate::parse_options(given);
    REQUIRE_FALSE(read);
    CAPTURE(read.message());
    return read.message().find(part) != std::string::npos;
}

// The refusal of options behind a command line that is otherwise right.
bool rejects(words more, std::string_view part) {
    words given = {"--model", "m", "--text", "t"};
    given.insert(given.end(), more.begin(), more.end());
    return fails(given, part);
}

bool same(const generate::operand_storage& one, std::uint32_t format, std::uint32_t flags) {
    return one.format == format && one.flags == flags;
}

}  // namespace

TEST_CASE("configuration: a format is for keys and values") {
    const configuration one = parsed("int8_token");
    CHECK(one.name == "int8_token");
    CHECK(same(one.storage.keys, KV_FORMAT_INT8_TOKEN, 0));
    CHECK(same(one.storage.values, KV_FORMAT_INT8_TOKEN, 0));
    CHECK(one.edge_layers == 0);
}

TEST_CASE("configuration: keys, values, rotation and edges") {
    const configuration one = parsed("q8_0+rotate/q4_0@12");
    CHECK(one.name == "q8_0+rotate/q4_0@12");
    CHECK(same(one.storage.keys, KV_FORMAT_Q8_0, KV_STORAGE_ROTATE));
    CHECK(same(one.storage.values, KV_FORMAT_Q4_0, 0));
    CHECK(one.edge_layers == 12);
    CHECK(same(parsed("q4_1/nvfp4+rotate").storage.values, KV_FORMAT_NVFP4, KV_STORAGE_ROTATE));
}

TEST_CASE("configuration: static formats say that their scale is one") {
    CHECK(same(parsed("fp8_e4m3").storage.keys, KV_FORMAT_FP8_E4M3, KV_STORAGE_SCALE_ONE));
    CHECK(same(parsed("fp8_e5m2+rotate").storage.keys, KV_FORMAT_FP8_E5M2,
               KV_STORAGE_SCALE_ONE | KV_STORAGE_ROTATE));
}

TEST_CASE("configuration: what is wrong is named") {
    CHECK(refuses("", "'' is no format"));
    CHECK(refuses("int5", "'int5' is no format, there are: f32, f16"));
    CHECK(refuses("Q8_0", "'Q8_0' is no format"));
    CHECK(refuses("q8_0/", "'' is no format"));
    CHECK(refuses("/q8_0", "'' is no format"));
    CHECK(refuses("q8_0/q4_0/q4_0", "'q4_0/q4_0' is no format"));
    CHECK(refuses("q8_0+rotated", "'q8_0+rotated' is no format"));
    CHECK(refuses("q8_0+rotate+rotate", "'q8_0+rotate' is no format"));
    for (const char* edge : {"q8_0@", "q8_0@0", "q8_0@x", "q8_0@2x", "q8_0@-1", "q8_0@2@2"}) {
        CHECK(refuses(edge, "how many layers at each end"));
    }
    CHECK(refuses("q8_0@2/q4_0", "how many layers at each end"));
    CHECK(refuses("affine4", "affine4 is for keys alone"));
    CHECK(refuses("q8_0/affine4", "affine4 is for keys alone"));
}

TEST_CASE("configuration: lists") {
    auto list = parse_configurations("f16,q8_0/q4_0,int4_token@2");
    REQUIRE(list);
    REQUIRE(list->size() == 3);
    CHECK((*list)[1].name == "q8_0/q4_0");
    CHECK((*list)[2].edge_layers == 2);
    CHECK_FALSE(parse_configurations(""));
    CHECK_FALSE(parse_configurations("f16,"));
    CHECK_FALSE(parse_configurations("f16,,q8_0"));
    auto twice = parse_configurations("q8_0,f16,q8_0");
    REQUIRE_FALSE(twice);
    CHECK(twice.message() == "configuration 'q8_0' is there twice");
}

TEST_CASE("configuration: by default every format that the library stores is evaluated") {
    auto list = parse_configurations(evaluate::default_configurations);
    REQUIRE_MESSAGE(list, (list ? std::string() : list.message()));
    kv_capabilities_report can = KV_INIT(kv_capabilities_report);
    REQUIRE(kv_capabilities(&can) == KV_OK);
    for (std::uint32_t format = 1; format < 64; ++format) {
        if ((can.formats >> format & 1) != 0) {
            CAPTURE(format);
            CHECK(std::any_of(list->begin(), list->end(), [&](const configuration& one) {
                return one.storage.keys.format == format &&
                       (one.storage.values.format == format || format == KV_FORMAT_AFFINE4);
            }));
        }
    }
}

TEST_CASE("configuration: what a library stores") {
    const std::uint64_t formats = 1u << KV_FORMAT_F16 | 1u << KV_FORMAT_Q8_0;
    CHECK(evaluate::is_stored(parsed("f16"), formats));
    CHECK(evaluate::is_stored(parsed("q8_0/f16"), formats));
    CHECK_FALSE(evaluate::is_stored(parsed("q8_0/q4_0"), formats));
    CHECK_FALSE(evaluate::is_stored(parsed("q4_0/q8_0"), formats));
}

TEST_CASE("configuration: the outermost layers stay in f16") {
    const auto formats = [](const char* text, std::uint32_t layers) {
        std::vector<std::uint32_t> read;
        for (const auto& one : evaluate::storage_of_layers(parsed(text), layers)) {
            CHECK(one.keys.format == one.values.format);
            read.push_back(one.keys.format);
        }
        return read;
    };
    using list = std::vector<std::uint32_t>;
    constexpr std::uint32_t half = KV_FORMAT_F16;
    constexpr std::uint32_t small = KV_FORMAT_Q4_0;
    CHECK(formats("q4_0", 3) == list{small, small, small});
    CHECK(formats("q4_0@1", 3) == list{half, small, half});
    CHECK(formats("q4_0@2", 5) == list{half, half, small, half, half});
    CHECK(formats("q4_0@9", 2) == list{half, half});
}

TEST_CASE("evaluate's options: everything is read") {
    auto read =
        evaluate::parse_options(words{"--model",  "m.gguf",     "--text",    "t.txt",
                                      "--tokens", "4096",       "--window",  "512",
                                      "--chunk",  "64",         "--formats", "f16,q8_0",
                                      "--tasks",  "--contexts", "3",         "--context-tokens",
                                      "900",      "--report",   "r.json",    "--plot",
                                      "p.svg",    "--threads",  "2"});
    REQUIRE_MESSAGE(read, (read ? std::string() : read.message()));
    CHECK(read->model == "m.gguf");
    CHECK(read->text == "t.txt");
    CHECK(read->tokens == 4096);
    CHECK(read->window == 512);
    CHECK(read->chunk == 64);
    CHECK(read->tasks);
    CHECK(read->contexts == 3);
    CHECK(read->context_tokens == 900);
    CHECK(read->report == "r.json");
    CHECK(read->plot == "p.svg");
    CHECK(read->threads == 2);
    CHECK(read->chosen);
    REQUIRE(read->configurations.size() == 2);
    CHECK(read->configurations[1].name == "q8_0");
}

TEST_CASE("evaluate's options: what is left out") {
    auto read = evaluate::parse_options(words{"--model", "m", "--text", "t"});
    REQUIRE(read);
    CHECK(read->tokens == 32768);
    CHECK(read->window == 2048);
    CHECK_FALSE(read->tasks);
    CHECK_FALSE(read->chosen);
    CHECK(read->report.empty());
    CHECK(read->configurations.size() > 20);
    auto help = evaluate::parse_options(words{"--help"});
    REQUIRE(help);
    CHECK(help->help);
    for (const char* option :
         {"--model", "--text", "--tokens", "--window", "--chunk", "--formats", "--tasks",
          "--contexts", "--context-tokens", "--report", "--plot", "--threads"}) {
        CHECK(evaluate::usage().find(option) != std::string::npos);
    }
}

TEST_CASE("evaluate's options: refusals") {
    CHECK(fails({}, "--model is missing"));
    CHECK(fails({"--model", "m"}, "--text is missing"));
    CHECK(fails({"--model", "", "--text", "t"}, "--model is empty"));
    CHECK(rejects({"--tokens"}, "needs a value"));
    CHECK(rejects({"--token", "5"}, "'--token' is not an option"));
    CHECK(rejects({"q8_0"}, "'q8_0' is not an option"));
    CHECK(rejects({"--tokens", "0"}, "--tokens is '0', it must be a number from 4 to"));
    CHECK(rejects({"--tokens", "1e4"}, "--tokens is '1e4'"));
    CHECK(rejects({"--tokens", "-5"}, "--tokens is '-5'"));
    CHECK(rejects({"--tokens", "99999999999"}, "--tokens is '99999999999'"));
    CHECK(rejects({"--tokens", "1024"}, "less than a --window of 2048"));
    CHECK(rejects({"--window", "3"}, "--window is '3'"));
    CHECK(rejects({"--chunk", "8193"}, "from 1 to 8192"));
    CHECK(rejects({"--contexts", ""}, "--contexts is ''"));
    CHECK(rejects({"--threads", "0"}, "--threads is '0'"));
    CHECK(rejects({"--formats", "f16,int5"}, "--formats: configuration 'int5'"));
    CHECK(rejects({"--formats", ""}, "--formats: configuration ''"));
    CHECK(rejects({"--report", ""}, "--report is empty"));
}

TEST_CASE("docs/formats.md: every format is there, with the bytes that the library takes") {
    std::ifstream page(std::string(KVRT_TEST_DIR) + "/../docs/formats.md");
    REQUIRE(page);
    kv_capabilities_report can = KV_INIT(kv_capabilities_report);
    REQUIRE(kv_capabilities(&can) == KV_OK);
    std::uint64_t missing = can.formats;
    bool in_section = false;
    for (std::string line; std::getline(page, line);) {
        in_section = line.starts_with("## ") ? line == "## The formats" : in_section;
        if (!in_section || !line.starts_with("| `")) {
            continue;
        }
        std::vector<std::string> cells;
        std::istringstream parts(line);
        for (std::string cell; std::getline(parts, cell, '|');) {
            cells.push_back(cell);
        }
        REQUIRE(cells.size() == 6);
        const std::string name = cells[1].substr(2, cells[1].size() - 4);
        CAPTURE(name);
        const bool keys_alone = name == "affine4";
        const configuration one = parsed(keys_alone ? name + "/f16" : name);
        for (const std::uint32_t dim : {64u, 128u}) {
            const std::vector<float> channels(dim, 1.0f);
            const kv_rope rope = KV_INIT(kv_rope);
            kv_storage storage = KV_INIT(kv_storage);
            storage.flags = one.storage.keys.flags;
            kv_storage value_storage = storage;
            if (keys_alone) {
                storage.channel_means = storage.channel_scales = channels.data();
                storage.channel_heads = 1;
                storage.channel_dim = dim;
            }
            kv_layer layer = KV_INIT(kv_layer);
            layer.query_heads = layer.kv_heads = 1;
            layer.key_dim = dim;
            layer.key_format = one.storage.keys.format;
            layer.value_format = one.storage.values.format;
            layer.rope = &rope;
            layer.key_storage = &storage;
            layer.value_storage = &value_storage;
            kv_model model = KV_INIT(kv_model);
            model.layers = &layer;
            model.layer_count = 1;
            kv_pool_config config = KV_INIT(kv_pool_config);
            config.arena_bytes = 64u << 20;
            config.block_tokens = 64;
            kv_plan_report plan = KV_INIT(kv_plan_report);
            REQUIRE(kv_plan(&config, &model, &plan) == KV_OK);
            const std::uint64_t bytes = std::stoul(cells[dim == 64 ? 3 : 4]);
            CHECK(bytes + (keys_alone ? 2 * dim : bytes) == plan.bytes_per_token);
        }
        missing &= ~(std::uint64_t{1} << one.storage.keys.format);
    }
    // Bit 0 is KV_FORMAT_DEFAULT.
    CHECK((missing & ~std::uint64_t{1}) == 0);
}
