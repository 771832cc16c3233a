// uneven_loops: out[i] = x[i] after num_turns[i] turns of eight steps c * v + d; most i have few,
//   some have many  Source: Programming Massively Parallel Processors, chapter 4, divergence by loop bounds
// Shapes:  x, out [n] f32; num_turns, order [n] i32
// Problem: uneven_loops
// Sizes:   n 2097152; max_turns 10, 1000
// Check:   n 1, 33, 2048, 5001; max_turns 1, 40
// Claim:   sorted < in_order at max_turns 1000: a warp takes as long as its longest loop, and sorted loops are alike
// Claim:   pool < in_order at max_turns 1000: a thread that is done takes the next element instead of waiting
// Claim:   pool < pool_torn at max_turns 1000: where a warp's threads meet again decides whether they wait
// Claim:   in_order < sorted at max_turns 10: elements in another order are scattered over memory, which costs more
//          than short loops can save
// Note:    The order is given, sorting is not measured. The pool needs none.

constexpr int BLOCK = 256;
constexpr int POOL = 2048;  // elements of a block
constexpr int STEPS = 8;    // of a turn
constexpr float FACTOR = 1 - 1.0f / 4096, TERM = 1.0f / 4096;

__device__ float turn(float value) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) value = fmaf(value, FACTOR, TERM);
    return value;
}

__device__ float all_turns(float value, int num_turns) {
#pragma unroll 1
    for (int done = 0; done < num_turns; ++done) value = turn(value);
    return value;
}

// rung in_order: thread i takes element i. A warp is done when the slowest of its 32 threads is.
// launch: by_index<<<(n + 255) / 256, 256>>>
__global__ void by_index(const float* x, const int* num_turns, float* out, int n) {
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) out[i] = all_turns(x[i], num_turns[i]);
}

// rung sorted: thread i takes the element that is i-th by its turns, the longest first. Threads of a warp have loops of
//   about the same length, and what is left for the end of the run is short.
// launch: by_order<<<(n + 255) / 256, 256>>>
__global__ void by_order(const float* x, const int* num_turns, const int* order, float* out, int n) {
    const int thread = blockIdx.x * BLOCK + threadIdx.x;
    if (thread >= n) return;
    const int i = order[thread];
    out[i] = all_turns(x[i], num_turns[i]);
}

struct Pool {
    float values[POOL];
    int turns[POOL];
    int next;  // element to take; threadIdx.x deals out the first ones
};

// Brings a block's elements into shared memory, and returns how many there are.
__device__ int fill_pool(Pool& pool, const float* x, const int* num_turns, int n) {
    const int begin = blockIdx.x * POOL, count = min(POOL, n - begin);
    for (int i = threadIdx.x; i < count; i += BLOCK) {
        pool.values[i] = x[begin + i];
        pool.turns[i] = num_turns[begin + i];
    }
    if (threadIdx.x == 0) pool.next = BLOCK;
    __syncthreads();  // the pool is written
    return count;
}

// rung pool_torn: a block puts 2048 elements into shared memory, and a thread takes the next one whenever it is done
//   with one. It should not wait for anybody. But compilers see a loop over turns inside a loop over elements, and
//   threads of a warp meet again where the inner one ends: those that are done wait there for the longest loop.
// launch: from_pool_torn<<<(n + 2047) / 2048, 256>>>
__global__ void from_pool_torn(const float* x, const int* num_turns, float* out, int n) {
    __shared__ Pool pool;
    const int count = fill_pool(pool, x, num_turns, n), begin = blockIdx.x * POOL;
    int i = threadIdx.x;
    if (i >= count) return;
    int left = pool.turns[i];
    float value = pool.values[i];
    while (true) {
        value = turn(value);
        if (--left > 0) continue;
        out[begin + i] = value;
        i = atomicAdd(&pool.next, 1);
        if (i >= count) return;
        value = pool.values[i];
        left = pool.turns[i];
    }
}

// rung pool: all threads of a warp vote at every turn whether one of them still has work. The vote keeps the loop in
//   one piece, and the warp together: at each turn its threads are at different elements.
// launch: from_pool<<<(n + 2047) / 2048, 256>>>
__global__ void from_pool(const float* x, const int* num_turns, float* out, int n) {
    __shared__ Pool pool;
    const int count = fill_pool(pool, x, num_turns, n), begin = blockIdx.x * POOL;
    int i = threadIdx.x, left = i < count ? pool.turns[i] : 0;
    float value = i < count ? pool.values[i] : 0.0f;
    while (__any_sync(0xffffffffu, i < count)) {
        value = turn(value);
        if (--left == 0) {  // below 0 in threads that found the pool empty
            out[begin + i] = value;
            i = atomicAdd(&pool.next, 1);
            if (i < count) {
                value = pool.values[i];
                left = pool.turns[i];
            }
        }
    }
}
