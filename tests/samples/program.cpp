#include "program.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace {

std::string content_of(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream content;
    content << file.rdbuf();
    return content.str();
}

}  // namespace

std::string program_path(const std::string& name) {
    // What is absolute stays as it is.
    const auto path = std::filesystem::read_symlink("/proc/self/exe").parent_path() / name;
    REQUIRE_MESSAGE(std::filesystem::exists(path), "not built: ", path.string());
    return path.string();
}

program_result run_program(const std::string& program, const std::vector<std::string>& arguments) {
    std::vector<std::string> words = {program_path(program)};
    words.insert(words.end(), arguments.begin(), arguments.end());
    std::vector<char*> argv;
    for (std::string& word : words) {
        argv.push_back(word.data());
    }
    argv.push_back(nullptr);

    const scratch_folder scratch;
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    int descriptor = STDOUT_FILENO;
    for (const char* stream : {"out", "err"}) {
        posix_spawn_file_actions_addopen(&files, descriptor++, scratch.path(stream).c_str(),
                                         O_WRONLY | O_CREAT, 0600);
    }
    pid_t child = 0;
    const int failure = posix_spawn(&child, argv[0], &files, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&files);
    REQUIRE(failure == 0);
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, content_of(scratch.path("out")),
            content_of(scratch.path("err"))};
}

scratch_folder::scratch_folder() {
    std::string name = (std::filesystem::temp_directory_path() / "kvrt-test-XXXXXX").string();
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    folder_ = name;
}

scratch_folder::~scratch_folder() {
    std::error_code ignored;  // what is left behind is the system's to clear
    std::filesystem::remove_all(folder_, ignored);
}

std::vector<std::string> scratch_folder::names() const {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
        found.push_back(entry.path().filename().string());
    }
    std::sort(found.begin(), found.end());
    return found;
}
