#include "base/amx.hpp"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvrt {

bool declines_amx(const char* value) {
    return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

#if defined(__x86_64__) && defined(__linux__)

namespace {

bool ask() {
    if (declines_amx(std::getenv("KVRT_NO_AMX"))) return false;
    // CPUID leaf 7: VBMI is bit 1 of ecx, VNNI bit 11; edx has AMX's bf16, tiles and
    // bytes, and half-precision arithmetic.
    constexpr unsigned vbmi_vnni = 1u << 1 | 1u << 11;
    constexpr unsigned amx = 1u << 22 | 1u << 23 | 1u << 24 | 1u << 25;
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
    if ((ecx & vbmi_vnni) != vbmi_vnni || (edx & amx) != amx) return false;
    // Linux, Documentation/arch/x86/xstate.rst: permission for the process's tile data.
    constexpr long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

}  // namespace

bool amx_usable() {
    static const bool usable = ask();
    return usable;
}

#else

bool amx_usable() { return false; }

#endif

}  // namespace kvrt
