// mma: the tensor-core product of 16 x 16 and 16 x 8 values, and asynchronous copies into shared memory.
#pragma once

#include "common/types.cuh"

// d += a * b in fp32. Lane 4g + t holds of a the rows g (a0, a2) and g + 8 (a1, a3), inputs 2t, 2t+1 (a0, a1) and
// 2t+8, 2t+9 (a2, a3); of b the column g, the same inputs (b0, b1); of d the columns 2t, 2t+1 of row g (d[0], d[1])
// and of row g + 8 (d[2], d[3]). Source: PTX ISA, mma.m16n8k16.
template <typename T>
__device__ __forceinline__ void mma(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                    unsigned b1);
template <>
__device__ __forceinline__ void mma<__half>(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                            unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                                   unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The address that asynchronous copies take for a place in shared memory.
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory, past L1; both addresses aligned to 16. With `bytes` 0 zeros, nothing is read.
__device__ __forceinline__ void copy_async(unsigned destination, const void* source, int bytes = 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes)
                 : "memory");
}

// The same for 4 or 8 bytes, through L1; both addresses aligned to that. Zeros if the source does not exist.
template <int BYTES>
__device__ __forceinline__ void copy_async_small(unsigned destination, const void* source, bool exists) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(destination), "l"(source), "n"(BYTES),
                 "r"(exists ? BYTES : 0)
                 : "memory");
}

// A policy for bytes that are read once: L2 evicts them first, and keeps activations and norms.
__device__ __forceinline__ unsigned long long streaming_policy() {
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void copy_async_streaming(unsigned destination, const void* source,
                                                     unsigned long long policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
                 "l"(policy)
                 : "memory");
}

// Closes a group of this thread's copies; a group may be empty.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Returns when all but the newest PENDING groups of this thread have arrived. Other threads need a barrier to see them.
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
