// What each of the program's evaluations does with its arguments.
#pragma once

#include <cstdio>
#include <span>

#include "outcome.hpp"

namespace evaluate {

// Parses the words and runs what they ask for. Returns the exit status: 0 done, 1 it failed, 2 the
// words were wrong.
template <class parser, class usage_text, class runner>
int run_words(std::span<const char* const> words, const parser& parse, const usage_text& usage,
              const runner& run) {
    const auto wanted = parse(words);
    if (!wanted) {
        std::fprintf(stderr, "evaluate: %s\n\n%s", wanted.message().c_str(), usage().c_str());
        return 2;
    }
    if (wanted->help) {
        std::fputs(usage().c_str(), stdout);
        return 0;
    }
    const auto done = run(*wanted);
    if (!done) {
        std::fprintf(stderr, "evaluate: %s\n", done.message().c_str());
    }
    return done ? 0 : 1;
}

}  // namespace evaluate
