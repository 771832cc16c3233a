// gemm_int8: out[t,r] = sum_k x[t,k] * (codes[r,k] - zeros[r]) * scales[r], for many tokens  Source: fastllm, gemm_int8
// Shapes:  x [num_tokens, num_inputs] f32, x_half the same as f16; codes [num_rows, num_inputs] u8; zeros u8 and scales
//          f32 [num_rows]; out [num_tokens, num_rows] f32; num_inputs is a multiple of 8
// Problem: int8_product
// Sizes:   num_tokens 16, 64, 512, 2048; num_rows 4096; num_inputs 4096
// Check:   num_tokens 1, 37; num_rows 53; num_inputs 40
// Check:   num_tokens 70; num_rows 100; num_inputs 264
// Claim:   padded < fastllm: threads that read together find their numbers in different banks
// Claim:   vectors < padded: four numbers come in one load, and nothing is asked of tiles that end in zeros
// Claim:   tensor_cores < vectors: codes are exact in half, so tensor cores may multiply them
// Claim:   llmcli < tensor_cores: codes stay codes until they are in registers, and weights and tokens are copied ahead
// Note:    Eight-bit weights save bytes, not operations: a product of many tokens is bound by arithmetic, and a kernel
//          without tensor cores cannot come near one with them, however few bytes it reads.

#include "common/matrix.cuh"

constexpr int TILE = 32;  // tokens, rows and inputs of a block of one warp

// The article's kernel, and with another PITCH the rung padded. A thread has 8 tokens by 4 rows. What is kept of its
// faults: each tile has a barrier of its own, there is one after every four inputs, the end of a row is checked at
// every number (so that some compilers keep some_x and some_codes in memory), and zero points are read repeatedly.
// One fault is fixed: it read zero points beyond the last row.
template <int PITCH>
__global__ void base_gemm(const float* x, const unsigned char* codes, const float* scales, const unsigned char* zeros,
                          float* out, int num_tokens, int num_rows, int num_inputs) {
    __shared__ float x_tile[TILE * PITCH], code_tile[TILE * PITCH];
    const int first_token = blockIdx.x * TILE, first_row = blockIdx.y * TILE;
    const int token = threadIdx.x / 8 * 8, row = threadIdx.x % 8 * 4;
    float sums[32] = {};
    for (int first = 0; first < num_inputs; first += TILE) {
        const int input = first + threadIdx.x;
#pragma unroll 8
        for (int i = 0; i < TILE; ++i) {
            const bool exists = first_token + i < num_tokens && input < num_inputs;
            const size_t place = static_cast<size_t>(first_token + i) * num_inputs + input;
            x_tile[i * PITCH + threadIdx.x] = exists ? x[place] : 0.0f;
        }
        __syncthreads();
#pragma unroll 8
        for (int i = 0; i < TILE; ++i) {
            const bool exists = first_row + i < num_rows && input < num_inputs;
            const size_t place = static_cast<size_t>(first_row + i) * num_inputs + input;
            code_tile[i * PITCH + threadIdx.x] = exists ? codes[place] : 0.0f;
        }
        __syncthreads();
        for (int four = 0; four < TILE; four += 4) {
            float some_x[32] = {}, some_codes[16] = {};
            for (int i = 0; i < 8; ++i) {
                for (int k = four; k < four + 4 && first + k < num_inputs; ++k) {
                    some_x[i * 4 + k - four] = x_tile[(token + i) * PITCH + k];
                }
            }
            for (int j = 0; j < 4; ++j) {
                const float zero = first_row + row + j < num_rows ? zeros[first_row + row + j] : 0.0f;
                for (int k = four; k < four + 4 && first + k < num_inputs; ++k) {
                    some_codes[j * 4 + k - four] = code_tile[(row + j) * PITCH + k] - zero;
                }
            }
            for (int i = 0; i < 8; ++i) {
                for (int j = 0; j < 4; ++j) {
                    for (int k = 0; k < 4; ++k) sums[i * 4 + j] += some_x[i * 4 + k] * some_codes[j * 4 + k];
                }
            }
            __syncthreads();
        }
        __syncthreads();
    }
    for (int i = 0; i < 8; ++i) {
        for (int j = 0; j < 4; ++j) {
            const int t = first_token + token + i, r = first_row + row + j;
            if (t < num_tokens && r < num_rows) {
                out[static_cast<size_t>(t) * num_rows + r] = sums[i * 4 + j] * scales[r];
            }
        }
    }
}

// rung fastllm: 32 x 32 results a block of one warp, 8 x 4 a thread; codes become floats in shared memory. Rows of a
//   tile are 32 floats long, so lanes that read different rows all read the same bank.
// launch: base_gemm<32><<<dim3((num_tokens + 31) / 32, (num_rows + 31) / 32), 32>>>

// rung padded: rows of a tile are one float longer.
// launch: base_gemm<33><<<dim3((num_tokens + 31) / 32, (num_rows + 31) / 32), 32>>>

constexpr int PITCH = TILE + 4;  // rows stay aligned to four floats, and 8 of them begin in different banks

// rung vectors: shared memory is read by four floats; zero points are taken away when a tile is filled; a thread's
//   tokens are 4 apart and its rows 8, so that lanes side by side read rows side by side. One barrier for both tiles.
// launch: by_vectors<<<dim3((num_tokens + 31) / 32, (num_rows + 31) / 32), 32>>>
__global__ void __launch_bounds__(32) by_vectors(const float* x, const unsigned char* codes, const float* scales,
                                                 const unsigned char* zeros, float* out, int num_tokens, int num_rows,
                                                 int num_inputs) {
    __shared__ __align__(16) float x_tile[TILE][PITCH];
    __shared__ __align__(16) float weight_tile[TILE][PITCH];
    const int first_token = blockIdx.x * TILE, first_row = blockIdx.y * TILE;
    const int token = threadIdx.x / 8, row = threadIdx.x % 8;
    const int lane_row = first_row + threadIdx.x;
    const float lane_zero = lane_row < num_rows ? zeros[lane_row] : 0.0f;
    float sums[8][4] = {};
    for (int first = 0; first < num_inputs; first += TILE) {
        const int input = first + threadIdx.x;
#pragma unroll 8
        for (int i = 0; i < TILE; ++i) {
            const int t = first_token + i, r = first_row + i;
            const bool is_input = input < num_inputs;
            const float zero = __shfl_sync(0xffffffffu, lane_zero, i);
            x_tile[i][threadIdx.x] =
                t < num_tokens && is_input ? x[static_cast<size_t>(t) * num_inputs + input] : 0.0f;
            weight_tile[i][threadIdx.x] =
                r < num_rows && is_input ? codes[static_cast<size_t>(r) * num_inputs + input] - zero : 0.0f;
        }
        __syncthreads();
#pragma unroll 2
        for (int k = 0; k < TILE; k += 4) {
            float4 left[8], right[4];
#pragma unroll
            for (int i = 0; i < 8; ++i) left[i] = *reinterpret_cast<const float4*>(&x_tile[token + 4 * i][k]);
#pragma unroll
            for (int j = 0; j < 4; ++j) right[j] = *reinterpret_cast<const float4*>(&weight_tile[row + 8 * j][k]);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    sums[i][j] += left[i].x * right[j].x;
                    sums[i][j] += left[i].y * right[j].y;
                    sums[i][j] += left[i].z * right[j].z;
                    sums[i][j] += left[i].w * right[j].w;
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int t = first_token + token + 4 * i, r = first_row + row + 8 * j;
            if (t < num_tokens && r < num_rows) out[static_cast<size_t>(t) * num_rows + r] = sums[i][j] * scales[r];
        }
    }
}

constexpr int MMA_TILE = 64;        // tokens and rows of a block of four warps, 32 x 32 a warp
constexpr int MMA_INPUTS = 32;      // of a step
constexpr int HALF_PITCH = MMA_INPUTS + 8;  // 8 rows begin in 8 different groups of banks

// Eight codes less their zero point, as halves: exact.
__device__ __forceinline__ uint4 widen_eight(uint2 eight, float zero) {
    const unsigned words[2] = {eight.x, eight.y};
    unsigned pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const unsigned two = words[i / 2] >> i % 2 * 16;
        pairs[i] = pack_pair<__half>((two & 255u) - zero, (two >> 8 & 255u) - zero);
    }
    uint4 halves;
    halves.x = pairs[0], halves.y = pairs[1], halves.z = pairs[2], halves.w = pairs[3];
    return halves;
}

// rung tensor_cores: four warps share 64 x 64 results. Codes are widened to halves on their way into shared memory,
//   tokens come as halves, tensor cores multiply and sum in float.
// launch: by_tensor_cores<<<dim3((num_tokens + 63) / 64, (num_rows + 63) / 64), 128>>>
__global__ void __launch_bounds__(128) by_tensor_cores(const __half* x_half, const unsigned char* codes,
                                                       const float* scales, const unsigned char* zeros, float* out,
                                                       int num_tokens, int num_rows, int num_inputs) {
    __shared__ __align__(16) __half x_tile[MMA_TILE][HALF_PITCH];
    __shared__ __align__(16) __half weight_tile[MMA_TILE][HALF_PITCH];
    const int first_token = blockIdx.x * MMA_TILE, first_row = blockIdx.y * MMA_TILE;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int token = warp / 2 * 32, row = warp % 2 * 32;
    float sums[2][4][4] = {};
    for (int first = 0; first < num_inputs; first += MMA_INPUTS) {
#pragma unroll
        for (int i = threadIdx.x; i < MMA_TILE * MMA_INPUTS / 8; i += 128) {
            const int line = i / (MMA_INPUTS / 8), input = i % (MMA_INPUTS / 8) * 8;
            const int t = first_token + line, r = first_row + line;
            uint4 eight = {}, weights = {};
            if (t < num_tokens && first + input < num_inputs) {
                eight = *reinterpret_cast<const uint4*>(x_half + static_cast<size_t>(t) * num_inputs + first + input);
            }
            if (r < num_rows && first + input < num_inputs) {
                const unsigned char* place = codes + static_cast<size_t>(r) * num_inputs + first + input;
                weights = widen_eight(*reinterpret_cast<const uint2*>(place), zeros[r]);
            }
            *reinterpret_cast<uint4*>(&x_tile[line][input]) = eight;
            *reinterpret_cast<uint4*>(&weight_tile[line][input]) = weights;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < MMA_INPUTS; k += 16) {
            unsigned left[2][4], right[2][4];
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                load_matrices(left[m], &x_tile[token + 16 * m + lane % 16][k + lane / 16 * 8]);
                // Rows of weights are the columns of the product: nothing must be transposed.
                load_matrices(right[m], &weight_tile[row + 16 * m + lane % 16][k + lane / 16 * 8]);
            }
#pragma unroll
            for (int m = 0; m < 2; ++m) {
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    mma<__half>(sums[m][n], left[m][0], left[m][1], left[m][2], left[m][3], right[n / 2][n % 2],
                                right[n / 2][n % 2 + 2]);
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int t = first_token + token + 16 * m + i / 2 * 8 + lane / 4;
                const int r = first_row + row + 8 * n + lane % 4 * 2 + i % 2;
                if (t < num_tokens && r < num_rows) {
                    out[static_cast<size_t>(t) * num_rows + r] = sums[m][n][i] * scales[r];
                }
            }
        }
    }
}

// rung llmcli: the engine's product, from the codes: gemm_narrow for up to 64 tokens, gemm_wide for more.
// launch: llmcli
