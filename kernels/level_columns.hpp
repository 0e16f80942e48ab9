// KVarN's factors of a matrix's columns (format/kvarn.cpp): alternately columns and rows are
// divided by their deviations, and the most balanced factors are kept. All in double, and every sum
// in the order of the CPU's, so that the factors are its.
//
// A thread has a channel over all tokens; eight neighbours have a token, each every eighth channel.
#pragma once

#include "kernels/seal_tile.hpp"

namespace kvrt::kernels {

inline constexpr double least_deviation = 1e-3, largest_deviation = 1e3;
inline constexpr double least_column_factor = 0.74081822068171786;   // e^-0.3
inline constexpr double largest_column_factor = 22026.465794806718;  // e^10
inline constexpr uint32_t levelling_rounds = 8;
inline constexpr uint32_t token_lanes = 8;

KVRT_BOTH constexpr double clamp_double(double x, double least, double largest) {
    return x < least ? least : largest < x ? largest : x;
}

/// Rows or columns of the matrix: their factors, and their deviations over what the others' factors
/// leave.
template <uint32_t most>
struct matrix_side {
    double factors[most], inverses[most], deviations[most];

    KVRT_DEVICE double left(uint32_t i) const { return deviations[i] / factors[i]; }
};

/// In shared memory.
struct levelled_matrix {
    matrix_side<most_tile_tokens> tokens;  // those whose numbers are all finite
    matrix_side<most_dim> channels;
    float best[most_dim];  // factors of the columns
    uint32_t is_finite[most_tile_tokens];
    uint32_t finite_count;
    uint32_t finite[most_tile_tokens];  // slots
};
static_assert(most_tile_tokens <= most_dim);

/// The tokens whose numbers are all finite, in order. Ends with a barrier.
template <class Cx>
KVRT_DEVICE void find_finite(const raw_rows& rows, const tile_shape& shape,
                             levelled_matrix& matrix) {
    for (uint32_t t = Cx::warp(); t < shape.tokens; t += Cx::threads() / warp_lanes) {
        bool finite = true;
        for (uint32_t i = Cx::lane(); i < shape.dim; i += warp_lanes) {
            finite = finite && is_finite<Cx>(rows.at<Cx>(t, i));
        }
        const bool all = Cx::ballot(!finite) == 0;
        if (Cx::lane() == 0) matrix.is_finite[t] = all ? 1 : 0;
    }
    Cx::barrier();
    for (uint32_t t = Cx::thread(); t < shape.tokens; t += Cx::threads()) {
        uint32_t before = 0;
        for (uint32_t i = 0; i < t; ++i) before += matrix.is_finite[i];
        if (matrix.is_finite[t] != 0) matrix.finite[before] = t;
        if (t == shape.tokens - 1) matrix.finite_count = before + matrix.is_finite[t];
    }
    Cx::barrier();
}

template <class Cx>
KVRT_DEVICE double deviation_of(double sum, double squares, uint32_t count) {
    if (count < 2) return 0.0;
    const double number = static_cast<double>(count);
    const double spread = squares - sum * sum / number;
    return Cx::square_root((0.0 < spread ? spread : 0.0) / (number - 1));
}

/// Of each channel over tokens, numbers divided by the tokens' factors.
template <class Cx>
KVRT_DEVICE void measure_channels(const raw_rows& rows, uint32_t dim, levelled_matrix& matrix) {
    for (uint32_t i = Cx::thread(); i < dim; i += Cx::threads()) {
        const double origin = double{rows.at<Cx>(matrix.finite[0], i)} * matrix.tokens.inverses[0];
        double sum = 0.0, squares = 0.0;
        for (uint32_t k = 1; k < matrix.finite_count; ++k) {
            const double distance =
                double{rows.at<Cx>(matrix.finite[k], i)} * matrix.tokens.inverses[k] - origin;
            sum += distance;
            squares += distance * distance;
        }
        matrix.channels.deviations[i] = deviation_of<Cx>(sum, squares, matrix.finite_count);
    }
}

/// Of each token over channels, numbers divided by the channels' factors.
template <class Cx>
KVRT_DEVICE void measure_tokens(const raw_rows& rows, uint32_t dim, levelled_matrix& matrix) {
    const uint32_t lane = Cx::thread() % token_lanes, first_lane = Cx::lane() - lane;
    const uint32_t together = Cx::threads() / token_lanes;
    for (uint32_t first = 0; first < matrix.finite_count; first += together) {
        const uint32_t k = first + Cx::thread() / token_lanes;
        double sum = 0.0, squares = 0.0;
        if (k < matrix.finite_count) {
            const uint32_t slot = matrix.finite[k];
            const double origin = double{rows.at<Cx>(slot, 0)} * matrix.channels.inverses[0];
            for (uint32_t i = lane; i < dim; i += token_lanes) {
                const double distance =
                    double{rows.at<Cx>(slot, i)} * matrix.channels.inverses[i] - origin;
                sum += distance;
                squares += distance * distance;
            }
        }
        double all = Cx::shuffle(sum, first_lane), all_squares = Cx::shuffle(squares, first_lane);
        for (uint32_t next = 1; next < token_lanes; ++next) {
            all += Cx::shuffle(sum, first_lane + next);
            all_squares += Cx::shuffle(squares, first_lane + next);
        }
        if (lane == 0 && k < matrix.finite_count) {
            matrix.tokens.deviations[k] = deviation_of<Cx>(all, all_squares, dim);
        }
    }
}

/// How far apart what the factors leave of the deviations is. Each warp finds it for itself.
template <class Cx, uint32_t most>
KVRT_DEVICE double imbalance_of(const matrix_side<most>& side, uint32_t count) {
    double least = side.left(0), largest = least;
    for (uint32_t i = Cx::lane(); i < count; i += warp_lanes) {
        const double left = side.left(i);
        least = left < least ? left : least;
        largest = largest < left ? left : largest;
    }
    for (uint32_t bits = 1; bits < warp_lanes; bits *= 2) {
        const double other_least = Cx::shuffle_xor(least, bits);
        const double other_largest = Cx::shuffle_xor(largest, bits);
        least = other_least < least ? other_least : least;
        largest = largest < other_largest ? other_largest : largest;
    }
    return largest / (least < 1e-8 ? 1e-8 : least);
}

template <class Cx, uint32_t most>
KVRT_DEVICE void level_side(matrix_side<most>& side, uint32_t count) {
    for (uint32_t i = Cx::thread(); i < count; i += Cx::threads()) {
        const double by = clamp_double(side.left(i), least_deviation, largest_deviation);
        const double factor =
            clamp_double(side.factors[i] * by, least_column_factor, largest_column_factor);
        side.factors[i] = factor;
        side.inverses[i] = 1.0 / factor;
    }
}

/// matrix.best, [finite tokens] of keys or [dim] of values. Not without finite tokens. Begins
/// behind a barrier and ends with one.
template <class Cx>
KVRT_DEVICE void level_columns(const raw_rows& rows, const tile_shape& shape,
                               levelled_matrix& matrix) {
    const bool columns_are_tokens = !shape.values();
    const uint32_t dim = shape.dim, tokens = matrix.finite_count;
    for (uint32_t i = Cx::thread(); i < dim; i += Cx::threads()) {
        matrix.channels.factors[i] = matrix.channels.inverses[i] = 1.0;
    }
    for (uint32_t k = Cx::thread(); k < tokens; k += Cx::threads()) {
        matrix.tokens.factors[k] = matrix.tokens.inverses[k] = 1.0;
    }
    Cx::barrier();
    const auto measure = [&](bool of_tokens) {
        if (of_tokens) {
            measure_tokens<Cx>(rows, dim, matrix);
        } else {
            measure_channels<Cx>(rows, dim, matrix);
        }
    };
    const auto level = [&](bool of_tokens) {
        if (of_tokens) {
            level_side<Cx>(matrix.tokens, tokens);
        } else {
            level_side<Cx>(matrix.channels, dim);
        }
    };
    measure(true);
    measure(false);
    Cx::barrier();
    double best = 0.0;
    for (uint32_t done = 0;; ++done) {
        const double of_tokens = imbalance_of<Cx>(matrix.tokens, tokens);
        const double of_channels = imbalance_of<Cx>(matrix.channels, dim);
        const double imbalance = of_tokens + of_channels;
        if (done == 0 || imbalance <= best) {
            best = imbalance;
            const uint32_t count = columns_are_tokens ? tokens : dim;
            for (uint32_t i = Cx::thread(); i < count; i += Cx::threads()) {
                matrix.best[i] = static_cast<float>(
                    columns_are_tokens ? matrix.tokens.factors[i] : matrix.channels.factors[i]);
            }
        }
        Cx::barrier();
        if (done == levelling_rounds) return;
        level(columns_are_tokens);
        Cx::barrier();
        measure(!columns_are_tokens);
        Cx::barrier();
        level(!columns_are_tokens);
        Cx::barrier();
        measure(columns_are_tokens);
        Cx::barrier();
    }
}

}  // namespace kvrt::kernels
