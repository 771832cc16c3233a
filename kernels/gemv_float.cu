// gemv_float: y[r,m] = f(factor[r] * sum_k w[k] x[r,k] * W[m,k] + bias[m]), all in fp32
//           Source: design 3; HF LlamaRMSNorm, LlamaMLP
// Shapes:   tiles [num_tiles][units][1024] bytes (common/tile.cuh); x [num_rows, x_stride] XT, times row_scales
//           [num_rows] float if any; norm_weight
//           [num_inputs] float or null: w and factor are 1, else factor = 1 / sqrt(mean(x^2) + eps); bias
//           [16 * num_tiles] float or null; out [num_rows, out_stride] float. epilogue 0: out = y; 1: out += y; 2: a
//           tile has 8 rows of gate and the same 8 of up, and out = silu(gate) * up
// Requires: 1 <= num_rows <= 8; out does not alias x; tiles 16-byte aligned
// Launch:   grid (num_tiles), block (256), 4 KiB static shared memory; may overlap the kernel in front
// Traffic:  weights once for all rows; x from L2 in every block
// Numerics: |error| <= sqrt(K) * 2^-24 * sum |w x W| * factor. The order is fixed: a lane's own products, the lanes of
//           a row, then the warps in order; and it does not depend on the other rows
// Choice:   a block has a tile, its warps take turns at units: weights of 32 bits are for checking, not for speed
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "common/silu.cuh"
#include "common/tile.cuh"

constexpr int BLOCK_SIZE = 256, NUM_WARPS = BLOCK_SIZE / 32, MAX_ROWS = 8, UNIT_INPUTS = 16;
constexpr int ADD = 1, SWIGLU = 2;

struct GemvFloatShape {
    int num_rows, num_inputs, num_outputs, x_stride, out_stride, epilogue;
    float eps;
};

template <typename XT>
__global__ void __launch_bounds__(BLOCK_SIZE)
    gemv_float(const float4* __restrict__ tiles, const XT* x, const float* row_scales,
               const float* __restrict__ norm_weight,
               const float* __restrict__ biases, float* out, GemvFloatShape shape) {
    __shared__ float of_warps[NUM_WARPS][MAX_ROWS][TILE_ROWS];
    __shared__ float squares[NUM_WARPS][MAX_ROWS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, tile = blockIdx.x;
    const int num_units = (shape.num_inputs + UNIT_INPUTS - 1) / UNIT_INPUTS;
    const float4* of_tile = tiles + static_cast<size_t>(tile) * num_units * UNIT_VECTORS + lane;
    grid_dependency_launch();
    grid_dependency_wait();
    float sums[MAX_ROWS][2] = {}, square[MAX_ROWS] = {};
    for (int unit = warp; unit < num_units; unit += NUM_WARPS) {
        const float4 low = of_tile[unit * UNIT_VECTORS], high = of_tile[unit * UNIT_VECTORS + 32];
        const float weights[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
        const int first = unit * UNIT_INPUTS + t * 4;
#pragma unroll
        for (int row = 0; row < MAX_ROWS; ++row) {
            if (row >= shape.num_rows) break;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (first + i >= shape.num_inputs) break;
                float value = to_float(__ldcg(x + static_cast<size_t>(row) * shape.x_stride + first + i));
                square[row] = fmaf(value, value, square[row]);
                if (norm_weight != nullptr) value *= norm_weight[first + i];
                sums[row][0] = fmaf(value, weights[0][i], sums[row][0]);
                sums[row][1] = fmaf(value, weights[1][i], sums[row][1]);
            }
        }
    }
#pragma unroll
    for (int row = 0; row < MAX_ROWS; ++row) {
        if (row >= shape.num_rows) break;
        const float all[3] = {reduce::over_row<reduce::Sum, 4>(sums[row][0]),
                              reduce::over_row<reduce::Sum, 4>(sums[row][1]),
                              reduce::over_row<reduce::Sum, 4>(square[row])};
        if (t == 0) of_warps[warp][row][g] = all[0], of_warps[warp][row][g + 8] = all[1];
        if (lane == 0) squares[warp][row] = all[2];
    }
    __syncthreads();
    const int row = min(static_cast<int>(threadIdx.x) / TILE_ROWS, shape.num_rows - 1);
    const int column = threadIdx.x % TILE_ROWS;
    float sum = 0.0f, of_squares = 0.0f;
    for (int w = 0; w < NUM_WARPS; ++w) {
        sum = __fadd_rn(sum, of_warps[w][row][column]);
        of_squares = __fadd_rn(of_squares, squares[w][row]);
    }
    if (norm_weight != nullptr) {
        const float mean = __fdiv_rn(of_squares, static_cast<float>(shape.num_inputs));
        sum = __fmul_rn(sum, __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, shape.eps))));
    }
    if (row_scales != nullptr) sum = __fmul_rn(sum, __ldcg(row_scales + row));
    float result = __fadd_rn(sum, biases != nullptr ? biases[tile * TILE_ROWS + column] : 0.0f);
    const int tile_outputs = shape.epilogue == SWIGLU ? HALF_ROWS : TILE_ROWS;
    const int output = tile * tile_outputs + column;
    if (shape.epilogue == SWIGLU) {
        result = swiglu_of(result, __shfl_down_sync(0xffffffffu, result, HALF_ROWS));
    }
    const bool is_other = threadIdx.x / TILE_ROWS >= shape.num_rows;  // a thread without a row of its own
    if (is_other || column >= tile_outputs || output >= shape.num_outputs) return;
    float* place = out + static_cast<size_t>(row) * shape.out_stride + output;
    *place = shape.epilogue == ADD ? __fadd_rn(__ldcg(place), result) : result;
}
