// The program: reads a trace and the limits, replays, prints what came out.
//
// Exit status: 0 all as recorded, 1 something differs or failed, 2 the arguments were wrong.
#include <kvrt/kvrt.h>

#include <charconv>
#include <cstdio>
#include <exception>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "replay.hpp"
#include "results.hpp"
#include "trace/trace.hpp"

namespace batching {

namespace {

constexpr const char* usage =
    "usage: batching TRACE [--slots N] [--arena-mib N] [--threads N]\n"
    "\n"
    "Replays a trace (docs/trace.md) in batches and compares what comes out.\n"
    "\n"
    "  --slots N      sequences that run at once, 1 to 4096 (3)\n"
    "  --arena-mib N  memory for keys and values in MiB, 2 to 131072 (8)\n"
    "  --threads N    threads of the library, 1 to 256 (1)\n";

// The command line was wrong; what() says how.
struct wrong_arguments : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct arguments {
    std::string trace;
    limits given;
};

void read_number(std::string_view option, std::string_view word, std::uint32_t least,
                 std::uint32_t most, std::uint32_t& target) {
    std::uint32_t value = 0;
    const auto [end, status] = std::from_chars(word.data(), word.data() + word.size(), value);
    if (status != std::errc() || end != word.data() + word.size() || value < least ||
        value > most) {
        throw wrong_arguments(std::string(option) + " is '" + std::string(word) +
                              "', it must be a number from " + std::to_string(least) + " to " +
                              std::to_string(most));
    }
    target = value;
}

arguments parse(std::span<const char* const> words) {
    arguments read;
    for (std::size_t i = 0; i < words.size(); ++i) {
        const std::string_view word = words[i];
        if (word.empty() || word.front() != '-') {
            if (word.empty() || !read.trace.empty()) {
                throw wrong_arguments("give the path of one trace");
            }
            read.trace = word;
            continue;
        }
        const bool known = word == "--slots" || word == "--arena-mib" || word == "--threads";
        if (!known) {
            throw wrong_arguments("'" + std::string(word) + "' is not an option");
        }
        if (++i == words.size()) {
            throw wrong_arguments(std::string(word) + " needs a value behind it");
        }
        if (word == "--slots") {
            read_number(word, words[i], 1, 4096, read.given.slots);
        } else if (word == "--arena-mib") {
            read_number(word, words[i], 2, 131072, read.given.arena_mib);
        } else {
            read_number(word, words[i], 1, 256, read.given.threads);
        }
    }
    if (read.trace.empty()) {
        throw wrong_arguments("give the path of a trace");
    }
    return read;
}

// Whether all is as it was recorded.
bool run(const arguments& wanted) {
    const trace::recording recorded = trace::read_trace(wanted.trace);
    results found(recorded);
    replay(recorded, wanted.given, found).run();
    found.print(stdout);
    if (std::fflush(stdout) != 0) {
        throw std::runtime_error("cannot write to standard output");
    }
    for (const std::uint32_t kind : {KV_LIVE_POOLS, KV_LIVE_SEQUENCES, KV_LIVE_STEPS}) {
        if (kv_live_count(kind) != 0) {
            throw std::runtime_error("something of the library is still alive");
        }
    }
    return found.all_equal();
}

}  // namespace

}  // namespace batching

int main(int count, char** words) {
    try {
        const auto wanted = batching::parse(
            std::span<const char* const>(words, static_cast<std::size_t>(count)).subspan(1));
        if (batching::run(wanted)) {
            return 0;
        }
        std::fputs("batching: what came out differs from the recording\n", stderr);
        return 1;
    } catch (const batching::wrong_arguments& wrong) {
        std::fprintf(stderr, "batching: %s\n\n%s", wrong.what(), batching::usage);
        return 2;
    } catch (const std::exception& failure) {
        std::fprintf(stderr, "batching: %s\n", failure.what());
        return 1;
    }
}
