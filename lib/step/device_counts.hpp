// Counts of what saturates on a device: kernels add to them there, and a copy comes to the host
// behind steps, so that what the host has is that of a step some way back.
#pragma once

#include "sequence/cache.hpp"

namespace kvrt {

struct step;

struct device_counts {
    uint64_t* address = nullptr;  ///< of the device: as cache::saturated; null: nobody counts

    status create(cache& store);
    /// As saturation_of, on the device.
    saturation_counts of(const cache& store, uint32_t lane) const;
};

/// Asks the device how far it is, and takes what counts have come.
status poll_device(cache& store);

}  // namespace kvrt
