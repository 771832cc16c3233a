// decode_mlp: hidden += down @ (silu(gate @ n) * (up @ n)), n = RMSNorm of hidden, for one token  Source: HF LlamaMLP
// Shapes:  hidden, norm_weight [hidden_size] f32, hidden in place; gate, up [intermediate_size, hidden_size] and down
//          [hidden_size, intermediate_size] f16; the same weights as codes u8, (code - 128) * scale, scales f32, one a
//          row; both sizes in multiples of 16
// Problem: decode_mlp
// Sizes:   hidden_size 2048; intermediate_size 8192
// Sizes:   hidden_size 4096; intermediate_size 14336
// Check:   hidden_size 48, 208; intermediate_size 176, 1040
// Check:   hidden_size 2096; intermediate_size 4240
// Claim:   packed < separate: one load brings eight weights
// Claim:   fused < packed: three launches where there were six, and results stay in registers between them
// Claim:   norm_fused < fused: each warp sees all of x anyway, and another launch is gone
// Claim:   int8 < norm_fused: half the bytes
// Claim:   overlapping < int8: weights of the next product are under way while the last blocks of this one end
// Claim:   llmcli < overlapping: rings of copies keep memory busy, and tensor cores multiply the codes
// Note:    The second half of a layer of Llama-3.2-1B and of Llama-3-8B: most of its weights. decode_attention is the
//          first half. One token takes so little time that what lies between two launches counts. Rungs with halves
//          read twice the least bytes.
#include <cuda_fp16.h>

#include "common/launch.cuh"

constexpr int WARP = 32;
constexpr int NUM_WARPS = 8;  // of a block, each with a row
constexpr int PACK = 8;       // halves in 16 bytes

__device__ float sum_over_warp(float value) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    return value;
}

__device__ int row_of_warp() { return blockIdx.x * NUM_WARPS + threadIdx.x / WARP; }

__device__ float silu(float gate) { return gate / (1.0f + expf(-gate)); }

// A lane's part of eight products.
__device__ float dot_pack(const uint4& weights, const float (&x)[PACK]) {
    const half2* pairs = reinterpret_cast<const half2*>(&weights);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PACK / 2; ++i) {
        const float2 pair = __half22float2(pairs[i]);
        sum += pair.x * x[2 * i] + pair.y * x[2 * i + 1];
    }
    return sum;
}

__device__ void load_pack(const float* x, int pack, float (&values)[PACK]) {
    const float4 low = reinterpret_cast<const float4*>(x)[2 * pack];
    const float4 high = reinterpret_cast<const float4*>(x)[2 * pack + 1];
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
}

// A row times x, by a warp; all lanes get the sum.
template <bool IS_PACKED>
__device__ float dot(const half* weights, const float* x, int num_columns) {
    const int lane = threadIdx.x % WARP;
    float sum = 0.0f;
    if (IS_PACKED) {
        for (int pack = lane; pack < num_columns / PACK; pack += WARP) {
            float values[PACK];
            load_pack(x, pack, values);
            sum += dot_pack(reinterpret_cast<const uint4*>(weights)[pack], values);
        }
    } else {
        for (int i = lane; i < num_columns; i += WARP) sum += __half2float(weights[i]) * x[i];
    }
    return sum_over_warp(sum);
}

template <bool IS_PACKED>
__device__ void multiply(const half* matrix, const float* x, float* out, int num_rows, int num_columns) {
    const int row = row_of_warp();
    if (row >= num_rows) return;
    const float sum = dot<IS_PACKED>(matrix + size_t(row) * num_columns, x, num_columns);
    if (threadIdx.x % WARP == 0) out[row] = sum;
}

// The steps one by one.
__global__ void norm_of_hidden(const float* hidden, const float* norm_weight, float* normed, int hidden_size,
                               float eps) {
    __shared__ float sums[NUM_WARPS];
    float sum = 0.0f;
    for (int i = threadIdx.x; i < hidden_size; i += blockDim.x) sum += hidden[i] * hidden[i];
    sum = sum_over_warp(sum);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int warp = 0; warp < NUM_WARPS; ++warp) sum += sums[warp];
    const float inverse = rsqrtf(sum / hidden_size + eps);
    for (int i = threadIdx.x; i < hidden_size; i += blockDim.x) normed[i] = norm_weight[i] * hidden[i] * inverse;
}

template <bool IS_PACKED>
__global__ void gate_of(const half* gate, const float* normed, float* gate_out, int intermediate_size,
                        int hidden_size) {
    multiply<IS_PACKED>(gate, normed, gate_out, intermediate_size, hidden_size);
}

template <bool IS_PACKED>
__global__ void up_of(const half* up, const float* normed, float* up_out, int intermediate_size, int hidden_size) {
    multiply<IS_PACKED>(up, normed, up_out, intermediate_size, hidden_size);
}

__global__ void swiglu_of(const float* gate_out, const float* up_out, float* gated, int intermediate_size) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < intermediate_size) gated[i] = silu(gate_out[i]) * up_out[i];
}

template <bool IS_PACKED>
__global__ void down_of(const half* down, const float* gated, float* added, int intermediate_size, int hidden_size) {
    multiply<IS_PACKED>(down, gated, added, hidden_size, intermediate_size);
}

__global__ void add_to_hidden(const float* added, float* hidden, int hidden_size) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < hidden_size) hidden[i] += added[i];
}

// rung separate: a kernel for every operation. The products read one half at a time, a warp a row.
// launch: norm_of_hidden<<<1, 256>>>
// launch: gate_of<false><<<(intermediate_size + 7) / 8, 256>>>
// launch: up_of<false><<<(intermediate_size + 7) / 8, 256>>>
// launch: swiglu_of<<<(intermediate_size + 255) / 256, 256>>>
// launch: down_of<false><<<(hidden_size + 7) / 8, 256>>>
// launch: add_to_hidden<<<(hidden_size + 255) / 256, 256>>>

// rung packed: the same kernels, with eight weights a load.
// launch: norm_of_hidden<<<1, 256>>>
// launch: gate_of<true><<<(intermediate_size + 7) / 8, 256>>>
// launch: up_of<true><<<(intermediate_size + 7) / 8, 256>>>
// launch: swiglu_of<<<(intermediate_size + 255) / 256, 256>>>
// launch: down_of<true><<<(hidden_size + 7) / 8, 256>>>
// launch: add_to_hidden<<<(hidden_size + 255) / 256, 256>>>

// rung fused: a warp takes the same row of gate and of up, and has all that SwiGLU needs. The product with down adds to
//   hidden by itself.
// launch: norm_of_hidden<<<1, 256>>>
// launch: gate_up<<<(intermediate_size + 7) / 8, 256>>>
// launch: down_and_add<<<(hidden_size + 7) / 8, 256>>>
__global__ void gate_up(const half* gate, const half* up, const float* normed, float* gated, int intermediate_size,
                        int hidden_size) {
    const int row = row_of_warp(), lane = threadIdx.x % WARP;
    if (row >= intermediate_size) return;
    const uint4* gates = reinterpret_cast<const uint4*>(gate + size_t(row) * hidden_size);
    const uint4* ups = reinterpret_cast<const uint4*>(up + size_t(row) * hidden_size);
    float gate_sum = 0.0f, up_sum = 0.0f;
    for (int pack = lane; pack < hidden_size / PACK; pack += WARP) {
        float values[PACK];
        load_pack(normed, pack, values);
        gate_sum += dot_pack(gates[pack], values);
        up_sum += dot_pack(ups[pack], values);
    }
    gate_sum = sum_over_warp(gate_sum), up_sum = sum_over_warp(up_sum);
    if (lane == 0) gated[row] = silu(gate_sum) * up_sum;
}

__global__ void down_and_add(const half* down, const float* gated, float* hidden, int intermediate_size,
                             int hidden_size) {
    const int row = row_of_warp();
    if (row >= hidden_size) return;
    const float sum = dot<true>(down + size_t(row) * intermediate_size, gated, intermediate_size);
    if (threadIdx.x % WARP == 0) hidden[row] += sum;
}

// rung norm_fused: no kernel for the norm. A warp adds up the squares of x while it multiplies, and divides at the end:
//   the root is the same for all columns.
// launch: norm_gate_up<<<(intermediate_size + 7) / 8, 256>>>
// launch: down_and_add<<<(hidden_size + 7) / 8, 256>>>
__global__ void norm_gate_up(const half* gate, const half* up, const float* hidden, const float* norm_weight,
                             float* gated, int intermediate_size, int hidden_size, float eps) {
    const int row = row_of_warp(), lane = threadIdx.x % WARP;
    if (row >= intermediate_size) return;
    const uint4* gates = reinterpret_cast<const uint4*>(gate + size_t(row) * hidden_size);
    const uint4* ups = reinterpret_cast<const uint4*>(up + size_t(row) * hidden_size);
    float gate_sum = 0.0f, up_sum = 0.0f, squares = 0.0f;
    for (int pack = lane; pack < hidden_size / PACK; pack += WARP) {
        float values[PACK], factors[PACK];
        load_pack(hidden, pack, values);
        load_pack(norm_weight, pack, factors);
#pragma unroll
        for (int i = 0; i < PACK; ++i) {
            squares += values[i] * values[i];
            values[i] *= factors[i];
        }
        gate_sum += dot_pack(gates[pack], values);
        up_sum += dot_pack(ups[pack], values);
    }
    const float inverse = rsqrtf(sum_over_warp(squares) / hidden_size + eps);
    gate_sum = sum_over_warp(gate_sum) * inverse, up_sum = sum_over_warp(up_sum) * inverse;
    if (lane == 0) gated[row] = silu(gate_sum) * up_sum;
}

// Four codes less 128 times four numbers: a byte below 0x4b0000 is a float of 2^23 + code.
__device__ float dot_word(unsigned word, const float4& x) {
    constexpr float ZERO = 8388608.0f + 128.0f;
    return (__uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440)) - ZERO) * x.x +
           (__uint_as_float(__byte_perm(word, 0x4b000000u, 0x7441)) - ZERO) * x.y +
           (__uint_as_float(__byte_perm(word, 0x4b000000u, 0x7442)) - ZERO) * x.z +
           (__uint_as_float(__byte_perm(word, 0x4b000000u, 0x7443)) - ZERO) * x.w;
}

// NUM_ROWS rows of codes times x, or times x * norm_weight, and then also the sum of the squares of x. The first loads
// of codes in a lane run while it waits for the previous kernel, which writes x and no codes.
template <int NUM_ROWS>
__device__ void dot_codes(const unsigned char* const (&rows)[NUM_ROWS], const float* x, const float* norm_weight,
                          int num_columns, float (&sums)[NUM_ROWS], float& squares) {
    constexpr int AHEAD = 8 / NUM_ROWS;
    const int lane = threadIdx.x % WARP, num_packs = num_columns / 16;
    const auto add_pack = [&](const uint4(&packs)[NUM_ROWS], int pack) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            float4 values = reinterpret_cast<const float4*>(x)[4 * pack + w];
            if (norm_weight != nullptr) {
                const float4 factors = reinterpret_cast<const float4*>(norm_weight)[4 * pack + w];
                squares += values.x * values.x + values.y * values.y + values.z * values.z + values.w * values.w;
                values.x *= factors.x, values.y *= factors.y, values.z *= factors.z, values.w *= factors.w;
            }
#pragma unroll
            for (int r = 0; r < NUM_ROWS; ++r) {
                const uint4& own = packs[r];
                sums[r] += dot_word(w == 0 ? own.x : w == 1 ? own.y : w == 2 ? own.z : own.w, values);
            }
        }
    };
    uint4 ahead[AHEAD][NUM_ROWS];
#pragma unroll
    for (int step = 0; step < AHEAD; ++step) {
        const int pack = min(lane + step * WARP, num_packs - 1);
#pragma unroll
        for (int r = 0; r < NUM_ROWS; ++r) ahead[step][r] = reinterpret_cast<const uint4*>(rows[r])[pack];
    }
    grid_dependency_wait();
#pragma unroll
    for (int step = 0; step < AHEAD; ++step) {
        if (lane + step * WARP < num_packs) add_pack(ahead[step], lane + step * WARP);
    }
    for (int pack = lane + AHEAD * WARP; pack < num_packs; pack += WARP) {
        uint4 packs[NUM_ROWS];
#pragma unroll
        for (int r = 0; r < NUM_ROWS; ++r) packs[r] = reinterpret_cast<const uint4*>(rows[r])[pack];
        add_pack(packs, pack);
    }
}

// rung int8: codes instead of halves, 16 a load.
// launch: norm_gate_up_codes<<<(intermediate_size + 7) / 8, 256>>>
// launch: down_codes_and_add<<<(hidden_size + 7) / 8, 256>>>
__global__ void norm_gate_up_codes(const unsigned char* gate_codes, const unsigned char* up_codes,
                                   const float* gate_scales, const float* up_scales, const float* hidden,
                                   const float* norm_weight, float* gated, int intermediate_size, int hidden_size,
                                   float eps) {
    grid_dependency_launch();
    const int row = row_of_warp();
    if (row >= intermediate_size) return;
    const size_t begin = size_t(row) * hidden_size;
    const unsigned char* const rows[2] = {gate_codes + begin, up_codes + begin};
    float sums[2] = {}, squares = 0.0f;
    dot_codes(rows, hidden, norm_weight, hidden_size, sums, squares);
    const float inverse = rsqrtf(sum_over_warp(squares) / hidden_size + eps);
    const float gate = sum_over_warp(sums[0]) * inverse * gate_scales[row];
    const float up = sum_over_warp(sums[1]) * inverse * up_scales[row];
    if (threadIdx.x % WARP == 0) gated[row] = silu(gate) * up;
}

__global__ void down_codes_and_add(const unsigned char* down_codes, const float* down_scales, const float* gated,
                                   float* hidden, int intermediate_size, int hidden_size) {
    grid_dependency_launch();
    const int row = row_of_warp();
    if (row >= hidden_size) return;
    const unsigned char* const rows[1] = {down_codes + size_t(row) * intermediate_size};
    float sums[1] = {}, squares = 0.0f;
    dot_codes(rows, gated, nullptr, intermediate_size, sums, squares);
    const float sum = sum_over_warp(sums[0]);
    if (threadIdx.x % WARP == 0) hidden[row] += sum * down_scales[row];
}

// rung overlapping: the same kernels. Each may start before the one in front has ended, and then asks for its first
//   codes.
// launch: norm_gate_up_codes<<<(intermediate_size + 7) / 8, 256>>> overlapping
// launch: down_codes_and_add<<<(hidden_size + 7) / 8, 256>>> overlapping

// rung llmcli: what a layer of the engine ends with: two products over tiles, one with norm and SwiGLU, one that adds.
// launch: llmcli
