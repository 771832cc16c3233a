// splits: the parts into which attention of decoding cuts a row's tokens, and how their results are merged. Cuts depend
// on the position alone, and everything is added in a fixed order. So a row's bits depend neither on other rows nor on
// which block computes a split. A split's tiles go to WARPS warps in turns: warp, warp + WARPS, ...
#pragma once

#include "common/matrix.cuh"
#include "common/reduce.cuh"

constexpr int WARPS = 4;
// The fewest tokens in a split. Fewer are read faster than one more part is combined.
constexpr int MIN_SPLIT_TOKENS = 128;
// Parts of splits that are merged at a time.
constexpr int PARTS_AT_ONCE = 8;

// A head's part of a split in memory: the weighted values, maximum, sum, 2 unused.
template <int HEAD_DIM>
constexpr int PART_SIZE = HEAD_DIM + 4;

// Splits the cached tokens [visible, position) equally, in whole tiles that begin where pages do. The last split also
// takes the row's own token.
template <int TILE_TOKENS>
struct Splits {
    static_assert(MIN_SPLIT_TOKENS % TILE_TOKENS == 0, "splits are whole tiles");
    int visible, start, position;
    int tokens, count;  // in a split; splits

    __device__ __forceinline__ Splits(int row_position, int window, int max_splits) {
        position = row_position;
        visible = max(0, position + 1 - window);
        start = visible < position ? visible / TILE_TOKENS * TILE_TOKENS : position;
        tokens = MIN_SPLIT_TOKENS;
        count = max(1, (cached() + MIN_SPLIT_TOKENS - 1) / MIN_SPLIT_TOKENS);
        if (count > max_splits) {  // two divisions, which short rows need not wait for
            const int share = (cached() + max_splits - 1) / max_splits;
            tokens = (share + TILE_TOKENS - 1) / TILE_TOKENS * TILE_TOKENS;
            count = (cached() + tokens - 1) / tokens;
        }
    }
    __device__ __forceinline__ int cached() const { return position - start; }
    __device__ __forceinline__ int begin(int split) const { return start + split * tokens; }
    __device__ __forceinline__ int end(int split) const { return min(position, start + (split + 1) * tokens); }
};

// Merges the results of a split's warps for one head: maxima and sums [WARPS][HEAD_TILE].
template <int HEAD_TILE>
struct WarpMerge {
    float maximum, sum, weights[WARPS];

    __device__ __forceinline__ WarpMerge(const float (&maxima)[WARPS][HEAD_TILE], const float (&sums)[WARPS][HEAD_TILE],
                                         int head) {
        maximum = maxima[0][head];
#pragma unroll
        for (int warp = 1; warp < WARPS; ++warp) maximum = fmaxf(maximum, maxima[warp][head]);
        sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            weights[warp] = exp2_fast(maxima[warp][head] - maximum);  // 0 for a warp without tokens
            sum = fmaf(weights[warp], sums[warp][head], sum);
        }
    }
    // The weighted values of four dimensions, `stride` from one warp to the next.
    __device__ __forceinline__ float4 mix(const float* values, int stride) const {
        float4 mixed = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            const float2* pairs = reinterpret_cast<const float2*>(values + warp * stride);
            const float2 low = pairs[0], high = pairs[1];
            mixed.x = fmaf(weights[warp], low.x, mixed.x), mixed.y = fmaf(weights[warp], low.y, mixed.y);
            mixed.z = fmaf(weights[warp], high.x, mixed.z), mixed.w = fmaf(weights[warp], high.y, mixed.w);
        }
        return mixed;
    }
};

// Merges four dimensions of a head's parts of splits, PARTS_AT_ONCE at a time.
struct SplitMerge {
    float2 found = make_float2(reduce::minus_infinity(), 0.0f);  // maximum, sum
    float4 mixed = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

    // Adds the first `count` parts, all after those of the calls before. Every call but the last adds PARTS_AT_ONCE.
    template <typename LoadFound, typename LoadValues>
    __device__ __forceinline__ void add(int count, LoadFound load_found, LoadValues load_values) {
        float2 others[PARTS_AT_ONCE];
        float4 values[PARTS_AT_ONCE];
        float larger = found.x;
#pragma unroll
        for (int j = 0; j < PARTS_AT_ONCE; ++j) {
            others[j] = j < count ? load_found(j) : make_float2(reduce::minus_infinity(), 0.0f);
            values[j] = j < count ? load_values(j) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
#pragma unroll
        for (int j = 0; j < PARTS_AT_ONCE; ++j) larger = fmaxf(larger, others[j].x);
        const float factor = exp2_fast(found.x - larger);
        found.x = larger;
        found.y *= factor;
        mixed.x *= factor, mixed.y *= factor, mixed.z *= factor, mixed.w *= factor;
#pragma unroll
        for (int j = 0; j < PARTS_AT_ONCE; ++j) {
            const float weight = exp2_fast(others[j].x - found.x);
            found.y = fmaf(weight, others[j].y, found.y);
            mixed.x = fmaf(weight, values[j].x, mixed.x), mixed.y = fmaf(weight, values[j].y, mixed.y);
            mixed.z = fmaf(weight, values[j].z, mixed.z), mixed.w = fmaf(weight, values[j].w, mixed.w);
        }
    }
    __device__ __forceinline__ float4 result() const {
        const float inverse = 1.0f / found.y;
        return make_float4(mixed.x * inverse, mixed.y * inverse, mixed.z * inverse, mixed.w * inverse);
    }
};

// Four dimensions of a head's result from two parts of splits, each with its maximum and sum: the bits of SplitMerge.
__device__ __forceinline__ float4 merge_two(const float2& found0, const float2& found1, const float4& mixed0,
                                            const float4& mixed1) {
    const float larger = fmaxf(found0.x, found1.x);
    const float weight0 = exp2_fast(found0.x - larger), weight1 = exp2_fast(found1.x - larger);
    const auto add = [&](float value0, float value1) { return fmaf(weight1, value1, fmaf(weight0, value0, 0.0f)); };
    const float inverse = 1.0f / add(found0.y, found1.y);
    return make_float4(add(mixed0.x, mixed1.x) * inverse, add(mixed0.y, mixed1.y) * inverse,
                       add(mixed0.z, mixed1.z) * inverse, add(mixed0.w, mixed1.w) * inverse);
}

// Four dimensions of a head's result, from its parts [num_splits][PART_SIZE] in memory.
template <int HEAD_DIM>
__device__ __forceinline__ float4 merge_splits(const float* parts, int num_splits, int vector) {
    SplitMerge merged;
#pragma unroll 1
    for (int begin = 0; begin < num_splits; begin += PARTS_AT_ONCE) {
        const auto part = [&](int j) { return parts + size_t(begin + j) * PART_SIZE<HEAD_DIM>; };
        merged.add(
            num_splits - begin, [&](int j) { return __ldcg(reinterpret_cast<const float2*>(part(j) + HEAD_DIM)); },
            [&](int j) { return __ldcg(reinterpret_cast<const float4*>(part(j) + 4 * vector)); });
    }
    return merged.result();
}
