// attention_prefill_wgmma: out[i,h] = sum_j softmax_j(scale * q[i,h] . K[j]) V[j], j <= start + i
//           Source: arXiv 2407.08608, algorithm 2; HF LlamaAttention
// Shapes:   q [num_tokens, num_attention_heads, 128] float in rows of q_stride, normed; cos_sin [max_seq_len, 64]
//           float2, the angles of a position, or null (no rotary); keys, values [num_pages, num_key_value_heads,
//           PAGE_TOKENS, 128] KvT; pages [pages_per_row] int, of the row. UNIT_INPUTS 0: out [num_tokens,
//           num_attention_heads, 128] float; others: out is an image for a matrix with such units
//           (common/wide_image.cuh), without scales, in which these tokens are those from first_token on
// Requires: sm_90a; KvT of 16 bits, fp16 for an image; 16-byte aligned heads, q_stride, cos_sin and image; the row's
//           pages hold the tokens 0 ... start + num_tokens - 1, and cos_sin their positions; window >= 1; scale holds a
//           factor log2(e); with TOKENS below 128 start + num_tokens <= TOKENS
// Launch:   grid (min(tiles of rows * num_key_value_heads, multiprocessors)), with TOKENS below 128 all of these tiles;
//           block (128 * (CONSUMERS + 1)); dynamic shared memory for STAGES tiles of keys and of values, up to 192 KiB;
//           may overlap the kernel in front of it
// Traffic:  q and out once, cos_sin from L2; keys and values once for every 64 * CONSUMERS rows, from L2
// Numerics: rotary, sums and softmax in fp32; q * scale and the weights rounded to KvT, as attention_prefill does. An
//           image is rounded once: a mean of fp16 values is within fp16's range, or saturated there. A token's bits
//           depend on its position alone, neither on the ends of chunks nor on pages: tiles of keys begin at fixed
//           positions, rows share no sums, and a tile that a row does not see multiplies its sums by 1 and adds 0. The
//           sums' order is not attention_prefill's, so the launcher must choose by card and cache, not by tokens
// Choice:   A row is a query of one head. The heads of a group lie side by side, so that they share keys and values.
//           Four warps copy; CONSUMERS groups of four multiply, 64 rows each. Of one group's tile the weights are
//           worked out while its last tile is mixed and while the other group multiplies. One group is faster while
//           every tile of 64 rows finds a multiprocessor. Blocks take tiles of rows in turn, the longest first.
//           Where a row has up to 64 tokens, tiles of 16 or 64 of them, without rounds: half of the instructions, which
//           such a block runs once. The page table is read before the wait
#include "common/mixed.cuh"
#include "common/launch.cuh"
#include "common/load.cuh"
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

// Every other round goes backwards. So all blocks get nearly the same number of tokens.
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

// TOKENS: of a tile. If fewer than TILE_TOKENS, the first tile has all of them, and a block takes one tile of rows.
template <typename KvT, int CONSUMERS, int STAGES, int UNIT_INPUTS, int TOKENS>
__global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    attention_prefill_wgmma(const float* q, const float* __restrict__ cos_sin, const KvT* keys, const KvT* values,
                            const int* __restrict__ pages, void* out, PrefillShape shape) {
    constexpr int TILE_ROWS = CONSUMERS * GROUP_ROWS, HALF_BYTES = half_bytes(TOKENS), TILE_BYTES = 2 * HALF_BYTES;
    constexpr bool IS_SHORT = TOKENS < TILE_TOKENS;
    // Shared memory: stages of keys, then of values. The first four warps fill them, the others empty them.
    alignas(1024) extern __shared__ uint4 shared[];
    __shared__ unsigned long long filled[2][STAGES], emptied[2][STAGES];  // of keys and of values
    const unsigned shared_keys = shared_address(shared), shared_values = shared_keys + STAGES * TILE_BYTES;
    if (threadIdx.x < 2 * STAGES) {
        barrier_init(filled[0] + threadIdx.x, 128);
        barrier_init(emptied[0] + threadIdx.x, 4 * CONSUMERS);
    }
    barrier_init_fence();
    __syncthreads();

    if (threadIdx.x < 128) {
        if constexpr (CONSUMERS > 1) registers_down_to<40>();  // all of a multiprocessor's: 128 * 40 + 256 * 232
        Turn<STAGES> turn;
        const int page_elements = shape.num_key_value_heads * PAGE_TOKENS * HEAD_DIM;
        for (int round = 0; tile_index(round) < shape.num_items(); ++round) {
            const PrefillTile tile(shape, tile_index(round), TILE_ROWS);
            const int element = tile.kv_head * PAGE_TOKENS * HEAD_DIM + threadIdx.x * 8;
            const int last_page = (tile.end - 1) / PAGE_TOKENS;
            for (int first = tile.begin; first < tile.end; first += TILE_TOKENS) {
                const int page = load_here(pages + min(first / PAGE_TOKENS + int(threadIdx.x % 8), last_page));
                grid_dependency_wait();  // the first time only
                grid_dependency_launch();
                barrier_wait(&emptied[0][turn.stage], turn.parity ^ 1);
                copy_tile<TOKENS>(shared_keys + turn.stage * TILE_BYTES, keys + element, page, page_elements,
                                  tile.end - first);
                barrier_arrive_behind_copies(&filled[0][turn.stage]);
                barrier_wait(&emptied[1][turn.stage], turn.parity ^ 1);
                copy_tile<TOKENS>(shared_values + turn.stage * TILE_BYTES, values + element, page, page_elements,
                                  tile.end - first);
                barrier_arrive_behind_copies(&filled[1][turn.stage]);
                turn.next();
                if (IS_SHORT) break;
            }
            if (IS_SHORT) break;
        }
        copy_async_commit();
        copy_async_wait<0>();
    } else {
        if constexpr (CONSUMERS > 1) registers_up_to<232>();
        const int group = threadIdx.x / 128 - 1, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const int own_row = group * GROUP_ROWS + threadIdx.x / 32 % 4 * 16 + g;
        // Two groups take turns: one multiplies while the other computes weights. The first begins.
        if (CONSUMERS > 1 && group == 1) arrive_threads_of<256>(1);
        Turn<STAGES> key_turn, value_turn;
        // Rows past the last one are copies of it, which are not stored.
        const int last_row = shape.num_tokens * shape.group_size - 1;
        // Queries of two rows, not yet rounded; from the first product of a tile on its scores.
        float rows[HEAD_DIM / 2];
        auto& scores = reinterpret_cast<float(&)[TOKENS / 2]>(rows);
        const auto load_queries = [&](int index) {
            const PrefillTile tile(shape, index, TILE_ROWS);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = min(tile.first_row + own_row + 8 * i, last_row);
                const int query = row / shape.group_size;
                const int head = tile.kv_head * shape.group_size + row % shape.group_size;
                const float* x = q + size_t(query) * shape.q_stride + head * HEAD_DIM + 2 * t;
#pragma unroll
                for (int j = 0; j < HEAD_DIM / 8; ++j) {
                    const float2 pair = *reinterpret_cast<const float2*>(x + 8 * j);
                    rows[4 * j + 2 * i] = pair.x;
                    rows[4 * j + 2 * i + 1] = pair.y;
                }
            }
        };
        const auto find_positions = [&](int index, int (&position)[2]) {
            const int first_row = PrefillTile(shape, index, TILE_ROWS).first_row + own_row;
#pragma unroll
            for (int i = 0; i < 2; ++i) position[i] = shape.start + min(first_row + 8 * i, last_row) / shape.group_size;
        };
        const auto rotate_queries = [&](int index) {
            if (cos_sin == nullptr) return;
            int position[2];
            find_positions(index, position);
            rotate_rows(rows, cos_sin, position);
        };
        grid_dependency_wait();
        grid_dependency_launch();
        if (tile_index(0) < shape.num_items()) {
            load_queries(tile_index(0));
            rotate_queries(tile_index(0));
        }
        for (int round = 0; tile_index(round) < shape.num_items(); ++round) {
            const PrefillTile tile(shape, tile_index(round), TILE_ROWS);
            unsigned queries[HEAD_DIM / 16][4];
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 4; ++i) {
                queries[i / 4][i % 4] = pack_pair<KvT>(within_range<KvT>(rows[2 * i] * shape.scale),
                                                       within_range<KvT>(rows[2 * i + 1] * shape.scale));
            }
            int position[2];
            find_positions(tile_index(round), position);
            const int group_row = tile.first_row + group * GROUP_ROWS;  // its rows' lowest and highest positions
            const int lowest = shape.start + group_row / shape.group_size;
            const int highest = shape.start + (group_row + GROUP_ROWS - 1) / shape.group_size;

            float mixed[64] = {};
            unsigned weights[TOKENS / 16][4];
            RowSoftmax softmax;
            const auto score = [&] {
                const unsigned long long b = swizzled_at(shared_keys + key_turn.stage * TILE_BYTES, HALF_BYTES);
#pragma unroll
                for (int i = 0; i < HEAD_DIM / 16; ++i) {
                    wgmma_halves<KvT, false>(scores, queries[i], b + i / 4 * (HALF_BYTES / 16) + i % 4 * 2, i > 0);
                }
                wgmma_commit();
            };
            const auto mix = [&] {
                const unsigned long long b = swizzled_at(shared_values + value_turn.stage * TILE_BYTES, HALF_BYTES);
#pragma unroll
                for (int i = 0; i < TOKENS / 16; ++i) {
                    wgmma_halves<KvT, true>(mixed, weights[i], b + i * (2048 / 16), true);
                }
                wgmma_commit();
            };
            const auto release = [&](unsigned long long* barrier) {
                if (lane == 0) barrier_arrive(barrier);
            };
            const auto weigh = [&](int first, float (&factor)[2]) {
                if (first + TOKENS > lowest + 1 || first < highest + 1 - shape.window) {
                    hide_tokens(scores, first, position, shape.window);
                }
                softmax.weigh<KvT>(scores, factor);
            };
            const auto round_weights = [&] {
#pragma unroll
                for (int i = 0; i < TOKENS / 4; ++i) {
                    weights[i / 4][i % 4] = pack_pair<KvT>(scores[2 * i], scores[2 * i + 1]);
                }
            };

            float factor[2];
            barrier_wait(&filled[0][key_turn.stage], key_turn.parity);
            fence_async_side();
            wgmma_begin();
            score();
            wgmma_wait<0>();
            hold(scores);
            release(&emptied[0][key_turn.stage]);
            key_turn.next();
            weigh(tile.begin, factor);
            round_weights();
            for (int first = tile.begin + TILE_TOKENS; !IS_SHORT && first < tile.end; first += TILE_TOKENS) {
                // Values were loaded before these keys.
                barrier_wait(&filled[0][key_turn.stage], key_turn.parity);
                barrier_wait(&filled[1][value_turn.stage], value_turn.parity);
                fence_async_side();
                if constexpr (CONSUMERS > 1) sync_threads_of<256>(1 + group);
                wgmma_begin();
                score();
                mix();
                if constexpr (CONSUMERS > 1) arrive_threads_of<256>(2 - group);
                wgmma_wait<1>();
                hold(scores);
                release(&emptied[0][key_turn.stage]);
                key_turn.next();
                weigh(first, factor);
                wgmma_wait<0>();
                hold(mixed);
                release(&emptied[1][value_turn.stage]);
                value_turn.next();
#pragma unroll
                for (int i = 0; i < 64; ++i) mixed[i] *= factor[i / 2 % 2];
                round_weights();
            }
            // Load the next rows' queries before the last product, and rotate them while it runs.
            const bool goes_on = !IS_SHORT && tile_index(round + 1) < shape.num_items();
            if (goes_on) load_queries(tile_index(round + 1));
            barrier_wait(&filled[1][value_turn.stage], value_turn.parity);
            fence_async_side();
            wgmma_begin();
            mix();
            if (goes_on) rotate_queries(tile_index(round + 1));
            wgmma_wait<0>();
            hold(mixed);
            release(&emptied[1][value_turn.stage]);
            value_turn.next();
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float total = softmax.sum[i];
                total += reduce::shuffle_xor(total, 1);
                total += reduce::shuffle_xor(total, 2);
                const float inverse = 1.0f / total;
                const int row = tile.first_row + own_row + 8 * i, query = position[i] - shape.start;
                if (row > last_row) continue;
                const int head = tile.kv_head * shape.group_size + row - query * shape.group_size;
                if constexpr (UNIT_INPUTS > 0) {
                    store_in_image<UNIT_INPUTS>(static_cast<unsigned char*>(out), shape.first_token + query, head,
                                                shape.num_heads(), mixed, i, inverse);
                    continue;
                }
                const size_t place = (size_t(query) * shape.num_heads() + head) * HEAD_DIM + 2 * t;
#pragma unroll
                for (int j = 0; j < HEAD_DIM / 8; ++j) {
                    MixedRows{out, shape.out_is_float}.store(place + 8 * j,
                                make_float2(mixed[4 * j + 2 * i] * inverse, mixed[4 * j + 2 * i + 1] * inverse));
                }
            }
            if (IS_SHORT) break;
        }
    }
}
