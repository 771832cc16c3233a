// swiglu: y = g / (1 + exp(-g)) * u; g, u = row_scale[t] * gate[t,i], up[t,i]      Source: arXiv 2002.05202 eq. 5
// Shapes:   gate_up [num_rows, stride] f32, of column i gate at 16 * (i / 8) + i % 8 and up 8 further; row_scale
//           [num_rows] f32; out [num_rows, num_columns] T holds y / out_scale; out_scale [num_rows] f32, a power of two
//           (1 unless T is __half and the row's largest |y| exceeds 2^15)
// Requires: stride >= 16 * ceil(num_columns / 8), a multiple of 4; num_columns % 4 == 0 for VECTOR 4; no aliases
// Launch:   warp form (ROW_THREADS 32): grid (ceil(num_rows / 4)), block (128); block form: grid (num_rows), block
//           (ROW_THREADS), 4 B static shared memory a warp
// Traffic:  num_rows * (num_columns * (8 + sizeof(T)) + 8) bytes: gate and up are read once up to ROW_THREADS * STEPS *
//           VECTOR columns (for __half what is beyond is read twice)
// Numerics: fp32, one rounding on store; two runs agree bit for bit. T float: expf (1 ulp) and a true division. 16-bit
//           T: __expf (2 + 1.173 |g| ulp) and __fdividef (2 ulp), where |g| < 87 together at most 2^-16 of |y| beside a
//           rounding of 2^-11 or 2^-8; below -87, where |silu| < 2^-118, it may be 0
// Choice:   y stays in registers, since its maximum must be known before the first store; gate and up are loaded with
//           the streaming hint, as nobody reads them again: at 2048 tokens they are larger than any L2, and y is not.
//           Rejected: exp and division in full for 16-bit outputs (arithmetic takes as long as memory then);
//           tanh.approx (2^-11 of error itself); gate and up far apart (two streams a row, and no tile of both in the
//           GEMV).
#include "studies/rows/rows.cuh"

template <typename T>
__device__ __forceinline__ float silu(float gate) {
    if constexpr (sizeof(T) == 4) {
        return gate / (1.0f + expf(-gate));
    } else {
        return __fdividef(gate, 1.0f + __expf(-gate));
    }
}

template <int VECTOR>
__device__ __forceinline__ void load_pair(const float* gate_up, int column, float (&gate)[VECTOR],
                                          float (&up)[VECTOR]) {
    const float* address = gate_up + column / 8 * 16 + column % 8;
    load_columns<Cache::STREAM>(address, gate);
    load_columns<Cache::STREAM>(address + 8, up);
}

template <typename T, int VECTOR>
__device__ __forceinline__ void multiply(float (&gate)[VECTOR], const float (&up)[VECTOR], float scale) {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) gate[v] = silu<T>(gate[v] * scale) * (up[v] * scale);
}

template <typename T, int ROW_THREADS, int STEPS, int VECTOR>
__global__ void ROW_LAUNCH_BOUNDS(ROW_THREADS, STEPS)
    swiglu(const float* __restrict__ gate_up, const float* __restrict__ row_scale, T* __restrict__ out,
           float* __restrict__ out_scale, int num_rows, int num_columns, int stride) {
    constexpr int STRIDE = ROW_THREADS * VECTOR;
    const int row = row_of_thread<ROW_THREADS>();
    if (row >= num_rows) return;
    gate_up += static_cast<size_t>(row) * stride;
    out += static_cast<size_t>(row) * num_columns;
    const int first = threadIdx.x % ROW_THREADS * VECTOR;
    const float in_scale = row_scale[row];

    // Load two steps before their arithmetic: enough in flight, and no more registers than values.
    constexpr int BATCH = 2;
    float kept[STEPS][VECTOR] = {};
#pragma unroll
    for (int batch = 0; batch < STEPS; batch += BATCH) {
        float up[BATCH][VECTOR] = {};
#pragma unroll
        for (int step = 0; step < BATCH; ++step) {
            const int column = first + (batch + step) * STRIDE;
            if (column < num_columns) load_pair(gate_up, column, kept[batch + step], up[step]);
        }
#pragma unroll
        for (int step = 0; step < BATCH; ++step) multiply<T>(kept[batch + step], up[step], in_scale);
    }
    RowScale scale = {1.0f, 1.0f};
    if constexpr (NEEDS_ROW_SCALE<T>) {
        float largest = 0.0f;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) largest = reduce::Max::combine(largest, fabsf(kept[step][v]));
        }
#pragma unroll 1
        for (int column = first + STEPS * STRIDE; column < num_columns; column += STRIDE) {
            float values[VECTOR], up[VECTOR];
            load_pair(gate_up, column, values, up);
            multiply<T>(values, up, in_scale);
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) largest = reduce::Max::combine(largest, fabsf(values[v]));
        }
        scale = row_scale_for<T>(reduce::over_row<reduce::Max, ROW_THREADS>(largest));
    }
    if (threadIdx.x % ROW_THREADS == 0) out_scale[row] = scale.scale;

#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int column = first + step * STRIDE;
        if (column < num_columns) {
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) kept[step][v] *= scale.inverse;
            store_columns(out + column, kept[step]);
        }
    }
#pragma unroll 1
    for (int column = first + STEPS * STRIDE; column < num_columns; column += STRIDE) {
        float values[VECTOR], up[VECTOR];
        load_pair(gate_up, column, values, up);
        multiply<T>(values, up, in_scale);
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) values[v] *= scale.inverse;
        store_columns(out + column, values);
    }
}
