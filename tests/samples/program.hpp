// Running a program that lies beside the tests, as its user does.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

struct program_result {
    int status = -1;  // of its exit; -1: it was killed
    std::string out;
    std::string err;
};

// Where a program beside the tests lies. Fails the test if it is not there.
std::string program_path(const std::string& name);

// `program` is a name beside the tests, or an absolute path.
program_result run_program(const std::string& program, const std::vector<std::string>& arguments);

// An empty folder that goes with the object.
class scratch_folder {
  public:
    scratch_folder();
    scratch_folder(const scratch_folder&) = delete;
    scratch_folder& operator=(const scratch_folder&) = delete;
    ~scratch_folder();

    std::string path(const std::string& name) const { return (folder_ / name).string(); }
    std::vector<std::string> names() const;  // of what is in it, sorted

  private:
    std::filesystem::path folder_;
};
