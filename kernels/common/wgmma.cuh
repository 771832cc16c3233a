// wgmma: the tensor-core product of four warps, 64 rows x 8 to 256 columns, for sm_90a; and bulk copies for it.
//
// The four warps hold a in registers, warp w its rows 16w .. 16w+15; b lies in shared memory. The product runs beside
// the warps: between wgmma_begin and wgmma_wait nobody may touch a, b or d. Source: PTX ISA, wgmma.mma_async.
#pragma once

#include "common/barrier.cuh"

// Where columns of 16-byte pieces lie: 8 columns of one piece side by side (128 bytes), `piece_bytes` from one piece of
// a column to its next one. No swizzle: the 128 bytes that are read together hit all banks once.
__device__ __forceinline__ unsigned long long columns_at(unsigned address, unsigned piece_bytes) {
    return static_cast<unsigned long long>((address & 0x3ffff) >> 4) |
           static_cast<unsigned long long>(piece_bytes >> 4) << 16 | static_cast<unsigned long long>(128 >> 4) << 32;
}

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#if __CUDA_ARCH_FEAT_SM90_ALL
#define LLMCLI_WGMMA(TYPE, COLUMNS, D, A, B, ADDS, ...)                                                         \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADDS ", 0;\n"                                              \
                 "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k32.s32." TYPE ".s8 {" D "}, {" A "}, " B ", p;\n}" \
                 : __VA_ARGS__                                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds)))
#else
#define LLMCLI_WGMMA(...) static_cast<void>(0)
#endif
// One width, with signed codes and with unsigned ones. D, A, B and ADDS are the names of the operands in the text.
#define LLMCLI_WGMMA_BYTES(COLUMNS, NUM_VALUES, D, A, B, ADDS, ...)                                             \
    template <bool IS_SIGNED>                                                                                   \
    __device__ __forceinline__ void wgmma_bytes(int (&d)[NUM_VALUES], const unsigned (&a)[4],                   \
                                                unsigned long long b, bool adds) {                              \
        if constexpr (IS_SIGNED) {                                                                              \
            LLMCLI_WGMMA("s8", COLUMNS, D, A, B, ADDS, __VA_ARGS__);                                            \
        } else {                                                                                                \
            LLMCLI_WGMMA("u8", COLUMNS, D, A, B, ADDS, __VA_ARGS__);                                            \
        }                                                                                                       \
    }
#define LLMCLI_D4(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define LLMCLI_D8(i) LLMCLI_D4(i), LLMCLI_D4(i + 4)

// d = a * b + (adds ? d : 0) in int32, over 32 inputs. Lane 4g + t of a warp holds of a the rows g (a[0], a[2]) and
// g + 8 (a[1], a[3]), inputs 4t .. 4t+3 (a[0], a[1]) and 4t+16 .. 4t+19 (a[2], a[3]); of d the columns 8i + 2t and
// 8i + 2t + 1 of row g (d[4i], d[4i+1]) and of row g + 8 (d[4i+2], d[4i+3]).
LLMCLI_WGMMA_BYTES("16", 8, "%0,%1,%2,%3,%4,%5,%6,%7", "%8,%9,%10,%11", "%12", "%13", LLMCLI_D8(0))
LLMCLI_WGMMA_BYTES("32", 16, "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15", "%16,%17,%18,%19", "%20", "%21",
                   LLMCLI_D8(0), LLMCLI_D8(8))
LLMCLI_WGMMA_BYTES("64", 32,
                   "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"
                   "%26,%27,%28,%29,%30,%31",
                   "%32,%33,%34,%35", "%36", "%37", LLMCLI_D8(0), LLMCLI_D8(8), LLMCLI_D8(16), LLMCLI_D8(24))
#undef LLMCLI_D8
#undef LLMCLI_D4
#undef LLMCLI_WGMMA_BYTES
#undef LLMCLI_WGMMA

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
