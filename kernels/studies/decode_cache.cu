// decode_cache: attention of one new token over the KV cache, rotary and append included  Source: HF LlamaAttention;
//          online softmax, arXiv 1805.02867; flash-decoding, arXiv 2307.08691
// Shapes:  qkv [(num_attention_heads + 2 * num_key_value_heads) * 128] f32: queries, keys and values of the token;
//          cos_sin [position + 1, 64] pairs of f32; keys, values [num_pages, num_key_value_heads, 16, 128] f16, in
//          place; page_table [pages] i32; mixed [num_attention_heads * 128] f32 = softmax(q K^T / sqrt(128)) V. Groups
//          of query heads that share a key-value head are multiples of 4
// Problem: decode_cache
// Sizes:   num_attention_heads 32; num_key_value_heads 8; position 500, 4000, 16000
// Check:   num_attention_heads 4; num_key_value_heads 1; position 0, 5, 130
// Check:   num_attention_heads 24; num_key_value_heads 3; position 1, 127, 128, 700
// Claim:   online < passes: keys are read side by side, 16 bytes a load, values in all warps, and no score is written
// Claim:   split < online: a block a head does not fill the card, and a block for a part of its tokens does
// Claim:   grouped < split at position 16000: four query heads share a key-value head, whose tokens are read once
// Claim:   joined < grouped at position 500: one launch instead of three
// Claim:   llmcli < joined: tensor cores multiply, and first tokens are asked for before anything else
// Note:    The heads of Llama-3-8B. Every token makes the cache longer, and each step reads all of it. The study
//          decode_attention has the projections around it.
#include <cuda_fp16.h>

#include "common/arrival.cuh"
#include "common/pages.cuh"

constexpr int THREADS = 256, HEAD_DIM = 128, HALF = HEAD_DIM / 2;
constexpr int SPLIT_TOKENS = 128;              // of a block, if the tokens are split
constexpr int PART = HEAD_DIM + 4;             // of a split: weighted values, largest score, sum of weights, 2 unused
constexpr float SCALE = 0.12751743074602467f;  // log2(e) / sqrt(HEAD_DIM): weights are powers of two
constexpr float NOTHING = -1e30f;              // the score of no token

// Where a head's part of a token lies in the cache.
__device__ size_t place_of(const int* page_table, int num_key_value_heads, int kv_head, int token) {
    return token_place(page_table[token / PAGE_TOKENS], num_key_value_heads, kv_head, token) * HEAD_DIM;
}

// The dimensions i and i + 64 of a head, rotated by their angle at a position.
__device__ float2 turned_pair(const float* head, const float2* cos_sin, int position, int i) {
    const float2 angle = cos_sin[size_t(position) * HALF + i];
    const float first = head[i], second = head[i + HALF];
    return make_float2(first * angle.x - second * angle.y, second * angle.x + first * angle.y);
}

__device__ void turn(const float* head, const float2* cos_sin, float* turned, int position, int i) {
    const float2 pair = turned_pair(head, cos_sin, position, i);
    turned[i] = pair.x, turned[i + HALF] = pair.y;
}

// The largest, or the sum, of a block's values, for all threads, by a tree in shared memory. Call each once.
template <bool IS_MAXIMUM>
__device__ float tree(float value) {
    __shared__ float parts[THREADS];
    float& own = parts[threadIdx.x];
    own = value;
    __syncthreads();
    for (int s = THREADS / 2; s > 0; s /= 2) {
        if (threadIdx.x < s) own = IS_MAXIMUM ? fmaxf(own, (&own)[s]) : own + (&own)[s];
        __syncthreads();
    }
    return parts[0];
}

__device__ void append_pair(const float* qkv, const float2* cos_sin, half* keys, half* values, const int* page_table,
                            int num_attention_heads, int num_key_value_heads, int kv_head, int position, int i) {
    const float* new_key = qkv + (num_attention_heads + kv_head) * HEAD_DIM;
    const float* new_value = new_key + num_key_value_heads * HEAD_DIM;
    const size_t place = place_of(page_table, num_key_value_heads, kv_head, position) + i;
    const float2 pair = turned_pair(new_key, cos_sin, position, i);
    keys[place] = __float2half(pair.x), keys[place + HALF] = __float2half(pair.y);
    values[place] = __float2half(new_value[i]), values[place + HALF] = __float2half(new_value[i + HALF]);
}

__global__ void rotate_and_append(const float* qkv, const float2* cos_sin, float* queries, half* keys, half* values,
                                  const int* page_table, int num_attention_heads, int num_key_value_heads,
                                  int position) {
    const int head = blockIdx.x, kv_head = head - num_attention_heads;
    if (kv_head < 0) return turn(qkv + head * HEAD_DIM, cos_sin, queries + head * HEAD_DIM, position, threadIdx.x);
    append_pair(qkv, cos_sin, keys, values, page_table, num_attention_heads, num_key_value_heads, kv_head, position,
                threadIdx.x);
}

// rung passes: a kernel for rotary and append, one for attention. A block has a query head and goes over the tokens
//   three times: scores, a token a thread; their exponentials and the sum of these; values, a dimension a thread.
// launch: rotate_and_append<<<num_attention_heads + num_key_value_heads, 64>>>
// launch: attend_in_passes<<<num_attention_heads, 256>>>
__global__ void attend_in_passes(const float* queries, const half* keys, const half* values, const int* page_table,
                                 float* scores, float* mixed, int num_attention_heads, int num_key_value_heads,
                                 int position) {
    const int head = blockIdx.x, kv_head = head / (num_attention_heads / num_key_value_heads), thread = threadIdx.x;
    const float* query = queries + head * HEAD_DIM;
    scores += size_t(head) * (position + 1);
    float maximum = NOTHING;
    for (int token = thread; token <= position; token += THREADS) {
        const half* key = keys + place_of(page_table, num_key_value_heads, kv_head, token);
        float score = 0.0f;
        for (int i = 0; i < HEAD_DIM; ++i) score += query[i] * __half2float(key[i]);
        scores[token] = score * SCALE;
        maximum = fmaxf(maximum, score * SCALE);
    }
    maximum = tree<true>(maximum);
    float sum = 0.0f;
    for (int token = thread; token <= position; token += THREADS) {
        scores[token] = exp2f(scores[token] - maximum);
        sum += scores[token];
    }
    sum = tree<false>(sum);  // and every thread's scores are written
    if (thread >= HEAD_DIM) return;
    float value = 0.0f;
    for (int token = 0; token <= position; ++token) {
        const size_t place = place_of(page_table, num_key_value_heads, kv_head, token);
        value += scores[token] * __half2float(values[place + thread]);
    }
    mixed[head * HEAD_DIM + thread] = value / sum;
}

// A team of 16 lanes takes a token, 8 dimensions a lane, and loads four tokens at once.
constexpr int LANES = 16, TEAMS = THREADS / LANES, DIMS = HEAD_DIM / LANES, STEP = 4;

__device__ void widen(const uint4& pack, float (&values)[DIMS]) {
    const half2* pairs = reinterpret_cast<const half2*>(&pack);
    for (int i = 0; i < DIMS / 2; ++i) {
        const float2 pair = __half22float2(pairs[i]);
        values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
    }
}

// A team's state for some queries: the largest score, the sum of weights, the weighted sum of values.
template <int NUM_HEADS>
struct Seen {
    float queries[NUM_HEADS][DIMS], values[NUM_HEADS][DIMS], maximum[NUM_HEADS], sum[NUM_HEADS];

    // Four tokens, the last ones without weight if fewer are `real`. If a score is the largest so far, the sums before
    // it are scaled down.
    __device__ void see(const uint4 (&key)[STEP], const uint4 (&value)[STEP], int real) {
        float scores[NUM_HEADS][STEP], own[DIMS];
#pragma unroll
        for (int j = 0; j < STEP; ++j) {
            widen(key[j], own);
#pragma unroll
            for (int head = 0; head < NUM_HEADS; ++head) {
                float score = 0.0f;
                for (int i = 0; i < DIMS; ++i) score += queries[head][i] * own[i];
#pragma unroll
                for (int distance = LANES / 2; distance > 0; distance /= 2) {
                    score += __shfl_xor_sync(0xffffffffu, score, distance);
                }
                scores[head][j] = j < real ? score : NOTHING;
            }
        }
#pragma unroll
        for (int head = 0; head < NUM_HEADS; ++head) {
            float largest = maximum[head];
#pragma unroll
            for (int j = 0; j < STEP; ++j) largest = fmaxf(largest, scores[head][j]);
            const float factor = exp2f(maximum[head] - largest);
            maximum[head] = largest, sum[head] *= factor;
            for (int i = 0; i < DIMS; ++i) values[head][i] *= factor;
        }
#pragma unroll
        for (int j = 0; j < STEP; ++j) {
            widen(value[j], own);
#pragma unroll
            for (int head = 0; head < NUM_HEADS; ++head) {
                const float weight = exp2f(scores[head][j] - maximum[head]);
                sum[head] += weight;
                for (int i = 0; i < DIMS; ++i) values[head][i] += weight * own[i];
            }
        }
    }
};

// Merges the results of a block's teams for its split: its part, or the result if one split has all tokens. The queries
// are those of its heads, from blockIdx.y * NUM_HEADS on, which share a key-value head.
template <int NUM_HEADS>
__device__ void see_split(const float* queries, const half* keys, const half* values, const int* page_table,
                          float* partials, float* mixed, int num_attention_heads, int num_key_value_heads,
                          int position) {
    __shared__ float maxima[NUM_HEADS][TEAMS], sums[NUM_HEADS][TEAMS], weighted[NUM_HEADS][TEAMS][HEAD_DIM];
    const int team = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const int first_head = blockIdx.y * NUM_HEADS;
    const int kv_head = first_head / (num_attention_heads / num_key_value_heads);
    Seen<NUM_HEADS> seen;
#pragma unroll
    for (int i = 0; i < NUM_HEADS * DIMS; ++i) {
        const int head = i / DIMS;
        seen.queries[head][i % DIMS] = queries[head * HEAD_DIM + lane * DIMS + i % DIMS] * SCALE;
        seen.maximum[head] = NOTHING, seen.sum[head] = 0.0f, seen.values[head][i % DIMS] = 0.0f;
    }
    const int begin = blockIdx.x * SPLIT_TOKENS;
    const int end = gridDim.x == 1 ? position + 1 : min(begin + SPLIT_TOKENS, position + 1);
    // Both teams of a warp stay together, as they shuffle. One past the end takes earlier tokens, without weight.
    for (int warp_first = begin + team / 2 * 2 * STEP; warp_first < end; warp_first += TEAMS * STEP) {
        const int wanted = warp_first + team % 2 * STEP, first = min(wanted, end - 1) / STEP * STEP;
        const size_t place = place_of(page_table, num_key_value_heads, kv_head, first) + lane * DIMS;
        uint4 key[STEP], value[STEP];
#pragma unroll
        for (int j = 0; j < STEP; ++j) {
            const int token = min(j, end - 1 - first);
            key[j] = *reinterpret_cast<const uint4*>(keys + place + token * HEAD_DIM);
            value[j] = *reinterpret_cast<const uint4*>(values + place + token * HEAD_DIM);
        }
        seen.see(key, value, end - wanted);
    }
#pragma unroll
    for (int i = 0; i < NUM_HEADS * DIMS; ++i) {
        weighted[i / DIMS][team][lane * DIMS + i % DIMS] = seen.values[i / DIMS][i % DIMS];
        maxima[i / DIMS][team] = seen.maximum[i / DIMS], sums[i / DIMS][team] = seen.sum[i / DIMS];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < NUM_HEADS * HEAD_DIM; i += THREADS) {
        const int head = i / HEAD_DIM, dimension = i % HEAD_DIM;
        float maximum = NOTHING, sum = 0.0f, value = 0.0f;
        for (int other = 0; other < TEAMS; ++other) maximum = fmaxf(maximum, maxima[head][other]);
        for (int other = 0; other < TEAMS; ++other) {
            const float weight = exp2f(maxima[head][other] - maximum);  // 0 for a team without tokens
            sum += weight * sums[head][other], value += weight * weighted[head][other][dimension];
        }
        float* part = partials + (size_t(first_head + head) * gridDim.x + blockIdx.x) * PART;
        if (gridDim.x == 1) {
            mixed[first_head * HEAD_DIM + i] = value / sum;
        } else {
            part[dimension] = value, part[HEAD_DIM] = maximum, part[HEAD_DIM + 1] = sum;
        }
    }
}

// One dimension of a head from the parts of its splits. They come from L2: other multiprocessors wrote them.
__device__ float combined(const float* partials, int head, int num_splits, int dimension) {
    float maximum = NOTHING, sum = 0.0f, value = 0.0f;
#pragma unroll 8
    for (int split = 0; split < num_splits; ++split) {
        const float* part = partials + (size_t(head) * num_splits + split) * PART;
        const float found = __ldcg(part + HEAD_DIM), larger = fmaxf(maximum, found);
        const float factor = exp2f(maximum - larger), weight = exp2f(found - larger);
        sum = sum * factor + weight * __ldcg(part + HEAD_DIM + 1);
        value = value * factor + weight * __ldcg(part + dimension);
        maximum = larger;
    }
    return value / sum;
}

// rung online: one pass. A block has a query head, half a warp a token, and keeps the largest score, the sum and the
//   weighted values in registers.
// launch: rotate_and_append<<<num_attention_heads + num_key_value_heads, 64>>>
// launch: attend<1><<<dim3(1, num_attention_heads), 256>>>

// rung split: the same kernel, with a block for every 128 tokens of a head. Another kernel combines their parts.
// launch: rotate_and_append<<<num_attention_heads + num_key_value_heads, 64>>>
// launch: attend<1><<<dim3(position / 128 + 1, num_attention_heads), 256>>>
// launch: combine_splits<<<num_attention_heads, 128>>>
template <int NUM_HEADS>
__global__ void attend(const float* queries, const half* keys, const half* values, const int* page_table,
                       float* partials, float* mixed, int num_attention_heads, int num_key_value_heads, int position) {
    see_split<NUM_HEADS>(queries + blockIdx.y * NUM_HEADS * HEAD_DIM, keys, values, page_table, partials, mixed,
                         num_attention_heads, num_key_value_heads, position);
}

__global__ void combine_splits(const float* partials, float* mixed, int position) {
    const int num_splits = position / SPLIT_TOKENS + 1;
    if (num_splits == 1) return;
    mixed[blockIdx.x * HEAD_DIM + threadIdx.x] = combined(partials, blockIdx.x, num_splits, threadIdx.x);
}

// rung grouped: a block has four query heads that share a key-value head.
// launch: rotate_and_append<<<num_attention_heads + num_key_value_heads, 64>>>
// launch: attend<4><<<dim3(position / 128 + 1, num_attention_heads / 4), 256>>>
// launch: combine_splits<<<num_attention_heads, 128>>>

// rung joined: one kernel. A block turns its own queries, that of the last split appends the token, and the last one to
//   end combines the parts.
// launch: attend_joined<<<dim3(position / 128 + 1, num_attention_heads / 4), 256>>>
__global__ void attend_joined(const float* qkv, const float2* cos_sin, half* keys, half* values,
                              const int* page_table, float* partials, unsigned* counters, float* mixed,
                              int num_attention_heads, int num_key_value_heads, int position) {
    constexpr int NUM_HEADS = 4;
    __shared__ float queries[NUM_HEADS * HEAD_DIM];
    __shared__ bool is_last;
    // 256 threads, each with a pair of one of four heads.
    const int head = threadIdx.x / HALF, pair = threadIdx.x % HALF, first_head = blockIdx.y * NUM_HEADS;
    turn(qkv + (first_head + head) * HEAD_DIM, cos_sin, queries + head * HEAD_DIM, position, pair);
    if (blockIdx.x == gridDim.x - 1 && head == 0) {  // blocks with the same key-value head write the same
        append_pair(qkv, cos_sin, keys, values, page_table, num_attention_heads, num_key_value_heads,
                    first_head / (num_attention_heads / num_key_value_heads), position, pair);
    }
    __syncthreads();
    see_split<NUM_HEADS>(queries, keys, values, page_table, partials, mixed, num_attention_heads, num_key_value_heads,
                         position);
    if (gridDim.x == 1) return;
    __syncthreads();
    if (threadIdx.x == 0) is_last = arrive(counters + blockIdx.y, gridDim.x - 1) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    for (int i = threadIdx.x; i < NUM_HEADS * HEAD_DIM; i += THREADS) {
        mixed[first_head * HEAD_DIM + i] = combined(partials, first_head + i / HEAD_DIM, gridDim.x, i % HEAD_DIM);
    }
}

// rung llmcli: the engine's kernel, in the same form. A block takes eight query heads, whose products are those of
//   tensor cores, and asks for its first tokens before the kernel in front of it has ended.
// launch: llmcli
