#include "collectives.hpp"

#include <bit>

#include "format/element.hpp"

namespace emulator {

namespace {

template <class function>
void for_lanes(uint32_t mask, function each) {
    for (uint32_t lane = 0; lane < 32; ++lane) {
        if ((mask >> lane & 1u) != 0) each(lane);
    }
}

template <class combine>
const char* reduce(lane_values* lanes, uint32_t mask, combine both) {
    uint32_t all = static_cast<uint32_t>(lanes[std::countr_zero(mask)].word[0]);
    for_lanes(mask & (mask - 1),
              [&](uint32_t lane) { all = both(all, static_cast<uint32_t>(lanes[lane].word[0])); });
    for_lanes(mask, [&](uint32_t lane) { lanes[lane].word[0] = all; });
    return nullptr;
}

uint32_t half_word(const lane_values& lane, uint32_t first_word, uint32_t index) {
    return static_cast<uint32_t>(lane.word[first_word + index / 4] >> (16 * (index % 4))) & 0xffffu;
}

uint32_t whole_word(const lane_values& lane, uint32_t first_word, uint32_t index) {
    return static_cast<uint32_t>(lane.word[first_word + index / 2] >> (32 * (index % 2)));
}

float to_float(uint32_t bits, bool bf16) {
    const uint16_t half = static_cast<uint16_t>(bits);
    return bf16 ? kvrt::bf16_to_f32(half) : kvrt::f16_to_f32(half);
}

float sum_in_pairs(const float* terms, uint32_t count) {
    if (count == 1) return terms[0];
    return sum_in_pairs(terms, count / 2) + sum_in_pairs(terms + count / 2, count / 2);
}

const char* multiply(lane_values* lanes, uint32_t mask, bool bf16, bool in_pairs) {
    if (mask != 0xffffffffu) return "a product of matrices takes the whole warp";
    float a[16][16], b[16][8], c[16][8];
    for (uint32_t lane = 0; lane < 32; ++lane) {
        for (uint32_t i = 0; i < 8; ++i) {
            const element_place at = place_in_a(lane, i);
            a[at.row][at.column] = to_float(half_word(lanes[lane], 0, i), bf16);
        }
        for (uint32_t i = 0; i < 4; ++i) {
            const element_place in_b = place_in_b(lane, i), in_c = place_in_c(lane, i);
            b[in_b.row][in_b.column] = to_float(half_word(lanes[lane], 2, i), bf16);
            c[in_c.row][in_c.column] = std::bit_cast<float>(whole_word(lanes[lane], 3, i));
        }
    }
    for (uint32_t row = 0; row < 16; ++row) {
        for (uint32_t column = 0; column < 8; ++column) {
            float terms[16];
            for (uint32_t k = 0; k < 16; ++k) terms[k] = a[row][k] * b[k][column];
            if (in_pairs) {
                c[row][column] += sum_in_pairs(terms, 16);
            } else {
                for (uint32_t k = 0; k < 16; ++k) c[row][column] += terms[k];
            }
        }
    }
    for (uint32_t lane = 0; lane < 32; ++lane) {
        for (uint32_t i = 0; i < 4; i += 2) {
            const element_place at = place_in_c(lane, i);
            lanes[lane].word[3 + i / 2] =
                std::bit_cast<uint32_t>(c[at.row][at.column]) |
                uint64_t{std::bit_cast<uint32_t>(c[at.row][at.column + 1])} << 32;
        }
    }
    return nullptr;
}

}  // namespace

// PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type": groupID = lane / 4,
// threadID_in_group = lane % 4.
element_place place_in_a(uint32_t lane, uint32_t element) {
    const uint32_t group = lane / 4, in_group = lane % 4;
    const bool upper = element < 2 || (element >= 4 && element < 6);
    return {upper ? group : group + 8, in_group * 2 + (element & 1u) + (element < 4 ? 0u : 8u)};
}

element_place place_in_b(uint32_t lane, uint32_t element) {
    const uint32_t group = lane / 4, in_group = lane % 4;
    return {in_group * 2 + (element & 1u) + (element < 2 ? 0u : 8u), group};
}

element_place place_in_c(uint32_t lane, uint32_t element) {
    const uint32_t group = lane / 4, in_group = lane % 4;
    return {element < 2 ? group : group + 8, in_group * 2 + (element & 1u)};
}

const char* meet(lane_values*, uint32_t) { return nullptr; }

const char* shuffle(lane_values* lanes, uint32_t mask) {
    uint64_t got[32] = {};
    bool outside = false;
    for_lanes(mask, [&](uint32_t lane) {
        const uint64_t from = lanes[lane].word[1];
        if (from >= 32 || (mask >> from & 1u) == 0) {
            outside = true;
        } else {
            got[lane] = lanes[from].word[0];
        }
    });
    if (outside) return "a shuffle from a lane that is not in the mask";
    for_lanes(mask, [&](uint32_t lane) { lanes[lane].word[0] = got[lane]; });
    return nullptr;
}

const char* ballot(lane_values* lanes, uint32_t mask) {
    uint64_t set = 0;
    for_lanes(mask, [&](uint32_t lane) { set |= (lanes[lane].word[0] != 0 ? 1u : 0u) << lane; });
    for_lanes(mask, [&](uint32_t lane) { lanes[lane].word[0] = set; });
    return nullptr;
}

const char* match_any(lane_values* lanes, uint32_t mask) {
    uint64_t same[32] = {};
    for_lanes(mask, [&](uint32_t lane) {
        for_lanes(mask, [&](uint32_t other) {
            if (lanes[lane].word[0] == lanes[other].word[0]) same[lane] |= 1u << other;
        });
    });
    for_lanes(mask, [&](uint32_t lane) { lanes[lane].word[0] = same[lane]; });
    return nullptr;
}

const char* reduce_add(lane_values* lanes, uint32_t mask) {
    return reduce(lanes, mask, [](uint32_t x, uint32_t y) { return x + y; });
}
const char* reduce_max(lane_values* lanes, uint32_t mask) {
    return reduce(lanes, mask, [](uint32_t x, uint32_t y) { return x > y ? x : y; });
}
const char* reduce_min(lane_values* lanes, uint32_t mask) {
    return reduce(lanes, mask, [](uint32_t x, uint32_t y) { return x < y ? x : y; });
}

// Lane l names row l % 8 of matrix l / 8, and gets elements 2 * (l % 4) and the next of row l / 4.
const char* exchange_rows(lane_values* lanes, uint32_t mask) {
    if (mask != 0xffffffffu) return "ldmatrix takes the whole warp";
    uint64_t rows[32];
    for (uint32_t lane = 0; lane < 32; ++lane) rows[lane] = lanes[lane].word[0];
    for (uint32_t lane = 0; lane < 32; ++lane) {
        for (uint32_t matrix = 0; matrix < 4; ++matrix) {
            const uint64_t first = rows[matrix * 8 + lane / 4] + lane % 4 * 4;
            lanes[lane].word[2 * matrix] = first;
            lanes[lane].word[2 * matrix + 1] = first + 2;
        }
    }
    return nullptr;
}

// Transposed it gets element l / 4 of rows 2 * (l % 4) and the next.
const char* exchange_rows_transposed(lane_values* lanes, uint32_t mask) {
    if (mask != 0xffffffffu) return "ldmatrix takes the whole warp";
    uint64_t rows[32];
    for (uint32_t lane = 0; lane < 32; ++lane) rows[lane] = lanes[lane].word[0];
    for (uint32_t lane = 0; lane < 32; ++lane) {
        for (uint32_t matrix = 0; matrix < 4; ++matrix) {
            for (uint32_t i = 0; i < 2; ++i) {
                lanes[lane].word[2 * matrix + i] =
                    rows[matrix * 8 + 2 * (lane % 4) + i] + lane / 4 * 2;
            }
        }
    }
    return nullptr;
}

const char* multiply_f16(lane_values* lanes, uint32_t mask) {
    return multiply(lanes, mask, false, false);
}
const char* multiply_bf16(lane_values* lanes, uint32_t mask) {
    return multiply(lanes, mask, true, false);
}
const char* multiply_f16_in_pairs(lane_values* lanes, uint32_t mask) {
    return multiply(lanes, mask, false, true);
}
const char* multiply_bf16_in_pairs(lane_values* lanes, uint32_t mask) {
    return multiply(lanes, mask, true, true);
}

}  // namespace emulator
