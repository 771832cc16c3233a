// add_parts: out[i] += parts[0,i] + parts[1,i] + ..., one after the other                 Source: kernels/gemm_wide.cu
// Shapes:   parts [num_parts, size] float, what gemm_wide leaves of a product in parts; out [size] float, in and out
// Requires: 16-byte aligned and size % 4 == 0 for VECTOR 4; no aliases
// Launch:   grid (ceil(size / (256 * VECTOR))), block (256), no shared memory; may overlap the kernel in front of it
// Traffic:  4 * (num_parts + 2) * size bytes
// Numerics: each sum is rounded, in order; two runs agree bit for bit
// Choice:   One launch for all parts. Rejected: the clusters of gemm_wide adding up, see there
#include "common/launch.cuh"
#include "common/parts.cuh"

constexpr int BLOCK_SIZE = 256;

// Not __restrict__: the previous kernel writes these, and the compiler might move their loads before the wait.
template <int VECTOR>
__global__ void __launch_bounds__(BLOCK_SIZE) add_parts(const float* parts, float* out, int num_parts, int size) {
    const int i = (blockIdx.x * BLOCK_SIZE + threadIdx.x) * VECTOR;
    grid_dependency_launch();
    grid_dependency_wait();
    if (i >= size) return;
    float sums[1][VECTOR];
    load_columns(out + i, sums[0]);
    add_parts_of<1>(parts + i, 0, num_parts, size, sums, [](int) { return true; });
    store_columns(out + i, sums[0]);
}
