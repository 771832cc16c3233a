// swiglu: out[t,i] = gate / (1 + exp(-gate)) * up, of columns i and num_columns + i  Source: fastllm's CUDA kernels
// Shapes:  gate_up [num_rows, 2 * num_columns] f32, first the gates, then the ups; out [num_rows, num_columns] f32
// Problem: swiglu
// Sizes:   num_rows 1, 512; num_columns 4096, 14336
// Check:   num_rows 1, 5; num_columns 3, 100, 1001, 4096, 5120
// Claim:   single_one < double_one at num_rows 512; num_columns 14336: a 1.0 without f makes sum, quotient and product
//          double
// Claim:   rows < single_one at num_rows 512; num_columns 14336: no division by a width that the compiler cannot know
// Claim:   packed < rows at num_rows 512; num_columns 14336: one load brings 16 bytes instead of 4
// Claim:   fast < packed at num_rows 512; num_columns 14336: a true division takes a dozen instructions, not two
// Claim:   fast < llmcli at num_rows 1; num_columns 14336: the engine gives a row to one block, as it looks for the
//          row's largest value; many blocks share a row here
// Note:    The engine's product of one token computes this in its own end (gemv), so that one row is never a launch of
//          its own.

constexpr int THREADS = 256;

// rung double_one: fastllm's kernel. A thread a value; a division finds its row. The 1.0 is a double, and so is what it
//   meets.
// launch: swiglu_in_double<<<(num_rows * num_columns + 255) / 256, 256>>>
__global__ void swiglu_in_double(const float* gate_up, float* out, int num_rows, int num_columns) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= num_rows * num_columns) return;
    const size_t place = static_cast<size_t>(i / num_columns) * 2 * num_columns + i % num_columns;
    const float gate = gate_up[place], up = gate_up[place + num_columns];
    out[i] = gate / (1.0 + expf(-gate)) * up;
}

// rung single_one: an f after the 1.0.
// launch: swiglu_in_single<<<(num_rows * num_columns + 255) / 256, 256>>>
__global__ void swiglu_in_single(const float* gate_up, float* out, int num_rows, int num_columns) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= num_rows * num_columns) return;
    const size_t place = static_cast<size_t>(i / num_columns) * 2 * num_columns + i % num_columns;
    const float gate = gate_up[place], up = gate_up[place + num_columns];
    out[i] = gate / (1.0f + expf(-gate)) * up;
}

// rung rows: the grid has a second dimension, so blockIdx.y is the row.
// launch: swiglu_by_rows<<<dim3((num_columns + 255) / 256, num_rows), 256>>>
__global__ void swiglu_by_rows(const float* gate_up, float* out, int num_columns) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= num_columns) return;
    gate_up += static_cast<size_t>(blockIdx.y) * 2 * num_columns;
    const float gate = gate_up[i], up = gate_up[num_columns + i];
    out[static_cast<size_t>(blockIdx.y) * num_columns + i] = gate / (1.0f + expf(-gate)) * up;
}

template <bool IS_FAST>
__device__ float swiglu(float gate, float up) {
    if constexpr (IS_FAST) {
        return __fdividef(gate, 1.0f + __expf(-gate)) * up;
    } else {
        return gate / (1.0f + expf(-gate)) * up;
    }
}

// rung packed: a thread takes four neighbours, one load each for gates and ups. Rows begin at 16 bytes only where whole
//   loads fill a row; others go one by one.
// launch: swiglu_of_packs<false><<<dim3((num_columns + 1023) / 1024, num_rows), 256>>>

// rung fast: __expf and __fdividef, as the engine has them for 16-bit outputs.
// launch: swiglu_of_packs<true><<<dim3((num_columns + 1023) / 1024, num_rows), 256>>>

template <bool IS_FAST>
__global__ void swiglu_of_packs(const float* gate_up, float* out, int num_columns) {
    const int first = 4 * (blockIdx.x * THREADS + threadIdx.x);
    gate_up += static_cast<size_t>(blockIdx.y) * 2 * num_columns;
    out += static_cast<size_t>(blockIdx.y) * num_columns;
    if (num_columns % 4 == 0) {
        if (first >= num_columns) return;
        const float4 gate = *reinterpret_cast<const float4*>(gate_up + first);
        const float4 up = *reinterpret_cast<const float4*>(gate_up + num_columns + first);
        *reinterpret_cast<float4*>(out + first) =
            make_float4(swiglu<IS_FAST>(gate.x, up.x), swiglu<IS_FAST>(gate.y, up.y), swiglu<IS_FAST>(gate.z, up.z),
                        swiglu<IS_FAST>(gate.w, up.w));
    } else {
        for (int i = first; i < min(first + 4, num_columns); ++i) {
            out[i] = swiglu<IS_FAST>(gate_up[i], gate_up[num_columns + i]);
        }
    }
}

// rung llmcli: llmcli's own kernel. It reads eight gates and eight ups in turn, as its matrix product leaves them, and
//   keeps a row in the registers of a warp or a block: for 16-bit outputs it needs the row's largest value first.
// launch: llmcli
