// fmt::format, from fmt's headers alone: these files need none of its libraries.
#pragma once

#ifndef FMT_HEADER_ONLY
#define FMT_HEADER_ONLY 1
#endif
#include <fmt/format.h>
