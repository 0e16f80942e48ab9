// Vector pieces that kernels of several folders share, compiled once per instruction set (Highway's
// foreach_target): elements <-> f32, and the transpose between rows and dim-major tiles.
// Include it after hwy/highway.h, inside no namespace. Everything here rounds to nearest even and
// keeps NaN and infinity, as element.hpp does.

// Per-target include guard.
#if defined(KVRT_FORMAT_VECTOR_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVRT_FORMAT_VECTOR_INL_HPP
#undef KVRT_FORMAT_VECTOR_INL_HPP
#else
#define KVRT_FORMAT_VECTOR_INL_HPP
#endif

#include <hwy/highway.h>

#include "format/element.hpp"
#include "format/tile.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// Lanes(d) elements at `address`, any alignment, as f32.
template <element type, class tag>
HWY_INLINE hn::Vec<tag> load_f32(tag d, const std::byte* address) {
    if constexpr (type == element::f32) {
        return hn::LoadU(d, reinterpret_cast<const float*>(address));
    } else if constexpr (type == element::bf16) {
        const hn::Rebind<uint32_t, tag> d32;
        const hn::Rebind<uint16_t, tag> d16;
        const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(address));
        return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
    } else {
#if HWY_TARGET == HWY_SCALAR
        uint16_t bits;
        std::memcpy(&bits, address, sizeof bits);
        return hn::Set(d, f16_to_f32(bits));
#else
        const hn::Rebind<hwy::float16_t, tag> d16;
        return hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(address)));
#endif
    }
}

/// The other way; rounds once.
template <element type, class tag>
HWY_INLINE void store_f32(tag d, hn::Vec<tag> value, std::byte* address) {
    if constexpr (type == element::f32) {
        hn::StoreU(value, d, reinterpret_cast<float*>(address));
    } else if constexpr (type == element::bf16) {
        const hn::Rebind<uint32_t, tag> d32;
        const hn::Rebind<uint16_t, tag> d16;
        const auto bits = hn::BitCast(d32, value);
        const auto upper = hn::ShiftRight<16>(bits);
        const auto odd = hn::And(upper, hn::Set(d32, 1));
        const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7fffu))));
        const auto quiet = hn::Or(upper, hn::Set(d32, 0x40u));
        const auto is_nan = hn::RebindMask(d32, hn::IsNaN(value));
        hn::StoreU(hn::TruncateTo(d16, hn::IfThenElse(is_nan, quiet, rounded)), d16,
                   reinterpret_cast<uint16_t*>(address));
    } else {
#if HWY_TARGET == HWY_SCALAR
        const uint16_t bits = f32_to_f16(hn::GetLane(value));
        std::memcpy(address, &bits, sizeof bits);
#else
        const hn::Rebind<hwy::float16_t, tag> d16;
        hn::StoreU(hn::DemoteTo(d16, value), d16, reinterpret_cast<hwy::float16_t*>(address));
#endif
    }
}

/// `count` elements, a multiple of 8, both sides dense.
template <element from, element to>
HWY_INLINE void convert_run(const std::byte* source, std::byte* target, uint32_t count) {
    if constexpr (from == to) {
        std::memcpy(target, source, std::size_t{count} * element_bytes(from));
    } else {
        const hn::CappedTag<float, 16> wide;
        const hn::CappedTag<float, 8> narrow;
        uint32_t i = 0;
        for (const uint32_t step = static_cast<uint32_t>(hn::Lanes(wide)); i + step <= count;
             i += step) {
            store_f32<to>(wide, load_f32<from>(wide, source + i * element_bytes(from)),
                          target + i * element_bytes(to));
        }
        for (const uint32_t step = static_cast<uint32_t>(hn::Lanes(narrow)); i < count; i += step) {
            store_f32<to>(narrow, load_f32<from>(narrow, source + i * element_bytes(from)),
                          target + i * element_bytes(to));
        }
    }
}

#if HWY_TARGET != HWY_SCALAR
/// Eight elements of a row; with vectors of two 128-bit parts, of the row eight further on as well.
template <class tag>
HWY_INLINE hn::Vec<tag> load_eights(tag d, const uint16_t* row, const uint16_t* row_eight_on) {
    if constexpr (hn::MaxLanes(tag()) == 16) {
        const hn::Half<tag> half;
        return hn::Combine(d, hn::LoadU(half, row_eight_on), hn::LoadU(half, row));
    } else {
        (void)row_eight_on;
        return hn::LoadU(d, row);
    }
}
#endif

/// 16 rows of `dim` 16-bit elements (dim a multiple of 8) -> [dim][16]. rows[slot] any alignment.
HWY_INLINE void transpose_rows(const uint16_t* const* rows, uint32_t dim, uint16_t* tile) {
#if HWY_TARGET == HWY_SCALAR
    for (uint32_t i = 0; i < dim; ++i) {
        for (uint32_t slot = 0; slot < slot_group; ++slot) {
            tile[i * slot_group + slot] = rows[slot][i];
        }
    }
#else
    // In each 128-bit part eight rows meet: three perfect shuffles turn 8 x 8 around.
    const hn::CappedTag<uint16_t, 16> d;
    constexpr uint32_t lanes = static_cast<uint32_t>(hn::MaxLanes(d));
    for (uint32_t i = 0; i < dim; i += 8) {
        for (uint32_t first = 0; first < slot_group; first += lanes) {
            hn::Vec<decltype(d)> in[8], out[8];
            for (uint32_t row = 0; row < 8; ++row) {
                in[row] = load_eights(d, rows[first + row] + i, rows[8 + row] + i);
            }
            for (int round = 0; round < 3; ++round) {
                for (int pair = 0; pair < 4; ++pair) {
                    out[2 * pair] = hn::InterleaveLower(d, in[pair], in[pair + 4]);
                    out[2 * pair + 1] = hn::InterleaveUpper(d, in[pair], in[pair + 4]);
                }
                for (int k = 0; k < 8; ++k) in[k] = out[k];
            }
            for (uint32_t k = 0; k < 8; ++k) {
                hn::StoreU(in[k], d, tile + (i + k) * slot_group + first);
            }
        }
    }
#endif
}

/// The same for 32-bit elements.
HWY_INLINE void transpose_rows(const uint32_t* const* rows, uint32_t dim, uint32_t* tile) {
#if HWY_TARGET == HWY_SCALAR
    for (uint32_t i = 0; i < dim; ++i) {
        for (uint32_t slot = 0; slot < slot_group; ++slot) {
            tile[i * slot_group + slot] = rows[slot][i];
        }
    }
#else
    const hn::FixedTag<uint32_t, 4> d;
    for (uint32_t i = 0; i < dim; i += 4) {
        for (uint32_t first = 0; first < slot_group; first += 4) {
            hn::Vec<decltype(d)> in[4], out[4];
            for (uint32_t row = 0; row < 4; ++row) in[row] = hn::LoadU(d, rows[first + row] + i);
            for (int round = 0; round < 2; ++round) {
                for (int pair = 0; pair < 2; ++pair) {
                    out[2 * pair] = hn::InterleaveLower(d, in[pair], in[pair + 2]);
                    out[2 * pair + 1] = hn::InterleaveUpper(d, in[pair], in[pair + 2]);
                }
                for (int k = 0; k < 4; ++k) in[k] = out[k];
            }
            for (uint32_t k = 0; k < 4; ++k) {
                hn::StoreU(in[k], d, tile + (i + k) * slot_group + first);
            }
        }
    }
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
