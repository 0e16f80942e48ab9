// Which instruction sets the kernels are compiled for. Include it before anything of Highway.
//
// x86-64: AVX-512 (F, BW, DQ, VL), AVX2 with FMA and F16C, and plain C++ for older machines.
// Arm: NEON; vectors of unknown length are left out, since tiles are made for fixed ones.
#pragma once

#define HWY_DISABLED_TARGETS \
    (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
