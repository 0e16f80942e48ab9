// Products of matrices by cuBLASLt, many of one shape at once: descriptors and the algorithm that
// the library proposes are kept by shape, so that a shape that was seen before costs a look.
//
//   d[i] = a[i] b[i]    i in [0, batch), f32, all by columns and one behind the other:
//                       a [inner][rows], b [columns][inner], d [columns][rows]
#pragma once

#include <array>

#include "driver/context.hpp"
#include "driver/matrix_library.hpp"

namespace kvrt::cuda {

/// Leading dimensions are the numbers of rows: rows, inner, rows.
struct product_shape {
    uint32_t rows = 0, columns = 0, inner = 0, batch = 0;
    bool operator==(const product_shape&) const = default;
};

class matrix_products {
  public:
    static constexpr uint32_t capacity = 32;  ///< shapes that are kept

    struct counts {
        uint64_t hits = 0, misses = 0;  ///< of shapes
        uint64_t products = 0;          ///< calls that were enqueued
        uint64_t refused = 0;           ///< shapes for which the library has no algorithm
    };

    matrix_products() = default;
    matrix_products(const matrix_products&) = delete;
    matrix_products& operator=(const matrix_products&) = delete;
    /// Nothing that it enqueued is in flight any more.
    ~matrix_products() { close(); }

    /// Loads the library. `compute`: compute_f32, or compute_tf32, whose factors are rounded to 11
    /// bits. Algorithms may use `workspace_bytes`. UNSUPPORTED: there is no library, or it does not
    /// work on this machine.
    status open(device_context& device, int compute, uint64_t workspace_bytes);
    void close();
    bool is_open() const { return handle_ != nullptr; }
    uint64_t version() const { return library_ != nullptr ? library_->version() : 0; }

    /// Makes sure that the shape is kept. UNSUPPORTED: the library has no algorithm for it.
    status prepare(const product_shape& shape);
    /// Enqueues a shape's products; `workspace` has the bytes that open was told of.
    status multiply(stream_handle stream, const product_shape& shape, device_pointer a,
                    device_pointer b, device_pointer d, device_pointer workspace);

    const counts& counted() const { return counts_; }

  private:
    struct entry {
        product_shape shape;
        layout_handle layouts[3] = {};  ///< of a, b and d
        matrix_algorithm algorithm;
        uint64_t workspace_bytes = 0;
        uint64_t used = 0;  ///< when, for the entry that gives way; 0: empty
    };

    status find(const product_shape& shape, entry*& out);
    status fill(const product_shape& shape, entry& made);
    void clear(entry& old);

    device_context* device_ = nullptr;
    const matrix_library* library_ = nullptr;
    matrix_handle handle_ = nullptr;
    product_handle product_ = nullptr;
    preference_handle preference_ = nullptr;
    uint64_t workspace_bytes_ = 0;
    uint64_t clock_ = 0;
    std::array<entry, capacity> entries_;
    counts counts_;
};

}  // namespace kvrt::cuda
