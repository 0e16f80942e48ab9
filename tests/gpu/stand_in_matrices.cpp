// libcublasLt.so.13 for machines without a GPU: a fake of it (tests/device) over the stand-in's
// driver, behind the library's own symbols, which are in the same file as the driver's: the name is
// a link to it.
#include "device/fake_calls.hpp"
#include "device/fake_matrix_library.hpp"

namespace kvrt::cuda {

namespace {

/// The driver is there before it, and ends after it.
fake_matrix_library& matrices() {
    static fake_matrix_library made(*fake_calls::active);
    return made;
}

template <auto member>
struct forward;
template <class result, class... types, result (*matrix_library::*member)(types...)>
struct forward<member> {
    static result call(types... arguments) { return (matrices().table().*member)(arguments...); }
};

}  // namespace

}  // namespace kvrt::cuda

using namespace kvrt::cuda;

#define KVRT_STAND_IN(name, symbol, result, parameters)                        \
    using kvrt_type_##symbol = result(*) parameters;                           \
    extern "C" kvrt_type_##symbol kvrt_find_##symbol() {                       \
        return &forward<&matrix_library::name>::call;                          \
    }                                                                          \
    extern "C" __attribute__((visibility("default"))) result symbol parameters \
        __attribute__((ifunc("kvrt_find_" #symbol)));
KVRT_MATRIX_CALLS(KVRT_STAND_IN)
#undef KVRT_STAND_IN
