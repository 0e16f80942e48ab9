#include "model/layer_array.hpp"

#include "base/sized_struct.hpp"

namespace kvrt {

const std::byte* layer_at(const kv_layer* layers, uint32_t index) {
    return reinterpret_cast<const std::byte*>(layers) + uint64_t{index} * layers[0].struct_size;
}

status check_layer_array(const kv_layer* layers, uint32_t count, const char* name) {
    if (count != 0 && count <= max_layers && layers != nullptr) return KV_OK;
    return fail(KV_INVALID, "{}: layer_count is {}: 1 to {}, with layers set", name, count,
                max_layers);
}

status read_layer(const kv_layer* layers, uint32_t index, kv_layer& layer) {
    KVRT_TRY(adopt(reinterpret_cast<const kv_layer*>(layer_at(layers, index)),
                   KV_LAYER_SHARED | KV_LAYER_LANE_PER_HEAD | KV_LAYER_CACHE_POSITIONS,
                   "layers (kv_layer)", layer));
    if (layer.struct_size != layers[0].struct_size) {
        return fail(KV_INVALID, "layer {}: struct_size {} differs from layer 0's {}", index,
                    layer.struct_size, layers[0].struct_size);
    }
    return KV_OK;
}

}  // namespace kvrt
