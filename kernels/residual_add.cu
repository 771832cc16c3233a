// residual_add: hidden[t,i] += x[t,i] * row_scale[t] + bias[i]                             Source: HF LlamaDecoderLayer
// Shapes:   x [num_rows, num_columns] f32 with rows `stride` apart; row_scale [num_rows] f32, powers of two, or null
//           for 1; bias [num_columns] f32, or null for 0; hidden [num_rows, num_columns] f32, in and out
// Requires: rows and bias 16-byte aligned and num_columns % 4 == 0 for VECTOR 4; num_rows, num_columns >= 1; no aliases
// Launch:   grid (num_rows, ceil(num_columns / (1024 * VECTOR))), block (256), no shared memory
// Traffic:  12 * num_rows * num_columns bytes, and bias once from memory, then from L2
// Numerics: a fused multiply-add, then the addition: two roundings; two runs agree bit for bit
// Choice:   x is loaded with the streaming hint, as nobody reads it again; hidden stays in L2 for the norm that comes.
//           Rejected: the product accumulating into hidden (beta = 1 in cuBLAS knows no scale by rows); the norm in the
//           same kernel (one kernel less a layer, but a second form of every norm).
#include "common/rows.cuh"

template <int VECTOR>
__global__ void __launch_bounds__(256)
    residual_add(const float* __restrict__ x, const float* __restrict__ row_scale, const float* __restrict__ bias,
                 float* __restrict__ hidden, int num_columns, int stride) {
    constexpr int STEPS = 4;
    x += static_cast<size_t>(blockIdx.x) * stride;
    hidden += static_cast<size_t>(blockIdx.x) * num_columns;
    const float scale = row_scale != nullptr ? row_scale[blockIdx.x] : 1.0f;
    const int first = (blockIdx.y * STEPS * 256 + threadIdx.x) * VECTOR;

    float sums[STEPS][VECTOR] = {};
    float values[STEPS][VECTOR] = {};
    float added[STEPS][VECTOR] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int column = first + step * 256 * VECTOR;
        if (column < num_columns) {
            load_columns(hidden + column, sums[step]);
            load_columns<Cache::STREAM>(x + column, values[step]);
            if (bias != nullptr) load_columns(bias + column, added[step]);
        }
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int column = first + step * 256 * VECTOR;
        if (column < num_columns) {
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) sums[step][v] += fmaf(values[step][v], scale, added[step][v]);
            store_columns(hidden + column, sums[step]);
        }
    }
}
