// What the lanes of a warp do together, as functions over their values, and where the elements of
// matrix fragments lie, as the PTX manual says for mma.m16n8k16 and ldmatrix.
#pragma once

#include "engine.hpp"

namespace emulator {

const char* meet(lane_values* lanes, uint32_t mask);     ///< nothing but waiting for each other
const char* shuffle(lane_values* lanes, uint32_t mask);  ///< word 0 of the lane in word 1
const char* ballot(lane_values* lanes, uint32_t mask);
const char* match_any(lane_values* lanes, uint32_t mask);
const char* reduce_add(lane_values* lanes, uint32_t mask);
const char* reduce_max(lane_values* lanes, uint32_t mask);
const char* reduce_min(lane_values* lanes, uint32_t mask);

/// Word 0 is the address of a row. Gives what this lane reads: of matrix m, words 2m and 2m + 1 are
/// the addresses of its two elements.
const char* exchange_rows(lane_values* lanes, uint32_t mask);
const char* exchange_rows_transposed(lane_values* lanes, uint32_t mask);

/// Words 0, 1 are A, word 2 B, words 3, 4 C and then D. In f32, ascending k, or pairs of pairs.
const char* multiply_f16(lane_values* lanes, uint32_t mask);
const char* multiply_bf16(lane_values* lanes, uint32_t mask);
const char* multiply_f16_in_pairs(lane_values* lanes, uint32_t mask);
const char* multiply_bf16_in_pairs(lane_values* lanes, uint32_t mask);

struct element_place {
    uint32_t row, column;
};
element_place place_in_a(uint32_t lane, uint32_t element);  ///< 16 x 16, 8 elements
element_place place_in_b(uint32_t lane, uint32_t element);  ///< 16 x 8, 4 elements
element_place place_in_c(uint32_t lane, uint32_t element);  ///< 16 x 8, 4 elements

}  // namespace emulator
