// norm_sums: a row's RMS norm and power of two, in one order of sums whoever computes them.
//
// The squares of a tile of 16 inputs are added in a butterfly (distances 4, 2, 1, 8). Two neighbouring tiles are a
// pair; tiles are added by 32 lanes, each with those of the pairs lane, lane + 32, ... in order, then in a butterfly.
// The norm's factor is a scale of the outputs: rounding need not wait for it.
#pragma once

#include "common/matrix.cuh"
#include "common/reduce.cuh"
#include "common/rows.cuh"

constexpr int NORM_TILE = 16;

// In memory a row's pairs are float4: the sum of squares and the largest magnitude of either tile. A tile past the last
// input has zeros.
__device__ __forceinline__ int norm_pairs(int num_inputs) {
    return (num_inputs + 2 * NORM_TILE - 1) / (2 * NORM_TILE);
}
__device__ __forceinline__ void include_tiles(SumMax& found, float4 pair) {
    found = reduce::SumAndMax::combine(found, SumMax{pair.x, pair.y});
    found = reduce::SumAndMax::combine(found, SumMax{pair.z, pair.w});
}

constexpr float SMALLEST_UNSCALED = 1.0f / 256.0f;

// A row's power of two and its inverse: 1 while the largest magnitude is in [2^-8, 2^15], as nearly always. Others are
// brought to [2^14, 2^15), since fp16 would overflow or lose bits. Zeros and NaN give 1.
__device__ __forceinline__ RowScale row_power(float largest) {
    const bool is_small = largest > 0.0f && largest < SMALLEST_UNSCALED;
    if (!is_small && !(largest > LARGEST_UNSCALED)) return RowScale{1.0f, 1.0f};
    const int exponent = max(__float_as_int(largest) >> 23, 15);  // biased
    return RowScale{__int_as_float((exponent - 14) << 23), __int_as_float((268 - exponent) << 23)};
}

// The sum of a tile's squares, and its largest magnitude as it is rounded: times the norm's weights, if any. Each of
// four neighbouring lanes has a quad. All lanes of the warp call it.
__device__ __forceinline__ SumMax tile_sum(const float (&values)[4], const float (&weights)[4], bool has_norm) {
    float squares[4], largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float square = __fmul_rn(values[i], values[i]);
        squares[i] = __fadd_rn(square, reduce::shuffle_xor(square, 1));
        largest = reduce::Max::combine(largest, fabsf(has_norm ? values[i] * weights[i] : values[i]));
    }
    const float sum = __fadd_rn(__fadd_rn(squares[0], squares[2]), __fadd_rn(squares[1], squares[3]));
    largest = reduce::Max::combine(largest, reduce::shuffle_xor(largest, 1));
    const SumMax octet = {sum, largest};
    return reduce::SumAndMax::combine(octet, reduce::shuffle_xor(octet, 2));
}

// The same of a tile, one value in each of 16 lanes. All lanes of the warp call it.
__device__ __forceinline__ SumMax tile_sum(float value, float rounded) {
    SumMax found = {__fmul_rn(value, value), fabsf(rounded)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        found = reduce::SumAndMax::combine(found, reduce::shuffle_xor(found, i < 3 ? 4 >> i : 8));
    }
    return found;
}

// 1 / sqrt(mean + eps), from the sum that each lane has found. All lanes of the warp call it.
__device__ __forceinline__ float inverse_rms(float sum, float inverse_inputs, float eps) {
    sum = reduce::over_lanes<reduce::Sum, 32>(sum);
    return rsqrtf(__fadd_rn(__fmul_rn(sum, inverse_inputs), eps));
}

// The largest of the lanes' magnitudes; NaN is above all. All lanes of the warp call it.
__device__ __forceinline__ float largest_of_lanes(float magnitude) {
    return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(magnitude)));
}

// An octet, or zeros past the last input. Octets are whole, and vectors aligned.
__device__ __forceinline__ void load_octet(const float* row, int octet, int num_inputs, float (&values)[8]) {
    const float4 zeros = {0.0f, 0.0f, 0.0f, 0.0f};
    const bool exists = octet * 8 < num_inputs;
    const float4* place = reinterpret_cast<const float4*>(row + octet * 8);
    const float4 low = exists ? __ldcg(place) : zeros, high = exists ? __ldcg(place + 1) : zeros;
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
}

// Eight values times a power of two, in fp16.
__device__ __forceinline__ uint4 rounded_octet(const float (&values)[8], float inverse_power) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        words[i] = pack_pair<__half>(values[2 * i] * inverse_power, values[2 * i + 1] * inverse_power);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}
