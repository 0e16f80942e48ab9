// The programs that documents show: they run here, and the README's text is theirs.
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "abi/readme_example.h"
#include "abi/world.hpp"

namespace {

std::string read_text(const std::string& name) {
    std::ifstream file(std::string(KVRT_TEST_DIR) + "/" + name);
    REQUIRE_MESSAGE(file.good(), name);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
}

/// What lies between the first `begin` and the `end` behind it.
std::string between(const std::string& text, const std::string& begin, const std::string& end) {
    const std::size_t first = text.find(begin);
    REQUIRE(first != std::string::npos);
    const std::size_t last = text.find(end, first + begin.size());
    REQUIRE(last != std::string::npos);
    return text.substr(first + begin.size(), last - first - begin.size());
}

TEST_CASE("the README's example is the one that is compiled and run here") {
    const std::string shown = between(read_text("../README.md"), "```c\n", "```");
    const std::string run =
        between(read_text("abi/readme_example.c"), "/* README begins */\n", "/* README ends */");
    CHECK(shown == run);
}

TEST_CASE("the README's example attends over equal tokens, so it gives their value") {
    std::vector<float> k(2 * 64, 0.5f), v(2 * 64), q(8 * 64, 1.0f), out(8 * 64, NAN);
    for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i) / 8;  // exact in f16
    REQUIRE(readme_example(k.data(), v.data(), q.data(), out.data()) == 0);
    for (std::size_t head = 0; head < 8; ++head) {
        for (std::size_t dim = 0; dim < 64; ++dim) {
            // Query heads 0 to 3 read KV head 0.
            CHECK(out[head * 64 + dim] == doctest::Approx(v[head / 4 * 64 + dim]).epsilon(1e-6));
        }
    }
}

TEST_CASE("the minimal sample runs, and reports what a budget of 256 of 1200 tokens gives back") {
    // Its standard output goes to a file for a while.
    std::fflush(stdout);
    FILE* captured = std::tmpfile();
    REQUIRE(captured != nullptr);
    const int real = dup(1);
    dup2(fileno(captured), 1);
    const int code = minimal_main();
    std::fflush(stdout);
    dup2(real, 1);
    close(real);
    char line[256] = "";
    std::rewind(captured);
    CHECK(std::fgets(line, sizeof line, captured) != nullptr);
    std::fclose(captured);
    CHECK(code == 0);
    // 4 layers of 2 KV heads: 1200 tokens in 75 blocks, 256 in 16; a block is 16 * 2 * 128 * 2.
    CHECK(std::string(line) == "tokens 9600 -> 2048, blocks 300 -> 64, " +
                                   std::to_string(236 * 8192) + " bytes returned\n");
}

}  // namespace
