// This program, started again for one test case: what a sanitizer reports would end it.
#pragma once

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace kernel_test {

inline constexpr char child_variable[] = "KVRT_SEEDED_DEFECT";

/// What a child is to do; null in a program that is none.
inline const char* task_of_child() { return std::getenv(child_variable); }

struct child_outcome {
    int status = -1;
    std::string output;
};

inline child_outcome run_child(const std::string& test_case, const char* task) {
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    std::fflush(nullptr);
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        dup2(ends[1], 1);
        dup2(ends[1], 2);
        close(ends[0]);
        setenv(child_variable, task, 1);
        // The first report is enough, and names are not looked at.
        setenv("TSAN_OPTIONS", "halt_on_error=1 symbolize=0", 1);
        execl("/proc/self/exe", "test_kernels", ("--test-case=" + test_case).c_str(),
              "--no-skip=true", static_cast<char*>(nullptr));
        _exit(127);
    }
    close(ends[1]);
    child_outcome outcome;
    char buffer[4096];
    for (ssize_t count; (count = read(ends[0], buffer, sizeof buffer)) > 0;) {
        outcome.output.append(buffer, static_cast<size_t>(count));
    }
    close(ends[0]);
    waitpid(child, &outcome.status, 0);
    return outcome;
}

}  // namespace kernel_test
