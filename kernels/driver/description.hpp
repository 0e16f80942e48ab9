// What a device is, before it is opened: no memory of it is taken for that.
#pragma once

#include "device/plugin.h"
#include "driver/driver.hpp"

namespace kvrt::cuda {

/// The current context's device; the first, where there is none.
int current_device(const driver& calls);

/// Of current_device. UNSUPPORTED: there is none.
status describe_current(const driver& calls, kvrt_device_description& out);

}  // namespace kvrt::cuda
