// embedding: out[t] = table[token_ids[rows[t]]], widened                                      Source: HF LlamaModel
// Shapes:   table [vocab_size, hidden_size] T in tiles (common/tile.cuh); rows [num_tokens] i32, or null: token t has
//           id t; token_ids [num_tokens, or as many as there are rows] i32; out [num_tokens, hidden_size] f32, zeros
//           where the row is -1
// Requires: rows of out 16-byte aligned for VECTOR 4; tiles 16-byte aligned; sizes >= 1; no aliases. An id outside
//           0..vocab_size-1 reads nothing and gives a row of NaN
// Launch:   grid (num_tokens), block (256), no shared memory
// Traffic:  num_tokens * hidden_size * (sizeof(T) + 4) bytes, the ids and the rows
// Numerics: exact
// Choice:   4 columns a thread: stores of 16 bytes, side by side. Tiles, as any matrix: a row is pieces of 64 bytes,
//           two sectors each. Rejected: 8 columns a thread, to load 16 bytes (its stores are then 32 bytes apart, and
//           stores are two thirds of the traffic); clamping the id (a wrong token's vector looks right, NaN does not)
#include "common/rows.cuh"
#include "common/tile.cuh"

template <typename T, int VECTOR>
__global__ void __launch_bounds__(256)
    embedding(const T* __restrict__ table, const int* __restrict__ token_ids, const int* __restrict__ rows,
              float* __restrict__ out, int vocab_size, int hidden_size) {
    constexpr int UNIT_INPUTS = TileFormat<T>::UNIT_INPUTS;
    const int row = rows != nullptr ? rows[blockIdx.x] : blockIdx.x;
    const int id = row < 0 ? -1 : token_ids[row];
    const bool known = id >= 0 && id < vocab_size;
    table += static_cast<size_t>(known ? id / TILE_ROWS : 0) * units_of<T>(hidden_size) * (TILE_ROWS * UNIT_INPUTS);
    table += id % TILE_ROWS * UNIT_INPUTS;
    out += static_cast<size_t>(blockIdx.x) * hidden_size;
#pragma unroll 4
    for (int column = threadIdx.x * VECTOR; column < hidden_size; column += 256 * VECTOR) {
        float values[VECTOR];
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) values[v] = row < 0 ? 0.0f : __int_as_float(0x7fffffff);
        const int unit = column / UNIT_INPUTS;
        if (known) load_columns(table + unit * (TILE_ROWS * UNIT_INPUTS) + column % UNIT_INPUTS, values);
        store_columns(out + column, values);
    }
}
