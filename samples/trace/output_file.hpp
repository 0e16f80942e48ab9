// A file that is there whole, or not at all: written under another name beside its place, and
// renamed when all is in it.
#pragma once

#include <cstddef>
#include <cstdio>
#include <memory>
#include <span>
#include <string>

namespace trace {

class output_file {
  public:
    // Opens the file under its other name, so that a place that cannot be written to is noticed
    // before anything is computed for it. Throws trace::error.
    explicit output_file(const std::string& path);
    output_file(const output_file&) = delete;
    output_file& operator=(const output_file&) = delete;
    ~output_file();  // removes what was not committed

    // Writes all of the file and gives it its name. Called once. Throws trace::error.
    void commit(std::span<const std::byte> content);

  private:
    struct closer {
        void operator()(std::FILE* file) const { std::fclose(file); }
    };

    std::string path_;       // what links lead to
    std::string temporary_;  // empty once renamed
    std::unique_ptr<std::FILE, closer> file_;
};

}  // namespace trace
