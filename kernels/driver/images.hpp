// The compiled kernels inside of the plugin: a fat binary for each .cu file, with code for each
// architecture that is delivered, made by scripts/compile_kernels.py. A plugin that was built
// without nvcc has none.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvrt::cuda {

struct kernel_image {
    const char* name;  ///< of the .cu file
    const void* data;
};
struct kernel_images {
    const kernel_image* images = nullptr;
    uint32_t count = 0;
};

/// Of this build; and, for tests, what find_images gives from now on instead.
extern const kernel_images built_images;
void replace_images(const kernel_images* images);
const kernel_images& find_images();

}  // namespace kvrt::cuda
