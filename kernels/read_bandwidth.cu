// read_bandwidth: sums[b] = xor of the 32-bit words that block b reads      Source: design 3
// Shapes:   memory uint4 [num_vectors]; sums uint32 [blocks]
// Requires: memory 16-byte aligned; num_vectors >= 1
// Launch:   grid (any), block (512), 64 B static shared memory
// Traffic:  16 * num_vectors bytes read, 4 bytes a block written
// Numerics: exact
// Choice:   The rate that no other kernel can beat: plain 16-byte loads, eight in flight a thread, blocks striding
//           together. The sum keeps the compiler from dropping the loads, and checks them
#include "common/types.cuh"

constexpr int BLOCK_SIZE = 512;
constexpr int LOADS = 8;

__device__ __forceinline__ unsigned fold(uint4 v) { return v.x ^ v.y ^ v.z ^ v.w; }

__global__ void __launch_bounds__(BLOCK_SIZE)
    read_bandwidth(const uint4* __restrict__ memory, unsigned* __restrict__ sums, unsigned long long num_vectors) {
    __shared__ unsigned warps[BLOCK_SIZE / 32];
    constexpr unsigned long long BLOCK_VECTORS = BLOCK_SIZE * LOADS;
    unsigned sum = 0;
    const unsigned long long stride = gridDim.x * BLOCK_VECTORS;
    for (unsigned long long begin = blockIdx.x * BLOCK_VECTORS; begin < num_vectors; begin += stride) {
        uint4 values[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const unsigned long long index = begin + i * BLOCK_SIZE + threadIdx.x;
            values[i] = index < num_vectors ? __ldcs(memory + index) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) sum ^= fold(values[i]);
    }
    sum = __reduce_xor_sync(0xffffffffu, sum);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();  // every warp's sum is written
    if (threadIdx.x == 0) {
        for (int w = 1; w < BLOCK_SIZE / 32; ++w) sum ^= warps[w];
        sums[blockIdx.x] = sum;
    }
}
