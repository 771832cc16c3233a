// activations: rows of fp32 activations in shared memory in the order in which the tensor cores read them.
//
// A value x is kept as a pair in the mma's type, hi = round(x) and lo = round(x - hi), in two of the 8 columns of B; so
// its product with an exact weight is right to 2^-22 (fp16) or 2^-18 (bf16) of itself. For fp16 each row is first
// scaled by a power of two that takes its largest magnitude to [2^14, 2^15); small values are right to 2^-39 of that.
// Vectors of 16 bytes: [unit][part][column 2r + (lo)][t] with 8 inputs each, or for fp32 [unit][row][t] with 4.
// Both halves of 8 inputs take the 32 bytes of the 8 floats, which stand there until the row's scale is known.
#pragma once

#include "common/tile.cuh"

// One row's factors: x * scale is stored, and results are multiplied by `factor`.
struct RowFactors {
    float scale, factor;
};

template <typename T>
struct IsFp16 {
    static constexpr bool VALUE = false;
};
template <>
struct IsFp16<__half> {
    static constexpr bool VALUE = true;
};

// A read that stays behind grid_dependency_wait and misses L1, which may hold what stood there before.
__device__ __forceinline__ float4 load_fresh(const float* address) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(address)
                 : "memory");
    return v;
}
__device__ __forceinline__ float load_fresh_one(const float* address) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(address) : "memory");
    return v;
}

// Two values to one register in T, the first in the low half.
template <typename T>
__device__ __forceinline__ unsigned round_pair(float first, float second);
template <>
__device__ __forceinline__ unsigned round_pair<__half>(float first, float second) {
    return as_bits(__halves2half2(__float2half_rn(first), __float2half_rn(second)));
}
template <>
__device__ __forceinline__ unsigned round_pair<__nv_bfloat16>(float first, float second) {
    const __nv_bfloat162 pair = __halves2bfloat162(__float2bfloat16_rn(first), __float2bfloat16_rn(second));
    return *reinterpret_cast<const unsigned*>(&pair);
}

template <typename WeightT, int BLOCK_SIZE>
struct Activations {
    using T = typename TileFormat<WeightT>::ActivationT;
    static constexpr int UNIT_INPUTS = TileFormat<WeightT>::UNIT_INPUTS;
    static constexpr bool IS_SPLIT = sizeof(T) == 2;
    static constexpr int PARTS = UNIT_INPUTS >= 32 ? UNIT_INPUTS / 32 : 1;

    // Where the 8 inputs from `k` on (counted from the first input in shared memory) begin, in vectors; the second
    // vector is `step` further on.
    __device__ __forceinline__ static int place(int k, int row, int num_rows, int& step) {
        const int unit = k / UNIT_INPUTS;
        const int eighth = k % UNIT_INPUTS / 8;
        if (!IS_SPLIT) {
            step = 1;
            return (unit * num_rows + row) * 4 + 2 * eighth;
        }
        step = 4;
        return ((unit * PARTS + eighth % PARTS) * 2 * num_rows + 2 * row) * 4 + eighth / PARTS;
    }

    // Inputs [first, first + count) of one row to shared memory, times `norm_weight` if there is one; zeros from
    // num_inputs on. Adds what this thread saw to `largest` (a magnitude) and `squares` (before the norm's weight).
    __device__ static void load_row(float4* shared, const float* x, const float* norm_weight, int num_inputs, int first,
                                    int count, int row, int num_rows, float& largest, float& squares) {
        const bool is_aligned = (reinterpret_cast<unsigned long long>(x) & 15) == 0;
#pragma unroll 2
        for (int k = 8 * threadIdx.x; k < count; k += 8 * BLOCK_SIZE) {
            const int input = first + k;
            float values[8], weights[8];
            if (is_aligned && input + 8 <= num_inputs) {
                set_eight(values, load_fresh(x + input), load_fresh(x + input + 4));
                if (norm_weight != nullptr) {
                    const float4* vectors = reinterpret_cast<const float4*>(norm_weight + input);
                    set_eight(weights, __ldg(vectors), __ldg(vectors + 1));
                }
            } else {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const bool exists = input + i < num_inputs;
                    values[i] = exists ? load_fresh_one(x + input + i) : 0.0f;
                    weights[i] = exists && norm_weight != nullptr ? __ldg(norm_weight + input + i) : 0.0f;
                }
            }
            if (norm_weight != nullptr) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    squares = __fmaf_rn(values[i], values[i], squares);
                    values[i] = __fmul_rn(values[i], weights[i]);
                }
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(values[i]));
            int step;
            const int vector = place(k, row, num_rows, step);
            shared[vector] = make_float4(values[0], values[1], values[2], values[3]);
            shared[vector + step] = make_float4(values[4], values[5], values[6], values[7]);
        }
    }

    // Turns what this thread put there with load_row into hi and lo.
    __device__ static void split_row(float4* shared, int count, int row, int num_rows, float scale) {
        if constexpr (IS_SPLIT) {
            for (int k = 8 * threadIdx.x; k < count; k += 8 * BLOCK_SIZE) {
                int step;
                const int vector = place(k, row, num_rows, step);
                const float4 low = shared[vector], high = shared[vector + step];
                float values[8];
                set_eight(values, low, high);
                unsigned hi[4], lo[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float first = __fmul_rn(values[IS_PERMUTED ? i : 2 * i], scale);
                    const float second = __fmul_rn(values[IS_PERMUTED ? i + 4 : 2 * i + 1], scale);
                    hi[i] = round_pair<T>(first, second);
                    lo[i] = round_pair<T>(first - low_value(hi[i]), second - high_value(hi[i]));
                }
                shared[vector] = as_floats(hi);
                shared[vector + step] = as_floats(lo);
            }
        }
    }

    // A row's factors from its largest magnitude and its sum of squares.
    __device__ static RowFactors factors(float largest, float squares, bool has_norm, int num_inputs, float eps) {
        RowFactors result = {1.0f, 1.0f};
        if (IsFp16<T>::VALUE) {
            // 2^e for largest in [2^(14-e), 2^(15-e)), by exponents alone; e is kept where 2^-e is normal too.
            const int exponent = min(268 - static_cast<int>(__float_as_uint(largest) >> 23), 253);
            result.scale = __uint_as_float(static_cast<unsigned>(exponent) << 23);
            result.factor = __uint_as_float(static_cast<unsigned>(254 - exponent) << 23);
        }
        if (has_norm) {
            const float mean = __fdiv_rn(squares, static_cast<float>(num_inputs));
            result.factor = __fmul_rn(result.factor, __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps))));
        }
        return result;
    }

  private:
    static constexpr bool IS_PERMUTED = TileFormat<WeightT>::IS_PERMUTED;

    __device__ __forceinline__ static void set_eight(float (&values)[8], float4 low, float4 high) {
        values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
        values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
    }
    __device__ __forceinline__ static float low_value(unsigned pair) {
        return to_float(reinterpret_cast<const T*>(&pair)[0]);
    }
    __device__ __forceinline__ static float high_value(unsigned pair) {
        return to_float(reinterpret_cast<const T*>(&pair)[1]);
    }
    __device__ __forceinline__ static float4 as_floats(const unsigned (&v)[4]) {
        return make_float4(__uint_as_float(v[0]), __uint_as_float(v[1]), __uint_as_float(v[2]), __uint_as_float(v[3]));
    }
};
