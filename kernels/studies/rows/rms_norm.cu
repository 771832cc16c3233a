// rms_norm: y[t,i] = w[i] * x[t,i] / sqrt(mean_j(x[t,j]^2) + eps)       Source: arXiv 1910.07467 eq. 4; HF LlamaRMSNorm
// Shapes:   x [num_rows, num_columns] f32; weight [num_columns] f32; out [num_rows, num_columns] T holds y / row_scale;
//           row_scale [num_rows] f32, a power of two (1 unless T is __half and the row's largest |y| exceeds 2^15)
// Requires: rows 16-byte aligned for VECTOR 4; num_rows, num_columns >= 1; no aliases; sums of squares below 2^128
// Launch:   warp form (ROW_THREADS 32): grid (ceil(num_rows / 4)), block (128); block form: grid (num_rows), block
//           (ROW_THREADS), 8 B static shared memory a warp
// Traffic:  num_rows * (num_columns * (4 + sizeof(T)) + 4) + 4 * num_columns bytes: x is read once up to ROW_THREADS *
//           STEPS * VECTOR columns (what is beyond is read twice), w once from memory and then from L2
// Numerics: fp32, y = (x * w) * rsqrt (rsqrtf: 2 ulp), one rounding on store; fixed tree, so two runs agree bit for bit
// Choice:   x * w stays in registers. One reduction finds the sum of squares and the largest |x * w|: rounding is
//           monotonic, so the largest |y| is exactly that times rsqrt. Short rows get a warp each: no barrier, and
//           four rows a block. Rejected: y kept and a second block reduction for its maximum; a warp a row for long
//           rows (32 threads of a block work); 8 columns a thread for 16-byte stores (loads then lie 32 bytes apart);
//           streaming stores (the GEMM reads y next).
#include "studies/rows/rows.cuh"

template <typename T, int ROW_THREADS, int STEPS, int VECTOR>
__global__ void ROW_LAUNCH_BOUNDS(ROW_THREADS, STEPS)
    rms_norm(const float* __restrict__ x, const float* __restrict__ weight, T* __restrict__ out,
             float* __restrict__ row_scale, int num_rows, int num_columns, float eps) {
    constexpr int STRIDE = ROW_THREADS * VECTOR;
    const int row = row_of_thread<ROW_THREADS>();
    if (row >= num_rows) return;
    x += static_cast<size_t>(row) * num_columns;
    out += static_cast<size_t>(row) * num_columns;
    const int first = threadIdx.x % ROW_THREADS * VECTOR;

    // All loads come before the arithmetic, so that they overlap.
    float products[STEPS][VECTOR] = {};
    float weights[STEPS][VECTOR] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int column = first + step * STRIDE;
        if (column < num_columns) {
            load_columns(x + column, products[step]);
            load_columns(weight + column, weights[step]);
        }
    }
    SumMax found = {0.0f, 0.0f};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
            float& product = products[step][v];
            found.sum = fmaf(product, product, found.sum);
            product *= weights[step][v];
            found.maximum = reduce::Max::combine(found.maximum, fabsf(product));
        }
    }
#pragma unroll 1
    for (int column = first + STEPS * STRIDE; column < num_columns; column += STRIDE) {
        float values[VECTOR], factors[VECTOR];
        load_columns(x + column, values);
        load_columns(weight + column, factors);
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
            found.sum = fmaf(values[v], values[v], found.sum);
            found.maximum = reduce::Max::combine(found.maximum, fabsf(values[v] * factors[v]));
        }
    }

    found = reduce::over_row<reduce::SumAndMax, ROW_THREADS>(found);
    const float inverse_rms = rsqrtf(found.sum / static_cast<float>(num_columns) + eps);
    const RowScale scale = row_scale_for<T>(found.maximum * inverse_rms);
    if (threadIdx.x % ROW_THREADS == 0) row_scale[row] = scale.scale;

#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int column = first + step * STRIDE;
        if (column < num_columns) {
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) products[step][v] *= inverse_rms * scale.inverse;
            store_columns(out + column, products[step]);
        }
    }
#pragma unroll 1
    for (int column = first + STEPS * STRIDE; column < num_columns; column += STRIDE) {
        float values[VECTOR], factors[VECTOR];
        load_columns(x + column, values);
        load_columns(weight + column, factors);
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) values[v] = values[v] * factors[v] * (inverse_rms * scale.inverse);
        store_columns(out + column, values);
    }
}
