// stage_wide: x[t] += sum_i parts[i][t]; out[t] = round(w * x[t] / power[t]); row_scales[t] =
//             power[t] / sqrt(mean(x[t]^2) + eps), with a power of two a row; without a norm w and the root are 1
//           Source: kernels/gemv.cu, whose roundings these are
// Shapes:   x [num_tokens, num_inputs] XT; parts [num_parts, num_tokens, num_inputs] float, what gemm_wide leaves of a
//           product in parts, or null; norm_weight [num_inputs] float or null (no norm). UNIT_INPUTS 0: out fp16
//           [num_tokens, whole spans of 128 inputs], for gemv; else fp16 as common/wide_image.cuh has it. row_scales
//           [num_tokens] float: what products are to be multiplied with
// Requires: rows and norm_weight 16-byte aligned where IS_EVEN (num_inputs a multiple of 8); no aliases; sums of
//           squares below 2^128; parts null for an x of __half
// Launch:   grid (num_tokens), block (512), dynamic shared memory of 16 bytes for each 32 inputs of whole spans; may
//           overlap the kernel in front of it
// Traffic:  x and parts once, what of x no register keeps once more; with parts x to memory; 2 bytes an input
// Numerics: common/norm_sums.cuh; each value is rounded once
// Choice:   gemm_wide takes its tokens in the order of the tensor cores, which a bulk copy cannot make of plain rows.
//           Tokens past the last one stay unwritten: nobody reads their products
#include "common/launch.cuh"
#include "common/norm_sums.cuh"
#include "common/parts.cuh"
#include "common/wide_image.cuh"

constexpr int BLOCK_SIZE = 512;
constexpr int KEPT = 2;  // quads of a thread that stay in registers

// Four neighbouring inputs, zeros past the last one.
template <bool IS_EVEN, typename T>
__device__ __forceinline__ void load_quad(const T* row, int quad, int num_inputs, float (&values)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = 0.0f;
    if constexpr (IS_EVEN) {
        if (quad * 4 < num_inputs) load_columns(row + quad * 4, values);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (quad * 4 + i < num_inputs) values[i] = to_float(row[quad * 4 + i]);
        }
    }
}

// Quads of this thread, a block's threads apart, from `first` on: x plus parts, which x then holds. All loads come
// before the first store: the compiler cannot know that the store changes none of them.
template <bool IS_EVEN, int COUNT, typename XT>
__device__ __forceinline__ void load_sums(XT* x, const float* parts, int num_parts, size_t part_size, int first,
                                          int num_inputs, float (&values)[COUNT][4]) {
    const auto quad_of = [&](int i) { return first + i * BLOCK_SIZE; };
    const auto exists = [&](int i) { return quad_of(i) * 4 < num_inputs; };
#pragma unroll
    for (int i = 0; i < COUNT; ++i) load_quad<IS_EVEN>(x, quad_of(i), num_inputs, values[i]);
    if constexpr (sizeof(XT) == 4) {
        if (num_parts == 0) return;
        if constexpr (IS_EVEN) {
            add_parts_of<COUNT>(parts + first * 4, BLOCK_SIZE * 4, num_parts, part_size, values, exists);
        } else {
            for (int part = 0; part < num_parts; ++part) {
#pragma unroll
                for (int i = 0; i < COUNT; ++i) {
                    float others[4];
                    load_quad<false>(parts + part * part_size, quad_of(i), num_inputs, others);
#pragma unroll
                    for (int j = 0; j < 4; ++j) values[i][j] = __fadd_rn(values[i][j], others[j]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (!exists(i)) continue;
            if constexpr (IS_EVEN) {
                store_columns(x + quad_of(i) * 4, values[i]);
            } else {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    if (quad_of(i) * 4 + j < num_inputs) x[quad_of(i) * 4 + j] = values[i][j];
                }
            }
        }
    }
}

template <int UNIT_INPUTS, typename XT, bool IS_EVEN>
__global__ void __launch_bounds__(BLOCK_SIZE, 2)
    stage_wide(XT* x, const float* parts, const float* __restrict__ norm_weight, unsigned char* __restrict__ out,
               float* __restrict__ row_scales, int num_parts, int num_inputs, float inverse_inputs, float eps) {
    extern __shared__ float4 pairs[];
    const int token = blockIdx.x, num_steps = wide_steps(num_inputs), num_quads = num_steps * (STEP_INPUTS / 4);
    const size_t first = static_cast<size_t>(token) * num_inputs;
    const size_t part_size = static_cast<size_t>(gridDim.x) * num_inputs;
    x += first, parts += first;
    const bool has_norm = norm_weight != nullptr;
    grid_dependency_launch();
    grid_dependency_wait();
    const auto quad_of = [&](int k) { return k * BLOCK_SIZE + static_cast<int>(threadIdx.x); };
    const auto sum = [&](int quad, const float(&values)[4]) {
        float weights[4];
        if (has_norm) load_quad<IS_EVEN>(norm_weight, quad, num_inputs, weights);
        const SumMax found = tile_sum(values, weights, has_norm);
        if (quad % 4 == 0 && quad < num_quads) reinterpret_cast<SumMax*>(pairs)[quad / 4] = found;
    };
    float kept[KEPT][4];
    load_sums<IS_EVEN>(x, parts, num_parts, part_size, quad_of(0), num_inputs, kept);
#pragma unroll
    for (int k = 0; k < KEPT; ++k) sum(quad_of(k), kept[k]);
    for (int k = KEPT; k * BLOCK_SIZE < num_quads; ++k) {
        float values[1][4];
        load_sums<IS_EVEN>(x, parts, num_parts, part_size, quad_of(k), num_inputs, values);
        sum(quad_of(k), values[0]);
    }
    __syncthreads();
    SumMax found = {0.0f, 0.0f};
    for (int pair = threadIdx.x % 32; pair < num_quads / 8; pair += 32) include_tiles(found, pairs[pair]);
    const RowScale power = row_power(largest_of_lanes(found.maximum));
    const float factor = has_norm ? inverse_rms(found.sum, inverse_inputs, eps) : 1.0f;
    if (threadIdx.x == 0) row_scales[token] = power.scale * factor;

    const auto put = [&](int quad, float(&values)[4]) {  // times the norm's weights
        if (quad >= num_quads) return;
        float weights[4] = {1.0f, 1.0f, 1.0f, 1.0f};
        if (has_norm) load_quad<IS_EVEN>(norm_weight, quad, num_inputs, weights);
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = values[i] * weights[i] * power.inverse;
        const unsigned low = pack_pair<__half>(values[0], values[1]), high = pack_pair<__half>(values[2], values[3]);
        if constexpr (UNIT_INPUTS == 0) {
            reinterpret_cast<uint2*>(out)[static_cast<size_t>(token) * num_quads + quad] = make_uint2(low, high);
        } else {
            const size_t place = wide_place(UNIT_INPUTS, token, quad * 4, num_steps);
            const size_t next = wide_place(UNIT_INPUTS, token, quad * 4 + 2, num_steps);
            *reinterpret_cast<unsigned*>(out + place) = low, *reinterpret_cast<unsigned*>(out + next) = high;
        }
    };
#pragma unroll
    for (int k = 0; k < KEPT; ++k) put(quad_of(k), kept[k]);
    for (int k = KEPT; k * BLOCK_SIZE < num_quads; ++k) {
        float values[4];
        load_quad<IS_EVEN>(x, quad_of(k), num_inputs, values);  // this thread wrote them
        put(quad_of(k), values);
    }
}
