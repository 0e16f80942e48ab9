// How a step's rows over a lane are cut into what attention kernels take. Few query vectors of a KV
// head go to attend_decode.hpp, others to attend_rows.hpp; where older blocks are sealed, pieces of
// either kind are listed apart, and share the partial results.
#pragma once

#include "device/plugin.h"
#include "driver/table.hpp"

namespace kvrt::cuda {

void bound_attention(kvrt_attend_bounds& bounds);
void plan_attention(kvrt_attend_plan& plan);
/// A decode step's lists, mostly: from those of the step before, which lie in the table.
bool advance_attention(const kvrt_attend_plan& plan, device_table& table, uint64_t sequences);

}  // namespace kvrt::cuda
