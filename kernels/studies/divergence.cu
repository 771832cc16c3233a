// divergence: out[i] = x[i] after num_steps steps of c * v + d, whose c and d depend on
//   whether i is even  Source: Programming Massively Parallel Processors, chapter 4, warp divergence
// Shapes:  x, out [n] f32
// Problem: branches
// Sizes:   n 4194304; num_steps 1, 1000
// Check:   n 1, 33, 1000, 4099; num_steps 1, 7
// Claim:   warps < neighbours at num_steps 1000: a warp whose threads disagree runs both sides, one after the other
// Claim:   arithmetic < neighbours at num_steps 1000: where the sides differ in numbers only, one loop serves both
// Claim:   warps < both_sides at num_steps 1000: a branch that is avoided by computing both sides saves nothing
// Note:    With one step all rungs wait for memory, and a branch costs nothing that can be seen. Since Volta the sides
//          of a branch may take turns, but a warp still issues one side's instruction at a time.

constexpr int BLOCK = 256;
constexpr float EVEN_FACTOR = 1 - 1.0f / 4096, EVEN_TERM = 1.0f / 4096;
constexpr float ODD_FACTOR = 1 - 1.0f / 2048, ODD_TERM = -1.0f / 2048;

__device__ float relax(float value, float factor, float term, int num_steps) {
    for (int step = 0; step < num_steps; ++step) value = fmaf(value, factor, term);
    return value;
}

// rung neighbours: thread i takes element i, so the threads of every warp part ways, 16 to each side.
// launch: branch_by_thread<<<(n + 255) / 256, 256>>>
__global__ void branch_by_thread(const float* x, float* out, int n, int num_steps) {
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i >= n) return;
    if (i % 2 == 0) {
        out[i] = relax(x[i], EVEN_FACTOR, EVEN_TERM, num_steps);
    } else {
        out[i] = relax(x[i], ODD_FACTOR, ODD_TERM, num_steps);
    }
}

// rung warps: the same branch, but the first half of a block takes its even elements, the second half the odd ones: the
//   threads of a warp agree. Every second element is read; the other half of the block finds the rest in L1.
// launch: branch_by_warp<<<(n + 255) / 256, 256>>>
__global__ void branch_by_warp(const float* x, float* out, int n, int num_steps) {
    constexpr int HALF = BLOCK / 2;
    const bool is_odd = threadIdx.x >= HALF;
    const int i = blockIdx.x * BLOCK + threadIdx.x % HALF * 2 + is_odd;
    if (i >= n) return;
    if (!is_odd) {
        out[i] = relax(x[i], EVEN_FACTOR, EVEN_TERM, num_steps);
    } else {
        out[i] = relax(x[i], ODD_FACTOR, ODD_TERM, num_steps);
    }
}

// rung arithmetic: thread i takes element i again. It chooses the two numbers, which needs no branch, and then all
//   threads run the same loop.
// launch: choose_numbers<<<(n + 255) / 256, 256>>>
__global__ void choose_numbers(const float* x, float* out, int n, int num_steps) {
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i >= n) return;
    const bool is_odd = i % 2 == 1;
    out[i] = relax(x[i], is_odd ? ODD_FACTOR : EVEN_FACTOR, is_odd ? ODD_TERM : EVEN_TERM, num_steps);
}

// rung both_sides: no branch either, but the price of one: every thread computes both sides and keeps one result.
// launch: compute_both<<<(n + 255) / 256, 256>>>
__global__ void compute_both(const float* x, float* out, int n, int num_steps) {
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i >= n) return;
    const float even = relax(x[i], EVEN_FACTOR, EVEN_TERM, num_steps);
    const float odd = relax(x[i], ODD_FACTOR, ODD_TERM, num_steps);
    out[i] = i % 2 == 0 ? even : odd;
}
