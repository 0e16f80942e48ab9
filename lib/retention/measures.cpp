#include "retention/measures.hpp"

#include "base/simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "retention/measures.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cmath>
#include <limits>

#include "retention/visit-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {
namespace {

template <bool with_norm, bool with_range>
struct measure_kernel {
    uint32_t dim;
    float* norm;
    float* range;

    static constexpr bool takes_rows = true;

    template <element type>
    void rows(const row_group<type>& group, uint32_t slot, uint32_t slots,
              tile_prefetch coming) const {
        const float_tag d;
        for (uint32_t row = 0; row < slots; ++row) {
            coming.advance(dim * element_bytes(type));
            floats even = hn::Zero(d), odd = hn::Zero(d);
            floats least = hn::Set(d, std::numeric_limits<float>::infinity());
            floats greatest = hn::Neg(least);
            for (uint32_t i = 0; i < dim; i += 2 * vector_slots) {
                const floats a = group.load(row, i), b = group.load(row, i + vector_slots);
                if constexpr (with_norm) {
                    even = hn::MulAdd(a, a, even);
                    odd = hn::MulAdd(b, b, odd);
                }
                if constexpr (with_range) {
                    least = hn::Min(least, hn::Min(a, b));
                    greatest = hn::Max(greatest, hn::Max(a, b));
                }
            }
            if constexpr (with_norm) {
                norm[slot + row] = std::sqrt(hn::GetLane(hn::SumOfLanes(d, hn::Add(even, odd))));
            }
            if constexpr (with_range) {
                range[slot + row] = hn::GetLane(hn::MaxOfLanes(d, greatest)) -
                                    hn::GetLane(hn::MinOfLanes(d, least));
            }
        }
    }

    template <element type>
    void tile(const std::byte* tile, uint32_t slot, uint32_t slots, tile_prefetch coming) const {
        const float_tag d;
        for (uint32_t first = 0; first < slots; first += vector_slots) {
            floats even = hn::Zero(d), odd = hn::Zero(d);
            floats least = hn::Set(d, std::numeric_limits<float>::infinity());
            floats greatest = hn::Neg(least);
            for (uint32_t i = 0; i < dim; i += 2) {
                if (first == 0) coming.advance(2 * slot_group * element_bytes(type));
                const floats a = load_lanes<type>(tile, i, first);
                const floats b = load_lanes<type>(tile, i + 1, first);
                if constexpr (with_norm) {
                    even = hn::MulAdd(a, a, even);
                    odd = hn::MulAdd(b, b, odd);
                }
                if constexpr (with_range) {
                    least = hn::Min(least, hn::Min(a, b));
                    greatest = hn::Max(greatest, hn::Max(a, b));
                }
            }
            if constexpr (with_norm) {
                store_lanes(hn::Sqrt(hn::Add(even, odd)), first, slots, norm + slot);
            }
            if constexpr (with_range) {
                store_lanes(hn::Sub(greatest, least), first, slots, range + slot);
            }
        }
    }
};

template <bool with_norm, bool with_range>
void measure(operand_role role, const stored_rows& rows, uint32_t first_slot, uint32_t end_slot,
             float* norm, float* range) {
    const uint32_t dim = rows.operand(role, *rows.open).dim;
    visit_tiles(role, rows, first_slot, end_slot,
                measure_kernel<with_norm, with_range>{dim, norm, range});
}

void measure_all(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot,
                 const slot_measures& out) {
    const auto run = [&](operand_role role, float* norm, float* range) {
        if (norm != nullptr && range != nullptr) {
            measure<true, true>(role, rows, first_slot, end_slot, norm, range);
        } else if (norm != nullptr) {
            measure<true, false>(role, rows, first_slot, end_slot, norm, range);
        } else if (range != nullptr) {
            measure<false, true>(role, rows, first_slot, end_slot, norm, range);
        }
    };
    run(operand_role::keys, out.key_norm, nullptr);
    run(operand_role::values, out.value_norm, out.value_range);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvrt {

HWY_EXPORT(measure_all);

void measure_slots(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot,
                   const slot_measures& out) {
    HWY_DYNAMIC_DISPATCH(measure_all)(rows, first_slot, end_slot, out);
}

}  // namespace kvrt
#endif
