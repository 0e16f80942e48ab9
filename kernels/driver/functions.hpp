// The kernels on a device: the images' modules, and their functions by name. What reads the words
// of a lane is chosen among them here.
#pragma once

#include <array>

#include "driver/context.hpp"
#include "driver/images.hpp"
#include "kernels/layout.hpp"

namespace kvrt::cuda {

/// A kernel, and how much dynamic shared memory it may take as of now.
struct kernel_function {
    const char* name = nullptr;
    function_handle handle = nullptr;
    uint32_t shared_bytes = 48u << 10;
};

/// Those of attend_decode.hpp and attend_rows.hpp for rows stored so, with up to so many channels.
struct attend_functions {
    kernel_function few, many;
    uint32_t channels = 0;
    bool turns = false;
    bool (*reads)(const kernels::block_place& place) = nullptr;
    uint32_t (*few_bytes)(const kernels::block_place& place) = nullptr;  ///< of shared memory
    uint32_t (*many_bytes)(const kernels::block_place& place) = nullptr;
};

class kernel_functions {
  public:
    static constexpr uint32_t most_images = 16;

    kernel_functions();
    kernel_functions(const kernel_functions&) = delete;
    kernel_functions& operator=(const kernel_functions&) = delete;
    ~kernel_functions();

    /// Loads the images. Without any, or on a device that none is for, there are no kernels, and
    /// `state` says why. DEVICE, and others, when the device itself fails, or a kernel is missing.
    status load(device_context& device);
    /// UNSUPPORTED, with the reason.
    status state() const;

    kernel_function& spread() { return spread_; }
    kernel_function& share() { return share_; }
    kernel_function& write(kernels::number input, kernels::coding keys) {
        return write_[(kernels::is_elaborate(keys) ? 3 : 0) + static_cast<uint32_t>(input) - 1];
    }
    kernel_function& seal() { return seal_; }
    kernel_function& join() { return join_; }
    kernel_function& observe() { return observe_; }
    /// Null where no kernel reads such blocks. `turns`: it is to turn keys by their slots.
    attend_functions* attend(const kernels::block_place& place, bool turns);

    /// Parameters are one struct, by value. Blocks are of one dimension.
    status launch(kernel_function& function, uint32_t blocks, uint32_t threads,
                  uint32_t shared_bytes, stream_handle stream, void* parameters);

    /// By its name; INTERNAL where the images have none of it.
    status find(kernel_function& function);

  private:
    device_context* device_ = nullptr;
    std::array<module_handle, most_images> modules_ = {};
    uint32_t module_count_ = 0;
    char reason_[160] = "the device is not open";
    kernel_function spread_, seal_, share_, join_, observe_;
    std::array<kernel_function, 6> write_;
    std::array<attend_functions, 18> attend_;
};

}  // namespace kvrt::cuda
