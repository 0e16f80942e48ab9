// Sizes in random directions by the tile registers of Intel AMX, which take sums of products of
// bf16. Directions are bf16 numbers; what is stored as f16 is the sum of two exactly, and any f32
// nearly (2^-18 relative), so two products make one.

// Per-target include guard.
#if defined(KVRT_RETENTION_AMX_SKETCH_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVRT_RETENTION_AMX_SKETCH_INL_HPP
#undef KVRT_RETENTION_AMX_SKETCH_INL_HPP
#else
#define KVRT_RETENTION_AMX_SKETCH_INL_HPP
#endif

#include <hwy/highway.h>

#include <bit>
#include <cstring>

#include "retention/sketch.hpp"
#include "retention/visit-inl.hpp"

// AVX-512 as Highway's target has it, and more: callers ask amx_usable() first.
#if HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {
namespace {

// A tile register holds 16 rows of 16 words of two bf16 numbers, all of the same shape: a product
// takes as long for fewer. Of the right factor a word is of two channels that one row holds of the
// left one.
constexpr uint32_t amx_rows = 16, amx_words = 16;
constexpr uint32_t amx_channels = 2 * amx_words;  // of one product
constexpr uint32_t amx_sets = 2;                  // of up to 16 directions
constexpr uint32_t amx_parts = 2;                 // of rows: upper, lower
constexpr uint32_t amx_blocks = widest_row / amx_channels;
static_assert(sketch_directions <= amx_sets * amx_rows);

using amx_factor = uint32_t[amx_rows][amx_words];

/// Directions in either shape: as left factor [directions][channels], where rows are
/// dim-major, words of channels 2 w and 2 w + 1; as right factor [channels][directions], words of
/// channels w and w + 16 in row w. Made when first asked for.
struct amx_directions {
    using factors = amx_factor[amx_blocks][amx_sets];

    const float* sketch;
    uint32_t dim;
    bool has_left = false, has_right = false;
    alignas(64) factors left;
    alignas(64) factors right;

    amx_directions(const float* numbers, uint32_t channels) : sketch(numbers), dim(channels) {}

    const factors& as_left() {
        if (!has_left) fill<true>(left);
        has_left = true;
        return left;
    }
    const factors& as_right() {
        if (!has_right) fill<false>(right);
        has_right = true;
        return right;
    }

  private:
    template <bool is_left>
    void fill(factors& to) {
        const uint32_t blocks = dim / amx_channels;
        std::memset(to, 0, blocks * sizeof to[0]);
        for (uint32_t i = 0; i < dim; ++i) {
            const uint32_t block = i / amx_channels, channel = i % amx_channels;
            const uint32_t word = is_left ? channel / 2 : channel % amx_words;
            const uint32_t shift = 16 * (is_left ? channel % 2 : channel / amx_words);
            for (uint32_t c = 0; c < sketch_directions; ++c) {
                const uint32_t upper =
                    std::bit_cast<uint32_t>(sketch[i * sketch_directions + c]) >> 16;
                const uint32_t direction = c % amx_rows;
                const uint32_t row = is_left ? direction : word;
                const uint32_t column = is_left ? word : direction;
                to[block][c / amx_rows][row][column] |= upper << shift;
            }
        }
    }
};

// Registers: of both sets of directions the sums, where rows are the left factor and where
// directions are; then the factors. The second set has few directions, and registers of so few rows
// where these are the left factor: beside a right factor that stays, a product takes less time
// then.
constexpr int amx_second_left = 5, amx_left = 6, amx_right = 7;
constexpr uint32_t amx_second_rows = sketch_directions - amx_rows;

HWY_NOINLINE inline void set_sketch_shapes() {
    struct {
        uint8_t palette = 1, start_row = 0;
        uint8_t reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } shapes;
    for (int tile = 0; tile <= amx_right; ++tile) {
        shapes.row_bytes[tile] = amx_words * sizeof(uint32_t);
        shapes.rows[tile] = amx_rows;
    }
    shapes.rows[3] = shapes.rows[amx_second_left] = amx_second_rows;
    asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory");
}
HWY_NOINLINE inline void release_sketch_shapes() { asm volatile("tilerelease"); }

template <int tile>
HWY_INLINE void load_factor(const amx_factor& from) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(tile), "r"(from),
                 "r"(std::size_t{sizeof from[0]})
                 : "memory");
}
template <int sums, int left>
HWY_INLINE void multiply_factors() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(left), "i"(amx_right));
}
template <int tile>
HWY_INLINE void zero_sums() {
    asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}
template <int tile>
HWY_INLINE void store_sums(float (&to)[amx_rows][slot_group]) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(tile), "r"(to),
                 "r"(std::size_t{sizeof to[0]})
                 : "memory");
}

/// Rows and columns as those of the factors.
using amx_sums = float[amx_sets][amx_rows][slot_group];

/// Rows of 16 slots, in parts.
using amx_rows_parts = amx_factor[amx_blocks][amx_parts];

// Both vectors of channels, side by side in words.
template <element type>
HWY_INLINE void split_pair(floats first, floats second, uint32_t* upper, uint32_t* lower) {
    const float_tag d;
    const hn::RebindToUnsigned<float_tag> du;
    const auto mask = hn::Set(du, 0xffff0000u);
    const auto round = [&](auto bits) HWY_ATTR { return hn::Add(bits, hn::Set(du, 0x8000u)); };
    const auto join = [&](auto low, auto high)
                          HWY_ATTR { return hn::Or(hn::ShiftRight<16>(low), hn::And(high, mask)); };
    auto first_bits = hn::BitCast(du, first), second_bits = hn::BitCast(du, second);
    if constexpr (type != element::bf16) {
        first_bits = round(first_bits);
        second_bits = round(second_bits);
        const auto rest = [&](floats value, auto bits) HWY_ATTR {
            const auto left = hn::BitCast(du, hn::Sub(value, hn::BitCast(d, hn::And(bits, mask))));
            return type == element::f16 ? left : round(left);  // of f16 three bits are left
        };
        hn::Store(join(rest(first, first_bits), rest(second, second_bits)), du, lower);
    }
    hn::Store(join(first_bits, second_bits), du, upper);
}

/// Multiplies a block of rows, which are the left or the right factor, with its directions.
template <bool rows_left, bool two_parts>
HWY_INLINE void multiply_block(const amx_factor (&rows)[amx_parts],
                               const amx_factor (&sets)[amx_sets]) {
    const auto multiply = [&](const amx_factor& part) HWY_ATTR {
        if constexpr (rows_left) {
            load_factor<amx_left>(part);
            load_factor<amx_right>(sets[0]);
            multiply_factors<0, amx_left>();
            load_factor<amx_right>(sets[1]);
            multiply_factors<1, amx_left>();
        } else {
            load_factor<amx_right>(part);
            load_factor<amx_left>(sets[0]);
            multiply_factors<2, amx_left>();
            load_factor<amx_second_left>(sets[1]);
            multiply_factors<3, amx_second_left>();
        }
    };
    multiply(rows[0]);
    if constexpr (two_parts) multiply(rows[1]);
}

/// Sums of the products of rows and directions. split(block) makes a block of rows: the unit works
/// on one while the next is made, and by then what was stored can be loaded.
template <bool rows_left, bool two_parts, class callable>
HWY_INLINE void multiply_rows(const amx_rows_parts& rows, uint32_t blocks,
                              const amx_directions::factors& directions, const callable& split,
                              amx_sums& sums) {
    constexpr int first_sums = rows_left ? 0 : 2;
    zero_sums<first_sums>();
    zero_sums<first_sums + 1>();
    for (uint32_t block = 0; block < blocks; ++block) {
        split(block);
        if (block == 0) continue;
        multiply_block<rows_left, two_parts>(rows[block - 1], directions[block - 1]);
    }
    multiply_block<rows_left, two_parts>(rows[blocks - 1], directions[blocks - 1]);
    store_sums<first_sums>(sums[0]);
    store_sums<first_sums + 1>(sums[1]);
}

// |x G|^2 of the 16 slots of a tile, or of a group in rows; channels are a multiple of 32. Products
// are asked for first, and squared when those of the next tile are on their way.
struct amx_squares {
    amx_directions& directions;
    uint32_t dim;
    alignas(64) amx_rows_parts rows = {};
    alignas(64) amx_sums sums[2] = {};
    bool of_rows[2] = {};  // what sums are of
    uint32_t asked = 0;

    amx_squares(amx_directions& of, uint32_t channels) : directions(of), dim(channels) {}

    template <element type>
    void ask(const std::byte* tile, tile_prefetch coming) {
        const auto split = [&](uint32_t block) HWY_ATTR {
            for (uint32_t word = 0; word < amx_words; ++word) {
                coming.advance(2 * slot_group * element_bytes(type));
                const uint32_t i = block * amx_channels + 2 * word;
                split_pair<type>(load_lanes<type>(tile, i, 0), load_lanes<type>(tile, i + 1, 0),
                                 rows[block][0][word], rows[block][1][word]);
            }
        };
        multiply_rows<false, type != element::bf16>(rows, dim / amx_channels, directions.as_left(),
                                                    split, begin(false));
    }

    template <element type>
    void ask(const row_group<type>& group, tile_prefetch coming) {
        const auto split = [&](uint32_t block) HWY_ATTR {
            for (uint32_t row = 0; row < amx_rows; ++row) {
                coming.advance(amx_channels * element_bytes(type));
                const uint32_t i = block * amx_channels;
                split_pair<type>(group.load(row, i), group.load(row, i + amx_words),
                                 rows[block][0][row], rows[block][1][row]);
            }
        };
        multiply_rows<true, type != element::bf16>(rows, dim / amx_channels, directions.as_right(),
                                                   split, begin(true));
    }

    // Of the tile asked for `before` tiles before the last one: 0 or 1.
    floats answer(uint32_t before) const {
        const float_tag d;
        const uint32_t which = (asked - 1 - before) % 2;
        const amx_sums& found = sums[which];
        floats square = hn::Zero(d);
        if (!of_rows[which]) {
            for (uint32_t c = 0; c < sketch_directions; ++c) {
                const floats sum = hn::Load(d, found[c / amx_rows][c % amx_rows]);
                square = hn::MulAdd(sum, sum, square);
            }
            return square;
        }
        alignas(64) float squares[slot_group];
        for (uint32_t row = 0; row < slot_group; ++row) {
            const floats first = hn::Load(d, found[0][row]), second = hn::Load(d, found[1][row]);
            const floats both = hn::MulAdd(first, first, hn::Mul(second, second));
            squares[row] = hn::GetLane(hn::SumOfLanes(d, both));
        }
        return hn::Load(d, squares);
    }

  private:
    amx_sums& begin(bool as_rows) {
        const uint32_t which = asked++ % 2;
        of_rows[which] = as_rows;
        return sums[which];
    }
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET == HWY_AVX3

#endif  // per-target include guard
