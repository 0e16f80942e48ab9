// The execution context of the GPU: intrinsics and inline PTX, for sm_80 and later. Included by .cu
// files only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/context.hpp"

namespace kvrt::kernels {

struct cuda_context {
    // ---- Places
    // ----------------------------------------------------------------------------------

    static KVRT_DEVICE uint32_t thread() { return threadIdx.x; }
    static KVRT_DEVICE uint32_t threads() { return blockDim.x; }
    static KVRT_DEVICE uint32_t block() { return blockIdx.x; }
    static KVRT_DEVICE uint32_t blocks() { return gridDim.x; }
    static KVRT_DEVICE uint32_t lane() { return threadIdx.x % warp_lanes; }
    static KVRT_DEVICE uint32_t warp() { return threadIdx.x / warp_lanes; }

    // ---- Order
    // -----------------------------------------------------------------------------------

    static KVRT_DEVICE void barrier() { __syncthreads(); }
    static KVRT_DEVICE void barrier(uint32_t id, uint32_t threads) {
        asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
    }
    static KVRT_DEVICE void warp_barrier(uint32_t mask = whole_warp) { __syncwarp(mask); }

    // ---- Warps
    // -----------------------------------------------------------------------------------

    template <class value>
    static KVRT_DEVICE value shuffle(value mine, uint32_t from_lane, uint32_t mask = whole_warp) {
        return __shfl_sync(mask, mine, static_cast<int>(from_lane));
    }
    template <class value>
    static KVRT_DEVICE value shuffle_xor(value mine, uint32_t bits, uint32_t mask = whole_warp) {
        return __shfl_xor_sync(mask, mine, static_cast<int>(bits));
    }
    template <class value>
    static KVRT_DEVICE value shuffle_down(value mine, uint32_t by, uint32_t mask = whole_warp) {
        return __shfl_down_sync(mask, mine, by);
    }
    static KVRT_DEVICE uint32_t ballot(bool predicate, uint32_t mask = whole_warp) {
        return __ballot_sync(mask, predicate);
    }
    static KVRT_DEVICE uint32_t match_any(uint32_t value, uint32_t mask = whole_warp) {
        return __match_any_sync(mask, value);
    }
    static KVRT_DEVICE uint32_t reduce_add(uint32_t value, uint32_t mask = whole_warp) {
        return __reduce_add_sync(mask, value);
    }
    static KVRT_DEVICE uint32_t reduce_max(uint32_t value, uint32_t mask = whole_warp) {
        return __reduce_max_sync(mask, value);
    }
    static KVRT_DEVICE uint32_t reduce_min(uint32_t value, uint32_t mask = whole_warp) {
        return __reduce_min_sync(mask, value);
    }

    // ---- Shared memory and what goes there
    // -------------------------------------------------------

    static KVRT_DEVICE std::byte* shared() {
        extern __shared__ __align__(128) unsigned char kvrt_shared[];
        return reinterpret_cast<std::byte*>(kvrt_shared);
    }
    static KVRT_DEVICE uint32_t shared_address(const void* address) {
        return static_cast<uint32_t>(__cvta_generic_to_shared(address));
    }
    static KVRT_DEVICE void copy_async(void* target, const void* source, uint32_t bytes = 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(target)),
                     "l"(source), "r"(bytes)
                     : "memory");
    }
    static KVRT_DEVICE void commit_async() { asm volatile("cp.async.commit_group;" ::: "memory"); }
    template <int newest>
    static KVRT_DEVICE void wait_async() {
        asm volatile("cp.async.wait_group %0;" ::"n"(newest) : "memory");
    }

    // ---- Matrices
    // --------------------------------------------------------------------------------

    static KVRT_DEVICE void load_matrices(uint32_t (&out)[4], const void* row) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                     : "r"(shared_address(row))
                     : "memory");
    }
    static KVRT_DEVICE void load_matrices_transposed(uint32_t (&out)[4], const void* row) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                     : "r"(shared_address(row))
                     : "memory");
    }
    template <number type>
    static KVRT_DEVICE void multiply(float (&d)[4], const uint32_t (&a)[4],
                                     const uint32_t (&b)[2]) {
        static_assert(type != number::f32);
        if constexpr (type == number::f16) {
            asm volatile(
                "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
                "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
        } else {
            asm volatile(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
        }
    }

    // ---- Memory
    // ----------------------------------------------------------------------------------

    template <class value>
    static KVRT_DEVICE value load(const void* address) {
        return *reinterpret_cast<const value*>(address);
    }
    template <class value>
    static KVRT_DEVICE value load_constant(const void* address) {
        return hinted<value, false>(address);
    }
    template <class value>
    static KVRT_DEVICE value load_once(const void* address) {
        return hinted<value, true>(address);
    }
    template <class value>
    static KVRT_DEVICE void store(void* address, value what) {
        *reinterpret_cast<value*>(address) = what;
    }
    template <class value>
    static KVRT_DEVICE void store_once(void* address, value what) {
        if constexpr (sizeof(value) == 16) {
            __stcs(reinterpret_cast<uint4*>(address), *reinterpret_cast<const uint4*>(&what));
        } else if constexpr (sizeof(value) == 4) {
            __stcs(reinterpret_cast<uint32_t*>(address), *reinterpret_cast<const uint32_t*>(&what));
        } else {
            store(address, what);
        }
    }
    static KVRT_DEVICE void atomic_add(uint32_t* address, uint32_t value) {
        atomicAdd(address, value);
    }
    static KVRT_DEVICE void atomic_add(uint64_t* address, uint64_t value) {
        atomicAdd(reinterpret_cast<unsigned long long*>(address),
                  static_cast<unsigned long long>(value));
    }

    // ---- Numbers
    // ---------------------------------------------------------------------------------

    static KVRT_DEVICE uint16_t f32_to_f16(float value) {
        return __half_as_ushort(__float2half_rn(value));
    }
    static KVRT_DEVICE float f16_to_f32(uint16_t bits) {
        return __half2float(__ushort_as_half(bits));
    }
    static KVRT_DEVICE uint16_t f32_to_bf16(float value) {
        return __bfloat16_as_ushort(__float2bfloat16_rn(value));
    }
    static KVRT_DEVICE float bf16_to_f32(uint16_t bits) {
        return __uint_as_float(static_cast<uint32_t>(bits) << 16);
    }
    static KVRT_DEVICE float bits_to_f32(uint32_t bits) { return __uint_as_float(bits); }
    static KVRT_DEVICE uint32_t f32_to_bits(float value) { return __float_as_uint(value); }
    /// Byte i of the result is the one that nibble i of `which` says: 0 to 3 of a, 4 to 7 of b.
    static KVRT_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t which) {
        return __byte_perm(a, b, which);
    }
    static KVRT_DEVICE uint32_t count_bits(uint32_t bits) {
        return static_cast<uint32_t>(__popc(bits));
    }
    static KVRT_DEVICE uint32_t add_f16x2(uint32_t a, uint32_t b) {
        uint32_t sum;
        asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
        return sum;
    }
    static KVRT_DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
    static KVRT_DEVICE float exp2(float value) {
        float result;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
        return result;
    }
    static KVRT_DEVICE float log2(float value) { return log2f(value); }
    static KVRT_DEVICE float tanh(float value) { return tanhf(value); }
    /// To the nearest whole number, halves away from 0.
    static KVRT_DEVICE float nearest_away(float value) { return roundf(value); }
    static KVRT_DEVICE double square_root(double value) { return __dsqrt_rn(value); }

  private:
    template <class value, bool once>
    static KVRT_DEVICE value hinted(const void* address) {
        if constexpr (sizeof(value) == 16) {
            const uint4 bits = once ? __ldcs(reinterpret_cast<const uint4*>(address))
                                    : __ldg(reinterpret_cast<const uint4*>(address));
            return *reinterpret_cast<const value*>(&bits);
        } else if constexpr (sizeof(value) == 4) {
            const uint32_t bits = once ? __ldcs(reinterpret_cast<const uint32_t*>(address))
                                       : __ldg(reinterpret_cast<const uint32_t*>(address));
            return *reinterpret_cast<const value*>(&bits);
        } else {
            return *reinterpret_cast<const value*>(address);
        }
    }
};

static_assert(execution_context<cuda_context>);

}  // namespace kvrt::kernels
