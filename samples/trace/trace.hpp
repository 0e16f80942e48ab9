// Traces: what a model handed to its cache for some requests and what it got back, in the file
// format of docs/trace.md.
//
// A file is not trusted. Every count is checked against its bounds and against the bytes that are
// left before anything is allocated by it, so reading costs memory in proportion to the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace trace {

// What is wrong with a file, in a sentence.
class error : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// What one layer was handed in a turn, and gave back. f16 are bits.
struct layer_rows {
    std::vector<std::uint16_t> queries;  // f16 [rows, query_heads, head_dim]
    std::vector<std::uint16_t> keys;     // f16 [rows, kv_heads, head_dim]
    std::vector<std::uint16_t> values;   // f16 [rows, kv_heads, head_dim]
    std::vector<float> outputs;          // [output_rows, query_heads, head_dim], the last rows'
};

// What a request brought to one step: a chunk of its prompt, or a token with drafts behind it.
struct turn {
    std::uint32_t accepted = 0;  // the first so many rows stayed
    std::uint32_t output_rows = 0;
    std::vector<std::uint32_t> token_ids;  // one a row
    std::vector<layer_rows> layers;

    std::uint32_t rows() const { return static_cast<std::uint32_t>(token_ids.size()); }
};

// One sequence, from its creation to its release.
struct request {
    std::uint32_t prompt_tokens = 0;
    std::uint32_t rounds = 0;             // of compaction that removed something
    std::uint32_t seen = 0;               // tokens accepted in all
    std::vector<std::uint32_t> retained;  // by each layer, at the end
    std::vector<turn> turns;
};

struct recording {
    std::uint32_t query_heads = 0;
    std::uint32_t kv_heads = 0;
    std::uint32_t head_dim = 0;
    std::uint32_t format = 0;      // KV_FORMAT_*
    std::uint32_t rope_style = 0;  // KV_ROPE_*
    std::uint32_t scorer = 0;      // KV_SCORER_*; with NONE there is no policy
    std::uint32_t selection = 0;
    std::uint32_t policy_flags = 0;
    std::uint32_t budget = 0;
    std::uint32_t every = 0;
    std::uint32_t sinks = 0;
    std::uint32_t recent = 0;
    std::uint32_t offset_max = 0;
    std::uint64_t seed = 0;
    std::vector<double> inverse_frequencies;   // of the rotated pairs; empty without rotation
    std::vector<std::uint32_t> layer_numbers;  // in the model, one a recorded layer
    std::vector<request> requests;

    std::size_t query_size() const { return std::size_t{query_heads} * head_dim; }
    std::size_t kv_size() const { return std::size_t{kv_heads} * head_dim; }
};

// Both throw error. The bytes are those of a whole file.
recording decode(std::span<const std::byte> file);
std::vector<std::byte> encode(const recording& content);

// Throws error, which names the path.
recording read_trace(const std::string& path);

}  // namespace trace
