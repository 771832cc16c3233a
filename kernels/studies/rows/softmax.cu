// softmax: y[t,i] = exp(x[t,i] - m) / s, m = max_j x[t,j], s = sum_j exp(x[t,j] - m)    Source: arXiv 1805.02867 alg. 3
// Shapes:   x [num_rows, num_columns] f32 with rows `stride` apart; out [num_rows, num_columns] f32, `out_stride`
//           apart, holds y, or x - m - log(s) if LOG
// Requires: rows of both 16-byte aligned for VECTOR 4, any num_columns >= 1; num_rows >= 1; no aliases
// Launch:   warp form (ROW_THREADS 32): grid (ceil(num_rows / 4)), block (128); block form: grid (num_rows), block
//           (ROW_THREADS), 8 B static shared memory a warp
// Traffic:  8 * num_rows * num_columns bytes up to ROW_THREADS * STEPS * VECTOR columns; what is beyond is read twice
// Numerics: fp32 with expf (1 ulp) and logf (1 ulp), as the results are float32; two runs agree bit for bit. A row with
//           NaN or +inf is NaN; -inf gives 0 (LOG: -inf), a row of nothing else NaN
// Choice:   maximum and sum in one pass, rescaled when the maximum grows; a row that fits stays in registers. Streaming
//           stores: of a vocabulary's probabilities a few are read, and not at once. Rejected: maximum, sum and
//           quotient in three passes; __expf (its error grows with m - x, the results are compared with float32's).
#include "studies/rows/rows.cuh"

template <bool LOG>
__device__ __forceinline__ float finish(float x, float maximum, float factor) {
    return LOG ? x - maximum - factor : expf(x - maximum) * factor;
}

template <bool LOG, int ROW_THREADS, int STEPS, int VECTOR>
__global__ void ROW_LAUNCH_BOUNDS(ROW_THREADS, STEPS)
    softmax(const float* __restrict__ x, float* __restrict__ out, int num_rows, int num_columns, int stride,
            int out_stride) {
    constexpr int STRIDE = ROW_THREADS * VECTOR;
    const int row = row_of_thread<ROW_THREADS>();
    if (row >= num_rows) return;
    x += static_cast<size_t>(row) * stride;
    out += static_cast<size_t>(row) * out_stride;
    const int thread = threadIdx.x % ROW_THREADS;
    const int first = thread * VECTOR;
    const int whole = num_columns / VECTOR * VECTOR;
    const bool has_tail = VECTOR > 1 && whole + thread < num_columns;

    float kept[STEPS][VECTOR];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) kept[step][v] = reduce::minus_infinity();
        const int column = first + step * STRIDE;
        if (column < whole) load_columns(x + column, kept[step]);
    }
    const float tail[1] = {has_tail ? x[whole + thread] : reduce::minus_infinity()};
    MaxSum known;
    reduce::Online::set_identity(known);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        if (first + step * STRIDE < whole) reduce::include_online(known, kept[step]);
    }
#pragma unroll 1
    for (int column = first + STEPS * STRIDE; column < whole; column += 2 * STRIDE) {
        float values[2][VECTOR];  // both in flight before the first is used
        const bool has_second = column + STRIDE < whole;
        load_columns(x + column, values[0]);
        if (has_second) load_columns(x + column + STRIDE, values[1]);
        reduce::include_online(known, values[0]);
        if (has_second) reduce::include_online(known, values[1]);
    }
    if (has_tail) reduce::include_online(known, tail);
    known = reduce::over_row<reduce::Online, ROW_THREADS>(known);
    const float factor = LOG ? logf(known.sum) : 1.0f / known.sum;

#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int column = first + step * STRIDE;
        if (column < whole) {
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) kept[step][v] = finish<LOG>(kept[step][v], known.maximum, factor);
            store_columns<Cache::STREAM>(out + column, kept[step]);
        }
    }
#pragma unroll 1
    for (int column = first + STEPS * STRIDE; column < whole; column += 2 * STRIDE) {
        float values[2][VECTOR];
        const bool has_second = column + STRIDE < whole;
        load_columns(x + column, values[0]);
        if (has_second) load_columns(x + column + STRIDE, values[1]);
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) values[0][v] = finish<LOG>(values[0][v], known.maximum, factor);
        store_columns<Cache::STREAM>(out + column, values[0]);
        if (has_second) {
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) values[1][v] = finish<LOG>(values[1][v], known.maximum, factor);
            store_columns<Cache::STREAM>(out + column + STRIDE, values[1]);
        }
    }
    if (has_tail) __stcs(out + whole + thread, finish<LOG>(tail[0], known.maximum, factor));
}
