#include "mapped_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace generate {

outcome<mapped_file> mapped_file::open(const std::string& path) {
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) {
        return error{fmt::format("cannot open '{}': {}", path, std::strerror(errno))};
    }
    struct stat status = {};
    if (::fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode) || status.st_size <= 0) {
        ::close(descriptor);
        return error{fmt::format("'{}' is not a file with content", path)};
    }
    const auto size = static_cast<std::size_t>(status.st_size);
    void* memory = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor, 0);
    const int map_error = errno;
    ::close(descriptor);
    if (memory == MAP_FAILED) {
        return error{fmt::format("cannot map '{}': {}", path, std::strerror(map_error))};
    }
    mapped_file file;
    file.data_ = static_cast<const std::byte*>(memory);
    file.size_ = size;
    return file;
}

mapped_file::~mapped_file() {
    if (data_ != nullptr) {
        ::munmap(const_cast<std::byte*>(data_), size_);
    }
}

}  // namespace generate
