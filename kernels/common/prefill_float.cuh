// prefill_float: one block of 32 queries of one head against an fp32 cache, 32 tokens at a time, with multiply-adds.
//
// Thread (x, y) owns the queries 4y + (0..3): their scores for the tokens x and x + 16, and the dimensions 64 * step +
// 4x + (0..3) of their results. The 16 threads of the same y are half a warp. A row of shared memory is an odd number
// of 16 bytes, so that eight rows lie in different banks.
#pragma once

#include "common/prefill_mma.cuh"

template <int HEAD_DIM>
struct Prefill<float, HEAD_DIM> {
    static constexpr int BLOCK_QUERIES = 32;
    static constexpr int BLOCK_TOKENS = 32;
    static constexpr int BLOCK_SIZE = 128;
    static constexpr int STRIDE = HEAD_DIM + 4;
    static constexpr int WEIGHT_STRIDE = BLOCK_TOKENS + 4;
    static constexpr int VECTORS = HEAD_DIM / 4;
    static constexpr int STEPS = (HEAD_DIM + 63) / 64;
    static constexpr int SHARED_BYTES =
        ((BLOCK_QUERIES + BLOCK_TOKENS) * STRIDE + BLOCK_QUERIES * WEIGHT_STRIDE) * 4;

    static __device__ __forceinline__ float4 read(const float* place) {
        return *reinterpret_cast<const float4*>(place);
    }

    // Rows first, first + 1, ... of x, each at place_of its number; rows from `end` on are zeros.
    template <typename PlaceOf>
    static __device__ __forceinline__ void copy_rows(const float* x, PlaceOf place_of, int first, int end,
                                                     float* shared) {
        for (int i = threadIdx.x; i < 32 * VECTORS; i += BLOCK_SIZE) {
            const int row = i / VECTORS, dimension = 4 * (i % VECTORS);
            const bool exists = first + row < end;
            *reinterpret_cast<float4*>(shared + row * STRIDE + dimension) =
                exists ? read(x + place_of(first + row) + dimension) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }

    static __device__ __forceinline__ void run(const PrefillBlock<float>& block, unsigned char* shared) {
        float* queries = reinterpret_cast<float*>(shared);
        float* tokens = queries + BLOCK_QUERIES * STRIDE;  // keys, then values
        float* weights = tokens + BLOCK_TOKENS * STRIDE;
        const int x = threadIdx.x % 16, y = threadIdx.x / 16;
        const int end = block.start + min(block.first_query + BLOCK_QUERIES, block.num_tokens);
        const int begin = max(0, block.start + block.first_query + 1 - block.window);
        float mixed[4][STEPS][4] = {};
        float maximum[4], sum[4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) maximum[i] = reduce::minus_infinity();

        const auto query_place = [&](int query) { return size_t(query) * block.q_stride; };
        const auto token_place = [&](int token) { return block.place_of(token) * HEAD_DIM; };
        copy_rows(block.q, query_place, block.first_query, block.num_tokens, queries);
        for (int first = begin / BLOCK_TOKENS * BLOCK_TOKENS; first < end; first += BLOCK_TOKENS) {
            __syncthreads();  // the values are no longer used
            copy_rows(block.keys.elements, token_place, first, end, tokens);
            __syncthreads();  // keys (and queries) are written
            float scores[4][2] = {};
#pragma unroll 4
            for (int dimension = 0; dimension < HEAD_DIM; dimension += 4) {
                const float4 near = read(tokens + x * STRIDE + dimension);
                const float4 far = read(tokens + (x + 16) * STRIDE + dimension);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float4 query = read(queries + (4 * y + i) * STRIDE + dimension);
                    scores[i][0] += dot(query, near);
                    scores[i][1] += dot(query, far);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int position = block.start + block.first_query + 4 * y + i;
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int token = first + x + 16 * j;
                    const bool is_seen = token <= position && token > position - block.window;
                    scores[i][j] = is_seen ? scores[i][j] * block.scale : reduce::minus_infinity();
                }
                const float larger = fmaxf(maximum[i], warp_max<16>(fmaxf(scores[i][0], scores[i][1])));
                // A row that has seen no token yet: its weights must be 0, not exp(-inf + inf).
                const float base = larger == reduce::minus_infinity() ? 0.0f : larger;
                const float factor = exp2_fast(maximum[i] - base);
                maximum[i] = larger;
                sum[i] *= factor;
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float weight = exp2_fast(scores[i][j] - base);
                    sum[i] += weight;
                    weights[(4 * y + i) * WEIGHT_STRIDE + x + 16 * j] = weight;
                }
#pragma unroll
                for (int j = 0; j < 4 * STEPS; ++j) mixed[i][j / 4][j % 4] *= factor;
            }
            __syncthreads();  // weights are written; the keys are no longer used
            copy_rows(block.values.elements, token_place, first, end, tokens);
            __syncthreads();  // values are written
#pragma unroll 2
            for (int token = 0; token < BLOCK_TOKENS; token += 4) {
                float4 four[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) four[i] = read(weights + (4 * y + i) * WEIGHT_STRIDE + token);
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    const float* column = tokens + token * STRIDE + 4 * min(16 * step + x, VECTORS - 1);
                    const float4 v0 = read(column), v1 = read(column + STRIDE);
                    const float4 v2 = read(column + 2 * STRIDE), v3 = read(column + 3 * STRIDE);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        float(&places)[4] = mixed[i][step];
                        places[0] += dot(four[i], make_float4(v0.x, v1.x, v2.x, v3.x));
                        places[1] += dot(four[i], make_float4(v0.y, v1.y, v2.y, v3.y));
                        places[2] += dot(four[i], make_float4(v0.z, v1.z, v2.z, v3.z));
                        places[3] += dot(four[i], make_float4(v0.w, v1.w, v2.w, v3.w));
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int query = block.first_query + 4 * y + i;
            const float inverse = 1.0f / warp_sum<16>(sum[i]);
            if (query >= block.num_tokens) continue;
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const int dimension = 64 * step + 4 * x;
                const float(&places)[4] = mixed[i][step];
                if (dimension >= HEAD_DIM) continue;
                block.out.store(block.first_output + size_t(query) * block.out_stride + dimension,
                                make_float4(places[0] * inverse, places[1] * inverse, places[2] * inverse,
                                            places[3] * inverse));
            }
        }
    }

    static __device__ __forceinline__ float dot(const float4& a, const float4& b) {
        return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, a.w * b.w)));
    }
};
