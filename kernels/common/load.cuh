// load: loads and addresses that stay where they are written. The compiler moves a plain load past branches, close to
// its use. Loads that could overlap then wait for each other, a round trip to L2 each.
#pragma once

#include "common/types.cuh"

// From L2: L1 may hold values from before the end of the previous kernel.
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

// Data that no kernel writes: words of weights, a scale, a zero point.
__device__ __forceinline__ void load_words_here(const void* address, unsigned (&words)[4]) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(address));
}
__device__ __forceinline__ void load_words_here(const void* address, unsigned (&words)[2]) {
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(address));
}
__device__ __forceinline__ float load_stored_here(const float* address) {
    float value;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(address));
    return value;
}
__device__ __forceinline__ __half load_stored_here(const __half* address) {
    unsigned short bits;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(bits) : "l"(address));
    return __ushort_as_half(bits);
}
__device__ __forceinline__ __nv_bfloat16 load_stored_here(const __nv_bfloat16* address) {
    unsigned short bits;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(bits) : "l"(address));
    return __ushort_as_bfloat16(bits);
}
// A pair of lifted scales.
__device__ __forceinline__ unsigned load_stored_here(const LiftedScale* address) {
    unsigned bits;
    asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(bits) : "l"(address));
    return bits;
}
__device__ __forceinline__ int load_stored_here(const unsigned char* address) {
    unsigned value;
    asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(value) : "l"(address));
    return static_cast<int>(value);
}

// Brings a whole line of 128 bytes into L2, without waiting.
__device__ __forceinline__ void prefetch_line(const void* place) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(place) : "memory");
}

// The same address, computed once and here: loads near it then differ by a constant only.
template <typename T>
__device__ __forceinline__ const T* address_here(const T* address) {
    asm volatile("" : "+l"(address));
    return address;
}

// The same number; values derived from it are computed after this place, not kept in registers from one turn of a loop
// to the next.
__device__ __forceinline__ int number_here(int number) {
    asm volatile("" : "+r"(number));
    return number;
}
