// rows: a thread takes VECTOR neighbouring columns of a row, STEPS times, and keeps them in registers. VECTOR is 4 (16
// bytes), or 1 for unaligned rows.
#pragma once

#include "common/reduce.cuh"
#include "common/types.cuh"

// How caches treat a load: KEEP: as usual; STREAM: evict it first, as it is not read again soon.
enum class Cache { KEEP, STREAM };

template <Cache CACHE = Cache::KEEP, int VECTOR>
__device__ __forceinline__ void load_columns(const float* address, float (&values)[VECTOR]) {
    static_assert(VECTOR == 4 || VECTOR == 1, "16 bytes or one element");
    if constexpr (VECTOR == 4) {
        const float4* vector = reinterpret_cast<const float4*>(address);
        const float4 loaded = CACHE == Cache::STREAM ? __ldcs(vector) : *vector;
        values[0] = loaded.x, values[1] = loaded.y, values[2] = loaded.z, values[3] = loaded.w;
    } else {
        values[0] = CACHE == Cache::STREAM ? __ldcs(address) : *address;
    }
}

// Widened exactly; four 16-bit values are one load of 8 bytes.
template <typename T, int VECTOR>
__device__ __forceinline__ void load_columns(const T* address, float (&values)[VECTOR]) {
    static_assert(sizeof(T) == 2, "16-bit types; float has its own form");
    if constexpr (VECTOR == 4) {
        const uint2 bits = *reinterpret_cast<const uint2*>(address);
        const T* loaded = reinterpret_cast<const T*>(&bits);
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) values[v] = to_float(loaded[v]);
    } else {
        values[0] = to_float(*address);
    }
}

template <int VECTOR>
__device__ __forceinline__ void store_columns(float* address, const float (&values)[VECTOR]) {
    if constexpr (VECTOR == 4) {
        *reinterpret_cast<float4*>(address) = make_float4(values[0], values[1], values[2], values[3]);
    } else {
        *address = values[0];
    }
}

// A row's scale and its inverse, both powers of two, so that multiplying and undoing it changes no bit of the mantissa.
struct RowScale {
    float scale;
    float inverse;
};

constexpr float LARGEST_UNSCALED = 32768.0f;
