// attend_float: Attend of attend.cuh for fp32 caches: tiles of 8 tokens, plain multiply-adds.
//
// Lane l = 4g + t reads the dimensions 16 * step + 4t + (0..3) of key g, and the dimensions 64 * step + 4 * (l % 16) +
// (0..3) of the values l / 16, l / 16 + 2, ...
#pragma once

#include "common/attend.cuh"

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
