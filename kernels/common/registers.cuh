// registers: how warps of a block hand registers to others. On cards other than Hopper nothing happens.
// Source: PTX ISA, setmaxnreg.
#pragma once

// Sets this thread's registers: fewer, so that others may take some, or more, once others have freed them. Four warps,
// the first a multiple of four, call it together.
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
