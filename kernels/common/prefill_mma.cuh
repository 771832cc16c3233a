// prefill_mma: one block of queries of one head against the cache, on the tensor cores, for caches of 16 bits or codes;
// the form for fp32 is at the end.
//
// Warps own rows of queries. Shared memory holds the keys and values of 64 tokens at a time (of 32 past HEAD_DIM 128;
// codes: past 96). The next keys arrive while the values are used, and the next values while the keys are used. A row
// of shared memory is an odd number of 16 bytes, so that the eight rows of a matrix lie in different banks. Codes
// arrive in memory of their own, and the thread that copied them widens them. Their scales multiply scores and
// weights.
#pragma once

#include "common/mixed.cuh"
#include "common/head.cuh"

// The arguments of one block of attention_prefill.
template <typename KvT>
struct PrefillBlock {
    const float* q;  // this head's columns of the first token
    MixedRows out;
    int first_output;  // this head's, of a token
    int q_stride, out_stride;
    HeadTokens<KvT> keys, values;  // of this block's key-value head in page 0
    const int* pages;
    int page_stride;              // tokens from one page of the head to the next
    int num_tokens, first_query;  // of the launch; of this block
    int start, window;            // position of the first token
    float scale;                  // times log2(e)

    // Where a token of the row lies, in tokens of `keys` and `values`.
    __device__ __forceinline__ size_t place_of(int token) const {
        return page_place(token / unsigned(PAGE_TOKENS)) + token % unsigned(PAGE_TOKENS);
    }
    // Where the row's page number `index` begins.
    __device__ __forceinline__ size_t page_place(int index) const {
        return size_t(__ldg(pages + index)) * page_stride;
    }
};

template <typename KvT, int HEAD_DIM>
struct Prefill {
    using MmaT = typename KvFormat<KvT>::MmaT;
    static constexpr bool HAS_SCALES = KvFormat<KvT>::HAS_SCALES;
    static constexpr int BLOCK_SIZE = 128;
    static constexpr int ROW_TILES = HEAD_DIM <= 128 ? 2 : 1;  // tiles of 16 queries a warp
    static constexpr int WARP_QUERIES = 16 * ROW_TILES;
    static constexpr int BLOCK_QUERIES = 4 * WARP_QUERIES;
    // More would not leave enough registers; the scales of codes take some.
    static constexpr int BLOCK_TOKENS = HEAD_DIM <= (HAS_SCALES ? 96 : 128) ? 64 : 32;
    static constexpr int PAGES_AT_ONCE = __CUDA_ARCH__ >= 900 ? BLOCK_TOKENS / PAGE_TOKENS : 1;  // or registers spill
    static constexpr int PADDED = (HEAD_DIM + 15) / 16 * 16;
    static constexpr int STRIDE = PADDED + 8;
    // Then, with codes, those being copied [BLOCK_TOKENS][PADDED], and scales of keys and values [BLOCK_TOKENS].
    static constexpr int SHARED_BYTES =
        (BLOCK_QUERIES + 2 * BLOCK_TOKENS) * STRIDE * 2 + (HAS_SCALES ? BLOCK_TOKENS * (PADDED + 2 * 4) : 0);

    // A block of tokens in shared memory; codes are where those of keys and values arrive in turn.
    struct Tokens {
        MmaT* elements;
        KvCode* codes;
        float* scales;
    };
    using Scores = float[ROW_TILES][BLOCK_TOKENS / 8][4];
    using Mixed = float[ROW_TILES][PADDED / 8][4];

    // Queries times scale, rounded; zeros for those past the last token and for dimensions past HEAD_DIM.
    static __device__ __forceinline__ void load_queries(const PrefillBlock<KvT>& block, MmaT* queries) {
        constexpr int VECTORS = PADDED / 8;
        for (int i = threadIdx.x; i < BLOCK_QUERIES * VECTORS; i += BLOCK_SIZE) {
            const int query = i / VECTORS, first = 8 * (i % VECTORS);
            uint4 rounded = make_uint4(0, 0, 0, 0);
            if (block.first_query + query < block.num_tokens && first < HEAD_DIM) {
                const float* x = block.q + size_t(block.first_query + query) * block.q_stride + first;
                const Pack<float> low = Pack<float>::load(x), high = Pack<float>::load(x + 4);
                rounded = make_uint4(scaled_pair(low, 0, block.scale), scaled_pair(low, 2, block.scale),
                                     scaled_pair(high, 0, block.scale), scaled_pair(high, 2, block.scale));
            }
            *reinterpret_cast<uint4*>(queries + query * STRIDE + first) = rounded;
        }
    }
    static __device__ __forceinline__ unsigned scaled_pair(const Pack<float>& x, int i, float scale) {
        return pack_pair<MmaT>(within_range<MmaT>(x.values[i] * scale), within_range<MmaT>(x.values[i + 1] * scale));
    }

    // Start copying the tokens first, first + 1, ... of the block's keys or values; tokens from `end` on and dimensions
    // past HEAD_DIM are zeros, or codes that stand for a number, with the scale zero.
    static __device__ __forceinline__ void copy_tokens(const PrefillBlock<KvT>& block, const HeadTokens<KvT>& cache,
                                                       int first, int end, const Tokens& destination) {
        constexpr int VECTORS = PADDED / 8, PAGE_VECTORS = PAGE_TOKENS * VECTORS;
        static_assert(BLOCK_TOKENS % PAGE_TOKENS == 0, "tiles begin where pages begin");
        // Page by page, so that all threads load the same entries of the table, and the rest of an address is known.
        const int last_page = (end - 1) / PAGE_TOKENS;
#pragma unroll PAGES_AT_ONCE
        for (int begin = 0; begin < BLOCK_TOKENS; begin += PAGE_TOKENS) {
            // Valid also past the last page, where nothing is read, so that no branch is taken.
            const size_t place = block.page_place(min((first + begin) / PAGE_TOKENS, last_page));
            const KvT* of_page = cache.elements + place * HEAD_DIM;
#pragma unroll
            for (int of_block = 0; of_block < PAGE_VECTORS; of_block += BLOCK_SIZE) {
                const int i = of_block + threadIdx.x;
                if (PAGE_VECTORS % BLOCK_SIZE != 0 && i >= PAGE_VECTORS) break;
                const int token = i / VECTORS, dimension = 8 * (i % VECTORS);
                const bool exists = first + begin + token < end && dimension < HEAD_DIM;
                const KvT* source = of_page + token * HEAD_DIM + min(dimension, HEAD_DIM - 8);
                if constexpr (HAS_SCALES) {
                    copy_async_small<8>(shared_address(destination.codes + 8 * (begin * VECTORS + i)), source, exists);
                } else {
                    MmaT* shared = destination.elements + (begin + token) * STRIDE + dimension;
                    copy_async(shared_address(shared), source, exists ? 16 : 0);
                }
            }
        }
        if constexpr (HAS_SCALES) {
            const int token = threadIdx.x;
            const bool exists = first + token < end;
            const float* source = cache.scales + block.place_of(min(first + token, end - 1));
            if (token < BLOCK_TOKENS) copy_async_small<4>(shared_address(destination.scales + token), source, exists);
        }
        copy_async_commit();
    }

    // Wait for the tokens that this thread has copied. Other threads see them after a barrier.
    static __device__ __forceinline__ void finish_tokens(const Tokens& tokens) {
        copy_async_wait<0>();
        if constexpr (HAS_SCALES) {
            constexpr int VECTORS = PADDED / 8, PAGE_VECTORS = PAGE_TOKENS * VECTORS;
#pragma unroll 1  // all at once would take registers that scores and results hold
            for (int begin = 0; begin < BLOCK_TOKENS; begin += PAGE_TOKENS) {
#pragma unroll
                for (int of_block = 0; of_block < PAGE_VECTORS; of_block += BLOCK_SIZE) {  // as copy_tokens has it
                    const int of_page = of_block + threadIdx.x, i = begin * VECTORS + of_page;
                    if (PAGE_VECTORS % BLOCK_SIZE != 0 && of_page >= PAGE_VECTORS) break;
                    const uint2 codes = *reinterpret_cast<const uint2*>(tokens.codes + 8 * i);
                    const uint4 widened = make_uint4(widen_codes(codes.x, false), widen_codes(codes.x, true),
                                                     widen_codes(codes.y, false), widen_codes(codes.y, true));
                    MmaT* place = tokens.elements + i / VECTORS * STRIDE + 8 * (i % VECTORS);
                    *reinterpret_cast<uint4*>(place) = widened;
                }
            }
        }
    }

    // Multiply scores or weights by what their tokens have.
    static __device__ __forceinline__ void multiply(Scores& scores, const float* token_scales) {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int token = 0; token < BLOCK_TOKENS; token += 8) {
            const float2 pair = *reinterpret_cast<const float2*>(token_scales + token + 2 * t);
#pragma unroll
            for (int i = 0; i < 2 * ROW_TILES; ++i) {
                scores[i / 2][token / 8][i % 2 * 2] *= pair.x;
                scores[i / 2][token / 8][i % 2 * 2 + 1] *= pair.y;
            }
        }
    }

    // scores = queries * keys^T for this warp's queries.
    static __device__ __forceinline__ void score(const MmaT* warp_queries, const MmaT* keys, Scores& scores) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < ROW_TILES * BLOCK_TOKENS / 2; ++i) {
            scores[i / (BLOCK_TOKENS / 2)][i / 4 % (BLOCK_TOKENS / 8)][i % 4] = 0.0f;
        }
#pragma unroll
        for (int first = 0; first < PADDED; first += 16) {
            unsigned a[ROW_TILES][4];
#pragma unroll
            for (int row = 0; row < ROW_TILES; ++row) {
                load_matrices(a[row], warp_queries + (16 * row + lane % 16) * STRIDE + first + lane / 16 * 8);
            }
#pragma unroll
            for (int token = 0; token < BLOCK_TOKENS; token += 16) {
                unsigned b[4];
                load_matrices(b, keys + (token + lane % 8 + lane / 16 * 8) * STRIDE + first + lane / 8 % 2 * 8);
#pragma unroll
                for (int row = 0; row < ROW_TILES; ++row) {
                    const unsigned(&x)[4] = a[row];
                    mma<MmaT>(scores[row][token / 8], x[0], x[1], x[2], x[3], b[0], b[1]);
                    mma<MmaT>(scores[row][token / 8 + 1], x[0], x[1], x[2], x[3], b[2], b[3]);
                }
            }
        }
    }

    // mixed += weights * values for this warp's queries.
    static __device__ __forceinline__ void mix(const Scores& weights, const MmaT* values, Mixed& mixed) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int token = 0; token < BLOCK_TOKENS; token += 16) {
            unsigned a[ROW_TILES][4];
#pragma unroll
            for (int i = 0; i < ROW_TILES * 4; ++i) {
                const float(&w)[4] = weights[i / 4][token / 8 + i % 4 / 2];
                a[i / 4][i % 4] = i % 2 == 0 ? pack_pair<MmaT>(w[0], w[1]) : pack_pair<MmaT>(w[2], w[3]);
            }
#pragma unroll
            for (int dimension = 0; dimension < PADDED; dimension += 16) {
                unsigned b[4];
                load_matrices_transposed(b, values + (token + lane % 16) * STRIDE + dimension + lane / 16 * 8);
#pragma unroll
                for (int row = 0; row < ROW_TILES; ++row) {
                    const unsigned(&x)[4] = a[row];
                    mma<MmaT>(mixed[row][dimension / 8], x[0], x[1], x[2], x[3], b[0], b[1]);
                    mma<MmaT>(mixed[row][dimension / 8 + 1], x[0], x[1], x[2], x[3], b[2], b[3]);
                }
            }
        }
    }

    static __device__ __forceinline__ void run(const PrefillBlock<KvT>& block, unsigned char* shared) {
        MmaT* queries = reinterpret_cast<MmaT*>(shared);
        Tokens keys, values;
        keys.elements = queries + BLOCK_QUERIES * STRIDE;
        values.elements = keys.elements + BLOCK_TOKENS * STRIDE;
        keys.codes = values.codes = reinterpret_cast<KvCode*>(values.elements + BLOCK_TOKENS * STRIDE);
        keys.scales = reinterpret_cast<float*>(keys.codes + BLOCK_TOKENS * PADDED);
        values.scales = keys.scales + BLOCK_TOKENS;
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const int warp_query = threadIdx.x / 32 * WARP_QUERIES;
        const int warp_position = block.start + block.first_query + warp_query;  // of the warp's first query
        const bool has_queries = block.first_query + warp_query < block.num_tokens;
        // Tokens [begin, end) are seen by some query of the block.
        const int end = block.start + min(block.first_query + BLOCK_QUERIES, block.num_tokens);
        const int begin = max(0, block.start + block.first_query + 1 - block.window);

        float mixed[ROW_TILES][PADDED / 8][4] = {};
        float maximum[ROW_TILES][2], sum[ROW_TILES][2] = {};  // of the rows g and g + 8; sum: this lane's part
#pragma unroll
        for (int row = 0; row < ROW_TILES; ++row) maximum[row][0] = maximum[row][1] = reduce::minus_infinity();

        int first = begin / BLOCK_TOKENS * BLOCK_TOKENS;
        copy_tokens(block, block.keys, first, end, keys);
        load_queries(block, queries);
        for (; first < end; first += BLOCK_TOKENS) {
            // Some query of this warp sees some token of this tile.
            const bool is_seen = has_queries && first < warp_position + WARP_QUERIES &&
                                 first + BLOCK_TOKENS > warp_position + 1 - block.window;
            finish_tokens(keys);
            __syncthreads();  // keys (and queries) are written; values are no longer used
            copy_tokens(block, block.values, first, end, values);
            Scores scores;
            if (is_seen) {
                score(queries + warp_query * STRIDE, keys.elements, scores);
                if constexpr (HAS_SCALES) multiply(scores, keys.scales);
            }
            finish_tokens(values);
            __syncthreads();  // values are written; keys are no longer used
            if (first + BLOCK_TOKENS < end) copy_tokens(block, block.keys, first + BLOCK_TOKENS, end, keys);
            if (!is_seen) continue;

            const bool is_masked = first + BLOCK_TOKENS > warp_position + 1 ||
                                   first < warp_position + WARP_QUERIES - block.window;
#pragma unroll
            for (int i = 0; i < 2 * ROW_TILES; ++i) {
                const int row = i / 2, half = i % 2 * 2;
                const int position = warp_position + 16 * row + g + 4 * half;
                if (is_masked) {
#pragma unroll
                    for (int j = 0; j < BLOCK_TOKENS / 4; ++j) {
                        const int token = first + j / 2 * 8 + 2 * t + j % 2;
                        if (token > position || token <= position - block.window) {
                            scores[row][j / 2][half + j % 2] = reduce::minus_infinity();
                        }
                    }
                }
                float larger = maximum[row][i % 2];
#pragma unroll
                for (int j = 0; j < BLOCK_TOKENS / 4; ++j) larger = fmaxf(larger, scores[row][j / 2][half + j % 2]);
                larger = fmaxf(larger, reduce::shuffle_xor(larger, 1));
                larger = fmaxf(larger, reduce::shuffle_xor(larger, 2));
                // A row that has seen no token yet: its weights must be 0, not exp(-inf + inf).
                const float base = larger == reduce::minus_infinity() ? 0.0f : larger;
                const float factor = exp2_fast(maximum[row][i % 2] - base);
                maximum[row][i % 2] = larger;
                float weights = 0.0f;
#pragma unroll
                for (int j = 0; j < BLOCK_TOKENS / 4; ++j) {
                    float& place = scores[row][j / 2][half + j % 2];
                    place = exp2_fast(place - (base - WEIGHT_EXPONENT<KvT>));
                    weights += place;
                }
                sum[row][i % 2] = fmaf(sum[row][i % 2], factor, weights);
#pragma unroll
                for (int j = 0; j < PADDED / 4; ++j) mixed[row][j / 2][half + j % 2] *= factor;
            }
            if constexpr (HAS_SCALES) multiply(scores, values.scales);
            mix(scores, values.elements, mixed);
        }

#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES; ++i) {
            const int row = i / 2, half = i % 2 * 2;
            const int query = block.first_query + warp_query + 16 * row + g + 4 * half;
            const float inverse = 1.0f / warp_sum<4>(sum[row][i % 2]);
            if (query >= block.num_tokens) continue;
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 8; ++j) {
                block.out.store(block.first_output + size_t(query) * block.out_stride + 8 * j + 2 * t,
                                make_float2(mixed[row][j][half] * inverse, mixed[row][j][half + 1] * inverse));
            }
        }
    }
};

// One block of 32 queries of one head against an fp32 cache, 32 tokens at a time, with multiply-adds.
// Thread (x, y) owns the queries 4y + (0..3): their scores for the tokens x and x + 16, and the dimensions 64 * step +
// 4x + (0..3) of their results. The 16 threads of the same y are half a warp. A row of shared memory is an odd number
// of 16 bytes, so that eight rows lie in different banks.
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
