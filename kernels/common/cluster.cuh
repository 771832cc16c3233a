// cluster: blocks that run together and write into each other's shared memory. From sm_90 on; before it a cluster is
// one block, and these functions do nothing. Source: PTX ISA, barrier.cluster.
#pragma once

#if __CUDA_ARCH__ >= 900
constexpr bool CAN_CLUSTER = true;
#else
constexpr bool CAN_CLUSTER = false;
#endif

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

// Four floats at block `rank`'s copy of `place` in shared memory.
__device__ __forceinline__ float4 load_from(const float4* place, int rank) {
    float4 value = {0.0f, 0.0f, 0.0f, 0.0f};
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %4, %5;\n"
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
        : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
        : "r"(static_cast<unsigned>(__cvta_generic_to_shared(place))), "r"(rank)
        : "memory");
#endif
    return value;
}
