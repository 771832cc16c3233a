// gemv_int8: out[r] = scales[r] * sum_c (codes[r,c] - zeros[r]) * x[c]  Source: fastllm, FastllmGemvInt8Kernel2
// Shapes:  codes [num_rows, num_columns] u8; zeros u8 and scales f32 [num_rows]; x [num_columns] f32; out [num_rows]
//          f32
// Problem: gemv_int8
// Sizes:   num_rows 4096; num_columns 4096, 14336
// Check:   num_rows 1, 35; num_columns 1, 100, 1001
// Check:   num_rows 66; num_columns 136, 2064
// Claim:   warp_a_row < tree: five exchanges between lanes replace eight rounds with a barrier each
// Claim:   words < warp_a_row: one load brings four codes, and one their numbers of x
// Claim:   permuted < packed: a byte is put into a number of 2^23, where a conversion from whole numbers is slower
// Claim:   two_rows < permuted: numbers of x are read once for two rows
// Claim:   llmcli < two_rows: tensor cores multiply the codes as they are, so no thread converts any
// Note:    Half the bytes of 16-bit weights are twice the codes a second: what is done to each code begins to count. A
//          load of 16 codes needs 64 bytes of x, which neighbouring lanes then read 64 bytes apart.

constexpr int WARP = 32;

__device__ float sum_over_warp(float value) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    return value;
}

// rung tree: the article's kernel. 256 threads take four rows, one after the other, and read a byte at a time. A tree
//   in shared memory adds up 256 sums. (Without its bias, and with an end for a last block of fewer rows.)
// launch: tree<256, 4><<<(num_rows + 3) / 4, 256>>>
template <int NUM_THREADS, int NUM_PARTS>
__global__ void tree(const unsigned char* codes, const float* scales, const unsigned char* zeros, const float* x,
                     float* out, int num_rows, int num_columns) {
    __shared__ float sums[NUM_THREADS];
    const int begin = blockIdx.x * NUM_PARTS, end = min(begin + NUM_PARTS, num_rows);
    for (int row = begin; row < end; ++row) {
        const unsigned char* row_codes = codes + size_t(row) * num_columns;
        const unsigned char zero = zeros[row];
        sums[threadIdx.x] = 0.0f;
        for (int i = threadIdx.x; i < num_columns; i += NUM_THREADS) sums[threadIdx.x] += x[i] * (row_codes[i] - zero);
        __syncthreads();
        for (int s = 1; s < NUM_THREADS; s *= 2) {
            if ((threadIdx.x & (2 * s - 1)) == 0) sums[threadIdx.x] += sums[threadIdx.x + s];
            __syncthreads();
        }
        if (threadIdx.x == 0) out[row] = sums[0] * scales[row];
        __syncthreads();
    }
}

// rung warp_a_row: a warp has a row to itself, and its lanes exchange their sums. Still a byte at a time.
// launch: warp_a_row<<<(num_rows + 7) / 8, 256>>>
__global__ void warp_a_row(const unsigned char* codes, const float* scales, const unsigned char* zeros, const float* x,
                           float* out, int num_rows, int num_columns) {
    const int lane = threadIdx.x % WARP, row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= num_rows) return;
    const unsigned char* row_codes = codes + size_t(row) * num_columns;
    const unsigned char zero = zeros[row];
    float sum = 0.0f;
    for (int i = lane; i < num_columns; i += WARP) sum += x[i] * (row_codes[i] - zero);
    sum = sum_over_warp(sum);
    if (lane == 0) out[row] = sum * scales[row];
}

// The content of one load: four codes a word.
template <int NUM_WORDS>
struct Words {
    alignas(4 * NUM_WORDS) unsigned words[NUM_WORDS];
};

// The number of a code, by a conversion; or 2^23 more: with the upper byte 0x4b a float counts in ones, and a code is
// the last byte of such a float.
constexpr float OFFSET = 8388608.0f;
template <bool IS_PERMUTED>
__device__ float number_of(unsigned word, int byte) {
    if (IS_PERMUTED) return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + byte));
    return static_cast<float>(word >> (8 * byte) & 255);
}

// NUM_ROWS rows a warp; each lane runs NUM_LOADS loads of NUM_WORDS words of each of them at once.
template <int NUM_ROWS, int NUM_WORDS, int NUM_LOADS, bool IS_PERMUTED>
__global__ void by_words(const unsigned char* codes, const float* scales, const unsigned char* zeros, const float* x,
                         float* out, int num_rows, int num_columns) {
    using Load = Words<NUM_WORDS>;
    const int lane = threadIdx.x % WARP, warp = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    const int row = warp * NUM_ROWS;
    if (row >= num_rows) return;
    // Rows begin at whole loads, or else every code is read alone.
    const int num_loads = num_columns % sizeof(Load) == 0 ? num_columns / sizeof(Load) : 0;
    const float4* inputs = reinterpret_cast<const float4*>(x);
    const unsigned char* rows[NUM_ROWS];
    float sums[NUM_ROWS] = {}, zero[NUM_ROWS];
#pragma unroll
    for (int r = 0; r < NUM_ROWS; ++r) {
        const int own = min(row + r, num_rows - 1);  // beyond the last row the last one is read again, and not written
        rows[r] = codes + size_t(own) * num_columns;
        zero[r] = (IS_PERMUTED ? OFFSET : 0.0f) + zeros[own];
    }
#pragma unroll 1
    for (int first = lane; first < num_loads; first += NUM_LOADS * WARP) {
        Load loads[NUM_LOADS][NUM_ROWS];
#pragma unroll
        for (int step = 0; step < NUM_LOADS; ++step) {
            const int load = min(first + step * WARP, num_loads - 1);  // nothing is added past the end
#pragma unroll
            for (int r = 0; r < NUM_ROWS; ++r) loads[step][r] = reinterpret_cast<const Load*>(rows[r])[load];
        }
#pragma unroll
        for (int step = 0; step < NUM_LOADS; ++step) {
            const int load = first + step * WARP;
            if (NUM_LOADS > 1 && load >= num_loads) break;
#pragma unroll
            for (int w = 0; w < NUM_WORDS; ++w) {
                const float4 input = inputs[load * NUM_WORDS + w];
#pragma unroll
                for (int r = 0; r < NUM_ROWS; ++r) {
                    const unsigned word = loads[step][r].words[w];
                    sums[r] += (number_of<IS_PERMUTED>(word, 0) - zero[r]) * input.x;
                    sums[r] += (number_of<IS_PERMUTED>(word, 1) - zero[r]) * input.y;
                    sums[r] += (number_of<IS_PERMUTED>(word, 2) - zero[r]) * input.z;
                    sums[r] += (number_of<IS_PERMUTED>(word, 3) - zero[r]) * input.w;
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < NUM_ROWS; ++r) {
        for (int i = num_loads * sizeof(Load) + lane; i < num_columns; i += WARP) {
            sums[r] += (number_of<IS_PERMUTED>(rows[r][i], 0) - zero[r]) * x[i];
        }
        const float sum = sum_over_warp(sums[r]);
        if (lane == 0 && row + r < num_rows) out[row + r] = sum * scales[row + r];
    }
}

// rung words: four codes in one load, and four numbers of x in another; four loads of codes are under way.
// launch: by_words<1, 1, 4, false><<<(num_rows + 7) / 8, 256>>>

// rung packed: the same 16 codes in one load.
// launch: by_words<1, 4, 1, false><<<(num_rows + 7) / 8, 256>>>

// rung permuted: no conversion: a byte becomes a float with one permutation of bytes, and its zero point holds the
//   2^23.
// launch: by_words<1, 4, 1, true><<<(num_rows + 7) / 8, 256>>>

// rung two_rows: a warp takes two rows side by side. What it reads of x serves both.
// launch: by_words<2, 4, 1, true><<<(num_rows + 7) / 8, 128>>>

// rung four_rows: four rows side by side, and fewer warps.
// launch: by_words<4, 4, 1, true><<<(num_rows + 15) / 16, 128>>>

// rung llmcli: the engine's kernel over its tiles. Inputs become integers of two digits, so that tensor cores multiply
//   bytes by bytes; copies fill a ring in shared memory while the kernel in front ends.
// launch: llmcli
