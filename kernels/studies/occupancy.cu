// occupancy: out[i] = x[i], with many threads that each load little, and few that
//   each load much  Source: Programming Massively Parallel Processors, chapter 4, occupancy
// Shapes:  x, out [n] f32
// Problem: copy
// Sizes:   n 67108864
// Check:   n 1, 33, 1000, 8196, 100003
// Claim:   threads_256 < threads_32: a multiprocessor holds so many blocks and no more, and these blocks are one warp
// Claim:   threads_256 < reserve_96k: one load a thread needs all the warps it can get to keep memory busy
// Claim:   eight_loads < reserve_96k: loads under way count, and eight in a thread do what eight threads would
// Claim:   eight_packs < threads_256: a part of the occupancy, with more bytes under way, beats all of it
// Note:    Bytes under way = warps x 32 x loads x bytes of a load. Memory is busy when they reach bandwidth x latency:
//          occupancy is one way to get there, and loads in a thread are another.

// rung threads_32: one element a thread, blocks of one warp.
// launch: one_each<<<(n + 31) / 32, 32>>>

// rung threads_64: two warps a block.
// launch: one_each<<<(n + 63) / 64, 64>>>

// rung threads_256: eight warps a block.
// launch: one_each<<<(n + 255) / 256, 256>>>

// rung threads_1024: the largest block. The next one may enter only when all of its 32 warps are done.
// launch: one_each<<<(n + 1023) / 1024, 1024>>>

// rung reserve_48k: blocks of 256 that ask for 48 KiB of shared memory and leave it alone: fewer blocks have room.
// launch: one_each<<<(n + 255) / 256, 256, 48 * 1024>>>

// rung reserve_96k: 96 KiB a block: room for two, or one.
// launch: one_each<<<(n + 255) / 256, 256, 96 * 1024>>>
__global__ void one_each(const float* __restrict__ x, float* __restrict__ out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i];
}

// A thread copies eight elements. All loads come before the first store, so that they overlap.
template <typename T>
__device__ void copy_eight(const T* __restrict__ x, T* __restrict__ out, int count) {
    constexpr int LOADS = 8;
    const int first = blockIdx.x * blockDim.x * LOADS + threadIdx.x;
    T values[LOADS];
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
        const int i = first + load * blockDim.x;
        if (i < count) values[load] = x[i];
    }
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
        const int i = first + load * blockDim.x;
        if (i < count) out[i] = values[load];
    }
}

// rung eight_loads: the same two blocks or one, with eight loads a thread.
// launch: eight_floats<<<(n + 2047) / 2048, 256, 96 * 1024>>>
__global__ void eight_floats(const float* __restrict__ x, float* __restrict__ out, int n) { copy_eight(x, out, n); }

// rung eight_packs: eight loads of 16 bytes, by blocks of 128 threads: half the warps of the rung above.
// launch: eight_float4<<<(n + 4095) / 4096, 128, 96 * 1024>>>
__global__ void eight_float4(const float* __restrict__ x, float* __restrict__ out, int n) {
    copy_eight(reinterpret_cast<const float4*>(x), reinterpret_cast<float4*>(out), n / 4);
    const int last = n / 4 * 4 + threadIdx.x;  // the rest without a whole pack
    if (blockIdx.x == 0 && last < n) out[last] = x[last];
}
