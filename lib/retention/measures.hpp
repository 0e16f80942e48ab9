// What a row weighs by itself: norms of keys and values, and the range of a value's channels.
#pragma once

#include "retention/stored_rows.hpp"

namespace kvrt {

/// Rows of floats by slot. A null pointer asks for nothing; an operand that nothing is asked of is
/// not read.
struct slot_measures {
    float* key_norm = nullptr;     ///< |k|
    float* value_norm = nullptr;   ///< |v|
    float* value_range = nullptr;  ///< greatest channel of v minus its least (VaSE's rho)
};

/// Fills entries [first_slot, end_slot). Reads each row of an operand once, whatever is asked of
/// it. A slot's numbers depend on nothing but its rows. A NaN in a row gives a norm of NaN; the
/// range may pass it over.
void measure_slots(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot,
                   const slot_measures& out);

}  // namespace kvrt
