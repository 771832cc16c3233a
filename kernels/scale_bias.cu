// scale_bias: x[t,i] = x[t,i] * row_scale[t] + bias[i], in place, after a matrix product   Source: own design
// Shapes:   x [num_rows, num_columns] f32 with rows `stride` apart; row_scale [num_rows] f32, powers of two, or null
//           for 1; bias [num_columns] f32, or null for 0
// Requires: rows and bias 16-byte aligned and num_columns % 4 == 0 for VECTOR 4; num_rows, num_columns >= 1; no aliases
// Launch:   grid (num_rows, ceil(num_columns / (1024 * VECTOR))), block (256), no shared memory
// Traffic:  8 * num_rows * num_columns bytes, and bias once from memory, then from L2
// Numerics: one fused multiply-add, so one rounding; two runs agree bit for bit
// Choice:   a block per piece of a row, so no division finds the row; four vectors a thread, loaded before the first is
//           stored. Rejected: the bias in the matrix product's epilogue (cuBLAS has no scale by rows there), streaming
//           stores (rotary and attention read x next).
#include "common/rows.cuh"

template <int VECTOR>
__global__ void __launch_bounds__(256) scale_bias(float* __restrict__ x, const float* __restrict__ row_scale,
                                                  const float* __restrict__ bias, int num_columns, int stride) {
    constexpr int STEPS = 4;
    x += static_cast<size_t>(blockIdx.x) * stride;
    const float scale = row_scale != nullptr ? row_scale[blockIdx.x] : 1.0f;
    const int first = (blockIdx.y * STEPS * 256 + threadIdx.x) * VECTOR;

    float values[STEPS][VECTOR] = {};
    float added[STEPS][VECTOR] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int column = first + step * 256 * VECTOR;
        if (column < num_columns) {
            load_columns(x + column, values[step]);
            if (bias != nullptr) load_columns(bias + column, added[step]);
        }
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int column = first + step * 256 * VECTOR;
        if (column < num_columns) {
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) values[step][v] = fmaf(values[step][v], scale, added[step][v]);
            store_columns(x + column, values[step]);
        }
    }
}
