// reduction_cub: out[t] = sum_i x[t,i], by CUB's own code and by ours  Source: CUB's BlockReduce and WarpReduce;
//          GiantPandaCV, sums within a warp and within a block
// Shapes:  x [num_rows, num_columns] f32; out [num_rows] f32
// Problem: row_sum
// Sizes:   num_rows 32, 4096; num_columns 128, 1024, 16384
// Check:   num_rows 1, 5; num_columns 3, 100, 1001, 4096, 16384
// Claim:   cub_warp < cub_block at num_rows 4096; num_columns 128: a narrow row keeps one warp busy, without barriers
// Claim:   cub_block < cub_warp at num_rows 32; num_columns 16384: a wide row has work for all warps of a block
// Note:    CUB is NVIDIA's library of what kernels are made of. Its headers come with CuPy. They are long, and
//          these kernels take the compiler much longer than those of `reduction`, which has more ways, all of them
//          ours.
#include <cub/block/block_reduce.cuh>
#include <cub/warp/warp_reduce.cuh>

constexpr int WARP = 32, THREADS = 128, WARPS = THREADS / WARP;

// The sum of one of `num_threads` threads. Neighbouring threads read neighbouring columns.
__device__ float sum_of_columns(const float* x, int row, int num_columns, int thread, int num_threads) {
    x += static_cast<size_t>(row) * num_columns;
    float sum = 0.0f;
    for (int i = thread; i < num_columns; i += num_threads) sum += x[i];
    return sum;
}

// The sum over a warp, for all of its lanes.
__device__ float sum_over_warp(float value) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    return value;
}

// rung block: ours. Each warp adds up by shuffles, and the first warp adds up the warps' sums the same way.
// launch: row_by_block<<<num_rows, 128>>>
__global__ void row_by_block(const float* x, float* out, int num_columns) {
    __shared__ float sums[WARP];
    const int lane = threadIdx.x % WARP;
    float sum = sum_over_warp(sum_of_columns(x, blockIdx.x, num_columns, threadIdx.x, THREADS));
    if (lane == 0) sums[threadIdx.x / WARP] = sum;
    __syncthreads();
    sum = sum_over_warp(threadIdx.x < WARPS ? sums[lane] : 0.0f);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

// rung cub_block: cub::BlockReduce with an operator of ours, in the algorithm that it has by default: shuffles in each
//   warp, then one thread goes over the warps' results. Only thread 0 gets the sum.
// launch: row_by_cub_block<<<num_rows, 128>>>
struct Add {
    __device__ float operator()(float a, float b) const { return a + b; }
};

__global__ void row_by_cub_block(const float* x, float* out, int num_columns) {
    using BlockReduce = cub::BlockReduce<float, THREADS>;
    __shared__ typename BlockReduce::TempStorage storage;
    float sum = sum_of_columns(x, blockIdx.x, num_columns, threadIdx.x, THREADS);
    sum = BlockReduce(storage).Reduce(sum, Add());
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

// rung warp: ours, a warp a row, four rows a block.
// launch: row_by_warp<<<(num_rows + 3) / 4, 128>>>
__global__ void row_by_warp(const float* x, float* out, int num_rows, int num_columns) {
    const int row = blockIdx.x * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= num_rows) return;
    const float sum = sum_over_warp(sum_of_columns(x, row, num_columns, lane, WARP));
    if (lane == 0) out[row] = sum;
}

// rung cub_warp: cub::WarpReduce in its place. Its memory is one for each warp, and lane 0 gets the sum.
// launch: row_by_cub_warp<<<(num_rows + 3) / 4, 128>>>
__global__ void row_by_cub_warp(const float* x, float* out, int num_rows, int num_columns) {
    using WarpReduce = cub::WarpReduce<float>;
    __shared__ typename WarpReduce::TempStorage storage[WARPS];
    const int warp = threadIdx.x / WARP, row = blockIdx.x * WARPS + warp, lane = threadIdx.x % WARP;
    if (row >= num_rows) return;
    const float sum = WarpReduce(storage[warp]).Sum(sum_of_columns(x, row, num_columns, lane, WARP));
    if (lane == 0) out[row] = sum;
}

// rung llmcli: llmcli's own kernel.
// launch: llmcli
