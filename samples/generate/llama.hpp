// A Llama-family transformer: its weights, read from a GGUF file and kept as f32, and the forward
// pass over a batch of rows.
//
// Batch: one row per token, whatever sequence it belongs to. All matrix products take all rows at
// once; only attention knows which rows belong together, and it is asked through attention_cache.
// Matrices are turned round while loading, to [in, out]: a product with one row then adds scaled
// columns, which OpenBLAS streams through memory almost twice as fast as dot products.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gguf.hpp"
#include "matrix_products.hpp"
#include "outcome.hpp"
#include "tokenizer.hpp"

namespace generate {

struct llama_config {
    std::uint32_t layers = 0;
    std::uint32_t embedding = 0;
    std::uint32_t query_heads = 0;
    std::uint32_t kv_heads = 0;
    std::uint32_t head_dim = 0;
    std::uint32_t feed_forward = 0;
    std::uint32_t vocabulary = 0;
    std::uint32_t context = 0;  // longest text the model was trained for
    float norm_epsilon = 0;
    // Rotation of dimension pairs (2i, 2i + 1): position * inverse_frequencies[i] radians. The
    // pairs lie at the start of a head; what is behind them is not rotated.
    std::vector<double> inverse_frequencies;

    std::uint32_t query_size() const { return query_heads * head_dim; }
    std::uint32_t kv_size() const { return kv_heads * head_dim; }
};

struct matrix {
    std::size_t outputs = 0;
    std::size_t inputs = 0;
    std::vector<float> weights;  // [inputs, outputs]
};

struct llama_layer {
    std::vector<float> attention_norm;
    matrix query_key_value;  // stacked, so that one product makes all three
    matrix attention_output;
    std::vector<float> feed_forward_norm;
    matrix gate_up;  // stacked
    matrix down;
};

struct llama_model {
    static outcome<llama_model> load(const gguf_file& file);

    // What logits are made with: the output matrix, or the embedding where the two are tied.
    const matrix& output() const { return output_matrix.outputs != 0 ? output_matrix : embedding; }

    llama_config config;
    matrix embedding;  // outputs are tokens
    std::vector<llama_layer> layers;
    std::vector<float> output_norm;
    matrix output_matrix;
};

// Queries, keys and values of all rows of a batch, rotated unless the cache does that, in one
// packed buffer: row r begins at r * row_stride, with `query_heads` heads at `queries`, `kv_heads`
// each at `keys` and `values`. Attention leaves [rows, query_heads * head_dim] in `out`, dense.
struct attention_rows {
    std::size_t rows = 0;
    std::size_t row_stride = 0;
    float* queries = nullptr;
    float* keys = nullptr;
    float* values = nullptr;
    float* out = nullptr;
};

class attention_cache {
  public:
    virtual ~attention_cache() = default;
    virtual outcome<nothing> attend(std::uint32_t layer, const attention_rows& rows) = 0;
    // Whether it rotates queries and keys itself.
    virtual bool rotates() const { return false; }
};

struct batch {
    std::span<const token_id> tokens;            // one a row
    std::span<const std::uint32_t> positions;    // one a row
    std::span<const std::uint32_t> logits_rows;  // rows whose logits are wanted
};

class forward_pass {
  public:
    // The model must outlive the object. `most_rows` is the largest batch.
    forward_pass(const llama_model& model, std::size_t most_rows);

    // Writes [logits_rows, vocabulary] to `logits`.
    outcome<nothing> run(const batch& rows, attention_cache& cache, std::span<float> logits);

  private:
    outcome<nothing> run_layer(std::uint32_t index, std::size_t rows, attention_cache& cache);

    const llama_model& model_;
    std::size_t most_rows_;
    const matrix_products* products_ = nullptr;
    std::vector<float> state_;       // [rows, embedding]: the residual stream
    std::vector<float> normalised_;  // [rows, embedding]
    std::vector<float> packed_;      // [rows, query + key + value]
    std::vector<float> attended_;    // [rows, query]
    std::vector<float> gate_up_;     // [rows, 2 * feed_forward]
    std::vector<float> cosines_;     // [rows, pairs]
    std::vector<float> sines_;       // [rows, pairs]
};

// How many threads the matrix products use; 0 leaves the library's default.
void set_matrix_threads(int threads);

}  // namespace generate
