// gemv_int4: out[r] = sum_c weight[r,c] * x[c], weights of four bits  Source: fastllm, FastllmGemvInt4Kernel2
// Shapes:  codes [num_rows, num_columns / 2] u8, the first of two in the high half; scales, mins f32 and zeros u8
//          [num_rows]; x [num_columns] f32; out [num_rows] f32. A weight is (code - zero) * scale, or code * scale +
//          min
// Problem: gemv_int4
// Sizes:   num_rows 4096; num_columns 4096, 14336
// Check:   num_rows 1, 35; num_columns 2, 102, 1002
// Check:   num_rows 66; num_columns 136, 1056, 2080
// Claim:   warp_a_row < tree_zero: five exchanges between lanes replace eight rounds with a barrier each
// Claim:   words < warp_a_row: one load brings eight codes
// Claim:   packed < words: one load brings 32 codes
// Claim:   two_rows < packed: 32 codes are 16 bytes, and their numbers of x 128, which now serve two rows
// Claim:   in_place < two_rows: a code is neither shifted nor converted
// Claim:   llmcli < in_place: tensor cores multiply the codes, so what is done to each of them is hardly anything
// Note:    A quarter of the bytes of 16-bit weights are four times the codes a second. The work for each code, not
//          memory, is what these kernels wait for: compare their share of bandwidth with that of gemv.

constexpr int WARP = 32;

__device__ float sum_over_warp(float value) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    return value;
}

template <int NUM_THREADS>
__device__ void add_by_tree(float* sums) {
    __syncthreads();
    for (int s = 1; s < NUM_THREADS; s *= 2) {
        if ((threadIdx.x & (2 * s - 1)) == 0) sums[threadIdx.x] += sums[threadIdx.x + s];
        __syncthreads();
    }
}

// rung tree_min: the article's kernel for a minimum a row. It divides the minimum by the scale, adds that to every
//   code, and multiplies the sum by the scale. 256 threads take four rows, one after the other. (Without its bias.)
// launch: tree_min<256, 4><<<(num_rows + 3) / 4, 256>>>
template <int NUM_THREADS, int NUM_PARTS>
__global__ void tree_min(const unsigned char* codes, const float* scales, const float* mins, const float* x, float* out,
                         int num_rows, int num_columns) {
    __shared__ float sums[NUM_THREADS];
    const int begin = blockIdx.x * NUM_PARTS, end = min(begin + NUM_PARTS, num_rows);
    for (int row = begin; row < end; ++row) {
        const unsigned char* row_codes = codes + size_t(row) * (num_columns / 2);
        const float minimum = mins[row] / scales[row];
        sums[threadIdx.x] = 0.0f;
        for (int i = threadIdx.x; i < num_columns / 2; i += NUM_THREADS) {
            const unsigned char now = row_codes[i];
            sums[threadIdx.x] += x[2 * i] * (minimum + (now >> 4)) + x[2 * i + 1] * (minimum + (now & 15));
        }
        add_by_tree<NUM_THREADS>(sums);
        if (threadIdx.x == 0) out[row] = sums[0] * scales[row];
        __syncthreads();
    }
}

// rung tree_zero: the article's kernel for a zero point a row. The difference is one of whole numbers.
// launch: tree_zero<256, 4><<<(num_rows + 3) / 4, 256>>>
template <int NUM_THREADS, int NUM_PARTS>
__global__ void tree_zero(const unsigned char* codes, const float* scales, const unsigned char* zeros, const float* x,
                          float* out, int num_rows, int num_columns) {
    __shared__ float sums[NUM_THREADS];
    const int begin = blockIdx.x * NUM_PARTS, end = min(begin + NUM_PARTS, num_rows);
    for (int row = begin; row < end; ++row) {
        const unsigned char* row_codes = codes + size_t(row) * (num_columns / 2);
        const unsigned char zero = zeros[row];
        sums[threadIdx.x] = 0.0f;
        for (int i = threadIdx.x; i < num_columns / 2; i += NUM_THREADS) {
            const unsigned char now = row_codes[i];
            sums[threadIdx.x] += x[2 * i] * ((now >> 4) - zero) + x[2 * i + 1] * ((now & 15) - zero);
        }
        add_by_tree<NUM_THREADS>(sums);
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
    const unsigned char* row_codes = codes + size_t(row) * (num_columns / 2);
    const unsigned char zero = zeros[row];
    float sum = 0.0f;
    for (int i = lane; i < num_columns / 2; i += WARP) {
        const unsigned char now = row_codes[i];
        sum += x[2 * i] * ((now >> 4) - zero) + x[2 * i + 1] * ((now & 15) - zero);
    }
    sum = sum_over_warp(sum);
    if (lane == 0) out[row] = sum * scales[row];
}

// The content of one load: eight codes a word.
template <int NUM_WORDS>
struct Words {
    alignas(4 * NUM_WORDS) unsigned words[NUM_WORDS];
};

// The place of code j of a word, in bits.
__device__ constexpr int place_of(int j) { return 8 * (j / 2) + (j % 2 == 0 ? 4 : 0); }

// Adds a row's eight codes times eight numbers of x; `finish` gives the sum.
template <bool IS_IN_PLACE>
struct RowSum {
    float sum = 0.0f, zero;
    __device__ void begin(int zero_point) { zero = static_cast<float>(zero_point); }
    __device__ void add(unsigned word, const float (&x)[8]) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += (static_cast<float>(word >> place_of(j) & 15) - zero) * x[j];
    }
    __device__ float finish() const { return sum; }
};

// Codes stay at their places. With the upper byte 0x4b a float counts in ones, so a code at place p of its last 16 bits
// is code * 2^p above 2^23. A zero point of 2^23 + zero * 2^p takes that away without rounding. Each place has its sum.
template <>
struct RowSum<true> {
    float sums[4] = {}, zeros[4];
    __device__ void begin(int zero_point) {
#pragma unroll
        for (int p = 0; p < 4; ++p) zeros[p] = 8388608.0f + static_cast<float>(zero_point << (4 * p));
    }
    __device__ void add(unsigned word, const float (&x)[8]) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int place = place_of(j % 4);
            const unsigned bits = ((j < 4 ? word : word >> 16) & (15u << place)) | 0x4b000000u;
            sums[place / 4] += (__uint_as_float(bits) - zeros[place / 4]) * x[j];
        }
    }
    __device__ float finish() const { return sums[0] + sums[1] / 16 + sums[2] / 256 + sums[3] / 4096; }
};

// NUM_ROWS rows a warp; a load of a lane is NUM_WORDS words.
template <int NUM_ROWS, int NUM_WORDS, bool IS_IN_PLACE>
__global__ void by_words(const unsigned char* codes, const float* scales, const unsigned char* zeros, const float* x,
                         float* out, int num_rows, int num_columns) {
    using Load = Words<NUM_WORDS>;
    const int lane = threadIdx.x % WARP, warp = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    const int row = warp * NUM_ROWS, row_bytes = num_columns / 2;
    if (row >= num_rows) return;
    // Rows begin at whole loads, or else every byte is read alone.
    const int num_loads = row_bytes % sizeof(Load) == 0 ? row_bytes / sizeof(Load) : 0;
    const float4* inputs = reinterpret_cast<const float4*>(x);
    const unsigned char* rows[NUM_ROWS];
    RowSum<IS_IN_PLACE> sums[NUM_ROWS];
#pragma unroll
    for (int r = 0; r < NUM_ROWS; ++r) {
        const int own = min(row + r, num_rows - 1);  // beyond the last row the last one is read again, and not written
        rows[r] = codes + size_t(own) * row_bytes;
        sums[r].begin(zeros[own]);
    }
    for (int i = lane; i < num_loads; i += WARP) {
        Load loads[NUM_ROWS];
#pragma unroll
        for (int r = 0; r < NUM_ROWS; ++r) loads[r] = reinterpret_cast<const Load*>(rows[r])[i];
#pragma unroll
        for (int w = 0; w < NUM_WORDS; ++w) {
            const int first = 2 * (i * NUM_WORDS + w);
            const float4 low = inputs[first], high = inputs[first + 1];
            const float eight[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int r = 0; r < NUM_ROWS; ++r) sums[r].add(loads[r].words[w], eight);
        }
    }
#pragma unroll
    for (int r = 0; r < NUM_ROWS; ++r) {
        for (int i = num_loads * sizeof(Load) + lane; i < row_bytes; i += WARP) {
            const float two[8] = {x[2 * i], x[2 * i + 1]};  // the rest of the word counts nothing
            sums[r].add(rows[r][i], two);
        }
        const float sum = sum_over_warp(sums[r].finish());
        if (lane == 0 && row + r < num_rows) out[row + r] = sum * scales[row + r];
    }
}

// rung words: eight codes in one load, their numbers of x in two.
// launch: by_words<1, 1, false><<<(num_rows + 7) / 8, 256>>>

// rung packed: 32 codes in one load.
// launch: by_words<1, 4, false><<<(num_rows + 7) / 8, 256>>>

// rung two_rows: a warp takes two rows side by side. What it reads of x serves both.
// launch: by_words<2, 4, false><<<(num_rows + 7) / 8, 128>>>

// rung in_place: each code becomes a float where it stands: one operation on bits, and a zero point that knows the
//   place.
// launch: by_words<2, 4, true><<<(num_rows + 7) / 8, 128>>>

// rung four_rows: four rows side by side, and fewer warps.
// launch: by_words<4, 4, true><<<(num_rows + 15) / 16, 128>>>

// rung llmcli: the engine's kernel over its tiles. Inputs become integers of two digits, so that tensor cores multiply
//   codes by bytes; copies fill a ring in shared memory while the kernel in front ends.
// launch: llmcli
