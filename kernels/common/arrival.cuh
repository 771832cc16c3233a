// arrival: a counter in global memory, by which blocks of a grid tell each other that they have written. Release and
// acquire at device scope: pair each call with a __syncthreads, which adds the writes and reads of the whole block. An
// arrival with __threadfence would need two of them, 0.3 us together. Source: PTX ISA, memory consistency model.
#pragma once

// One thread calls it, after its block's writes. Counts the arrival and returns how many came before; their writes are
// visible now. The arrival that returns `last` sets the counter to 0.
__device__ __forceinline__ unsigned arrive(unsigned* counter, unsigned last) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
    return before;
}

// The same of several arrivals at once; nothing sets the counter to 0.
__device__ __forceinline__ unsigned arrive_with(unsigned* counter, unsigned count) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(count) : "memory");
    return before;
}

// Counts the arrival at a counter that is never reset, and waits until it is at least `expected`. Faster than waiting
// after `arrive`, which first has to get a count back.
__device__ __forceinline__ void arrive_and_wait(unsigned* counter, unsigned expected) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
    unsigned found;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
    } while (found < expected);
}
