// The verbs of plugin.h as launches: from the seam's C structs to what kernels take.
#pragma once

#include "device/plugin.h"
#include "driver/functions.hpp"
#include "kernels/attend.hpp"

namespace kvrt::cuda {

/// The lane as kernels see it; UNSUPPORTED, naming `verb` and format, where none does.
status describe_lane(const kvrt_lane& lane, const char* verb, kernels::block_place& place);

kernels::position_place positions_of(const kvrt_positions& positions);
/// Of slots in blocks that are sealed.
inline kernels::position_place sealed_positions_of(const kvrt_round_lane& lane) {
    return lane.sealed == nullptr ? kernels::position_place{}
                                  : positions_of(lane.sealed->positions);
}
/// `table`: the words that the call is about.
status launch_share(kernel_functions& functions, stream_handle stream, device_pointer table,
                    const kvrt_share_plans& plans);

status launch_write(kernel_functions& functions, stream_handle stream, const kvrt_write_rows& rows);

status launch_seal(kernel_functions& functions, stream_handle stream,
                   const kvrt_seal_blocks& blocks);

/// `captured`: the stream is being captured.
status launch_attend(kernel_functions& functions, stream_handle stream, bool captured,
                     const kvrt_attend_rows& rows);

}  // namespace kvrt::cuda
