// kv_seq_fit_affine of pools on a device: the keys come to the host, which fits them as ever.
#pragma once

#include "sequence/fit_affine.hpp"

namespace kvrt {

struct step_context;

/// As fit_affine of sequence/fit_affine.hpp. Waits for the device; NO_MEMORY for the keys on the
/// host.
status fit_affine_on_device(step_context& context, const sequence& source, affine_fit& fit);

}  // namespace kvrt
