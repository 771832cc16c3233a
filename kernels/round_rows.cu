// round_rows: y[t,i] = round(x[t,i] / row_scale[t]), the activations of a matrix product             Source: own design
// Shapes:   x [num_rows, num_columns] f32; out [num_rows, num_columns] T holds y; row_scale [num_rows] f32, a power of
//           two (1 unless T is __half and the row's largest |x| exceeds 2^15)
// Requires: rows 16-byte aligned for VECTOR 4; num_rows, num_columns >= 1; no aliases
// Launch:   warp form (ROW_THREADS 32): grid (ceil(num_rows / 4)), block (128); block form: grid (num_rows), block
//           (ROW_THREADS), 4 B static shared memory a warp
// Traffic:  num_rows * (num_columns * (4 + sizeof(T)) + 4) bytes: x is read once up to ROW_THREADS * STEPS * VECTOR
//           columns (what is beyond is read twice)
// Numerics: the division by a power of two is exact, then one rounding; below 2^-14 * row_scale __half is subnormal
// Choice:   a row in registers, since its maximum must be known before the first store; x is loaded with the streaming
//           hint, as nobody reads it again, which leaves L2 to y. Rejected: one scale for all rows (a token's bits
//           would depend on its neighbours); maxima from the kernel before (a second result for every producer).
#include "common/rows.cuh"

template <typename T, int ROW_THREADS, int STEPS, int VECTOR>
__global__ void ROW_LAUNCH_BOUNDS(ROW_THREADS, STEPS)
    round_rows(const float* __restrict__ x, T* __restrict__ out, float* __restrict__ row_scale, int num_rows,
               int num_columns) {
    constexpr int STRIDE = ROW_THREADS * VECTOR;
    const int row = row_of_thread<ROW_THREADS>();
    if (row >= num_rows) return;
    x += static_cast<size_t>(row) * num_columns;
    out += static_cast<size_t>(row) * num_columns;
    const int first = threadIdx.x % ROW_THREADS * VECTOR;

    float kept[STEPS][VECTOR] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int column = first + step * STRIDE;
        if (column < num_columns) load_columns<Cache::STREAM>(x + column, kept[step]);
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
            float values[VECTOR];
            load_columns(x + column, values);
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) largest = reduce::Max::combine(largest, fabsf(values[v]));
        }
        scale = row_scale_for<T>(reduce::over_row<reduce::Max, ROW_THREADS>(largest));
    }
    if (threadIdx.x % ROW_THREADS == 0) row_scale[row] = scale.scale;

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
        float values[VECTOR];
        load_columns(x + column, values);
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) values[v] *= scale.inverse;
        store_columns(out + column, values);
    }
}
