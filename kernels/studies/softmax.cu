// softmax: out[t,i] = exp(x[t,i] - m) / sum_j exp(x[t,j] - m), m the row's largest  Source: fastllm's CUDA kernels;
//          online softmax, arXiv 1805.02867
// Shapes:  x, out [num_rows, num_columns] f32
// Problem: softmax
// Sizes:   num_rows 1; num_columns 128256
// Sizes:   num_rows 1024; num_columns 128, 1024, 8192
// Check:   num_rows 1, 5; num_columns 3, 100, 1001, 4096, 9000
// Claim:   strided < runs at num_rows 1024; num_columns 8192: a warp's loads share lines of 128 bytes
// Claim:   shuffles < strided at num_rows 1024; num_columns 128: one barrier a reduction instead of nine
// Claim:   online < shuffles at num_rows 1024; num_columns 8192: the row is read twice and written once, where it was
//          read three times and written twice
// Claim:   warp < online at num_rows 1024; num_columns 128: one warp has all of a narrow row, and needs no barrier
// Claim:   online < warp at num_rows 1024; num_columns 8192: a wide row keeps all warps of a block busy
// Claim:   registers < online at num_rows 1024; num_columns 8192: the row is read once, 16 bytes a load
// Claim:   llmcli < registers at num_rows 1024; num_columns 128: a warp is enough for a narrow row
// Claim:   llmcli < registers at num_rows 1; num_columns 128256: more threads, each with 16 bytes a load, have more of
//          the row under way
// Note:    fastllm's kernel replaces a sum near zero. It never happens: the largest column alone adds one to it.

constexpr int WARP = 32, THREADS = 256, WARPS = THREADS / WARP;

__device__ float minus_infinity() { return __int_as_float(0xff800000); }

// The largest of a block's values, for all threads, by a tree in shared memory. Call it once.
__device__ float tree_max(float value) {
    __shared__ float parts[THREADS];
    const int thread = threadIdx.x;
    parts[thread] = value;
    __syncthreads();
    for (int s = THREADS / 2; s > 0; s /= 2) {
        if (thread < s) parts[thread] = fmaxf(parts[thread], parts[thread + s]);
        __syncthreads();
    }
    return parts[0];
}

// The sum of a block's values, likewise.
__device__ float tree_sum(float value) {
    __shared__ float parts[THREADS];
    const int thread = threadIdx.x;
    parts[thread] = value;
    __syncthreads();
    for (int s = THREADS / 2; s > 0; s /= 2) {
        if (thread < s) parts[thread] += parts[thread + s];
        __syncthreads();
    }
    return parts[0];
}

// The largest of a block's values, for all threads, by shuffles. Every warp repeats the second step. Call it once.
__device__ float shuffle_max(float value) {
    __shared__ float parts[WARPS];
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
    }
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = value;
    __syncthreads();
    value = parts[threadIdx.x % WARPS];
#pragma unroll
    for (int distance = WARPS / 2; distance > 0; distance /= 2) {
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
    }
    return value;
}

// The sum of a block's values, likewise.
__device__ float shuffle_sum(float value) {
    __shared__ float parts[WARPS];
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = value;
    __syncthreads();
    value = parts[threadIdx.x % WARPS];
#pragma unroll
    for (int distance = WARPS / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    return value;
}

// rung runs: fastllm's way, in three passes. A thread takes a run of neighbouring columns, and the last one what is
//   left over, so the loads of a warp lie far apart. The exponentials are written, and read again for the quotient.
// launch: softmax_of_runs<<<num_rows, 256>>>
__global__ void softmax_of_runs(const float* x, float* out, int num_columns) {
    x += static_cast<size_t>(blockIdx.x) * num_columns;
    out += static_cast<size_t>(blockIdx.x) * num_columns;
    const int thread = threadIdx.x, length = num_columns / THREADS;
    const int begin = thread * length, end = thread == THREADS - 1 ? num_columns : begin + length;
    float maximum = x[begin];  // the row's first column if there are fewer columns than threads
    for (int i = begin; i < end; ++i) maximum = fmaxf(maximum, x[i]);
    maximum = tree_max(maximum);
    float sum = 0.0f;
    for (int i = begin; i < end; ++i) {
        out[i] = expf(x[i] - maximum);
        sum += out[i];
    }
    sum = tree_sum(sum);
    for (int i = begin; i < end; ++i) out[i] /= sum;
}

// rung strided: neighbouring threads take neighbouring columns. A warp's load is one piece of memory.
// launch: softmax_strided<<<num_rows, 256>>>
__global__ void softmax_strided(const float* x, float* out, int num_columns) {
    x += static_cast<size_t>(blockIdx.x) * num_columns;
    out += static_cast<size_t>(blockIdx.x) * num_columns;
    float maximum = minus_infinity();
    for (int i = threadIdx.x; i < num_columns; i += THREADS) maximum = fmaxf(maximum, x[i]);
    maximum = tree_max(maximum);
    float sum = 0.0f;
    for (int i = threadIdx.x; i < num_columns; i += THREADS) {
        const float power = expf(x[i] - maximum);
        out[i] = power;
        sum += power;
    }
    sum = tree_sum(sum);
    for (int i = threadIdx.x; i < num_columns; i += THREADS) out[i] /= sum;
}

// rung shuffles: the same passes; maximum and sum go from lane to lane instead of through shared memory.
// launch: softmax_by_shuffles<<<num_rows, 256>>>
__global__ void softmax_by_shuffles(const float* x, float* out, int num_columns) {
    x += static_cast<size_t>(blockIdx.x) * num_columns;
    out += static_cast<size_t>(blockIdx.x) * num_columns;
    float maximum = minus_infinity();
    for (int i = threadIdx.x; i < num_columns; i += THREADS) maximum = fmaxf(maximum, x[i]);
    maximum = shuffle_max(maximum);
    float sum = 0.0f;
    for (int i = threadIdx.x; i < num_columns; i += THREADS) {
        const float power = expf(x[i] - maximum);
        out[i] = power;
        sum += power;
    }
    sum = shuffle_sum(sum);
    for (int i = threadIdx.x; i < num_columns; i += THREADS) out[i] /= sum;
}

// A maximum, and the sum of exp(x - maximum). Without columns: -inf and 0.
struct MaxSum {
    float maximum, sum;
};

// The combined state of two parts of a row.
__device__ MaxSum merge(MaxSum a, MaxSum b) {
    const float maximum = fmaxf(a.maximum, b.maximum);
    if (maximum == minus_infinity()) return a;  // -inf minus -inf would be NaN
    return MaxSum{maximum, a.sum * expf(a.maximum - maximum) + b.sum * expf(b.maximum - maximum)};
}

__device__ MaxSum merge_lanes(MaxSum known, int distance) {
    return merge(known, MaxSum{__shfl_xor_sync(0xffffffffu, known.maximum, distance),
                               __shfl_xor_sync(0xffffffffu, known.sum, distance)});
}

// A warp's state of the columns of its lanes, each every `num_threads`-th: for all of its lanes.
__device__ MaxSum warp_max_sum(const float* x, int num_columns, int thread, int num_threads) {
    MaxSum known{minus_infinity(), 0.0f};
    for (int i = thread; i < num_columns; i += num_threads) {
        const float value = x[i];
        if (value > known.maximum) {
            known.sum *= expf(known.maximum - value);
            known.maximum = value;
        }
        known.sum += expf(value - known.maximum);
    }
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) known = merge_lanes(known, distance);
    return known;
}

// rung online: maximum and sum in one pass. Where the maximum grows, what was added so far is scaled down. The second
//   pass computes the exponentials again, which costs less than writing and reading them.
// launch: softmax_online<<<num_rows, 256>>>
__global__ void softmax_online(const float* x, float* out, int num_columns) {
    __shared__ MaxSum parts[WARPS];
    x += static_cast<size_t>(blockIdx.x) * num_columns;
    out += static_cast<size_t>(blockIdx.x) * num_columns;
    MaxSum known = warp_max_sum(x, num_columns, threadIdx.x, THREADS);
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = known;
    __syncthreads();
    known = parts[threadIdx.x % WARPS];
#pragma unroll
    for (int distance = WARPS / 2; distance > 0; distance /= 2) known = merge_lanes(known, distance);
    const float factor = 1.0f / known.sum;
    for (int i = threadIdx.x; i < num_columns; i += THREADS) out[i] = expf(x[i] - known.maximum) * factor;
}

// rung warp: as online, with a warp a row and eight rows a block. No shared memory, no barrier.
// launch: softmax_by_warp<<<(num_rows + 7) / 8, 256>>>
__global__ void softmax_by_warp(const float* x, float* out, int num_rows, int num_columns) {
    const int row = blockIdx.x * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= num_rows) return;
    x += static_cast<size_t>(row) * num_columns;
    out += static_cast<size_t>(row) * num_columns;
    const MaxSum known = warp_max_sum(x, num_columns, lane, WARP);
    const float factor = 1.0f / known.sum;
    for (int i = lane; i < num_columns; i += WARP) out[i] = expf(x[i] - known.maximum) * factor;
}

// rung registers: a block a row again. Up to 8192 columns stay in registers, four a load, all loads under way
//   together. So the row is read once and each exponential computed once. What does not fit is read in every pass, one
//   column a load.
// launch: softmax_in_registers<<<num_rows, 256>>>
__global__ void __launch_bounds__(THREADS) softmax_in_registers(const float* x, float* out, int num_columns) {
    constexpr int STEPS = 8;
    x += static_cast<size_t>(blockIdx.x) * num_columns;
    out += static_cast<size_t>(blockIdx.x) * num_columns;
    // Rows begin at 16 bytes only if whole loads fill a row.
    const int num_packs = num_columns % 4 == 0 ? min(num_columns / 4, STEPS * THREADS) : 0;
    const int rest = 4 * num_packs + threadIdx.x;
    float4 kept[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int i = step * THREADS + threadIdx.x;
        const float nothing = minus_infinity();  // its exponential is 0
        kept[step] = i < num_packs ? reinterpret_cast<const float4*>(x)[i]
                                   : make_float4(nothing, nothing, nothing, nothing);
    }
    float maximum = minus_infinity();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const float4 pack = kept[step];
        maximum = fmaxf(maximum, fmaxf(fmaxf(pack.x, pack.y), fmaxf(pack.z, pack.w)));
    }
    for (int i = rest; i < num_columns; i += THREADS) maximum = fmaxf(maximum, x[i]);
    maximum = shuffle_max(maximum);
    float sum = 0.0f;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        if (step * THREADS >= num_packs) break;  // short rows have no later steps
        float4& pack = kept[step];
        pack = make_float4(expf(pack.x - maximum), expf(pack.y - maximum), expf(pack.z - maximum),
                           expf(pack.w - maximum));
        sum += pack.x + pack.y + (pack.z + pack.w);
    }
    for (int i = rest; i < num_columns; i += THREADS) sum += expf(x[i] - maximum);
    const float factor = 1.0f / shuffle_sum(sum);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int i = step * THREADS + threadIdx.x;
        const float4 pack = kept[step];
        if (i < num_packs) {
            reinterpret_cast<float4*>(out)[i] =
                make_float4(pack.x * factor, pack.y * factor, pack.z * factor, pack.w * factor);
        }
    }
    for (int i = rest; i < num_columns; i += THREADS) out[i] = expf(x[i] - maximum) * factor;
}

// rung llmcli: llmcli's own kernel, online and in registers: a warp, or a block of up to 1024 threads, as the row's
//   width asks. Its stores stream through L2, as nobody reads all probabilities at once.
// launch: llmcli
