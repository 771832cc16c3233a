// load: loads and addresses that stay where they are written. The compiler moves a plain load behind the branches in
// front of its use. Loads that could be under way together then wait for each other, a round trip to L2 each.
#pragma once

// From L2: L1 may hold what was there before the kernel in front ended.
__device__ __forceinline__ int load_here(const int* address) {
    int value;
    asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(value) : "l"(address));
    return value;
}

__device__ __forceinline__ float load_here(const float* address) {
    float value;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(address));
    return value;
}

// The same address, computed once and here: loads beside it then differ by a constant only.
template <typename T>
__device__ __forceinline__ const T* address_here(const T* address) {
    asm volatile("" : "+l"(address));
    return address;
}

// The same number; what follows from it is computed behind this place, not kept in registers from one turn of a loop to
// the next.
__device__ __forceinline__ int number_here(int number) {
    asm volatile("" : "+r"(number));
    return number;
}
