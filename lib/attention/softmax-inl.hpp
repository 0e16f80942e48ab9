// Vector pieces of softmax, compiled once per instruction set.

// Per-target include guard.
#if defined(KVRT_ATTENTION_SOFTMAX_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVRT_ATTENTION_SOFTMAX_INL_HPP
#undef KVRT_ATTENTION_SOFTMAX_INL_HPP
#else
#define KVRT_ATTENTION_SOFTMAX_INL_HPP
#endif

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// e^x for x <= 88, within 2e-7 relative; 0 below -87.3, NaN stays NaN. x = n ln2 + r with |r| <=
/// ln2 / 2; e^r by its Taylor polynomial of degree 6 in Horner form; 2^n through the exponent.
template <class tag>
HWY_INLINE hn::Vec<tag> fast_exp(tag d, hn::Vec<tag> x) {
    const hn::RebindToSigned<tag> di;
    const auto n = hn::Round(hn::Mul(x, hn::Set(d, 1.44269504f)));
    // ln2 in two parts, the first with trailing zeros, so that n * first is exact.
    auto r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), x);
    r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
    auto p = hn::Set(d, 1.0f / 720.0f);
    p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 120.0f));
    p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 24.0f));
    p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 6.0f));
    p = hn::MulAdd(p, r, hn::Set(d, 0.5f));
    p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
    p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
    const auto exponent = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(di, n), hn::Set(di, 127)));
    const auto result = hn::Mul(p, hn::BitCast(d, exponent));
    return hn::IfThenElse(hn::Lt(x, hn::Set(d, -87.3f)), hn::Zero(d), result);
}

/// tanh(x), within 2e-7 absolute.
template <class tag>
HWY_INLINE hn::Vec<tag> fast_tanh(tag d, hn::Vec<tag> x) {
    const auto one = hn::Set(d, 1.0f);
    const auto bounded = hn::Max(hn::Set(d, -20.0f), hn::Min(hn::Set(d, 20.0f), x));
    const auto e = fast_exp(d, hn::Add(bounded, bounded));
    const auto result = hn::Sub(one, hn::Div(hn::Set(d, 2.0f), hn::Add(e, one)));
    return hn::IfThenElse(hn::IsNaN(x), x, result);
}

/// values[0, count) *= factor; count is a multiple of 8.
HWY_INLINE void scale_run(float* values, uint32_t count, float factor) {
    const hn::CappedTag<float, 8> d;
    const auto by = hn::Set(d, factor);
    for (uint32_t i = 0; i < count; i += static_cast<uint32_t>(hn::Lanes(d))) {
        hn::StoreU(hn::Mul(hn::LoadU(d, values + i), by), d, values + i);
    }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
