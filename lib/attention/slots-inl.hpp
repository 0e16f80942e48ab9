// Keys that are stored before rotation are turned by their slots as they are read. Compiled once
// per instruction set.
//
// Slots of a run are turned from its middle (position_rotation.hpp): one at y from there by the
// factor of the middle times that of y, which comes of a table of 32 for both signs of y.

// Per-target include guard.
#if defined(KVRT_ATTENTION_SLOTS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVRT_ATTENTION_SLOTS_INL_HPP
#undef KVRT_ATTENTION_SLOTS_INL_HPP
#else
#define KVRT_ATTENTION_SLOTS_INL_HPP
#endif

#include <hwy/highway.h>

#include "attention/kernels.hpp"
#include "format/vector-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {
namespace {

/// The rotation of up to 64 slots that follow each other.
class run_turner {
  public:
    run_turner(const position_rotation& rotation, uint32_t first_slot) : rotation_(rotation) {
        static_assert(run_slots <= window_positions);
        const uint32_t pairs = rotation.pairs;
        const float* middle = rotation.to_middle();
        for (uint32_t b = 0; b < 2 * pairs; ++b) factors_[b] = rotation.gain * middle[b];
        const float* table = rotation.table;
        for (uint32_t rest = first_slot; rest != 0; rest /= turning_digit_values) {
            const uint32_t digit = rest % turning_digit_values;
            if (digit != 0) multiply(table + uint64_t{2} * digit * pairs, pairs);
            table += uint64_t{2} * turning_digit_values * pairs;
        }
    }

    /// Turns the keys of 16 slots, from `slot` of the run on: [dim][stride] elements, which may be
    /// `out`, [dim][out_stride]. Lines of `ahead` as large as the keys are prefetched meanwhile,
    /// unless it is null.
    template <element type>
    void turn(const std::byte* keys, uint32_t stride, uint32_t slot, uint32_t dim, float* out,
              uint32_t out_stride, const std::byte* ahead) const {
        const tag d;
        constexpr uint32_t lanes = static_cast<uint32_t>(hn::MaxLanes(tag()));
        const uint32_t row_bytes = stride * element_bytes(type);
        const uint32_t pairs = rotation_.pairs;
        for (uint32_t b = 0; b < pairs; ++b) {
            const uint32_t first = rotation_.interleaved ? 2 * b : b;
            const uint32_t second = rotation_.interleaved ? first + 1 : b + pairs;
            const auto middle_cosine = hn::Set(d, factors_[b]);
            const auto middle_sine = hn::Set(d, factors_[pairs + b]);
            for (uint32_t lane = 0; lane < slot_group; lane += lanes) {
                hn::Vec<tag> cosine, sine;
                find_offsets(b, slot + lane, cosine, sine);
                const auto real = hn::NegMulAdd(middle_sine, sine, hn::Mul(middle_cosine, cosine));
                const auto imaginary =
                    hn::MulAdd(middle_sine, cosine, hn::Mul(middle_cosine, sine));
                const uint32_t place = lane * element_bytes(type);
                const auto x = load_f32<type>(d, keys + first * row_bytes + place);
                const auto y = load_f32<type>(d, keys + second * row_bytes + place);
                hn::StoreU(hn::NegMulAdd(y, imaginary, hn::Mul(x, real)), d,
                           out + first * out_stride + lane);
                hn::StoreU(hn::MulAdd(y, real, hn::Mul(x, imaginary)), d,
                           out + second * out_stride + lane);
            }
            if (ahead != nullptr) {
                prefetch_row(ahead + first * row_bytes, row_bytes);
                prefetch_row(ahead + second * row_bytes, row_bytes);
            }
        }
        for (uint32_t i = 2 * pairs; i < dim; ++i) {
            for (uint32_t lane = 0; lane < slot_group; lane += lanes) {
                hn::StoreU(load_f32<type>(d, keys + i * row_bytes + lane * element_bytes(type)), d,
                           out + i * out_stride + lane);
            }
            if (ahead != nullptr) prefetch_row(ahead + i * row_bytes, row_bytes);
        }
    }

  private:
    using tag = hn::CappedTag<float, slot_group>;

    void multiply(const float* by, uint32_t pairs) {
        float* sines = factors_ + pairs;
        for (uint32_t b = 0; b < pairs; ++b) {
            const float real = factors_[b] * by[b] - sines[b] * by[pairs + b];
            sines[b] = factors_[b] * by[pairs + b] + sines[b] * by[b];
            factors_[b] = real;
        }
    }

    /// Of pair b, from the middle to the slots of a register.
    HWY_INLINE void find_offsets(uint32_t b, uint32_t slot, hn::Vec<tag>& cosine,
                                 hn::Vec<tag>& sine) const {
        const tag d;
        constexpr uint32_t lanes = static_cast<uint32_t>(hn::MaxLanes(tag()));
        const float* cosines = rotation_.from_middle() + b * half_window;
        const float* sines = cosines + rotation_.pairs * half_window;
        if (slot >= half_window) {
            cosine = hn::LoadU(d, cosines + (slot - half_window));
            sine = hn::LoadU(d, sines + (slot - half_window));
        } else {
            const uint32_t mirrored = half_window - lanes - slot;
            cosine = hn::Reverse(d, hn::LoadU(d, cosines + mirrored));
            sine = hn::Neg(hn::Reverse(d, hn::LoadU(d, sines + mirrored)));
        }
    }

    static HWY_INLINE void prefetch_row(const std::byte* row, uint32_t bytes) {
        for (uint32_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
    }

    const position_rotation& rotation_;
    alignas(64) float factors_[2 * most_turned_pairs];  // cosines, then sines, of the middle
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
