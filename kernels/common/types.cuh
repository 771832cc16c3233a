// Storage types float, __half, __nv_bfloat16: exact widening, one rounding on store, and 16-byte vectors of them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

// A scale that all rows of a half tile share: that of a block of 8-bit floats.
struct BlockScale {
    float value;
};
__device__ __forceinline__ float to_float(BlockScale scale) { return scale.value; }

// A scale of codes that are lifted (wide_weights.cuh): in fp16, times 2^24 over the matrix's power of two.
struct LiftedScale {
    __half value;
};
__device__ __forceinline__ float to_float(LiftedScale scale) { return __half2float(scale.value); }

// Rounds to nearest even.
template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ BlockScale from_float<BlockScale>(float value) { return {value}; }
template <>
__device__ __forceinline__ float from_float<float>(float value) { return value; }
template <>
__device__ __forceinline__ __half from_float<__half>(float value) { return __float2half_rn(value); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) { return __float2bfloat16_rn(value); }

// Clamps a value to the range of T: an infinity times zero would be NaN later.
template <typename T>
__device__ __forceinline__ float within_range(float value) { return value; }
template <>
__device__ __forceinline__ float within_range<__half>(float value) {
    return value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value;  // NaN stays
}

// 16 bytes of T, moved by one vector load or store; the addresses must be multiples of 16.
template <typename T>
struct alignas(16) Pack {
    static constexpr int SIZE = 16 / sizeof(T);
    T values[SIZE];

    static __device__ __forceinline__ Pack load(const T* address) { return *reinterpret_cast<const Pack*>(address); }
    __device__ __forceinline__ void store(T* address) const { *reinterpret_cast<Pack*>(address) = *this; }
};
