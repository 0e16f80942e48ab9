// The formats, one description each; find_format knows them by id.
#pragma once

#include "format/format.hpp"

namespace kvrt {

extern const format_description fp8_e4m3_format;
extern const format_description fp8_e5m2_format;
extern const format_description fp8_token_format;
extern const format_description int8_token_format;
extern const format_description int4_token_format;
extern const format_description q8_0_format;
extern const format_description q4_0_format;
extern const format_description q4_1_format;
extern const format_description nvfp4_format;
extern const format_description mxfp4_format;
extern const format_description affine4_format;

// By role.
extern const format_description kivi4_key_format, kivi4_value_format;
extern const format_description kivi2_key_format, kivi2_value_format;
extern const format_description kvarn4_key_format, kvarn4_value_format;
extern const format_description kvarn2_key_format, kvarn2_value_format;
extern const format_description turbo4_key_format, turbo4_value_format;
extern const format_description turbo3_key_format, turbo3_value_format;

}  // namespace kvrt
