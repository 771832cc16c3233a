// activations: puts one warp's share of fp32 rows into shared memory. A lane stages eight inputs of a span.
//
// A warp multiplies the spans w, w + TILE_WARPS, ... of every tile. In its block only warps with the same w need these
// inputs of x. They load them themselves, so no other warp waits for them before the end of a tile. The weights' type
// decides how inputs lie in shared memory (product_codes.cuh, product_halves.cuh, product_floats.cuh).
#pragma once

#include "common/cluster.cuh"
#include "common/reduce.cuh"
#include "common/tile.cuh"

// Rows of x. Load them after grid_dependency_wait; loads bypass L1, which may hold older values.
struct InputRows {
    const float* x;
    const float* norm_weight;  // or null
    int num_rows, num_inputs, x_stride;

    // Inputs [input, input + 8) of a row, or of the last one; zeros from num_inputs on.
    __device__ __forceinline__ void load(int row, int input, float (&values)[8]) const {
        load_eight<true>(x + static_cast<size_t>(min(row, num_rows - 1)) * x_stride, input, values);
    }
    __device__ __forceinline__ void load_weights(int input, float (&weights)[8]) const {
        load_eight<false>(norm_weight, input, weights);
    }

private:
    template <bool IS_FRESH>
    __device__ __forceinline__ void load_eight(const float* row, int input, float (&values)[8]) const {
        const float* source = row + input;
        if ((reinterpret_cast<unsigned long long>(source) & 15) == 0 && input + 8 <= num_inputs) {
            const float4* vectors = reinterpret_cast<const float4*>(source);
            set_eight(values, IS_FRESH ? __ldcg(vectors) : __ldg(vectors),
                      IS_FRESH ? __ldcg(vectors + 1) : __ldg(vectors + 1));
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                values[i] = input + i >= num_inputs ? 0.0f : IS_FRESH ? __ldcg(source + i) : __ldg(source + i);
            }
        }
    }
    __device__ __forceinline__ static void set_eight(float (&values)[8], float4 low, float4 high) {
        values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
        values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
    }
};

// The largest magnitude among the 8 * LANES inputs of a span; NaN counts as the largest. All lanes of the span get it.
template <int LANES>
__device__ __forceinline__ float largest_of(const float (&values)[8]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        asm("max.NaN.f32 %0, %0, %1;" : "+f"(largest) : "f"(fabsf(values[i])));
    }
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, largest, mask);
        asm("max.NaN.f32 %0, %0, %1;" : "+f"(largest) : "f"(other));
    }
    return largest;
}

// A power of two and its inverse, both normal numbers.
struct PowerScale {
    float scale, inverse;
};

// The power of two that takes a magnitude into [2^TOP, 2^(TOP + 1)), or as close as exponents allow.
template <int TOP>
__device__ __forceinline__ PowerScale scale_to(float magnitude) {
    const int exponent = min(254 + TOP - static_cast<int>(__float_as_uint(magnitude) >> 23), 253);
    return {__uint_as_float(static_cast<unsigned>(exponent) << 23),
            __uint_as_float(static_cast<unsigned>(254 - exponent) << 23)};
}

// NUM sums of a lane. Shared memory keeps them between two chunks of the inputs. `place` is the lane's first sum there;
// the others follow, 32 floats apart.
template <int NUM>
struct LaneSums {
    float values[NUM];

    __device__ __forceinline__ void begin(const float* place, bool is_first) {
#pragma unroll
        for (int i = 0; i < NUM; ++i) values[i] = is_first ? 0.0f : place[32 * i];
    }
    __device__ __forceinline__ void leave(float* place) const {
#pragma unroll
        for (int i = 0; i < NUM; ++i) place[32 * i] = values[i];
    }
    __device__ __forceinline__ float& operator[](int i) { return values[i]; }
};

// Stages a warp's part of the spans `begin` (a multiple of NUM_WARPS) to `end` - 1 of ROWS rows, times the norm's
// weights. Adds the squares of inputs of the spans w, w + NUM_WARPS, ... to squares[row][w]. A block stages what its
// own warps multiply: its TILE_WARPS / BLOCKS of every TILE_WARPS spans. They are contiguous in `shared`. A warp stages
// some of them, for ROWS / BLOCKS rows. `Product::Staged` writes one span to its UNIT_VECTORS vectors. `before_loads`
// is called once, before the first load of x, and `behind_loads` as soon as the first loads have started.
template <typename Product, int ROWS, int SPAN_INPUTS, int NUM_WARPS, int TILE_WARPS, int BLOCKS, typename Before,
          typename Behind>
__device__ __forceinline__ void stage_spans(uint4* shared, const InputRows& rows, int begin, int end,
                                            float (*squares)[NUM_WARPS], int warp, int lane,
                                            const Before& before_loads, const Behind& behind_loads) {
    constexpr int LANES = SPAN_INPUTS / 8, SPANS_A_PASS = 32 / LANES;
    constexpr int OWN_ROWS = ROWS / BLOCKS, PART_WARPS = TILE_WARPS / BLOCKS;
    // Passes whose loads run together. With several rows they are of one span, and share the norm's weights.
    constexpr int WANTED = OWN_ROWS == 1 ? 4 : OWN_ROWS;
    constexpr int DEPTH = WANTED < Product::MAX_DEPTH ? WANTED : Product::MAX_DEPTH;
    static_assert(OWN_ROWS == 1 || OWN_ROWS % DEPTH == 0, "the rows of a span share the norm's weights");
    const int turn = warp / PART_WARPS % (NUM_WARPS / TILE_WARPS);  // among the warps that multiply the same spans
    const int own = turn * TILE_WARPS + cluster_rank<BLOCKS>() * PART_WARPS + warp % PART_WARPS;
    const int first_row = warp / (NUM_WARPS / BLOCKS) * OWN_ROWS;
    const int eighth = lane % LANES;
    const int num_spans = max((end - begin - own + NUM_WARPS - 1) / NUM_WARPS, 1);  // or one that is not stored
    const int num_passes = (num_spans + SPANS_A_PASS - 1) / SPANS_A_PASS * OWN_ROWS;
    const auto span_of = [&](int pass) {
        return begin + own + NUM_WARPS * (pass / OWN_ROWS * SPANS_A_PASS + lane / LANES);
    };
    const auto input_of = [&](int pass) {
        const int span = span_of(pass);
        return span < end ? span * SPAN_INPUTS + 8 * eighth : rows.num_inputs;
    };
#pragma unroll 1
    for (int first = 0; first < num_passes; first += DEPTH) {
        float values[DEPTH][8], weights[8];
        if (rows.norm_weight != nullptr) rows.load_weights(input_of(first), weights);
        if (first == 0) before_loads();
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            if (first + d < num_passes) {
                rows.load(first_row + (first + d) % OWN_ROWS, input_of(first + d), values[d]);
            }
        }
        if (first == 0) behind_loads();
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            if (first + d >= num_passes) break;
            const int row = first_row + (first + d) % OWN_ROWS, span = span_of(first + d);
            if (rows.norm_weight != nullptr) {
                if (OWN_ROWS == 1 && d > 0) rows.load_weights(input_of(first + d), weights);
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    sum = __fmaf_rn(values[d][i], values[d][i], sum);
                    values[d][i] = __fmul_rn(values[d][i], weights[i]);
                }
                // Span by span, so that the sum does not depend on where a chunk begins.
                sum = warp_sum<LANES>(sum);
                float total = squares[row][own];
#pragma unroll
                for (int u = 0; u < SPANS_A_PASS; ++u) {
                    total = __fadd_rn(total, __shfl_sync(0xffffffffu, sum, u * LANES));
                }
                __syncwarp();
                if (lane == 0) squares[row][own] = total;
                __syncwarp();
            }
            const typename Product::Staged staged(values[d], eighth);
            const int place = (span - begin) / TILE_WARPS * PART_WARPS + span % PART_WARPS;
            if (span < end) staged.store(shared + place * Product::SPAN_VECTORS, eighth, row);
        }
    }
}
