// norm_sums: a row's RMS norm and power of two, in one order of sums whoever computes them. An octet is eight neighbours;
// the squares of 32 octets are added in a butterfly. So are those of 32 groups of 256 inputs, each with the groups 32, 64,
// ... further on.
#pragma once

#include "common/matrix.cuh"
#include "common/reduce.cuh"
#include "common/rows.cuh"

// An octet, or zeros past the last input. Octets are whole, and vectors aligned.
__device__ __forceinline__ void load_octet(const float* row, int octet, int num_inputs, float (&values)[8]) {
    const float4 zeros = {0.0f, 0.0f, 0.0f, 0.0f};
    const bool exists = octet * 8 < num_inputs;
    const float4* place = reinterpret_cast<const float4*>(row + octet * 8);
    const float4 low = exists ? __ldcg(place) : zeros, high = exists ? __ldcg(place + 1) : zeros;
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
}

__device__ __forceinline__ void load_octet(const __half* row, int octet, int num_inputs, float (&values)[8]) {
    uint4 bits = {0, 0, 0, 0};
    if (octet * 8 < num_inputs) bits = __ldcg(reinterpret_cast<const uint4*>(row + octet * 8));
    const float2 pairs[4] = {unpack_pair<__half>(bits.x), unpack_pair<__half>(bits.y), unpack_pair<__half>(bits.z),
                             unpack_pair<__half>(bits.w)};
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = i % 2 == 0 ? pairs[i / 2].x : pairs[i / 2].y;
}

// What rounding to fp16 multiplies by, and what the product is to be multiplied with.
struct NormFactor {
    float factor, scale;
};

// The sums and largest magnitudes of groups of 256 inputs, in shared memory.
struct NormSums {
    float* groups;  // [2][num_groups]
    int num_groups;

    __device__ __forceinline__ NormSums(float* memory, int num_octets)
        : groups(memory), num_groups((num_octets + 31) / 32) {}

    // A warp calls it with a group's octets.
    __device__ __forceinline__ void add(const float (&values)[8], const float (&weights)[8], bool has_norm, int octet) {
        SumMax found = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            found.sum = fmaf(values[i], values[i], found.sum);
            const float value = has_norm ? values[i] * weights[i] : values[i];
            found.maximum = reduce::Max::combine(found.maximum, fabsf(value));
        }
        found = reduce::over_row<reduce::SumAndMax, 32>(found);
        if (octet % 32 == 0) {
            groups[octet / 32] = found.sum, groups[num_groups + octet / 32] = found.maximum;
        }
    }
    // A __syncthreads comes before it. Whole warps call it.
    __device__ __forceinline__ NormFactor factor(int num_inputs, float eps, bool has_norm) const {
        SumMax found = {0.0f, 0.0f};
        for (int group = threadIdx.x % 32; group < num_groups; group += 32) {
            found.sum = __fadd_rn(found.sum, groups[group]);
            found.maximum = reduce::Max::combine(found.maximum, groups[num_groups + group]);
        }
        found = reduce::over_row<reduce::SumAndMax, 32>(found);
        const float inverse_rms = has_norm ? rsqrtf(found.sum / static_cast<float>(num_inputs) + eps) : 1.0f;
        const RowScale scale = row_scale_for<__half>(found.maximum * inverse_rms);
        return NormFactor{inverse_rms * scale.inverse, scale.scale};
    }
};
