// Parsing in one pass over a bounds-checked cursor. The cursor remembers its first error; after it,
// reads return zeros, and the caller looks at the error once per item.
#include "gguf.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

namespace generate {

namespace {

constexpr std::uint64_t most_items = 1u << 16;     // metadata keys, tensors
constexpr std::uint64_t most_elements = 1u << 24;  // of a metadata array
constexpr std::uint64_t longest_name = 1u << 10;   // of a key or a tensor
constexpr std::uint64_t largest_alignment = 1u << 20;
constexpr std::uint64_t default_alignment = 32;

enum class value_kind : std::uint32_t {
    u8 = 0,
    i8 = 1,
    u16 = 2,
    i16 = 3,
    u32 = 4,
    i32 = 5,
    f32 = 6,
    boolean = 7,
    string = 8,
    array = 9,
    u64 = 10,
    i64 = 11,
    f64 = 12,
};

class cursor {
  public:
    explicit cursor(std::span<const std::byte> bytes) : bytes_(bytes) {}

    bool failed() const { return !message_.empty(); }
    const std::string& message() const { return message_; }
    std::size_t offset() const { return offset_; }
    std::size_t left() const { return bytes_.size() - offset_; }

    void fail(std::string message) {
        if (message_.empty()) {
            message_ = std::move(message);
        }
    }

    template <class number_type>
    number_type read(const char* what) {
        number_type value{};
        if (take(sizeof(value), what)) {
            std::memcpy(&value, bytes_.data() + offset_ - sizeof(value), sizeof(value));
        }
        return value;
    }

    std::string read_string(std::uint64_t longest, const char* what) {
        const auto length = read<std::uint64_t>(what);
        if (!failed() && length > longest) {
            fail(fmt::format("{} at byte {} is {} bytes long, at most {} are allowed", what,
                             offset_, length, longest));
        }
        if (failed() || !take(length, what)) {
            return {};
        }
        const auto* start = reinterpret_cast<const char*>(bytes_.data() + offset_ - length);
        return std::string(start, static_cast<std::size_t>(length));
    }

  private:
    bool take(std::uint64_t count, const char* what) {
        if (failed()) {
            return false;
        }
        if (count > left()) {
            fail(fmt::format("the file ends inside {}: {} bytes at byte {} of {}", what, count,
                             offset_, bytes_.size()));
            return false;
        }
        offset_ += static_cast<std::size_t>(count);
        return true;
    }

    std::span<const std::byte> bytes_;
    std::size_t offset_ = 0;
    std::string message_;
};

std::int64_t read_unsigned_64(cursor& input) {
    const auto value = input.read<std::uint64_t>("a value");
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
        input.fail(fmt::format("the integer {} does not fit into 63 bits", value));
        return 0;
    }
    return static_cast<std::int64_t>(value);
}

bool read_boolean(cursor& input) {
    const auto value = input.read<std::uint8_t>("a boolean");
    if (value > 1) {
        input.fail(fmt::format("a boolean is {}, only 0 and 1 are allowed", value));
    }
    return value == 1;
}

std::int64_t read_integer(cursor& input, value_kind kind) {
    switch (kind) {
        case value_kind::u8:
            return input.read<std::uint8_t>("a value");
        case value_kind::i8:
            return input.read<std::int8_t>("a value");
        case value_kind::u16:
            return input.read<std::uint16_t>("a value");
        case value_kind::i16:
            return input.read<std::int16_t>("a value");
        case value_kind::u32:
            return input.read<std::uint32_t>("a value");
        case value_kind::i32:
            return input.read<std::int32_t>("a value");
        case value_kind::i64:
            return input.read<std::int64_t>("a value");
        default:
            return read_unsigned_64(input);
    }
}

double read_floating(cursor& input, value_kind kind) {
    return kind == value_kind::f32 ? static_cast<double>(input.read<float>("a value"))
                                   : input.read<double>("a value");
}

bool is_integer(value_kind kind) {
    return kind <= value_kind::i32 || kind == value_kind::u64 || kind == value_kind::i64;
}

bool is_floating(value_kind kind) { return kind == value_kind::f32 || kind == value_kind::f64; }

// The fewest bytes that an element of an array can occupy.
std::uint64_t least_bytes(value_kind kind) {
    switch (kind) {
        case value_kind::u8:
        case value_kind::i8:
        case value_kind::boolean:
            return 1;
        case value_kind::u16:
        case value_kind::i16:
            return 2;
        case value_kind::u32:
        case value_kind::i32:
        case value_kind::f32:
            return 4;
        default:
            return 8;
    }
}

gguf_value read_array(cursor& input) {
    const auto kind = static_cast<value_kind>(input.read<std::uint32_t>("an array"));
    const auto count = input.read<std::uint64_t>("an array");
    const bool known = is_integer(kind) || is_floating(kind) || kind == value_kind::boolean ||
                       kind == value_kind::string;
    if (!input.failed() && !known) {
        input.fail(fmt::format("an array holds values of type {}, which is not supported",
                               static_cast<std::uint32_t>(kind)));
    }
    if (!input.failed() && (count > most_elements || count > input.left() / least_bytes(kind))) {
        input.fail(
            fmt::format("an array says it has {} elements, more than the file can hold or "
                        "than the {} that are allowed",
                        count, most_elements));
    }
    if (input.failed()) {
        return std::int64_t{0};
    }
    const auto fill = [&](auto values, auto read_one) -> gguf_value {
        values.reserve(static_cast<std::size_t>(count));
        for (std::uint64_t i = 0; i < count && !input.failed(); ++i) {
            values.push_back(read_one());
        }
        return gguf_value(std::move(values));
    };
    if (kind == value_kind::string) {
        return fill(std::vector<std::string>{},
                    [&] { return input.read_string(input.left(), "a string"); });
    }
    if (kind == value_kind::boolean) {
        return fill(std::vector<bool>{}, [&] { return read_boolean(input); });
    }
    if (is_floating(kind)) {
        return fill(std::vector<double>{}, [&] { return read_floating(input, kind); });
    }
    return fill(std::vector<std::int64_t>{}, [&] { return read_integer(input, kind); });
}

gguf_value read_value(cursor& input) {
    const auto kind = static_cast<value_kind>(input.read<std::uint32_t>("a value's type"));
    if (is_integer(kind)) {
        return read_integer(input, kind);
    }
    if (is_floating(kind)) {
        return read_floating(input, kind);
    }
    switch (kind) {
        case value_kind::boolean:
            return read_boolean(input);
        case value_kind::string:
            return input.read_string(input.left(), "a string");
        case value_kind::array:
            return read_array(input);
        default:
            input.fail(
                fmt::format("a value has the unknown type {}", static_cast<std::uint32_t>(kind)));
            return std::int64_t{0};
    }
}

struct located_tensor {
    gguf_tensor tensor;
    std::uint64_t offset = 0;  // from the start of the tensor data
    std::uint64_t size = 0;
};

located_tensor read_tensor_info(cursor& input) {
    located_tensor located;
    gguf_tensor& tensor = located.tensor;
    tensor.name = input.read_string(longest_name, "a tensor's name");
    const auto dimensions = input.read<std::uint32_t>("a tensor's description");
    if (!input.failed() && (dimensions < 1 || dimensions > 4)) {
        input.fail(fmt::format("tensor '{}' has {} dimensions, 1 to 4 are allowed", tensor.name,
                               dimensions));
    }
    tensor.elements = 1;
    for (std::uint32_t i = 0; i < dimensions && !input.failed(); ++i) {
        const auto extent = input.read<std::uint64_t>("a tensor's shape");
        constexpr std::uint64_t most = std::uint64_t{1} << 40;
        if (extent < 1 || extent > most || tensor.elements > most / extent) {
            input.fail(fmt::format("tensor '{}' has an impossible shape", tensor.name));
            return located;
        }
        tensor.shape.push_back(extent);
        tensor.elements *= extent;
    }
    const auto type_id = input.read<std::uint32_t>("a tensor's type");
    located.offset = input.read<std::uint64_t>("a tensor's offset");
    if (input.failed()) {
        return located;
    }
    tensor.layout = find_weight_layout(type_id);
    if (tensor.layout == nullptr) {
        input.fail(fmt::format("tensor '{}' has weights of type {}, readable are {}", tensor.name,
                               type_id, readable_weight_types()));
        return located;
    }
    if (tensor.shape[0] % tensor.layout->block_elements != 0) {
        input.fail(fmt::format("tensor '{}' has rows of {} weights, {} needs a multiple of {}",
                               tensor.name, tensor.shape[0], tensor.layout->name,
                               tensor.layout->block_elements));
        return located;
    }
    // At most 2^40 elements of 4 bytes: no overflow.
    located.size = tensor.elements / tensor.layout->block_elements * tensor.layout->block_bytes;
    return located;
}

}  // namespace

outcome<gguf_file> gguf_file::open(const std::string& path) {
    auto file = mapped_file::open(path);
    if (!file) {
        return file.failure();
    }
    auto parsed = parse(file->bytes());
    if (!parsed) {
        return error{fmt::format("'{}': {}", path, parsed.message())};
    }
    parsed->file_ = std::move(*file);
    return parsed;
}

outcome<gguf_file> gguf_file::parse(std::span<const std::byte> bytes) {
    cursor input(bytes);
    const auto magic = input.read<std::uint32_t>("the header");
    if (!input.failed() && magic != 0x46554747u) {  // "GGUF"
        return error{"not a GGUF file: it does not begin with the letters GGUF"};
    }
    const auto version = input.read<std::uint32_t>("the header");
    if (!input.failed() && version != 2 && version != 3) {
        return error{fmt::format("GGUF version {} is not supported, only 2 and 3 are", version)};
    }
    const auto tensor_count = input.read<std::uint64_t>("the header");
    const auto key_count = input.read<std::uint64_t>("the header");
    if (input.failed()) {
        return error{input.message()};
    }
    if (tensor_count > most_items || key_count > most_items) {
        return error{fmt::format("{} tensors and {} metadata keys, at most {} each are allowed",
                                 tensor_count, key_count, most_items)};
    }

    gguf_file file;
    for (std::uint64_t i = 0; i < key_count; ++i) {
        std::string key = input.read_string(longest_name, "a metadata key");
        gguf_value value = read_value(input);
        if (input.failed()) {
            return error{fmt::format("metadata key {} '{}': {}", i, key, input.message())};
        }
        if (!file.metadata_.emplace(key, std::move(value)).second) {
            return error{fmt::format("metadata key '{}' is there twice", key)};
        }
    }
    const auto alignment = file.integer("general.alignment", 1, largest_alignment,
                                        static_cast<std::int64_t>(default_alignment));
    if (!alignment) {
        return alignment.failure();
    }
    const auto step = static_cast<std::uint64_t>(*alignment);
    if ((step & (step - 1)) != 0) {
        return error{fmt::format("general.alignment is {}, not a power of two", step)};
    }

    std::vector<located_tensor> found;
    for (std::uint64_t i = 0; i < tensor_count; ++i) {
        found.push_back(read_tensor_info(input));
        if (input.failed()) {
            return error{fmt::format("tensor {}: {}", i, input.message())};
        }
    }
    const std::uint64_t data_start = (input.offset() + step - 1) / step * step;
    const std::uint64_t data_size = bytes.size() > data_start ? bytes.size() - data_start : 0;
    for (located_tensor& located : found) {
        gguf_tensor& tensor = located.tensor;
        if (located.offset % step != 0 || located.offset > data_size ||
            located.size > data_size - located.offset) {
            return error{
                fmt::format("tensor '{}' lies outside the file or is not aligned: {} "
                            "bytes at {} of {} bytes of data",
                            tensor.name, located.size, located.offset, data_size)};
        }
        tensor.bytes = bytes.subspan(static_cast<std::size_t>(data_start + located.offset),
                                     static_cast<std::size_t>(located.size));
        std::string name = tensor.name;
        if (!file.tensors_.emplace(name, std::move(tensor)).second) {
            return error{fmt::format("tensor '{}' is there twice", name)};
        }
    }
    return file;
}

const gguf_value* gguf_file::find(std::string_view key) const {
    const auto found = metadata_.find(key);
    return found == metadata_.end() ? nullptr : &found->second;
}

const gguf_tensor* gguf_file::find_tensor(std::string_view name) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? nullptr : &found->second;
}

namespace {

// The value of a key, if it has that type. `missing` tells an absent key from a wrong one.
template <class wanted_type>
outcome<wanted_type> typed_value(const gguf_file& file, std::string_view key, const char* type_name,
                                 const std::optional<wanted_type>& fallback) {
    const gguf_value* value = file.find(key);
    if (value == nullptr) {
        if (fallback) {
            return *fallback;
        }
        return error{fmt::format("metadata key '{}' is missing", key)};
    }
    const auto* typed = std::get_if<wanted_type>(value);
    if (typed == nullptr) {
        return error{fmt::format("metadata key '{}' is not {}", key, type_name)};
    }
    return *typed;
}

}  // namespace

outcome<std::int64_t> gguf_file::integer(std::string_view key, std::int64_t least,
                                         std::int64_t most,
                                         std::optional<std::int64_t> fallback) const {
    auto value = typed_value<std::int64_t>(*this, key, "an integer", fallback);
    if (value && (*value < least || *value > most)) {
        return error{
            fmt::format("metadata key '{}' is {}, allowed are {} to {}", key, *value, least, most)};
    }
    return value;
}

outcome<double> gguf_file::number(std::string_view key, std::optional<double> fallback) const {
    auto value = typed_value<double>(*this, key, "a floating-point number", fallback);
    if (value && !std::isfinite(*value)) {
        return error{fmt::format("metadata key '{}' is not finite", key)};
    }
    return value;
}

outcome<bool> gguf_file::flag(std::string_view key, bool fallback) const {
    return typed_value<bool>(*this, key, "a boolean", fallback);
}

outcome<std::string> gguf_file::text(std::string_view key,
                                     const std::optional<std::string>& fallback) const {
    return typed_value<std::string>(*this, key, "a string", fallback);
}

outcome<std::vector<std::string>> gguf_file::texts(std::string_view key) const {
    return typed_value<std::vector<std::string>>(*this, key, "an array of strings", std::nullopt);
}

}  // namespace generate
