#include "trace/output_file.hpp"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "trace/trace.hpp"

namespace trace {

output_file::output_file(const std::string& path) : path_(path) {
    std::error_code failure;
    const auto status = std::filesystem::status(path, failure);
    if (std::filesystem::exists(status)) {
        if (!std::filesystem::is_regular_file(status)) {
            throw error("cannot write '" + path + "': it is there and is not a regular file");
        }
        path_ = std::filesystem::canonical(path, failure).string();
        if (failure) {
            throw error("cannot write '" + path + "': " + failure.message());
        }
    }
    const std::string temporary = path_ + ".part";
    file_.reset(std::fopen(temporary.c_str(), "wb"));
    if (file_ == nullptr) {
        throw error("cannot write '" + temporary + "': " + std::strerror(errno));
    }
    temporary_ = temporary;
}

output_file::~output_file() {
    if (!temporary_.empty()) {
        std::remove(temporary_.c_str());
    }
}

void output_file::commit(std::span<const std::byte> content) {
    const std::size_t written = std::fwrite(content.data(), 1, content.size(), file_.get());
    const bool flushed = std::fflush(file_.get()) == 0;
    if (written != content.size() || !flushed) {
        throw error("cannot write all of '" + temporary_ + "': " + std::strerror(errno));
    }
    file_.reset();
    if (std::rename(temporary_.c_str(), path_.c_str()) != 0) {
        throw error("cannot rename '" + temporary_ + "' to '" + path_ +
                    "': " + std::strerror(errno));
    }
    temporary_.clear();
}

}  // namespace trace
