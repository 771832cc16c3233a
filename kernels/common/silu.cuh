// silu: the gate of an MLP's inner activations, of fp32 results and of 16-bit ones.
#pragma once

#include "common/matrix.cuh"

// silu(gate) * up. Each operation is rounded, so that the products of rows, which end with it, give the same bits.
__device__ __forceinline__ float swiglu_of(float gate, float up) {
    const float sigmoid = __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-gate)));
    return __fmul_rn(__fmul_rn(gate, sigmoid), up);
}

// x / (1 + e^-x), as swiglu.cu computes it for 16-bit results, in six instructions. Results below 2^-126 become 0.
__device__ __forceinline__ float silu_fast(float x) {
    return __fmul_rn(x, reciprocal_fast(__fadd_rn(1.0f, exp2_fast(__fmul_rn(x, -1.4426950408889634f)))));
}

// What silu(gate) * up is divided by before it is rounded to fp16, for every row: a million still fits, and what
// becomes inexact below 2^-10 has no weight in a row whose products matter.
constexpr float GATED_SCALE = 16.0f;

// silu(gate) * up / GATED_SCALE.
__device__ __forceinline__ float gated(float gate, float up) {
    return __fmul_rn(__fmul_rn(silu_fast(gate), up), 1.0f / GATED_SCALE);
}
__device__ __forceinline__ __half gated_half(float gate, float up) {
    return __float2half_rn(within_range<__half>(gated(gate, up)));
}
