// coalescing: out[i] = x[i], where neighbouring threads take elements that lie next to each other,
//   or stride apart  Source: Programming Massively Parallel Processors, chapter 6, coalescing
// Shapes:  x, out [n] f32
// Problem: copy
// Sizes:   n 67108864; stride 1, 2, 8, 32
// Check:   n 1, 37, 1000, 4099; stride 1, 2, 32
// Claim:   contiguous < strided at stride 2: half of every 32-byte sector is fetched for nobody in the warp
// Claim:   contiguous < strided at stride 8: each thread has a sector of 32 bytes to itself, and uses 4 of them
// Claim:   contiguous < strided at stride 32: a warp touches 32 lines where 4 sectors in a row would do
// Claim:   contiguous < own_chunk at stride 32: what suits a CPU's caches, a part in a row for each thread, scatters a
//          warp over as many lines as it has threads
// Claim:   own_chunk < strided at stride 32: here a line is used up by the thread that fetched it, while it is in L1
// Claim:   shifted < strided at stride 2: a warp that begins one element off needs one sector more, not twice as many
// Note:    All rungs copy the same bytes: what lies above the time of contiguous is memory traffic that nobody asked
//          for. With stride 1 the rungs do the same, but for shifted.

constexpr int BLOCK = 256;

// rung contiguous: thread i copies element i: a warp reads 128 bytes in a row, which are 4 sectors.
// launch: by_index<<<(n + 255) / 256, 256>>>
__global__ void by_index(const float* x, float* out, int n) {
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) out[i] = x[i];
}

// rung shifted: thread i copies element i + 1, and the last thread the first: no warp begins at a sector's beginning.
// launch: by_next<<<(n + 255) / 256, 256>>>
__global__ void by_next(const float* x, float* out, int n) {
    const int thread = blockIdx.x * BLOCK + threadIdx.x;
    if (thread >= n) return;
    const int i = thread + 1 < n ? thread + 1 : 0;
    out[i] = x[i];
}

// rung strided: neighbours take elements `stride` apart: first 0, stride, 2 stride, ..., then 1, stride + 1, and so on.
//   A sector is wanted again only after the whole array was passed over, and has left the caches.
// launch: by_column<<<((n + stride - 1) / stride * stride + 255) / 256, 256>>>
__global__ void by_column(const float* x, float* out, int n, int stride) {
    const int thread = blockIdx.x * BLOCK + threadIdx.x;
    const int num_rows = (n + stride - 1) / stride;
    const int column = thread / num_rows;
    const int i = thread % num_rows * stride + column;
    if (column < stride && i < n) out[i] = x[i];
}

// rung own_chunk: a thread copies `stride` elements in a row, one after the other. At every step a warp touches
//   elements `stride` apart, and at the next step their neighbours.
// launch: by_chunk<<<((n + stride - 1) / stride + 255) / 256, 256>>>
__global__ void by_chunk(const float* x, float* out, int n, int stride) {
    const int begin = (blockIdx.x * BLOCK + threadIdx.x) * stride;
#pragma unroll 1
    for (int i = begin; i < min(begin + stride, n); ++i) out[i] = x[i];
}
