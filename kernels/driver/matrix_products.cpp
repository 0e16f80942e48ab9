#include "driver/matrix_products.hpp"

namespace kvrt::cuda {

status matrix_products::open(device_context& device, int compute, uint64_t workspace_bytes) {
    close();
    KVRT_TRY(load_matrix_library(library_));
    const current_context here(device);
    KVRT_TRY(here.state());
    device_ = &device;
    workspace_bytes_ = workspace_bytes;
    status verdict = check(*library_, library_->create(&handle_), "cublasLtCreate");
    if (verdict == KV_OK) {
        verdict = check(*library_, library_->product_create(&product_, compute, matrix_f32),
                        "cublasLtMatmulDescCreate");
    }
    if (verdict == KV_OK) {
        verdict = check(*library_, library_->preference_create(&preference_),
                        "cublasLtMatmulPreferenceCreate");
    }
    if (verdict == KV_OK) {
        verdict = check(*library_,
                        library_->preference_set(preference_, preference_workspace,
                                                 &workspace_bytes_, sizeof workspace_bytes_),
                        "cublasLtMatmulPreferenceSetAttribute (workspace)");
    }
    if (verdict < 0) close();
    return verdict;
}

void matrix_products::close() {
    if (device_ == nullptr) return;
    const current_context here(*device_);
    for (entry& each : entries_) clear(each);
    if (preference_ != nullptr) (void)library_->preference_destroy(preference_);
    if (product_ != nullptr) (void)library_->product_destroy(product_);
    if (handle_ != nullptr) (void)library_->destroy(handle_);
    preference_ = nullptr;
    product_ = nullptr;
    handle_ = nullptr;
    device_ = nullptr;
}

void matrix_products::clear(entry& old) {
    for (const layout_handle each : old.layouts) {
        if (each != nullptr) (void)library_->layout_destroy(each);
    }
    old = entry();
}

status matrix_products::fill(const product_shape& shape, entry& made) {
    const uint64_t sides[3][2] = {
        {shape.rows, shape.inner}, {shape.inner, shape.columns}, {shape.rows, shape.columns}};
    const int32_t batch = static_cast<int32_t>(shape.batch);
    for (int i = 0; i < 3; ++i) {
        const int64_t stride = static_cast<int64_t>(sides[i][0] * sides[i][1]);
        layout_handle& layout = made.layouts[i];
        KVRT_TRY(check(*library_,
                       library_->layout_create(&layout, matrix_f32, sides[i][0], sides[i][1],
                                               static_cast<int64_t>(sides[i][0])),
                       "cublasLtMatrixLayoutCreate"));
        KVRT_TRY(check(*library_,
                       library_->layout_set(layout, layout_batch_count, &batch, sizeof batch),
                       "cublasLtMatrixLayoutSetAttribute (batch)"));
        KVRT_TRY(check(*library_,
                       library_->layout_set(layout, layout_batch_stride, &stride, sizeof stride),
                       "cublasLtMatrixLayoutSetAttribute (stride)"));
    }
    matrix_proposal proposal;
    int found = 0;
    matrix_result result =
        library_->propose(handle_, product_, made.layouts[0], made.layouts[1], made.layouts[2],
                          made.layouts[2], preference_, 1, &proposal, &found);
    if (result == matrix_success) result = found > 0 ? proposal.state : matrix_not_supported;
    KVRT_TRY(check(*library_, result, "cublasLtMatmulAlgoGetHeuristic"));
    if (proposal.workspace_bytes > workspace_bytes_) {
        return fail(KV_DEVICE,
                    "cublasLtMatmulAlgoGetHeuristic proposes {} bytes of workspace of {}",
                    proposal.workspace_bytes, workspace_bytes_);
    }
    made.algorithm = proposal.algorithm;
    made.workspace_bytes = proposal.workspace_bytes;
    return KV_OK;
}

status matrix_products::find(const product_shape& shape, entry*& out) {
    entry* oldest = &entries_[0];
    for (entry& each : entries_) {
        if (each.used != 0 && each.shape == shape) {
            ++counts_.hits;
            each.used = ++clock_;
            out = &each;
            return KV_OK;
        }
        if (each.used < oldest->used) oldest = &each;
    }
    ++counts_.misses;
    clear(*oldest);
    const status verdict = fill(shape, *oldest);
    if (verdict < 0) {
        if (verdict == KV_UNSUPPORTED) ++counts_.refused;
        clear(*oldest);
        return verdict;
    }
    oldest->shape = shape;
    oldest->used = ++clock_;
    out = oldest;
    return KV_OK;
}

status matrix_products::prepare(const product_shape& shape) {
    const current_context here(*device_);
    KVRT_TRY(here.state());
    entry* found = nullptr;
    return find(shape, found);
}

status matrix_products::multiply(stream_handle stream, const product_shape& shape, device_pointer a,
                                 device_pointer b, device_pointer d, device_pointer workspace) {
    const current_context here(*device_);
    KVRT_TRY(here.state());
    entry* found = nullptr;
    KVRT_TRY(find(shape, found));
    const float one = 1.0f, zero = 0.0f;
    const auto on_device = [](device_pointer address) { return reinterpret_cast<void*>(address); };
    const matrix_result result = library_->multiply(
        handle_, product_, &one, on_device(a), found->layouts[0], on_device(b), found->layouts[1],
        &zero, on_device(d), found->layouts[2], on_device(d), found->layouts[2], &found->algorithm,
        on_device(workspace), found->workspace_bytes, stream);
    KVRT_TRY(check(*library_, result, "cublasLtMatmul"));
    ++counts_.products;
    return KV_OK;
}

}  // namespace kvrt::cuda
