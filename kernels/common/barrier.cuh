// barrier: mbarriers in shared memory, on which some threads arrive and others wait, without waiting for each other.
// Arriving releases to the own block what the thread wrote, waiting acquires it. Nothing releases to a whole cluster:
// that is a fence, which waits for all that a warp has under way. Instead there are stores that count themselves when
// they are there. And __syncthreads for some warps. Source: PTX ISA, mbarrier, st.async and barrier.
#pragma once

#include "common/mma.cuh"

// By one thread, before a __syncthreads; for other blocks followed by barrier_init_fence.
__device__ __forceinline__ void barrier_init(unsigned long long* barrier, int num_arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_arrivals) : "memory");
}

// What this thread has initialised is seen by the cluster's threads that wait for its next cluster_arrive.
__device__ __forceinline__ void barrier_init_fence() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(unsigned long long* barrier) {
    unsigned long long state;
    asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(state) : "r"(shared_address(barrier)) : "memory");
}

// Until the phase with this parity is over: 0 for the first, third, ... time that all have arrived, 1 for the others.
__device__ __forceinline__ void barrier_wait(unsigned long long* barrier, unsigned parity) {
    unsigned is_over = 0;
    while (!is_over) {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(is_over)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    }
}

// At the barrier in this place of the cluster's block `rank`, once what this thread has read there has been used.
__device__ __forceinline__ void barrier_arrive_at(unsigned long long* barrier, int rank) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(barrier)),
        "r"(rank)
        : "memory");
#endif
}

// The phase under way lasts until these bytes too have been stored by store_async.
__device__ __forceinline__ void barrier_expect(unsigned long long* barrier, int num_bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(num_bytes)
                 : "memory");
#endif
}

// To this place, aligned to its size, in the cluster's block `rank`, where the barrier counts the bytes as they arrive.
__device__ __forceinline__ void store_async(float* place, float value, unsigned long long* barrier, int rank) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .b32 there, counter;\n"
        "mapa.shared::cluster.u32 there, %0, %3;\n"
        "mapa.shared::cluster.u32 counter, %1, %3;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %2, [counter];\n}" ::"r"(
            shared_address(place)),
        "r"(shared_address(barrier)), "f"(value), "r"(rank)
        : "memory");
#endif
}
__device__ __forceinline__ void store_async(float* place, float4 value, unsigned long long* barrier, int rank) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .b32 there, counter;\n"
        "mapa.shared::cluster.u32 there, %0, %6;\n"
        "mapa.shared::cluster.u32 counter, %1, %6;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%2, %3, %4, %5}, "
        "[counter];\n}" ::"r"(shared_address(place)),
        "r"(shared_address(barrier)), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(rank)
        : "memory");
#endif
}

// Until NUM_THREADS threads, of whole warps, are here. `id` 1 to 15: 0 is __syncthreads.
template <int NUM_THREADS>
__device__ __forceinline__ void sync_threads_of(int id) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "n"(NUM_THREADS) : "memory");
}
