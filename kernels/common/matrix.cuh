// matrix: loads 8 x 8 matrices of 16-bit elements from shared memory to the lanes of a warp; pairs of elements; 2^x.
// Lane 4g + t holds the elements 2t and 2t + 1 of row g, as the operands of mma.cuh do. Source: PTX ISA, ldmatrix,
// movmatrix, ex2.
#pragma once

#include "common/mma.cuh"

// Four matrices from shared memory: lane 8i + j gives the address of row j of matrix i, 16 bytes.
__device__ __forceinline__ void load_matrices(unsigned (&matrices)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The same, each matrix transposed on the way.
__device__ __forceinline__ void load_matrices_transposed(unsigned (&matrices)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Transposes a matrix that the warp holds.
__device__ __forceinline__ unsigned transpose_matrix(unsigned pair) {
    unsigned transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
    return transposed;
}

// 2^x within a relative 2^-22. Denormal results are 0: next to a sum of at least 1 they have no weight.
__device__ __forceinline__ float exp2_fast(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

// 1 / x within a relative 2^-23. Denormal results are 0.
__device__ __forceinline__ float reciprocal_fast(float x) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
    return inverse;
}

// Two numbers rounded to T, `first` in the low half.
template <typename T>
__device__ __forceinline__ unsigned pack_pair(float first, float second);
template <>
__device__ __forceinline__ unsigned pack_pair<__half>(float first, float second) {
    const __half2 pair = __floats2half2_rn(first, second);
    return *reinterpret_cast<const unsigned*>(&pair);
}
template <>
__device__ __forceinline__ unsigned pack_pair<__nv_bfloat16>(float first, float second) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const unsigned*>(&pair);
}

// Two floats as fp16, 65504 at most.
__device__ __forceinline__ unsigned pack_within_range(float first, float second) {
    unsigned pair;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

template <typename T>
__device__ __forceinline__ float2 unpack_pair(unsigned pair);
template <>
__device__ __forceinline__ float2 unpack_pair<__half>(unsigned pair) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
template <>
__device__ __forceinline__ float2 unpack_pair<__nv_bfloat16>(unsigned pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// What T adds to the exponent of a softmax weight: weights up to 2^15 keep fp16's denormals away from those that count.
template <typename T>
constexpr float WEIGHT_EXPONENT = 0.0f;
template <>
constexpr float WEIGHT_EXPONENT<__half> = 15.0f;
