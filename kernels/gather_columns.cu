// gather_columns: out[r,i] = x[r,order[i]]                                              Source: GPTQ, desc_act
// Shapes:   UNIT_INPUTS 0: x [num_rows, num_columns] half in rows x_stride apart; out alike, out_stride apart. Else
//           both are images of num_rows tokens (common/wide_image.cuh), with zeros past the last column. order
//           [num_columns] int
// Requires: 0 <= order < num_columns; num_rows, num_columns >= 1; out does not alias x. The kernel in front, and those
//           that it overlaps, do not write order
// Launch:   grid (num_rows, ceil(columns of whole spans / 1024)), block (256), no shared memory; may overlap the kernel
//           in front
// Traffic:  4 * num_rows * num_columns bytes, and order once from memory, then from L2
// Numerics: exact
// Choice:   A matrix whose groups are not of neighbouring inputs gets its columns sorted at load, and this sorts its
//           inputs, whichever kernel has written them. Rejected: an order in the kernels that stage (registers and a
//           second form of each, for few models)
#include "common/launch.cuh"
#include "common/wide_image.cuh"

constexpr int BLOCK_SIZE = 256, STEPS = 4;

// Where a row's column lies.
template <int UNIT_INPUTS>
__device__ __forceinline__ size_t place_of(int row, int column, int num_steps, int stride) {
    if constexpr (UNIT_INPUTS == 0) return static_cast<size_t>(row) * stride + column;
    return wide_place(UNIT_INPUTS, row, column - column % 2, num_steps) / sizeof(__half) + column % 2;
}

// x is not __restrict__: the compiler might move its loads before the wait.
template <int UNIT_INPUTS>
__global__ void __launch_bounds__(BLOCK_SIZE)
    gather_columns(const __half* x, const int* __restrict__ order, __half* out, int num_columns, int x_stride,
                   int out_stride) {
    const int row = blockIdx.x, first = blockIdx.y * STEPS * BLOCK_SIZE + threadIdx.x;
    const int num_steps = wide_steps(num_columns), end = UNIT_INPUTS == 0 ? num_columns : num_steps * STEP_INPUTS;
    int sources[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int column = first + step * BLOCK_SIZE;
        sources[step] = column < num_columns ? order[column] : -1;
    }
    grid_dependency_launch();
    grid_dependency_wait();
    __half values[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const size_t place = place_of<UNIT_INPUTS>(row, max(sources[step], 0), num_steps, x_stride);
        values[step] = sources[step] < 0 ? __float2half_rn(0.0f) : __ldcg(x + place);
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int column = first + step * BLOCK_SIZE;
        if (column < end) out[place_of<UNIT_INPUTS>(row, column, num_steps, out_stride)] = values[step];
    }
}
