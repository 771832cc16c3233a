// add_parts: out[i] += parts[0,i] + parts[1,i] + ..., one after the other                 Source: kernels/gemm_wide.cu
// Shapes:   parts [num_parts, size] float, what gemm_wide leaves of a product in parts; out [size] float, in and out
// Requires: size % 4 == 0; 16-byte aligned; no aliases
// Launch:   grid (ceil(size / 1024)), block (256), no shared memory; may overlap the kernel in front of it
// Traffic:  4 * (num_parts + 2) * size bytes
// Numerics: each sum is rounded, in order; two runs agree bit for bit
// Choice:   One launch for all parts. Rejected: the clusters of gemm_wide adding up, see there
#include "common/launch.cuh"

constexpr int BLOCK_SIZE = 256, PARTS_AT_ONCE = 4;

// Not __restrict__: the kernel in front writes these, and the compiler might move their loads before the wait.
__global__ void __launch_bounds__(BLOCK_SIZE) add_parts(const float4* parts, float4* out, int num_parts, int size) {
    const int i = blockIdx.x * BLOCK_SIZE + threadIdx.x, stride = size / 4;
    grid_dependency_launch();
    grid_dependency_wait();
    if (i >= stride) return;
    float4 sum = out[i];
    for (int first = 0; first < num_parts; first += PARTS_AT_ONCE) {
        float4 some[PARTS_AT_ONCE];
#pragma unroll
        for (int j = 0; j < PARTS_AT_ONCE; ++j) {
            if (first + j < num_parts) some[j] = __ldcs(parts + static_cast<size_t>(first + j) * stride + i);
        }
#pragma unroll
        for (int j = 0; j < PARTS_AT_ONCE; ++j) {
            if (first + j >= num_parts) break;
            sum.x = __fadd_rn(sum.x, some[j].x), sum.y = __fadd_rn(sum.y, some[j].y);
            sum.z = __fadd_rn(sum.z, some[j].z), sum.w = __fadd_rn(sum.w, some[j].w);
        }
    }
    out[i] = sum;
}
