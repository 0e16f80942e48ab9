// A file mapped read-only into memory, unmapped when the object goes.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <utility>

#include "outcome.hpp"

namespace generate {

class mapped_file {
  public:
    static outcome<mapped_file> open(const std::string& path);

    mapped_file() = default;
    mapped_file(mapped_file&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
    mapped_file& operator=(mapped_file&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    ~mapped_file();

    std::span<const std::byte> bytes() const { return {data_, size_}; }

  private:
    const std::byte* data_ = nullptr;
    std::size_t size_ = 0;
};

}  // namespace generate
