// launch_bounds: f = the Laplacian of u on a 3-D grid, m rows a thread:
//   registers, spills, occupancy  Source: AMD lab notes, finite difference method, part 3
// Shapes:  u, f [nz, ny, nx] f32; nx >= 3, ny >= 18, nz >= 3; f is zero before, and its boundary stays so
// Problem: laplacian
// Sizes:   nx 256; ny 256; nz 256
// Sizes:   nx 512; ny 512; nz 512
// Check:   nx 3, 300; ny 18, 37; nz 3, 36
// Claim:   rows_4 < rows_1: a row that is read serves three rows of results, and 4 rows need 6 instead of 12
// Claim:   rows_16_one_block < rows_16: with more registers all loads of a thread are under way at a time
// Claim:   planes_16 < planes_16_spilled: a spilled register is stored to local memory and loaded again
// Claim:   rows_8_streaming < rows_1: the steps of the article together
// Note:    AMD's vector registers (VGPRs) are a thread's registers here, and its scratch is local memory. HIP compiles
//          for blocks of 1024 threads unless launch bounds say otherwise, so the article's m = 16 spills without them.
//          NVIDIA's compiler assumes nothing, and instead of spilling it orders the loads so that few registers are
//          enough. Bounds that ask for one block let it take more; bounds that ask for too many blocks make it spill.

// Where m rows of a thread begin. If ny - 2 is not a multiple of M, the last tile begins earlier, so that none ends
// outside; a few rows are then computed twice.
template <int M>
__device__ int first_row(int ny) {
    return min(1 + M * static_cast<int>(blockIdx.y), ny - 1 - M);
}

// Adds up M rows of results in the article's order: the plane below, the rows, the plane above.
template <int M, typename Store>
__device__ __forceinline__ void laplacian_rows(const float* __restrict__ u, float* __restrict__ f, int nx, int ny,
                                               float inverse_hx2, float inverse_hy2, float inverse_hz2,
                                               float center_factor, Store store) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i == 0 || i >= nx - 1) return;
    const int j = first_row<M>(ny), k = 1 + blockIdx.z;
    const size_t slice = static_cast<size_t>(nx) * ny, first = slice * k + static_cast<size_t>(nx) * j + i;
    const float *rows = u + first, *below = rows - slice, *above = rows + slice;
    float sums[M];
#pragma unroll
    for (int m = 0; m < M; ++m) sums[m] = inverse_hz2 * below[m * nx];
    sums[0] += inverse_hy2 * rows[-nx];
#pragma unroll
    for (int m = 0; m < M; ++m) {
        const float* row = rows + m * nx;
        const float center = row[0];
        sums[m] += inverse_hx2 * row[-1];
        sums[m] += center_factor * center;
        sums[m] += inverse_hx2 * row[1];
        if (m > 0) sums[m - 1] += inverse_hy2 * center;
        if (m < M - 1) sums[m + 1] += inverse_hy2 * center;
    }
    sums[M - 1] += inverse_hy2 * rows[M * nx];
#pragma unroll
    for (int m = 0; m < M; ++m) sums[m] += inverse_hz2 * above[m * nx];
#pragma unroll
    for (int m = 0; m < M; ++m) store(f + first + m * nx, sums[m]);
}

// rung rows_1: one result a thread, and no launch bounds: the compiler chooses how many registers to take.
// launch: unbounded<1><<<dim3((nx + 255) / 256, ny - 2, nz - 2), 256>>>

// rung rows_2: two rows of results a thread. Each is a neighbour of the other, and is read once for both.
// launch: unbounded<2><<<dim3((nx + 255) / 256, (ny - 1) / 2, nz - 2), 256>>>

// rung rows_4: four rows.
// launch: unbounded<4><<<dim3((nx + 255) / 256, (ny + 1) / 4, nz - 2), 256>>>

// rung rows_8: eight rows.
// launch: unbounded<8><<<dim3((nx + 255) / 256, (ny + 5) / 8, nz - 2), 256>>>

// rung rows_16: sixteen rows. On AMD this is where registers spill to scratch.
// launch: unbounded<16><<<dim3((nx + 255) / 256, (ny + 13) / 16, nz - 2), 256>>>
template <int M>
__global__ void unbounded(const float* __restrict__ u, float* __restrict__ f, int nx, int ny, float inverse_hx2,
                          float inverse_hy2, float inverse_hz2, float center_factor) {
    laplacian_rows<M>(u, f, nx, ny, inverse_hx2, inverse_hy2, inverse_hz2, center_factor,
                      [](float* place, float value) { *place = value; });
}

// rung rows_16_bounded: `__launch_bounds__(256)` promises blocks of 256 threads at most: the article's repair. Such a
//   thread may have 255 registers, which is what it may have without the promise.
// launch: bounded<16><<<dim3((nx + 255) / 256, (ny + 13) / 16, nz - 2), 256>>>
template <int M>
__global__ void __launch_bounds__(256)
    bounded(const float* __restrict__ u, float* __restrict__ f, int nx, int ny, float inverse_hx2, float inverse_hy2,
            float inverse_hz2, float center_factor) {
    laplacian_rows<M>(u, f, nx, ny, inverse_hx2, inverse_hy2, inverse_hz2, center_factor,
                      [](float* place, float value) { *place = value; });
}

// rung rows_8_one_block: `__launch_bounds__(256, 1)` says that one block on a multiprocessor is enough. The compiler
//   now has no reason to save registers, and lets more loads be under way.
// launch: bounded_one_block<8><<<dim3((nx + 255) / 256, (ny + 5) / 8, nz - 2), 256>>>

// rung rows_16_one_block: the same for sixteen rows.
// launch: bounded_one_block<16><<<dim3((nx + 255) / 256, (ny + 13) / 16, nz - 2), 256>>>
template <int M>
__global__ void __launch_bounds__(256, 1)
    bounded_one_block(const float* __restrict__ u, float* __restrict__ f, int nx, int ny, float inverse_hx2,
                      float inverse_hy2, float inverse_hz2, float center_factor) {
    laplacian_rows<M>(u, f, nx, ny, inverse_hx2, inverse_hy2, inverse_hz2, center_factor,
                      [](float* place, float value) { *place = value; });
}

// rung rows_8_streaming: eight rows with bounds, and streaming stores: the article's last kernel. See study streaming.
// launch: bounded_streaming<8><<<dim3((nx + 255) / 256, (ny + 5) / 8, nz - 2), 256>>>
template <int M>
__global__ void __launch_bounds__(256)
    bounded_streaming(const float* __restrict__ u, float* __restrict__ f, int nx, int ny, float inverse_hx2,
                      float inverse_hy2, float inverse_hz2, float center_factor) {
    laplacian_rows<M>(u, f, nx, ny, inverse_hx2, inverse_hy2, inverse_hz2, center_factor,
                      [](float* place, float value) { __stcs(place, value); });
}

constexpr int PLANES = 32;  // planes that a thread passes through

// Keeps M rows of three planes in registers while k goes up: no order of loads needs fewer.
template <int M>
__device__ __forceinline__ void laplacian_planes(const float* __restrict__ u, float* __restrict__ f, int nx, int ny,
                                                 int nz, float inverse_hx2, float inverse_hy2, float inverse_hz2,
                                                 float center_factor) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i == 0 || i >= nx - 1) return;
    const int j = first_row<M>(ny), first_plane = 1 + PLANES * blockIdx.z;
    const int num_planes = min(PLANES, nz - 1 - first_plane);
    const size_t slice = static_cast<size_t>(nx) * ny, first = slice * first_plane + static_cast<size_t>(nx) * j + i;
    const float* rows = u + first;
    float* results = f + first;
    float below[M], center[M], above[M];
#pragma unroll
    for (int m = 0; m < M; ++m) {
        below[m] = (rows - slice)[m * nx];
        center[m] = rows[m * nx];
    }
#pragma unroll 1
    for (int plane = 0; plane < num_planes; ++plane) {
#pragma unroll
        for (int m = 0; m < M; ++m) above[m] = (rows + slice)[m * nx];
#pragma unroll
        for (int m = 0; m < M; ++m) {
            const float before = m > 0 ? center[m - 1] : rows[-nx];
            const float after = m < M - 1 ? center[m + 1] : rows[M * nx];
            results[m * nx] = center_factor * center[m] + inverse_hz2 * (below[m] + above[m]) +
                              inverse_hy2 * (before + after) + inverse_hx2 * (rows[m * nx - 1] + rows[m * nx + 1]);
        }
#pragma unroll
        for (int m = 0; m < M; ++m) {
            below[m] = center[m];
            center[m] = above[m];
        }
        rows += slice;
        results += slice;
    }
}

// rung planes_16: sixteen rows, and a thread passes through 32 planes with three of them in registers: it reads each
//   point of its own rows once, whatever the caches do.
// launch: through_planes<16, 1><<<dim3((nx + 255) / 256, (ny + 13) / 16, (nz + 29) / 32), 256>>>

// rung planes_16_spilled: `__launch_bounds__(256, 6)` asks for six blocks on a multiprocessor, which leaves about 40
//   registers a thread, and three times sixteen are needed: the rest spills. The article's fault, made on purpose.
// launch: through_planes<16, 6><<<dim3((nx + 255) / 256, (ny + 13) / 16, (nz + 29) / 32), 256>>>
template <int M, int MIN_BLOCKS>
__global__ void __launch_bounds__(256, MIN_BLOCKS)
    through_planes(const float* __restrict__ u, float* __restrict__ f, int nx, int ny, int nz, float inverse_hx2,
                   float inverse_hy2, float inverse_hz2, float center_factor) {
    laplacian_planes<M>(u, f, nx, ny, nz, inverse_hx2, inverse_hy2, inverse_hz2, center_factor);
}
