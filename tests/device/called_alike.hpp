// Whether a function that this library declares itself is passed what the header it stands in for
// says: a call through a pointer with other parameters would not even crash for certain.
#pragma once

#include <cstddef>
#include <type_traits>

namespace kvrt::cuda {

template <class type, class = void>
inline constexpr std::size_t size_or_0 = 0;
template <class type>
inline constexpr std::size_t size_or_0<type, std::void_t<decltype(sizeof(type))>> = sizeof(type);
template <>
inline constexpr std::size_t size_or_0<void, void> = 0;
template <>
inline constexpr std::size_t size_or_0<const void, void> = 0;

/// Passed alike: pointers to things of one size, or numbers of one size. What a pointer of ours
/// points to may be nobody's business.
template <class ours, class theirs>
constexpr bool passed_alike() {
    if constexpr (std::is_pointer_v<ours> && std::is_pointer_v<theirs>) {
        using our_target = std::remove_pointer_t<ours>;
        using their_target = std::remove_pointer_t<theirs>;
        const bool opaque = std::is_class_v<our_target> && size_or_0<our_target> == 0;
        return std::is_const_v<our_target> == std::is_const_v<their_target> &&
               (opaque || size_or_0<our_target> == size_or_0<their_target>);
    } else {
        return !std::is_pointer_v<ours> && !std::is_pointer_v<theirs> &&
               std::is_floating_point_v<ours> == std::is_floating_point_v<theirs> &&
               sizeof(ours) == sizeof(theirs);
    }
}

template <class ours, class theirs>
struct called_alike : std::false_type {};
template <class our_result, class... ours, class their_result, class... theirs>
requires(
    sizeof...(ours) ==
    sizeof...(theirs)) struct called_alike<our_result (*)(ours...), their_result (*)(theirs...)>
    : std::bool_constant<passed_alike<our_result, their_result>() &&
                         (passed_alike<ours, theirs>() && ...)> {
};

}  // namespace kvrt::cuda
