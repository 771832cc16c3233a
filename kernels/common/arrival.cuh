// arrival: blocks of a grid tell each other, by a counter in global memory, that they have written something. Release
// and acquire at the card's scope, for all that a __syncthreads puts before or behind them. A __threadfence orders more
// than that, and an arrival would want two, together 0.3 us. Source: PTX ISA, memory consistency model.
#pragma once

// By one thread, after its block's writes: counts the arrival and returns how many came before, whose writes are seen
// now. The counter is 0 again after the one that finds `last`.
__device__ __forceinline__ unsigned arrive(unsigned* counter, unsigned last) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
    return before;
}

// The same on a counter that is never 0 again, then waits for that many. Faster than waiting after `arrive`: no count
// has to come back first.
__device__ __forceinline__ void arrive_and_wait(unsigned* counter, unsigned expected) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
    unsigned found;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
    } while (found < expected);
}
