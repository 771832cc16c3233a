// head: one query or key head in the registers of a warp: norm, rotation and rounding between projection and attention.
// Products and sums that a compiler could fuse are written as single operations, so all kernels get the same bits.
#pragma once

#include "common/load.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

// Lane l holds the pairs (i, i + HEAD_DIM / 2) for i = l, l + 32, ...; places past the head hold 0.
template <int HEAD_DIM>
struct Head {
    static constexpr int HALF = HEAD_DIM / 2;
    static constexpr int PAIRS = (HALF + 31) / 32;
    float first[PAIRS];
    float second[PAIRS];

    static __device__ __forceinline__ int index(int pair) { return threadIdx.x % 32 + 32 * pair; }
    static __device__ __forceinline__ bool has(int pair) { return HALF % 32 == 0 || index(pair) < HALF; }

    // Start loading x [HEAD_DIM], here and not later; zeros if the head does not exist.
    __device__ __forceinline__ void load(const float* x, bool exists) {
        x = address_here(x + threadIdx.x % 32);
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            first[pair] = exists && has(pair) ? load_here(x + 32 * pair) : 0.0f;
            second[pair] = exists && has(pair) ? load_here(x + 32 * pair + HALF) : 0.0f;
        }
    }

    // Adds `num_parts` heads, one after the other, each `part_size` floats after the one before.
    __device__ __forceinline__ void add(const float* part, int num_parts, size_t part_size) {
        constexpr int AT_ONCE = 4;  // loads run together
        for (int begin = 0; begin < num_parts; begin += AT_ONCE) {
            Head heads[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) heads[i].load(part + (begin + i) * part_size, begin + i < num_parts);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (begin + i >= num_parts) break;  // an added zero would change the sign of another
                add(heads[i]);
            }
        }
    }
    __device__ __forceinline__ void add(const Head& other) {
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            first[pair] = __fadd_rn(first[pair], other.first[pair]);
            second[pair] = __fadd_rn(second[pair], other.second[pair]);
        }
    }

    // Gives each dimension that exists, and its value, to `take`.
    template <typename Take>
    __device__ __forceinline__ void each(Take take) const {
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            if (!has(pair)) continue;
            take(index(pair), first[pair]);
            take(index(pair) + HALF, second[pair]);
        }
    }
    __device__ __forceinline__ void store(float* x) const {
        each([&](int dimension, float value) { x[dimension] = value; });
    }

    __device__ __forceinline__ void scale(float factor) {
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) first[pair] *= factor, second[pair] *= factor;
    }

    // The angles of a position, for rotate; without a table they rotate nothing.
    static __device__ __forceinline__ void load_angles(const float2* cos_sin, int position, float2 (&angles)[PAIRS]) {
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            const size_t place = size_t(position) * HALF + index(pair);
            angles[pair] = cos_sin != nullptr && has(pair) ? __ldcg(cos_sin + place) : make_float2(1.0f, 0.0f);
        }
    }

    // Norm a query or key if there is a weight, and rotate it. All lanes must call it.
    __device__ __forceinline__ void norm_and_rotate(const float* weight, float eps, const float2 (&angles)[PAIRS]) {
        if (weight != nullptr) normalize(weight, eps);
        rotate(angles);
    }

    // weight * x / sqrt(mean(x^2) + eps). All lanes must call it.
    __device__ __forceinline__ void normalize(const float* weight, float eps) {
        float squares = 0.0f;
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            squares = fmaf(first[pair], first[pair], fmaf(second[pair], second[pair], squares));
        }
        const float inverse = rsqrtf(fmaf(warp_sum(squares), 1.0f / HEAD_DIM, eps));
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            if (has(pair)) {
                first[pair] *= inverse * weight[index(pair)];
                second[pair] *= inverse * weight[index(pair) + HALF];
            }
        }
    }

    // Rotate every pair by its angle, given as (cos, sin).
    __device__ __forceinline__ void rotate(const float2 (&cos_sin)[PAIRS]) {
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            const float2 angle = cos_sin[pair];
            const float rotated = fmaf(first[pair], angle.x, -__fmul_rn(second[pair], angle.y));
            second[pair] = fmaf(second[pair], angle.x, __fmul_rn(first[pair], angle.y));
            first[pair] = rotated;
        }
    }

    // Clamp to the largest number of fp16.
    __device__ __forceinline__ void keep_within_range() {
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            first[pair] = within_range<__half>(first[pair]);
            second[pair] = within_range<__half>(second[pair]);
        }
    }

    // The largest magnitude, NaN if one is NaN, in every lane. All lanes must call it.
    __device__ __forceinline__ float largest() const {
        float larger = 0.0f;
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            larger = reduce::Max::combine(larger, fabsf(first[pair]));
            larger = reduce::Max::combine(larger, fabsf(second[pair]));
        }
        return warp_max(larger);
    }

    // The product of two heads, in every lane. All lanes must call it.
    __device__ __forceinline__ float dot(const Head& other) const {
        float products = 0.0f;
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            products = fmaf(first[pair], other.first[pair], fmaf(second[pair], other.second[pair], products));
        }
        return warp_sum(products);
    }
};
