// row_reduce: y[t] = sum_i x[t,i], max_i x[t,i], argmax_i x[t,i], or log(sum_i exp(x[t,i]))    Source: arXiv 1805.02867
// Shapes:   x [num_rows, num_columns] f32 with rows `stride` apart; out [num_rows] f32 (i32 for RowArgmax); for the
//           split form partials [num_rows, gridDim.x] of OP::Value (4 or 8 bytes), counters [num_rows] u32
// Requires: rows 16-byte aligned for VECTOR 4, any num_columns >= 1; no aliases; split form: gridDim.x <= BLOCK_SIZE,
//           counters 0 (they are 0 again at the end)
// Launch:   warp form (ROW_THREADS 32): grid (ceil(num_rows / 4)), block (128); block form: grid (num_rows), block
//           (ROW_THREADS); split form: grid (num_splits, num_rows), block (BLOCK_SIZE); at most 129 B static shared
//           memory
// Traffic:  4 * num_rows * num_columns bytes; the split form also writes and reads 8 * num_rows * num_splits bytes
// Numerics: fp32 in a fixed tree, so two runs agree bit for bit in each form (the forms' sums may differ). NaN wins max
//           and argmax, ties go to the lowest index. log-sum-exp: expf (1 ulp) of x - max, so no overflow; a row of
//           -inf gives -inf, one with +inf NaN
// Choice:   One block reads some 100 GB/s and would need 5 us for a vocabulary of 128,256. So a few long rows are split
//           over many blocks. The last block to arrive (an integer counter) adds the parts up, in the order of their
//           places, so the order of arrival changes no result. Rejected: float atomics (order of arrival), a second
//           kernel for the parts (a launch costs more than the work), scalar loads (4 times the instructions).
#include "common/arrival.cuh"
#include "studies/rows/rows.cuh"

struct RowSum {
    using Value = float;
    using Out = float;
    using Combine = reduce::Sum;
    template <int VECTOR>
    static __device__ __forceinline__ void include(Value& sum, const float (&values)[VECTOR], int) {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) sum += values[v];
    }
    static __device__ __forceinline__ Out finish(Value sum) { return sum; }
};

struct RowMax {
    using Value = float;
    using Out = float;
    using Combine = reduce::Max;
    template <int VECTOR>
    static __device__ __forceinline__ void include(Value& maximum, const float (&values)[VECTOR], int) {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) maximum = reduce::Max::combine(maximum, values[v]);
    }
    static __device__ __forceinline__ Out finish(Value maximum) { return maximum; }
};

struct RowArgmax {
    using Value = Indexed;
    using Out = int;
    using Combine = reduce::Argmax;
    template <int VECTOR>
    static __device__ __forceinline__ void include(Value& best, const float (&values)[VECTOR], int column) {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) best = reduce::Argmax::combine(best, Indexed{values[v], column + v});
    }
    static __device__ __forceinline__ Out finish(Value best) { return best.index; }
};

struct RowLogSumExp {
    using Value = MaxSum;
    using Out = float;
    using Combine = reduce::Online;
    template <int VECTOR>
    static __device__ __forceinline__ void include(Value& known, const float (&values)[VECTOR], int) {
        reduce::include_online(known, values);
    }
    static __device__ __forceinline__ Out finish(Value known) { return known.maximum + logf(known.sum); }
};

// Columns begin..end of a row, shared by THREADS threads; `begin` is a multiple of VECTOR.
template <typename OP, int THREADS, int VECTOR>
__device__ __forceinline__ typename OP::Value reduce_columns(const float* x, int begin, int end, int thread) {
    typename OP::Value value;
    OP::Combine::set_identity(value);
    const int whole = begin + (end - begin) / VECTOR * VECTOR;
    int column = begin + thread * VECTOR;
    for (; column + THREADS * VECTOR < whole; column += 2 * THREADS * VECTOR) {
        float values[2][VECTOR];  // both in flight before the first is used
        load_columns<Cache::STREAM>(x + column, values[0]);
        load_columns<Cache::STREAM>(x + column + THREADS * VECTOR, values[1]);
        OP::include(value, values[0], column);
        OP::include(value, values[1], column + THREADS * VECTOR);
    }
    if (column < whole) {
        float values[VECTOR];
        load_columns<Cache::STREAM>(x + column, values);
        OP::include(value, values, column);
    }
    if (VECTOR > 1 && whole + thread < end) {
        const float values[1] = {x[whole + thread]};
        OP::include(value, values, whole + thread);
    }
    return value;
}

template <typename OP, int ROW_THREADS, int VECTOR>
__global__ void ROW_LAUNCH_BOUNDS(ROW_THREADS, 4)
    row_reduce(const float* __restrict__ x, typename OP::Out* __restrict__ out, int num_rows, int num_columns,
               int stride) {
    const int row = row_of_thread<ROW_THREADS>();
    if (row >= num_rows) return;
    x += static_cast<size_t>(row) * stride;
    const int thread = threadIdx.x % ROW_THREADS;
    typename OP::Value value = reduce_columns<OP, ROW_THREADS, VECTOR>(x, 0, num_columns, thread);
    value = reduce::over_row<typename OP::Combine, ROW_THREADS>(value);
    if (thread == 0) out[row] = OP::finish(value);
}

template <typename OP, int BLOCK_SIZE, int VECTOR>
__global__ void __launch_bounds__(BLOCK_SIZE)
    row_reduce_split(const float* __restrict__ x, typename OP::Value* partials, unsigned int* __restrict__ counters,
                     typename OP::Out* __restrict__ out, int num_columns, int stride, int columns_per_split) {
    using Value = typename OP::Value;
    const int row = blockIdx.y;
    const unsigned num_splits = gridDim.x;
    x += static_cast<size_t>(row) * stride;
    partials += static_cast<size_t>(row) * num_splits;
    const int begin = blockIdx.x * columns_per_split;
    const int end = min(begin + columns_per_split, num_columns);
    Value value = reduce_columns<OP, BLOCK_SIZE, VECTOR>(x, begin, end, threadIdx.x);
    value = reduce::over_block<typename OP::Combine, BLOCK_SIZE>(value);

    __shared__ bool is_last;
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = value;
        is_last = arrive(&counters[row], num_splits - 1) == num_splits - 1;  // 0 for the next launch
    }
    __syncthreads();
    if (!is_last) return;
    OP::Combine::set_identity(value);
    if (threadIdx.x < num_splits) {
        // From L2, where the other blocks' writes are; L1 is not kept up to date with them.
        unsigned int words[sizeof(Value) / 4];
#pragma unroll
        for (int word = 0; word < sizeof(Value) / 4; ++word) {
            words[word] = __ldcg(reinterpret_cast<const unsigned int*>(partials + threadIdx.x) + word);
        }
        memcpy(&value, words, sizeof(Value));
    }
    value = reduce::over_block<typename OP::Combine, BLOCK_SIZE>(value);
    if (threadIdx.x == 0) out[row] = OP::finish(value);
}
