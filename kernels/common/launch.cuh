// Programmatic dependent launch: a kernel starts while the one before it still runs. Nothing before sm_90.
#pragma once

// Waits until the kernels before this one have ended and their writes are visible. Every thread calls it before it
// reads what they wrote or writes what they read, and every kernel calls it: the one after relies on it for what lies
// further back. After a launch that does not overlap it costs nothing.
__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start once every block has called this or ended. Calling it early is always right, since that
// kernel's grid_dependency_wait still waits for the end of this one.
__device__ __forceinline__ void grid_dependency_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
