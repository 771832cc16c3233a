// stage_halves: image[n] = x[n] * w as pairs of 16-bit numbers, factors[n] = 1 / sqrt(mean(x[n]^2) + eps)
//           Source: common/product_halves.cuh
// Shapes:   x [num_rows, x_stride] float, of which num_inputs count; norm_weight [num_inputs] float or null (then
//           factors are 1); image [ceil(num_rows / TOKENS)][units][common/half_image.cuh]; factors [num_rows] float
// Requires: image 16-byte aligned; it does not alias x
// Launch:   grid (num_rows), block (512); may overlap the kernel in front
// Traffic:  x and norm_weight once; 4 bytes an input to image
// Numerics: the pairs, scales and factors that gemv makes of the same row, bit for bit: it is the same code
// Choice:   gemv makes them in every block anew; see stage_digits.cu. Rows past num_rows stay unwritten: nobody reads
//           their products
#include "common/gemv_output.cuh"
#include "common/half_image.cuh"
#include "common/launch.cuh"

constexpr int BLOCK_SIZE = 512;
constexpr int NUM_WARPS = BLOCK_SIZE / 32;

struct StageShape {
    int num_rows, num_inputs, x_stride;
    float eps;
};

template <typename WeightT, int TOKENS>
__global__ void __launch_bounds__(BLOCK_SIZE)
    stage_halves(const float* x, const float* __restrict__ norm_weight, unsigned char* image, float* factors,
                 StageShape shape) {
    using Image = HalfImage<WeightT, TOKENS>;
    constexpr int SPAN_INPUTS = SPAN_INPUTS_OF<WeightT>;
    __shared__ float squares[1][NUM_WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.x;
    const int num_spans = spans_of<WeightT>(shape.num_inputs);
    if (lane == 0) squares[0][warp] = 0.0f;
    __syncwarp();
    grid_dependency_launch();
    const InputRows rows = {x + static_cast<size_t>(row) * shape.x_stride, norm_weight, 1, shape.num_inputs,
                            shape.x_stride};
    uint4* spans =
        reinterpret_cast<uint4*>(image) + static_cast<size_t>(row / TOKENS) * num_spans * Image::SPAN_VECTORS;
    stage_spans<Image, 1, SPAN_INPUTS, NUM_WARPS, NUM_WARPS, 1>(
        spans, rows, 0, num_spans, squares, warp, lane, [] { grid_dependency_wait(); }, [] {});
    __syncthreads();  // squares are written
    if (threadIdx.x == 0) {
        GemvShape sums = {};
        sums.num_inputs = shape.num_inputs;
        sums.eps = shape.eps;
        factors[row] = norm_weight != nullptr ? norm_factor_of<NUM_WARPS>(squares[0], sums) : 1.0f;
    }
}
