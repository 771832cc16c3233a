// gemv: out[r] = sum_c weight[r,c] * x[c], a matrix of halves  Source: fastllm, FastllmGemvFp32Fp16Kernel2
// Shapes:  weight [num_rows, num_columns] f16; x [num_columns] f32; out [num_rows] f32
// Problem: gemv
// Sizes:   num_rows 4096; num_columns 4096, 14336
// Check:   num_rows 3, 35; num_columns 29, 100, 1001
// Check:   num_rows 66; num_columns 136, 2056
// Claim:   tree < thread_a_row: threads side by side read numbers side by side
// Claim:   shuffles < tree: five exchanges between lanes replace eight rounds with a barrier each
// Claim:   packed < shuffles: one load brings eight weights
// Claim:   warp_a_row < packed: a row ends without a barrier, and its warp has more loads in turn
// Claim:   four_loads < warp_a_row: four loads are under way where one was
// Claim:   two_rows < four_loads: numbers of x are read and waited for once, not twice
// Claim:   llmcli < cublas: copies into shared memory are under way before the kernel in front has ended
// Note:    Every weight is used once, so a kernel can be no faster than memory. All that a rung can do is to have
//          enough bytes under way at any time. The matrix of the engine lies in tiles.
#include <cuda_fp16.h>

constexpr int WARP = 32;
constexpr int PACK = 8;  // halves in 16 bytes

__device__ float sum_over_warp(float value) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    return value;
}

// The sum over a block's threads, for thread 0. The block needs a barrier before it calls this again.
template <int NUM_THREADS>
__device__ float sum_over_block(float value) {
    __shared__ float sums[NUM_THREADS / WARP];
    value = sum_over_warp(value);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = value;
    __syncthreads();
    float sum = 0.0f;
    for (int warp = 0; threadIdx.x == 0 && warp < NUM_THREADS / WARP; ++warp) sum += sums[warp];
    return sum;
}

// The seed's tree: in round s every 2s-th thread adds the sum of its neighbour s further. The working threads are
// spread over all warps, so every warp works in the first rounds, most of its lanes for nothing.
template <int NUM_THREADS>
__device__ void add_by_tree(float* sums) {
    __syncthreads();
    for (int s = 1; s < NUM_THREADS; s *= 2) {
        if ((threadIdx.x & (2 * s - 1)) == 0) sums[threadIdx.x] += sums[threadIdx.x + s];
        __syncthreads();
    }
}

// Eight products: 16 bytes of weights and 32 bytes of x.
__device__ float dot_pack(const uint4& weights, const float4& low, const float4& high) {
    const half2* pairs = reinterpret_cast<const half2*>(&weights);
    const float2 a = __half22float2(pairs[0]), b = __half22float2(pairs[1]);
    const float2 c = __half22float2(pairs[2]), d = __half22float2(pairs[3]);
    return a.x * low.x + a.y * low.y + b.x * low.z + b.y * low.w + c.x * high.x + c.y * high.y + d.x * high.z +
           d.y * high.w;
}

// Rows begin at 16 bytes only if they are whole packs; else every number is read alone.
__device__ int packs_of_row(int num_columns) { return num_columns % PACK == 0 ? num_columns / PACK : 0; }

// rung thread_a_row: a row for each thread. The 32 addresses of a load are a row apart: each brings 32 bytes from
//   memory, of which the thread uses two, and the rest only if it is still in a cache when its turn comes.
// launch: thread_a_row<<<(num_rows + 31) / 32, 32>>>
__global__ void thread_a_row(const half* weight, const float* x, float* out, int num_rows, int num_columns) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= num_rows) return;
    float sum = 0.0f;
    for (int i = 0; i < num_columns; ++i) sum += x[i] * __half2float(weight[size_t(row) * num_columns + i]);
    out[row] = sum;
}

// rung tree: the article's kernel. 256 threads take four rows, one after the other. Each keeps its sum in shared
//   memory, and a tree of eight rounds adds up 256 sums. (Without its bias, and with an end for a last block of fewer
//   rows.)
// launch: tree<256, 4><<<(num_rows + 3) / 4, 256>>>
template <int NUM_THREADS, int NUM_PARTS>
__global__ void tree(const half* weight, const float* x, float* out, int num_rows, int num_columns) {
    __shared__ float sums[NUM_THREADS];
    const int begin = blockIdx.x * NUM_PARTS, end = min(begin + NUM_PARTS, num_rows);
    for (int row = begin; row < end; ++row) {
        const half* weights = weight + size_t(row) * num_columns;
        sums[threadIdx.x] = 0.0f;
        for (int i = threadIdx.x; i < num_columns; i += NUM_THREADS) {
            sums[threadIdx.x] += x[i] * __half2float(weights[i]);
        }
        add_by_tree<NUM_THREADS>(sums);
        if (threadIdx.x == 0) out[row] = sums[0];
        __syncthreads();
    }
}

// rung registers: the sum of a thread is in a register until the tree begins. The source differs more than the
//   programs: today's compilers see that nobody else reads the sum before the barrier.
// launch: tree_of_registers<256, 4><<<(num_rows + 3) / 4, 256>>>
template <int NUM_THREADS, int NUM_PARTS>
__global__ void tree_of_registers(const half* weight, const float* x, float* out, int num_rows, int num_columns) {
    __shared__ float sums[NUM_THREADS];
    const int begin = blockIdx.x * NUM_PARTS, end = min(begin + NUM_PARTS, num_rows);
    for (int row = begin; row < end; ++row) {
        const half* weights = weight + size_t(row) * num_columns;
        float sum = 0.0f;
        for (int i = threadIdx.x; i < num_columns; i += NUM_THREADS) sum += x[i] * __half2float(weights[i]);
        sums[threadIdx.x] = sum;
        add_by_tree<NUM_THREADS>(sums);
        if (threadIdx.x == 0) out[row] = sums[0];
        __syncthreads();
    }
}

// rung shuffles: lanes of a warp exchange their sums without memory; one barrier, and thread 0 adds the warps' sums.
// launch: shuffles<256, 4><<<(num_rows + 3) / 4, 256>>>
template <int NUM_THREADS, int NUM_PARTS>
__global__ void shuffles(const half* weight, const float* x, float* out, int num_rows, int num_columns) {
    const int begin = blockIdx.x * NUM_PARTS, end = min(begin + NUM_PARTS, num_rows);
    for (int row = begin; row < end; ++row) {
        const half* weights = weight + size_t(row) * num_columns;
        float sum = 0.0f;
        for (int i = threadIdx.x; i < num_columns; i += NUM_THREADS) sum += x[i] * __half2float(weights[i]);
        sum = sum_over_block<NUM_THREADS>(sum);
        if (threadIdx.x == 0) out[row] = sum;
        __syncthreads();
    }
}

// rung packed: eight weights come in one load of 16 bytes, their numbers of x in two.
// launch: packed<256, 4><<<(num_rows + 3) / 4, 256>>>
template <int NUM_THREADS, int NUM_PARTS>
__global__ void packed(const half* weight, const float* x, float* out, int num_rows, int num_columns) {
    const int begin = blockIdx.x * NUM_PARTS, end = min(begin + NUM_PARTS, num_rows);
    const int num_packs = packs_of_row(num_columns);
    const float4* inputs = reinterpret_cast<const float4*>(x);
    for (int row = begin; row < end; ++row) {
        const half* weights = weight + size_t(row) * num_columns;
        float sum = 0.0f;
        for (int i = threadIdx.x; i < num_packs; i += NUM_THREADS) {
            sum += dot_pack(reinterpret_cast<const uint4*>(weights)[i], inputs[2 * i], inputs[2 * i + 1]);
        }
        for (int i = num_packs * PACK + threadIdx.x; i < num_columns; i += NUM_THREADS) {
            sum += x[i] * __half2float(weights[i]);
        }
        sum = sum_over_block<NUM_THREADS>(sum);
        if (threadIdx.x == 0) out[row] = sum;
        __syncthreads();
    }
}

// NUM_ROWS rows a warp; each lane runs NUM_LOADS loads of 16 bytes of each of them at once.
template <int NUM_ROWS, int NUM_LOADS>
__global__ void by_warp(const half* weight, const float* x, float* out, int num_rows, int num_columns) {
    const int lane = threadIdx.x % WARP, warp = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    const int row = warp * NUM_ROWS, num_packs = packs_of_row(num_columns);
    if (row >= num_rows) return;
    const float4* inputs = reinterpret_cast<const float4*>(x);
    const half* rows[NUM_ROWS];
    float sums[NUM_ROWS] = {};
    // Beyond the last row the last one is read again, and not written.
#pragma unroll
    for (int r = 0; r < NUM_ROWS; ++r) rows[r] = weight + size_t(min(row + r, num_rows - 1)) * num_columns;
    int first = lane;
#pragma unroll 1  // the compiler would put loads of several rounds in front of the arithmetic: the next rung's change
    for (; first + (NUM_LOADS - 1) * WARP < num_packs; first += NUM_LOADS * WARP) {
        uint4 packs[NUM_ROWS][NUM_LOADS];
#pragma unroll
        for (int step = 0; step < NUM_LOADS; ++step) {
            for (int r = 0; r < NUM_ROWS; ++r) {
                packs[r][step] = reinterpret_cast<const uint4*>(rows[r])[first + step * WARP];
            }
        }
#pragma unroll
        for (int step = 0; step < NUM_LOADS; ++step) {
            const int pack = first + step * WARP;
            const float4 low = inputs[2 * pack], high = inputs[2 * pack + 1];
            for (int r = 0; r < NUM_ROWS; ++r) sums[r] += dot_pack(packs[r][step], low, high);
        }
    }
#pragma unroll 1
    for (; first < num_packs; first += WARP) {
        const float4 low = inputs[2 * first], high = inputs[2 * first + 1];
        for (int r = 0; r < NUM_ROWS; ++r) {
            sums[r] += dot_pack(reinterpret_cast<const uint4*>(rows[r])[first], low, high);
        }
    }
    for (int i = num_packs * PACK + lane; i < num_columns; i += WARP) {
        for (int r = 0; r < NUM_ROWS; ++r) sums[r] += x[i] * __half2float(rows[r][i]);
    }
#pragma unroll
    for (int r = 0; r < NUM_ROWS; ++r) {
        const float sum = sum_over_warp(sums[r]);
        if (lane == 0 && row + r < num_rows) out[row + r] = sum;
    }
}

// rung warp_a_row: a warp has a row to itself, eight of them a block. No barrier is left.
// launch: by_warp<1, 1><<<(num_rows + 7) / 8, 256>>>

// rung four_loads: the same kernel asks for four packs of weights before it uses the first.
// launch: by_warp<1, 4><<<(num_rows + 7) / 8, 256>>>

// rung two_rows: a warp takes two rows side by side, four packs of each. What it reads of x serves both.
// launch: by_warp<2, 4><<<(num_rows + 7) / 8, 128>>>

// rung cublas: cuBLAS, with x in halves. It is a product of matrices, of which one has one row.
// launch: cublas

// rung llmcli: the engine's kernel over its tiles. Copies fill a ring in shared memory while the kernel in front ends;
//   x is split into two halves, so that tensor cores multiply with the exactness of float32.
// launch: llmcli
