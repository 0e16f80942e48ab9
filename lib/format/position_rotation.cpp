#include "format/position_rotation.hpp"

#include <cmath>

namespace kvrt {

namespace {

/// Of one position: cosines, then sines of all pairs.
struct turning_factors {
    alignas(64) float room[2 * most_turned_pairs];
    const float* cosines;
    const float* sines;
};

void multiply(const float* by, uint32_t pairs, const float* cosines, const float* sines,
              float* room) {
    const float* by_sines = by + pairs;
    float* out_sines = room + most_turned_pairs;
    for (uint32_t b = 0; b < pairs; ++b) {
        const float real = cosines[b] * by[b] - sines[b] * by_sines[b];
        out_sines[b] = cosines[b] * by_sines[b] + sines[b] * by[b];
        room[b] = real;
    }
}

void find_factors(const position_rotation& rotation, uint32_t position, turning_factors& out) {
    const uint64_t entry = 2 * uint64_t{rotation.pairs};
    const float* table = rotation.table;
    out.cosines = table + position % turning_digit_values * entry;
    out.sines = out.cosines + rotation.pairs;
    for (position >>= turning_digit_bits; position != 0; position >>= turning_digit_bits) {
        table += turning_digit_values * entry;
        const uint32_t digit = position % turning_digit_values;
        if (digit == 0) continue;
        multiply(table + digit * entry, rotation.pairs, out.cosines, out.sines, out.room);
        out.cosines = out.room;
        out.sines = out.room + most_turned_pairs;
    }
}

}  // namespace

uint64_t turning_table_floats(uint32_t pairs) {
    return uint64_t{2} * pairs * (turning_digits * turning_digit_values + 1 + half_window);
}

void fill_turning_table(const double* inverse_frequencies, uint32_t pairs, float* table) {
    const auto fill = [&](uint32_t b, double position, float* cosine, float* sine) {
        const double angle = position * inverse_frequencies[b];
        *cosine = static_cast<float>(std::cos(angle));
        *sine = static_cast<float>(std::sin(angle));
    };
    for (uint32_t digit = 0; digit < turning_digits; ++digit) {
        const int shift = static_cast<int>(digit * turning_digit_bits);
        for (uint32_t value = 0; value < turning_digit_values; ++value) {
            for (uint32_t b = 0; b < pairs; ++b) {
                fill(b, std::ldexp(value, shift), table + b, table + pairs + b);
            }
            table += 2 * uint64_t{pairs};
        }
    }
    for (uint32_t b = 0; b < pairs; ++b) {
        fill(b, half_window - 0.5, table + b, table + pairs + b);
    }
    table += 2 * uint64_t{pairs};
    for (uint32_t b = 0; b < pairs; ++b) {
        float* cosines = table + b * half_window;
        for (uint32_t n = 0; n < half_window; ++n) {
            fill(b, n + 0.5, cosines + n, cosines + pairs * half_window + n);
        }
    }
}

void turn_row(const position_rotation& rotation, uint32_t position, float* row) {
    const uint32_t pairs = rotation.pairs;
    if (pairs == 0) return;
    turning_factors factors;
    find_factors(rotation, position, factors);
    const float gain = rotation.gain;
    if (rotation.interleaved) {
        for (uint32_t b = 0; b < pairs; ++b) {
            const float cosine = gain * factors.cosines[b], sine = gain * factors.sines[b];
            const float real = row[2 * b], imaginary = row[2 * b + 1];
            row[2 * b] = real * cosine - imaginary * sine;
            row[2 * b + 1] = real * sine + imaginary * cosine;
        }
        return;
    }
    float* seconds = row + pairs;
    for (uint32_t b = 0; b < pairs; ++b) {
        const float cosine = gain * factors.cosines[b], sine = gain * factors.sines[b];
        const float real = row[b], imaginary = seconds[b];
        row[b] = real * cosine - imaginary * sine;
        seconds[b] = real * sine + imaginary * cosine;
    }
}

}  // namespace kvrt
