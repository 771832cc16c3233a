// rmsnorm: out[t,i] = weight[i] * x[t,i] / sqrt(mean_j(x[t,j]^2) + eps), in four steps  Source: KuiperLLama, lesson 6
// Shapes:  x, out [num_rows, num_columns] f32; weight [num_columns] f32
// Problem: rms_norm
// Sizes:   num_rows 1; num_columns 512, 1024, 2048, 4096, 8192, 16384
// Check:   num_rows 1, 3; num_columns 4, 100, 1000, 4096
// Claim:   one_warp < four_warps_alike at num_columns 4096: three of the four warps repeat the work of the first
// Claim:   block < one_warp at num_columns 4096: 128 threads share a row that 32 had
// Claim:   block < one_warp at num_columns 512: a short row gives 128 threads four columns each
// Claim:   packed < block at num_columns 16384: one load brings 16 bytes instead of 4
// Note:    One row is what a model has in every step of decoding. It never fills a card: see blocks and occupancy.

constexpr int WARP = 32;

__device__ float sum_over_warp(float value) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    return value;
}

// The sum over a block's threads, for all of them.
__device__ float sum_over_block(float value) {
    __shared__ float sums[WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    value = sum_over_warp(value);
    if (lane == 0) sums[warp] = value;
    __syncthreads();
    return sum_over_warp(lane < blockDim.x / WARP ? sums[lane] : 0.0f);
}

// Threads of the same lane do the same work: each warp sums the whole row, and writes the whole row.
__global__ void by_lane(const float* x, const float* weight, float* out, int num_columns, float eps) {
    x += static_cast<size_t>(blockIdx.x) * num_columns;
    out += static_cast<size_t>(blockIdx.x) * num_columns;
    const int lane = threadIdx.x % WARP;
    float sum = 0.0f;
    for (int i = lane; i < num_columns; i += WARP) sum += x[i] * x[i];
    const float inverse = rsqrtf(sum_over_warp(sum) / num_columns + eps);
    for (int i = lane; i < num_columns; i += WARP) out[i] = weight[i] * x[i] * inverse;
}

// rung four_warps_alike: a block of 128 threads that takes threadIdx.x % 32 for the place of a thread in the row. Four
//   threads have the same place, so four warps read, sum and write the same.
// launch: by_lane<<<num_rows, 128>>>

// rung one_warp: the same kernel with 32 threads. Nothing is done twice.
// launch: by_lane<<<num_rows, 32>>>

// rung block: 128 threads share the row. Each warp sums its part, and the first warp's lanes sum the warps' sums.
// launch: by_thread<<<num_rows, 128>>>
__global__ void by_thread(const float* x, const float* weight, float* out, int num_columns, float eps) {
    x += static_cast<size_t>(blockIdx.x) * num_columns;
    out += static_cast<size_t>(blockIdx.x) * num_columns;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < num_columns; i += blockDim.x) sum += x[i] * x[i];
    const float inverse = rsqrtf(sum_over_block(sum) / num_columns + eps);
    for (int i = threadIdx.x; i < num_columns; i += blockDim.x) out[i] = weight[i] * x[i] * inverse;
}

// rung packed: four floats in one load of 16 bytes; what is left of a row is read one by one.
// launch: by_four<<<num_rows, 128>>>
__global__ void by_four(const float* x, const float* weight, float* out, int num_columns, float eps) {
    x += static_cast<size_t>(blockIdx.x) * num_columns;
    out += static_cast<size_t>(blockIdx.x) * num_columns;
    const int num_packs = num_columns % 4 == 0 ? num_columns / 4 : 0;  // rows must begin at 16 bytes
    const float4* packs = reinterpret_cast<const float4*>(x);
    float sum = 0.0f;
    for (int i = threadIdx.x; i < num_packs; i += blockDim.x) {
        const float4 pack = packs[i];
        sum += pack.x * pack.x + pack.y * pack.y + pack.z * pack.z + pack.w * pack.w;
    }
    for (int i = 4 * num_packs + threadIdx.x; i < num_columns; i += blockDim.x) sum += x[i] * x[i];
    const float inverse = rsqrtf(sum_over_block(sum) / num_columns + eps);
    for (int i = threadIdx.x; i < num_packs; i += blockDim.x) {
        const float4 pack = packs[i], factor = reinterpret_cast<const float4*>(weight)[i];
        reinterpret_cast<float4*>(out)[i] = make_float4(factor.x * pack.x * inverse, factor.y * pack.y * inverse,
                                                        factor.z * pack.z * inverse, factor.w * pack.w * inverse);
    }
    for (int i = 4 * num_packs + threadIdx.x; i < num_columns; i += blockDim.x) out[i] = weight[i] * x[i] * inverse;
}

// rung llmcli: llmcli's own kernel. All loads stand before the arithmetic, so that they are under way together; it also
//   finds the largest value of the row, which a 16-bit product needs.
// launch: llmcli
