// parts: adds up the parts of a product, as gemm_wide and gemm_narrow leave them.
#pragma once

#include "common/rows.cuh"

// This many parts are loaded together. With more, registers spill.
constexpr int ADDED_AT_ONCE = 4;

// Adds to each step's sums its columns of the first part, then those of the next, `part_size` floats further on. The
// first step's columns are at `part`, those of each later step `step_size` floats further on, if the step `exists`.
template <int STEPS, int VECTOR, typename Exists>
__device__ __forceinline__ void add_parts_of(const float* part, size_t step_size, int num_parts, size_t part_size,
                                             float (&sums)[STEPS][VECTOR], Exists exists) {
    for (int first = 0; first < num_parts; first += ADDED_AT_ONCE) {
        float some[ADDED_AT_ONCE][STEPS][VECTOR];
#pragma unroll
        for (int j = 0; j < ADDED_AT_ONCE; ++j) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                if (first + j >= num_parts || !exists(step)) continue;
                load_columns<Cache::STREAM>(part + (first + j) * part_size + step * step_size, some[j][step]);
            }
        }
#pragma unroll
        for (int j = 0; j < ADDED_AT_ONCE; ++j) {
            if (first + j >= num_parts) break;
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                if (!exists(step)) continue;
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) sums[step][v] = __fadd_rn(sums[step][v], some[j][step][v]);
            }
        }
    }
}
