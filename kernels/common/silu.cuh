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
