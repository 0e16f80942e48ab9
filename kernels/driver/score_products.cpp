#include "driver/score_products.hpp"

#include <algorithm>
#include <bit>

#include "base/checked.hpp"

namespace kvrt::cuda {

namespace {

using namespace kernels;

constexpr uint64_t alignment = 256;  ///< of what the library is given, bytes
/// More slots at once make no product faster, and fewer let the keys stay in a cache.
constexpr uint32_t most_tile = 4096;

/// Of one head: keys, weights, products.
uint64_t bytes_of_head(const product_parameters& call, uint64_t tile) {
    const uint64_t inner = call.inner(), columns = call.columns();
    return sizeof(float) * (inner * tile + columns * inner + columns * tile);
}

}  // namespace

product_scorer::product_scorer() : weigh_{"kvrt_weigh_heads"}, take_{"kvrt_take_greatest"} {}

status product_scorer::open(device_context& device, kernel_functions& functions, int compute,
                            uint64_t workspace_bytes) {
    KVRT_TRY(functions.state());
    library_bytes_ = std::min(most_library_bytes, workspace_bytes / 8 / alignment * alignment);
    KVRT_TRY(products_.open(device, compute, library_bytes_));
    const current_context here(device);
    status verdict = here.state();
    if (verdict == KV_OK) verdict = functions.find(weigh_);
    if (verdict == KV_OK) verdict = functions.find(take_);
    if (verdict == KV_OK) verdict = workspace_.allocate(device, workspace_bytes);
    if (verdict < 0) {
        products_.close();
        return verdict;
    }
    functions_ = &functions;
    workspace_bytes_ = workspace_bytes;
    return KV_OK;
}

product_shape product_scorer::cut::shape_of(uint32_t first_head) const {
    return {tile, call.columns(), call.inner(), std::min(heads, all - first_head)};
}

status product_scorer::plan(const triattention_parameters& score, cut& made) const {
    made.call.score = score;
    made.all = score.count * score.place.kv_heads;
    const uint64_t room = workspace_bytes_ - library_bytes_ - 2 * alignment;
    made.tile = std::min(std::bit_ceil(std::max(score.most_slots, score_threads)), most_tile);
    while (made.tile > score_threads && bytes_of_head(made.call, made.tile) > room) made.tile /= 2;
    const uint64_t one = bytes_of_head(made.call, made.tile);
    if (one > room) {
        return fail(KV_LIMIT, "matrix products of a head take {} bytes of workspace: there are {}",
                    one + workspace_bytes_ - room, workspace_bytes_);
    }
    // Alike in size, so that they are of two shapes at most.
    const uint32_t most = static_cast<uint32_t>(std::min<uint64_t>(made.all, room / one));
    made.heads = ceil_divide(made.all, ceil_divide(made.all, most));
    made.call.tile = made.tile;
    const uint64_t keys = sizeof(float) * made.call.inner() * made.tile * made.heads;
    const uint64_t weights =
        sizeof(float) * made.call.columns() * uint64_t{made.call.inner()} * made.heads;
    const auto at = [&](uint64_t bytes) {
        return reinterpret_cast<float*>(workspace_.address() + library_bytes_ + bytes);
    };
    made.call.keys = at(0);
    made.call.weights = at(round_up(keys, alignment));
    made.call.products = at(round_up(keys, alignment) + round_up(weights, alignment));
    return KV_OK;
}

status product_scorer::prepare(const triattention_parameters& call) {
    cut parts;
    KVRT_TRY(plan(call, parts));
    KVRT_TRY(products_.prepare(parts.shape_of(0)));
    const uint32_t last = (parts.all - 1) / parts.heads * parts.heads;
    return last == 0 ? KV_OK : products_.prepare(parts.shape_of(last));
}

status product_scorer::launch(stream_handle stream, const triattention_parameters& score,
                              kernel_function& gather) {
    cut parts;
    KVRT_TRY(plan(score, parts));
    product_parameters& call = parts.call;
    const auto address = [](const float* memory) {
        return reinterpret_cast<device_pointer>(memory);
    };
    for (; call.first_head < parts.all; call.first_head += call.heads) {
        const product_shape shape = parts.shape_of(call.first_head);
        call.heads = shape.batch;
        KVRT_TRY(functions_->launch(weigh_, call.heads, score_threads, 0, stream, &call));
        const uint32_t blocks = product_blocks(call.heads, call.tile);
        for (call.first_slot = 0; call.first_slot < score.most_slots;
             call.first_slot += call.tile) {
            KVRT_TRY(functions_->launch(gather, blocks, score_threads, 0, stream, &call));
            KVRT_TRY(products_.multiply(stream, shape, address(call.keys), address(call.weights),
                                        address(call.products), workspace_.address()));
            KVRT_TRY(functions_->launch(take_, blocks, score_threads, 0, stream, &call));
        }
    }
    return KV_OK;
}

}  // namespace kvrt::cuda
