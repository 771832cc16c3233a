// fusion: out = GELU(x + bias) by the formula with tanh, one operation a kernel or all in one  Source: PMPP chapter 5
// Shapes:  x, out [num_rows, num_columns] f32; bias [num_columns] f32; y, t as x, between the kernels
// Problem: bias_gelu
// Sizes:   num_rows 1, 64, 4096; num_columns 4096
// Check:   num_rows 1, 3; num_columns 7, 300, 1024
// Claim:   two < separate at num_rows 1: there are seven launches less
// Claim:   two < separate at num_rows 4096: what lies between the operations stays in registers
// Claim:   fused < two at num_rows 4096: x + bias is not written and read again
// Claim:   packed < fused at num_rows 4096: one load brings 16 bytes instead of 4
// Note:    A framework that runs each operation as it is called reads and writes all of memory for each. With one row
//          the launches are what costs; with many it is the bytes.

// The place of a thread in the array; one row of blocks is one row of x.
__device__ __forceinline__ size_t place_of_thread(int num_columns) {
    return static_cast<size_t>(blockIdx.y) * num_columns + blockIdx.x * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ bool is_column(int num_columns) {
    return blockIdx.x * blockDim.x + threadIdx.x < num_columns;
}

constexpr float CUBE = 0.044715f;
constexpr float ROOT = 0.7978845608028654f;  // of 2 / pi

__device__ __forceinline__ float gelu(float y) {
    return 0.5f * y * (1.0f + tanhf(ROOT * (y + CUBE * y * y * y)));
}

// rung separate: nine kernels of one operation each, as eager PyTorch runs the formula.
// launch: add_bias<<<dim3((num_columns + 255) / 256, num_rows), 256>>>
// launch: cube<<<dim3((num_columns + 255) / 256, num_rows), 256>>>
// launch: multiply_by_cube_factor<<<dim3((num_columns + 255) / 256, num_rows), 256>>>
// launch: add_y<<<dim3((num_columns + 255) / 256, num_rows), 256>>>
// launch: multiply_by_root<<<dim3((num_columns + 255) / 256, num_rows), 256>>>
// launch: apply_tanh<<<dim3((num_columns + 255) / 256, num_rows), 256>>>
// launch: add_one<<<dim3((num_columns + 255) / 256, num_rows), 256>>>
// launch: multiply_by_y<<<dim3((num_columns + 255) / 256, num_rows), 256>>>
// launch: halve<<<dim3((num_columns + 255) / 256, num_rows), 256>>>

__global__ void add_bias(const float* x, const float* bias, float* y, int num_columns) {
    const size_t i = place_of_thread(num_columns);
    if (is_column(num_columns)) y[i] = x[i] + bias[blockIdx.x * blockDim.x + threadIdx.x];
}

__global__ void cube(const float* y, float* t, int num_columns) {
    const size_t i = place_of_thread(num_columns);
    if (is_column(num_columns)) t[i] = y[i] * y[i] * y[i];
}

__global__ void multiply_by_cube_factor(float* t, int num_columns) {
    if (is_column(num_columns)) t[place_of_thread(num_columns)] *= CUBE;
}

__global__ void add_y(const float* y, float* t, int num_columns) {
    const size_t i = place_of_thread(num_columns);
    if (is_column(num_columns)) t[i] += y[i];
}

__global__ void multiply_by_root(float* t, int num_columns) {
    if (is_column(num_columns)) t[place_of_thread(num_columns)] *= ROOT;
}

__global__ void apply_tanh(float* t, int num_columns) {
    const size_t i = place_of_thread(num_columns);
    if (is_column(num_columns)) t[i] = tanhf(t[i]);
}

__global__ void add_one(float* t, int num_columns) {
    if (is_column(num_columns)) t[place_of_thread(num_columns)] += 1.0f;
}

__global__ void multiply_by_y(const float* y, float* t, int num_columns) {
    const size_t i = place_of_thread(num_columns);
    if (is_column(num_columns)) t[i] *= y[i];
}

__global__ void halve(const float* t, float* out, int num_columns) {
    const size_t i = place_of_thread(num_columns);
    if (is_column(num_columns)) out[i] = 0.5f * t[i];
}

// rung two: the bias as a kernel of its own, because the matrix product had it so; then GELU in one kernel.
// launch: add_bias<<<dim3((num_columns + 255) / 256, num_rows), 256>>>
// launch: gelu_of_y<<<dim3((num_columns + 255) / 256, num_rows), 256>>>
__global__ void gelu_of_y(const float* y, float* out, int num_columns) {
    const size_t i = place_of_thread(num_columns);
    if (is_column(num_columns)) out[i] = gelu(y[i]);
}

// rung fused: one kernel. Every number is read once and written once.
// launch: bias_gelu<<<dim3((num_columns + 255) / 256, num_rows), 256>>>
__global__ void bias_gelu(const float* x, const float* bias, float* out, int num_columns) {
    const size_t i = place_of_thread(num_columns);
    if (is_column(num_columns)) out[i] = gelu(x[i] + bias[blockIdx.x * blockDim.x + threadIdx.x]);
}

// rung packed: four numbers a thread, loaded and stored at once where rows begin at 16 bytes.
// launch: bias_gelu_of_four<<<dim3((num_columns + 1023) / 1024, num_rows), 256>>>
__global__ void bias_gelu_of_four(const float* x, const float* bias, float* out, int num_columns) {
    const int column = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (column >= num_columns) return;
    x += static_cast<size_t>(blockIdx.y) * num_columns;
    out += static_cast<size_t>(blockIdx.y) * num_columns;
    if (num_columns % 4 == 0) {
        const float4 value = *reinterpret_cast<const float4*>(x + column);
        const float4 shift = *reinterpret_cast<const float4*>(bias + column);
        *reinterpret_cast<float4*>(out + column) = make_float4(gelu(value.x + shift.x), gelu(value.y + shift.y),
                                                               gelu(value.z + shift.z), gelu(value.w + shift.w));
    } else {
        for (int i = column; i < num_columns && i < column + 4; ++i) out[i] = gelu(x[i] + bias[i]);
    }
}
