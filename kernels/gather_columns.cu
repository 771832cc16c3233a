// gather_columns: out[r,i] = x[r,order[i]]                                              Source: GPTQ, desc_act
// Shapes:   x [num_rows, num_columns] T in rows `stride` apart; order [num_columns] int; out [num_rows, num_columns] T
// Requires: 0 <= order < num_columns; num_rows, num_columns >= 1; out does not alias x. The kernel in front, and those
//           that it overlaps, do not write order
// Launch:   grid (num_rows, ceil(num_columns / 1024)), block (256), no shared memory; may overlap the kernel in front
// Traffic:  2 * num_rows * num_columns * sizeof(T) bytes, and order once from memory, then from L2
// Numerics: exact
// Choice:   A matrix whose groups are not of neighbouring inputs gets its columns sorted at load, and this sorts its
//           inputs. Rejected: an order in gemv's staging (registers and a second form of every product, for few models)
#include "common/launch.cuh"
#include "common/types.cuh"

constexpr int BLOCK_SIZE = 256, STEPS = 4;

// x is not __restrict__: the compiler might move its loads before the wait.
template <typename T>
__global__ void __launch_bounds__(BLOCK_SIZE)
    gather_columns(const T* x, const int* __restrict__ order, T* out, int num_columns, int stride) {
    const T* row = x + static_cast<size_t>(blockIdx.x) * stride;
    T* out_row = out + static_cast<size_t>(blockIdx.x) * num_columns;
    const int first = blockIdx.y * STEPS * BLOCK_SIZE + threadIdx.x;
    int sources[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int column = first + step * BLOCK_SIZE;
        sources[step] = column < num_columns ? order[column] : 0;
    }
    grid_dependency_launch();
    grid_dependency_wait();
    T values[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) values[step] = __ldcg(row + sources[step]);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int column = first + step * BLOCK_SIZE;
        if (column < num_columns) out_row[column] = values[step];
    }
}
