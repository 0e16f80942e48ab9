// What the bytes of a row depend on besides its numbers and its position, as one hash: where it is
// equal, records of one pool mean the same in another. It goes into keys of prefixes.
#pragma once

#include "format/tile.hpp"
#include "model/rope.hpp"

namespace kvrt {

/// XXH3 of format, dimensions, tokens of a tile, rotation, static scales and channel constants of
/// an operand, and of `rope` where the format turns keys back. Where rows lie in a block does not
/// count. `written`: how rows are stored before they are demoted to this.
uint64_t operand_identity(const operand_layout& operand, uint32_t kv_heads,
                          const rope_description& rope, const operand_layout* written = nullptr);

}  // namespace kvrt
