// barrier: mbarriers in shared memory, __syncthreads for some warps, and registers that warps hand to others.
// Some threads arrive at an mbarrier, others wait there. Arriving releases the thread's writes to its own block, and
// waiting acquires them. Nothing here releases to the whole cluster: that takes a fence, which waits for all running
// copies of a warp. Writes to the other block are asynchronous stores instead, which count themselves at a barrier
// there. Source: PTX ISA, mbarrier, st.async, barrier and setmaxnreg.
#pragma once

#include "common/mma.cuh"

// One thread calls it, before a __syncthreads. If other blocks use the barrier, barrier_init_fence must follow.
__device__ __forceinline__ void barrier_init(unsigned long long* barrier, int num_arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_arrivals) : "memory");
}

// Shows this thread's initialised barriers to the cluster's threads that wait for its next cluster_arrive.
__device__ __forceinline__ void barrier_init_fence() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(unsigned long long* barrier) {
    unsigned long long state;
    asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(state) : "r"(shared_address(barrier)) : "memory");
}

// Arrives when all copies that this thread has started by copy_async are done; the thread continues at once.
__device__ __forceinline__ void barrier_arrive_behind_copies(unsigned long long* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Waits until the phase with this parity is over. The first, third, ... phases have parity 0, the others 1.
__device__ __forceinline__ void barrier_wait(unsigned address, unsigned parity) {
    unsigned is_over = 0;
    while (!is_over) {
        asm volatile(
            "{\n.reg .pred p;\n"
#if __CUDA_ARCH__ >= 900
            "mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
#else
            "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
#endif
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(is_over)
            : "r"(address), "r"(parity)
            : "memory");
    }
}
__device__ __forceinline__ void barrier_wait(unsigned long long* barrier, unsigned parity) {
    barrier_wait(shared_address(barrier), parity);
}

// The address, for barrier_arrive_there, in block `rank` of the counterpart of a place in this block. The same offset
// may be added to both.
__device__ __forceinline__ unsigned address_in_block(unsigned address, int rank) {
    unsigned there = address;
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
#endif
    return there;
}

// Arrives, relaxed, at a barrier of any block. Call it after the values read there have been used.
__device__ __forceinline__ void barrier_arrive_there(unsigned there) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
#endif
}

// The current phase also waits until this many bytes have been stored by store_async, or copied by copy_bulk.
__device__ __forceinline__ void barrier_expect(unsigned long long* barrier, int num_bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(num_bytes)
                 : "memory");
#endif
}

// Stores `value` in block `rank`'s copy of `place`. That block's copy of `barrier` counts the bytes when they arrive.
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

// Waits until NUM_THREADS threads, in whole warps, have called this with the same `id`, 1 to 15; 0 is __syncthreads.
template <int NUM_THREADS>
__device__ __forceinline__ void sync_threads_of(int id) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "n"(NUM_THREADS) : "memory");
}

__device__ __forceinline__ void sync_threads_of(int id, int num_threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// Counts these warps among the NUM_THREADS threads that sync_threads_of waits for, without waiting.
template <int NUM_THREADS>
__device__ __forceinline__ void arrive_threads_of(int id) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(id), "n"(NUM_THREADS) : "memory");
}

// Sets this thread's registers: fewer, so that others may take some, or more, once others have freed them. Four warps,
// the first a multiple of four, call it together. On cards other than Hopper nothing happens.
template <int COUNT>
__device__ __forceinline__ void registers_down_to() {
#if __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
template <int COUNT>
__device__ __forceinline__ void registers_up_to() {
#if __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
