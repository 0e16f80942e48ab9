// The matrix unit of Intel processors: whether this process may use it.
#pragma once

namespace kvrt {

/// Whether the processor has AMX with bytes and bf16, VBMI and half-precision arithmetic beside it
/// (all that have AMX do), and the system lets this process use its tile registers: Linux wants to
/// be asked, which the first call does. A process that was permitted needs larger alternate signal
/// stacks; one that cannot have them says so by the environment variable KVRT_NO_AMX, and is not
/// asked for.
bool amx_usable();

/// Whether a value of KVRT_NO_AMX, NULL where there is none, leaves AMX alone: any but "" and "0".
bool declines_amx(const char* value);

}  // namespace kvrt
