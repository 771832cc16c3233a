// cluster: blocks that run together and write into each other's shared memory. From sm_90 on; before it a cluster is
// one block, and these functions do nothing. Source: PTX ISA, barrier.cluster.
#pragma once

template <int BLOCKS>
__device__ __forceinline__ int cluster_rank() {
    unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
    if constexpr (BLOCKS > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}

// A barrier of all threads of the cluster, in two halves: every arrival needs its wait. After the wait all threads run,
// and the barriers that they initialised and fenced are visible. It orders no other writes.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Both halves at once, for ordinary writes too: after it all threads of the cluster see what was written before it.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}
