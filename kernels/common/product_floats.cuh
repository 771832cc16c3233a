// product_floats: fp32 weights times fp32 activations. No mma keeps their precision, so lane 4g + t multiplies its 4
// inputs of the rows g and g + 8 itself. Vectors of 16 bytes of a unit: [row][t], 4 inputs each.
#pragma once

#include "common/activations.cuh"

template <int ROWS>
struct FloatProduct {
    static constexpr int ROW_VECTORS = 4;
    static constexpr int SPAN_VECTORS = ROWS * ROW_VECTORS;  // in shared memory

    static constexpr int NUM_SUMS = 2 * ROWS;
    static constexpr int MAX_DEPTH = ROWS > 4 ? 2 : 4;  // of stage_spans, for registers
    static constexpr bool IS_WOVEN = false;             // WovenInputs would need more

    LaneSums<NUM_SUMS> sums;

    // Eight inputs of one row, as they are staged; lane `eighth` of the unit holds the inputs 8 * eighth and on.
    struct Staged {
        float4 low, high;

        __device__ __forceinline__ Staged(const float (&values)[8], int eighth)
            : low(make_float4(values[0], values[1], values[2], values[3])),
              high(make_float4(values[4], values[5], values[6], values[7])) {}
        __device__ __forceinline__ void store(uint4* unit, int eighth, int row) const {
            float4* vectors = reinterpret_cast<float4*>(unit + row * ROW_VECTORS + 2 * eighth);
            vectors[0] = low;
            vectors[1] = high;
        }
    };

    __device__ __forceinline__ void add_span(const uint4 (&low)[1], const uint4 (&high)[1], const unsigned char* slot,
                                             const uint4* unit, int lane) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const uint4 v = unit[r * ROW_VECTORS + lane % 4];
            sums[2 * r] = dot(low[0], v, sums[2 * r]);
            sums[2 * r + 1] = dot(high[0], v, sums[2 * r + 1]);
        }
    }

    __device__ __forceinline__ void write(float* partials, int lane) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float low = warp_sum<4>(sums[2 * r]);
            const float high = warp_sum<4>(sums[2 * r + 1]);
            if (lane % 4 == r % 4) {
                float* one = partials + r * TILE_ROWS + lane / 4;
                one[0] = low;
                one[8] = high;
            }
        }
    }

private:
    __device__ __forceinline__ static float dot(const uint4& a, const uint4& b, float sum) {
        sum = __fmaf_rn(__uint_as_float(a.x), __uint_as_float(b.x), sum);
        sum = __fmaf_rn(__uint_as_float(a.y), __uint_as_float(b.y), sum);
        sum = __fmaf_rn(__uint_as_float(a.z), __uint_as_float(b.z), sum);
        return __fmaf_rn(__uint_as_float(a.w), __uint_as_float(b.w), sum);
    }
};
