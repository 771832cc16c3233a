// registers: how warps of a block hand registers to others. On other cards than Hopper nothing happens.
// Source: PTX ISA, setmaxnreg.
#pragma once

// Registers of this thread from here on: fewer, which others may take, or more, as soon as others have left them. Four
// warps, the first a multiple of four, call it together.
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
