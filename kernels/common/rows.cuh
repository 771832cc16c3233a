// rows: how ROW_THREADS threads share a row of float32 (32: a warp; more: the block). Each thread takes VECTOR
// neighbouring columns, STEPS times, and keeps them in registers. VECTOR is 4 (16 bytes), or 1 for unaligned rows.
#pragma once

#include "common/reduce.cuh"
#include "common/types.cuh"

// A block of the warp form holds 4 rows, one of the block form holds one.
__host__ __device__ constexpr int row_block_size(int row_threads) { return row_threads <= 32 ? 128 : row_threads; }

// The row of this thread. Idle warps of the last block get num_rows or more; such a warp returns as a whole.
template <int ROW_THREADS>
__device__ __forceinline__ int row_of_thread() {
    if constexpr (ROW_THREADS <= 32) {
        return blockIdx.x * (row_block_size(ROW_THREADS) / ROW_THREADS) + threadIdx.x / ROW_THREADS;
    } else {
        return blockIdx.x;
    }
}

// How caches treat a load or store: KEEP: as usual; STREAM: evict it first, as it is not read again soon.
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

template <Cache CACHE = Cache::KEEP, int VECTOR>
__device__ __forceinline__ void store_columns(float* address, const float (&values)[VECTOR]) {
    if constexpr (VECTOR == 4) {
        float4* vector = reinterpret_cast<float4*>(address);
        const float4 stored = make_float4(values[0], values[1], values[2], values[3]);
        if constexpr (CACHE == Cache::STREAM) {
            __stcs(vector, stored);
        } else {
            *vector = stored;
        }
    } else if constexpr (CACHE == Cache::STREAM) {
        __stcs(address, values[0]);
    } else {
        *address = values[0];
    }
}

// Rounded to nearest even; four 16-bit values are one store of 8 bytes.
template <int VECTOR>
__device__ __forceinline__ void store_columns(__half* address, const float (&values)[VECTOR]) {
    if constexpr (VECTOR == 4) {
        const __half2 pairs[2] = {__floats2half2_rn(values[0], values[1]), __floats2half2_rn(values[2], values[3])};
        *reinterpret_cast<uint2*>(address) = *reinterpret_cast<const uint2*>(pairs);
    } else {
        *address = from_float<__half>(values[0]);
    }
}

// A row's scale and its inverse, both powers of two, so that multiplying and undoing it changes no bit of the mantissa.
struct RowScale {
    float scale;
    float inverse;
};

constexpr float LARGEST_UNSCALED = 32768.0f;
