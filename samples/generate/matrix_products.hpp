// Matrix products, by OpenBLAS.
//
// It chooses its kernels while it is loaded, by a list of processors: on one that is newer than the
// list, such as Emerald Rapids for version 0.3.21, it takes those of 2004, and a prompt takes 2.5
// times as long. So it is loaded here, after it was told what the processor can do.
#pragma once

#include <cblas.h>

#include "outcome.hpp"

namespace generate {

struct matrix_products {
    decltype(&cblas_sgemm) with_matrix = nullptr;
    decltype(&cblas_sgemv) with_vector = nullptr;
    decltype(&openblas_set_num_threads) set_threads = nullptr;
};

// Loads OpenBLAS with the first call. OPENBLAS_CORETYPE, where it is set, chooses its kernels.
outcome<const matrix_products*> load_matrix_products();

}  // namespace generate
