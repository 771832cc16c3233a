// wgmma: the tensor-core product of four warps, 64 rows x 8 to 256 columns, for sm_90a; and bulk copies for it.
//
// The four warps hold a in registers, warp w its rows 16w .. 16w+15; b lies in shared memory. The product runs while
// the warps continue: between wgmma_begin and wgmma_wait do not use a, b or d. Source: PTX ISA, wgmma.mma_async.
#pragma once

#include "common/barrier.cuh"

// Rows of 128 bytes with the swizzle of 128 bytes: row r has its 16 bytes number i at i ^ r % 8. The rows begin at a
// multiple of 1024 bytes. Where a row has more than 128 bytes, the next ones lie `next_bytes` further on.
__device__ __forceinline__ unsigned long long swizzled_at(unsigned address, unsigned next_bytes) {
    return static_cast<unsigned long long>((address & 0x3ffff) >> 4) |
           static_cast<unsigned long long>(next_bytes >> 4) << 16 | static_cast<unsigned long long>(1024 >> 4) << 32 |
           1ull << 62;
}

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// d = a * b + (adds ? d : 0) in fp32, over 16 inputs of T. Lane 4g + t of a warp holds of a the rows g (a[0], a[2]) and
// g + 8 (a[1], a[3]), inputs 2t, 2t + 1 (a[0], a[1]) and 2t + 8, 2t + 9 (a[2], a[3]), as for mma; of d the
// columns 8i + 2t and 8i + 2t + 1 of row g (d[4i], d[4i+1]) and of row g + 8 (d[4i+2], d[4i+3]). Sums round as those of
// mma do: bits are equal, step by step (measured; no document says so).
// With ROWS_ARE_INPUTS a row of b in shared memory is an input of all columns, not a column.
template <typename T, bool ROWS_ARE_INPUTS = false, int NUM_VALUES>
__device__ __forceinline__ void wgmma_halves(float (&d)[NUM_VALUES], const unsigned (&a)[4], unsigned long long b,
                                             bool adds);
#if __CUDA_ARCH_FEAT_SM90_ALL
#define LLMCLI_WGMMA(TYPE, TRANSPOSED, COLUMNS, D, A, B, ADDS, ...)                                         \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADDS ", 0;\n"                                         \
                 "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE "." TYPE " {" D "}, {" A "}, " \
                 B ", p, 1, 1, " TRANSPOSED ";\n}"                                                           \
                 : __VA_ARGS__                                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds)))
#else
#define LLMCLI_WGMMA(...) static_cast<void>(0)
#endif
#define LLMCLI_WGMMA_HALF(T, TYPE, ROWS_ARE_INPUTS, TRANSPOSED, NUM_VALUES, ...)                                   \
    template <>                                                                                                    \
    __device__ __forceinline__ void wgmma_halves<T, ROWS_ARE_INPUTS>(                                              \
        float (&d)[NUM_VALUES], const unsigned (&a)[4], unsigned long long b, bool adds) {                         \
        LLMCLI_WGMMA(TYPE, TRANSPOSED, __VA_ARGS__);                                                               \
    }
#define LLMCLI_WGMMA_HALVES(COLUMNS, NUM_VALUES, ...)                                       \
    LLMCLI_WGMMA_HALF(__half, "f16", false, "0", NUM_VALUES, COLUMNS, __VA_ARGS__)          \
    LLMCLI_WGMMA_HALF(__half, "f16", true, "1", NUM_VALUES, COLUMNS, __VA_ARGS__)           \
    LLMCLI_WGMMA_HALF(__nv_bfloat16, "bf16", false, "0", NUM_VALUES, COLUMNS, __VA_ARGS__)  \
    LLMCLI_WGMMA_HALF(__nv_bfloat16, "bf16", true, "1", NUM_VALUES, COLUMNS, __VA_ARGS__)
#define LLMCLI_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define LLMCLI_F16(i) LLMCLI_F4(i), LLMCLI_F4(i + 4), LLMCLI_F4(i + 8), LLMCLI_F4(i + 12)
#define LLMCLI_F64(i) LLMCLI_F16(i), LLMCLI_F16(i + 16), LLMCLI_F16(i + 32), LLMCLI_F16(i + 48)
// The operands tens * 10 to tens * 10 + 9.
#define LLMCLI_TEN(tens)                                                                                      \
    "%" tens "0,%" tens "1,%" tens "2,%" tens "3,%" tens "4,%" tens "5,%" tens "6,%" tens "7,%" tens "8,%" tens "9"
#define LLMCLI_SIXTY LLMCLI_TEN("") "," LLMCLI_TEN("1") "," LLMCLI_TEN("2") "," LLMCLI_TEN("3") "," \
    LLMCLI_TEN("4") "," LLMCLI_TEN("5")
LLMCLI_WGMMA_HALVES("16", 8, "%0,%1,%2,%3,%4,%5,%6,%7", "%8,%9,%10,%11", "%12", "%13", LLMCLI_F4(0), LLMCLI_F4(4))
LLMCLI_WGMMA_HALVES("32", 16, LLMCLI_TEN("") ",%10,%11,%12,%13,%14,%15", "%16,%17,%18,%19", "%20", "%21",
                    LLMCLI_F16(0))
LLMCLI_WGMMA_HALVES("64", 32, LLMCLI_TEN("") "," LLMCLI_TEN("1") "," LLMCLI_TEN("2") ",%30,%31", "%32,%33,%34,%35",
                    "%36", "%37", LLMCLI_F16(0), LLMCLI_F16(16))
LLMCLI_WGMMA_HALVES("128", 64, LLMCLI_SIXTY ",%60,%61,%62,%63", "%64,%65,%66,%67", "%68", "%69", LLMCLI_F64(0))
LLMCLI_WGMMA_HALVES("256", 128,
                    LLMCLI_SIXTY "," LLMCLI_TEN("6") "," LLMCLI_TEN("7") "," LLMCLI_TEN("8") "," LLMCLI_TEN(
                        "9") "," LLMCLI_TEN("10") "," LLMCLI_TEN("11") ",%120,%121,%122,%123,%124,%125,%126,%127",
                    "%128,%129,%130,%131", "%132", "%133", LLMCLI_F64(0), LLMCLI_F64(64))
#undef LLMCLI_SIXTY
#undef LLMCLI_TEN
#undef LLMCLI_F64
#undef LLMCLI_F16
#undef LLMCLI_F4
#undef LLMCLI_WGMMA_HALVES
#undef LLMCLI_WGMMA_HALF
#undef LLMCLI_WGMMA

// Keeps the compiler from moving any use of these sums to before this place, such as a wgmma_wait.
template <int NUM_VALUES>
__device__ __forceinline__ void hold(float (&sums)[NUM_VALUES]) {
#pragma unroll
    for (int i = 0; i < NUM_VALUES; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// Orders this thread's reads and writes in shared memory before those of asynchronous operations after the next
// barrier. Call it after the barrier that signals copy_async's data, before wgmma reads it; and before a place that
// ordinary loads have read is freed for copy_bulk. Without it a load that waits for the tensor cores' reads may come
// after the copy that it allowed: measured, in one of ten launches of a kernel of that kind.
__device__ __forceinline__ void fence_async_side() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#if __CUDA_ARCH__ >= 900
constexpr bool CAN_COPY_BULK = true;
#else
constexpr bool CAN_COPY_BULK = false;
#endif

// Copies a multiple of 16 bytes into shared memory; `barrier` counts them when they arrive. One thread calls it. Both
// addresses are multiples of 16.
__device__ __forceinline__ void copy_bulk(unsigned destination, const void* source, int num_bytes,
                                          unsigned long long* barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
        "l"(source), "r"(num_bytes), "r"(shared_address(barrier))
        : "memory");
#endif
}

// The same into each block of the cluster whose bit is set in `blocks`, at the same place there and with that block's
// own barrier.
template <int SHARERS>
__device__ __forceinline__ void copy_bulk_to_sharers(unsigned destination, const void* source, int num_bytes,
                                                     unsigned long long* barrier, int blocks) {
    if constexpr (SHARERS == 1) {
        copy_bulk(destination, source, num_bytes, barrier);
    } else {
#if __CUDA_ARCH__ >= 900
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, "
            "[%3], %4;" ::"r"(destination),
            "l"(source), "r"(num_bytes), "r"(shared_address(barrier)), "h"(static_cast<unsigned short>(blocks))
            : "memory");
#endif
    }
}

// Brings a multiple of 16 bytes into L2, without waiting.
__device__ __forceinline__ void prefetch_bulk(const void* source, int num_bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(num_bytes) : "memory");
#endif
}

// Copies from shared to global memory, a multiple of 16 bytes. What threads wrote there before needs fence_async_side
// and a barrier. One thread calls it, and later waits: until all of these have been read, or are in memory too.
__device__ __forceinline__ void store_bulk(void* destination, unsigned source, int num_bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source),
                 "r"(num_bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
__device__ __forceinline__ void store_bulk_wait_read() {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}
__device__ __forceinline__ void store_bulk_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}
