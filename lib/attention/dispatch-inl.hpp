// What kernels are compiled for, chosen when they are called: kinds of codes, numbers of query
// heads. Include it per target.

// Per-target include guard.
#if defined(KVRT_ATTENTION_DISPATCH_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVRT_ATTENTION_DISPATCH_INL_HPP
#undef KVRT_ATTENTION_DISPATCH_INL_HPP
#else
#define KVRT_ATTENTION_DISPATCH_INL_HPP
#endif

#include <hwy/highway.h>

#include <type_traits>

#include "format/tile.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {

template <code_kind... kinds>
struct kind_list {
    static constexpr bool has(code_kind kind) { return ((kind == kinds) || ...); }

    /// Calls body(kind) with a kind of the list as a constant.
    template <class callable>
    static void call(code_kind kind, const callable& body) {
        ((kind == kinds ? body(std::integral_constant<code_kind, kinds>()) : void()), ...);
    }
};

/// What records of keys and of values have, and tiles.
using key_kinds = kind_list<code_kind::signed_bytes, code_kind::nibbles, code_kind::e2m1_nibbles,
                            code_kind::e4m3_bytes, code_kind::e5m2_bytes, code_kind::normal_nibbles,
                            code_kind::normal_three_bits>;
using value_kinds = kind_list<code_kind::signed_bytes, code_kind::nibbles, code_kind::e2m1_nibbles,
                              code_kind::e4m3_bytes, code_kind::e5m2_bytes, code_kind::two_bits,
                              code_kind::three_bits>;
using tile_kinds = kind_list<code_kind::nibbles, code_kind::two_bits>;

/// Calls body(heads) with 1 to 4 as a constant.
template <class callable>
void with_heads(uint32_t heads, const callable& body) {
    switch (heads) {
        case 1:
            return body(std::integral_constant<uint32_t, 1>());
        case 2:
            return body(std::integral_constant<uint32_t, 2>());
        case 3:
            return body(std::integral_constant<uint32_t, 3>());
        default:
            return body(std::integral_constant<uint32_t, 4>());
    }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
