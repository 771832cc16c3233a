// parts: the parts of a product, as gemm_wide leaves them, added up.
#pragma once

#include "common/rows.cuh"

// The loads of so many parts wait together. A product of gemm_wide has no more.
constexpr int ADDED_AT_ONCE = 4;

// Add the columns at `part` of the first part to the sums, then those of the next, `part_size` floats behind.
template <int VECTOR>
__device__ __forceinline__ void add_parts_of(const float* part, int num_parts, size_t part_size,
                                             float (&sums)[VECTOR]) {
    for (int first = 0; first < num_parts; first += ADDED_AT_ONCE) {
        float some[ADDED_AT_ONCE][VECTOR];
#pragma unroll
        for (int j = 0; j < ADDED_AT_ONCE; ++j) {
            if (first + j < num_parts) load_columns<Cache::STREAM>(part + (first + j) * part_size, some[j]);
        }
#pragma unroll
        for (int j = 0; j < ADDED_AT_ONCE; ++j) {
            if (first + j >= num_parts) break;
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) sums[v] = __fadd_rn(sums[v], some[j][v]);
        }
    }
}
