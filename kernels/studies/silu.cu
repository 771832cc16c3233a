// silu: out[i] = x[i] / (1 + exp(-x[i]))  Source: fastllm's CUDA kernels
// Shapes:  x, out [num_values] f32
// Problem: silu
// Sizes:   num_values 65536, 16777216
// Check:   num_values 1, 3, 100, 1001, 4096, 70001
// Claim:   single_one < double_one at num_values 16777216: a 1.0 without f makes sum and quotient double
// Claim:   fast < single_one at num_values 16777216: a true division takes a dozen instructions, not two
// Claim:   packed < single_one at num_values 16777216: one load brings 16 bytes instead of 4
// Note:    A double constant costs most on consumer cards, whose multiprocessors have few units for doubles; data
//          centre cards have many.

constexpr int THREADS = 256;

// rung double_one: fastllm's kernel. Its 1.0 is a double, so the sum and the quotient are doubles, too.
// launch: silu_in_double<<<(num_values + 255) / 256, 256>>>
__global__ void silu_in_double(const float* x, float* out, int num_values) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < num_values) out[i] = x[i] / (1.0 + expf(-x[i]));
}

// rung single_one: an f after the 1.0.
// launch: silu_in_single<<<(num_values + 255) / 256, 256>>>
__global__ void silu_in_single(const float* x, float* out, int num_values) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < num_values) out[i] = x[i] / (1.0f + expf(-x[i]));
}

// Within some ulp more than the true division; 0 where the divisor exceeds 2^126, where the quotient is nearly 0 too.
__device__ float silu(float value) { return __fdividef(value, 1.0f + __expf(-value)); }

// rung fast: __expf and __fdividef.
// launch: silu_fast<<<(num_values + 255) / 256, 256>>>
__global__ void silu_fast(const float* x, float* out, int num_values) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < num_values) out[i] = silu(x[i]);
}

// rung packed: a thread takes four neighbours in one load. The thread after the last four takes what is left.
// launch: silu_of_pack<<<(num_values + 1023) / 1024, 256>>>
__global__ void silu_of_pack(const float* x, float* out, int num_values) {
    const int i = blockIdx.x * THREADS + threadIdx.x, num_packs = num_values / 4;
    if (i < num_packs) {
        const float4 pack = reinterpret_cast<const float4*>(x)[i];
        reinterpret_cast<float4*>(out)[i] = make_float4(silu(pack.x), silu(pack.y), silu(pack.z), silu(pack.w));
    } else if (i == num_packs) {
        for (int rest = 4 * num_packs; rest < num_values; ++rest) out[rest] = silu(x[rest]);
    }
}
