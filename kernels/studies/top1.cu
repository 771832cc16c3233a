// top1: the largest value of each row and the lowest column that has it  Source: fastllm's CUDA kernels
// Shapes:  x [num_rows, num_columns] f32; value [num_rows] f32; index [num_rows] i32
// Problem: top1
// Sizes:   num_rows 1, 64; num_columns 32000, 128256
// Check:   num_rows 1, 5; num_columns 3, 100, 1001, 4096, 32003
// Claim:   shuffles < tree at num_rows 64; num_columns 32000: the best so far is in registers, and one barrier is left
//          of nine
// Claim:   packed < shuffles at num_rows 64; num_columns 128256: one load brings 16 bytes instead of 4
// Claim:   parts < packed at num_rows 1; num_columns 128256: 32 blocks share the row, though a second launch follows
// Claim:   llmcli < packed at num_rows 1; num_columns 128256: many blocks share the row
// Note:    Greedy decoding takes this of the logits of every step. fastllm stores the column as a float, which is
//          not exact for large numbers.

constexpr int WARP = 32, THREADS = 256, WARPS = THREADS / WARP, PARTS = 32;

struct Best {
    float value;
    int index;
};

__device__ Best nothing() { return Best{__int_as_float(0xff800000), 2147483647}; }  // -inf, after every column

// Of equal values that of the lower column is better, so the order of comparing changes nothing.
__device__ bool is_better(Best a, Best b) { return a.value > b.value || (a.value == b.value && a.index < b.index); }

__device__ Best better(Best a, Best b) { return is_better(b, a) ? b : a; }

// The best of this thread's columns between `first` and `end`.
__device__ Best best_of_columns(const float* row, int first, int end, int thread, int num_threads) {
    Best best = nothing();
    for (int i = first + thread; i < end; i += num_threads) best = better(best, Best{row[i], i});
    return best;
}

// The same with four columns a load; `first` is a multiple of 4. Rows begin at 16 bytes only if whole loads fill a row;
// other columns go singly.
__device__ Best best_of_packs(const float* row, int num_columns, int first, int end, int thread, int num_threads) {
    const int num_packs = num_columns % 4 == 0 && end > first ? (end - first) / 4 : 0;
    const float4* packs = reinterpret_cast<const float4*>(row + first);
    Best best = nothing();
    for (int i = thread; i < num_packs; i += num_threads) {
        const float4 pack = packs[i];
        const int column = first + 4 * i;
        const Best low = better(Best{pack.x, column}, Best{pack.y, column + 1});
        best = better(best, better(low, better(Best{pack.z, column + 2}, Best{pack.w, column + 3})));
    }
    return better(best, best_of_columns(row, first + 4 * num_packs, end, thread, num_threads));
}

// The best over a warp, for all of its lanes.
__device__ Best best_over_warp(Best best) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        best = better(best, Best{__shfl_xor_sync(0xffffffffu, best.value, distance),
                                 __shfl_xor_sync(0xffffffffu, best.index, distance)});
    }
    return best;
}

// The best over a block, for its first warp. Call it once.
__device__ Best best_over_block(Best best) {
    __shared__ Best parts[WARPS];
    best = best_over_warp(best);
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = best;
    __syncthreads();
    return best_over_warp(threadIdx.x < WARPS ? parts[threadIdx.x] : nothing());
}

// rung tree: fastllm's way: each thread's best so far stands in shared memory, then a tree. fastllm's tree compares
//   values alone, so of equal ones it takes that of the lower thread, which may be the higher column; this one also
//   compares the columns.
// launch: top1_by_tree<<<num_rows, 256>>>
__global__ void top1_by_tree(const float* x, float* value, int* index, int num_columns) {
    __shared__ Best parts[THREADS];
    const float* row = x + static_cast<size_t>(blockIdx.x) * num_columns;
    const int thread = threadIdx.x;
    parts[thread] = nothing();
    for (int i = thread; i < num_columns; i += THREADS) {
        const Best found{row[i], i};
        if (is_better(found, parts[thread])) parts[thread] = found;
    }
    __syncthreads();
    for (int s = THREADS / 2; s > 0; s /= 2) {
        if (thread < s) parts[thread] = better(parts[thread], parts[thread + s]);
        __syncthreads();
    }
    if (thread == 0) value[blockIdx.x] = parts[0].value, index[blockIdx.x] = parts[0].index;
}

// rung shuffles: a thread's best so far is in registers; in the end value and column go from lane to lane.
// launch: top1_by_shuffles<<<num_rows, 256>>>
__global__ void top1_by_shuffles(const float* x, float* value, int* index, int num_columns) {
    const float* row = x + static_cast<size_t>(blockIdx.x) * num_columns;
    const Best best = best_over_block(best_of_columns(row, 0, num_columns, threadIdx.x, THREADS));
    if (threadIdx.x == 0) value[blockIdx.x] = best.value, index[blockIdx.x] = best.index;
}

// rung packed: four columns a load.
// launch: top1_of_packs<<<num_rows, 256>>>
__global__ void top1_of_packs(const float* x, float* value, int* index, int num_columns) {
    const float* row = x + static_cast<size_t>(blockIdx.x) * num_columns;
    const Best best = best_over_block(best_of_packs(row, num_columns, 0, num_columns, threadIdx.x, THREADS));
    if (threadIdx.x == 0) value[blockIdx.x] = best.value, index[blockIdx.x] = best.index;
}

// rung parts: 32 blocks a row, each with a part of the columns; then a warp a row takes the best of the parts.
// launch: top1_of_part<<<dim3(32, num_rows), 256>>>
// launch: top1_of_parts<<<num_rows, 32>>>
__global__ void top1_of_part(const float* x, float* part_values, int* part_indices, int num_columns) {
    const float* row = x + static_cast<size_t>(blockIdx.y) * num_columns;
    const int length = ((num_columns + PARTS - 1) / PARTS + 3) / 4 * 4;  // so that parts begin at 16 bytes
    const int first = blockIdx.x * length, end = min(first + length, num_columns);  // the last may be empty
    const Best best = best_over_block(best_of_packs(row, num_columns, first, end, threadIdx.x, THREADS));
    const int place = blockIdx.y * PARTS + blockIdx.x;
    if (threadIdx.x == 0) part_values[place] = best.value, part_indices[place] = best.index;
}

__global__ void top1_of_parts(const float* part_values, const int* part_indices, float* value, int* index) {
    const int place = blockIdx.x * PARTS + threadIdx.x;
    const Best best = best_over_warp(Best{part_values[place], part_indices[place]});
    if (threadIdx.x == 0) value[blockIdx.x] = best.value, index[blockIdx.x] = best.index;
}

// rung llmcli: llmcli's row_reduce, once for the column and once more for the value. A few long rows are shared out
//   to many blocks in the same launch: the last block to finish takes the best of the parts.
// launch: llmcli
