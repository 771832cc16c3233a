// Shared by the kernels of rows: their launch bounds, their rows' scales, and the states that they reduce a row to.
#pragma once

#include "common/reduce.cuh"
#include "common/rows.cuh"

// ROW_THREADS threads share a row (32: a warp; more: the block).
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

// Up to 4 steps: 1024 resident threads a multiprocessor (64 registers each); fewer threads have too few loads in
// flight. More steps: 512 threads (128 registers each) have enough loads in flight, and 64 registers would spill.
__host__ __device__ constexpr int row_min_blocks(int row_threads, int steps) {
    const int blocks = (steps > 4 ? 512 : 1024) / row_block_size(row_threads);
    return blocks > 1 ? blocks : 1;
}
#define ROW_LAUNCH_BOUNDS(ROW_THREADS, STEPS) \
    __launch_bounds__(row_block_size(ROW_THREADS), row_min_blocks(ROW_THREADS, STEPS))

// A store past the caches, whose columns are not read again soon.
template <Cache CACHE, int VECTOR>
__device__ __forceinline__ void store_columns(float* address, const float (&values)[VECTOR]) {
    static_assert(CACHE == Cache::STREAM, "common/rows.cuh has the other form");
    if constexpr (VECTOR == 4) {
        __stcs(reinterpret_cast<float4*>(address), make_float4(values[0], values[1], values[2], values[3]));
    } else {
        __stcs(address, values[0]);
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

template <int VECTOR>
__device__ __forceinline__ void store_columns(__nv_bfloat16* address, const float (&values)[VECTOR]) {
    if constexpr (VECTOR == 4) {
        const __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(values[0], values[1]),
                                         __floats2bfloat162_rn(values[2], values[3])};
        *reinterpret_cast<uint2*>(address) = *reinterpret_cast<const uint2*>(pairs);
    } else {
        *address = from_float<__nv_bfloat16>(values[0]);
    }
}

// Only __half has too few exponents for activations; the other types need no row scale.
template <typename T>
constexpr bool NEEDS_ROW_SCALE = false;
template <>
constexpr bool NEEDS_ROW_SCALE<__half> = true;

// The scale is 1 unless the row's largest magnitude exceeds 2^15; then magnitude / scale is in [2^14, 2^15). NaN gives
// 1.
template <typename T>
__device__ __forceinline__ RowScale row_scale_for(float largest) {
    if (!NEEDS_ROW_SCALE<T> || !(largest > LARGEST_UNSCALED)) return RowScale{1.0f, 1.0f};
    const int exponent = __float_as_int(largest) >> 23;  // biased: 142 to 255
    return RowScale{__int_as_float((exponent - 14) << 23), __int_as_float((268 - exponent) << 23)};
}

// A value and where it stood. Ties go to the lowest index; NaN counts as larger than every number, as in torch.argmax.
struct Indexed {
    float value;
    int index;
};

// The state of a row of exponentials: its maximum, and the sum of exp(x - maximum).
struct MaxSum {
    float maximum;
    float sum;
};

__device__ __forceinline__ Indexed shuffle_xor(Indexed value, int mask) {
    return Indexed{reduce::shuffle_xor(value.value, mask), reduce::shuffle_xor(value.index, mask)};
}
__device__ __forceinline__ MaxSum shuffle_xor(MaxSum value, int mask) {
    return MaxSum{reduce::shuffle_xor(value.maximum, mask), reduce::shuffle_xor(value.sum, mask)};
}

namespace reduce {

struct Argmax {
    static __device__ __forceinline__ Indexed combine(Indexed a, Indexed b) {
        const bool a_nan = a.value != a.value;
        const bool b_nan = b.value != b.value;
        const bool tie = a.value == b.value || (a_nan && b_nan);
        const bool a_larger = (a_nan && !b_nan) || a.value > b.value;
        return a_larger || (tie && a.index < b.index) ? a : b;
    }
    static __device__ __forceinline__ void set_identity(Indexed& v) { v = Indexed{minus_infinity(), 2147483647}; }
};

struct Online {
    static __device__ __forceinline__ MaxSum combine(MaxSum a, MaxSum b) {
        const bool a_larger = a.maximum >= b.maximum;
        const MaxSum larger = a_larger ? a : b;
        const MaxSum smaller = a_larger ? b : a;
        // Equal maxima need no exponential; two empty parts (-inf) would have NaN for a difference.
        const float factor = smaller.maximum == larger.maximum ? 1.0f : expf(smaller.maximum - larger.maximum);
        return MaxSum{Max::combine(a.maximum, b.maximum), fmaf(smaller.sum, factor, larger.sum)};
    }
    static __device__ __forceinline__ void set_identity(MaxSum& v) { v = MaxSum{minus_infinity(), 0.0f}; }
};

// Add numbers to a thread's state. Numbers of -inf add nothing, also before any other number.
template <int COUNT>
__device__ __forceinline__ void include_online(MaxSum& known, const float (&values)[COUNT]) {
    float maximum = values[0];
#pragma unroll
    for (int i = 1; i < COUNT; ++i) maximum = fmaxf(maximum, values[i]);
    if (maximum > known.maximum) {
        known.sum *= expf(known.maximum - maximum);
        known.maximum = maximum;
    }
    const float base = known.maximum == minus_infinity() ? 0.0f : known.maximum;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) known.sum += expf(values[i] - base);
}

}  // namespace reduce
