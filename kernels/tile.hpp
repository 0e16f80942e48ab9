// Where things lie in the tiles of tile-local formats: a head's rows of a whole block, codes in
// front, metadata in f16 behind them (format/kivi.cpp, kvarn.cpp).
#pragma once

#include "kernels/layout.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t most_tile_tokens = 128;
inline constexpr uint32_t kivi_group = 32;  ///< tokens that share metadata in a tile of keys

struct tile_shape {
    uint32_t code_bits;
    uint32_t tokens;
    uint32_t dim;
    coding codes;

    KVRT_BOTH constexpr bool kivi() const {
        return codes == coding::kivi4_tile || codes == coding::kivi2_tile;
    }
    KVRT_BOTH constexpr bool values() const {
        return codes == coding::kvarn4_value_tile || codes == coding::kvarn2_value_tile;
    }
    /// Of a row's codes, and in words of 4 bytes.
    KVRT_BOTH constexpr uint32_t code_bytes() const { return dim * code_bits / 8; }
    KVRT_BOTH constexpr uint32_t code_words() const { return (code_bytes() + 3) / 4; }
    /// Bytes to word `word` of a row's codes: those of values row by row, those of keys with the
    /// same word of 16 slots side by side.
    KVRT_BOTH constexpr uint32_t code_at(uint32_t slot, uint32_t word) const {
        if (values()) return (slot * code_words() + word) * 4;
        return ((slot / slots_of_group * code_words() + word) * slots_of_group +
                slot % slots_of_group) *
               4;
    }

    // Keys: steps and least numbers [dim], of kivi anew for each 32 tokens, then of kvarn a factor
    // for each token. Values: factors [dim], steps [tokens], least numbers [tokens].
    KVRT_BOTH constexpr uint32_t metadata() const { return tokens * code_words() * 4; }
    KVRT_BOTH constexpr uint32_t channel_steps(uint32_t slot) const {
        return metadata() + (kivi() ? slot / kivi_group * dim * 4 : 0);
    }
    KVRT_BOTH constexpr uint32_t channel_leasts(uint32_t slot) const {
        return channel_steps(slot) + dim * 2;
    }
    KVRT_BOTH constexpr uint32_t token_factors() const { return metadata() + dim * 4; }
    KVRT_BOTH constexpr uint32_t channel_factors() const { return metadata(); }
    KVRT_BOTH constexpr uint32_t token_steps() const { return metadata() + dim * 2; }
    KVRT_BOTH constexpr uint32_t token_leasts() const { return token_steps() + tokens * 2; }

    /// Bytes in use; zeros follow up to a multiple of 64.
    KVRT_BOTH constexpr uint32_t end() const {
        if (kivi()) return metadata() + tokens / kivi_group * dim * 4;
        return values() ? token_leasts() + tokens * 2 : token_factors() + tokens * 2;
    }
    KVRT_BOTH constexpr uint32_t bytes() const { return (end() + 63) / 64 * 64; }
};

/// Of an operand that is a tile.
KVRT_BOTH constexpr tile_shape shape_of_tile(const operand_place& operand) {
    const bool two_bits = operand.codes == coding::kivi2_tile ||
                          operand.codes == coding::kvarn2_key_tile ||
                          operand.codes == coding::kvarn2_value_tile;
    return {two_bits ? 2u : 4u, operand.tile_tokens, operand.dim, operand.codes};
}

}  // namespace kvrt::kernels
