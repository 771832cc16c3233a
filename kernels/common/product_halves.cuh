// product_halves: 16-bit weights times fp32 activations on the tensor cores, with fp32 sums.
//
// A value x becomes a pair in the weights' type, hi = round(x) and lo = round(x - hi), in two of the 8 columns of B. So
// its product with a weight has a relative error of 2^-22 (fp16) or 2^-18 (bf16). For fp16 each unit's activations are
// first scaled by a power of two that takes the largest into [2^14, 2^15). Small ones then have an error of 2^-39 of
// the largest.
// Row r has the columns 2r (hi) and 2r + 1 (lo): an mma of 8 columns holds four rows.
// A unit in shared memory, in vectors of 16 bytes: [column][t], 8 inputs each; then for fp16 [row], the scale's inverse
// first.
#pragma once

#include "common/activations.cuh"
#include "common/mma.cuh"

// Two values to one register in T, the first in the low half.
template <typename T>
__device__ __forceinline__ unsigned round_pair(float first, float second);
template <>
__device__ __forceinline__ unsigned round_pair<__half>(float first, float second) {
    return as_bits(__floats2half2_rn(first, second));
}
template <>
__device__ __forceinline__ unsigned round_pair<__nv_bfloat16>(float first, float second) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const unsigned*>(&pair);
}

template <typename T>
constexpr bool HAS_UNIT_SCALE = false;  // bf16 has the exponents of fp32
template <>
constexpr bool HAS_UNIT_SCALE<__half> = true;

// Eight inputs of one row as pairs; LANES neighbouring lanes have those of one scale.
template <typename T, int LANES>
struct HalfPairs {
    unsigned hi[4], lo[4];
    PowerScale power = {1.0f, 1.0f};

    __device__ __forceinline__ explicit HalfPairs(const float (&values)[8]) {
        if constexpr (HAS_UNIT_SCALE<T>) power = scale_to<14>(largest_of<LANES>(values));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float first = __fmul_rn(values[2 * i], power.scale);
            const float second = __fmul_rn(values[2 * i + 1], power.scale);
            hi[i] = round_pair<T>(first, second);
            const T* rounded = reinterpret_cast<const T*>(&hi[i]);
            lo[i] = round_pair<T>(__fadd_rn(first, -to_float(rounded[0])), __fadd_rn(second, -to_float(rounded[1])));
        }
    }
};

template <typename T, int ROWS>
struct HalfProduct {
    static constexpr int COLUMN_TILES = (ROWS + 3) / 4;
    static constexpr int LANES = TileFormat<T>::UNIT_INPUTS / 8;
    static constexpr int SPAN_VECTORS = ROWS * (8 + HAS_UNIT_SCALE<T>);  // of ROWS rows in shared memory

    // Without a scale the mma's sums of all units, with one of rows g and g + 8.
    static constexpr int SUMS_A_TILE = HAS_UNIT_SCALE<T> ? 2 : 4;
    static constexpr int NUM_SUMS = SUMS_A_TILE * COLUMN_TILES;
    static constexpr int MAX_DEPTH = 4;     // of stage_spans
    static constexpr bool IS_WOVEN = true;  // WovenInputs

    static constexpr bool HAS_SPARE = ROWS % 4 != 0;  // columns without a row
    LaneSums<NUM_SUMS> sums;
    uint4 v = {};  // of a lane's inputs; spare columns stay zeros, which take less power

    // Eight inputs of one row, as they are staged; lane `eighth` of the unit holds the inputs 8 * eighth and on.
    struct Staged : HalfPairs<T, LANES> {
        __device__ __forceinline__ Staged(const float (&values)[8], int) : HalfPairs<T, LANES>(values) {}
        __device__ __forceinline__ void store(uint4* unit, int eighth, int row) const {
            unit[2 * row * 4 + eighth] = make_uint4(this->hi[0], this->hi[1], this->hi[2], this->hi[3]);
            unit[(2 * row + 1) * 4 + eighth] = make_uint4(this->lo[0], this->lo[1], this->lo[2], this->lo[3]);
            if (HAS_UNIT_SCALE<T> && eighth == 0) {
                *reinterpret_cast<float*>(unit + 8 * ROWS + row) = this->power.inverse;
            }
        }
    };

    __device__ __forceinline__ void add_span(const uint4 (&low)[1], const uint4 (&high)[1], const unsigned char* slot,
                                             const uint4* unit, int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
            if (!HAS_SPARE || g < 2 * ROWS) v = unit[(8 * c + g) * 4 + t];
            if constexpr (HAS_UNIT_SCALE<T>) {
                float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                multiply(d, low[0], high[0], v);
                const uint4* scales = unit + 8 * ROWS;
                const float scale = *reinterpret_cast<const float*>(scales + min(4 * c + t, ROWS - 1));
                sums[2 * c] = __fmaf_rn(scale, __fadd_rn(d[0], d[1]), sums[2 * c]);
                sums[2 * c + 1] = __fmaf_rn(scale, __fadd_rn(d[2], d[3]), sums[2 * c + 1]);
            } else {
                multiply(reinterpret_cast<float (&)[4]>(sums[4 * c]), low[0], high[0], v);
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
            if constexpr (HAS_UNIT_SCALE<T>) {
                one[0] = sums[2 * c];
                one[8] = sums[2 * c + 1];
            } else {
                one[0] = __fadd_rn(sums[4 * c], sums[4 * c + 1]);
                one[8] = __fadd_rn(sums[4 * c + 2], sums[4 * c + 3]);
            }
        }
    }

private:
    __device__ __forceinline__ static void multiply(float (&d)[4], const uint4& low, const uint4& high,
                                                    const uint4& v) {
        mma<T>(d, low.x, high.x, low.y, high.y, v.x, v.y);
        mma<T>(d, low.z, high.z, low.w, high.w, v.z, v.w);
    }
};
