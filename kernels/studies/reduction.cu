// reduction: out[t] = sum_i x[t,i], a block a row or a warp a row  Source: GiantPandaCV, sums within a warp and
//          within a block (FasterTransformer's); fastllm's CUDA kernels
// Shapes:  x [num_rows, num_columns] f32; out [num_rows] f32
// Problem: row_sum
// Sizes:   num_rows 32, 4096; num_columns 128, 1024, 16384
// Check:   num_rows 1, 5; num_columns 3, 100, 1001, 4096, 16384
// Claim:   halves < pairs at num_rows 4096; num_columns 128: whole warps have nothing left to do, and leave the
//          others the multiprocessor
// Claim:   raking < halves at num_rows 4096; num_columns 128: one warp adds up the rest, with one barrier instead of
//          eight
// Claim:   block < halves at num_rows 4096; num_columns 128: lanes pass their sums on in registers, with one barrier
//          instead of eight
// Claim:   warp < block at num_rows 4096; num_columns 128: a narrow row keeps one warp busy, and needs no barrier
// Claim:   block < warp at num_rows 32; num_columns 16384: a wide row has work for all warps of a block
// Claim:   block_packed < block at num_rows 32; num_columns 16384: one load brings 16 bytes instead of 4
// Claim:   warp_packed < warp at num_rows 4096; num_columns 1024: one load brings 16 bytes instead of 4
// Claim:   llmcli < block_packed at num_rows 32; num_columns 16384: many blocks share each of the few rows
// Note:    A sum of its own is rare: it stands inside of norms and softmax. There, too, the width of a row decides
//          between a warp and a block.

constexpr int WARP = 32, THREADS = 128, WARPS = THREADS / WARP;

__device__ const float* row_of(const float* x, int row, int num_columns) {
    return x + static_cast<size_t>(row) * num_columns;
}

// The sum of one of `num_threads` threads. Neighbouring threads read neighbouring columns.
__device__ float sum_of_columns(const float* row, int num_columns, int thread, int num_threads) {
    float sum = 0.0f;
    for (int i = thread; i < num_columns; i += num_threads) sum += row[i];
    return sum;
}

// The same with four columns a load. Rows begin at 16 bytes only if whole loads fill a row; other columns go singly.
__device__ float sum_of_packs(const float* row, int num_columns, int thread, int num_threads) {
    const int num_packs = num_columns % 4 == 0 ? num_columns / 4 : 0;
    const float4* packs = reinterpret_cast<const float4*>(row);
    float sum = 0.0f;
    for (int i = thread; i < num_packs; i += num_threads) {
        const float4 pack = packs[i];
        sum += pack.x + pack.y + (pack.z + pack.w);
    }
    return sum + sum_of_columns(row + 4 * num_packs, num_columns - 4 * num_packs, thread, num_threads);
}

// The sum over a warp, for all of its lanes: FasterTransformer's warpReduceSum.
__device__ float sum_over_warp(float value) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    return value;
}

// The sum over a block, for its first warp: FasterTransformer's blockReduceSum. Call it once: a second call would write
// sums while a slow warp still reads those of the first.
__device__ float sum_over_block(float value) {
    __shared__ float sums[WARP];
    const int lane = threadIdx.x % WARP;
    value = sum_over_warp(value);
    if (lane == 0) sums[threadIdx.x / WARP] = value;
    __syncthreads();
    return sum_over_warp(threadIdx.x < WARPS ? sums[lane] : 0.0f);
}

// rung pairs: fastllm's way. Threads add up in shared memory, then a tree: in step s every 2s-th thread adds what
//   stands s further. All warps stay to the end, with fewer and fewer lanes at work. The first loop costs nothing
//   extra: the compiler keeps sums[thread] in a register meanwhile.
// launch: tree_of_pairs<<<num_rows, 128>>>
__global__ void tree_of_pairs(const float* x, float* out, int num_columns) {
    __shared__ float sums[THREADS];
    const float* row = row_of(x, blockIdx.x, num_columns);
    const int thread = threadIdx.x;
    sums[thread] = 0.0f;
    for (int i = thread; i < num_columns; i += THREADS) sums[thread] += row[i];
    __syncthreads();
    for (int s = 1; s < THREADS; s *= 2) {
        if ((thread & (2 * s - 1)) == 0) sums[thread] += sums[thread + s];
        __syncthreads();
    }
    if (thread == 0) out[blockIdx.x] = sums[0];
}

// rung halves: the lower half of the threads adds what the upper half has, then half of those. The threads at work are
//   neighbours, so a warp has either all of its lanes at work or none, down to the last five steps.
// launch: tree_of_halves<<<num_rows, 128>>>
__global__ void tree_of_halves(const float* x, float* out, int num_columns) {
    __shared__ float sums[THREADS];
    const int thread = threadIdx.x;
    sums[thread] = sum_of_columns(row_of(x, blockIdx.x, num_columns), num_columns, thread, THREADS);
    __syncthreads();
    for (int s = THREADS / 2; s > 0; s /= 2) {
        if (thread < s) sums[thread] += sums[thread + s];
        __syncthreads();
    }
    if (thread == 0) out[blockIdx.x] = sums[0];
}

// rung raking: one barrier. Each lane of the first warp adds up four neighbouring sums, and shuffles do the rest. A gap
//   after every four keeps the lanes on different banks. Own code in the form of CUB's BLOCK_REDUCE_RAKING.
// launch: raking_block<<<num_rows, 128>>>
__global__ void raking_block(const float* x, float* out, int num_columns) {
    constexpr int SEGMENT = THREADS / WARP;
    __shared__ float sums[THREADS + WARP];
    const int thread = threadIdx.x;
    sums[thread + thread / SEGMENT] =
        sum_of_columns(row_of(x, blockIdx.x, num_columns), num_columns, thread, THREADS);
    __syncthreads();
    if (thread >= WARP) return;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < SEGMENT; ++i) sum += sums[thread * (SEGMENT + 1) + i];
    sum = sum_over_warp(sum);
    if (thread == 0) out[blockIdx.x] = sum;
}

// rung block: each warp adds up by shuffles, and the first warp adds up the warps' sums the same way.
// launch: row_by_block<<<num_rows, 128>>>
__global__ void row_by_block(const float* x, float* out, int num_columns) {
    const float* row = row_of(x, blockIdx.x, num_columns);
    const float sum = sum_over_block(sum_of_columns(row, num_columns, threadIdx.x, THREADS));
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

// rung cub_form: shuffles downwards, which give lane 0 alone the sum, and one thread adds up the four warps' sums. Own
//   code in the form that cub::BlockReduce has by default; the study reduction_cub has CUB's.
// launch: row_by_block_downwards<<<num_rows, 128>>>
__global__ void row_by_block_downwards(const float* x, float* out, int num_columns) {
    __shared__ float sums[WARPS];
    float sum = sum_of_columns(row_of(x, blockIdx.x, num_columns), num_columns, threadIdx.x, THREADS);
#pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2) {
        sum += __shfl_down_sync(0xffffffffu, sum, distance);  // a lane without such a neighbour gets its own value
    }
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
#pragma unroll
    for (int warp = 1; warp < WARPS; ++warp) sum += sums[warp];
    out[blockIdx.x] = sum;
}

// rung block_packed: as block, with four columns a load.
// launch: row_by_block_packed<<<num_rows, 128>>>
__global__ void row_by_block_packed(const float* x, float* out, int num_columns) {
    const float* row = row_of(x, blockIdx.x, num_columns);
    const float sum = sum_over_block(sum_of_packs(row, num_columns, threadIdx.x, THREADS));
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

// rung warp: a warp a row, four rows a block. No shared memory, no barrier. The article's kernel reads past the end
//   where the last block has fewer rows; here its idle warps leave.
// launch: row_by_warp<<<(num_rows + 3) / 4, 128>>>
__global__ void row_by_warp(const float* x, float* out, int num_rows, int num_columns) {
    const int row = blockIdx.x * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= num_rows) return;
    const float sum = sum_over_warp(sum_of_columns(row_of(x, row, num_columns), num_columns, lane, WARP));
    if (lane == 0) out[row] = sum;
}

// rung warp_packed: as warp, with four columns a load.
// launch: row_by_warp_packed<<<(num_rows + 3) / 4, 128>>>
__global__ void row_by_warp_packed(const float* x, float* out, int num_rows, int num_columns) {
    const int row = blockIdx.x * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= num_rows) return;
    const float sum = sum_over_warp(sum_of_packs(row_of(x, row, num_columns), num_columns, lane, WARP));
    if (lane == 0) out[row] = sum;
}

// rung llmcli: llmcli's own kernel. It gives a row to a warp up to 1024 columns, to a block beyond, and shares a few
//   long rows out to many blocks, of which the last to finish adds up the parts.
// launch: llmcli
