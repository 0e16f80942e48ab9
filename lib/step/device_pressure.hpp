// Memory pressure in pools on a device, at a step's end: as relieve_pressure does on the CPU.
#pragma once

#include "step/step.hpp"

namespace kvrt {

/// Behind the step's own rounds, on its stream: what can be demoted, then rounds of policies, until
/// no more than pressure_bytes are pinned. What is given up is parked behind the step. Errors of
/// the device; the step has ended all the same.
status relieve_pressure_on_device(step& target, kv_step_report& report);

}  // namespace kvrt
