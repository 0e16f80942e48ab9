#include "step/device_counts.hpp"

#include <atomic>

namespace kvrt {

status device_counts::create(cache& store) {
    if (store.saturated.size() == 0) return KV_OK;
    return store.device.create_counters(store.saturated.size(), &address);
}

saturation_counts device_counts::of(const cache& store, uint32_t lane) const {
    if (address == nullptr) return {nullptr, nullptr};
    const lane_geometry& geometry = store.model.lanes[lane];
    uint64_t* const first = address + geometry.first_counter + geometry.first_head;
    return {first, first + store.model.layers[geometry.layer].kv_heads};
}

status poll_device(cache& store) {
    KVRT_TRY(store.device.poll());
    const uint64_t* const arrived = store.device.arrived_counters();
    if (arrived == nullptr) return KV_OK;
    for (uint64_t i = 0; i < store.saturated.size(); ++i) {  // others may read meanwhile
        std::atomic_ref(store.saturated[i]).store(arrived[i], std::memory_order_relaxed);
    }
    return KV_OK;
}

}  // namespace kvrt
