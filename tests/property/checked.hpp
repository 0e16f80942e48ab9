// A mismatch of the oracle as a failed check of doctest.
#pragma once

#include <doctest/doctest.h>

#include <string>

#include "mismatch.hpp"

namespace property {

template <class callable>
void check_no_mismatch(const callable& body) {
    std::string found;
    try {
        body();
    } catch (const mismatch& error) {
        found = error.what();
    }
    CHECK_MESSAGE(found.empty(), found);
}

}  // namespace property
