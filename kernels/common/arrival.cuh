// arrival: a counter in global memory, by which blocks of a grid signal to each other that they have written. Release
// and acquire at device scope: pair each call with a barrier, which adds the writes and reads of the other threads. An
// arrival with __threadfence would need two of them, 0.3 us together. Source: PTX ISA, memory consistency model.
#pragma once

// One thread calls it, after its block's writes. Counts the arrival and returns how many came before; their writes are
// visible now. The arrival that returns `last` sets the counter to 0.
__device__ __forceinline__ unsigned arrive(unsigned* counter, unsigned last) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
    return before;
}

// The same for several arrivals at once; the counter is not reset.
__device__ __forceinline__ unsigned arrive_with(unsigned* counter, unsigned count) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(count) : "memory");
    return before;
}

// Counts arrivals without waiting for the count, which would take a round trip. Makes no other block's writes visible.
__device__ __forceinline__ void announce(unsigned* counter, unsigned count) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(count) : "memory");
}

// Waits until at least `expected` arrivals have been counted; their writes are visible then. The blocks that arrive
// must all run at once: no other kernel on the card may wait in this way, in another stream or process.
__device__ __forceinline__ void wait_for_arrivals(unsigned* counter, unsigned expected) {
    unsigned found;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
    } while (found < expected);
}

// Counts a waiter that is done; the one that finds `last` sets the counter to 0. Releases nothing.
__device__ __forceinline__ void leave(unsigned* counter, unsigned last) {
    asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" ::"l"(counter), "r"(last) : "memory");
}
