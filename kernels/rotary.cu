// rotary: (x[i], x[i+h]) = (x[i] cos - x[i+h] sin, x[i+h] cos + x[i] sin), h = HEAD_DIM / 2
//           Source: arXiv 2104.09864 eq. 34; HF rotate_half
// Shapes:   x [n, num_heads, HEAD_DIM] float in rows of stride, in place; positions [n]; cos_sin [max_seq_len,
//           HEAD_DIM / 2] float2, the angles of a position
// Requires: HEAD_DIM % 8 == 0; x, stride and cos_sin in multiples of 16 bytes; 0 <= positions < max_seq_len
// Launch:   grid (n, ceil(num_heads * HEAD_DIM / 8 / BLOCK_SIZE)), block (BLOCK_SIZE)
// Traffic:  n * num_heads * HEAD_DIM * 8 bytes; cos_sin is served by L2
// Numerics: fp32, three roundings an element; deterministic
// Choice:   four pairs a thread in 16-byte accesses. It is for the queries of prompts on cards without
//           attention_prefill_wgmma; append_tokens and the other attention kernels rotate what they load
#include "common/types.cuh"

constexpr int BLOCK_SIZE = 128;

template <int HEAD_DIM>
__global__ void __launch_bounds__(BLOCK_SIZE)
    rotary(float* __restrict__ x, int stride, int num_heads, const int* __restrict__ positions,
           const float* __restrict__ cos_sin) {
    constexpr int VECTORS = HEAD_DIM / 8;  // of one half
    const int index = blockIdx.y * BLOCK_SIZE + threadIdx.x;
    const int head = index / VECTORS, first = 4 * (index % VECTORS);
    if (head >= num_heads) return;
    x += blockIdx.x * size_t(stride) + head * HEAD_DIM + first;
    const float* angles = cos_sin + size_t(positions[blockIdx.x]) * HEAD_DIM + 2 * first;
    const Pack<float> low = Pack<float>::load(x), high = Pack<float>::load(x + HEAD_DIM / 2);
    const Pack<float> angle[2] = {Pack<float>::load(angles), Pack<float>::load(angles + 4)};
    Pack<float> rotated_low, rotated_high;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float cosine = angle[i / 2].values[2 * (i % 2)], sine = angle[i / 2].values[2 * (i % 2) + 1];
        rotated_low.values[i] = low.values[i] * cosine - high.values[i] * sine;
        rotated_high.values[i] = high.values[i] * cosine + low.values[i] * sine;
    }
    rotated_low.store(x);
    rotated_high.store(x + HEAD_DIM / 2);
}
