// fusion_swiglu: out = gate / (1 + exp(-gate)) * up, in two kernels or one  Source: fastllm, swiglu
// Shapes:  gate_up [num_rows, 2 * num_columns] f32, of each row gate and then up; out, activated [num_rows,
//          num_columns] f32; the engine reads the same numbers in another order
// Problem: swiglu
// Sizes:   num_rows 1, 64, 1024; num_columns 14336
// Check:   num_rows 1, 3; num_columns 7, 300, 1024
// Claim:   fused < separate at num_rows 1024: what lies between the two kernels is neither written nor read
// Claim:   fused < separate at num_rows 1: there is one launch less
// Claim:   packed < fused at num_rows 1024: one load brings 16 bytes instead of 4
// Note:    In the order of the engine gate and up of eight columns lie side by side, so that one tile of its product
//          has both; that costs this kernel nothing.

__device__ __forceinline__ float silu(float gate) { return gate / (1.0f + expf(-gate)); }

// rung separate: one kernel for the activation, another for the product.
// launch: activate<<<dim3((num_columns + 255) / 256, num_rows), 256>>>
// launch: multiply<<<dim3((num_columns + 255) / 256, num_rows), 256>>>
__global__ void activate(const float* gate_up, float* activated, int num_columns) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    const size_t row = blockIdx.y;
    if (column < num_columns) activated[row * num_columns + column] = silu(gate_up[row * 2 * num_columns + column]);
}

__global__ void multiply(const float* gate_up, const float* activated, float* out, int num_columns) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    const size_t row = blockIdx.y;
    if (column >= num_columns) return;
    out[row * num_columns + column] =
        activated[row * num_columns + column] * gate_up[row * 2 * num_columns + num_columns + column];
}

// rung fused: one kernel. The activation stays in a register.
// launch: by_row<<<dim3((num_columns + 255) / 256, num_rows), 256>>>
__global__ void by_row(const float* gate_up, float* out, int num_columns) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    const size_t row = blockIdx.y;
    if (column >= num_columns) return;
    const float* gate = gate_up + row * 2 * num_columns + column;
    out[row * num_columns + column] = silu(gate[0]) * gate[num_columns];
}

// rung packed: four columns a thread, loaded and stored at once where rows begin at 16 bytes.
// launch: by_four<<<dim3((num_columns + 1023) / 1024, num_rows), 256>>>
__global__ void by_four(const float* gate_up, float* out, int num_columns) {
    const int column = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (column >= num_columns) return;
    const float* gates = gate_up + static_cast<size_t>(blockIdx.y) * 2 * num_columns;
    const float* ups = gates + num_columns;
    out += static_cast<size_t>(blockIdx.y) * num_columns;
    if (num_columns % 4 == 0) {
        const float4 gate = *reinterpret_cast<const float4*>(gates + column);
        const float4 up = *reinterpret_cast<const float4*>(ups + column);
        *reinterpret_cast<float4*>(out + column) =
            make_float4(silu(gate.x) * up.x, silu(gate.y) * up.y, silu(gate.z) * up.z, silu(gate.w) * up.w);
    } else {
        for (int i = column; i < num_columns && i < column + 4; ++i) out[i] = silu(gates[i]) * ups[i];
    }
}

// rung llmcli: llmcli's own kernel, which also knows the scales of rows that a product in half needs.
// launch: llmcli
