// What the bytes of a row depend on besides its numbers and its position, as one hash: where it is
// equal, records of one pool mean the same in another. It goes into keys of prefixes.
#pragma once

#include "format/tile.hpp"
#include "model/rope.hpp"

namespace kvrt {

/// How keys are rotated as they are stored; values are not.
struct stored_rotation {
    const rope_description& rope = not_rotated;
    bool by_slot = false;  ///< not yet: attention does it
};

/// XXH3 of format, dimensions, tokens of a tile, rotation, static scales and channel constants of
/// an operand, of `rope` where the format turns keys back, and of whether attention rotates. Where
/// rows lie in a block does not count. `written`: how rows are stored before they are demoted to
/// this.
uint64_t operand_identity(const operand_layout& operand, uint32_t kv_heads,
                          const stored_rotation& stored, const operand_layout* written = nullptr);

}  // namespace kvrt
