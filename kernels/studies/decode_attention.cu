// decode_attention: hidden += o @ attention(qkv @ n), n = RMSNorm of hidden, for one token  Source: HF LlamaAttention
// Shapes:  hidden, norm_weight [hidden_size] f32, hidden in place; q, k, v [heads * 128, hidden_size], qkv with all of
//          their rows, and o [hidden_size, num_attention_heads * 128], as codes u8, (code - 128) * scale, scales f32,
//          one a row; the cache and cos_sin as in decode_cache. hidden_size is a multiple of 16
// Problem: decode_attention
// Sizes:   hidden_size 3072; num_attention_heads 24; num_key_value_heads 8; position 4000
// Sizes:   hidden_size 4096; num_attention_heads 32; num_key_value_heads 8; position 500, 4000
// Check:   hidden_size 48, 208; num_attention_heads 5; num_key_value_heads 1; position 0, 130
// Check:   hidden_size 2064; num_attention_heads 6; num_key_value_heads 2; position 5, 700
// Claim:   prepared < plain: one launch less
// Claim:   flash < prepared: the cache is read once, by as many blocks as the card runs, and three launches are gone
// Claim:   packed < flash: lanes read codes that lie side by side, 16 a load, and a row has a warp instead of a thread
// Claim:   fused < packed: three launches instead of seven, and k and v do not run alone with few rows
// Claim:   overlapping < fused: codes of the next product are under way while the last blocks in front of it end
// Claim:   llmcli < overlapping: rings of copies keep memory busy, and tensor cores multiply the codes
// Note:    The first half of a layer of Llama-3.2-3B and of Llama-3-8B; decode_mlp is the other half. The rungs from
//          flash on use the engine's attention: decode_cache is the ladder up to it, gemv_int8 that of the products.
#include <cuda_fp16.h>

#include "common/launch.cuh"
#include "common/pages.cuh"

constexpr int WARP = 32, THREADS = 256, HEAD_DIM = 128, HALF = HEAD_DIM / 2;

__device__ float sum_over_warp(float value) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    return value;
}

// The sum of a block's values, for all threads. Call it once.
__device__ float sum_over_block(float value) {
    __shared__ float sums[THREADS / WARP];
    value = sum_over_warp(value);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = value;
    __syncthreads();
    float sum = 0.0f;
    for (int warp = 0; warp < THREADS / WARP; ++warp) sum += sums[warp];
    return sum;
}

// Four codes less 128 times four numbers: a byte below 0x4b0000 is a float of 2^23 + code.
__device__ float dot_word(unsigned word, const float4& x) {
    constexpr float ZERO = 8388608.0f + 128.0f;
    return (__uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440)) - ZERO) * x.x +
           (__uint_as_float(__byte_perm(word, 0x4b000000u, 0x7441)) - ZERO) * x.y +
           (__uint_as_float(__byte_perm(word, 0x4b000000u, 0x7442)) - ZERO) * x.z +
           (__uint_as_float(__byte_perm(word, 0x4b000000u, 0x7443)) - ZERO) * x.w;
}

// A lane's part of a row times x, 16 codes a load; or times x * norm_weight, and then also of the squares of x. The
// first loads run while it waits for the previous kernel, which writes x and no codes.
__device__ float dot_packed(const unsigned char* codes, const float* x, const float* norm_weight, int num_columns,
                            float& squares) {
    constexpr int AHEAD = 8;
    const int lane = threadIdx.x % WARP, num_packs = num_columns / 16;
    const uint4* packs = reinterpret_cast<const uint4*>(codes);
    float sum = 0.0f;
    const auto add_pack = [&](const uint4& own, int pack) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            float4 values = reinterpret_cast<const float4*>(x)[4 * pack + w];
            if (norm_weight != nullptr) {
                const float4 factors = reinterpret_cast<const float4*>(norm_weight)[4 * pack + w];
                squares += values.x * values.x + values.y * values.y + values.z * values.z + values.w * values.w;
                values.x *= factors.x, values.y *= factors.y, values.z *= factors.z, values.w *= factors.w;
            }
            sum += dot_word(w == 0 ? own.x : w == 1 ? own.y : w == 2 ? own.z : own.w, values);
        }
    };
    uint4 ahead[AHEAD];
#pragma unroll
    for (int step = 0; step < AHEAD; ++step) ahead[step] = packs[min(lane + step * WARP, num_packs - 1)];
    grid_dependency_wait();
#pragma unroll
    for (int step = 0; step < AHEAD; ++step) {
        if (lane + step * WARP < num_packs) add_pack(ahead[step], lane + step * WARP);
    }
    for (int pack = lane + AHEAD * WARP; pack < num_packs; pack += WARP) add_pack(packs[pack], pack);
    return sum;
}

// A matrix times x: a thread a row, or a warp a row.
template <bool IS_PACKED>
__device__ void multiply(const unsigned char* codes, const float* scales, const float* x, float* out, int num_rows,
                         int num_columns) {
    const int thread = blockIdx.x * THREADS + threadIdx.x, row = IS_PACKED ? thread / WARP : thread;
    if (row >= num_rows) return;
    codes += size_t(row) * num_columns;
    float sum = 0.0f, no_squares = 0.0f;
    if (IS_PACKED) {
        sum = sum_over_warp(dot_packed(codes, x, nullptr, num_columns, no_squares));
    } else {
        for (int i = 0; i < num_columns; ++i) sum += (int(codes[i]) - 128) * x[i];
    }
    if (!IS_PACKED || threadIdx.x % WARP == 0) out[row] = sum * scales[row];
}

// The steps one by one.
__global__ void norm_of_hidden(const float* hidden, const float* norm_weight, float* normed, int hidden_size,
                               float eps) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < hidden_size; i += THREADS) sum += hidden[i] * hidden[i];
    const float inverse = rsqrtf(sum_over_block(sum) / hidden_size + eps);
    for (int i = threadIdx.x; i < hidden_size; i += THREADS) normed[i] = norm_weight[i] * hidden[i] * inverse;
}

template <bool IS_PACKED>
__global__ void q_of(const unsigned char* q_codes, const float* q_scales, const float* normed, float* qkv,
                     int num_attention_heads, int hidden_size) {
    multiply<IS_PACKED>(q_codes, q_scales, normed, qkv, num_attention_heads * HEAD_DIM, hidden_size);
}

template <bool IS_PACKED>
__global__ void k_of(const unsigned char* k_codes, const float* k_scales, const float* normed, float* qkv,
                     int num_attention_heads, int num_key_value_heads, int hidden_size) {
    float* out = qkv + num_attention_heads * HEAD_DIM;
    multiply<IS_PACKED>(k_codes, k_scales, normed, out, num_key_value_heads * HEAD_DIM, hidden_size);
}

template <bool IS_PACKED>
__global__ void v_of(const unsigned char* v_codes, const float* v_scales, const float* normed, float* qkv,
                     int num_attention_heads, int num_key_value_heads, int hidden_size) {
    float* out = qkv + (num_attention_heads + num_key_value_heads) * HEAD_DIM;
    multiply<IS_PACKED>(v_codes, v_scales, normed, out, num_key_value_heads * HEAD_DIM, hidden_size);
}

// The dimensions i and i + 64 of a head, rotated by their angle at a position.
__device__ float2 turned_pair(const float* head, const float2* cos_sin, int position, int i) {
    const float2 angle = cos_sin[size_t(position) * HALF + i];
    const float first = head[i], second = head[i + HALF];
    return make_float2(first * angle.x - second * angle.y, second * angle.x + first * angle.y);
}

// Of queries, and of the keys that follow them.
__global__ void rotate(const float* qkv, const float2* cos_sin, float* turned, int position) {
    const int begin = blockIdx.x * HEAD_DIM, i = threadIdx.x;
    const float2 pair = turned_pair(qkv + begin, cos_sin, position, i);
    turned[begin + i] = pair.x, turned[begin + i + HALF] = pair.y;
}

// Where a head's part of a token lies in the cache.
__device__ size_t place_of(const int* page_table, int num_key_value_heads, int kv_head, int token) {
    return token_place(page_table[token / PAGE_TOKENS], num_key_value_heads, kv_head, token) * HEAD_DIM;
}

__global__ void append_token(const float* turned, const float* qkv, half* keys, half* values, const int* page_table,
                             int num_attention_heads, int num_key_value_heads, int position) {
    const int key = (num_attention_heads + blockIdx.x) * HEAD_DIM + threadIdx.x;
    const size_t place = place_of(page_table, num_key_value_heads, blockIdx.x, position) + threadIdx.x;
    keys[place] = __float2half(turned[key]);
    values[place] = __float2half(qkv[key + num_key_value_heads * HEAD_DIM]);
}

__global__ void scores_of(const float* turned, const half* keys, const int* page_table, float* scores,
                          int num_attention_heads, int num_key_value_heads, int position) {
    const int token = blockIdx.x * THREADS + threadIdx.x, head = blockIdx.y;
    if (token > position) return;
    const int kv_head = head / (num_attention_heads / num_key_value_heads);
    const half* key = keys + place_of(page_table, num_key_value_heads, kv_head, token);
    float score = 0.0f;
    for (int i = 0; i < HEAD_DIM; ++i) score += turned[head * HEAD_DIM + i] * __half2float(key[i]);
    scores[size_t(head) * (position + 1) + token] = score * rsqrtf(HEAD_DIM);
}

__global__ void softmax_of_scores(float* scores, int position) {
    __shared__ float maxima[THREADS];
    scores += size_t(blockIdx.x) * (position + 1);
    float maximum = scores[0], sum = 0.0f;
    for (int token = threadIdx.x; token <= position; token += THREADS) maximum = fmaxf(maximum, scores[token]);
    maxima[threadIdx.x] = maximum;
    __syncthreads();
    for (int other = 0; other < THREADS; ++other) maximum = fmaxf(maximum, maxima[other]);
    for (int token = threadIdx.x; token <= position; token += THREADS) sum += expf(scores[token] - maximum);
    sum = sum_over_block(sum);
    for (int token = threadIdx.x; token <= position; token += THREADS) {
        scores[token] = expf(scores[token] - maximum) / sum;
    }
}

__global__ void mix_values(const float* scores, const half* values, const int* page_table, float* mixed,
                           int num_attention_heads, int num_key_value_heads, int position) {
    const int head = blockIdx.x, kv_head = head / (num_attention_heads / num_key_value_heads);
    float sum = 0.0f;
    for (int token = 0; token <= position; ++token) {
        const half* value = values + place_of(page_table, num_key_value_heads, kv_head, token);
        sum += scores[size_t(head) * (position + 1) + token] * __half2float(value[threadIdx.x]);
    }
    mixed[head * HEAD_DIM + threadIdx.x] = sum;
}

template <bool IS_PACKED>
__global__ void o_of(const unsigned char* o_codes, const float* o_scales, const float* mixed, float* added,
                     int num_attention_heads, int hidden_size) {
    multiply<IS_PACKED>(o_codes, o_scales, mixed, added, hidden_size, num_attention_heads * HEAD_DIM);
}

__global__ void add_to_hidden(const float* added, float* hidden, int hidden_size) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < hidden_size) hidden[i] += added[i];
}

// rung plain: a kernel for every operation. The products have a thread a row, scores a token a thread, values a
//   dimension a thread.
// launch: norm_of_hidden<<<1, 256>>>
// launch: q_of<false><<<(num_attention_heads + 1) / 2, 256>>>
// launch: k_of<false><<<(num_key_value_heads + 1) / 2, 256>>>
// launch: v_of<false><<<(num_key_value_heads + 1) / 2, 256>>>
// launch: rotate<<<num_attention_heads + num_key_value_heads, 64>>>
// launch: append_token<<<num_key_value_heads, 128>>>
// launch: scores_of<<<dim3(position / 256 + 1, num_attention_heads), 256>>>
// launch: softmax_of_scores<<<num_attention_heads, 256>>>
// launch: mix_values<<<num_attention_heads, 128>>>
// launch: o_of<false><<<(hidden_size + 255) / 256, 256>>>
// launch: add_to_hidden<<<(hidden_size + 255) / 256, 256>>>

// rung prepared: rotary and append in one kernel, a pair a thread.
// launch: norm_of_hidden<<<1, 256>>>
// launch: q_of<false><<<(num_attention_heads + 1) / 2, 256>>>
// launch: k_of<false><<<(num_key_value_heads + 1) / 2, 256>>>
// launch: v_of<false><<<(num_key_value_heads + 1) / 2, 256>>>
// launch: rotate_and_append<<<num_attention_heads + num_key_value_heads, 64>>>
// launch: scores_of<<<dim3(position / 256 + 1, num_attention_heads), 256>>>
// launch: softmax_of_scores<<<num_attention_heads, 256>>>
// launch: mix_values<<<num_attention_heads, 128>>>
// launch: o_of<false><<<(hidden_size + 255) / 256, 256>>>
// launch: add_to_hidden<<<(hidden_size + 255) / 256, 256>>>
__global__ void rotate_and_append(const float* qkv, const float2* cos_sin, float* turned, half* keys, half* values,
                                  const int* page_table, int num_attention_heads, int num_key_value_heads,
                                  int position) {
    const int head = blockIdx.x, kv_head = head - num_attention_heads, i = threadIdx.x;
    const float2 pair = turned_pair(qkv + head * HEAD_DIM, cos_sin, position, i);
    if (kv_head < 0) {
        turned[head * HEAD_DIM + i] = pair.x, turned[head * HEAD_DIM + i + HALF] = pair.y;
        return;
    }
    const float* value = qkv + (head + num_key_value_heads) * HEAD_DIM;
    const size_t place = place_of(page_table, num_key_value_heads, kv_head, position) + i;
    keys[place] = __float2half(pair.x), keys[place + HALF] = __float2half(pair.y);
    values[place] = __float2half(value[i]), values[place + HALF] = __float2half(value[i + HALF]);
}

// rung flash: attention in one kernel, rotary and append included: the engine's.
// launch: norm_of_hidden<<<1, 256>>>
// launch: q_of<false><<<(num_attention_heads + 1) / 2, 256>>>
// launch: k_of<false><<<(num_key_value_heads + 1) / 2, 256>>>
// launch: v_of<false><<<(num_key_value_heads + 1) / 2, 256>>>
// launch: attention
// launch: o_of<false><<<(hidden_size + 255) / 256, 256>>>
// launch: add_to_hidden<<<(hidden_size + 255) / 256, 256>>>

// rung packed: a warp a row in the products, and 16 codes a load, which a permutation of bytes makes floats.
// launch: norm_of_hidden<<<1, 256>>>
// launch: q_of<true><<<num_attention_heads * 16, 256>>>
// launch: k_of<true><<<num_key_value_heads * 16, 256>>>
// launch: v_of<true><<<num_key_value_heads * 16, 256>>>
// launch: attention
// launch: o_of<true><<<(hidden_size + 7) / 8, 256>>>
// launch: add_to_hidden<<<(hidden_size + 255) / 256, 256>>>

// rung fused: one product for queries, keys and values. A warp adds up the squares of x while it multiplies, and
//   divides at the end. The product with o adds to hidden by itself.
// launch: qkv_of_hidden<<<(num_attention_heads + 2 * num_key_value_heads) * 16, 256>>>
// launch: attention
// launch: o_and_add<<<(hidden_size + 7) / 8, 256>>>
__global__ void qkv_of_hidden(const unsigned char* qkv_codes, const float* qkv_scales, const float* hidden,
                              const float* norm_weight, float* qkv, int num_attention_heads, int num_key_value_heads,
                              int hidden_size, float eps) {
    grid_dependency_launch();
    const int row = (blockIdx.x * THREADS + threadIdx.x) / WARP;
    if (row >= (num_attention_heads + 2 * num_key_value_heads) * HEAD_DIM) return;
    float squares = 0.0f;
    float sum = dot_packed(qkv_codes + size_t(row) * hidden_size, hidden, norm_weight, hidden_size, squares);
    sum = sum_over_warp(sum) * rsqrtf(sum_over_warp(squares) / hidden_size + eps);
    if (threadIdx.x % WARP == 0) qkv[row] = sum * qkv_scales[row];
}

__global__ void o_and_add(const unsigned char* o_codes, const float* o_scales, const float* mixed, float* hidden,
                          int num_attention_heads, int hidden_size) {
    grid_dependency_launch();
    const int row = (blockIdx.x * THREADS + threadIdx.x) / WARP, num_columns = num_attention_heads * HEAD_DIM;
    if (row >= hidden_size) return;
    float no_squares = 0.0f;
    const float sum = sum_over_warp(
        dot_packed(o_codes + size_t(row) * num_columns, mixed, nullptr, num_columns, no_squares));
    if (threadIdx.x % WARP == 0) hidden[row] += sum * o_scales[row];
}

// rung overlapping: the same kernels. Each may start before the one in front has ended, and then asks for its first
//   codes.
// launch: qkv_of_hidden<<<(num_attention_heads + 2 * num_key_value_heads) * 16, 256>>> overlapping
// launch: attention
// launch: o_and_add<<<(hidden_size + 7) / 8, 256>>> overlapping

// rung llmcli: what a layer of the engine begins with: a product over tiles with norm, attention, and one that adds.
// launch: llmcli
