// layernorm: out[t,i] = (x[t,i] - mean) / sqrt(variance + eps) * weight[i] + bias[i]  Source: fastllm's CUDA kernels;
//          Welford's and Chan's sums, Technometrics 4 (1962) and STAN-CS-79-773
// Shapes:  x, out [num_rows, num_columns] f32; weight, bias [num_columns] f32
// Problem: layer_norm
// Sizes:   num_rows 1, 2048; num_columns 768, 4096
// Check:   num_rows 1, 5; num_columns 3, 100, 1001, 4096, 9000
// Claim:   inverse < tree at num_rows 2048; num_columns 4096: one division a row instead of one a column
// Claim:   shuffles < inverse at num_rows 2048; num_columns 768: one barrier instead of nine
// Claim:   packed < shuffles at num_rows 2048; num_columns 4096: one load brings 16 bytes instead of 4
// Claim:   shuffles < welford at num_rows 2048; num_columns 4096: each step of Welford's divides, and waits for the one
//          before
// Claim:   registers < packed at num_rows 2048; num_columns 4096: the row is read once, and its variance is exact
// Note:    A variance from the sum of squares loses the bits that the mean's square takes: with a mean far from zero
//          it is noise. welford and registers have no such loss.

constexpr int WARP = 32, THREADS = 256, WARPS = THREADS / WARP;

// The sum of a block's values, for all threads. Its first barrier lets it be called again.
__device__ float sum_over_block(float value) {
    __shared__ float parts[WARPS];
    __syncthreads();
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

// Two sums at once, for all threads. Call it once.
__device__ float2 two_sums_over_block(float2 value) {
    __shared__ float2 parts[WARPS];
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        value.x += __shfl_xor_sync(0xffffffffu, value.x, distance);
        value.y += __shfl_xor_sync(0xffffffffu, value.y, distance);
    }
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = value;
    __syncthreads();
    value = parts[threadIdx.x % WARPS];
#pragma unroll
    for (int distance = WARPS / 2; distance > 0; distance /= 2) {
        value.x += __shfl_xor_sync(0xffffffffu, value.x, distance);
        value.y += __shfl_xor_sync(0xffffffffu, value.y, distance);
    }
    return value;
}

// The two sums by a tree in shared memory, for all threads. Call it once.
__device__ float2 two_sums_by_tree(float sum, float square_sum) {
    __shared__ float sums[THREADS], squares[THREADS];
    const int thread = threadIdx.x;
    sums[thread] = sum;
    squares[thread] = square_sum;
    __syncthreads();
    for (int s = THREADS / 2; s > 0; s /= 2) {
        if (thread < s) {
            sums[thread] += sums[thread + s];
            squares[thread] += squares[thread + s];
        }
        __syncthreads();
    }
    return make_float2(sums[0], squares[0]);
}

// mean(x^2) - mean(x)^2; rounding may take it below 0.
__device__ float variance_of(float2 sums, float mean, int num_columns) {
    return fmaxf(sums.y / num_columns - mean * mean, 0.0f);
}

// rung tree: fastllm's way. A thread's sum and sum of squares, both by a tree; then a division for each column.
// launch: norm_by_tree<<<num_rows, 256>>>
__global__ void norm_by_tree(const float* x, const float* weight, const float* bias, float* out, int num_columns,
                             float eps) {
    x += static_cast<size_t>(blockIdx.x) * num_columns;
    out += static_cast<size_t>(blockIdx.x) * num_columns;
    float sum = 0.0f, squares = 0.0f;
    for (int i = threadIdx.x; i < num_columns; i += THREADS) {
        sum += x[i];
        squares += x[i] * x[i];
    }
    const float2 sums = two_sums_by_tree(sum, squares);
    const float mean = sums.x / num_columns;
    const float deviation = sqrtf(variance_of(sums, mean, num_columns) + eps);
    for (int i = threadIdx.x; i < num_columns; i += THREADS) out[i] = (x[i] - mean) / deviation * weight[i] + bias[i];
}

// rung inverse: the columns are multiplied by one inverse.
// launch: norm_by_inverse<<<num_rows, 256>>>
__global__ void norm_by_inverse(const float* x, const float* weight, const float* bias, float* out, int num_columns,
                                float eps) {
    x += static_cast<size_t>(blockIdx.x) * num_columns;
    out += static_cast<size_t>(blockIdx.x) * num_columns;
    float sum = 0.0f, squares = 0.0f;
    for (int i = threadIdx.x; i < num_columns; i += THREADS) {
        sum += x[i];
        squares += x[i] * x[i];
    }
    const float2 sums = two_sums_by_tree(sum, squares);
    const float mean = sums.x / num_columns;
    const float inverse = rsqrtf(variance_of(sums, mean, num_columns) + eps);
    for (int i = threadIdx.x; i < num_columns; i += THREADS) out[i] = (x[i] - mean) * inverse * weight[i] + bias[i];
}

// rung shuffles: both sums go from lane to lane together.
// launch: norm_by_shuffles<<<num_rows, 256>>>
__global__ void norm_by_shuffles(const float* x, const float* weight, const float* bias, float* out, int num_columns,
                                 float eps) {
    x += static_cast<size_t>(blockIdx.x) * num_columns;
    out += static_cast<size_t>(blockIdx.x) * num_columns;
    float2 sums = make_float2(0.0f, 0.0f);
    for (int i = threadIdx.x; i < num_columns; i += THREADS) {
        sums.x += x[i];
        sums.y += x[i] * x[i];
    }
    sums = two_sums_over_block(sums);
    const float mean = sums.x / num_columns;
    const float inverse = rsqrtf(variance_of(sums, mean, num_columns) + eps);
    for (int i = threadIdx.x; i < num_columns; i += THREADS) out[i] = (x[i] - mean) * inverse * weight[i] + bias[i];
}

// How many columns there are, their mean, and the sum of their squared distances from it.
struct Moments {
    float count, mean, squares;
};

__device__ Moments merge_lanes(Moments a, int distance) {
    const Moments b{__shfl_xor_sync(0xffffffffu, a.count, distance), __shfl_xor_sync(0xffffffffu, a.mean, distance),
                    __shfl_xor_sync(0xffffffffu, a.squares, distance)};
    const float count = a.count + b.count;
    if (count == 0.0f) return a;
    const float apart = b.mean - a.mean, share = b.count / count;
    return Moments{count, a.mean + apart * share, a.squares + b.squares + apart * apart * a.count * share};
}

// rung welford: instead of the sums, the mean so far and the squared distances from it: exact in one pass.
// launch: norm_by_welford<<<num_rows, 256>>>
__global__ void norm_by_welford(const float* x, const float* weight, const float* bias, float* out, int num_columns,
                                float eps) {
    __shared__ Moments parts[WARPS];
    x += static_cast<size_t>(blockIdx.x) * num_columns;
    out += static_cast<size_t>(blockIdx.x) * num_columns;
    Moments known{0.0f, 0.0f, 0.0f};
    for (int i = threadIdx.x; i < num_columns; i += THREADS) {
        const float distance = x[i] - known.mean;
        known.count += 1.0f;
        known.mean += distance / known.count;
        known.squares += distance * (x[i] - known.mean);
    }
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) known = merge_lanes(known, distance);
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = known;
    __syncthreads();
    known = parts[threadIdx.x % WARPS];
#pragma unroll
    for (int distance = WARPS / 2; distance > 0; distance /= 2) known = merge_lanes(known, distance);
    const float inverse = rsqrtf(known.squares / num_columns + eps);
    for (int i = threadIdx.x; i < num_columns; i += THREADS) {
        out[i] = (x[i] - known.mean) * inverse * weight[i] + bias[i];
    }
}

__device__ float sum_of(float4 pack) { return pack.x + pack.y + (pack.z + pack.w); }

__device__ float4 squares_around(float4 pack, float mean) {
    const float4 distance = make_float4(pack.x - mean, pack.y - mean, pack.z - mean, pack.w - mean);
    return make_float4(distance.x * distance.x, distance.y * distance.y, distance.z * distance.z,
                       distance.w * distance.w);
}

// Four columns of the result.
__device__ void store_normed(float* out, int i, float4 pack, const float* weight, const float* bias, float mean,
                             float inverse) {
    const float4 factor = reinterpret_cast<const float4*>(weight)[i], term = reinterpret_cast<const float4*>(bias)[i];
    reinterpret_cast<float4*>(out)[i] =
        make_float4((pack.x - mean) * inverse * factor.x + term.x, (pack.y - mean) * inverse * factor.y + term.y,
                    (pack.z - mean) * inverse * factor.z + term.z, (pack.w - mean) * inverse * factor.w + term.w);
}

// rung packed: as shuffles, with four columns a load. Rows begin at 16 bytes only where whole loads fill a row; others
//   go one by one.
// launch: norm_of_packs<<<num_rows, 256>>>
__global__ void norm_of_packs(const float* x, const float* weight, const float* bias, float* out, int num_columns,
                              float eps) {
    x += static_cast<size_t>(blockIdx.x) * num_columns;
    out += static_cast<size_t>(blockIdx.x) * num_columns;
    const int num_packs = num_columns % 4 == 0 ? num_columns / 4 : 0, rest = 4 * num_packs + threadIdx.x;
    float2 sums = make_float2(0.0f, 0.0f);
    for (int i = threadIdx.x; i < num_packs; i += THREADS) {
        const float4 pack = reinterpret_cast<const float4*>(x)[i];
        sums.x += sum_of(pack);
        sums.y += sum_of(squares_around(pack, 0.0f));
    }
    for (int i = rest; i < num_columns; i += THREADS) {
        sums.x += x[i];
        sums.y += x[i] * x[i];
    }
    sums = two_sums_over_block(sums);
    const float mean = sums.x / num_columns;
    const float inverse = rsqrtf(variance_of(sums, mean, num_columns) + eps);
    for (int i = threadIdx.x; i < num_packs; i += THREADS) {
        store_normed(out, i, reinterpret_cast<const float4*>(x)[i], weight, bias, mean, inverse);
    }
    for (int i = rest; i < num_columns; i += THREADS) out[i] = (x[i] - mean) * inverse * weight[i] + bias[i];
}

// rung registers: up to 8192 columns stay in registers, so that the mean can be known before the squares: exact, and
//   the row is read once. What does not fit is read in every pass.
// launch: norm_in_registers<<<num_rows, 256>>>
__global__ void __launch_bounds__(THREADS) norm_in_registers(const float* x, const float* weight, const float* bias,
                                                             float* out, int num_columns, float eps) {
    constexpr int STEPS = 8;
    x += static_cast<size_t>(blockIdx.x) * num_columns;
    out += static_cast<size_t>(blockIdx.x) * num_columns;
    const int num_packs = num_columns % 4 == 0 ? min(num_columns / 4, STEPS * THREADS) : 0;
    const int rest = 4 * num_packs + threadIdx.x;
    float4 kept[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int i = step * THREADS + threadIdx.x;
        kept[step] = i < num_packs ? reinterpret_cast<const float4*>(x)[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    float sum = 0.0f;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) sum += sum_of(kept[step]);
    for (int i = rest; i < num_columns; i += THREADS) sum += x[i];
    const float mean = sum_over_block(sum) / num_columns;
    float squares = 0.0f;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        if (step * THREADS + threadIdx.x < num_packs) squares += sum_of(squares_around(kept[step], mean));
    }
    for (int i = rest; i < num_columns; i += THREADS) squares += (x[i] - mean) * (x[i] - mean);
    const float inverse = rsqrtf(sum_over_block(squares) / num_columns + eps);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int i = step * THREADS + threadIdx.x;
        if (i < num_packs) store_normed(out, i, kept[step], weight, bias, mean, inverse);
    }
    for (int i = rest; i < num_columns; i += THREADS) out[i] = (x[i] - mean) * inverse * weight[i] + bias[i];
}
