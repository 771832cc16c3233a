// embedding: out[t] = table[token_ids[t]], widened                                            Source: HF LlamaModel
// Shapes:   table [vocab_size, hidden_size] T; token_ids [num_tokens] i32; out [num_tokens, hidden_size] f32
// Requires: rows 16-byte aligned in out and 4 * sizeof(T) in table for VECTOR 4; sizes >= 1; no aliases. An id outside
//           0..vocab_size-1 reads nothing and gives a row of NaN
// Launch:   grid (num_tokens), block (256), no shared memory
// Traffic:  num_tokens * hidden_size * (sizeof(T) + 4) bytes and the ids
// Numerics: exact
// Choice:   4 columns a thread: stores of 16 bytes, side by side. Rejected: 8 columns a thread, to load 16 bytes from a
//           16-bit table (its stores are then 32 bytes apart, and stores are two thirds of the traffic); clamping the
//           id (a wrong token's vector looks right, NaN does not).
#include "common/rows.cuh"

template <typename T, int VECTOR>
__global__ void __launch_bounds__(256) embedding(const T* __restrict__ table, const int* __restrict__ token_ids,
                                                 float* __restrict__ out, int vocab_size, int hidden_size) {
    const int id = token_ids[blockIdx.x];
    const bool known = id >= 0 && id < vocab_size;
    table += static_cast<size_t>(known ? id : 0) * hidden_size;
    out += static_cast<size_t>(blockIdx.x) * hidden_size;
#pragma unroll 4
    for (int column = threadIdx.x * VECTOR; column < hidden_size; column += 256 * VECTOR) {
        float values[VECTOR];
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) values[v] = __int_as_float(0x7fffffff);
        if (known) load_columns(table + column, values);
        store_columns(out + column, values);
    }
}
