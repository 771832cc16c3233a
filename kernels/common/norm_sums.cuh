// norm_sums: a row's RMS norm and power of two, in one order of sums whoever computes them. An octet is eight neighbours;
// the squares of 32 octets are added in a butterfly, then those of all groups of 256 inputs in order.
#pragma once

#include "common/matrix.cuh"
#include "common/reduce.cuh"
#include "common/rows.cuh"

// An octet's values that exist, and zeros. is_even: octets are whole, and vectors aligned.
template <typename T>
__device__ __forceinline__ void load_octet(const T* row, int octet, int num_inputs, bool is_even, float (&values)[8]) {
    const int first = octet * 8;
    if (is_even && first < num_inputs) {
        if constexpr (sizeof(T) == 4) {
            const float4 low = __ldcg(reinterpret_cast<const float4*>(row + first));
            const float4 high = __ldcg(reinterpret_cast<const float4*>(row + first) + 1);
            values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
            values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
        } else {
            const uint4 bits = __ldcg(reinterpret_cast<const uint4*>(row + first));
            const float2 pairs[4] = {unpack_pair<T>(bits.x), unpack_pair<T>(bits.y), unpack_pair<T>(bits.z),
                                     unpack_pair<T>(bits.w)};
#pragma unroll
            for (int i = 0; i < 8; ++i) values[i] = i % 2 == 0 ? pairs[i / 2].x : pairs[i / 2].y;
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = first + i < num_inputs ? to_float(row[first + i]) : 0.0f;
}

__device__ __forceinline__ void multiply_octet(float (&values)[8], const float (&weights)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] *= weights[i];
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

    // Multiplies an octet by the norm's weights. A warp calls it with 32 neighbouring octets.
    __device__ __forceinline__ void add(float (&values)[8], const float (&weights)[8], bool has_norm, int octet) {
        SumMax found = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            found.sum = fmaf(values[i], values[i], found.sum);
            if (has_norm) values[i] *= weights[i];
            found.maximum = reduce::Max::combine(found.maximum, fabsf(values[i]));
        }
        found = reduce::over_row<reduce::SumAndMax, 32>(found);
        if (octet % 32 == 0 && octet / 32 < num_groups) {
            groups[octet / 32] = found.sum, groups[num_groups + octet / 32] = found.maximum;
        }
    }
    // A __syncthreads comes before it.
    __device__ __forceinline__ NormFactor factor(int num_inputs, float eps, bool has_norm) const {
        float sum = 0.0f, maximum = 0.0f;
        for (int group = 0; group < num_groups; ++group) {
            sum = __fadd_rn(sum, groups[group]);
            maximum = reduce::Max::combine(maximum, groups[num_groups + group]);
        }
        const float inverse_rms = has_norm ? rsqrtf(sum / static_cast<float>(num_inputs) + eps) : 1.0f;
        const RowScale scale = row_scale_for<__half>(maximum * inverse_rms);
        return NormFactor{inverse_rms * scale.inverse, scale.scale};
    }
};
