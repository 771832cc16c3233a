// stage_wide: x[t] += sum_i parts[i][t]; out[t] = round(w * x[t] / power[t]); row_scales[t] =
//             power[t] / sqrt(mean(x[t]^2) + eps), with a power of two a row; without a norm w and the root are 1
//           Source: kernels/gemv.cu, whose roundings these are
// Shapes:   x [num_tokens, num_inputs] XT; parts [num_parts, num_tokens, num_inputs] float, what gemm_wide leaves of a
//           product in parts, or null; norm_weight [num_inputs] float or null (no norm). UNIT_INPUTS 0: out fp16
//           [num_tokens, whole spans of 128 inputs], for gemv; else fp16 as common/wide_image.cuh has it. row_scales
//           [num_tokens] float: what products are to be multiplied with
// Requires: rows and norm_weight 16-byte aligned where IS_EVEN (num_inputs a multiple of 8); no aliases; sums of
//           squares below 2^128; parts null for an x of __half; at most 2 * NORM_TILE * MOST_PAIRS inputs
// Launch:   grid (num_tokens), block (512); may overlap the kernel in front of it
// Traffic:  x and parts once, what of x no register keeps once more; with parts x to memory; 2 bytes an input
// Numerics: common/norm_sums.cuh; each value is rounded once
// Choice:   gemm_wide takes its tokens in the order of the tensor cores, which a bulk copy cannot make of plain rows.
//           Tokens past the last one stay unwritten: nobody reads their products
#include "common/launch.cuh"
#include "common/norm_sums.cuh"
#include "common/parts.cuh"
#include "common/wide_image.cuh"

constexpr int BLOCK_SIZE = 512, MOST_PAIRS = 2048;
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
               float* __restrict__ row_scales, int num_parts, int num_inputs, float inverse_inputs, float eps) {
    __shared__ float4 pairs[MOST_PAIRS];
    const int token = blockIdx.x, num_steps = wide_steps(num_inputs), num_octets = num_steps * (STEP_INPUTS / 8);
    const size_t first = static_cast<size_t>(token) * num_inputs;
    const size_t part_size = static_cast<size_t>(gridDim.x) * num_inputs;
    x += first, parts += first;
    const bool has_norm = norm_weight != nullptr;
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
    // Times the norm's weights, as it is rounded.
    const auto normed = [&](int octet, float(&values)[8]) {
        if (!has_norm) return;
        float weights[8];
        load_inputs<IS_EVEN>(norm_weight, octet, num_inputs, weights);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] *= weights[i];
    };
    const auto sum = [&](int octet, const float(&values)[8]) {
        float weights[8];
        if (has_norm) load_inputs<IS_EVEN>(norm_weight, octet, num_inputs, weights);
        SumMax found = octet_sum(values, weights, has_norm);
        found = reduce::SumAndMax::combine(found, reduce::shuffle_xor(found, 1));
        if (octet % 2 == 0 && octet < num_octets) reinterpret_cast<SumMax*>(pairs)[octet / 2] = found;
    };
    const int end = (num_octets + 31) / 32 * 32;  // whole warps
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
    SumMax found = {0.0f, 0.0f};
    for (int pair = threadIdx.x % 32; pair < num_octets / 4; pair += 32) include_tiles(found, pairs[pair]);
    const RowScale power = row_power(largest_of_lanes(found.maximum));
    const float factor = has_norm ? inverse_rms(found.sum, inverse_inputs, eps) : 1.0f;
    if (threadIdx.x == 0) row_scales[token] = power.scale * factor;

    const auto put = [&](int octet, float(&values)[8]) {
        normed(octet, values);
        const uint4 all = rounded_octet(values, power.inverse);
        if constexpr (UNIT_INPUTS == 0) {
            uint4* row = reinterpret_cast<uint4*>(out) + static_cast<size_t>(token) * num_octets;
            row[octet] = all;
        } else {
            const unsigned words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const size_t place = wide_place<UNIT_INPUTS>(token, octet * 8 + 2 * i, num_steps);
                *reinterpret_cast<unsigned*>(out + place) = words[i];
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
