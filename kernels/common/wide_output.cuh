// wide_output: turns the sums of gemm_wide and gemm_narrow into outputs: scales of tokens, bias, epilogue.
#pragma once

#include "common/launch.cuh"
#include "common/matrix.cuh"
#include "common/rows.cuh"
#include "common/silu.cuh"
#include "common/tile.cuh"
#include "common/wgmma.cuh"
#include "common/wide_image.cuh"

constexpr int STORE = 0, ADD = 1, SWIGLU = 2;  // epilogues
constexpr int MULTIPLIERS = 8;                 // warps of gemm_wide that multiply, a tile each

// down_unit_inputs: of the matrix that takes what SWIGLU writes. repeats: see gemm_wide.cu. num_parts: in which a
// product is computed, each of some spans of inputs.
struct WideShape {
    int num_tokens, num_inputs, num_outputs, num_groups, group_shift, out_stride, epilogue, down_unit_inputs, repeats;
    int num_parts;
    float power;  // that lifted codes are divided by (wide_weights.cuh)

    __device__ __forceinline__ int num_tiles() const {
        const int of_tile = epilogue == SWIGLU ? HALF_ROWS : TILE_ROWS;
        return (num_outputs + of_tile - 1) / of_tile;
    }
};

// Calls `write` for those of a lane's results that exist (`exists`), by token and half tile. No branch comes between
// two calls, which would serialize them.
template <int TOKENS, typename Write, typename Exists>
__device__ __forceinline__ void write_results(const float (&sums)[TOKENS / 2], const float2* scales,
                                              const float (&bias)[2], float* place, unsigned stride, Write write,
                                              Exists exists) {
#pragma unroll
    for (int i = 0; i < TOKENS / 8; ++i) {
        const float2 scale = scales[4 * i];
        const float results[2][2] = {
            {__fmaf_rn(sums[4 * i], scale.x, bias[0]), __fmaf_rn(sums[4 * i + 2], scale.x, bias[1])},
            {__fmaf_rn(sums[4 * i + 1], scale.y, bias[0]), __fmaf_rn(sums[4 * i + 3], scale.y, bias[1])}};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float* at = place + (8 * i + j) * stride;
            if (exists(8 * i + j, 0)) write(at, results[j][0]);
            if (exists(8 * i + j, 1)) write(at + 8, results[j][1]);
        }
    }
}

// Lane 4g + t of a warp with these sums has the rows g and g + 8 of its tile for the tokens 8i + 2t and 8i + 2t + 1, as
// wgmma leaves them. `scales` are those of the block's tokens, the first of which is `first_token`. Only the first part
// is biased, or added; the tokens of others are contiguous in `out`.
template <int TOKENS>
__device__ __forceinline__ void write_floats(const float (&sums)[TOKENS / 2], const float* scales,
                                             const float* __restrict__ biases, float* out, const WideShape& shape,
                                             int tile, int first_token, bool is_first_part) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, column = tile * TILE_ROWS + g;
    const bool has_second = column + 8 < shape.num_outputs;
    if (column >= shape.num_outputs) return;
    const bool has_bias = biases != nullptr && is_first_part;
    const float bias[2] = {has_bias ? biases[column] : 0.0f, has_bias ? biases[column + 8] : 0.0f};
    // Tokens from this lane's first one on, and where its result lies.
    const int count = shape.num_tokens - first_token - 2 * t;
    const unsigned stride = is_first_part ? shape.out_stride : shape.num_outputs;
    float* place = out + static_cast<size_t>(first_token + 2 * t) * stride + column;
    const float2* of_lane = reinterpret_cast<const float2*>(scales) + t;
    const auto store = [](float* at, float value) { *at = value; };
    // No other thread adds there; but this way no thread waits for the old number.
    const auto add = [](float* at, float value) { atomicAdd(at, value); };
    const auto is_any = [](int, int) { return true; };
    const auto is_there = [&](int token, int half) { return token < count && (half == 0 || has_second); };
    const bool adds = shape.epilogue == ADD && is_first_part;
    if (first_token + TOKENS <= shape.num_tokens && (tile + 1) * TILE_ROWS <= shape.num_outputs) {
        if (adds) {
            write_results<TOKENS>(sums, of_lane, bias, place, stride, add, is_any);
        } else {
            write_results<TOKENS>(sums, of_lane, bias, place, stride, store, is_any);
        }
    } else if (adds) {
        write_results<TOKENS>(sums, of_lane, bias, place, stride, add, is_there);
    } else {
        write_results<TOKENS>(sums, of_lane, bias, place, stride, store, is_there);
    }
}

// Computes silu(gate) * up of a lane's sums, in place, and writes what `scaled` makes of them by token. Returns the
// largest magnitude, also of tokens that do not exist. No branch comes between two results, as above.
template <int TOKENS, typename Scaled>
__device__ __forceinline__ float write_pairs(float (&sums)[TOKENS / 2], const float2* scales, float of_gate,
                                             float of_up, unsigned char* word, Scaled scaled) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < TOKENS / 8; ++i) {
        const float2 of_tokens = scales[4 * i];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float of_token = j == 0 ? of_tokens.x : of_tokens.y;
            const float up = __fmaf_rn(sums[4 * i + 2 + j], of_token, of_up);
            float& result = sums[4 * i + j];
            result = __fmul_rn(silu_fast(__fmaf_rn(result, of_token, of_gate)), up);
            most = fmaxf(most, fabsf(result));
        }
        const unsigned pair = pack_pair<__half>(scaled(sums[4 * i], 8 * i), scaled(sums[4 * i + 1], 8 * i + 1));
        *reinterpret_cast<unsigned*>(word + i * 8 * TOKEN_BYTES) = transpose_matrix(pair);
    }
    return most;
}

// silu(gate) * up as the next product's image, and in `sums`. `word` is this lane's of the token g: that of the columns
// 2t and 2t + 1 of the tile, as wide_place has it. `largest` learns results too large for fp16 without a scale.
template <int TOKENS>
__device__ __forceinline__ void write_gated(float (&sums)[TOKENS / 2], const float* scales,
                                            const float* __restrict__ biases, unsigned char* word, unsigned* largest,
                                            const WideShape& shape, int tile, int first_token) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const bool exists = tile * HALF_ROWS + g < shape.num_outputs;  // else a zero
    const bool has_bias = biases != nullptr && exists;
    const float of_gate = has_bias ? biases[tile * TILE_ROWS + g] : 0.0f;
    const float of_up = has_bias ? biases[tile * TILE_ROWS + g + 8] : 0.0f;
    if (!exists) {
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) sums[i] = 0.0f;
    }
    const int count = shape.num_tokens - first_token - 2 * t;  // tokens from this lane's first one on
    const auto inverse_of = [&](int token) {
        if (token >= count) return 1.0f;
        return row_scale_for<__half>(__uint_as_float(largest[first_token + 2 * t + token])).inverse;
    };
    const float2* of_lane = reinterpret_cast<const float2*>(scales) + t;
    if (shape.repeats) {
        const auto scaled = [&](float value, int token) { return __fmul_rn(value, inverse_of(token)); };
        write_pairs<TOKENS>(sums, of_lane, of_gate, of_up, word, scaled);
        return;
    }
    const auto as_it_is = [](float value, int) { return value; };
    const float most = write_pairs<TOKENS>(sums, of_lane, of_gate, of_up, word, as_it_is);
    if (!(most > LARGEST_UNSCALED)) return;
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

// Writes the scales of SWIGLU's results, in its second launch. Returns whether any is not 1, so that results must be
// written again. A whole block calls it.
template <int BLOCK_SIZE>
__device__ __forceinline__ bool gives_scales(int num_tokens, const unsigned* largest, float* out_scales) {
    grid_dependency_wait();
    bool needs_scale = false;
    for (int token = threadIdx.x; token < num_tokens; token += BLOCK_SIZE) {
        const float most = __uint_as_float(largest[token]);
        needs_scale |= most > LARGEST_UNSCALED;
        if (blockIdx.x == 0) out_scales[token] = row_scale_for<__half>(most).scale;
    }
    return __syncthreads_or(needs_scale);
}
