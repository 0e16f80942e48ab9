// The writing of a trace. What a reader would refuse is refused here.
#include "trace/checksum.hpp"
#include "trace/layout.hpp"

namespace trace {

namespace {

class writer {
  public:
    template <class number>
    void put(number value) {
        append(&value, sizeof(value));
    }

    // The elements of an array, without their number: the format has that elsewhere.
    template <class number>
    void put_array(const char* what, const std::vector<number>& values, std::uint64_t elements) {
        check_range(what, values.size(), elements, elements);
        append(values.data(), values.size() * sizeof(number));
    }

    std::vector<std::byte>& bytes() { return bytes_; }

  private:
    void append(const void* data, std::size_t size) {
        const auto* first = static_cast<const std::byte*>(data);
        bytes_.insert(bytes_.end(), first, first + size);
    }

    std::vector<std::byte> bytes_;
};

void write_turn(writer& to, const recording& shape, const turn& written) {
    const std::uint64_t rows = written.token_ids.size();
    check_range("rows", rows, 1, most_rows);
    check_range("accepted", written.accepted, 0, rows);
    check_range("output_rows", written.output_rows, 0, rows);
    check_range("layers of a turn", written.layers.size(), shape.layer_numbers.size(),
                shape.layer_numbers.size());
    to.put(written.rows());
    to.put(written.accepted);
    to.put(written.output_rows);
    to.put_array("token_ids", written.token_ids, rows);
    for (const layer_rows& layer : written.layers) {
        to.put_array("queries", layer.queries, rows * shape.query_size());
        to.put_array("keys", layer.keys, rows * shape.kv_size());
        to.put_array("values", layer.values, rows * shape.kv_size());
        to.put_array("outputs", layer.outputs, written.output_rows * shape.query_size());
    }
}

void write_request(writer& to, const recording& shape, const request& written) {
    check_range("turns", written.turns.size(), 1, most_turns);
    to.put(written.prompt_tokens);
    to.put(static_cast<std::uint32_t>(written.turns.size()));
    to.put(written.rounds);
    to.put(written.seen);
    to.put_array("retained", written.retained, shape.layer_numbers.size());
    for (const turn& one : written.turns) {
        write_turn(to, shape, one);
    }
}

}  // namespace

std::vector<std::byte> encode(const recording& content) {
    const std::size_t layers = content.layer_numbers.size();
    const std::size_t rope_dimensions = 2 * content.inverse_frequencies.size();
    check_range("layers", layers, 1, most_layers);
    check_range("requests", content.requests.size(), 1, most_requests);
    check_geometry(content, rope_dimensions);
    writer to;
    for (const char letter : magic) {
        to.put(letter);
    }
    for (const std::uint32_t field :
         {static_cast<std::uint32_t>(layers), content.query_heads, content.kv_heads,
          content.head_dim, content.format, content.rope_style,
          static_cast<std::uint32_t>(rope_dimensions), content.scorer, content.selection,
          content.policy_flags, content.budget, content.every, content.sinks, content.recent,
          content.offset_max, static_cast<std::uint32_t>(content.requests.size())}) {
        to.put(field);
    }
    to.put(content.seed);
    to.put_array("inverse_frequencies", content.inverse_frequencies, rope_dimensions / 2);
    to.put_array("layer_numbers", content.layer_numbers, layers);
    for (const request& one : content.requests) {
        write_request(to, content, one);
    }
    checksum sum;
    sum.add(to.bytes());
    to.put(sum.value());
    return std::move(to.bytes());
}

}  // namespace trace
