// attention_mask: softmax of scores + slope * key over the keys up to the query  Source: fastllm, attention masks
// Shapes:  scores, out, biased [num_heads, num_queries, num_keys] f32; mask [num_queries, num_keys] f32, 1 where a key
//          is hidden; slopes [num_heads] f32. Query q sees the keys up to num_keys - num_queries + q
// Problem: masked_softmax
// Sizes:   num_heads 32; num_queries 1, 512; num_keys 512, 2048
// Check:   num_heads 3; num_queries 1, 5; num_keys 7, 300, 1030
// Claim:   fastllm < mask_in_memory at num_queries 512: where a key is hidden follows from its number, unread
// Claim:   rows < fastllm at num_queries 512: a block a head leaves most of a card idle; and nothing is divided
// Claim:   fused < rows at num_queries 512: biased scores are neither written nor read
// Claim:   seen < fused at num_queries 512; num_keys 512: of a square half is hidden, and nobody reads it
// Claim:   fused < rows at num_queries 1: there is one launch less
// Note:    A mask as an array is the most general, and costs the most. Attention in one kernel takes the next step: it
//          does not write the weights either.

constexpr int WARP = 32;
constexpr float LOWEST = -3.402823466e38f;

__device__ __forceinline__ float larger(float a, float b) { return a > b ? a : b; }

template <bool IS_SUM>
__device__ __forceinline__ float over_warp(float value) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, value, distance);
        value = IS_SUM ? value + other : larger(value, other);
    }
    return value;
}

// The sum or the largest over a block's threads, for all of them.
template <bool IS_SUM>
__device__ __forceinline__ float over_block(float value) {
    __shared__ float parts[WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    value = over_warp<IS_SUM>(value);
    if (lane == 0) parts[warp] = value;
    __syncthreads();
    return over_warp<IS_SUM>(lane < blockDim.x / WARP ? parts[lane] : IS_SUM ? 0.0f : LOWEST);
}

// Writes the softmax of `score(key)` over the keys below num_seen, and zeros after them.
template <typename Score>
__device__ __forceinline__ void write_softmax(Score score, float* out, int num_seen, int num_keys) {
    float largest = LOWEST;
    for (int key = threadIdx.x; key < num_seen; key += blockDim.x) largest = larger(largest, score(key));
    largest = over_block<false>(largest);
    float sum = 0.0f;
    for (int key = threadIdx.x; key < num_seen; key += blockDim.x) sum += expf(score(key) - largest);
    sum = over_block<true>(sum);
    for (int key = threadIdx.x; key < num_seen; key += blockDim.x) out[key] = expf(score(key) - largest) / sum;
    for (int key = num_seen + threadIdx.x; key < num_keys; key += blockDim.x) out[key] = 0.0f;
}

// The head and the query of a block.
__device__ __forceinline__ size_t first_of_row(int num_keys) { return static_cast<size_t>(blockIdx.x) * num_keys; }

// rung mask_in_memory: a kernel adds the bias, another reads the mask and overwrites what it hides, a third makes the
//   softmax. In the first two a head is one block, as in fastllm.
// launch: add_bias<<<num_heads, 256>>>
// launch: apply_mask<<<num_heads, 256>>>
// launch: softmax_of_biased<<<num_heads * num_queries, 256>>>
__global__ void add_bias(const float* scores, const float* slopes, float* biased, int num_queries, int num_keys) {
    const size_t num_scores = static_cast<size_t>(num_queries) * num_keys;
    const float slope = slopes[blockIdx.x];
    for (int i = threadIdx.x; i < num_scores; i += blockDim.x) {
        biased[blockIdx.x * num_scores + i] = scores[blockIdx.x * num_scores + i] + slope * (i % num_keys);
    }
}

__global__ void apply_mask(const float* mask, float* biased, float mask_value, int num_queries, int num_keys) {
    const size_t num_scores = static_cast<size_t>(num_queries) * num_keys;
    for (int i = threadIdx.x; i < num_scores; i += blockDim.x) {
        if (mask[i] > 0.99f) biased[blockIdx.x * num_scores + i] = mask_value;
    }
}

__global__ void softmax_of_biased(const float* biased, float* out, int num_keys) {
    const float* row = biased + first_of_row(num_keys);
    write_softmax([row](int key) { return row[key]; }, out + first_of_row(num_keys), num_keys, num_keys);
}

// rung fastllm: bias and mask in one kernel, which works out whether a key is hidden. A head is one block, and every
//   thread divides to find its query.
// launch: alibi_mask<<<num_heads, 256>>>
// launch: softmax_of_biased<<<num_heads * num_queries, 256>>>
__global__ void alibi_mask(const float* scores, const float* slopes, float* biased, float mask_value, int num_queries,
                           int num_keys) {
    const size_t num_scores = static_cast<size_t>(num_queries) * num_keys;
    const float slope = slopes[blockIdx.x];
    for (int i = threadIdx.x; i < num_scores; i += blockDim.x) {
        const int query = i / num_keys, key = i % num_keys;
        const size_t place = blockIdx.x * num_scores + i;
        biased[place] = key <= num_keys - num_queries + query ? scores[place] + slope * key : mask_value;
    }
}

// rung rows: the same with a block for each query of each head.
// launch: alibi_mask_of_rows<<<num_heads * num_queries, 256>>>
// launch: softmax_of_biased<<<num_heads * num_queries, 256>>>
__global__ void alibi_mask_of_rows(const float* scores, const float* slopes, float* biased, float mask_value,
                                   int num_queries, int num_keys) {
    const float* row = scores + first_of_row(num_keys);
    const float slope = slopes[blockIdx.x / num_queries];
    const int last_seen = num_keys - num_queries + blockIdx.x % num_queries;
    for (int key = threadIdx.x; key < num_keys; key += blockDim.x) {
        biased[first_of_row(num_keys) + key] = key <= last_seen ? row[key] + slope * key : mask_value;
    }
}

// rung fused: one kernel. The softmax adds the bias and hides keys when it reads scores: three times, of which caches
//   serve two.
// launch: fused_softmax<<<num_heads * num_queries, 256>>>
__global__ void fused_softmax(const float* scores, const float* slopes, float* out, float mask_value, int num_queries,
                              int num_keys) {
    const float* row = scores + first_of_row(num_keys);
    const float slope = slopes[blockIdx.x / num_queries];
    const int last_seen = num_keys - num_queries + blockIdx.x % num_queries;
    write_softmax([=](int key) { return key <= last_seen ? row[key] + slope * key : mask_value; },
                  out + first_of_row(num_keys), num_keys, num_keys);
}

// rung seen: hidden keys are neither read nor summed up; only their zeros are written. No value stands for "hidden".
// launch: softmax_of_seen<<<num_heads * num_queries, 256>>>
__global__ void softmax_of_seen(const float* scores, const float* slopes, float* out, int num_queries, int num_keys) {
    const float* row = scores + first_of_row(num_keys);
    const float slope = slopes[blockIdx.x / num_queries];
    const int num_seen = num_keys - num_queries + blockIdx.x % num_queries + 1;
    write_softmax([=](int key) { return row[key] + slope * key; }, out + first_of_row(num_keys), num_seen, num_keys);
}
