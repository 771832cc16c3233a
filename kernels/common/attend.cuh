// attend: one warp's attention to a tile of 16 cached tokens in decode, on the tensor cores. For caches of 16 bits or
// of codes.
//
// Scores are K * Q^T (rows: tokens, columns: heads), the result is V^T * P^T (rows: dimensions, columns: heads), so
// keys and values go from memory to registers as they lie, and eight heads fill the columns. Queries and weights are
// split into two 16-bit parts, high + low: 16 (bfloat16) or 22 (fp16) bits of them reach the products.
// Key scales multiply scores, and value scales multiply weights, so codes need no scaling themselves.
// Lane 4g + t reads the dimensions 32 * step + 8t + (0..7) of the keys g and g + 8, and the dimensions 64 * step + 8g +
// (0..7) of the values 2t, 2t + 1, 2t + 8, 2t + 9. A product's inner index may run in any order.
#pragma once

#include "common/kv_code.cuh"
#include "common/matrix.cuh"
#include "common/reduce.cuh"

// The token of the tile, within `begin` to `end` - 1, that is nearest to this one.
__device__ __forceinline__ int between(int begin, int token, int end) { return max(begin, min(token, end - 1)); }

// Over the 8 lanes that differ in g.
__device__ __forceinline__ float max_over_rows(float value) {
#pragma unroll
    for (int mask = 16; mask >= 4; mask /= 2) value = fmaxf(value, reduce::shuffle_xor(value, mask));
    return value;
}
__device__ __forceinline__ float sum_over_rows(float value) {
#pragma unroll
    for (int mask = 16; mask >= 4; mask /= 2) value += reduce::shuffle_xor(value, mask);
    return value;
}

template <typename KvT, int HEAD_DIM, int HEAD_TILE>
struct Attend {
    using MmaT = typename KvFormat<KvT>::MmaT;
    static constexpr bool HAS_SCALES = KvFormat<KvT>::HAS_SCALES;
    static constexpr int TILE_TOKENS = 16;
    static constexpr int KEY_STEPS = (HEAD_DIM + 31) / 32;
    static constexpr int VALUE_STEPS = (HEAD_DIM + 63) / 64;
    static constexpr int COLUMNS = HEAD_TILE / 8;
    static constexpr int LAST_VECTOR = HEAD_DIM / 8 - 1;
    static constexpr int QUERY_SIZE = 32 * KEY_STEPS;
    // An odd number of 64 bytes, so that two rows of 64 bytes lie in different banks.
    static constexpr int QUERY_STRIDE = 32 * (KEY_STEPS | 1);

    // The block's queries, times scale * log2(e); rows past the last head and places past HEAD_DIM hold zeros.
    struct Queries {
        alignas(16) MmaT high[HEAD_TILE][QUERY_STRIDE];
        alignas(16) MmaT low[HEAD_TILE][QUERY_STRIDE];

        __device__ __forceinline__ void store(int head, int dimension, float value) {
            const MmaT rounded = from_float<MmaT>(within_range<MmaT>(value));
            high[head][dimension] = rounded;
            low[head][dimension] = from_float<MmaT>(value - to_float(rounded));
        }
    };

    // Heads 8 * column + 2t and 2t + 1: the largest score, this lane's part of the sum of weights, and the weighted sum
    // of values: [step][word][column] holds dimension 2 * word of both heads, then dimension 2 * word + 1.
    float maximum[COLUMNS][2];
    float sum[COLUMNS][2];
    float mixed[VALUE_STEPS][4][COLUMNS][4];
    KvVector<KvT> keys[2][KEY_STEPS];
    KvVector<KvT> values[4][VALUE_STEPS];
    float key_scales[2], value_scales[2];  // of tokens g and g + 8

    // Nothing seen yet.
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column) {
            maximum[column][0] = maximum[column][1] = reduce::minus_infinity();
            sum[column][0] = sum[column][1] = 0.0f;
#pragma unroll
            for (int step = 0; step < VALUE_STEPS; ++step) {
#pragma unroll
                for (int i = 0; i < 16; ++i) mixed[step][i / 4][column][i % 4] = 0.0f;
            }
        }
    }

    // One token seen, with these scores [HEAD_TILE] and value [HEAD_DIM].
    __device__ __forceinline__ void start_with(const float* scores, const float* value) {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 2 * COLUMNS; ++i) {
            start_column_with(i / 2, i % 2, scores[8 * (i / 2) + 2 * t + i % 2], value);
        }
    }
    // The same for one column: head 8 * column + 2t + i.
    __device__ __forceinline__ void start_column_with(int column, int i, float score, const float* value) {
        const int g = threadIdx.x % 32 / 4;
        const float weight = exp2_fast(WEIGHT_EXPONENT<KvT>);
        maximum[column][i] = score;
        sum[column][i] = g == 0 ? weight : 0.0f;
#pragma unroll
        for (int j = 0; j < 4 * VALUE_STEPS; ++j) {
            const int dimension = 64 * (j / 4) + 8 * g + 2 * (j % 4);
            if (dimension >= HEAD_DIM) continue;
            mixed[j / 4][j % 4][column][i] = weight * value[dimension];
            mixed[j / 4][j % 4][column][2 + i] = weight * value[dimension + 1];
        }
    }

    // Start loading a tile's keys [TILE_TOKENS, HEAD_DIM]. Tokens before `begin` and from `end` on may hold anything
    // and are not read: the nearest token inside is read instead. Past HEAD_DIM the last vector is read instead.
    __device__ __forceinline__ void load_keys(const HeadTokens<KvT>& tile, int begin, int end) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 2 * KEY_STEPS; ++i) {
            const int token = between(begin, g + 8 * (i / KEY_STEPS), end);
            const int vector = min(4 * (i % KEY_STEPS) + t, LAST_VECTOR);
            keys[i / KEY_STEPS][i % KEY_STEPS].set(load(tile, token, vector));
        }
        load_scales(tile, begin, end, key_scales);
    }

    // The same for values.
    __device__ __forceinline__ void load_values(const HeadTokens<KvT>& tile, int begin, int end) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 4 * VALUE_STEPS; ++i) {
            const int row = i / VALUE_STEPS;
            const int token = between(begin, 2 * t + row % 2 + 8 * (row / 2), end);
            const int vector = min(8 * (i % VALUE_STEPS) + g, LAST_VECTOR);
            values[row][i % VALUE_STEPS].set(load(tile, token, vector));
        }
        load_scales(tile, begin, end, value_scales);
    }

    // Past L1: no other block needs them soon.
    static __device__ __forceinline__ typename KvVector<KvT>::Words load(const HeadTokens<KvT>& tile, int token,
                                                                         int vector) {
        const KvT* place = tile.elements + token * HEAD_DIM + 8 * vector;
        return __ldcg(reinterpret_cast<const typename KvVector<KvT>::Words*>(place));
    }
    static __device__ __forceinline__ void load_scales(const HeadTokens<KvT>& tile, int begin, int end,
                                                       float (&scales)[2]) {
        if constexpr (HAS_SCALES) {
            const int g = threadIdx.x % 32 / 4;
            scales[0] = __ldcg(tile.scales + between(begin, g, end));
            scales[1] = __ldcg(tile.scales + between(begin, g + 8, end));
        }
    }

    // The loaded keys' scores: tokens g and g + 8, heads as in `maximum`.
    __device__ __forceinline__ void score(const Queries& queries, float (&scores)[COLUMNS][4]) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column) {
            float high[4] = {}, low[4] = {};  // two chains: the latency of an mma is 16 times its cost
#pragma unroll
            for (int step = 0; step < KEY_STEPS; ++step) {
                const int place = 32 * step + 8 * t;
                const uint4 b = *reinterpret_cast<const uint4*>(&queries.high[8 * column + g][place]);
                const uint4 c = *reinterpret_cast<const uint4*>(&queries.low[8 * column + g][place]);
                const KvVector<KvT>&k0 = keys[0][step], &k8 = keys[1][step];
                mma<MmaT>(high, k0.pair(0), k8.pair(0), k0.pair(1), k8.pair(1), b.x, b.y);
                mma<MmaT>(low, k0.pair(0), k8.pair(0), k0.pair(1), k8.pair(1), c.x, c.y);
                mma<MmaT>(high, k0.pair(2), k8.pair(2), k0.pair(3), k8.pair(3), b.z, b.w);
                mma<MmaT>(low, k0.pair(2), k8.pair(2), k0.pair(3), k8.pair(3), c.z, c.w);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                scores[column][i] = high[i] + low[i];
                if constexpr (HAS_SCALES) scores[column][i] *= key_scales[i / 2];
            }
        }
    }

    // Add the tokens `begin` to `end` - 1 of the loaded tile. `next_keys` is called when the keys have been used.
    template <typename NextKeys>
    __device__ __forceinline__ void take(const Queries& queries, int begin, int end, NextKeys next_keys) {
        const int g = threadIdx.x % 32 / 4;
        float scores[COLUMNS][4];
        score(queries, scores);
        next_keys();
        unsigned high[COLUMNS][2], low[COLUMNS][2];
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column) {
            float(&weights)[4] = scores[column];
            float factor[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (g < begin || g >= end) weights[i] = reduce::minus_infinity();
                if (g + 8 < begin || g + 8 >= end) weights[2 + i] = reduce::minus_infinity();
                // Finite: a tile has at least one token.
                const float larger = fmaxf(maximum[column][i], max_over_rows(fmaxf(weights[i], weights[2 + i])));
                factor[i] = exp2_fast(maximum[column][i] - larger);
                maximum[column][i] = larger;
                weights[i] = exp2_fast(weights[i] - larger + WEIGHT_EXPONENT<KvT>);
                weights[2 + i] = exp2_fast(weights[2 + i] - larger + WEIGHT_EXPONENT<KvT>);
                sum[column][i] = fmaf(sum[column][i], factor[i], weights[i] + weights[2 + i]);
                if constexpr (HAS_SCALES) weights[i] *= value_scales[0], weights[2 + i] *= value_scales[1];
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {  // tokens 0 to 7, then 8 to 15; b operands need heads as columns
                const unsigned pair = pack_pair<MmaT>(weights[2 * i], weights[2 * i + 1]);
                const float2 rounded = unpack_pair<MmaT>(pair);
                high[column][i] = transpose_matrix(pair);
                low[column][i] = transpose_matrix(
                    pack_pair<MmaT>(weights[2 * i] - rounded.x, weights[2 * i + 1] - rounded.y));
            }
#pragma unroll
            for (int i = 0; i < 16 * VALUE_STEPS; ++i) mixed[i / 16][i / 4 % 4][column][i % 4] *= factor[i % 2];
        }
#pragma unroll
        for (int i = 0; i < 4 * VALUE_STEPS; ++i) {
            const int step = i / 4, word = i % 4;
            unsigned even[2], odd[2];  // tokens 2t and 2t + 1, then 2t + 8 and 2t + 9
            values[0][step].pair_with(values[1][step], word, even[0], odd[0]);
            values[2][step].pair_with(values[3][step], word, even[1], odd[1]);
#pragma unroll
            for (int column = 0; column < COLUMNS; ++column) {
                float(&places)[4] = mixed[step][word][column];
                mma<MmaT>(places, even[0], odd[0], even[1], odd[1], high[column][0], high[column][1]);
                mma<MmaT>(places, even[0], odd[0], even[1], odd[1], low[column][0], low[column][1]);
            }
        }
    }

    // Write this warp's maxima, sums [HEAD_TILE] and weighted values [num_heads][STRIDE].
    template <int STRIDE>
    __device__ __forceinline__ void publish(float* maxima, float* sums, float* weighted,
                                            int num_heads = HEAD_TILE) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column) {
            const int head = 8 * column + 2 * t;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float total = sum_over_rows(sum[column][i]);
                if (g == 0) {
                    maxima[head + i] = maximum[column][i];
                    sums[head + i] = total;
                }
                if (head + i >= num_heads) continue;
#pragma unroll
                for (int j = 0; j < 4 * VALUE_STEPS; ++j) {
                    const int dimension = 64 * (j / 4) + 8 * g + 2 * (j % 4);
                    if (dimension >= HEAD_DIM) continue;
                    const float(&places)[4] = mixed[j / 4][j % 4][column];
                    *reinterpret_cast<float2*>(weighted + (head + i) * STRIDE + dimension) =
                        make_float2(places[i], places[2 + i]);
                }
            }
        }
    }
};
