#include "trace_builder.hpp"

#include <algorithm>
#include <cmath>
#include <random>
#include <span>

#include "dequantize.hpp"
#include "trace/checksum.hpp"

namespace {

// Finite halves of magnitudes up to 2, signs and fractions at random.
std::vector<std::uint16_t> random_halves(std::mt19937& generator, std::size_t count) {
    std::vector<std::uint16_t> halves(count);
    for (std::uint16_t& half : halves) {
        const std::uint32_t drawn = generator();
        half = static_cast<std::uint16_t>((drawn & 0x83ffu) | ((12 + (drawn >> 16 & 3)) << 10));
    }
    return halves;
}

double value_at(const std::vector<std::uint16_t>& halves, std::size_t index) {
    return static_cast<double>(generate::half_to_float(halves[index]));
}

// A token that is seen: its row in its turn's tensors.
struct seen_token {
    const trace::layer_rows* rows;
    std::size_t row;
};

// One row and head: weights over what is seen, then the sum of values.
void attend(const trace::recording& from, const std::vector<seen_token>& seen,
            const seen_token& query, std::size_t head, float* out) {
    const std::size_t dim = from.head_dim;
    const std::size_t kv_head = head / (from.query_heads / from.kv_heads);
    const std::size_t query_at = (query.row * from.query_heads + head) * dim;
    std::vector<double> weights;
    for (const seen_token& token : seen) {
        const std::size_t key_at = (token.row * from.kv_heads + kv_head) * dim;
        double product = 0;
        for (std::size_t d = 0; d < dim; ++d) {
            product += value_at(query.rows->queries, query_at + d) *
                       value_at(token.rows->keys, key_at + d);
        }
        weights.push_back(product / std::sqrt(static_cast<double>(dim)));
    }
    const double largest = *std::max_element(weights.begin(), weights.end());
    double total = 0;
    for (double& weight : weights) {
        weight = std::exp(weight - largest);
        total += weight;
    }
    for (std::size_t d = 0; d < dim; ++d) {
        double sum = 0;
        for (std::size_t i = 0; i < seen.size(); ++i) {
            const std::size_t at = (seen[i].row * from.kv_heads + kv_head) * dim + d;
            sum += weights[i] * value_at(seen[i].rows->values, at);
        }
        out[d] = static_cast<float>(sum / total);
    }
}

}  // namespace

void seal(std::vector<std::byte>& file) {
    trace::checksum sum;
    sum.add(std::span(file).first(file.size() - 8));
    for (std::size_t i = 0; i < 8; ++i) {
        file[file.size() - 8 + i] = static_cast<std::byte>(sum.value() >> (8 * i) & 0xff);
    }
}

std::vector<float> softmax_outputs(const trace::recording& from, const trace::request& request,
                                   std::size_t turn, std::size_t layer) {
    std::vector<seen_token> seen;
    for (std::size_t before = 0; before < turn; ++before) {
        for (std::size_t row = 0; row < request.turns[before].accepted; ++row) {
            seen.push_back({&request.turns[before].layers[layer], row});
        }
    }
    const trace::turn& last = request.turns[turn];
    std::vector<float> outputs(last.output_rows * from.query_size());
    const std::size_t first_row = last.rows() - last.output_rows;
    for (std::size_t row = 0; row < last.rows(); ++row) {
        seen.push_back({&last.layers[layer], row});
        for (std::size_t head = 0; row >= first_row && head < from.query_heads; ++head) {
            attend(from, seen, seen.back(), head,
                   &outputs[((row - first_row) * from.query_heads + head) * from.head_dim]);
        }
    }
    return outputs;
}

trace::recording make_trace(const trace_shape& shape) {
    std::mt19937 generator(20240229);
    trace::recording made;
    made.query_heads = shape.query_heads;
    made.kv_heads = shape.kv_heads;
    made.head_dim = shape.head_dim;
    made.format = shape.format;
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
        made.layer_numbers.push_back(2 * layer + 1);
    }
    for (const auto& turns : shape.requests) {
        trace::request& request = made.requests.emplace_back();
        request.prompt_tokens = turns.front().first;
        for (const auto& [rows, accepted] : turns) {
            trace::turn& turn = request.turns.emplace_back();
            turn.accepted = accepted;
            turn.output_rows = rows <= 8 ? rows : 1;
            request.seen += accepted;
            for (std::uint32_t row = 0; row < rows; ++row) {
                turn.token_ids.push_back(generator() % 1000);
            }
            for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
                turn.layers.push_back({random_halves(generator, rows * made.query_size()),
                                       random_halves(generator, rows * made.kv_size()),
                                       random_halves(generator, rows * made.kv_size()),
                                       {}});
            }
        }
        request.retained.assign(shape.layers, request.seen);
        for (std::size_t turn = 0; turn < request.turns.size(); ++turn) {
            for (std::size_t layer = 0; layer < shape.layers; ++layer) {
                request.turns[turn].layers[layer].outputs =
                    softmax_outputs(made, request, turn, layer);
            }
        }
    }
    return made;
}
