// cuBLASLt for tests, behind the table that the real one fills, beside a fake driver: products are
// computed in double when the stream comes to them. What the real library would refuse, or only
// misbehave with, is an error or a violation of the driver's: descriptors that are gone, shapes
// that do not fit each other, algorithms of another product, workspaces that are too small or not
// there.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "driver/matrix_library.hpp"
#include "fake_driver.hpp"

namespace kvrt::cuda {

struct matrix_object {
    bool destroyed = false;
};
struct layout_object {
    int type = 0;
    uint64_t rows = 0, columns = 0;
    int64_t leading = 0, batch_stride = 0;
    int32_t batch = 1;
    bool destroyed = false;
};
struct product_object {
    int compute = 0, scale_type = 0;
    bool destroyed = false;
};
struct preference_object {
    uint64_t workspace_bytes = 0;
    bool destroyed = false;
};

/// What load_matrix_library gives while it lives. One at a time.
class fake_matrix_library {
  public:
    /// Takes so much workspace, if it is allowed as much.
    static constexpr uint64_t wanted_workspace = 4096;

    explicit fake_matrix_library(fake_driver& driver);
    fake_matrix_library(const fake_matrix_library&) = delete;
    fake_matrix_library& operator=(const fake_matrix_library&) = delete;
    /// Whatever is left behind is a violation.
    ~fake_matrix_library();

    const matrix_library& table() const { return table_; }

    /// Calls of this symbol fail with `result` from now on.
    void inject(const char* symbol, matrix_result result) { injections_[symbol] = result; }
    uint64_t calls(const char* symbol) const;

    /// Products with more columns have no algorithm.
    uint64_t most_columns = ~uint64_t{0};
    /// What a test does to a product when it runs, to see that it would be noticed.
    std::function<void(layout_object& a, layout_object& b, layout_object& d)> change;

  private:
    matrix_result enter(const char* symbol);
    matrix_result violate(const std::string& text);
    void fill_descriptors();
    void fill_products();
    std::string fault_of(const product_object& product, const layout_object& a,
                         const layout_object& b, const layout_object& c,
                         const layout_object& d) const;
    void run(int compute, const float* a, layout_object a_layout, const float* b,
             layout_object b_layout, float* d, layout_object d_layout);

    static fake_matrix_library* active;  ///< a table has no place for an object

    fake_driver& driver_;
    matrix_library table_;
    std::map<std::string, matrix_result> injections_;
    std::map<std::string, uint64_t> counts_;
    // Never freed before the end, so that use after destruction is seen.
    std::deque<matrix_object> handles_;
    std::deque<layout_object> layouts_;
    std::deque<product_object> products_;
    std::deque<preference_object> preferences_;
};

}  // namespace kvrt::cuda
