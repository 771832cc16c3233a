// barrier: mbarriers in shared memory, on which some threads arrive and others wait, without waiting for each other.
// Arriving releases what the thread wrote, waiting acquires it. And __syncthreads for some warps of a block.
// Source: PTX ISA, mbarrier and barrier.
#pragma once

#include "common/mma.cuh"

// By one thread, before a __syncthreads.
__device__ __forceinline__ void barrier_init(unsigned long long* barrier, int num_arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_arrivals) : "memory");
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

// Until NUM_THREADS threads, of whole warps, are here. `id` 1 to 15: 0 is __syncthreads.
template <int NUM_THREADS>
__device__ __forceinline__ void sync_threads_of(int id) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "n"(NUM_THREADS) : "memory");
}
