// head_norm: x[t,h,i] = w[i] * x[t,h,i] / sqrt(mean_j(x[t,h,j]^2) + eps), in place     Source: HF Qwen3Attention q_norm
// Shapes:   x [num_rows, num_heads, head_dim] f32 with rows `stride` apart; weight [head_dim] f32
// Requires: head_dim <= HEAD_THREADS * STEPS * VECTOR; rows and heads 16-byte aligned for VECTOR 4; no aliases
// Launch:   grid (ceil(num_rows * num_heads * HEAD_THREADS / 128)), block (128), no shared memory
// Traffic:  8 * num_rows * num_heads * head_dim + 4 * head_dim bytes (a head stays in registers between load and store)
// Numerics: fp32, y = (x * rsqrt) * w (rsqrtf: 2 ulp); two runs agree bit for bit
// Choice:   as many lanes a head as it has 16-byte vectors (2 for 8 columns, 32 for 128), so short heads leave no lane
//           idle; no barrier. Rejected: a block a head (32 lanes of it work), a warp for every head (head_dim 64 uses
//           half), the norm inside rotary (models without it would pay for a second variant of each).
#include "common/rows.cuh"

template <int HEAD_THREADS, int STEPS, int VECTOR>
__global__ void __launch_bounds__(row_block_size(HEAD_THREADS))
    head_norm(float* __restrict__ x, const float* __restrict__ weight, int num_rows, int num_heads, int head_dim,
              int stride, float eps) {
    // Idle groups stay for the shuffles, which need the whole warp.
    const int head = row_of_thread<HEAD_THREADS>();
    const int row = head / num_heads;
    const int num_columns = row < num_rows ? head_dim : 0;
    x += static_cast<size_t>(row) * stride + static_cast<size_t>(head % num_heads) * head_dim;
    const int first = threadIdx.x % HEAD_THREADS * VECTOR;

    float values[STEPS][VECTOR] = {};
    float weights[STEPS][VECTOR] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int column = first + step * HEAD_THREADS * VECTOR;
        if (column < num_columns) {
            load_columns(x + column, values[step]);
            load_columns(weight + column, weights[step]);
        }
    }
    float sum = 0.0f;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) sum = fmaf(values[step][v], values[step][v], sum);
    }
    sum = warp_sum<HEAD_THREADS>(sum);
    const float inverse_rms = rsqrtf(sum / static_cast<float>(head_dim) + eps);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int column = first + step * HEAD_THREADS * VECTOR;
        if (column < num_columns) {
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) values[step][v] = values[step][v] * inverse_rms * weights[step][v];
            store_columns(x + column, values[step]);
        }
    }
}
