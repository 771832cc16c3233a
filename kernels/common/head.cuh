// head: one query or key head in the registers of a warp: norm, rotation and rounding between projection and attention;
// and the KV cache in 8 bits. There a token's vector of a head is scale * (codes - 128), with scale = largest magnitude
// / 127.
// Products and sums that a compiler could fuse are written as single operations, so all kernels get the same bits.
#pragma once

#include "common/load.cuh"
#include "common/matrix.cuh"
#include "common/pages.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

// Lane l holds the pairs (i, i + HEAD_DIM / 2) for i = l, l + 32, ...; places past the head hold 0.
template <int HEAD_DIM>
struct Head {
    static constexpr int HALF = HEAD_DIM / 2;
    static constexpr int PAIRS = (HALF + 31) / 32;
    float first[PAIRS];
    float second[PAIRS];

    static __device__ __forceinline__ int index(int pair) { return threadIdx.x % 32 + 32 * pair; }
    static __device__ __forceinline__ bool has(int pair) { return HALF % 32 == 0 || index(pair) < HALF; }

    // Start loading x [HEAD_DIM], here and not later; zeros if the head does not exist.
    __device__ __forceinline__ void load(const float* x, bool exists) {
        x = address_here(x + threadIdx.x % 32);
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            first[pair] = exists && has(pair) ? load_here(x + 32 * pair) : 0.0f;
            second[pair] = exists && has(pair) ? load_here(x + 32 * pair + HALF) : 0.0f;
        }
    }

    // Adds `num_parts` heads, one after the other, each `part_size` floats after the one before.
    __device__ __forceinline__ void add(const float* part, int num_parts, size_t part_size) {
        constexpr int AT_ONCE = 4;  // loads run together
        for (int begin = 0; begin < num_parts; begin += AT_ONCE) {
            Head heads[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) heads[i].load(part + (begin + i) * part_size, begin + i < num_parts);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (begin + i >= num_parts) break;  // an added zero would change the sign of another
                add(heads[i]);
            }
        }
    }
    __device__ __forceinline__ void add(const Head& other) {
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            first[pair] = __fadd_rn(first[pair], other.first[pair]);
            second[pair] = __fadd_rn(second[pair], other.second[pair]);
        }
    }

    // Gives each dimension that exists, and its value, to `take`.
    template <typename Take>
    __device__ __forceinline__ void each(Take take) const {
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            if (!has(pair)) continue;
            take(index(pair), first[pair]);
            take(index(pair) + HALF, second[pair]);
        }
    }
    __device__ __forceinline__ void store(float* x) const {
        each([&](int dimension, float value) { x[dimension] = value; });
    }

    __device__ __forceinline__ void scale(float factor) {
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) first[pair] *= factor, second[pair] *= factor;
    }

    // The angles of a position, for rotate; without a table they rotate nothing.
    static __device__ __forceinline__ void load_angles(const float2* cos_sin, int position, float2 (&angles)[PAIRS]) {
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            const size_t place = size_t(position) * HALF + index(pair);
            angles[pair] = cos_sin != nullptr && has(pair) ? __ldcg(cos_sin + place) : make_float2(1.0f, 0.0f);
        }
    }

    // weight * x / sqrt(mean(x^2) + eps), if there is a weight; then every pair is turned by its angle, given as (cos,
    // sin). All lanes must call it.
    __device__ __forceinline__ void norm_and_rotate(const float* weight, float eps, const float2 (&angles)[PAIRS]) {
        if (weight != nullptr) {
            float squares = 0.0f;
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair) {
                squares = fmaf(first[pair], first[pair], fmaf(second[pair], second[pair], squares));
            }
            const float inverse = rsqrtf(fmaf(warp_sum(squares), 1.0f / HEAD_DIM, eps));
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair) {
                if (!has(pair)) continue;
                first[pair] *= inverse * weight[index(pair)];
                second[pair] *= inverse * weight[index(pair) + HALF];
            }
        }
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            const float2 angle = angles[pair];
            const float rotated = fmaf(first[pair], angle.x, -__fmul_rn(second[pair], angle.y));
            second[pair] = fmaf(second[pair], angle.x, __fmul_rn(first[pair], angle.y));
            first[pair] = rotated;
        }
    }

    // Clamp to the largest number of fp16.
    __device__ __forceinline__ void keep_within_range() {
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            first[pair] = within_range<__half>(first[pair]);
            second[pair] = within_range<__half>(second[pair]);
        }
    }

    // The largest magnitude, NaN if one is NaN, in every lane. All lanes must call it.
    __device__ __forceinline__ float largest() const {
        float larger = 0.0f;
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            larger = reduce::Max::combine(larger, fabsf(first[pair]));
            larger = reduce::Max::combine(larger, fabsf(second[pair]));
        }
        return warp_max(larger);
    }

    // The product of two heads, in every lane. All lanes must call it.
    __device__ __forceinline__ float dot(const Head& other) const {
        float products = 0.0f;
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            products = fmaf(first[pair], other.first[pair], fmaf(second[pair], other.second[pair], products));
        }
        return warp_sum(products);
    }
};

struct KvCode {
    unsigned char code;
};

// MmaT: the type in which the cache's elements are multiplied; code - 128 is exact in fp16.
template <typename KvT>
struct KvFormat {
    using MmaT = KvT;
    static constexpr bool HAS_SCALES = false;
};
template <>
struct KvFormat<KvCode> {
    using MmaT = __half;
    static constexpr bool HAS_SCALES = true;
};

// Weights are multiplied by scales up to 65504 / 127 before they become fp16.
template <>
constexpr float WEIGHT_EXPONENT<KvCode> = 6.0f;

// Two bytes of a word below a byte 0x64 each are the fp16 numbers 1024 + code: bytes 0 and 1, or 2 and 3.
__device__ __forceinline__ unsigned widen_codes(unsigned codes, bool is_upper) {
    const unsigned pair = __byte_perm(codes, 0x64646464u, is_upper ? 0x4342 : 0x4140);
    const __half2 less = __hsub2(*reinterpret_cast<const __half2*>(&pair), __float2half2_rn(1024.0f + 128.0f));
    return *reinterpret_cast<const unsigned*>(&less);
}

// 8 elements of one token as loaded.
template <typename KvT>
struct KvVector {
    using Words = uint4;
    unsigned words[4];

    __device__ __forceinline__ void set(const uint4& all) {
        words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
    }
    // Elements 2i and 2i + 1.
    __device__ __forceinline__ unsigned pair(int i) const { return words[i]; }
    // Element 2i of this token and of another, and element 2i + 1 of both.
    __device__ __forceinline__ void pair_with(const KvVector& other, int i, unsigned& even, unsigned& odd) const {
        even = __byte_perm(words[i], other.words[i], 0x5410);
        odd = __byte_perm(words[i], other.words[i], 0x7632);
    }
};
template <>
struct KvVector<KvCode> {
    using Words = uint2;  // always 8 elements: each lane then holds the same dimensions as with 16-bit ones
    unsigned words[2];

    __device__ __forceinline__ void set(const uint2& all) { words[0] = all.x, words[1] = all.y; }
    __device__ __forceinline__ unsigned pair(int i) const { return widen_codes(words[i / 2], i % 2 == 1); }
    __device__ __forceinline__ void pair_with(const KvVector& other, int i, unsigned& even, unsigned& odd) const {
        const unsigned both = __byte_perm(words[i / 2], other.words[i / 2], i % 2 == 0 ? 0x5140 : 0x7362);
        even = widen_codes(both, false);
        odd = widen_codes(both, true);
    }
};

// Round a head as the cache holds it. `store` gets each dimension and its rounded element. Returns the scale of codes:
// that of the largest magnitude, NaN if one is NaN, and 0 for a vector of zeros. All lanes must call it.
template <typename KvT, int HEAD_DIM, typename Store>
__device__ __forceinline__ float round_head_with(Head<HEAD_DIM>& head, Store store) {
    using Pairs = Head<HEAD_DIM>;
    float scale = 0.0f;
    if constexpr (KvFormat<KvT>::HAS_SCALES) {
        head.keep_within_range();
        scale = head.largest() / 127.0f;
    }
    const auto round = [&](float& value) {
        if constexpr (KvFormat<KvT>::HAS_SCALES) {
            const float steps = rintf(value / (scale == 0.0f ? 1.0f : scale));
            const int code = static_cast<int>(fminf(fmaxf(steps, -127.0f), 127.0f)) + 128;
            const KvT rounded = {static_cast<unsigned char>(code)};
            value = scale * static_cast<float>(static_cast<int>(rounded.code) - 128);
            return rounded;
        } else {
            const KvT rounded = from_float<KvT>(within_range<KvT>(value));
            value = to_float(rounded);
            return rounded;
        }
    };
#pragma unroll
    for (int pair = 0; pair < Pairs::PAIRS; ++pair) {
        const KvT first = round(head.first[pair]), second = round(head.second[pair]);
        if (!Pairs::has(pair)) continue;
        store(Pairs::index(pair), first);
        store(Pairs::index(pair) + Pairs::HALF, second);
    }
    return scale;
}

// The same, stored in the cache if `stores`. All lanes must call it.
template <typename KvT, int HEAD_DIM>
__device__ __forceinline__ void round_head(Head<HEAD_DIM>& head, KvT* row, float* row_scale, bool stores) {
    const float scale = round_head_with<KvT>(head, [&](int dimension, KvT rounded) {
        if (stores) row[dimension] = rounded;
    });
    if constexpr (KvFormat<KvT>::HAS_SCALES) {
        if (stores && threadIdx.x % 32 == 0) *row_scale = scale;
    }
}
