// kv_code: the KV cache in 8 bits. A token's vector of a head is scale * (codes - 128), with scale = largest magnitude
// / 127.
#pragma once

#include "common/head.cuh"
#include "common/matrix.cuh"
#include "common/pages.cuh"

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

// Rounding of one vector: the scale from its largest magnitude (NaN if one is NaN), then every element. Elements come
// within_range<__half>. A vector of zeros has the scale 0.
__device__ __forceinline__ float code_scale(float largest) { return largest / 127.0f; }
__device__ __forceinline__ KvCode encode(float value, float scale) {
    const float rounded = rintf(value / (scale == 0.0f ? 1.0f : scale));
    return KvCode{static_cast<unsigned char>(static_cast<int>(fminf(fmaxf(rounded, -127.0f), 127.0f)) + 128)};
}
__device__ __forceinline__ float decode(KvCode code, float scale) {
    return scale * static_cast<float>(static_cast<int>(code.code) - 128);
}

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

// Round a head as the cache holds it. `store` gets each dimension and its rounded element. Returns the scale of codes.
// All lanes must call it.
template <typename KvT, int HEAD_DIM, typename Store>
__device__ __forceinline__ float round_head_with(Head<HEAD_DIM>& head, Store store) {
    using Pairs = Head<HEAD_DIM>;
    float scale = 0.0f;
    if constexpr (KvFormat<KvT>::HAS_SCALES) {
        head.keep_within_range();
        scale = code_scale(head.largest());
    }
    const auto round = [&](float& value) {
        if constexpr (KvFormat<KvT>::HAS_SCALES) {
            const KvT code = encode(value, scale);
            value = decode(code, scale);
            return code;
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
