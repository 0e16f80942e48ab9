// Version, statuses, messages, sized structs, presets, capabilities: calls without a pool.
#include <cstdio>

#include "attention/attend.hpp"
#include "base/sized_struct.hpp"
#include "format/format.hpp"
#include "model/geometry.hpp"
#include "model/presets.hpp"
#include "retention/scorers.hpp"

using namespace kvrt;

extern "C" {

void kv_struct_init(void* object, uint32_t struct_size) {
    if (object == nullptr || struct_size < sizeof(kv_struct_header)) return;
    std::memset(object, 0, struct_size);
    std::memcpy(object, &struct_size, sizeof struct_size);
}

uint32_t kvrt_version(void) { return KVRT_VERSION; }

const char* kv_status_name(kv_status code) { return status_name(code); }

int32_t kv_status_category(kv_status code) { return status_category(code); }

size_t kv_last_error(char* buffer, size_t capacity) {
    const char* message = message_buffer();
    const std::size_t length = std::strlen(message);
    if (buffer != nullptr && capacity != 0) {
        const std::size_t copied = std::min(length, capacity - 1);
        std::memcpy(buffer, message, copied);
        buffer[copied] = '\0';
    }
    return length;
}

kv_status kv_model_apply_preset(kv_layer* layers, uint32_t layer_count, uint32_t preset) {
    const preset_description* known = find_preset(preset);
    if (known == nullptr) {
        return fail(KV_UNSUPPORTED, "preset {} is not one of KV_PRESET_*", preset);
    }
    return apply_preset(*known, layers, layer_count);
}

kv_status kv_capabilities(kv_capabilities_report* out_report) {
    KVRT_TRY(
        check_struct(out_report, sizeof *out_report, 0, "out_report (kv_capabilities_report)"));
    kv_capabilities_report report = KV_INIT(kv_capabilities_report);
    for (uint32_t id = 1; id < 64; ++id) {
        if (find_format(id, operand_role::keys) != nullptr) report.formats |= uint64_t{1} << id;
    }
    report.devices = 1u << KV_DEVICE_CPU;
    report.layouts = 1u << KV_LAYOUT_NATIVE | 1u << KV_LAYOUT_HND | 1u << KV_LAYOUT_NHD;
    report.scorers = scorer_bits();
    report.selections = 1u << KV_SELECT_PER_LAYER_PER_HEAD | 1u << KV_SELECT_PER_HEAD |
                        1u << KV_SELECT_UNION | 1u << KV_SELECT_PER_LAYER;
    report.min_head_dim = min_head_dim;
    report.max_head_dim = max_head_dim;
    report.head_dim_multiple = head_dim_multiple;
    report.max_layers = max_layers;
    std::snprintf(report.simd_target, sizeof report.simd_target, "%s", attend_target_name());
    deliver(report, out_report);
    return KV_OK;
}

}  // extern "C"
