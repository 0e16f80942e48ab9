// Reading and writing stored rows one at a time, wherever and however they lie: for the reference,
// for scores, and for whoever is not in a hurry.
#pragma once

#include "format/tile.hpp"

namespace kvrt {

/// Copies the record of [slot, head] out of a block, word by word. Not for plain formats.
void gather_record(const operand_layout& operand, const std::byte* block, uint32_t slot,
                   uint32_t head, std::byte* record);

/// Puts a record in the place of [slot, head].
void put_record(const operand_layout& operand, std::byte* block, uint32_t slot, uint32_t head,
                const std::byte* record);

/// The row of [slot, head] as f32, in the basis it is stored in. `position` of its token matters
/// where the format needs positions.
void read_stored_row(const operand_layout& operand, const std::byte* block, uint32_t slot,
                     uint32_t head, uint32_t position, float* row);

/// Writes such a row, where the format needs no positions; returns how many of its elements
/// saturated. Not for tile-local formats.
uint32_t store_row(const operand_layout& operand, std::byte* block, uint32_t slot, uint32_t head,
                   const float* row);

/// read_stored_row in the basis the row was written in.
void read_row(const operand_layout& operand, const std::byte* block, uint32_t slot, uint32_t head,
              uint32_t position, float* row);

}  // namespace kvrt
