// stage_wide: x[t] += sum_i parts[i][t]; out[t] = round(w * x[t] / sqrt(mean(x[t]^2) + eps) / row_scale[t]); without a
//             norm w and the root are 1
//           Source: kernels/gemv.cu, whose roundings these are
// Shapes:   x [num_tokens, num_inputs] XT; parts [num_parts, num_tokens, num_inputs] float, what gemm_wide leaves of a
//           product in parts, or null; norm_weight [num_inputs] float or null (no norm). UNIT_INPUTS 0: out fp16
//           [num_tokens, whole spans of 128 inputs], for gemv; else fp16 as common/wide_image.cuh has it. row_scales
//           [num_tokens] float, a power of two (1 unless the row's largest magnitude exceeds 2^15)
// Requires: rows and norm_weight 16-byte aligned where IS_EVEN (num_inputs a multiple of 8); no aliases; sums of
//           squares below 2^128; parts null for an x of __half; at most 256 * MOST_GROUPS inputs
// Launch:   grid (num_tokens), block (512); may overlap the kernel in front of it
// Traffic:  x and parts once, what of x no register keeps once more; with parts x to memory; 2 bytes an input
// Numerics: common/norm_sums.cuh; each value is rounded once
// Choice:   gemm_wide takes its tokens in the order of the tensor cores, which a bulk copy cannot make of plain rows.
//           Tokens past the last one stay unwritten: nobody reads their products
#include "common/launch.cuh"
#include "common/norm_sums.cuh"
#include "common/parts.cuh"
#include "common/wide_image.cuh"

constexpr int BLOCK_SIZE = 512, MOST_GROUPS = 512;
constexpr int KEPT = 2;  // octets of a thread that stay in registers

template <bool IS_EVEN, typename T>
__device__ __forceinline__ void load_inputs(const T* row, int octet, int num_inputs, float (&values)[8]) {
    if constexpr (IS_EVEN) {
        load_octet(row, octet, num_inputs, values);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = octet * 8 + i < num_inputs ? to_float(row[octet * 8 + i]) : 0.0f;
    }
}

template <int UNIT_INPUTS, typename XT, bool IS_EVEN>
__global__ void __launch_bounds__(BLOCK_SIZE, 2)
    stage_wide(XT* x, const float* parts, const float* __restrict__ norm_weight, unsigned char* __restrict__ out,
               float* __restrict__ row_scales, int num_parts, int num_inputs, float eps) {
    __shared__ float groups[2 * MOST_GROUPS];
    const int token = blockIdx.x, num_steps = wide_steps(num_inputs), num_octets = num_steps * (STEP_INPUTS / 8);
    const size_t first = static_cast<size_t>(token) * num_inputs;
    const size_t part_size = static_cast<size_t>(gridDim.x) * num_inputs;
    x += first, parts += first;
    const bool has_norm = norm_weight != nullptr;
    NormSums norm_sums(groups, num_octets);
    grid_dependency_launch();
    grid_dependency_wait();
    float kept[KEPT][8];
    // All loads before the first store: the compiler cannot know that the store changes none of them.
#pragma unroll
    for (int k = 0; k < KEPT; ++k) load_inputs<IS_EVEN>(x, k * BLOCK_SIZE + threadIdx.x, num_inputs, kept[k]);
    const auto add = [&](int octet, float(&values)[8]) {
        if constexpr (sizeof(XT) == 4) {
            if (num_parts == 0) return;
            for (int part = 0; part < num_parts; ++part) {
                float others[8];
                load_inputs<IS_EVEN>(parts + part * part_size, octet, num_inputs, others);
#pragma unroll
                for (int i = 0; i < 8; ++i) values[i] = __fadd_rn(values[i], others[i]);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (octet * 8 + i < num_inputs) x[octet * 8 + i] = values[i];
            }
        }
    };
    const auto sum = [&](int octet, const float(&values)[8]) {
        float weights[8];
        if (has_norm) load_inputs<IS_EVEN>(norm_weight, octet, num_inputs, weights);
        norm_sums.add(values, weights, has_norm, octet);
    };
    const int end = 32 * norm_sums.num_groups;  // whole warps
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        const int octet = k * BLOCK_SIZE + threadIdx.x;
        if (octet < end) add(octet, kept[k]), sum(octet, kept[k]);
    }
    for (int octet = KEPT * BLOCK_SIZE + threadIdx.x; octet < end; octet += BLOCK_SIZE) {
        float values[8];
        load_inputs<IS_EVEN>(x, octet, num_inputs, values);
        add(octet, values), sum(octet, values);
    }
    __syncthreads();
    const NormFactor factor = norm_sums.factor(num_inputs, eps, has_norm);
    if (threadIdx.x == 0) row_scales[token] = factor.scale;

    const auto put = [&](int octet, const float(&values)[8]) {
        float weights[8], scaled[8];
        if (has_norm) load_inputs<IS_EVEN>(norm_weight, octet, num_inputs, weights);
#pragma unroll
        for (int i = 0; i < 8; ++i) scaled[i] = (has_norm ? values[i] * weights[i] : values[i]) * factor.factor;
        const unsigned pairs[4] = {pack_pair<__half>(scaled[0], scaled[1]), pack_pair<__half>(scaled[2], scaled[3]),
                                   pack_pair<__half>(scaled[4], scaled[5]), pack_pair<__half>(scaled[6], scaled[7])};
        if constexpr (UNIT_INPUTS == 0) {
            uint4* row = reinterpret_cast<uint4*>(out) + static_cast<size_t>(token) * num_octets;
            row[octet] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const size_t place = wide_place<UNIT_INPUTS>(token, octet * 8 + 2 * i, num_steps);
                *reinterpret_cast<unsigned*>(out + place) = pairs[i];
            }
        }
    };
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        const int octet = k * BLOCK_SIZE + threadIdx.x;
        if (octet < num_octets) put(octet, kept[k]);
    }
    for (int octet = KEPT * BLOCK_SIZE + threadIdx.x; octet < num_octets; octet += BLOCK_SIZE) {
        float values[8];
        load_inputs<IS_EVEN>(x, octet, num_inputs, values);  // this thread wrote them
        put(octet, values);
    }
}
