// The forward pass: embedding, then per layer attention and feed-forward on a residual stream, then
// logits for the rows that want them.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "llama.hpp"
#include "matrix_products.hpp"

namespace generate {

namespace {

// out[rows, outputs] = in[rows, inputs] * m + beta * out. One row is a matrix-vector product, which
// reads each weight once and is bound by memory.
void multiply(const matrix_products& products, const matrix& m, std::size_t rows, const float* in,
              float* out, float beta = 0.0f) {
    const auto outputs = static_cast<blasint>(m.outputs);
    const auto inputs = static_cast<blasint>(m.inputs);
    if (rows == 1) {
        products.with_vector(CblasColMajor, CblasNoTrans, outputs, inputs, 1.0f, m.weights.data(),
                             outputs, in, 1, beta, out, 1);
        return;
    }
    products.with_matrix(CblasRowMajor, CblasNoTrans, CblasNoTrans, static_cast<blasint>(rows),
                         outputs, inputs, 1.0f, in, inputs, m.weights.data(), outputs, beta, out,
                         outputs);
}

// out = in / root mean square(in) * weights, row by row.
void normalise(std::size_t rows, const std::vector<float>& weights, float epsilon, const float* in,
               float* out) {
    const std::size_t size = weights.size();
    for (std::size_t row = 0; row < rows; ++row, in += size, out += size) {
        double squares = 0;
        for (std::size_t i = 0; i < size; ++i) {
            squares += static_cast<double>(in[i]) * static_cast<double>(in[i]);
        }
        const auto mean = static_cast<float>(squares / static_cast<double>(size));
        const float scale = 1.0f / std::sqrt(mean + epsilon);
        for (std::size_t i = 0; i < size; ++i) {
            out[i] = in[i] * scale * weights[i];
        }
    }
}

void rotate_heads(float* head, std::size_t heads, std::size_t head_dim, std::size_t pairs,
                  const float* cosines, const float* sines) {
    for (; heads > 0; --heads, head += head_dim) {
        for (std::size_t i = 0; i < pairs; ++i) {
            const float real = head[2 * i];
            const float imaginary = head[2 * i + 1];
            head[2 * i] = real * cosines[i] - imaginary * sines[i];
            head[2 * i + 1] = real * sines[i] + imaginary * cosines[i];
        }
    }
}

}  // namespace

void set_matrix_threads(int threads) {
    const auto products = load_matrix_products();
    if (products && threads > 0) {
        (*products)->set_threads(threads);
    }
}

forward_pass::forward_pass(const llama_model& model, std::size_t most_rows)
    : model_(model), most_rows_(most_rows) {
    const llama_config& config = model.config;
    const std::size_t pairs = config.inverse_frequencies.size();
    state_.resize(most_rows * config.embedding);
    normalised_.resize(most_rows * config.embedding);
    packed_.resize(most_rows * (config.query_size() + 2 * std::size_t{config.kv_size()}));
    attended_.resize(most_rows * config.query_size());
    gate_up_.resize(most_rows * 2 * config.feed_forward);
    cosines_.resize(most_rows * pairs);
    sines_.resize(most_rows * pairs);
}

outcome<nothing> forward_pass::run(const batch& rows, attention_cache& cache,
                                   std::span<float> logits) {
    const llama_config& config = model_.config;
    const std::size_t count = rows.tokens.size();
    const std::size_t width = config.embedding;
    if (count == 0 || count > most_rows_ || rows.positions.size() != count ||
        logits.size() != rows.logits_rows.size() * config.vocabulary) {
        return error{
            fmt::format("a batch of {} rows, 1 to {} are allowed, with a position each "
                        "and room for the logits",
                        count, most_rows_)};
    }
    const auto products = load_matrix_products();
    if (!products) {
        return products.failure();
    }
    products_ = *products;
    const std::size_t pairs = config.inverse_frequencies.size();
    for (std::size_t row = 0; row < count; ++row) {
        if (rows.tokens[row] >= config.vocabulary) {
            return error{fmt::format("token {} is outside the vocabulary of {}", rows.tokens[row],
                                     config.vocabulary)};
        }
        const float* column = &model_.embedding.weights[rows.tokens[row]];
        for (std::size_t i = 0; i < width; ++i) {
            state_[row * width + i] = column[i * config.vocabulary];
        }
        for (std::size_t i = 0; i < pairs; ++i) {
            const double angle = rows.positions[row] * config.inverse_frequencies[i];
            cosines_[row * pairs + i] = static_cast<float>(std::cos(angle));
            sines_[row * pairs + i] = static_cast<float>(std::sin(angle));
        }
    }
    for (std::uint32_t layer = 0; layer < config.layers; ++layer) {
        if (auto done = run_layer(layer, count, cache); !done) {
            return done;
        }
    }
    for (std::size_t i = 0; i < rows.logits_rows.size(); ++i) {
        const std::size_t row = rows.logits_rows[i];
        if (row >= count) {
            return error{fmt::format("logits of row {} of {} are wanted", row, count)};
        }
        normalise(1, model_.output_norm, config.norm_epsilon, &state_[row * width],
                  &normalised_[i * width]);
    }
    if (!rows.logits_rows.empty()) {
        multiply(*products_, model_.output(), rows.logits_rows.size(), normalised_.data(),
                 logits.data());
    }
    return nothing{};
}

outcome<nothing> forward_pass::run_layer(std::uint32_t index, std::size_t rows,
                                         attention_cache& cache) {
    const llama_config& config = model_.config;
    const llama_layer& layer = model_.layers[index];
    const std::size_t pairs = config.inverse_frequencies.size();
    const std::size_t packed_size = layer.query_key_value.outputs;

    normalise(rows, layer.attention_norm, config.norm_epsilon, state_.data(), normalised_.data());
    multiply(*products_, layer.query_key_value, rows, normalised_.data(), packed_.data());
    for (std::size_t row = 0; row < rows && !cache.rotates(); ++row) {
        // Keys lie behind the queries: one walk rotates both.
        rotate_heads(&packed_[row * packed_size], config.query_heads + config.kv_heads,
                     config.head_dim, pairs, &cosines_[row * pairs], &sines_[row * pairs]);
    }
    attention_rows packed;
    packed.rows = rows;
    packed.row_stride = packed_size;
    packed.queries = packed_.data();
    packed.keys = packed.queries + config.query_size();
    packed.values = packed.keys + config.kv_size();
    packed.out = attended_.data();
    if (auto done = cache.attend(index, packed); !done) {
        return done;
    }
    multiply(*products_, layer.attention_output, rows, attended_.data(), state_.data(), 1.0f);

    normalise(rows, layer.feed_forward_norm, config.norm_epsilon, state_.data(),
              normalised_.data());
    multiply(*products_, layer.gate_up, rows, normalised_.data(), gate_up_.data());
    const std::size_t inner = config.feed_forward;
    for (std::size_t row = 0; row < rows; ++row) {
        // The result is packed towards the front: row r is written at r * inner, never past what
        // has been read.
        const float* gate = &gate_up_[row * 2 * inner];
        const float* up = gate + inner;
        float* out = &gate_up_[row * inner];
        for (std::size_t i = 0; i < inner; ++i) {
            out[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
        }
    }
    multiply(*products_, layer.down, rows, gate_up_.data(), state_.data(), 1.0f);
    return nothing{};
}

}  // namespace generate
