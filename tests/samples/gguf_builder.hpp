// Writes GGUF files in memory, well-formed or not: each part is appended as told.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

class gguf_builder {
  public:
    template <class number_type>
    gguf_builder& raw(number_type value) {
        char bytes[sizeof(value)];
        std::memcpy(bytes, &value, sizeof(value));
        content.append(bytes, sizeof(value));
        return *this;
    }
    gguf_builder& text(std::string_view value) {
        raw(std::uint64_t{value.size()});
        content.append(value);
        return *this;
    }
    gguf_builder& header(std::uint64_t tensors, std::uint64_t keys, std::uint32_t version = 3) {
        content.append("GGUF");
        return raw(version).raw(tensors).raw(keys);
    }
    gguf_builder& key_u32(std::string_view key, std::uint32_t value) {
        return text(key).raw(std::uint32_t{4}).raw(value);
    }
    gguf_builder& key_f32(std::string_view key, float value) {
        return text(key).raw(std::uint32_t{6}).raw(value);
    }
    gguf_builder& key_text(std::string_view key, std::string_view value) {
        return text(key).raw(std::uint32_t{8}).text(value);
    }
    gguf_builder& key_texts(std::string_view key, const std::vector<std::string>& values) {
        text(key).raw(std::uint32_t{9}).raw(std::uint32_t{8}).raw(std::uint64_t{values.size()});
        for (const std::string& value : values) {
            text(value);
        }
        return *this;
    }
    gguf_builder& key_i32s(std::string_view key, const std::vector<std::int32_t>& values) {
        text(key).raw(std::uint32_t{9}).raw(std::uint32_t{5}).raw(std::uint64_t{values.size()});
        for (const std::int32_t value : values) {
            raw(value);
        }
        return *this;
    }
    gguf_builder& tensor(std::string_view name, const std::vector<std::uint64_t>& shape,
                         std::uint32_t type, std::uint64_t offset) {
        text(name).raw(static_cast<std::uint32_t>(shape.size()));
        for (const std::uint64_t extent : shape) {
            raw(extent);
        }
        return raw(type).raw(offset);
    }
    // Pads to the alignment of 32 and appends `size` bytes of data.
    gguf_builder& data(std::size_t size, char fill = 0) {
        content.resize((content.size() + 31) / 32 * 32);
        content.append(size, fill);
        return *this;
    }
    std::span<const std::byte> bytes() const {
        return {reinterpret_cast<const std::byte*>(content.data()), content.size()};
    }

    std::string content;
};
