#include "dense_cache.hpp"

#include <algorithm>
#include <cmath>
#include <complex>
#include <limits>

double dense_cache::product(const float* query, const float* key, double distance) const {
    const std::size_t pairs = config_.inverse_frequencies.size();
    double sum = 0;
    for (std::size_t i = 0; i < pairs; ++i) {
        const std::complex<double> turned =
            std::complex<double>(query[2 * i], query[2 * i + 1]) *
            std::polar(1.0, distance * config_.inverse_frequencies[i]);
        sum += turned.real() * static_cast<double>(key[2 * i]) +
               turned.imag() * static_cast<double>(key[2 * i + 1]);
    }
    for (std::size_t d = 2 * pairs; d < config_.head_dim; ++d) {
        sum += static_cast<double>(query[d]) * static_cast<double>(key[d]);
    }
    return sum;
}

generate::outcome<generate::nothing> dense_cache::attend(std::uint32_t layer,
                                                         const generate::attention_rows& rows) {
    const std::size_t dim = config_.head_dim;
    const std::size_t token_size = config_.kv_size();
    const std::size_t group = config_.query_heads / config_.kv_heads;
    const double scale = 1.0 / std::sqrt(static_cast<double>(dim));
    std::vector<float>& keys = keys_[layer];
    std::vector<float>& values = values_[layer];
    for (std::size_t row = 0; row < rows.rows; ++row) {
        const float* key = rows.keys + row * rows.row_stride;
        const float* value = rows.values + row * rows.row_stride;
        keys.insert(keys.end(), key, key + token_size);
        values.insert(values.end(), value, value + token_size);
        const std::size_t tokens = keys.size() / token_size;
        for (std::size_t head = 0; head < config_.query_heads; ++head) {
            const float* query = rows.queries + row * rows.row_stride + head * dim;
            const std::size_t first = head / group * dim;
            std::vector<double> weights(tokens);
            for (std::size_t j = 0; j < tokens; ++j) {
                weights[j] = scale * product(query, &keys[j * token_size + first],
                                             distance_ ? distance_(tokens - 1, j) : 0);
                if (sees_ && !sees_(tokens - 1, j)) {
                    weights[j] = -std::numeric_limits<double>::infinity();
                }
            }
            const double largest = *std::max_element(weights.begin(), weights.end());
            double total = 0;
            for (double& weight : weights) {
                weight = std::exp(weight - largest);
                total += weight;
            }
            float* out = rows.out + row * config_.query_size() + head * dim;
            for (std::size_t d = 0; d < dim; ++d) {
                double sum = 0;
                for (std::size_t j = 0; j < tokens; ++j) {
                    sum += weights[j] * static_cast<double>(values[j * token_size + first + d]);
                }
                out[d] = static_cast<float>(sum / total);
            }
        }
    }
    return generate::nothing{};
}
