// transpose: out[j, i] = x[i, j], directly and
//   through shared memory  Source: Programming Massively Parallel Processors, chapters 5 and 6
// Shapes:  x [num_rows, num_columns] f32; out [num_columns, num_rows] f32
// Problem: transpose
// Sizes:   num_rows 4096, 8192; num_columns 8192
// Check:   num_rows 1, 31, 70; num_columns 1, 33, 100
// Claim:   columns_read < rows_read: scattered loads find their lines in L1 again, scattered stores gather nowhere near
// Claim:   padded < rows_read: through shared memory both sides touch memory in rows
// Claim:   padded < tile: a column of 32 floats lies in one bank, and its 32 threads wait for each other
// Claim:   swizzled < tile: a column may be spread over the banks without padding
// Note:    Every rung moves a tile of 32 x 32 by 32 x 8 threads, so only the order of access differs. The floor is a
//          copy of as many bytes: contiguous in the study coalescing.

constexpr int TILE = 32, ROWS_AT_A_TIME = 8;

// rung rows_read: a warp reads a row, and writes a column: 32 stores to 32 lines.
// launch: write_columns<<<dim3((num_columns + 31) / 32, (num_rows + 31) / 32), dim3(32, 8)>>>
__global__ void write_columns(const float* __restrict__ x, float* __restrict__ out, int num_rows, int num_columns) {
    const int column = blockIdx.x * TILE + threadIdx.x;
#pragma unroll
    for (int done = 0; done < TILE; done += ROWS_AT_A_TIME) {
        const int row = blockIdx.y * TILE + done + threadIdx.y;
        if (row < num_rows && column < num_columns) {
            out[static_cast<size_t>(column) * num_rows + row] = x[static_cast<size_t>(row) * num_columns + column];
        }
    }
}

// rung columns_read: the other way round: 32 loads from 32 lines, and a row of results.
// launch: read_columns<<<dim3((num_columns + 31) / 32, (num_rows + 31) / 32), dim3(32, 8)>>>
__global__ void read_columns(const float* __restrict__ x, float* __restrict__ out, int num_rows, int num_columns) {
    const int row = blockIdx.y * TILE + threadIdx.x;
#pragma unroll
    for (int done = 0; done < TILE; done += ROWS_AT_A_TIME) {
        const int column = blockIdx.x * TILE + done + threadIdx.y;
        if (row < num_rows && column < num_columns) {
            out[static_cast<size_t>(column) * num_rows + row] = x[static_cast<size_t>(row) * num_columns + column];
        }
    }
}

// A tile in shared memory is written by rows and read by columns. Element (y, x) of it lies at `place(y, x)`.
template <typename Place>
__device__ void through_tile(const float* __restrict__ x, float* __restrict__ out, int num_rows, int num_columns,
                             float* tile, Place place) {
    const int first_row = blockIdx.y * TILE, first_column = blockIdx.x * TILE;
#pragma unroll
    for (int done = 0; done < TILE; done += ROWS_AT_A_TIME) {
        const int y = done + threadIdx.y;
        const int row = first_row + y, column = first_column + threadIdx.x;
        if (row < num_rows && column < num_columns) {
            tile[place(y, threadIdx.x)] = x[static_cast<size_t>(row) * num_columns + column];
        }
    }
    __syncthreads();  // the tile is written
#pragma unroll
    for (int done = 0; done < TILE; done += ROWS_AT_A_TIME) {
        const int y = done + threadIdx.y;
        const int row = first_row + threadIdx.x, column = first_column + y;
        if (row < num_rows && column < num_columns) {
            out[static_cast<size_t>(column) * num_rows + row] = tile[place(threadIdx.x, y)];
        }
    }
}

// rung tile: a tile goes through shared memory, so a warp reads rows and writes rows. Its columns lie 32 floats apart,
//   all in the same of 32 banks: reading a column takes 32 turns.
// launch: by_tile<32><<<dim3((num_columns + 31) / 32, (num_rows + 31) / 32), dim3(32, 8)>>>

// rung padded: rows of the tile are 33 floats long. A column's elements now lie in 32 different banks.
// launch: by_tile<33><<<dim3((num_columns + 31) / 32, (num_rows + 31) / 32), dim3(32, 8)>>>
template <int ROW_LENGTH>
__global__ void by_tile(const float* __restrict__ x, float* __restrict__ out, int num_rows, int num_columns) {
    __shared__ float tile[TILE * ROW_LENGTH];
    through_tile(x, out, num_rows, num_columns, tile, [](int y, int x_in_tile) { return y * ROW_LENGTH + x_in_tile; });
}

// rung swizzled: no padding, but row y stands in another order: element x at place x ^ y. Rows and columns both meet
//   every bank once.
// launch: by_swizzled_tile<<<dim3((num_columns + 31) / 32, (num_rows + 31) / 32), dim3(32, 8)>>>
__global__ void by_swizzled_tile(const float* __restrict__ x, float* __restrict__ out, int num_rows, int num_columns) {
    __shared__ float tile[TILE * TILE];
    through_tile(x, out, num_rows, num_columns, tile, [](int y, int x_in_tile) { return y * TILE + (x_in_tile ^ y); });
}
