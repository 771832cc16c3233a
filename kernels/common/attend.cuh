// attend: one warp's attention to a tile of cached tokens in decode. For caches of 16 bits or of codes on the tensor
// cores, 16 tokens at a time; the form for fp32 is at the end.
//
// Scores are K * Q^T (rows: tokens, columns: heads), the result is V^T * P^T (rows: dimensions, columns: heads), so
// keys and values go from memory to registers as they lie, and eight heads fill the columns. Queries and weights are
// split into two 16-bit parts, high + low: 16 (bfloat16) or 22 (fp16) bits of them reach the products.
// Key scales multiply scores, and value scales multiply weights, so codes need no scaling themselves.
// Lane 4g + t reads the dimensions 32 * step + 8t + (0..7) of the keys g and g + 8, and the dimensions 64 * step + 8g +
// (0..7) of the values 2t, 2t + 1, 2t + 8, 2t + 9. A product's inner index may run in any order.
#pragma once

#include "common/head.cuh"

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

    // Adds to a column's scores the products with the 8 dimensions from `place` on of the keys g and g + 8: with both
    // parts of the queries, in two chains, as the latency of an mma is 16 times its cost.
    static __device__ __forceinline__ void multiply(const Queries& queries, int column, int place,
                                                    const KvVector<KvT>& k0, const KvVector<KvT>& k8, float (&high)[4],
                                                    float (&low)[4]) {
        const int row = 8 * column + threadIdx.x % 32 / 4;
        const uint4 b = *reinterpret_cast<const uint4*>(&queries.high[row][place]);
        const uint4 c = *reinterpret_cast<const uint4*>(&queries.low[row][place]);
        mma<MmaT>(high, k0.pair(0), k8.pair(0), k0.pair(1), k8.pair(1), b.x, b.y);
        mma<MmaT>(low, k0.pair(0), k8.pair(0), k0.pair(1), k8.pair(1), c.x, c.y);
        mma<MmaT>(high, k0.pair(2), k8.pair(2), k0.pair(3), k8.pair(3), b.z, b.w);
        mma<MmaT>(low, k0.pair(2), k8.pair(2), k0.pair(3), k8.pair(3), c.z, c.w);
    }

    // Makes weights of a column's scores, in two parts and with heads as columns, as the next product takes them: of
    // tokens 0 to 7, then of 8 to 15. `is_seen` says whether a head, 0 or 1 of the column's, sees a token. With
    // SOME_SEE_NONE a head may see none; then it does not change.
    template <bool SOME_SEE_NONE, typename Seen>
    __device__ __forceinline__ void weigh(int column, float (&weights)[4], const float (&token_scales)[2],
                                          unsigned (&high)[2], unsigned (&low)[2], Seen is_seen) {
        const int g = threadIdx.x % 32 / 4;
        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (!is_seen(i, g)) weights[i] = reduce::minus_infinity();
            if (!is_seen(i, g + 8)) weights[2 + i] = reduce::minus_infinity();
            const float known = maximum[column][i];
            float larger = fmaxf(known, max_over_rows(fmaxf(weights[i], weights[2 + i])));
            maximum[column][i] = larger;
            if (SOME_SEE_NONE && larger == reduce::minus_infinity()) larger = 0.0f;  // all weights are 0 then
            factor[i] = exp2_fast(known - larger);
            weights[i] = exp2_fast(weights[i] - larger + WEIGHT_EXPONENT<KvT>);
            weights[2 + i] = exp2_fast(weights[2 + i] - larger + WEIGHT_EXPONENT<KvT>);
            sum[column][i] = fmaf(sum[column][i], factor[i], weights[i] + weights[2 + i]);
            if constexpr (HAS_SCALES) weights[i] *= token_scales[0], weights[2 + i] *= token_scales[1];
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned pair = pack_pair<MmaT>(weights[2 * i], weights[2 * i + 1]);
            const float2 rounded = unpack_pair<MmaT>(pair);
            high[i] = transpose_matrix(pair);
            low[i] = transpose_matrix(pack_pair<MmaT>(weights[2 * i] - rounded.x, weights[2 * i + 1] - rounded.y));
        }
#pragma unroll
        for (int i = 0; i < 16 * VALUE_STEPS; ++i) mixed[i / 16][i / 4 % 4][column][i % 4] *= factor[i % 2];
    }

    // Adds a step of the values 2t, 2t + 1, 2t + 8 and 2t + 9, times the weights.
    __device__ __forceinline__ void mix(int step, const KvVector<KvT>& v0, const KvVector<KvT>& v1,
                                        const KvVector<KvT>& v8, const KvVector<KvT>& v9,
                                        const unsigned (&high)[COLUMNS][2], const unsigned (&low)[COLUMNS][2]) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            unsigned even[2], odd[2];
            v0.pair_with(v1, word, even[0], odd[0]);
            v8.pair_with(v9, word, even[1], odd[1]);
#pragma unroll
            for (int column = 0; column < COLUMNS; ++column) {
                float(&places)[4] = mixed[step][word][column];
                mma<MmaT>(places, even[0], odd[0], even[1], odd[1], high[column][0], high[column][1]);
                mma<MmaT>(places, even[0], odd[0], even[1], odd[1], low[column][0], low[column][1]);
            }
        }
    }

    // Add the tokens `begin` to `end` - 1 of the loaded tile, at least one. `next_keys` is called when the keys have
    // been used.
    template <typename NextKeys>
    __device__ __forceinline__ void take(const Queries& queries, int begin, int end, NextKeys next_keys) {
        const int t = threadIdx.x % 4;
        float scores[COLUMNS][4];
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column) {
            float high[4] = {}, low[4] = {};
#pragma unroll
            for (int step = 0; step < KEY_STEPS; ++step) {
                multiply(queries, column, 32 * step + 8 * t, keys[0][step], keys[1][step], high, low);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                scores[column][i] = high[i] + low[i];
                if constexpr (HAS_SCALES) scores[column][i] *= key_scales[i / 2];
            }
        }
        next_keys();
        unsigned high[COLUMNS][2], low[COLUMNS][2];
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column) {
            weigh<false>(column, scores[column], value_scales, high[column], low[column],
                         [&](int, int token) { return token >= begin && token < end; });
        }
#pragma unroll
        for (int step = 0; step < VALUE_STEPS; ++step) {
            mix(step, values[0][step], values[1][step], values[2][step], values[3][step], high, low);
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

// For fp32 caches: tiles of 8 tokens, plain multiply-adds. Lane l = 4g + t reads the dimensions 16 * step + 4t + (0..3)
// of key g, and the dimensions 64 * step + 4 * (l % 16) + (0..3) of the values l / 16, l / 16 + 2, ...
template <int HEAD_DIM, int HEADS>
struct Attend<float, HEAD_DIM, HEADS> {
    static constexpr int TILE_TOKENS = 8;
    static constexpr int KEY_STEPS = (HEAD_DIM + 15) / 16;
    static constexpr int VALUE_STEPS = (HEAD_DIM + 63) / 64;
    static constexpr int LAST_VECTOR = HEAD_DIM / 4 - 1;
    static constexpr int QUERY_SIZE = 16 * KEY_STEPS;

    struct Queries {
        alignas(16) float rows[HEADS][QUERY_SIZE];
        __device__ __forceinline__ void store(int head, int dimension, float value) { rows[head][dimension] = value; }
    };

    // Of every head: the largest score, the sum of the weights of token g (the same in the lanes 4g to 4g + 3), and the
    // weighted sum of this lane's values.
    float maximum[HEADS];
    float sum[HEADS];
    float mixed[HEADS][VALUE_STEPS][4];
    float4 keys[KEY_STEPS];
    float4 values[4][VALUE_STEPS];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int head = 0; head < HEADS; ++head) {
            maximum[head] = reduce::minus_infinity();
            sum[head] = 0.0f;
#pragma unroll
            for (int i = 0; i < 4 * VALUE_STEPS; ++i) mixed[head][i / 4][i % 4] = 0.0f;
        }
    }

    __device__ __forceinline__ void start_with(const float* scores, const float* value) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int head = 0; head < HEADS; ++head) {
            maximum[head] = scores[head];
            sum[head] = lane < 4 ? 1.0f : 0.0f;
#pragma unroll
            for (int i = 0; i < 4 * VALUE_STEPS; ++i) {
                const int dimension = 64 * (i / 4) + 4 * lane + i % 4;
                if (lane < 16 && dimension < HEAD_DIM) mixed[head][i / 4][i % 4] = value[dimension];
            }
        }
    }

    __device__ __forceinline__ void load_keys(const HeadTokens<float>& tile, int begin, int end) {
        const int token = between(begin, static_cast<int>(threadIdx.x) % 32 / 4, end);
#pragma unroll
        for (int step = 0; step < KEY_STEPS; ++step) {
            const int vector = min(4 * step + static_cast<int>(threadIdx.x) % 4, LAST_VECTOR);
            keys[step] = __ldcg(reinterpret_cast<const float4*>(tile.elements + token * HEAD_DIM) + vector);
        }
    }

    __device__ __forceinline__ void load_values(const HeadTokens<float>& tile, int begin, int end) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 4 * VALUE_STEPS; ++i) {
            const int row = i / VALUE_STEPS, step = i % VALUE_STEPS;
            const int token = between(begin, 2 * row + lane / 16, end);
            const int vector = min(16 * step + lane % 16, LAST_VECTOR);
            const float* value = tile.elements + token * HEAD_DIM;
            values[row][step] = __ldcg(reinterpret_cast<const float4*>(value) + vector);
        }
    }

    template <typename NextKeys>
    __device__ __forceinline__ void take(const Queries& queries, int begin, int end, NextKeys next_keys) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        float weights[HEADS];
#pragma unroll
        for (int head = 0; head < HEADS; ++head) {
            float products = 0.0f;
#pragma unroll
            for (int step = 0; step < KEY_STEPS; ++step) {
                const float4 query = *reinterpret_cast<const float4*>(&queries.rows[head][16 * step + 4 * t]);
                const float4 key = keys[step];
                products = fmaf(query.x, key.x, fmaf(query.y, key.y, products));
                products = fmaf(query.z, key.z, fmaf(query.w, key.w, products));
            }
            weights[head] = warp_sum<4>(products);
        }
        next_keys();
#pragma unroll
        for (int head = 0; head < HEADS; ++head) {
            if (g < begin || g >= end) weights[head] = reduce::minus_infinity();
            const float larger = fmaxf(maximum[head], max_over_rows(weights[head]));  // finite: a tile has a token
            const float factor = exp2_fast(maximum[head] - larger);
            maximum[head] = larger;
            weights[head] = exp2_fast(weights[head] - larger);
            sum[head] = fmaf(sum[head], factor, weights[head]);
#pragma unroll
            for (int i = 0; i < 4 * VALUE_STEPS; ++i) mixed[head][i / 4][i % 4] *= factor;
        }
#pragma unroll
        for (int row = 0; row < 4; ++row) {
#pragma unroll
            for (int head = 0; head < HEADS; ++head) {
                const float weight = __shfl_sync(0xffffffffu, weights[head], 4 * (2 * row + lane / 16));
#pragma unroll
                for (int step = 0; step < VALUE_STEPS; ++step) {
                    const float4 value = values[row][step];
                    float(&places)[4] = mixed[head][step];
                    places[0] = fmaf(weight, value.x, places[0]), places[1] = fmaf(weight, value.y, places[1]);
                    places[2] = fmaf(weight, value.z, places[2]), places[3] = fmaf(weight, value.w, places[3]);
                }
            }
        }
    }

    template <int STRIDE>
    __device__ __forceinline__ void publish(float* maxima, float* sums, float* weighted) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int head = 0; head < HEADS; ++head) {
            const float total = sum_over_rows(sum[head]);
            if (lane == 0) {
                maxima[head] = maximum[head];
                sums[head] = total;
            }
#pragma unroll
            for (int i = 0; i < 4 * VALUE_STEPS; ++i) {
                // The even and the odd tokens of a tile lie in the two halves of the warp.
                const float both = mixed[head][i / 4][i % 4] + reduce::shuffle_xor(mixed[head][i / 4][i % 4], 16);
                const int dimension = 64 * (i / 4) + 4 * lane + i % 4;
                if (lane < 16 && dimension < HEAD_DIM) weighted[head * STRIDE + dimension] = both;
            }
        }
    }
};
