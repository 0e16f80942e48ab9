// KVarN (arXiv 2606.03458) with codes of 4 and 2 bits, on rotated rows: x = (code * step + least) *
// column, all three in f16. Keys are read as [channels][tokens], values as [tokens][channels]: a
// step and a least number for each row of that matrix, a factor for each column, which levels the
// columns' variances, so that a row's outliers are none.
//
//   A tile of keys    codes in columns (tile_codes.hpp), step[dim], least[dim], factor[tokens]
//   A tile of values  codes [slot][words], factor[dim], step[tokens], least[tokens]
//
// then zeros up to a multiple of 64 bytes. A token with a number that is not finite becomes NaN,
// all of it, and the others are coded as if it were not there. Numbers that no f16 metadata reach,
// above 65504 times their column's factor, are cut off.
#include "base/checked.hpp"
#include "format/formats.hpp"
#include "format/tile_codes.hpp"

namespace kvrt {

namespace {

constexpr double least_deviation = 1e-3, largest_deviation = 1e3;
constexpr double least_factor = 0.74081822068171786;   // e^-0.3
constexpr double largest_factor = 22026.465794806718;  // e^10
constexpr uint32_t iterations = 8;

/// The tokens of a tile whose numbers are all finite.
struct finite_tokens {
    uint32_t count = 0;
    uint32_t at[most_tile_tokens];

    finite_tokens(const float* rows, uint32_t tokens, uint32_t dim) {
        for (uint32_t t = 0; t < tokens; ++t) {
            float flaw = 0.0f;  // x * 0 is NaN unless x is finite
            for (uint32_t i = 0; i < dim; ++i) flaw += rows[t * dim + i] * 0.0f;
            if (flaw == 0.0f) at[count++] = t;
        }
    }
};

double deviation(double sum, double squares, uint32_t count) {
    const double number = static_cast<double>(count);
    return count < 2 ? 0.0
                     : std::sqrt(std::max(0.0, (squares - sum * sum / number) / (number - 1)));
}

/// Of each channel over tokens, numbers divided by the tokens' factors. Sums are of distances from
/// the first number, so that those of constants are zero.
void channel_deviations(const float* rows, const finite_tokens& finite, uint32_t dim,
                        const double* token_factors, double* deviations) {
    constexpr uint32_t lanes = 8;  // dim is a multiple
    double inverse[most_tile_tokens];
    for (uint32_t k = 0; k < finite.count; ++k) inverse[k] = 1.0 / token_factors[k];
    for (uint32_t first = 0; first < dim; first += lanes) {
        double origin[lanes], sum[lanes] = {}, squares[lanes] = {};
        const float* row = rows + finite.at[0] * dim + first;
        for (uint32_t lane = 0; lane < lanes; ++lane) {
            origin[lane] = double{row[lane]} * inverse[0];
        }
        for (uint32_t k = 1; k < finite.count; ++k) {
            row = rows + finite.at[k] * dim + first;
            for (uint32_t lane = 0; lane < lanes; ++lane) {
                const double distance = double{row[lane]} * inverse[k] - origin[lane];
                sum[lane] += distance;
                squares[lane] += distance * distance;
            }
        }
        for (uint32_t lane = 0; lane < lanes; ++lane) {
            deviations[first + lane] = deviation(sum[lane], squares[lane], finite.count);
        }
    }
}

/// Of each token over channels, numbers divided by the channels' factors.
void token_deviations(const float* rows, const finite_tokens& finite, uint32_t dim,
                      const double* channel_factors, double* deviations) {
    constexpr uint32_t lanes = 8;
    double inverse[widest_row];
    for (uint32_t i = 0; i < dim; ++i) inverse[i] = 1.0 / channel_factors[i];
    for (uint32_t k = 0; k < finite.count; ++k) {
        const float* row = rows + finite.at[k] * dim;
        const double origin = double{row[0]} * inverse[0];
        double sums[lanes] = {}, squares[lanes] = {};
        for (uint32_t i = 0; i < dim; i += lanes) {
            for (uint32_t lane = 0; lane < lanes; ++lane) {
                const double distance = double{row[i + lane]} * inverse[i + lane] - origin;
                sums[lane] += distance;
                squares[lane] += distance * distance;
            }
        }
        for (uint32_t lane = 1; lane < lanes; ++lane) {
            sums[0] += sums[lane];
            squares[0] += squares[lane];
        }
        deviations[k] = deviation(sums[0], squares[0], dim);
    }
}

/// Rows or columns of the matrix: their factors, and their deviations over what the others' factors
/// leave.
struct side {
    uint32_t count = 0;
    double factors[widest_row], deviations[widest_row];

    /// What the factors leave of a deviation.
    double left(uint32_t i) const { return deviations[i] / factors[i]; }
    void level() {
        for (uint32_t i = 0; i < count; ++i) {
            const double by = std::clamp(left(i), least_deviation, largest_deviation);
            factors[i] = std::clamp(factors[i] * by, least_factor, largest_factor);
        }
    }
    double imbalance() const {
        double least = left(0), largest = least;
        for (uint32_t i = 1; i < count; ++i) {
            least = std::min(least, left(i));
            largest = std::max(largest, left(i));
        }
        return largest / std::max(least, 1e-8);
    }
};

static_assert(most_tile_tokens <= widest_row);

/// Factors for the columns, the channels or the tokens that are finite: alternately columns and
/// rows are divided by their deviations, and the most balanced factors are kept. What the
/// logarithms of the paper's are bounded to, the factors are here, so that no library's exp() has a
/// say in bytes. The rows' own factors are not needed: codes and the step that they take are those
/// of the row, in whatever unit.
template <bool columns_are_tokens>
void level_columns(const float* rows, const finite_tokens& finite, uint32_t dim, float* factors) {
    side tokens, channels;
    tokens.count = finite.count;
    channels.count = dim;
    std::fill_n(tokens.factors, finite.count, 1.0);
    std::fill_n(channels.factors, dim, 1.0);
    const auto measure_tokens = [&] {
        token_deviations(rows, finite, dim, channels.factors, tokens.deviations);
    };
    const auto measure_channels = [&] {
        channel_deviations(rows, finite, dim, tokens.factors, channels.deviations);
    };
    side& columns = columns_are_tokens ? tokens : channels;
    side& lines = columns_are_tokens ? channels : tokens;
    measure_tokens();
    measure_channels();
    double best = INFINITY;
    for (uint32_t done = 0;; ++done) {
        const double imbalance = columns.imbalance() + lines.imbalance();
        if (imbalance <= best) {
            best = imbalance;
            for (uint32_t i = 0; i < columns.count; ++i) {
                factors[i] = static_cast<float>(columns.factors[i]);
            }
        }
        if (done == iterations) return;
        columns.level();
        columns_are_tokens ? measure_channels() : measure_tokens();
        lines.level();
        columns_are_tokens ? measure_tokens() : measure_channels();
    }
}

template <uint32_t bits>
uint32_t code_bytes_of(uint32_t tokens, uint32_t dim) {
    return tokens * code_words(dim, bits) * record_word;
}

template <uint32_t bits>
uint32_t bytes_of_keys(uint32_t tokens, uint32_t dim) {
    return round_up(code_bytes_of<bits>(tokens, dim) + 4 * dim + 2 * tokens, 64u);
}

template <uint32_t bits>
uint32_t bytes_of_values(uint32_t tokens, uint32_t dim) {
    return round_up(code_bytes_of<bits>(tokens, dim) + 2 * dim + 4 * tokens, 64u);
}

/// Stores a column's factor, NaN of tokens that are not finite, and returns what divides by it.
float store_factor(float factor, std::byte* address) {
    store_f16(address, factor);
    return 1.0f / load_f16(address);
}

template <uint32_t bits>
void seal_keys(const float* rows, uint32_t tokens, uint32_t dim, std::byte* tile) {
    constexpr float last_code = (1u << bits) - 1;
    std::byte* steps = tile + code_bytes_of<bits>(tokens, dim);
    std::byte* leasts = steps + dim * 2;
    std::byte* factors = leasts + dim * 2;
    std::byte* end = factors + tokens * 2;
    std::memset(end, 0, static_cast<std::size_t>(tile + bytes_of_keys<bits>(tokens, dim) - end));

    const finite_tokens finite(rows, tokens, dim);
    float found[most_tile_tokens], inverse[most_tile_tokens];
    if (finite.count != 0) level_columns<true>(rows, finite, dim, found);
    std::fill_n(inverse, tokens, NAN);
    for (uint32_t t = 0; t < tokens; ++t) store_f16(factors + t * 2, NAN);
    float least[widest_row] = {}, largest[widest_row] = {}, step_inverse[widest_row];
    for (uint32_t k = 0; k < finite.count; ++k) {
        const uint32_t t = finite.at[k];
        const float* row = rows + t * dim;
        inverse[t] = store_factor(found[k], factors + t * 2);
        if (k == 0) {
            for (uint32_t i = 0; i < dim; ++i) least[i] = largest[i] = row[i] * inverse[t];
        }
        for (uint32_t i = 0; i < dim; ++i) {
            least[i] = std::min(least[i], row[i] * inverse[t]);
            largest[i] = std::max(largest[i], row[i] * inverse[t]);
        }
    }
    for (uint32_t i = 0; i < dim; ++i) {
        const stored_affine made = affine_over(least[i], largest[i], last_code);
        store_f16(steps + i * 2, made.step);
        store_f16(leasts + i * 2, made.least);
        step_inverse[i] = made.inverse();
        least[i] = made.least;
    }
    for (uint32_t t = 0; t < tokens; ++t) {
        const float* row = rows + t * dim;
        uint8_t codes[widest_row];
        for (uint32_t i = 0; i < dim; ++i) {
            codes[i] = nearest_code(row[i] * inverse[t], least[i], step_inverse[i], last_code);
        }
        store_tile_codes<code_columns, bits>(codes, dim, t, tile);
    }
}

template <uint32_t bits>
void open_keys(const std::byte* tile, uint32_t tokens, uint32_t dim, uint32_t first, uint32_t count,
               float* rows) {
    const std::byte* meta = tile + code_bytes_of<bits>(tokens, dim);
    float steps[widest_row], leasts[widest_row];
    load_f16s(meta, dim, steps);
    load_f16s(meta + dim * 2, dim, leasts);
    for (uint32_t slot = first; slot < first + count; ++slot, rows += dim) {
        const float factor = load_f16(meta + dim * 4 + slot * 2);
        uint8_t codes[widest_row] = {};
        load_tile_codes<code_columns, bits>(tile, dim, slot, codes);
        for (uint32_t i = 0; i < dim; ++i) {
            rows[i] = (static_cast<float>(codes[i]) * steps[i] + leasts[i]) * factor;
        }
    }
}

template <uint32_t bits>
void seal_values(const float* rows, uint32_t tokens, uint32_t dim, std::byte* tile) {
    constexpr float last_code = (1u << bits) - 1;
    std::byte* factors = tile + code_bytes_of<bits>(tokens, dim);
    std::byte* steps = factors + dim * 2;
    std::byte* leasts = steps + tokens * 2;
    std::byte* end = leasts + tokens * 2;
    std::memset(end, 0, static_cast<std::size_t>(tile + bytes_of_values<bits>(tokens, dim) - end));

    const finite_tokens finite(rows, tokens, dim);
    float found[widest_row], inverse[widest_row];
    std::fill_n(found, dim, 1.0f);
    if (finite.count != 0) level_columns<false>(rows, finite, dim, found);
    for (uint32_t i = 0; i < dim; ++i) inverse[i] = store_factor(found[i], factors + i * 2);
    for (uint32_t t = 0, k = 0; t < tokens; ++t) {
        const bool whole = k < finite.count && finite.at[k] == t;
        k += whole ? 1 : 0;
        uint8_t codes[widest_row] = {};
        stored_affine made{NAN, NAN};
        if (whole) {
            float row[widest_row];
            for (uint32_t i = 0; i < dim; ++i) row[i] = rows[t * dim + i] * inverse[i];
            const group_reach reach = reach_of(row, dim);
            made = affine_over(reach.least, reach.largest, last_code);
            const float step_inverse = made.inverse();
            for (uint32_t i = 0; i < dim; ++i) {
                codes[i] = nearest_code(row[i], made.least, step_inverse, last_code);
            }
        }
        store_f16(steps + t * 2, made.step);
        store_f16(leasts + t * 2, made.least);
        store_tile_codes<code_rows, bits>(codes, dim, t, tile);
    }
}

template <uint32_t bits>
void open_values(const std::byte* tile, uint32_t tokens, uint32_t dim, uint32_t first,
                 uint32_t count, float* rows) {
    const std::byte* meta = tile + code_bytes_of<bits>(tokens, dim);
    const std::byte* steps = meta + dim * 2;
    float factors[widest_row];
    load_f16s(meta, dim, factors);
    for (uint32_t slot = first; slot < first + count; ++slot, rows += dim) {
        const float step = load_f16(steps + slot * 2);
        const float least = load_f16(steps + (tokens + slot) * 2);
        uint8_t codes[widest_row] = {};
        load_tile_codes<code_rows, bits>(tile, dim, slot, codes);
        for (uint32_t i = 0; i < dim; ++i) {
            rows[i] = (static_cast<float>(codes[i]) * step + least) * factors[i];
        }
    }
}

template <uint32_t bits>
constexpr format_description described(uint32_t id, const char* name, const tile_codec& tile) {
    return {.id = id,
            .name = name,
            .kind = format_class::tile_local,
            .code_bits = bits,
            .always_rotated = true,
            .tile = tile};
}

constexpr uint32_t multiple = 64;

template <uint32_t bits>
constexpr tile_codec key_tiles = {
    multiple, bytes_of_keys<bits>, seal_keys<bits>, open_keys<bits>, {whole_codes(bits), 0, true}};
template <uint32_t bits>
constexpr tile_codec value_tiles = {multiple,
                                    bytes_of_values<bits>,
                                    seal_values<bits>,
                                    open_values<bits>,
                                    {whole_codes(bits), 0, false}};

}  // namespace

constinit const format_description kvarn4_key_format =
    described<4>(KV_FORMAT_KVARN4, "kvarn4", key_tiles<4>);
constinit const format_description kvarn4_value_format =
    described<4>(KV_FORMAT_KVARN4, "kvarn4", value_tiles<4>);
constinit const format_description kvarn2_key_format =
    described<2>(KV_FORMAT_KVARN2, "kvarn2", key_tiles<2>);
constinit const format_description kvarn2_value_format =
    described<2>(KV_FORMAT_KVARN2, "kvarn2", value_tiles<2>);

}  // namespace kvrt
