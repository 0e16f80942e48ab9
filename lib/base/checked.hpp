// Arithmetic on sizes that come from callers or files: a result that does not fit is an error.
#pragma once

#include <cstdint>

namespace kvrt {

/// a * b, false on overflow.
[[nodiscard]] inline bool checked_multiply(uint64_t a, uint64_t b, uint64_t& out) {
    return !__builtin_mul_overflow(a, b, &out);
}

[[nodiscard]] inline bool checked_add(uint64_t a, uint64_t b, uint64_t& out) {
    return !__builtin_add_overflow(a, b, &out);
}

/// ceil(a / b), b > 0.
template <class integer>
constexpr integer ceil_divide(integer a, integer b) {
    return static_cast<integer>(a / b + (a % b != 0 ? 1 : 0));
}

/// `value` rounded up to a multiple of `step`; the caller knows that it fits.
template <class integer>
constexpr integer round_up(integer value, integer step) {
    return static_cast<integer>(ceil_divide(value, step) * step);
}

}  // namespace kvrt
