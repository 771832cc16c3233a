// kv_ring: a ring of tiles of keys and values in shared memory. One warp copies them there asynchronously, other warps
// take them in the same order. Vectors are swapped within a token, so that the lanes of Attend have no bank conflicts.
#pragma once

#include "common/attend.cuh"
#include "common/barrier.cuh"
#include "common/load.cuh"
#include "common/mixed.cuh"

// Where a tile's vectors of 8 elements lie in shared memory.
template <typename KvT, int HEAD_DIM>
struct RingTile {
    static constexpr int TOKENS = 16;
    static constexpr int VECTORS = HEAD_DIM / 8;  // a token
    static constexpr int VECTOR_BYTES = 8 * static_cast<int>(sizeof(KvT));
    static constexpr int KEYS_BYTES = TOKENS * VECTORS * VECTOR_BYTES;  // as many as of values
    static constexpr bool HAS_SCALES = KvFormat<KvT>::HAS_SCALES;
    static constexpr int SCALES = 2 * KEYS_BYTES;  // of keys, then of values
    static constexpr int BYTES = SCALES + (HAS_SCALES ? 8 * TOKENS : 0);

    // What is exclusive-or'ed to a vector's number. Eight lanes (of codes 16) meet in a phase: of keys they have t = 0
    // to 3 and neighbouring g, which is the token; of values 2t is the token.
    static constexpr int LINE = HAS_SCALES ? 16 : 8;  // vectors in all banks
    static constexpr int MASK = VECTORS % LINE == 0 ? (HAS_SCALES ? 3 : 1) : HAS_SCALES && VECTORS % 8 == 0 ? 1 : 0;
    static __device__ __forceinline__ int key_swap(int token) {
        const int line = HAS_SCALES && VECTORS % LINE != 0 ? token / 2 : token;  // two tokens fill the banks
        return 4 * (line & MASK);
    }
    static __device__ __forceinline__ int value_swap(int token) {
        if constexpr (HAS_SCALES) return 4 * (token / 2 & MASK);
        return MASK != 0 ? 2 * (token / 2 & 3) : 0;
    }
};

// Keys or values of a tile in the ring.
template <typename KvT, int HEAD_DIM, bool IS_KEYS>
struct RingTokens {
    using Ring = RingTile<KvT, HEAD_DIM>;
    const unsigned char* elements;
    const float* scales;

    __device__ __forceinline__ explicit RingTokens(const unsigned char* tile) {
        elements = tile + (IS_KEYS ? 0 : Ring::KEYS_BYTES);
        scales = reinterpret_cast<const float*>(tile + Ring::SCALES) + (IS_KEYS ? 0 : Ring::TOKENS);
    }
    static __device__ __forceinline__ int offset(int token, int vector) {
        const int swap = IS_KEYS ? Ring::key_swap(token) : Ring::value_swap(token);
        return (token * Ring::VECTORS + (vector ^ swap)) * Ring::VECTOR_BYTES;
    }
};

// Elements 8 * vector to 8 * vector + 7 of a token, and the scales of tokens g and g + 8.
template <typename KvT, int HEAD_DIM, bool IS_KEYS>
__device__ __forceinline__ void load_vector(KvVector<KvT>& loaded, const RingTokens<KvT, HEAD_DIM, IS_KEYS>& tokens,
                                            int token, int vector) {
    const unsigned char* place = tokens.elements + tokens.offset(token, vector);
    loaded.set(*reinterpret_cast<const typename KvVector<KvT>::Words*>(place));
}
template <typename KvT, int HEAD_DIM, bool IS_KEYS>
__device__ __forceinline__ void load_scales(float (&scales)[2], const RingTokens<KvT, HEAD_DIM, IS_KEYS>& tokens,
                                            int begin, int end) {
    if constexpr (KvFormat<KvT>::HAS_SCALES) {
        const int g = threadIdx.x % 32 / 4;
        scales[0] = tokens.scales[between(begin, g, end)];
        scales[1] = tokens.scales[between(begin, g + 8, end)];
    }
}

// Starts copying a tile's elements: all of them, or those of its tokens `begin` to `end` - 1.
template <bool IS_WHOLE, typename KvT, int HEAD_DIM>
__device__ __forceinline__ void copy_elements(unsigned places, const KvT* keys, const KvT* values, int begin, int end,
                                              int lane) {
    using Ring = RingTile<KvT, HEAD_DIM>;
    // With codes two vectors at a time, where tokens have an even number of them; swaps keep such pairs together.
    constexpr int AT_ONCE = Ring::HAS_SCALES && Ring::VECTORS % 2 == 0 ? 2 : 1, BYTES = AT_ONCE * Ring::VECTOR_BYTES;
    constexpr int COPIES = Ring::TOKENS * Ring::VECTORS / AT_ONCE;
    const auto copy = [&](unsigned place, const KvT* element) {
        if constexpr (BYTES == 16) {
            copy_async(place, element);
        } else {
            copy_async_small<BYTES>(place, element, true);
        }
    };
    // From here on an address differs by a constant, so a copy needs no register of its own.
    keys += 8 * AT_ONCE * lane, values += 8 * AT_ONCE * lane;
#pragma unroll (IS_WHOLE ? 32 : 1)  // tiles that are not whole are rare, and code is time
    for (int i = 0; i < (COPIES + 31) / 32; ++i) {
        const int index = (32 * i + lane) * AT_ONCE, token = index / Ring::VECTORS, vector = index % Ring::VECTORS;
        if (IS_WHOLE ? COPIES % 32 == 0 || token < Ring::TOKENS : token >= begin && token < end) {
            copy(places + RingTokens<KvT, HEAD_DIM, true>::offset(token, vector), keys + 8 * 32 * AT_ONCE * i);
            copy(places + Ring::KEYS_BYTES + RingTokens<KvT, HEAD_DIM, false>::offset(token, vector),
                 values + 8 * 32 * AT_ONCE * i);
        }
    }
}

// One warp starts copying a tile's tokens `begin` to `end` - 1; no other token is read. `lane` is this thread's.
template <typename KvT, int HEAD_DIM>
__device__ __forceinline__ void copy_tile(unsigned char* tile, const HeadTokens<KvT>& keys,
                                          const HeadTokens<KvT>& values, int begin, int end, int lane) {
    using Ring = RingTile<KvT, HEAD_DIM>;
    const unsigned places = shared_address(tile);
    if (begin <= 0 && end >= Ring::TOKENS) {  // most tiles: nothing is compared
        copy_elements<true, KvT, HEAD_DIM>(places, keys.elements, values.elements, begin, end, lane);
    } else {
        copy_elements<false, KvT, HEAD_DIM>(places, keys.elements, values.elements, begin, end, lane);
    }
    if constexpr (Ring::HAS_SCALES) {
        const int token = lane % Ring::TOKENS;
        const float* scales = lane < Ring::TOKENS ? keys.scales : values.scales;
        if (token >= begin && token < end) {
            copy_async_small<4>(places + Ring::SCALES + 4 * lane, scales + token, true);
        }
    }
}

// What kernels with a ring are launched with, but for rows and positions.
template <typename KvT>
struct LaneCall {
    const float *q, *k, *v;
    int qkv_stride;
    const float *q_norm, *k_norm;
    float eps, scale;
    const float2* cos_sin;
    const int* page_table;
    int pages_per_row;
    KvT *keys, *values;
    float *key_scales, *value_scales;
    int window, num_attention_heads, num_key_value_heads, max_splits;
    float* partials;
    unsigned* counters;
    MixedRows out;

    __device__ __forceinline__ const int* pages(int row) const { return page_table + size_t(row) * pages_per_row; }
    __device__ __forceinline__ size_t place_of(int page, int kv_head, int position) const {
        return token_place(page, num_key_value_heads, kv_head, position);
    }
    // One warp starts copying the tokens begin ... end - 1 of a page.
    template <int HEAD_DIM>
    __device__ __forceinline__ void copy_page(unsigned char* tile, int page, int kv_head, int begin, int end,
                                              int lane) const {
        const size_t place = place_of(page, kv_head, 0);
        copy_tile<KvT, HEAD_DIM>(tile, {keys + place * HEAD_DIM, key_scales + place},
                                 {values + place * HEAD_DIM, value_scales + place}, begin, end, lane);
    }
};

// Adds a tile in the ring, whose tokens `begin` to `end` - 1 may be read: operation by operation what Attend's `take`
// does with a loaded tile, but each vector is loaded where it is used, which takes fewer registers. `is_seen` says
// whether a column sees a token: column, 0 or 1 for its heads, token. SOME_SEE_NONE: as in Attend's `weigh`.
template <bool SOME_SEE_NONE, typename KvT, int HEAD_DIM, int HEAD_TILE, typename Seen>
__device__ __forceinline__ void take_from_ring(Attend<KvT, HEAD_DIM, HEAD_TILE>& attend,
                                               const typename Attend<KvT, HEAD_DIM, HEAD_TILE>::Queries& queries,
                                               const unsigned char* tile, int begin, int end, Seen is_seen) {
    using Tile = Attend<KvT, HEAD_DIM, HEAD_TILE>;
    constexpr int COLUMNS = Tile::COLUMNS;
    const RingTokens<KvT, HEAD_DIM, true> keys(tile);
    const RingTokens<KvT, HEAD_DIM, false> values(tile);
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;

    float scores[COLUMNS][4] = {}, scores_low[COLUMNS][4] = {}, scales[2];
#pragma unroll
    for (int step = 0; step < Tile::KEY_STEPS; ++step) {
        const int vector = min(4 * step + t, Tile::LAST_VECTOR);
        KvVector<KvT> k0, k8;
        load_vector(k0, keys, between(begin, g, end), vector);
        load_vector(k8, keys, between(begin, g + 8, end), vector);
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column) {
            Tile::multiply(queries, column, 32 * step + 8 * t, k0, k8, scores[column], scores_low[column]);
        }
    }
    load_scales(scales, keys, begin, end);
#pragma unroll
    for (int i = 0; i < 4 * COLUMNS; ++i) {
        float& score = scores[i / 4][i % 4];
        score += scores_low[i / 4][i % 4];
        if constexpr (Tile::HAS_SCALES) score *= scales[i % 4 / 2];
    }

    load_scales(scales, values, begin, end);
    unsigned high[COLUMNS][2], low[COLUMNS][2];
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column) {
        attend.template weigh<SOME_SEE_NONE>(column, scores[column], scales, high[column], low[column],
                                             [&](int i, int token) { return is_seen(column, i, token); });
    }
#pragma unroll
    for (int step = 0; step < Tile::VALUE_STEPS; ++step) {
        KvVector<KvT> found[4];  // of tokens 2t, 2t + 1, 2t + 8 and 2t + 9
#pragma unroll
        for (int row = 0; row < 4; ++row) {
            const int token = between(begin, 2 * t + row % 2 + 8 * (row / 2), end);
            load_vector(found[row], values, token, min(8 * step + g, Tile::LAST_VECTOR));
        }
        attend.mix(step, found[0], found[1], found[2], found[3], high, low);
    }
}

// Attend of attend.cuh for 16 columns and a tile in a ring, with the same bits, but operands exchanged:
// columns are rows of a product, tokens and dimensions its columns. Keys then go from shared memory into products
// unchanged, and one product gives weights in the form that the next one takes. The tensor cores give the same bits
// either way. Figures: docs/log/2026-11-27-attention.md
// Lane 4g + t holds scores of the columns g and g + 8 with the tokens 2t, 2t + 1, 2t + 8, 2t + 9, and of these columns
// the weighted sums of the dimensions 64 * step + 16t + (0..15).
template <typename KvT, int HEAD_DIM>
struct AttendColumns {
    using Eight = Attend<KvT, HEAD_DIM, 8>;
    using MmaT = typename Eight::MmaT;
    static constexpr bool HAS_SCALES = Eight::HAS_SCALES;
    static constexpr int KEY_STEPS = Eight::KEY_STEPS, VALUE_STEPS = Eight::VALUE_STEPS;
    static constexpr int LAST_VECTOR = Eight::LAST_VECTOR;

    // The queries, times scale * log2(e), as a lane takes them: 16 bytes for each half of a step of 32 dimensions.
    struct Queries {
        alignas(16) MmaT high[KEY_STEPS * 2 * 32 * 8];
        alignas(16) MmaT low[KEY_STEPS * 2 * 32 * 8];

        // Keep one dimension of a column's query.
        __device__ __forceinline__ void store(int column, int dimension, float value) {
            const int step = dimension / 32, t = dimension / 8 % 4, word = dimension / 2 % 4, lane = column % 8 * 4 + t;
            const int vector = (2 * step + word / 2) * 32 + lane;
            const int place = 8 * vector + 2 * (word % 2 * 2 + column / 8) + dimension % 2;
            const MmaT rounded = from_float<MmaT>(within_range<MmaT>(value));
            high[place] = rounded;
            low[place] = from_float<MmaT>(value - to_float(rounded));
        }
        // This lane's operand of a product; `vector` counts halves of steps.
        static __device__ __forceinline__ uint4 load(const MmaT* part, int vector) {
            return *reinterpret_cast<const uint4*>(part + 8 * (32 * vector + threadIdx.x % 32));
        }
    };

    float maximum[2];  // of columns g and g + 8
    float sum[2][2];   // of the weights of tokens 2t and 2t + 8, and of 2t + 1 and 2t + 9
    // [step][word][parity]: dimensions 64 * step + 8 * (2t + e) + 2 * word + parity of g, with e = 0, 1; then of g + 8.
    float mixed[VALUE_STEPS][4][2][4];

    // Nothing seen yet.
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 2; ++i) maximum[i] = reduce::minus_infinity(), sum[i][0] = sum[i][1] = 0.0f;
#pragma unroll
        for (int i = 0; i < 32 * VALUE_STEPS; ++i) mixed[i / 32][i / 8 % 4][i / 4 % 2][i % 4] = 0.0f;
    }

    // One token seen by column g + 8i, with this score and value [HEAD_DIM].
    __device__ __forceinline__ void start_column_with(int i, float score, const float* value) {
        const int t = number_here(threadIdx.x % 4);
        const float weight = exp2_fast(WEIGHT_EXPONENT<KvT>);
        maximum[i] = score;
        sum[i][0] = t == 0 ? weight : 0.0f;
        sum[i][1] = 0.0f;
#pragma unroll
        for (int j = 0; j < 16 * VALUE_STEPS; ++j) {
            const int step = j / 16, word = j / 4 % 4, parity = j / 2 % 2, e = j % 2;
            const int dimension = 64 * step + 8 * (2 * t + e) + 2 * word + parity;
            if (dimension < HEAD_DIM) mixed[step][word][parity][2 * i + e] = weight * value[dimension];
        }
    }

    // Adds a tile whose tokens `begin` to `end` - 1 may be read. `is_seen` says whether a column sees a token; its
    // arguments are 0 or 1 for g or g + 8, and the token. If a column sees none, it does not change.
    template <typename Seen>
    __device__ __forceinline__ void take(const Queries& queries, const unsigned char* tile, int begin, int end,
                                         Seen is_seen) {
        const RingTokens<KvT, HEAD_DIM, true> keys(tile);
        const RingTokens<KvT, HEAD_DIM, false> values(tile);
        const int lane = number_here(threadIdx.x % 32), g = lane / 4, t = lane % 4;

        // Only on Hopper do warps get registers for all steps at once (barrier.cuh).
        constexpr int STEPS_AT_ONCE = __CUDA_ARCH__ == 900 ? KEY_STEPS : KEY_STEPS < 2 ? 1 : 2;
        float high[2][4] = {}, low[2][4] = {};  // of tokens 2t, 2t + 1 of each eight; columns g, g + 8
#pragma unroll STEPS_AT_ONCE
        for (int step = 0; step < KEY_STEPS; ++step) {
            const int vector = min(4 * step + t, LAST_VECTOR);
            KvVector<KvT> its_keys[2];
            load_vector(its_keys[0], keys, between(begin, g, end), vector);
            load_vector(its_keys[1], keys, between(begin, g + 8, end), vector);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint4 a = Queries::load(queries.high, 2 * step + half);
                const uint4 b = Queries::load(queries.low, 2 * step + half);
#pragma unroll
                for (int eight = 0; eight < 2; ++eight) {
                    const unsigned first = its_keys[eight].pair(2 * half), second = its_keys[eight].pair(2 * half + 1);
                    mma<MmaT>(high[eight], a.x, a.y, a.z, a.w, first, second);
                    mma<MmaT>(low[eight], b.x, b.y, b.z, b.w, first, second);
                }
            }
        }

        float weights[2][4];  // [column][token]
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int i = j / 4, k = j % 4, place = 2 * t + k % 2 + 8 * (k / 2);
            weights[i][k] = high[k / 2][2 * i + k % 2] + low[k / 2][2 * i + k % 2];
            if constexpr (HAS_SCALES) weights[i][k] *= keys.scales[between(begin, place, end)];
            if (!is_seen(i, place)) weights[i][k] = reduce::minus_infinity();
        }
        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float(&its)[4] = weights[i];
            float larger = fmaxf(fmaxf(its[0], its[1]), fmaxf(its[2], its[3]));
            larger = fmaxf(larger, reduce::shuffle_xor(larger, 1));
            larger = fmaxf(larger, reduce::shuffle_xor(larger, 2));
            larger = fmaxf(maximum[i], larger);
            const float known = maximum[i];
            maximum[i] = larger;
            if (larger == reduce::minus_infinity()) larger = 0.0f;  // all weights are 0 then
            factor[i] = exp2_fast(known - larger);
#pragma unroll
            for (int k = 0; k < 4; ++k) its[k] = exp2_fast(its[k] - larger + WEIGHT_EXPONENT<KvT>);
#pragma unroll
            for (int k = 0; k < 2; ++k) sum[i][k] = fmaf(sum[i][k], factor[i], its[k] + its[2 + k]);
#pragma unroll
            for (int k = 0; k < 4 && HAS_SCALES; ++k) {
                its[k] *= values.scales[between(begin, 2 * t + k % 2 + 8 * (k / 2), end)];
            }
        }
#pragma unroll
        for (int i = 0; i < 32 * VALUE_STEPS; ++i) mixed[i / 32][i / 8 % 4][i / 4 % 2][i % 4] *= factor[i % 4 / 2];
        unsigned whole[4], rest[4];  // of g and g + 8 with the first two tokens, then with the others
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float first = weights[j % 2][j / 2 * 2], second = weights[j % 2][j / 2 * 2 + 1];
            whole[j] = pack_pair<MmaT>(first, second);
            const float2 rounded = unpack_pair<MmaT>(whole[j]);
            rest[j] = pack_pair<MmaT>(first - rounded.x, second - rounded.y);
        }
#pragma unroll
        for (int step = 0; step < VALUE_STEPS; ++step) {
            KvVector<KvT> found[4];  // of tokens 2t, 2t + 1, 2t + 8 and 2t + 9
#pragma unroll
            for (int row = 0; row < 4; ++row) {
                const int token = between(begin, 2 * t + row % 2 + 8 * (row / 2), end);
                load_vector(found[row], values, token, min(8 * step + g, LAST_VECTOR));
            }
#pragma unroll
            for (int word = 0; word < 4; ++word) {
                unsigned even[2], odd[2];
                found[0].pair_with(found[1], word, even[0], odd[0]);
                found[2].pair_with(found[3], word, even[1], odd[1]);
                float(&places)[2][4] = mixed[step][word];
                mma<MmaT>(places[0], whole[0], whole[1], whole[2], whole[3], even[0], even[1]);
                mma<MmaT>(places[1], whole[0], whole[1], whole[2], whole[3], odd[0], odd[1]);
                mma<MmaT>(places[0], rest[0], rest[1], rest[2], rest[3], even[0], even[1]);
                mma<MmaT>(places[1], rest[0], rest[1], rest[2], rest[3], odd[0], odd[1]);
            }
        }
    }

    // As Attend's `publish`.
    template <int STRIDE>
    __device__ __forceinline__ void publish(float* maxima, float* sums, float* weighted) const {
        const int lane = number_here(threadIdx.x % 32), g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float halves[2] = {sum[i][0], sum[i][1]};
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                halves[k] += reduce::shuffle_xor(halves[k], 2);
                halves[k] += reduce::shuffle_xor(halves[k], 1);
            }
            if (t == 0) maxima[g + 8 * i] = maximum[i], sums[g + 8 * i] = halves[0] + halves[1];
#pragma unroll
            for (int j = 0; j < 8 * VALUE_STEPS; ++j) {
                const int step = j / 8, word = j % 4, e = j / 4 % 2;
                const int dimension = 64 * step + 8 * (2 * t + e) + 2 * word;
                if (dimension >= HEAD_DIM) continue;
                const float(&places)[2][4] = mixed[step][word];
                *reinterpret_cast<float2*>(weighted + (g + 8 * i) * STRIDE + dimension) =
                    make_float2(places[0][2 * i + e], places[1][2 * i + e]);
            }
        }
    }
};
