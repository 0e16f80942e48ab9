// A plugin over the stand-in: something is in it, and the driver finds every kernel by its name.
#include "driver/images.hpp"

namespace kvrt::cuda {

static const kernel_image images[] = {{"stand_in", "an image"}};
const kernel_images built_images = {images, 1};

}  // namespace kvrt::cuda
