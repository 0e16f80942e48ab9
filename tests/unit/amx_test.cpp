// Who may decline AMX, and how; what its kernels give is in format_attention_test.cpp.
#include "base/amx.hpp"

#include <doctest/doctest.h>

#include <cstdlib>

using namespace kvrt;

TEST_CASE("AMX is declined by any value of KVRT_NO_AMX but an empty one and 0") {
    CHECK_FALSE(declines_amx(nullptr));
    CHECK_FALSE(declines_amx(""));
    CHECK_FALSE(declines_amx("0"));
    CHECK(declines_amx("1"));
    CHECK(declines_amx("yes"));
    CHECK(declines_amx("00"));
    if (declines_amx(std::getenv("KVRT_NO_AMX"))) CHECK_FALSE(amx_usable());
    if (!amx_usable()) {
        MESSAGE(
            "no AMX here, or KVRT_NO_AMX is set: tests of attention over codes take dot products "
            "and floats for it");
    }
}
