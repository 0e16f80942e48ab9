// The report: JSON that any reader takes, and the table.
#include "report.hpp"

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

namespace {

generate::writing_result a_run() {
    generate::writing_result run;
    run.policy = "triattention";
    run.format = "f16";
    run.prompt_tokens = 54;
    run.generated_tokens = 3;
    run.drafted_tokens = 7;
    run.accepted_drafts = 2;
    run.peak_blocks = 90;
    run.final_blocks = 60;
    run.final_bytes = 737280;
    run.blocks_returned = 30;
    run.bytes_returned = 1572864;
    run.tokens_per_second = 12.34567;
    run.retained = {17, 17};
    run.text = "a \"b\"\n\xff";
    return run;
}

}  // namespace

TEST_CASE("report: JSON of two runs, byte for byte") {
    const std::string one =
        "  {\n"
        "    \"policy\": \"triattention\",\n"
        "    \"format\": \"f16\",\n"
        "    \"prompt_tokens\": 54,\n"
        "    \"generated_tokens\": 3,\n"
        "    \"drafted_tokens\": 7,\n"
        "    \"accepted_drafts\": 2,\n"
        "    \"retained_per_layer\": [17, 17],\n"
        "    \"peak_blocks\": 90,\n"
        "    \"final_blocks\": 60,\n"
        "    \"final_bytes\": 737280,\n"
        "    \"blocks_returned\": 30,\n"
        "    \"bytes_returned\": 1572864,\n"
        "    \"tokens_per_second\": 12.346,\n"
        "    \"text\": \"a \\\"b\\\"\\n\xef\xbf\xbd\"\n"
        "  }";
    const std::vector<generate::writing_result> runs = {a_run(), a_run()};
    CHECK(generate::report_json(runs) == "[\n" + one + ",\n" + one + "\n]\n");
    CHECK(generate::report_json({}) == "[\n]\n");
}

TEST_CASE("report: strings in JSON") {
    CHECK(generate::json_string("") == "\"\"");
    CHECK(generate::json_string("é\t\\/\x01\x1f\x7f") == "\"é\\t\\\\/\\u0001\\u001f\x7f\"");
    CHECK(generate::json_string("\r\b") == "\"\\u000d\\u0008\"");
    CHECK(generate::json_string(std::string_view("\0", 1)) == "\"\\u0000\"");
}

TEST_CASE("report: the table has a column for each run") {
    std::vector<generate::writing_result> runs = {a_run(), a_run()};
    runs[0].policy = "full";
    runs[1].retained = {16, 19, 17};
    const std::string table = generate::report_table(runs);
    const auto has = [&](const char* part) { return table.find(part) != std::string::npos; };
    CHECK(has("full    triattention\n"));
    CHECK(has("retained tokens per layer                       17        16 to 19\n"));
    CHECK(has("blocks returned to the allocator                30              30\n"));
    CHECK(has("bytes returned to the allocator            1.5 MiB         1.5 MiB\n"));
    CHECK(has("tokens per second                             12.3            12.3\n"));
}

TEST_CASE("report: files") {
    const auto path = std::filesystem::temp_directory_path() / "kvrt_report_test.json";
    const std::vector<generate::writing_result> runs = {a_run()};
    REQUIRE(generate::write_report(path.string(), runs));
    std::ifstream file(path, std::ios::binary);
    std::stringstream content;
    content << file.rdbuf();
    CHECK(content.str() == generate::report_json(runs));
    std::filesystem::remove(path);
    auto refused = generate::write_report("/nowhere/at/all.json", runs);
    REQUIRE_FALSE(refused);
    CHECK(refused.message().find("No such file") != std::string::npos);
}
