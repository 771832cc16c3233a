// halves_output: turns the sums of gemm_halves into outputs, as gemv_output does: scales of rows, norm factor,
// bias, epilogue.
#pragma once

#include "common/cluster.cuh"
#include "common/gemv_output.cuh"

constexpr int MULTIPLIERS = 8, NUM_THREADS = 32 * MULTIPLIERS;  // warps that multiply, and their threads

struct HalvesShape {
    int num_rows, num_inputs, num_outputs, out_stride, epilogue;

    __device__ __forceinline__ int tile_outputs() const { return epilogue == SWIGLU ? HALF_ROWS : TILE_ROWS; }
};

// Writes a block's part of the outputs of TOKENS rows and MULTIPLIERS * TILES_A_WARP tiles. `results` are this thread's
// vectors of sums, NUM_THREADS apart: tile by tile, and in each a vector for eight rows. Lane 4g + t has the outputs g
// and g + 8 of the rows t and t + 4. With QUARTERS = 4 each block of a cluster has a quarter, and finishes some.
template <int TOKENS, int TILES_A_WARP, int QUARTERS, int SHARERS, bool HAS_CHANNEL_SCALE, typename ScaleT>
__device__ __forceinline__ void write_outputs(const float4* results, const ScaleT* __restrict__ scales,
                                              const float* factors, const float* __restrict__ biases, float* out,
                                              const HalvesShape& shape, int first_tile, int row_block, int quarter,
                                              int sharer) {
    constexpr int ROW_VECTORS = TOKENS / 8, VECTORS = TILES_A_WARP * ROW_VECTORS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int num_tiles = (shape.num_outputs + shape.tile_outputs() - 1) / shape.tile_outputs();
    constexpr int OWN_VECTORS = VECTORS / QUARTERS > 0 ? VECTORS / QUARTERS : 1;
    constexpr int BATCH = OWN_VECTORS < 4 ? OWN_VECTORS : 4;  // whose loads run together
#pragma unroll 1
    for (int first = quarter; first < VECTORS; first += BATCH * QUARTERS) {
        float4 totals[BATCH];
        float row_factors[BATCH][2], before[BATCH][2][2], tile_biases[BATCH][2];
        float tile_scales[BATCH][2];
        float* places[BATCH][2];
        bool exists[BATCH][2][2];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int vector = first + b * QUARTERS, m = vector / ROW_VECTORS, pair = vector % ROW_VECTORS;
            const int tile = first_tile + m * MULTIPLIERS + warp;
            const int column = tile * shape.tile_outputs() + g;
            tile_biases[b][0] = tile_biases[b][1] = 0.0f;
            tile_scales[b][0] = tile_scales[b][1] = 1.0f;
            if (HAS_CHANNEL_SCALE && tile < num_tiles) {
                tile_scales[b][0] = to_float(scales[tile * TILE_ROWS + g]);
                tile_scales[b][1] = to_float(scales[tile * TILE_ROWS + g + 8]);
            }
            if (biases != nullptr && tile < num_tiles) {
                tile_biases[b][0] = biases[tile * TILE_ROWS + g];
                tile_biases[b][1] = biases[tile * TILE_ROWS + g + 8];
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = row_block * TOKENS + 8 * pair + 4 * i + t;
                const bool has_row = row < shape.num_rows && vector < VECTORS && tile < num_tiles;
                exists[b][i][0] = has_row && column < shape.num_outputs;
                exists[b][i][1] = has_row && column + 8 < shape.num_outputs && shape.epilogue != SWIGLU;
                places[b][i] = out + static_cast<size_t>(row) * shape.out_stride + column;
                row_factors[b][i] = has_row ? __ldcg(factors + row) : 0.0f;
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    before[b][i][k] =
                        shape.epilogue == ADD && exists[b][i][k] ? __ldcg(places[b][i] + 8 * k) : 0.0f;
                }
            }
            if (vector >= VECTORS) continue;
            if constexpr (QUARTERS == 1) {
                totals[b] = results[vector * NUM_THREADS];
            } else {
                totals[b] = load_from(results + vector * NUM_THREADS, sharer);
#pragma unroll
                for (int q = 1; q < QUARTERS; ++q) {
                    const float4 other = load_from(results + vector * NUM_THREADS, q * SHARERS + sharer);
                    totals[b].x = __fadd_rn(totals[b].x, other.x);
                    totals[b].y = __fadd_rn(totals[b].y, other.y);
                    totals[b].z = __fadd_rn(totals[b].z, other.z);
                    totals[b].w = __fadd_rn(totals[b].w, other.w);
                }
            }
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float low = i == 0 ? totals[b].x : totals[b].z, high = i == 0 ? totals[b].y : totals[b].w;
                float one = __fmul_rn(__fmul_rn(low, tile_scales[b][0]), row_factors[b][i]);
                float two = __fmul_rn(__fmul_rn(high, tile_scales[b][1]), row_factors[b][i]);
                one = __fadd_rn(one, tile_biases[b][0]);
                two = __fadd_rn(two, tile_biases[b][1]);
                if (shape.epilogue == ADD) {
                    one = __fadd_rn(before[b][i][0], one);
                    two = __fadd_rn(before[b][i][1], two);
                } else if (shape.epilogue == SWIGLU) {
                    one = swiglu_of(one, two);
                }
                if (exists[b][i][0]) *places[b][i] = one;
                if (exists[b][i][1]) places[b][i][8] = two;
            }
        }
    }
}
