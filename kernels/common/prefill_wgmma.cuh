// prefill_wgmma: the parts of attention_prefill_wgmma: its tiles of rows, rotary, the copies of a page's tokens, the
// softmax, and outputs as the next product's image.
//
// A row is a query of one head; the rows of a key-value head are its tokens in turn, each with all heads of the group.
#pragma once

#include "common/matrix.cuh"
#include "common/pages.cuh"
#include "common/reduce.cuh"
#include "common/wgmma.cuh"
#include "common/wide_image.cuh"

constexpr int HEAD_DIM = 128;
constexpr int TILE_TOKENS = 128;  // fixed: a token's bits depend on where tiles begin
constexpr int GROUP_ROWS = 64;    // of four warps
// Of a tile of keys or values in shared memory: dimensions 0 ... 63 of all tokens, then the others.
__host__ __device__ constexpr int half_bytes(int tokens) { return tokens * 128; }

struct PrefillShape {
    int q_stride, num_key_value_heads, group_size, num_tokens, num_tiles, start, window, first_token;
    int out_is_float;  // else fp16
    float scale;

    __device__ __forceinline__ int num_items() const { return num_tiles * num_key_value_heads; }
    __device__ __forceinline__ int num_heads() const { return group_size * num_key_value_heads; }
};

// A tile of rows of one key-value head.
struct PrefillTile {
    int kv_head, first_row, begin, end;  // tokens [begin, end) are seen by some row; begin is a multiple of TILE_TOKENS

    __device__ __forceinline__ PrefillTile(const PrefillShape& shape, int index, int tile_rows) {
        kv_head = index % shape.num_key_value_heads;
        first_row = (shape.num_tiles - 1 - index / shape.num_key_value_heads) * tile_rows;  // most tokens first
        const int first_query = first_row / shape.group_size;
        const int last_query = min((first_row + tile_rows - 1) / shape.group_size, shape.num_tokens - 1);
        begin = max(0, shape.start + first_query + 1 - shape.window) / TILE_TOKENS * TILE_TOKENS;
        end = shape.start + last_query + 1;
    }
};

// Of a group's scores a lane holds rows g (i = 0) and g + 8 (i = 1), as wgmma_halves has them: tokens 8j + 2t and
// 8j + 2t + 1 of all j. Of its queries and its outputs it holds dimensions alike.

// Half-split rotary of the queries of two rows. `cos_sin` are the angles of all positions.
__device__ __forceinline__ void rotate_rows(float (&x)[64], const float* __restrict__ cos_sin,
                                            const int (&position)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float* angles = cos_sin + size_t(position[i]) * HEAD_DIM + threadIdx.x % 4 * 4;
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 16; ++j) {
            const float4 pair = *reinterpret_cast<const float4*>(angles + 16 * j);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const float cosine = k == 0 ? pair.x : pair.z, sine = k == 0 ? pair.y : pair.w;
                float &low = x[4 * j + 2 * i + k], &high = x[4 * (j + HEAD_DIM / 16) + 2 * i + k];
                const float turned = low * cosine - high * sine;
                high = high * cosine + low * sine;
                low = turned;
            }
        }
    }
}

// Stores the outputs of row i, times `inverse`, as a token's head in an image. A store of 16 bytes takes four pairs of
// this lane, those whose j are WORD apart: wide_place makes them adjacent.
template <int UNIT_INPUTS>
__device__ __forceinline__ void store_in_image(unsigned char* image, int token, int head, int num_heads,
                                               const float (&mixed)[64], int i, float inverse) {
    constexpr int WORD = UNIT_INPUTS == 64 ? 2 : UNIT_INPUTS == 128 ? 4 : 1, STEP = UNIT_INPUTS == 128 ? 2 : 8;
    constexpr int HALF = UNIT_INPUTS == 32 ? 4 : 1;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
        const int first = part / 2 * STEP + part % 2 * HALF, column = head * HEAD_DIM + 8 * first + threadIdx.x % 4 * 2;
        unsigned words[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int pair = 4 * (first + k * WORD) + 2 * i;
            words[k] = pack_pair<__half>(within_range<__half>(mixed[pair] * inverse),
                                         within_range<__half>(mixed[pair + 1] * inverse));
        }
        const size_t place = wide_place(UNIT_INPUTS, token, column, wide_steps(num_heads * HEAD_DIM));
        *reinterpret_cast<uint4*>(image + place) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// Every other round goes backwards, so that all blocks get about as many tokens.
__device__ __forceinline__ int tile_index(int round) {
    return round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
}

// The next of STAGES places of a ring, and how many rounds have been made.
template <int STAGES>
struct Turn {
    int stage = 0;
    unsigned parity = 0;

    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Four warps copy TOKENS keys or values; tokens from `num_tokens` on are zeros. Lane i of each warp gives the page
// number i, and `source` is this thread's 16 bytes of the first 8 tokens in page 0.
template <int TOKENS, typename KvT>
__device__ __forceinline__ void copy_tile(unsigned destination, const KvT* source, int page, int page_elements,
                                          int num_tokens) {
    const int token = threadIdx.x / 16, piece = threadIdx.x % 16;
    destination += piece / 8 * half_bytes(TOKENS) + token * 128 + (piece % 8 ^ token) * 16;
#pragma unroll
    for (int i = 0; i < TOKENS / PAGE_TOKENS; ++i) {
        const KvT* of_page = source + size_t(__shfl_sync(0xffffffff, page, i)) * page_elements;
#pragma unroll
        for (int j = 0; j < PAGE_TOKENS; j += 8) {
            const bool exists = token + PAGE_TOKENS * i + j < num_tokens;
            copy_async(destination + (PAGE_TOKENS * i + j) * 128, of_page + j * HEAD_DIM, exists ? 16 : 0);
        }
    }
}

// Of row i, the j-th of the NUM_SCORES / 2 that a lane holds.
template <int NUM_SCORES>
__device__ __forceinline__ float& score_at(float (&scores)[NUM_SCORES], int i, int j) {
    return scores[j / 2 * 4 + 2 * i + j % 2];
}

// Minus infinity for tokens that the rows' positions do not see.
template <int NUM_SCORES>
__device__ __forceinline__ void hide_tokens(float (&scores)[NUM_SCORES], int first, const int (&position)[2],
                                            int window) {
#pragma unroll
    for (int j = 0; j < NUM_SCORES / 2; ++j) {
        const int token = first + j / 2 * 8 + threadIdx.x % 4 * 2 + j % 2;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (token > position[i] || token <= position[i] - window) {
                score_at(scores, i, j) = reduce::minus_infinity();
            }
        }
    }
}

struct RowSoftmax {
    float maximum[2] = {reduce::minus_infinity(), reduce::minus_infinity()};
    float sum[2] = {0.0f, 0.0f};  // this lane's part

    // Scores to weights. `factor` is what the sums of the tokens before are multiplied by.
    template <typename KvT, int NUM_SCORES>
    __device__ __forceinline__ void weigh(float (&scores)[NUM_SCORES], float (&factor)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float larger[2] = {maximum[i], maximum[i]}, part[2] = {0.0f, 0.0f};  // two chains, to wait less
#pragma unroll
            for (int j = 0; j < NUM_SCORES / 2; ++j) larger[j % 2] = fmaxf(larger[j % 2], score_at(scores, i, j));
            float largest = fmaxf(larger[0], larger[1]);
            largest = fmaxf(largest, reduce::shuffle_xor(largest, 1));
            largest = fmaxf(largest, reduce::shuffle_xor(largest, 2));
            // A row that has seen no token yet: its weights must be 0, not exp(-inf + inf).
            const float base = largest == reduce::minus_infinity() ? 0.0f : largest;
            factor[i] = exp2_fast(maximum[i] - base);
            maximum[i] = largest;
#pragma unroll
            for (int j = 0; j < NUM_SCORES / 2; ++j) {
                float& weight = score_at(scores, i, j);
                weight = exp2_fast(weight - (base - WEIGHT_EXPONENT<KvT>));
                part[j % 2] += weight;
            }
            sum[i] = fmaf(sum[i], factor[i], part[0] + part[1]);
        }
    }
};
