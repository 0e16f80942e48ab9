// A plugin that is built without nvcc: its pools have memory, tables and fences, and no kernels.
#include "driver/images.hpp"

namespace kvrt::cuda {

const kernel_images built_images;

}  // namespace kvrt::cuda
