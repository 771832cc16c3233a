// gelu: out[i] = x[i] / 2 * (1 + tanh(sqrt(2 / pi) * (x[i] + 0.044715 * x[i]^3)))  Source: fastllm's CUDA kernels
// Shapes:  x, out [num_values] f32
// Problem: gelu
// Sizes:   num_values 65536, 16777216
// Check:   num_values 1, 3, 100, 1001, 4096, 70001
// Claim:   exponential < tanh at num_values 16777216: tanhf has a branch for small arguments, and divides
// Claim:   packed < exponential at num_values 16777216: one load brings 16 bytes instead of 4
// Claim:   four_packs < packed at num_values 16777216: four loads of a thread are under way together
// Note:    tanh.approx, which hardware has, is left out: its error is far above the rounding of a float.

constexpr int THREADS = 256, PACKS = 4;

// rung tanh: fastllm's kernel. A thread a value, and the formula as it is written.
// launch: gelu_by_tanh<<<(num_values + 255) / 256, 256>>>
__global__ void gelu_by_tanh(const float* x, float* out, int num_values) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= num_values) return;
    const float value = x[i];
    out[i] = 0.5f * value * (1.0f + tanhf(0.7978845608028654f * value * (1.0f + 0.044715f * value * value)));
}

// (1 + tanh(z)) / 2 = 1 / (1 + exp(-2z)). It also keeps the bits that 1 + tanh(z) loses where z is far below 0.
__device__ float gelu(float value) {
    const float twice = 1.5957691216057308f * value * (1.0f + 0.044715f * value * value);
    return __fdividef(value, 1.0f + __expf(-twice));
}

// rung exponential: the same function by one fast exponential and one fast division, without branches.
// launch: gelu_by_exp<<<(num_values + 255) / 256, 256>>>
__global__ void gelu_by_exp(const float* x, float* out, int num_values) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < num_values) out[i] = gelu(x[i]);
}

__device__ float4 gelu(float4 pack) { return make_float4(gelu(pack.x), gelu(pack.y), gelu(pack.z), gelu(pack.w)); }

// rung packed: a thread takes four neighbours in one load. The thread after the last four takes what is left.
// launch: gelu_of_pack<<<(num_values + 1023) / 1024, 256>>>
__global__ void gelu_of_pack(const float* x, float* out, int num_values) {
    const int i = blockIdx.x * THREADS + threadIdx.x, num_packs = num_values / 4;
    if (i < num_packs) {
        reinterpret_cast<float4*>(out)[i] = gelu(reinterpret_cast<const float4*>(x)[i]);
    } else if (i == num_packs) {
        for (int rest = 4 * num_packs; rest < num_values; ++rest) out[rest] = gelu(x[rest]);
    }
}

// rung four_packs: four packs a thread; all loads stand before the arithmetic. A fourth of the threads, each with four
//   times the bytes under way.
// launch: gelu_of_packs<<<(num_values + 4095) / 4096, 256>>>
__global__ void gelu_of_packs(const float* x, float* out, int num_values) {
    const int first = blockIdx.x * THREADS * PACKS + threadIdx.x, num_packs = num_values / 4;
    float4 packs[PACKS];
#pragma unroll
    for (int k = 0; k < PACKS; ++k) {
        const int i = first + k * THREADS;
        if (i < num_packs) packs[k] = reinterpret_cast<const float4*>(x)[i];
    }
#pragma unroll
    for (int k = 0; k < PACKS; ++k) {
        const int i = first + k * THREADS;
        if (i < num_packs) {
            reinterpret_cast<float4*>(out)[i] = gelu(packs[k]);
        } else if (i == num_packs) {
            for (int rest = 4 * num_packs; rest < num_values; ++rest) out[rest] = gelu(x[rest]);
        }
    }
}
