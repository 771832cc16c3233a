// kv_append: keys[rows[i], h, positions[i]] = k[i,h]; values[rows[i], h, positions[i]] = v[i,h]
//           Source: HF DynamicCache.update
// Shapes:   k, v [n, num_key_value_heads, HEAD_DIM] float in rows of stride; rows, positions [n]; keys, values
//           [num_rows, num_key_value_heads, max_seq_len, HEAD_DIM] KvT, in-out
// Requires: HEAD_DIM % 8 == 0; k, v and stride in multiples of 16 bytes; 0 <= rows < num_rows, 0 <= positions <
//           max_seq_len; no (row, position) twice
// Launch:   grid (n, ceil(2 * num_key_value_heads * HEAD_DIM / VECTOR / BLOCK_SIZE)), block (BLOCK_SIZE)
// Traffic:  2 * n * num_key_value_heads * HEAD_DIM * (4 + sizeof(KvT)) bytes
// Numerics: one rounding to nearest even, fp16 saturated at 65504; deterministic
// Choice:   16 bytes a store, keys and values in one launch; decode does this inside attention_decode
#include "common/types.cuh"

constexpr int BLOCK_SIZE = 128;

template <typename KvT, int HEAD_DIM>
__global__ void __launch_bounds__(BLOCK_SIZE) kv_append(const float* __restrict__ k, const float* __restrict__ v,
                                                        int stride, const int* __restrict__ rows,
                                                        const int* __restrict__ positions, KvT* __restrict__ keys,
                                                        KvT* __restrict__ values, int num_key_value_heads,
                                                        int max_seq_len) {
    constexpr int VECTOR = Pack<KvT>::SIZE, VECTORS = HEAD_DIM / VECTOR;
    const int index = blockIdx.y * BLOCK_SIZE + threadIdx.x;
    const int head = index / VECTORS, first = VECTOR * (index % VECTORS);
    if (head >= 2 * num_key_value_heads) return;
    const bool is_value = head >= num_key_value_heads;
    const int kv_head = is_value ? head - num_key_value_heads : head;
    const float* source = (is_value ? v : k) + blockIdx.x * size_t(stride) + kv_head * HEAD_DIM + first;
    Pack<KvT> rounded;
#pragma unroll
    for (int i = 0; i < VECTOR; i += 4) {
        const Pack<float> part = Pack<float>::load(source + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) rounded.values[i + j] = from_float<KvT>(within_range<KvT>(part.values[j]));
    }
    const size_t row_head = size_t(rows[blockIdx.x]) * num_key_value_heads + kv_head;
    const size_t token = row_head * max_seq_len + positions[blockIdx.x];
    rounded.store((is_value ? values : keys) + token * HEAD_DIM + first);
}
