// reduce: the only reductions over the lanes of a warp and the threads of a block: sums, maxima.
//
// Every thread gets the result, with the same bits, from a fixed tree of shuffles: no atomics, so two runs agree.
//   warp_*<WIDTH>(v)      over aligned groups of WIDTH lanes (2..32, a power of two); all 32 lanes must call it
//   block_*<BLOCK_SIZE>(v)  over a one-dimensional block of BLOCK_SIZE threads (a multiple of 32); all must call it;
//                         ends with a barrier, so it may be called twice or in a loop
//   reduce::over_row<Op, ROW_THREADS>(v)  the warp form for ROW_THREADS <= 32, else the block form
// Values: float, double, int, float2 (two sums or maxima at once), SumMax.
#pragma once

// A sum and a maximum found in the same pass.
struct SumMax {
    float sum;
    float maximum;
};

namespace reduce {

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

template <typename V>
__device__ __forceinline__ V shuffle_xor(V value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}
__device__ __forceinline__ float2 shuffle_xor(float2 value, int mask) {
    return make_float2(shuffle_xor(value.x, mask), shuffle_xor(value.y, mask));
}
__device__ __forceinline__ SumMax shuffle_xor(SumMax value, int mask) {
    return SumMax{shuffle_xor(value.sum, mask), shuffle_xor(value.maximum, mask)};
}

// Every combine(a, b) has the bits of combine(b, a): that is what gives all lanes of a butterfly the same result.
struct Sum {
    template <typename V>
    static __device__ __forceinline__ V combine(V a, V b) {
        return a + b;
    }
    static __device__ __forceinline__ float2 combine(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }
    template <typename V>
    static __device__ __forceinline__ void set_identity(V& v) {
        v = V{};
    }
};

struct Max {
    static __device__ __forceinline__ float combine(float a, float b) {
        float larger;  // fmaxf drops NaN, which must show
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
        return larger;
    }
    static __device__ __forceinline__ float2 combine(float2 a, float2 b) {
        return make_float2(combine(a.x, b.x), combine(a.y, b.y));
    }
    static __device__ __forceinline__ void set_identity(float& v) { v = minus_infinity(); }
    static __device__ __forceinline__ void set_identity(float2& v) {
        v = make_float2(minus_infinity(), minus_infinity());
    }
};

struct SumAndMax {
    static __device__ __forceinline__ SumMax combine(SumMax a, SumMax b) {
        return SumMax{a.sum + b.sum, Max::combine(a.maximum, b.maximum)};
    }
    static __device__ __forceinline__ void set_identity(SumMax& v) { v = SumMax{0.0f, minus_infinity()}; }
};

template <typename Op, int WIDTH, typename V>
__device__ __forceinline__ V over_lanes(V value) {
    static_assert(WIDTH >= 1 && WIDTH <= 32 && (WIDTH & (WIDTH - 1)) == 0, "a group of lanes is a power of two");
#pragma unroll
    for (int mask = WIDTH / 2; mask > 0; mask /= 2) value = Op::combine(value, shuffle_xor(value, mask));
    return value;
}

__device__ constexpr int power_of_two_from(int count) {
    int power = 1;
    while (power < count) power *= 2;
    return power;
}

template <typename Op, int BLOCK_SIZE, typename V>
__device__ __forceinline__ V over_block(V value) {
    static_assert(BLOCK_SIZE % 32 == 0 && BLOCK_SIZE >= 32 && BLOCK_SIZE <= 1024, "a block is 1 to 32 whole warps");
    constexpr int NUM_WARPS = BLOCK_SIZE / 32;
    value = over_lanes<Op, 32>(value);
    if constexpr (NUM_WARPS > 1) {
        constexpr int WIDTH = power_of_two_from(NUM_WARPS);
        __shared__ V partials[NUM_WARPS];
        if (threadIdx.x % 32 == 0) partials[threadIdx.x / 32] = value;
        __syncthreads();
        // Every warp repeats the same small tree, which saves a broadcast through shared memory and its barrier.
        const int slot = threadIdx.x % WIDTH;
        Op::set_identity(value);
        if (slot < NUM_WARPS) value = partials[slot];
        value = over_lanes<Op, WIDTH>(value);
    }
    __syncthreads();
    return value;
}

// The threads of one row: a group of lanes, or the block.
template <typename Op, int ROW_THREADS, typename V>
__device__ __forceinline__ V over_row(V value) {
    if constexpr (ROW_THREADS <= 32) {
        return over_lanes<Op, ROW_THREADS>(value);
    } else {
        return over_block<Op, ROW_THREADS>(value);
    }
}

}  // namespace reduce

template <int WIDTH = 32, typename V>
__device__ __forceinline__ V warp_sum(V value) {
    return reduce::over_lanes<reduce::Sum, WIDTH>(value);
}
template <int WIDTH = 32, typename V>
__device__ __forceinline__ V warp_max(V value) {
    return reduce::over_lanes<reduce::Max, WIDTH>(value);
}

template <int BLOCK_SIZE, typename V>
__device__ __forceinline__ V block_sum(V value) {
    return reduce::over_block<reduce::Sum, BLOCK_SIZE>(value);
}
template <int BLOCK_SIZE, typename V>
__device__ __forceinline__ V block_max(V value) {
    return reduce::over_block<reduce::Max, BLOCK_SIZE>(value);
}
