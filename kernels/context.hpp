// What kernel bodies are written against: an execution context Cx, a class of static functions.
//
// A kernel body is a function template over Cx, in a header that includes no CUDA header, so the
// same text is compiled for the GPU (cuda_context.cuh) and, for tests, for the host, where a block
// is emulated thread by thread (tests/kernels/emulator/context.hpp). Whatever a body does to memory
// that other threads see, and whatever has an instruction of its own, goes through Cx:
//
//   places       thread, threads, block, blocks (one dimension each), lane, warp
//   order        barrier() of all threads; barrier(id, threads) of some, whole warps, id 1 to 15;
//                warp_barrier(mask). Shuffles, votes and products order no memory.
//   warp         shuffle, shuffle_xor, shuffle_down, ballot, match_any, reduce_*: of the lanes in
//                mask, all of which call with the same mask
//   shared()     the block's dynamic shared memory, on a multiple of 128 bytes, not initialised
//   copy_async   16 bytes from global to shared memory, of which the first `bytes` are read and the
//                rest becomes 0. commit_async closes a group; after wait_async<n> all groups of
//                this thread but its n newest have arrived, for this thread: others need a barrier.
//   matrices     load_matrices[_transposed]: ldmatrix.x4, lane l names row l % 8 of matrix l / 8;
//                multiply<type>: mma.m16n8k16, D += A B in f32, fragments as the PTX manual says
//   load, store  1, 2, 4, 8 or 16 bytes, aligned to their size. load_once and store_once are for
//                what is used once: they keep it out of the caches. load_constant: nobody writes it
//                while the kernel runs.
//   atomics      atomic_add, relaxed
//   numbers      conversions (to nearest even; f16 and bf16 as bits), fused multiply_add, exp2,
//                log2, tanh; of doubles the square root, rounded; permute_bytes picks bytes of two
//                words, add_f16x2 adds pairs, count_bits counts bits that are set. Nothing else is
//                fused: both compilers are told so, because bytes that kernels store are compared.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define KVRT_DEVICE __device__ __forceinline__
#define KVRT_BOTH __host__ __device__ __forceinline__
#define KVRT_UNROLL _Pragma("unroll")
#define KVRT_ROLLED _Pragma("unroll 1")
#else
#define KVRT_DEVICE inline
#define KVRT_BOTH inline
#define KVRT_UNROLL
#define KVRT_ROLLED
#endif

namespace kvrt::kernels {

inline constexpr uint32_t warp_lanes = 32;
inline constexpr uint32_t whole_warp = 0xffffffffu;

/// 16 bytes that are loaded and stored at once.
struct alignas(16) word4 {
    uint32_t x, y, z, w;
};
struct alignas(8) word2 {
    uint32_t x, y;
};

/// Types of elements in memory; the first three as kv_dtype numbers them.
enum class number : uint32_t { f32 = 1, f16 = 2, bf16 = 3 };

KVRT_BOTH constexpr uint32_t number_bytes(number type) { return type == number::f32 ? 4 : 2; }

/// What both contexts are checked against.
template <class Cx>
concept execution_context = requires(uint32_t u, uint32_t* pu, const uint32_t* pcu, uint64_t* pul,
                                     float f, float (&d)[4], uint32_t (&a)[4],
                                     const uint32_t (&ca)[4], const uint32_t (&cb)[2],
                                     std::byte* shared, const std::byte* global, double precise) {
    u = Cx::thread() + Cx::threads() + Cx::block() + Cx::blocks() + Cx::lane() + Cx::warp();
    Cx::barrier();
    Cx::barrier(u, u);
    Cx::warp_barrier(u);
    u = Cx::shuffle(u, u, u);
    f = Cx::shuffle_xor(f, u, u);
    f = Cx::shuffle_down(f, u, u);
    u = Cx::ballot(true, u);
    u = Cx::match_any(u, u);
    u = Cx::reduce_add(u, u);
    u = Cx::reduce_max(u, u);
    u = Cx::reduce_min(u, u);
    shared = Cx::shared();
    Cx::copy_async(shared, global, u);
    Cx::commit_async();
    Cx::template wait_async<1>();
    Cx::load_matrices(a, global);
    Cx::load_matrices_transposed(a, global);
    Cx::template multiply<number::f16>(d, ca, cb);
    Cx::template multiply<number::bf16>(d, ca, cb);
    u = Cx::template load<uint32_t>(global);
    u = Cx::template load_once<uint32_t>(global);
    u = Cx::template load_constant<uint32_t>(global);
    Cx::store(shared, u);
    Cx::store_once(shared, u);
    Cx::atomic_add(pu, u);
    Cx::atomic_add(pul, uint64_t{1});
    u = Cx::f32_to_f16(f);
    u = Cx::f32_to_bf16(f);
    f = Cx::f16_to_f32(uint16_t{0});
    f = Cx::bf16_to_f32(uint16_t{0});
    f = Cx::multiply_add(f, f, f);
    f = Cx::exp2(f);
    f = Cx::log2(f);
    f = Cx::tanh(f);
    f = Cx::nearest_away(f);
    precise = Cx::square_root(precise);
    f = Cx::bits_to_f32(u);
    u = Cx::f32_to_bits(f);
};

}  // namespace kvrt::kernels
