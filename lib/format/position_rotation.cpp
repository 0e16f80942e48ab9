#include "format/position_rotation.hpp"

#include <cmath>

namespace kvrt {

namespace {

constexpr uint32_t digits = 4, digit_bits = 8, digit_values = 1u << digit_bits;

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
    out.cosines = table + position % digit_values * entry;
    out.sines = out.cosines + rotation.pairs;
    for (position >>= digit_bits; position != 0; position >>= digit_bits) {
        table += digit_values * entry;
        const uint32_t digit = position % digit_values;
        if (digit == 0) continue;
        multiply(table + digit * entry, rotation.pairs, out.cosines, out.sines, out.room);
        out.cosines = out.room;
        out.sines = out.room + most_turned_pairs;
    }
}

}  // namespace

uint64_t turning_table_floats(uint32_t pairs) {
    return uint64_t{digits} * digit_values * 2 * pairs;
}

void fill_turning_table(const double* inverse_frequencies, uint32_t pairs, float* table) {
    for (uint32_t digit = 0; digit < digits; ++digit) {
        for (uint32_t value = 0; value < digit_values; ++value, table += 2 * uint64_t{pairs}) {
            const double position = std::ldexp(value, static_cast<int>(digit * digit_bits));
            for (uint32_t b = 0; b < pairs; ++b) {
                const double angle = position * inverse_frequencies[b];
                table[b] = static_cast<float>(std::cos(angle));
                table[pairs + b] = static_cast<float>(std::sin(angle));
            }
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
