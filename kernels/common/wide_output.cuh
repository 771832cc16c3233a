// wide_output: turns the sums of gemm_wide into outputs: scales of tokens, bias, epilogue.
#pragma once

#include "common/matrix.cuh"
#include "common/rows.cuh"
#include "common/tile.cuh"
#include "common/wgmma.cuh"
#include "common/wide_image.cuh"

constexpr int STORE = 0, ADD = 1, SWIGLU = 2;  // epilogues
constexpr int MULTIPLIERS = 8;                 // warps that multiply, a tile each

// down_unit_inputs: of the matrix that takes what SWIGLU writes. repeats: see gemm_wide.cu. num_parts: in which a
// product is computed, each of some spans of inputs.
struct WideShape {
    int num_tokens, num_inputs, num_outputs, num_groups, group_shift, out_stride, epilogue, down_unit_inputs, repeats;
    int num_parts;

    __device__ __forceinline__ int num_tiles() const {
        const int of_tile = epilogue == SWIGLU ? HALF_ROWS : TILE_ROWS;
        return (num_outputs + of_tile - 1) / of_tile;
    }
};

// Lane 4g + t of a warp with these sums has of its tile the rows g and g + 8 of the tokens 8i + 2t and 8i + 2t + 1, as
// wgmma leaves them. `scales` are those of the block's tokens, the first of which is `first_token`. Only the first part
// is biased, or added; the tokens of others lie side by side in `out`.
template <int TOKENS>
__device__ __forceinline__ void write_floats(const float (&sums)[TOKENS / 2], const float* scales,
                                             const float* __restrict__ biases, float* out, const WideShape& shape,
                                             int tile, int first_token, bool is_first_part) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, column = tile * TILE_ROWS + g;
    const bool has_second = column + 8 < shape.num_outputs;
    if (column >= shape.num_outputs) return;
    const bool has_bias = biases != nullptr && is_first_part, adds = shape.epilogue == ADD && is_first_part;
    const float bias[2] = {has_bias ? biases[column] : 0.0f, has_bias ? biases[column + 8] : 0.0f};
    // Tokens from this lane's first one on, and where its result lies.
    const int count = shape.num_tokens - first_token - 2 * t;
    const int stride = is_first_part ? shape.out_stride : shape.num_outputs;
    float* place = out + static_cast<size_t>(first_token + 2 * t) * stride + column;
    const auto write = [&](float* at, float value) {
        if (adds) {
            atomicAdd(at, value);  // nobody else adds there; but no thread waits for the number before
        } else {
            *at = value;
        }
    };
#pragma unroll
    for (int i = 0; i < TOKENS / 8; ++i, place += static_cast<size_t>(8) * stride) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (8 * i + j >= count) continue;
            const float scale = scales[8 * i + 2 * t + j];
            write(place + j * stride, __fmaf_rn(sums[4 * i + j], scale, bias[0]));
            if (has_second) write(place + j * stride + 8, __fmaf_rn(sums[4 * i + 2 + j], scale, bias[1]));
        }
    }
}

// silu(gate) * up as the next product's image: these 64 columns of its inputs are one of its steps, which the block
// leaves in `staging` as wide_image has it, and in `sums`. `largest` learns results too large for fp16 without a scale.
template <int TOKENS>
__device__ __forceinline__ void write_gated(float (&sums)[TOKENS / 2], const float* scales,
                                            const float* __restrict__ biases, unsigned char* staging,
                                            unsigned* largest, const WideShape& shape, int tile, int first_token) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const bool exists = tile * HALF_ROWS + g < shape.num_outputs;  // else a zero
    const float of_gate = biases != nullptr && exists ? biases[tile * TILE_ROWS + g] : 0.0f;
    const float of_up = biases != nullptr && exists ? biases[tile * TILE_ROWS + g + 8] : 0.0f;
    const int count = shape.num_tokens - first_token - 2 * t;  // tokens from this lane's first one on
    float most = 0.0f;
    const auto gated = [&](int i, int j) {
        const float scale = scales[8 * i + 2 * t + j];
        const float gate = __fmaf_rn(sums[4 * i + j], scale, of_gate);
        const float up = __fmaf_rn(sums[4 * i + 2 + j], scale, of_up);
        const float silu = __fdividef(gate, __fadd_rn(1.0f, __expf(-gate)));  // as swiglu.cu has it
        return exists ? __fmul_rn(silu, up) : 0.0f;
    };
    const auto scaled = [&](float value, int i, int j) {
        if (!shape.repeats || 8 * i + j >= count) return value;
        const unsigned of_token = largest[first_token + 8 * i + 2 * t + j];
        return __fmul_rn(value, row_scale_for<__half>(__uint_as_float(of_token)).inverse);
    };
    // The pair of columns 2t and 2t + 1 of token 8i + g, once transposed.
    const bool has_short_units = shape.down_unit_inputs == 32;
    const int piece = 4 * (has_short_units ? warp / 4 : warp % 2) + t, place = has_short_units ? warp % 4 : warp / 2;
    unsigned char* word = staging + g * TOKEN_BYTES + (piece ^ g) * 16 + place * 4;
#pragma unroll
    for (int i = 0; i < TOKENS / 8; ++i) {
        const float first = gated(i, 0), second = gated(i, 1);
        if (8 * i < count) most = fmaxf(most, fabsf(first));
        if (8 * i + 1 < count) most = fmaxf(most, fabsf(second));
        sums[4 * i] = first, sums[4 * i + 1] = second;
        const unsigned pair = pack_pair<__half>(scaled(first, i, 0), scaled(second, i, 1));
        *reinterpret_cast<unsigned*>(word + i * 8 * TOKEN_BYTES) = transpose_matrix(pair);
    }
    if (shape.repeats || !(most > LARGEST_UNSCALED)) return;
#pragma unroll
    for (int i = 0; i < TOKENS / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float magnitude = fabsf(sums[4 * i + j]);
            if (8 * i + j < count && magnitude > LARGEST_UNSCALED) {
                atomicMax(largest + first_token + 8 * i + 2 * t + j, __float_as_uint(magnitude));
            }
        }
    }
}
