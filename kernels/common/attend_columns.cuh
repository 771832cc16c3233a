// attend_columns: Attend of attend.cuh for 16 columns and a tile in a ring, with the same bits, but operands exchanged:
// columns are rows of a product, tokens and dimensions its columns. Keys then go from shared memory into products
// unchanged, and one product gives weights in the form that the next one takes. The tensor cores give the same bits
// either way. Figures: docs/log/2026-11-27-attention.md
//
// Lane 4g + t holds scores of the columns g and g + 8 with the tokens 2t, 2t + 1, 2t + 8, 2t + 9, and of these columns
// the weighted sums of the dimensions 64 * step + 16t + (0..15).
#pragma once

#include "common/kv_ring.cuh"
#include "common/load.cuh"

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
