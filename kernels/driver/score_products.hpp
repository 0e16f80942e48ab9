// TriAttention's scores as matrix products: the kernels around a product (score_products.hpp), and
// the products by cuBLASLt, some heads and some slots at a time, in a workspace of their own.
#pragma once

#include "driver/buffer.hpp"
#include "driver/functions.hpp"
#include "driver/matrix_products.hpp"
#include "kernels/score_products.hpp"

namespace kvrt::cuda {

class product_scorer {
  public:
    /// What the library may use of the workspace, at most.
    static constexpr uint64_t most_library_bytes = uint64_t{4} << 20;

    product_scorer();

    /// Once: loads the library, finds the kernels, and takes the workspace. UNSUPPORTED: there is
    /// no library, or no kernels.
    status open(device_context& device, kernel_functions& functions, int compute,
                uint64_t workspace_bytes);
    bool is_open() const { return workspace_bytes_ != 0; }

    /// That a cohort can be scored so. LIMIT: the workspace is too small for one head of it.
    /// UNSUPPORTED: the library has no algorithm for a product of this shape.
    status prepare(const kernels::triattention_parameters& call);
    /// As score_keys. `gather`: of the keys' format. Errors: as prepare, and those of launches.
    status launch(stream_handle stream, const kernels::triattention_parameters& call,
                  kernel_function& gather);

    uint64_t workspace_bytes() const { return workspace_bytes_; }
    const matrix_products& products() const { return products_; }

  private:
    /// How a cohort is cut.
    struct cut {
        uint32_t all = 0;    ///< heads
        uint32_t heads = 0;  ///< at once
        uint32_t tile = 0;
        kernels::product_parameters call;
        product_shape shape_of(uint32_t first_head) const;
    };
    status plan(const kernels::triattention_parameters& call, cut& made) const;

    kernel_functions* functions_ = nullptr;
    matrix_products products_;
    device_buffer workspace_;
    uint64_t workspace_bytes_ = 0, library_bytes_ = 0;
    kernel_function weigh_, take_;
};

}  // namespace kvrt::cuda
