#include "fake_matrix_library.hpp"

#include <fmt/format.h>

#include <cstring>

namespace kvrt::cuda {

fake_matrix_library* fake_matrix_library::active = nullptr;

namespace {

constexpr uint64_t algorithm_mark = 0x6b767274;

/// As TF32 has it: 10 bits behind the point, to nearest even.
float rounded(float x) {
    uint32_t bits = 0;
    std::memcpy(&bits, &x, sizeof bits);
    bits += 0x0fffu + (bits >> 13 & 1u);
    bits &= ~0x1fffu;
    std::memcpy(&x, &bits, sizeof bits);
    return x;
}

template <class type>
matrix_result take(const void* value, size_t bytes, type& out) {
    if (value == nullptr || bytes != sizeof out) return matrix_invalid_value;
    std::memcpy(&out, value, sizeof out);
    return matrix_success;
}

}  // namespace

fake_matrix_library::fake_matrix_library(fake_driver& driver) : driver_(driver) {
    active = this;
    table_.version = []() -> size_t { return 130100; };
    table_.status_name = [](matrix_result status) {
        return status == matrix_not_supported       ? "CUBLAS_STATUS_NOT_SUPPORTED"
               : status == matrix_not_initialised   ? "CUBLAS_STATUS_NOT_INITIALIZED"
               : status == matrix_execution_failed  ? "CUBLAS_STATUS_EXECUTION_FAILED"
               : status == matrix_allocation_failed ? "CUBLAS_STATUS_ALLOC_FAILED"
                                                    : "CUBLAS_STATUS_INVALID_VALUE";
    };
    fill_descriptors();
    fill_products();
    replace_matrix_library(&table_);
}

fake_matrix_library::~fake_matrix_library() {
    replace_matrix_library(nullptr);
    active = nullptr;
    const auto look = [&](const auto& objects, const char* what) {
        for (const auto& each : objects) {
            if (!each.destroyed) (void)violate(fmt::format("{} is left behind", what));
        }
    };
    look(handles_, "a cuBLASLt handle");
    look(layouts_, "a layout");
    look(products_, "a product's descriptor");
    look(preferences_, "a preference");
}

uint64_t fake_matrix_library::calls(const char* symbol) const {
    const auto found = counts_.find(symbol);
    return found == counts_.end() ? 0 : found->second;
}

matrix_result fake_matrix_library::enter(const char* symbol) {
    ++counts_[symbol];
    const auto found = injections_.find(symbol);
    return found == injections_.end() ? matrix_success : found->second;
}

matrix_result fake_matrix_library::violate(const std::string& text) {
    driver_.violations.push_back("cuBLASLt: " + text);
    return matrix_invalid_value;
}

void fake_matrix_library::fill_descriptors() {
    table_.create = [](matrix_handle* handle) {
        const matrix_result entered = active->enter("cublasLtCreate");
        if (entered != matrix_success) return entered;
        if (active->driver_.current() != active->driver_.primary()) {
            return active->violate("a handle outside of the device's context");
        }
        *handle = &active->handles_.emplace_back();
        return matrix_success;
    };
    table_.destroy = [](matrix_handle handle) {
        if (handle->destroyed) return active->violate("a handle destroyed twice");
        handle->destroyed = true;
        return matrix_success;
    };
    table_.layout_create = [](layout_handle* layout, int type, uint64_t rows, uint64_t columns,
                              int64_t leading) {
        const matrix_result entered = active->enter("cublasLtMatrixLayoutCreate");
        if (entered != matrix_success) return entered;
        layout_object made;
        made.type = type;
        made.rows = rows;
        made.columns = columns;
        made.leading = leading;
        *layout = &active->layouts_.emplace_back(made);
        return matrix_success;
    };
    table_.layout_destroy = [](layout_handle layout) {
        if (layout->destroyed) return active->violate("a layout destroyed twice");
        layout->destroyed = true;
        return matrix_success;
    };
    table_.layout_set = [](layout_handle layout, int attribute, const void* value, size_t bytes) {
        const matrix_result entered = active->enter("cublasLtMatrixLayoutSetAttribute");
        if (entered != matrix_success) return entered;
        switch (attribute) {
            case layout_batch_count:
                return take(value, bytes, layout->batch);
            case layout_batch_stride:
                return take(value, bytes, layout->batch_stride);
            default:
                return active->violate("an attribute of layouts that is not in these tests");
        }
    };
    table_.product_create = [](product_handle* product, int compute, int scale_type) {
        const matrix_result entered = active->enter("cublasLtMatmulDescCreate");
        if (entered != matrix_success) return entered;
        *product = &active->products_.emplace_back(product_object{compute, scale_type, false});
        return matrix_success;
    };
    table_.product_destroy = [](product_handle product) {
        if (product->destroyed) return active->violate("a product destroyed twice");
        product->destroyed = true;
        return matrix_success;
    };
    table_.preference_create = [](preference_handle* preference) {
        const matrix_result entered = active->enter("cublasLtMatmulPreferenceCreate");
        if (entered != matrix_success) return entered;
        *preference = &active->preferences_.emplace_back();
        return matrix_success;
    };
    table_.preference_destroy = [](preference_handle preference) {
        if (preference->destroyed) return active->violate("a preference destroyed twice");
        preference->destroyed = true;
        return matrix_success;
    };
    table_.preference_set = [](preference_handle preference, int attribute, const void* value,
                               size_t bytes) {
        if (attribute != preference_workspace) return matrix_invalid_value;
        return take(value, bytes, preference->workspace_bytes);
    };
}

/// Why these do not make a product; "" where they do.
std::string fake_matrix_library::fault_of(const product_object& product, const layout_object& a,
                                          const layout_object& b, const layout_object& c,
                                          const layout_object& d) const {
    if (product.destroyed) return "a product that is gone";
    if (product.compute != compute_f32 && product.compute != compute_tf32) return "another compute";
    if (product.scale_type != matrix_f32) return "another type of alpha";
    if (&c != &d) return "c that is not d";
    for (const layout_object* each : {&a, &b, &d}) {
        if (each->destroyed) return "a layout that is gone";
        if (each->type != matrix_f32) return "another type";
        if (each->rows == 0 || each->columns == 0) return "nothing";
        if (each->leading < static_cast<int64_t>(each->rows)) return "columns over each other";
        if (each->batch != a.batch || each->batch < 1) return "other batches";
        if (each->batch > 1 &&
            each->batch_stride < each->leading * static_cast<int64_t>(each->columns)) {
            return "matrices over each other";
        }
    }
    if (a.rows != d.rows || a.columns != b.rows || b.columns != d.columns) return "other sides";
    return "";
}

void fake_matrix_library::run(int compute, const float* a, layout_object a_layout, const float* b,
                              layout_object b_layout, float* d, layout_object d_layout) {
    const bool rounds = compute == compute_tf32;
    std::vector<double> sums;
    for (int32_t i = 0; i < d_layout.batch; ++i) {
        for (uint64_t column = 0; column < d_layout.columns; ++column) {
            sums.assign(d_layout.rows, 0.0);
            for (uint64_t k = 0; k < a_layout.columns; ++k) {
                const float* const from =
                    a + i * a_layout.batch_stride + static_cast<int64_t>(k) * a_layout.leading;
                float factor =
                    b[i * b_layout.batch_stride + static_cast<int64_t>(column) * b_layout.leading +
                      static_cast<int64_t>(k)];
                if (rounds) factor = rounded(factor);
                for (uint64_t row = 0; row < d_layout.rows; ++row) {
                    const float x = rounds ? rounded(from[row]) : from[row];
                    sums[row] += double{x} * double{factor};
                }
            }
            float* const to =
                d + i * d_layout.batch_stride + static_cast<int64_t>(column) * d_layout.leading;
            for (uint64_t row = 0; row < d_layout.rows; ++row) {
                to[row] = static_cast<float>(sums[row]);
            }
        }
    }
}

void fake_matrix_library::fill_products() {
    table_.propose = [](matrix_handle handle, product_handle product, layout_handle a,
                        layout_handle b, layout_handle c, layout_handle d,
                        preference_handle preference, int wanted, matrix_proposal* proposals,
                        int* found) {
        const matrix_result entered = active->enter("cublasLtMatmulAlgoGetHeuristic");
        if (entered != matrix_success) return entered;
        if (handle->destroyed || preference->destroyed || wanted < 1) {
            return active->violate("a question to what is gone");
        }
        const std::string fault = active->fault_of(*product, *a, *b, *c, *d);
        if (!fault.empty()) return active->violate("an algorithm for " + fault);
        *found = d->columns <= active->most_columns ? 1 : 0;
        if (*found == 0) return matrix_not_supported;
        proposals[0] = matrix_proposal();
        proposals[0].state = matrix_success;
        proposals[0].workspace_bytes = std::min(preference->workspace_bytes, wanted_workspace);
        proposals[0].algorithm.data[0] = algorithm_mark;
        proposals[0].algorithm.data[1] = d->rows;
        proposals[0].algorithm.data[2] = d->columns;
        proposals[0].algorithm.data[3] = proposals[0].workspace_bytes;
        return matrix_success;
    };
    table_.multiply = [](matrix_handle handle, product_handle product, const void* alpha,
                         const void* a, layout_handle a_layout, const void* b,
                         layout_handle b_layout, const void* beta, const void* c,
                         layout_handle c_layout, void* d, layout_handle d_layout,
                         const matrix_algorithm* algorithm, void* workspace, size_t workspace_bytes,
                         stream_handle stream) {
        fake_matrix_library& self = *active;
        fake_driver& driver = self.driver_;
        const matrix_result entered = self.enter("cublasLtMatmul");
        if (entered != matrix_success) return entered;
        if (handle->destroyed) return self.violate("a product by a handle that is gone");
        const std::string fault =
            self.fault_of(*product, *a_layout, *b_layout, *c_layout, *d_layout);
        if (!fault.empty()) return self.violate("a product of " + fault);
        if (algorithm->data[0] != algorithm_mark || algorithm->data[1] != d_layout->rows ||
            algorithm->data[2] != d_layout->columns) {
            return self.violate("a product by another's algorithm");
        }
        if (workspace_bytes < algorithm->data[3]) return self.violate("too small a workspace");
        if (*static_cast<const float*>(alpha) != 1.0f || *static_cast<const float*>(beta) != 0.0f ||
            c != d) {
            return self.violate("a product that adds to something");
        }
        int capture = capture_none;
        if (driver.table().stream_is_capturing(stream, &capture) != success) {
            return matrix_execution_failed;
        }
        if (capture != capture_none) return self.violate("a product in a graph");
        const auto at = [](const void* memory) { return reinterpret_cast<device_pointer>(memory); };
        for (const void* each :
             {a, b, static_cast<const void*>(d), static_cast<const void*>(workspace)}) {
            if (at(each) % 256 != 0) return self.violate("a matrix that is not aligned");
        }
        const int compute = product->compute;
        const layout_object of_a = *a_layout, of_b = *b_layout, of_d = *d_layout;
        stream->queue.push_back(
            {"cublasLtMatmul", [=, &self, &driver] {
                 const auto bytes = [](const layout_object& of) {
                     return sizeof(float) * (static_cast<uint64_t>(of.batch - 1) *
                                                 static_cast<uint64_t>(of.batch_stride) +
                                             static_cast<uint64_t>(of.leading) * of.columns);
                 };
                 std::byte* const scratch = driver.memory(at(workspace), workspace_bytes);
                 std::byte* const from_a = driver.memory(at(a), bytes(of_a));
                 std::byte* const from_b = driver.memory(at(b), bytes(of_b));
                 std::byte* const to = driver.memory(at(d), bytes(of_d));
                 if (scratch == nullptr || from_a == nullptr || from_b == nullptr || to == nullptr)
                     return;
                 // Nobody else has anything there.
                 std::memset(scratch, 0xa5, workspace_bytes);
                 layout_object changed[3] = {of_a, of_b, of_d};
                 if (self.change) self.change(changed[0], changed[1], changed[2]);
                 self.run(compute, reinterpret_cast<const float*>(from_a), changed[0],
                          reinterpret_cast<const float*>(from_b), changed[1],
                          reinterpret_cast<float*>(to), changed[2]);
             }});
        return matrix_success;
    };
}

}  // namespace kvrt::cuda
