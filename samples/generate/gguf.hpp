// A GGUF file: metadata (keys with typed values) and tensors (name, shape, type, bytes).
//
// The file is not trusted. Every offset and count is checked against the bytes that are there
// before it is used, so parsing costs memory in proportion to the file, never to a number written
// in it. Tensor bytes are views into the mapping, which the object keeps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "dequantize.hpp"
#include "mapped_file.hpp"
#include "outcome.hpp"

namespace generate {

// All integer types of the format become int64_t, both floating types double.
using gguf_value = std::variant<std::int64_t, double, bool, std::string, std::vector<std::int64_t>,
                                std::vector<double>, std::vector<bool>, std::vector<std::string>>;

struct gguf_tensor {
    std::string name;
    const weight_layout* layout = nullptr;
    std::vector<std::uint64_t> shape;  // innermost first: {columns, rows, ...}
    std::uint64_t elements = 0;
    std::span<const std::byte> bytes;
};

class gguf_file {
  public:
    static outcome<gguf_file> open(const std::string& path);

    // Reads from memory that must outlive the object.
    static outcome<gguf_file> parse(std::span<const std::byte> bytes);

    const std::map<std::string, gguf_value, std::less<>>& metadata() const { return metadata_; }
    const std::map<std::string, gguf_tensor, std::less<>>& tensors() const { return tensors_; }

    const gguf_value* find(std::string_view key) const;
    const gguf_tensor* find_tensor(std::string_view name) const;

    // The value of a key in [least, most]; `fallback` where the key is missing, an error if there
    // is no fallback.
    outcome<std::int64_t> integer(std::string_view key, std::int64_t least, std::int64_t most,
                                  std::optional<std::int64_t> fallback = std::nullopt) const;
    outcome<double> number(std::string_view key,
                           std::optional<double> fallback = std::nullopt) const;
    outcome<bool> flag(std::string_view key, bool fallback) const;
    outcome<std::string> text(std::string_view key,
                              const std::optional<std::string>& fallback = std::nullopt) const;
    outcome<std::vector<std::string>> texts(std::string_view key) const;

  private:
    mapped_file file_;
    std::map<std::string, gguf_value, std::less<>> metadata_;
    std::map<std::string, gguf_tensor, std::less<>> tensors_;
};

}  // namespace generate
