// Scores that hosts give, from whichever memory: kvrt.h and kv_cuda.h have a call each.
#pragma once

#include "api/handles.hpp"

namespace kvrt {

status set_scores(kv_pool& pool, const sequence& target, const given_scores& given);

}  // namespace kvrt
