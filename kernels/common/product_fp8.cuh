// product_fp8: 8-bit floats (e4m3) times fp32 activations, a span at a time, on the tensor cores for fp16.
//
// Weights are widened to fp16 in registers, exactly. Activations are pairs of fp16 as in product_halves.cuh, with one
// scale for the 128 inputs of a span. So x has a relative error of 2^-22, and small values one of 2^-39 of the largest
// in the span. The products of a unit are one chain; those of a span's two units overlap, as a warp with weights in
// the ring waits for them. The weights' scales are applied to a unit's sums, or to the outputs.
// A span in shared memory, in vectors of 16 bytes: [part][column][t], 8 inputs each; a part is 8 bytes of each lane t,
// row r has the columns 2r (hi) and 2r + 1 (lo). Then the inverse of each row's scale (float).
#pragma once

#include "common/product_halves.cuh"

template <>
constexpr bool HAS_UNIT_SCALE<Fp8> = true;

// Part `part` of a unit's bytes of the rows g and g + 8, as a of two k-steps.
__device__ __forceinline__ void widen_fp8_part(const uint4& low, const uint4& high, int part, unsigned (&first)[4],
                                               unsigned (&second)[4]) {
    widen_fp8(part == 0 ? low.x : low.z, first[0], first[2]);
    widen_fp8(part == 0 ? high.x : high.z, first[1], first[3]);
    widen_fp8(part == 0 ? low.y : low.w, second[0], second[2]);
    widen_fp8(part == 0 ? high.y : high.w, second[1], second[3]);
}

template <typename ScaleT, int GROUP_SIZE, int ROWS>
struct Fp8Product {
    using G = Groups<Fp8, GROUP_SIZE>;
    static_assert(G::PER_SPAN == 1, "a group is whole spans");
    static constexpr int UNITS = SPAN_UNITS<Fp8>, PARTS = 2 * UNITS;
    static constexpr int COLUMN_TILES = (ROWS + 3) / 4;
    static constexpr int LANES = G::SPAN_INPUTS / 8;  // that stage a span
    static constexpr int PART_VECTORS = 2 * ROWS * 4;
    static constexpr int PAIR_VECTORS = PARTS * PART_VECTORS;
    static constexpr int SPAN_VECTORS = PAIR_VECTORS + (ROWS + 3) / 4;  // of ROWS rows in shared memory

    static constexpr int NUM_SUMS = 2 * COLUMN_TILES;
    static constexpr int MAX_DEPTH = ROWS == 1 ? 4 : 2;  // of stage_spans
    static constexpr bool IS_WOVEN = true;               // WovenInputs

    static constexpr bool HAS_SPARE = ROWS % 4 != 0;  // columns without a row
    LaneSums<NUM_SUMS> sums;  // of the rows g and g + 8, of the row t of each column tile
    uint4 inputs[HAS_SPARE ? PARTS : 1] = {};  // spare columns stay zeros, which take less power

    // Eight inputs of one row, as they are staged; lane `eighth` of the span holds the inputs 8 * eighth and on.
    struct Staged : HalfPairs<__half, LANES> {
        __device__ __forceinline__ Staged(const float (&values)[8], int) : HalfPairs<__half, LANES>(values) {}
        __device__ __forceinline__ void store(uint4* span, int eighth, int row) const {
            const int part = eighth / 8 * 2 + eighth % 2, t = eighth / 2 % 4;
            uint4* columns = span + part * PART_VECTORS + 2 * row * 4 + t;
            columns[0] = make_uint4(this->hi[0], this->hi[1], this->hi[2], this->hi[3]);
            columns[4] = make_uint4(this->lo[0], this->lo[1], this->lo[2], this->lo[3]);
            if (eighth == 0) reinterpret_cast<float*>(span + PAIR_VECTORS)[row] = this->power.inverse;
        }
    };

    // `low` and `high` are this lane's bytes of the rows g and g + 8 of each unit; `slot` the span's scales.
    __device__ __forceinline__ void add_span(const uint4 (&low)[UNITS], const uint4 (&high)[UNITS],
                                             const unsigned char* slot, const uint4* span, int lane) {
        const int g = lane / 4, t = lane % 4;
        const uint4* columns = span + g * 4 + t;
        float d[UNITS][COLUMN_TILES][4] = {};
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {  // the units in turns
            const int unit = i % UNITS, half = i / UNITS, part = 2 * unit + half;
            unsigned a[2][4];
            widen_fp8_part(low[unit], high[unit], half, a[0], a[1]);
#pragma unroll
            for (int c = 0; c < COLUMN_TILES; ++c) {
                uint4& kept = inputs[HAS_SPARE ? part : 0];
                if (!HAS_SPARE || g < 2 * ROWS) kept = columns[part * PART_VECTORS + 32 * c];
                const uint4 v = kept;
                mma<__half>(d[unit][c], a[0][0], a[0][1], a[0][2], a[0][3], v.x, v.y);
                mma<__half>(d[unit][c], a[1][0], a[1][1], a[1][2], a[1][3], v.z, v.w);
            }
        }
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
            const float scale = reinterpret_cast<const float*>(span + PAIR_VECTORS)[min(4 * c + t, ROWS - 1)];
            float low_scale = scale, high_scale = scale;
            if constexpr (G::IS_GROUPED) {
                const ScaleT* scales = reinterpret_cast<const ScaleT*>(slot);
                low_scale = __fmul_rn(scale, to_float(scales[scale_place<ScaleT>(g)]));
                high_scale = __fmul_rn(scale, to_float(scales[scale_place<ScaleT>(g + 8)]));
            }
#pragma unroll
            for (int unit = 0; unit < UNITS; ++unit) {
                const float(&products)[4] = d[unit][c];
                sums[2 * c] = __fmaf_rn(low_scale, __fadd_rn(products[0], products[1]), sums[2 * c]);
                sums[2 * c + 1] = __fmaf_rn(high_scale, __fadd_rn(products[2], products[3]), sums[2 * c + 1]);
            }
        }
    }

    // Stores [row][16] of this warp and tile: lane 4g + t has the rows g and g + 8 of activation row 4c + t.
    __device__ __forceinline__ void write(float* partials, int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
            const int row = 4 * c + t;
            if (row >= ROWS) continue;
            float* one = partials + row * TILE_ROWS + g;
            one[0] = sums[2 * c];
            one[8] = sums[2 * c + 1];
        }
    }
};
