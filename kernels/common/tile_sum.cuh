// tile_sum: what one warp sums of a tile of 16 rows, unit by unit, for up to 8 rows of activations.
//
// Virtual rows: a row r of activations has ACROSS_LANES of them, one for each group that lies beside others in a unit,
// so that the sums of groups come out in columns of their own: r * ACROSS_LANES + group. A virtual row v has the
// columns 2v (hi) and 2v + 1 (lo). COLUMN_TILES mmas of 8 columns hold 4 * COLUMN_TILES virtual rows.
#pragma once

#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "common/tile.cuh"

// Weights that the tensor cores take. Lane 4g + t ends with rows g and g + 8 of the virtual rows 4c + t.
template <typename WeightT, typename ScaleT, int GROUP_SIZE, bool IS_SYMMETRIC, int COLUMN_TILES>
struct TileSum {
    using G = Groups<WeightT, GROUP_SIZE>;
    using T = typename TileFormat<WeightT>::ActivationT;
    static constexpr int PARTS = TileFormat<WeightT>::UNIT_INPUTS / 32;

    float running[COLUMN_TILES][4];  // the mma's sums; with groups, of one group
    float total[COLUMN_TILES][2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
            running[c][0] = running[c][1] = running[c][2] = running[c][3] = 0.0f;
            total[c][0] = total[c][1] = 0.0f;
        }
    }

    // `x` is this unit's first vector, `columns` of them 4-vector columns; `slot` the unit's scales and zero points.
    __device__ __forceinline__ void add_unit(const uint4& low, const uint4& high, const unsigned char* slot,
                                             const uint4* x, int num_rows, int lane) {
        const int g = lane / 4, t = lane % 4;
        const ScaleT* scales = reinterpret_cast<const ScaleT*>(slot);
        const unsigned char* zeros = slot + TILE_ROWS * G::PER_UNIT * sizeof(ScaleT);
        // Of side-by-side groups a column takes the inputs of one; this lane's inputs all belong to one.
        const unsigned mask = t * G::ACROSS_LANES / 4 == g / 2 % G::ACROSS_LANES ? 0xffffffffu : 0u;
#pragma unroll
        for (int within = 0; within < G::WITHIN_LANE; ++within) {
            int zero_low = TileFormat<WeightT>::OFFSET, zero_high = TileFormat<WeightT>::OFFSET;
            if constexpr (!IS_SYMMETRIC) {
                const int group = t * G::ACROSS_LANES / 4 * G::WITHIN_LANE + within;
                zero_low = zeros[group * TILE_ROWS + g];
                zero_high = zeros[group * TILE_ROWS + g + 8];
            }
            const CodeZero low_zero(zero_low), high_zero(zero_high);
#pragma unroll
            for (int p = 0; p < PARTS / G::WITHIN_LANE; ++p) {
                const int part = within * (PARTS / G::WITHIN_LANE) + p;
                unsigned a[4], b[4];
                unpack_part<WeightT>(low, part, low_zero, a);
                unpack_part<WeightT>(high, part, high_zero, b);
#pragma unroll
                for (int c = 0; c < COLUMN_TILES; ++c) {
                    // Columns past the last row repeat it; nobody reads their sums.
                    const int row = min((4 * c + g / 2) / G::ACROSS_LANES, num_rows - 1);
                    uint4 v = x[(part * 2 * num_rows + 2 * row + g % 2) * 4 + t];
                    if constexpr (G::ACROSS_LANES > 1) v.x &= mask, v.y &= mask, v.z &= mask, v.w &= mask;
                    mma<T>(running[c], a[0], b[0], a[1], b[1], v.x, v.y);
                    mma<T>(running[c], a[2], b[2], a[3], b[3], v.z, v.w);
                }
            }
            if constexpr (G::IS_GROUPED) {
                const int group = t % G::ACROSS_LANES * G::WITHIN_LANE + within;
                const float scale_low = to_float(scales[group * TILE_ROWS + g]);
                const float scale_high = to_float(scales[group * TILE_ROWS + g + 8]);
#pragma unroll
                for (int c = 0; c < COLUMN_TILES; ++c) {
                    total[c][0] = __fmaf_rn(scale_low, __fadd_rn(running[c][0], running[c][1]), total[c][0]);
                    total[c][1] = __fmaf_rn(scale_high, __fadd_rn(running[c][2], running[c][3]), total[c][1]);
                    running[c][0] = running[c][1] = running[c][2] = running[c][3] = 0.0f;
                }
            }
        }
    }

    // The lanes of one row's groups are added; writes [row][16] of this warp and tile.
    __device__ __forceinline__ void write(float* partials, int num_rows, int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
            float low = G::IS_GROUPED ? total[c][0] : __fadd_rn(running[c][0], running[c][1]);
            float high = G::IS_GROUPED ? total[c][1] : __fadd_rn(running[c][2], running[c][3]);
            low = warp_sum<G::ACROSS_LANES>(low);
            high = warp_sum<G::ACROSS_LANES>(high);
            const int row = (4 * c + t) / G::ACROSS_LANES;
            if (t % G::ACROSS_LANES == 0 && row < num_rows) {
                partials[row * TILE_ROWS + g] = low;
                partials[row * TILE_ROWS + g + 8] = high;
            }
        }
    }
};

// fp32 weights: no mma keeps their precision, so lane 4g + t multiplies its 4 inputs of rows g and g + 8 itself.
template <typename ScaleT, int COLUMN_TILES>
struct TileSum<float, ScaleT, 0, true, COLUMN_TILES> {
    float running[4 * COLUMN_TILES][2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int r = 0; r < 4 * COLUMN_TILES; ++r) running[r][0] = running[r][1] = 0.0f;
    }

    __device__ __forceinline__ void add_unit(const uint4& low, const uint4& high, const unsigned char* slot,
                                             const uint4* x, int num_rows, int lane) {
#pragma unroll
        for (int r = 0; r < 4 * COLUMN_TILES; ++r) {
            const uint4 v = x[min(r, num_rows - 1) * 4 + lane % 4];
            running[r][0] = dot(low, v, running[r][0]);
            running[r][1] = dot(high, v, running[r][1]);
        }
    }

    __device__ __forceinline__ void write(float* partials, int num_rows, int lane) {
#pragma unroll
        for (int r = 0; r < 4 * COLUMN_TILES; ++r) {
            const float low = warp_sum<4>(running[r][0]);
            const float high = warp_sum<4>(running[r][1]);
            if (lane % 4 == r % 4 && r < num_rows) {
                partials[r * TILE_ROWS + lane / 4] = low;
                partials[r * TILE_ROWS + lane / 4 + 8] = high;
            }
        }
    }

    __device__ __forceinline__ static float dot(const uint4& a, const uint4& b, float sum) {
        sum = __fmaf_rn(__uint_as_float(a.x), __uint_as_float(b.x), sum);
        sum = __fmaf_rn(__uint_as_float(a.y), __uint_as_float(b.y), sum);
        sum = __fmaf_rn(__uint_as_float(a.z), __uint_as_float(b.z), sum);
        return __fmaf_rn(__uint_as_float(a.w), __uint_as_float(b.w), sum);
    }
};
