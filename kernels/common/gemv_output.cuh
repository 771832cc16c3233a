// gemv_output: turns the warps' sums of a tile into outputs: norm factor, channel scale, bias, epilogue.
#pragma once

#include "common/silu.cuh"
#include "common/tile.cuh"

constexpr int STORE = 0, ADD = 1, SWIGLU = 2;  // epilogues

struct GemvShape {
    int num_rows, num_inputs, num_outputs, x_stride, out_stride, chunk_spans, epilogue;
    float eps;

    __device__ __forceinline__ int tile_outputs() const { return epilogue == SWIGLU ? HALF_ROWS : TILE_ROWS; }
};

// 1 / sqrt(mean of the squares + eps), from each warp's sum of squares.
template <int NUM_WARPS>
__device__ __forceinline__ float norm_factor_of(const float* squares, const GemvShape& shape) {
    float sum = squares[0];
#pragma unroll
    for (int w = 1; w < NUM_WARPS; ++w) sum = __fadd_rn(sum, squares[w]);
    const float mean = __fdiv_rn(sum, static_cast<float>(shape.num_inputs));
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, shape.eps)));
}

// One lane's output of a tile. NUM_FINISHERS warps, with two rows each, write a tile's outputs; the next ones write
// those of the next tile. `warp` is the number of this warp among those of the block that work on the tile.
template <int ROWS, int TILE_WARPS>
struct Output {
    static constexpr int NUM_FINISHERS = ROWS > 2 ? ROWS / 2 : 1;

    float factor, bias, before;
    int place;  // in out; -1: none

    __device__ __forceinline__ static int row(int warp, int lane) {
        return warp % NUM_FINISHERS * 2 + lane / TILE_ROWS;
    }

    // Loads everything that is needed besides the sums.
    template <bool HAS_CHANNEL_SCALE, typename ScaleT>
    __device__ __forceinline__ void begin(int tile, const ScaleT* scales, const float* biases, float* out,
                                          const GemvShape& shape, int warp, int lane) {
        const int own_row = row(warp, lane), index = tile * TILE_ROWS + lane % TILE_ROWS;
        const int column = tile * shape.tile_outputs() + lane % TILE_ROWS;
        const bool exists =
            own_row < shape.num_rows && lane % TILE_ROWS < shape.tile_outputs() && column < shape.num_outputs;
        place = exists ? own_row * shape.out_stride + column : -1;
        factor = HAS_CHANNEL_SCALE ? to_float(scales[index]) : 1.0f;
        bias = biases != nullptr ? biases[index] : 0.0f;
        before = shape.epilogue == ADD && exists ? __ldcg(out + place) : 0.0f;
    }

    // `sums` is [warp][row][16] of the tile.
    __device__ __forceinline__ void write(const float* sums, float norm_factor, float* out, const GemvShape& shape,
                                          int warp, int lane) const {
        const float* of_warp = sums + min(row(warp, lane), ROWS - 1) * TILE_ROWS + lane % TILE_ROWS;
        float result = 0.0f;
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < TILE_WARPS / 4; ++w) {
                sum = __fadd_rn(sum, of_warp[(quarter * TILE_WARPS / 4 + w) * ROWS * TILE_ROWS]);
            }
            result = __fadd_rn(result, sum);
        }
        result = __fadd_rn(__fmul_rn(__fmul_rn(result, factor), norm_factor), bias);
        if (shape.epilogue == ADD) result = __fadd_rn(before, result);
        if (shape.epilogue == SWIGLU) {
            result = swiglu_of(result, __shfl_down_sync(0xffffffffu, result, HALF_ROWS));
        }
        if (place >= 0) out[place] = result;
    }
};
