// matmul: out[r,c] = sum_k a[r,k] * b[k,c], from one thread a result to tensor cores  Source: PMPP chapter 5
// Shapes:  a [num_rows, num_inputs] f16; b [num_inputs, num_columns] f16; out [num_rows, num_columns] f32. Products of
//          halves are exact in f32, sums are f32 in all rungs
// Problem: matmul
// Sizes:   num_rows 1024, 4096; num_columns 4096; num_inputs 4096
// Check:   num_rows 37; num_columns 53; num_inputs 29
// Check:   num_rows 130; num_columns 61, 136; num_inputs 72, 200
// Claim:   naive < uncoalesced: threads side by side read and write numbers side by side
// Claim:   tiles < naive: a number that was read serves 16 results
// Claim:   registers < tiles: a number that comes from shared memory serves 8 results instead of 1
// Claim:   tensor_cores < registers: one instruction of a warp multiplies 16 x 16 by 16 x 8 numbers
// Claim:   pipelined < tensor_cores: the next tiles are under way while these are multiplied
// Claim:   cublas < pipelined: the library has kernels of its own for each generation of cards
// Claim:   cublas < llmcli: the engine brings its tiles into rows first
// Note:    Arithmetic intensity is operations for each byte that is read. Without tiles a thread reads two numbers for
//          one product and one sum, and caches alone keep it from being as slow as memory. A tile of T x T results
//          needs T times fewer bytes; the same holds again between shared memory and registers.

#include "common/matrix.cuh"

// rung uncoalesced: one thread a result. Neighbours in a warp have neighbouring rows: they read a at places far apart,
//   and write there.
// launch: by_row<<<dim3((num_rows + 15) / 16, (num_columns + 15) / 16), dim3(16, 16)>>>
__global__ void by_row(const __half* a, const __half* b, float* out, int num_rows, int num_columns, int num_inputs) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x, column = blockIdx.y * blockDim.y + threadIdx.y;
    if (row >= num_rows || column >= num_columns) return;
    float sum = 0.0f;
    for (int k = 0; k < num_inputs; ++k) {
        sum += __half2float(a[static_cast<size_t>(row) * num_inputs + k]) *
               __half2float(b[static_cast<size_t>(k) * num_columns + column]);
    }
    out[static_cast<size_t>(row) * num_columns + column] = sum;
}

// rung naive: one thread a result, and neighbours have neighbouring columns.
// launch: by_column<<<dim3((num_columns + 15) / 16, (num_rows + 15) / 16), dim3(16, 16)>>>
__global__ void by_column(const __half* a, const __half* b, float* out, int num_rows, int num_columns,
                          int num_inputs) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y * blockDim.y + threadIdx.y;
    if (row >= num_rows || column >= num_columns) return;
    float sum = 0.0f;
    for (int k = 0; k < num_inputs; ++k) {
        sum += __half2float(a[static_cast<size_t>(row) * num_inputs + k]) *
               __half2float(b[static_cast<size_t>(k) * num_columns + column]);
    }
    out[static_cast<size_t>(row) * num_columns + column] = sum;
}

// A number of a matrix, 0 outside.
__device__ __forceinline__ float element(const __half* matrix, int row, int column, int height, int width) {
    return row < height && column < width ? __half2float(matrix[static_cast<size_t>(row) * width + column]) : 0.0f;
}

// rung tiles: 16 x 16 threads put 16 x 16 numbers of a and of b into shared memory, where each serves 16 threads. No
//   thread may return early: it reads for others. Without the second barrier fast warps would overwrite what slow ones
//   still read.
// launch: square_tiles<<<dim3((num_columns + 15) / 16, (num_rows + 15) / 16), dim3(16, 16)>>>
__global__ void square_tiles(const __half* a, const __half* b, float* out, int num_rows, int num_columns,
                             int num_inputs) {
    __shared__ float a_tile[16][16], b_tile[16][16];
    const int x = threadIdx.x, y = threadIdx.y;
    const int column = blockIdx.x * 16 + x, row = blockIdx.y * 16 + y;
    float sum = 0.0f;
    for (int first = 0; first < num_inputs; first += 16) {
        a_tile[y][x] = element(a, row, first + x, num_rows, num_inputs);
        b_tile[y][x] = element(b, first + y, column, num_inputs, num_columns);
        __syncthreads();
        for (int k = 0; k < 16; ++k) sum += a_tile[y][k] * b_tile[k][x];
        __syncthreads();
    }
    if (row < num_rows && column < num_columns) out[static_cast<size_t>(row) * num_columns + column] = sum;
}

constexpr int TILE = 128;        // rows and columns of results of a block
constexpr int BLOCK_SIZE = 256;  // its threads
constexpr int STEP_INPUTS = 16;  // inputs in shared memory at a time
constexpr int PITCH = TILE + 4;  // keeps rows of a tile aligned to four floats, and fewer stores in one bank

// Four floats in one load.
__device__ __forceinline__ void load_four(float* values, const float* place) {
    const float4 four = *reinterpret_cast<const float4*>(place);
    values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
}

// rung registers: a block has 128 x 128 results, a thread 8 x 8 of them in registers. For 64 products it loads 16
//   numbers; a thread of the rung above loads 128.
// launch: register_tiles<<<dim3((num_columns + 127) / 128, (num_rows + 127) / 128), 256>>>
__global__ void __launch_bounds__(BLOCK_SIZE) register_tiles(const __half* a, const __half* b, float* out,
                                                             int num_rows, int num_columns, int num_inputs) {
    __shared__ __align__(16) float a_tile[STEP_INPUTS][PITCH];  // transposed, so that 4 rows are adjacent
    __shared__ __align__(16) float b_tile[STEP_INPUTS][PITCH];
    const int first_row = blockIdx.y * TILE, first_column = blockIdx.x * TILE;
    // A thread's rows and columns: four here, and four 64 further, so that 16 threads read 256 adjacent bytes.
    const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
    float sums[8][8] = {};
    for (int first = 0; first < num_inputs; first += STEP_INPUTS) {
        for (int i = threadIdx.x; i < TILE * STEP_INPUTS; i += BLOCK_SIZE) {
            const int r = i / STEP_INPUTS, k = i % STEP_INPUTS;
            a_tile[k][r] = element(a, first_row + r, first + k, num_rows, num_inputs);
        }
        for (int i = threadIdx.x; i < TILE * STEP_INPUTS; i += BLOCK_SIZE) {
            const int k = i / TILE, c = i % TILE;
            b_tile[k][c] = element(b, first + k, first_column + c, num_inputs, num_columns);
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < STEP_INPUTS; ++k) {
            float left[8], right[8];
            load_four(left, &a_tile[k][row]);
            load_four(left + 4, &a_tile[k][row + TILE / 2]);
            load_four(right, &b_tile[k][column]);
            load_four(right + 4, &b_tile[k][column + TILE / 2]);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
#pragma unroll
                for (int j = 0; j < 8; ++j) sums[i][j] += left[i] * right[j];
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int r = first_row + i / 4 * (TILE / 2) + row + i % 4;
            const int c = first_column + j / 4 * (TILE / 2) + column + j % 4;
            if (r < num_rows && c < num_columns) out[static_cast<size_t>(r) * num_columns + c] = sums[i][j];
        }
    }
}

constexpr int STAGE_INPUTS = 32;
// Rows of a tile of halves are 16 bytes longer than needed: 8 rows then begin in 8 different groups of banks, and
// ldmatrix reads them at once.
constexpr int A_PITCH = STAGE_INPUTS + 8;
constexpr int B_PITCH = TILE + 8;
constexpr int STAGE_HALVES = TILE * A_PITCH + STAGE_INPUTS * B_PITCH;
static_assert(2 * STAGE_HALVES == 18944, "the launches below say this number of bytes");

// Copies eight halves of a row into shared memory, zeros outside the matrix. Rows of whole vectors bypass the
// registers, and arrive later.
__device__ __forceinline__ void copy_eight(__half* place, const __half* matrix, int row, int column, int height,
                                           int width) {
    if (width % 8 == 0) {
        const bool exists = row < height && column < width;
        copy_async(shared_address(place), exists ? matrix + static_cast<size_t>(row) * width + column : matrix,
                   exists ? 16 : 0);
    } else {
        for (int i = 0; i < 8; ++i) {
            const bool exists = row < height && column + i < width;
            place[i] = exists ? matrix[static_cast<size_t>(row) * width + column + i] : __half(0);
        }
    }
}

// The parts of a and b that one step multiplies.
__device__ __forceinline__ void copy_stage(__half* stage, const __half* a, const __half* b, int first, int num_rows,
                                           int num_columns, int num_inputs) {
    const int first_row = blockIdx.y * TILE, first_column = blockIdx.x * TILE;
    for (int i = threadIdx.x; i < TILE * STAGE_INPUTS / 8; i += BLOCK_SIZE) {
        const int r = i / (STAGE_INPUTS / 8), k = i % (STAGE_INPUTS / 8) * 8;
        copy_eight(stage + r * A_PITCH + k, a, first_row + r, first + k, num_rows, num_inputs);
    }
    stage += TILE * A_PITCH;
    for (int i = threadIdx.x; i < STAGE_INPUTS * TILE / 8; i += BLOCK_SIZE) {
        const int k = i / (TILE / 8), c = i % (TILE / 8) * 8;
        copy_eight(stage + k * B_PITCH + c, b, first + k, first_column + c, num_inputs, num_columns);
    }
}

// A warp has 64 x 32 results of the block: 4 x 4 products of 16 x 8.
__device__ __forceinline__ void multiply_stage(float (&sums)[4][4][4], const __half* stage, int row, int column) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < STAGE_INPUTS; k += 16) {
        unsigned left[4][4], right[2][4];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            load_matrices(left[m], stage + (row + 16 * m + lane % 16) * A_PITCH + k + lane / 16 * 8);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            load_matrices_transposed(right[n], stage + TILE * A_PITCH + (k + lane % 16) * B_PITCH + column + 16 * n +
                                                   lane / 16 * 8);
        }
#pragma unroll
        for (int m = 0; m < 4; ++m) {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                mma<__half>(sums[m][n], left[m][0], left[m][1], left[m][2], left[m][3], right[n / 2][n % 2 * 2],
                            right[n / 2][n % 2 * 2 + 1]);
            }
        }
    }
}

// rung tensor_cores: 8 warps share a tile of 128 x 128, and tensor cores multiply. While numbers come,
//   the block does not multiply.
// launch: by_tensor_cores<1><<<dim3((num_columns + 127) / 128, (num_rows + 127) / 128), 256, 18944>>>

// rung pipelined: shared memory holds three steps; two are under way while one is multiplied. One barrier a step is
//   enough: it says that a step has arrived, and that the one before has been read.
// launch: by_tensor_cores<3><<<dim3((num_columns + 127) / 128, (num_rows + 127) / 128), 256, 3 * 18944>>>
template <int STAGES>
__global__ void __launch_bounds__(BLOCK_SIZE) by_tensor_cores(const __half* a, const __half* b, float* out,
                                                              int num_rows, int num_columns, int num_inputs) {
    extern __shared__ uint4 shared[];
    __half* stages = reinterpret_cast<__half*>(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = warp / 4 * 64, column = warp % 4 * 32;
    const int num_steps = (num_inputs + STAGE_INPUTS - 1) / STAGE_INPUTS;
    float sums[4][4][4] = {};
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) {
        copy_stage(stages + step * STAGE_HALVES, a, b, step * STAGE_INPUTS, num_rows, num_columns, num_inputs);
        copy_async_commit();
    }
    for (int step = 0; step < num_steps; ++step) {
        if constexpr (STAGES == 1) {
            copy_stage(stages, a, b, step * STAGE_INPUTS, num_rows, num_columns, num_inputs);
            copy_async_commit();
            copy_async_wait<0>();
            __syncthreads();
            multiply_stage(sums, stages, row, column);
            __syncthreads();
        } else {
            copy_async_wait<STAGES - 2>();
            __syncthreads();
            const int ahead = step + STAGES - 1;  // past the end it brings zeros
            copy_stage(stages + ahead % STAGES * STAGE_HALVES, a, b, ahead * STAGE_INPUTS, num_rows, num_columns,
                       num_inputs);
            copy_async_commit();
            multiply_stage(sums, stages + step % STAGES * STAGE_HALVES, row, column);
        }
    }
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int r = blockIdx.y * TILE + row + 16 * m + i / 2 * 8 + lane / 4;
                const int c = blockIdx.x * TILE + column + 8 * n + lane % 4 * 2 + i % 2;
                if (r < num_rows && c < num_columns) out[static_cast<size_t>(r) * num_columns + c] = sums[m][n][i];
            }
        }
    }
}

// rung cublas: the library of the card's maker, which reads the columns of b side by side.
// launch: cublas

// rung llmcli: what the engine does with a prompt: it brings its tiles of weights into rows, and calls the library.
// launch: llmcli
