// The reading of a trace.
#include <cstring>
#include <filesystem>
#include <fstream>
#include <type_traits>

#include "trace/checksum.hpp"
#include "trace/layout.hpp"

namespace trace {

namespace {

class reader {
  public:
    explicit reader(std::span<const std::byte> bytes) : left_(bytes) {}

    std::size_t bytes_left() const { return left_.size(); }

    template <class number>
    number take(const char* what) {
        number value{};
        copy(what, &value, sizeof(value));
        return value;
    }

    std::uint32_t count(const char* what, std::uint32_t least, std::uint32_t most) {
        const auto value = take<std::uint32_t>(what);
        check_range(what, value, least, most);
        return value;
    }

    // The bounds of all counts keep `elements` far from where its size in bytes would not fit.
    template <class number>
    std::vector<number> array(const char* what, std::uint64_t elements) {
        require(what, elements * sizeof(number));
        std::vector<number> values(elements);
        copy(what, values.data(), values.size() * sizeof(number));
        return values;
    }

  private:
    void require(const char* what, std::uint64_t bytes) const {
        if (bytes > left_.size()) {
            throw error("the file ends within " + std::string(what) + ": " + std::to_string(bytes) +
                        " bytes are needed, " + std::to_string(left_.size()) + " are left");
        }
    }

    void copy(const char* what, void* target, std::size_t bytes) {
        require(what, bytes);
        if (bytes > 0) {
            std::memcpy(target, left_.data(), bytes);
        }
        left_ = left_.subspan(bytes);
    }

    std::span<const std::byte> left_;
};

layer_rows read_layer(reader& from, const recording& shape, std::uint64_t rows,
                      std::uint64_t output_rows) {
    layer_rows layer;
    layer.queries = from.array<std::uint16_t>("queries", rows * shape.query_size());
    layer.keys = from.array<std::uint16_t>("keys", rows * shape.kv_size());
    layer.values = from.array<std::uint16_t>("values", rows * shape.kv_size());
    layer.outputs = from.array<float>("outputs", output_rows * shape.query_size());
    return layer;
}

turn read_turn(reader& from, const recording& shape) {
    turn read;
    const std::uint32_t rows = from.count("rows", 1, most_rows);
    read.accepted = from.count("accepted", 0, rows);
    read.output_rows = from.count("output_rows", 0, rows);
    read.token_ids = from.array<std::uint32_t>("token_ids", rows);
    while (read.layers.size() < shape.layer_numbers.size()) {
        read.layers.push_back(read_layer(from, shape, rows, read.output_rows));
    }
    return read;
}

request read_request(reader& from, const recording& shape) {
    request read;
    read.prompt_tokens = from.take<std::uint32_t>("prompt_tokens");
    const std::uint32_t turns = from.count("turns", 1, most_turns);
    read.rounds = from.take<std::uint32_t>("rounds");
    read.seen = from.take<std::uint32_t>("seen");
    read.retained = from.array<std::uint32_t>("retained", shape.layer_numbers.size());
    while (read.turns.size() < turns) {
        read.turns.push_back(read_turn(from, shape));
    }
    return read;
}

recording read_recording(reader& from) {
    recording read;
    const std::uint32_t layers = from.count("layers", 1, most_layers);
    std::uint32_t rope_dimensions = 0;
    for (std::uint32_t* field :
         {&read.query_heads, &read.kv_heads, &read.head_dim, &read.format, &read.rope_style,
          &rope_dimensions, &read.scorer, &read.selection, &read.policy_flags, &read.budget,
          &read.every, &read.sinks, &read.recent, &read.offset_max}) {
        *field = from.take<std::uint32_t>("the header");
    }
    check_geometry(read, rope_dimensions);
    const std::uint32_t requests = from.count("requests", 1, most_requests);
    read.seed = from.take<std::uint64_t>("seed");
    read.inverse_frequencies = from.array<double>("inverse_frequencies", rope_dimensions / 2);
    read.layer_numbers = from.array<std::uint32_t>("layer_numbers", layers);
    while (read.requests.size() < requests) {
        read.requests.push_back(read_request(from, read));
    }
    return read;
}

}  // namespace

recording decode(std::span<const std::byte> file) {
    constexpr std::size_t checksum_bytes = sizeof(std::uint64_t);
    if (file.size() < sizeof(magic) + checksum_bytes ||
        std::memcmp(file.data(), magic, sizeof(magic)) != 0) {
        throw error("this is not a trace: it does not begin with KVTRACE1");
    }
    checksum computed;
    computed.add(file.first(file.size() - checksum_bytes));
    reader end(file.last(checksum_bytes));
    if (end.take<std::uint64_t>("checksum") != computed.value()) {
        throw error("the checksum does not match: the file is damaged or cut short");
    }
    reader content(file.first(file.size() - checksum_bytes).subspan(sizeof(magic)));
    recording read = read_recording(content);
    if (content.bytes_left() != 0) {
        throw error(std::to_string(content.bytes_left()) + " bytes lie behind the last request");
    }
    return read;
}

recording read_trace(const std::string& path) {
    std::error_code failure;
    const std::uint64_t size = std::filesystem::file_size(path, failure);  // of regular files only
    if (failure) {
        throw error("cannot read '" + path + "': " + failure.message());
    }
    std::vector<std::byte> bytes(size);
    std::ifstream file(path, std::ios::binary);
    file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(size));
    if (!file) {
        throw error("cannot read all of '" + path + "'");
    }
    try {
        return decode(bytes);
    } catch (const error& wrong) {
        throw error("'" + path + "': " + wrong.what());
    }
}

}  // namespace trace
