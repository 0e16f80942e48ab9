#pragma once

namespace kvrt {

/// Whether the processor has AMX with bytes and bf16, and VBMI beside it, and the system lets this
/// process use its tile registers: Linux wants to be asked, which the first call does.
bool amx_usable();

}  // namespace kvrt
