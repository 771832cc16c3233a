// silu: the gate of an MLP's inner activations, for results of 16 bits.
#pragma once

#include "common/matrix.cuh"

// x / (1 + e^-x), as swiglu.cu has it for 16-bit results, in six instructions. What is below 2^-126 becomes 0.
__device__ __forceinline__ float silu_fast(float x) {
    return __fmul_rn(x, reciprocal_fast(__fadd_rn(1.0f, exp2_fast(__fmul_rn(x, -1.4426950408889634f)))));
}
