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

// down_unit_inputs: of the matrix that takes what SWIGLU writes.  num_parts: in which a
// product is computed, each of some spans of inputs.
struct WideShape {
    int num_tokens, num_inputs, num_outputs, num_groups, group_shift, out_stride, epilogue, down_unit_inputs;
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

// silu(gate) * up over GATED_SCALE as the next product's image. `word` is this lane's of the token g: that of the
// columns 2t and 2t + 1 of the tile, as wide_place has it. No branch comes between two results, as above.
template <int TOKENS>
__device__ __forceinline__ void write_gated(const float (&sums)[TOKENS / 2], const float* scales,
                                            const float* __restrict__ biases, unsigned char* word,
                                            const WideShape& shape, int tile) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const bool exists = tile * HALF_ROWS + g < shape.num_outputs;  // else a zero
    const bool has_bias = biases != nullptr && exists;
    const float of_gate = has_bias ? biases[tile * TILE_ROWS + g] : 0.0f;
    const float of_up = has_bias ? biases[tile * TILE_ROWS + g + 8] : 0.0f;
    const float2* of_lane = reinterpret_cast<const float2*>(scales) + t;
#pragma unroll
    for (int i = 0; i < TOKENS / 8; ++i) {
        const float2 scale = of_lane[4 * i];
        const auto result = [&](int j, float by) {
            return gated(__fmaf_rn(sums[4 * i + j], by, of_gate), __fmaf_rn(sums[4 * i + j + 2], by, of_up));
        };
        const float results[2] = {result(0, scale.x), result(1, scale.y)};
        const unsigned pair = exists ? pack_within_range(results[0], results[1]) : 0u;
        *reinterpret_cast<unsigned*>(word + i * 8 * TOKEN_BYTES) = transpose_matrix(pair);
    }
}
