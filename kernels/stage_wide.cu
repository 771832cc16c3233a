// stage_wide: x[t] += sum_i parts[i][t]; image[t] = round(w * x[t] / sqrt(mean(x[t]^2) + eps) / row_scale[t]); without
//             a norm w and the root are 1
//           Source: kernels/rms_norm.cu, kernels/round_rows.cu
// Shapes:   x [num_tokens, num_inputs] float; parts [num_parts, num_tokens, num_inputs] float, what gemm_wide leaves of
//           a product in parts, or null; norm_weight [num_inputs] float or null (no norm); image fp16 as
//           common/wide_image.cuh has it; row_scales [num_tokens] float, a power of two (1 unless the row's largest
//           magnitude exceeds 2^15); largest [num_tokens] or null
// Requires: rows and norm_weight 16-byte aligned for VECTOR 4; no aliases; sums of squares below 2^128
// Launch:   grid (num_tokens), block (512), 8 B static shared memory a warp; may overlap the kernel in front of it
// Traffic:  x and parts once, what of x no register keeps once more; with parts x to memory; 2 bytes an input
// Numerics: as rms_norm and round_rows, with another order of the sum of squares. A fixed tree, so two runs agree
// Choice:   gemm_wide takes its tokens in the order of the tensor cores, which a bulk copy cannot make of plain rows.
//           It also sets `largest` to zero, which gemm_wide needs: one launch less. Tokens past the last one stay
//           unwritten: nobody reads their products
#include "common/launch.cuh"
#include "common/matrix.cuh"
#include "common/parts.cuh"
#include "common/reduce.cuh"
#include "common/rows.cuh"
#include "common/wide_image.cuh"

constexpr int BLOCK_SIZE = 512;
constexpr int KEPT = 2;  // steps of the block whose columns stay in registers

// Neighbouring inputs of a token from `column` on: one, or two pairs.
template <int UNIT_INPUTS, int VECTOR>
__device__ __forceinline__ void store_inputs(unsigned char* image, int token, int column, int num_steps,
                                             const float (&values)[VECTOR]) {
    if constexpr (VECTOR == 1) {
        unsigned char* pair = image + wide_place<UNIT_INPUTS>(token, column / 2 * 2, num_steps);
        reinterpret_cast<__half*>(pair)[column % 2] = __float2half_rn(values[0]);
    } else {
#pragma unroll
        for (int i = 0; i < VECTOR; i += 2) {
            *reinterpret_cast<unsigned*>(image + wide_place<UNIT_INPUTS>(token, column + i, num_steps)) =
                pack_pair<__half>(values[i], values[i + 1]);
        }
    }
}

template <int UNIT_INPUTS, int VECTOR>
__global__ void __launch_bounds__(BLOCK_SIZE, 2)
    stage_wide(float* x, const float* parts, const float* __restrict__ norm_weight,
               unsigned char* __restrict__ image, float* __restrict__ row_scales, unsigned* __restrict__ largest,
               int num_parts, int num_inputs, float eps) {
    const int token = blockIdx.x, num_steps = wide_steps(num_inputs);
    const size_t row = num_inputs, first = token * row, part_size = gridDim.x * row;
    x += first, parts += first;
    grid_dependency_launch();
    grid_dependency_wait();
    const bool has_norm = norm_weight != nullptr;
    float kept[KEPT][VECTOR];
    const auto column_of = [&](int step) { return (step * BLOCK_SIZE + threadIdx.x) * VECTOR; };
    SumMax found = {0.0f, 0.0f};
    const auto weigh = [&](int column, float(&values)[VECTOR]) {
        float weights[VECTOR];
        if (has_norm) load_columns(norm_weight + column, weights);
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
            found.sum = fmaf(values[v], values[v], found.sum);
            if (has_norm) values[v] *= weights[v];
            found.maximum = reduce::Max::combine(found.maximum, fabsf(values[v]));
        }
    };
    // All loads before the first store: the compiler cannot know that the store changes none of them.
#pragma unroll
    for (int step = 0; step < KEPT; ++step) {
        if (column_of(step) < num_inputs) load_columns(x + column_of(step), kept[step]);
    }
    if (num_parts > 0) {
        const auto exists = [&](int step) { return column_of(step) < num_inputs; };
        add_parts_of<KEPT>(parts + column_of(0), BLOCK_SIZE * VECTOR, num_parts, part_size, kept, exists);
    }
#pragma unroll
    for (int step = 0; step < KEPT; ++step) {
        if (column_of(step) >= num_inputs) break;
        if (num_parts > 0) store_columns(x + column_of(step), kept[step]);
        weigh(column_of(step), kept[step]);
    }
    for (int column = column_of(KEPT); column < num_inputs; column += BLOCK_SIZE * VECTOR) {
        float values[1][VECTOR];
        load_columns(x + column, values[0]);
        if (num_parts > 0) {
            add_parts_of<1>(parts + column, 0, num_parts, part_size, values, [](int) { return true; });
            store_columns(x + column, values[0]);
        }
        weigh(column, values[0]);
    }
    found = reduce::over_row<reduce::SumAndMax, BLOCK_SIZE>(found);
    const float inverse_rms =
        norm_weight != nullptr ? rsqrtf(found.sum / static_cast<float>(num_inputs) + eps) : 1.0f;
    const RowScale scale = row_scale_for<__half>(found.maximum * inverse_rms);
    if (threadIdx.x == 0) {
        row_scales[token] = scale.scale;
        if (largest != nullptr) largest[token] = 0;
    }

    const float factor = inverse_rms * scale.inverse;
    const auto put = [&](int column, const float(&values)[VECTOR]) {
        float scaled[VECTOR] = {};  // zeros past the last input
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
            if (column < num_inputs) scaled[v] = values[v] * factor;
        }
        store_inputs<UNIT_INPUTS>(image, token, column, num_steps, scaled);
    };
    const int padded = num_steps * STEP_INPUTS;
#pragma unroll
    for (int step = 0; step < KEPT; ++step) {
        if (column_of(step) < padded) put(column_of(step), kept[step]);
    }
    for (int column = column_of(KEPT); column < padded; column += BLOCK_SIZE * VECTOR) {
        float values[VECTOR] = {}, weights[VECTOR];
        if (column < num_inputs) {
            load_columns(x + column, values);  // this thread wrote them
            if (has_norm) load_columns(norm_weight + column, weights);
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
                if (has_norm) values[v] *= weights[v];
            }
        }
        put(column, values);
    }
}
