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

// The token of the tile, `begin` to `end` - 1, that is nearest to this one.
__device__ __forceinline__ int between(int begin, int token, int end) { return max(begin, min(token, end - 1)); }

// Elements 8 * vector to 8 * vector + 7 of a token, and its scale. kv_ring.cuh has both for tokens in shared memory.
template <int HEAD_DIM, typename KvT>
__device__ __forceinline__ void load_vector(KvVector<KvT>& loaded, const HeadTokens<KvT>& tokens, int token,
                                            int vector) {
    loaded.load(tokens.elements + token * HEAD_DIM + 8 * vector);
}
template <typename KvT>
__device__ __forceinline__ float load_scale(const HeadTokens<KvT>& tokens, int token) {
    return __ldcg(tokens.scales + token);
}

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
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const float weight = exp2_fast(WEIGHT_EXPONENT<KvT>);
#pragma unroll
        for (int i = 0; i < 2 * COLUMNS; ++i) {
            maximum[i / 2][i % 2] = scores[8 * (i / 2) + 2 * t + i % 2];
            sum[i / 2][i % 2] = g == 0 ? weight : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 4 * VALUE_STEPS; ++i) {
            const int dimension = 64 * (i / 4) + 8 * g + 2 * (i % 4);
            if (dimension >= HEAD_DIM) continue;
#pragma unroll
            for (int column = 0; column < COLUMNS; ++column) {
                float(&places)[4] = mixed[i / 4][i % 4][column];
                places[0] = places[1] = weight * value[dimension];
                places[2] = places[3] = weight * value[dimension + 1];
            }
        }
    }

    // Ask for a tile's keys [TILE_TOKENS, HEAD_DIM]. Tokens before `begin` and from `end` on may hold anything and are
    // not read: the nearest token inside is read instead. Past HEAD_DIM the last vector is read instead.
    template <typename Tokens>
    __device__ __forceinline__ void load_keys(const Tokens& tile, int begin, int end) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 2 * KEY_STEPS; ++i) {
            const int token = between(begin, g + 8 * (i / KEY_STEPS), end);
            const int vector = min(4 * (i % KEY_STEPS) + t, LAST_VECTOR);
            load_vector<HEAD_DIM>(keys[i / KEY_STEPS][i % KEY_STEPS], tile, token, vector);
        }
        load_scales(tile, begin, end, key_scales);
    }

    // The same for values.
    template <typename Tokens>
    __device__ __forceinline__ void load_values(const Tokens& tile, int begin, int end) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 4 * VALUE_STEPS; ++i) {
            const int row = i / VALUE_STEPS;
            const int token = between(begin, 2 * t + row % 2 + 8 * (row / 2), end);
            const int vector = min(8 * (i % VALUE_STEPS) + g, LAST_VECTOR);
            load_vector<HEAD_DIM>(values[row][i % VALUE_STEPS], tile, token, vector);
        }
        load_scales(tile, begin, end, value_scales);
    }

    template <typename Tokens>
    static __device__ __forceinline__ void load_scales(const Tokens& tile, int begin, int end, float (&scales)[2]) {
        if constexpr (HAS_SCALES) {
            const int g = threadIdx.x % 32 / 4;
            scales[0] = load_scale(tile, between(begin, g, end));
            scales[1] = load_scale(tile, between(begin, g + 8, end));
        }
    }

    // One step of the scores of tokens g and g + 8, whose keys are k0 and k8; heads as in `maximum`. Two chains: the
    // latency of an mma is 16 times its cost.
    static __device__ __forceinline__ void add_scores(const Queries& queries, int column, int step,
                                                      const KvVector<KvT>& k0, const KvVector<KvT>& k8,
                                                      float (&high)[4], float (&low)[4]) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const int place = 32 * step + 8 * t;
        const uint4 b = *reinterpret_cast<const uint4*>(&queries.high[8 * column + g][place]);
        const uint4 c = *reinterpret_cast<const uint4*>(&queries.low[8 * column + g][place]);
        mma<MmaT>(high, k0.pair(0), k8.pair(0), k0.pair(1), k8.pair(1), b.x, b.y);
        mma<MmaT>(low, k0.pair(0), k8.pair(0), k0.pair(1), k8.pair(1), c.x, c.y);
        mma<MmaT>(high, k0.pair(2), k8.pair(2), k0.pair(3), k8.pair(3), b.z, b.w);
        mma<MmaT>(low, k0.pair(2), k8.pair(2), k0.pair(3), k8.pair(3), c.z, c.w);
    }
    // Both chains together; minus infinity for tokens before `begin` and from `end` on.
    static __device__ __forceinline__ void finish_scores(const float (&high)[4], const float (&low)[4],
                                                         const float (&key_scales)[2], int begin, int end,
                                                         float (&scores)[4]) {
        const int g = threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            scores[i] = high[i] + low[i];
            if constexpr (HAS_SCALES) scores[i] *= key_scales[i / 2];
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (g < begin || g >= end) scores[i] = reduce::minus_infinity();
            if (g + 8 < begin || g + 8 >= end) scores[2 + i] = reduce::minus_infinity();
        }
    }

    // The weights of a tile's tokens 0 to 7, then 8 to 15, for the heads of a column: b operands in two parts.
    struct Weights {
        unsigned high[2], low[2];
    };
    // Turns scores into weights. What was seen before is made as small as the largest score now asks for.
    __device__ __forceinline__ void weigh(const float (&scores)[COLUMNS][4], const float (&scales)[2],
                                          Weights (&result)[COLUMNS]) {
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column) {
            float weights[4], factor[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                // Finite: a tile has at least one token.
                const float first = scores[column][i], second = scores[column][2 + i];
                const float larger = fmaxf(maximum[column][i], max_over_rows(fmaxf(first, second)));
                factor[i] = exp2_fast(maximum[column][i] - larger);
                maximum[column][i] = larger;
                weights[i] = exp2_fast(first - larger + WEIGHT_EXPONENT<KvT>);
                weights[2 + i] = exp2_fast(second - larger + WEIGHT_EXPONENT<KvT>);
                sum[column][i] = fmaf(sum[column][i], factor[i], weights[i] + weights[2 + i]);
                if constexpr (HAS_SCALES) weights[i] *= scales[0], weights[2 + i] *= scales[1];
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {  // b operands want heads as columns
                const unsigned pair = pack_pair<MmaT>(weights[2 * i], weights[2 * i + 1]);
                const float2 rounded = unpack_pair<MmaT>(pair);
                result[column].high[i] = transpose_matrix(pair);
                result[column].low[i] = transpose_matrix(
                    pack_pair<MmaT>(weights[2 * i] - rounded.x, weights[2 * i + 1] - rounded.y));
            }
#pragma unroll
            for (int i = 0; i < 16 * VALUE_STEPS; ++i) mixed[i / 16][i / 4 % 4][column][i % 4] *= factor[i % 2];
        }
    }
    // Add one word of the values of four tokens, 2t, 2t + 1, 2t + 8 and 2t + 9, in all columns.
    __device__ __forceinline__ void mix(const Weights (&weights)[COLUMNS], int step, int word,
                                        const KvVector<KvT>& v0, const KvVector<KvT>& v1, const KvVector<KvT>& v8,
                                        const KvVector<KvT>& v9) {
        unsigned even[2], odd[2];  // tokens 2t and 2t + 1, then 2t + 8 and 2t + 9
        v0.pair_with(v1, word, even[0], odd[0]);
        v8.pair_with(v9, word, even[1], odd[1]);
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column) {
            float(&places)[4] = mixed[step][word][column];
            const Weights& one = weights[column];
            mma<MmaT>(places, even[0], odd[0], even[1], odd[1], one.high[0], one.high[1]);
            mma<MmaT>(places, even[0], odd[0], even[1], odd[1], one.low[0], one.low[1]);
        }
    }

    // Add the tokens `begin` to `end` - 1 of the loaded tile. `next_keys` is called when the keys have been used.
    template <typename NextKeys>
    __device__ __forceinline__ void take(const Queries& queries, int begin, int end, NextKeys next_keys) {
        float scores[COLUMNS][4];
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column) {
            float high[4] = {}, low[4] = {};
#pragma unroll
            for (int step = 0; step < KEY_STEPS; ++step) {
                add_scores(queries, column, step, keys[0][step], keys[1][step], high, low);
            }
            finish_scores(high, low, key_scales, begin, end, scores[column]);
        }
        next_keys();
        Weights weights[COLUMNS];
        weigh(scores, value_scales, weights);
#pragma unroll
        for (int i = 0; i < 4 * VALUE_STEPS; ++i) {
            const int step = i / 4;
            mix(weights, step, i % 4, values[0][step], values[1][step], values[2][step], values[3][step]);
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
