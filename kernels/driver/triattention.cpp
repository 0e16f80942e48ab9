#include "driver/triattention.hpp"

#include <bit>
#include <cstdio>

namespace kvrt::cuda {

using namespace kernels;

namespace {

constexpr uint64_t default_workspace = uint64_t{32} << 20;
constexpr uint64_t least_workspace = uint64_t{1} << 20;
constexpr uint32_t by_kernel = 0, by_products = 1;  // ways of measured_choice

}  // namespace

status triattention_scorer::set(device_context& device, kernel_functions& functions,
                                const kvrt_scoring& wanted) {
    if (wanted.method == KV_CUDA_SCORE_KERNEL) {
        method_ = wanted.method;
        return KV_OK;
    }
    const uint64_t bytes = wanted.workspace_bytes != 0 ? wanted.workspace_bytes : default_workspace;
    if (bytes < least_workspace) {
        return fail(KV_INVALID, "workspace_bytes is {}: matrix products take {} at least", bytes,
                    least_workspace);
    }
    if (products_.is_open()) {
        const bool as_before = wanted.flags == flags_ && (wanted.workspace_bytes == 0 ||
                                                          bytes == products_.workspace_bytes());
        if (!as_before) {
            return fail(KV_INVALID,
                        "matrix products have a workspace of {} bytes and flags {}, which stay",
                        products_.workspace_bytes(), flags_);
        }
        method_ = wanted.method;
        return KV_OK;
    }
    const bool rounds_more = (wanted.flags & KV_CUDA_SCORING_TF32) != 0;
    KVRT_TRY(products_.open(device, functions, rounds_more ? compute_tf32 : compute_f32, bytes));
    choice_.use(device);
    flags_ = wanted.flags;
    method_ = wanted.method;
    return KV_OK;
}

status triattention_scorer::sum(kernel_functions& functions, stream_handle stream,
                                triattention_parameters& call, kernel_function& sums) {
    const uint32_t blocks = score_blocks(call.count, call.place.kv_heads, call.most_slots);
    const uint32_t shared = score_shared_bytes(call.bands(), heads_at_once(call.group));
    KVRT_TRY(functions.launch(sums, blocks, score_threads, shared, stream, &call));
    ++summed_;
    return KV_OK;
}

status triattention_scorer::multiply(stream_handle stream, triattention_parameters& call,
                                     kernel_function& gather) {
    KVRT_TRY(products_.launch(stream, call, gather));
    ++multiplied_;
    return KV_OK;
}

status triattention_scorer::measure(kernel_functions& functions, stream_handle stream,
                                    triattention_parameters& call, kernel_function& sums,
                                    kernel_function& gather) {
    const uint64_t slots = uint64_t{call.count} * call.place.kv_heads * call.most_slots;
    const measured_choice::kind of = {
        static_cast<uint32_t>(call.place.keys.codes), static_cast<uint32_t>(call.place.keys.type),
        call.place.keys.dim + call.bands(), call.variants * call.group,
        static_cast<uint32_t>(std::bit_width(slots))};
    measured_choice::trial work;
    KVRT_TRY(choice_.begin(of, stream, work));
    if (work.way == by_products) {
        const status verdict = products_.prepare(call);
        if (verdict == KV_OK) {
            KVRT_TRY(multiply(stream, call, gather));
            return choice_.end(work, stream);
        }
        if (verdict != KV_UNSUPPORTED && verdict != KV_LIMIT) return verdict;
        std::snprintf(reason_, sizeof reason_, "%s", message_buffer());
        choice_.rule_out(work);
        work.timed = false;
    }
    KVRT_TRY(sum(functions, stream, call, sums));
    return choice_.end(work, stream);
}

status triattention_scorer::launch(kernel_functions& functions, stream_handle stream,
                                   triattention_parameters& call, kernel_function& sums,
                                   kernel_function& gather) {
    switch (method_) {
        case KV_CUDA_SCORE_PRODUCTS:
            return multiply(stream, call, gather);
        case KV_CUDA_SCORE_MEASURED:
            return measure(functions, stream, call, sums, gather);
        default:
            return sum(functions, stream, call, sums);
    }
}

void triattention_scorer::report(kvrt_scoring_report& out) const {
    const matrix_products::counts& counted = products_.products().counted();
    const measured_choice::verdicts verdicts = choice_.count();
    out.method = method_;
    out.flags = flags_;
    out.library_version = static_cast<uint32_t>(products_.products().version());
    out.workspace_bytes = products_.workspace_bytes();
    out.kernel_cohorts = summed_;
    out.product_cohorts = multiplied_;
    out.shape_hits = counted.hits;
    out.shape_misses = counted.misses;
    out.kernel_kinds = verdicts.chosen[by_kernel];
    out.product_kinds = verdicts.chosen[by_products];
    out.open_kinds = verdicts.open;
    static_assert(sizeof out.reason == sizeof reason_);
    std::snprintf(out.reason, sizeof out.reason, "%s", reason_);
}

}  // namespace kvrt::cuda
