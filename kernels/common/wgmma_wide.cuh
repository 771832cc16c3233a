// wgmma_wide: the tensor-core product of four warps for fp16 and bf16, 64 rows x 128 columns, for sm_90a; and what
// else warps of two kinds need, one of which copies while the other multiplies.
//
// The four warps hold a in registers, b lies in shared memory in rows of 128 bytes. Source: PTX ISA, wgmma.mma_async.
#pragma once

#include "common/wgmma.cuh"

// Rows of 128 bytes with the swizzle of 128 bytes: row r has its 16 bytes number i at i ^ r % 8. The rows begin at a
// multiple of 1024 bytes. Where a row has more than 128 bytes, the next ones lie `next_bytes` further on.
__device__ __forceinline__ unsigned long long swizzled_at(unsigned address, unsigned next_bytes) {
    return static_cast<unsigned long long>((address & 0x3ffff) >> 4) |
           static_cast<unsigned long long>(next_bytes >> 4) << 16 | static_cast<unsigned long long>(1024 >> 4) << 32 |
           1ull << 62;
}

#if __CUDA_ARCH_FEAT_SM90_ALL
#define LLMCLI_WIDE4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define LLMCLI_WIDE16(i) LLMCLI_WIDE4(i), LLMCLI_WIDE4(i + 4), LLMCLI_WIDE4(i + 8), LLMCLI_WIDE4(i + 12)
#define LLMCLI_WGMMA_WIDE(TYPE, TRANSPOSED)                                                                   \
    asm volatile(                                                                                             \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"                                                          \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE                                          \
        " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"                    \
        "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,"                \
        "%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "              \
        "{%64,%65,%66,%67}, %68, p, 1, 1, " TRANSPOSED ";\n}"                                                 \
        : LLMCLI_WIDE16(0), LLMCLI_WIDE16(16), LLMCLI_WIDE16(32), LLMCLI_WIDE16(48)                           \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds)))
#else
#define LLMCLI_WGMMA_WIDE(...) static_cast<void>(0)
#endif

// d = a * b + (adds ? d : 0) in fp32, over 16 inputs. Lane 4g + t of warp w holds of a the rows 16w + g (a[0], a[2])
// and 16w + g + 8 (a[1], a[3]), inputs 2t, 2t + 1 (a[0], a[1]) and 2t + 8, 2t + 9 (a[2], a[3]); of d the columns
// 8i + 2t and 8i + 2t + 1 of row g (d[4i], d[4i+1]) and of row g + 8 (d[4i+2], d[4i+3]). A row of shared memory is a
// column of b, or, with ROWS_ARE_INPUTS, an input of all columns.
template <typename T, bool ROWS_ARE_INPUTS>
__device__ __forceinline__ void wgmma_wide(float (&d)[64], const unsigned (&a)[4], unsigned long long b, bool adds);
template <>
__device__ __forceinline__ void wgmma_wide<__half, false>(float (&d)[64], const unsigned (&a)[4],
                                                            unsigned long long b, bool adds) {
    LLMCLI_WGMMA_WIDE("f16", "0");
}
template <>
__device__ __forceinline__ void wgmma_wide<__half, true>(float (&d)[64], const unsigned (&a)[4],
                                                           unsigned long long b, bool adds) {
    LLMCLI_WGMMA_WIDE("f16", "1");
}
template <>
__device__ __forceinline__ void wgmma_wide<__nv_bfloat16, false>(float (&d)[64], const unsigned (&a)[4],
                                                                   unsigned long long b, bool adds) {
    LLMCLI_WGMMA_WIDE("bf16", "0");
}
template <>
__device__ __forceinline__ void wgmma_wide<__nv_bfloat16, true>(float (&d)[64], const unsigned (&a)[4],
                                                                  unsigned long long b, bool adds) {
    LLMCLI_WGMMA_WIDE("bf16", "1");
}
#undef LLMCLI_WGMMA_WIDE
#if __CUDA_ARCH_FEAT_SM90_ALL
#undef LLMCLI_WIDE16
#undef LLMCLI_WIDE4
#endif

// Keeps the compiler from moving anything that uses these sums to before this place, such as a wgmma_wait.
__device__ __forceinline__ void hold(float (&sums)[64]) {
#pragma unroll
    for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// What copy_async has written becomes visible to wgmma. Call it behind the barrier that says that it has arrived.
__device__ __forceinline__ void fence_for_wgmma() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// This thread arrives at the barrier when all that it has asked for by copy_async is there.
__device__ __forceinline__ void barrier_arrive_with_copies(unsigned long long* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Registers a thread of these four warps may use from here on; all four must call it.
template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
#if __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
}
template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
#if __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
}

// Counts these warps among the NUM_THREADS threads that sync_threads_of waits for, without waiting.
template <int NUM_THREADS>
__device__ __forceinline__ void arrive_threads_of(int id) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(id), "n"(NUM_THREADS) : "memory");
}
