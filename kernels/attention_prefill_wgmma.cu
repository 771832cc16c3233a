// attention_prefill_wgmma: out[i,h] = sum_j softmax_j(scale * q[i,h] . K[j]) V[j], j <= start + i
//           Source: arXiv 2407.08608, algorithm 2; HF LlamaAttention
// Shapes:   q [num_tokens, num_attention_heads, 128] float in rows of q_stride, normed and rotated; keys, values
//           [num_pages, num_key_value_heads, PAGE_TOKENS, 128] KvT; pages [pages_per_row] int, of the row; out
//           [num_tokens, num_attention_heads, 128] float
// Requires: sm_90a; KvT of 16 bits; 16-byte aligned heads and q_stride; the row's pages hold the tokens 0 ... start +
//           num_tokens - 1; window >= 1; scale holds a factor log2(e)
// Launch:   grid (min(tiles of rows * num_key_value_heads, multiprocessors)), block (128 * (CONSUMERS + 1)); dynamic
//           shared memory for STAGES tiles of keys and of values: 192 KiB
// Traffic:  q and out once; keys and values once for every 64 * CONSUMERS rows, from L2
// Numerics: those of attention_prefill: fp32 sums and softmax, q * scale and the weights rounded to KvT. A token's bits
//           depend on its position alone, neither on the ends of chunks nor on pages: tiles of keys begin at fixed
//           positions, rows share no sums, and a tile that a row does not see multiplies its sums by 1 and adds 0. The
//           sums' order is not attention_prefill's, so the launcher must choose by card and cache, not by tokens
// Choice:   A row is a query of one head. The heads of a group lie side by side, so that they share keys and values.
//           Four warps copy; CONSUMERS groups of four multiply, 64 rows each. Of one group's tile the weights are
//           worked out while its last tile is mixed and while the other group multiplies. One group is faster while
//           every tile of 64 rows finds a multiprocessor. Blocks take tiles of rows in turn, the longest first
#include "common/matrix.cuh"
#include "common/pages.cuh"
#include "common/reduce.cuh"
#include "common/wgmma_wide.cuh"

constexpr int HEAD_DIM = 128;
constexpr int TILE_TOKENS = 128;  // fixed: a token's bits depend on where tiles begin
constexpr int GROUP_ROWS = 64;    // of four warps
constexpr int HALF_BYTES = TILE_TOKENS * 128;
constexpr int TILE_BYTES = 2 * HALF_BYTES;  // dimensions 0 ... 63 of all tokens, then the others

struct PrefillShape {
    int q_stride, num_key_value_heads, group_size, num_tokens, num_tiles, start, window;
    float scale;

    __device__ __forceinline__ int num_items() const { return num_tiles * num_key_value_heads; }
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

// In every other round backwards, so that every block gets about as many tokens.
__device__ __forceinline__ int tile_index(int round) {
    return round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
}

// Which of STAGES places of a ring is next, and how often the ring has been round.
template <int STAGES>
struct Turn {
    int stage = 0;
    unsigned parity = 0;

    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Four warps copy a tile of keys or values; tokens from `num_tokens` on are zeros. Lane i of each warp gives the page
// number i, and `source` is this thread's 16 bytes of the first 8 tokens in page 0.
template <typename KvT>
__device__ __forceinline__ void copy_tile(unsigned destination, const KvT* source, int page, int page_elements,
                                          int num_tokens) {
    const int token = threadIdx.x / 16, piece = threadIdx.x % 16;
    destination += piece / 8 * HALF_BYTES + token * 128 + (piece % 8 ^ token) * 16;
#pragma unroll
    for (int i = 0; i < TILE_TOKENS / PAGE_TOKENS; ++i) {
        const KvT* of_page = source + size_t(__shfl_sync(0xffffffff, page, i)) * page_elements;
#pragma unroll
        for (int j = 0; j < PAGE_TOKENS; j += 8) {
            const bool exists = token + PAGE_TOKENS * i + j < num_tokens;
            copy_async(destination + (PAGE_TOKENS * i + j) * 128, of_page + j * HEAD_DIM, exists ? 16 : 0);
        }
    }
}

template <typename KvT, int CONSUMERS, int STAGES>
__global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    attention_prefill_wgmma(const float* __restrict__ q, const KvT* __restrict__ keys, const KvT* __restrict__ values,
                            const int* __restrict__ pages, float* __restrict__ out, PrefillShape shape) {
    constexpr int TILE_ROWS = CONSUMERS * GROUP_ROWS;
    // Shared memory: stages of keys, then stages of values.
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
        if constexpr (CONSUMERS > 1) give_registers<40>();
        Turn<STAGES> turn;
        const int page_elements = shape.num_key_value_heads * PAGE_TOKENS * HEAD_DIM;
        for (int round = 0; tile_index(round) < shape.num_items(); ++round) {
            const PrefillTile tile(shape, tile_index(round), TILE_ROWS);
            const int element = tile.kv_head * PAGE_TOKENS * HEAD_DIM + threadIdx.x * 8;
            const int last_page = (tile.end - 1) / PAGE_TOKENS;
            for (int first = tile.begin; first < tile.end; first += TILE_TOKENS) {
                const int page = __ldg(pages + min(first / PAGE_TOKENS + int(threadIdx.x % 8), last_page));
                barrier_wait(&emptied[0][turn.stage], turn.parity ^ 1);
                copy_tile(shared_keys + turn.stage * TILE_BYTES, keys + element, page, page_elements, tile.end - first);
                barrier_arrive_with_copies(&filled[0][turn.stage]);
                barrier_wait(&emptied[1][turn.stage], turn.parity ^ 1);
                copy_tile(shared_values + turn.stage * TILE_BYTES, values + element, page, page_elements,
                          tile.end - first);
                barrier_arrive_with_copies(&filled[1][turn.stage]);
                turn.next();
            }
        }
        copy_async_commit();
        copy_async_wait<0>();
    } else {
        if constexpr (CONSUMERS > 1) take_registers<232>();
        const int group = threadIdx.x / 128 - 1, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const int own_row = group * GROUP_ROWS + threadIdx.x / 32 % 4 * 16 + g;
        // Two groups take turns: one multiplies while the other works out weights.
        if (CONSUMERS > 1 && group == 1) arrive_threads_of<256>(1);
        Turn<STAGES> key_turn, value_turn;
        // Rows past the last one are copies of it, which nobody stores.
        const int last_row = shape.num_tokens * shape.group_size - 1;
        float scores[64];  // before the first product of a tile the queries of two rows, not yet rounded
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
                    scores[4 * j + 2 * i] = pair.x;
                    scores[4 * j + 2 * i + 1] = pair.y;
                }
            }
        };
        if (tile_index(0) < shape.num_items()) load_queries(tile_index(0));
        for (int round = 0; tile_index(round) < shape.num_items(); ++round) {
            const PrefillTile tile(shape, tile_index(round), TILE_ROWS);
            unsigned queries[HEAD_DIM / 16][4];
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 4; ++i) {
                queries[i / 4][i % 4] = pack_pair<KvT>(within_range<KvT>(scores[2 * i] * shape.scale),
                                                       within_range<KvT>(scores[2 * i + 1] * shape.scale));
            }
            int position[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                position[i] = shape.start + min(tile.first_row + own_row + 8 * i, last_row) / shape.group_size;
            }
            const int group_row = tile.first_row + group * GROUP_ROWS;
            const int lowest = shape.start + group_row / shape.group_size;
            const int highest = shape.start + (group_row + GROUP_ROWS - 1) / shape.group_size;

            float mixed[64] = {};
            unsigned weights[TILE_TOKENS / 16][4];
            float maximum[2] = {reduce::minus_infinity(), reduce::minus_infinity()}, sum[2] = {0.0f, 0.0f};
            const auto score = [&] {
                const unsigned long long b = swizzled_at(shared_keys + key_turn.stage * TILE_BYTES, HALF_BYTES);
#pragma unroll
                for (int i = 0; i < HEAD_DIM / 16; ++i) {
                    wgmma_wide<KvT, false>(scores, queries[i], b + i / 4 * (HALF_BYTES / 16) + i % 4 * 2, i > 0);
                }
                wgmma_commit();
            };
            const auto mix = [&] {
                const unsigned long long b = swizzled_at(shared_values + value_turn.stage * TILE_BYTES, HALF_BYTES);
#pragma unroll
                for (int i = 0; i < TILE_TOKENS / 16; ++i) {
                    wgmma_wide<KvT, true>(mixed, weights[i], b + i * (2048 / 16), true);
                }
                wgmma_commit();
            };
            const auto release = [&](unsigned long long* barrier) {
                if (lane == 0) barrier_arrive(barrier);
            };
            // Scores to weights; what the sums of the tokens before are multiplied by.
            const auto weigh = [&](int first, float (&factor)[2]) {
                if (first + TILE_TOKENS > lowest + 1 || first < highest + 1 - shape.window) {
#pragma unroll
                    for (int i = 0; i < 64; ++i) {
                        const int token = first + i / 4 * 8 + 2 * t + i % 2;
                        const int last = position[i / 2 % 2];
                        if (token > last || token <= last - shape.window) scores[i] = reduce::minus_infinity();
                    }
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float larger[2] = {maximum[i], maximum[i]};
#pragma unroll
                    for (int j = 0; j < 32; ++j) {
                        larger[j % 2] = fmaxf(larger[j % 2], scores[j / 2 * 4 + 2 * i + j % 2]);
                    }
                    larger[0] = fmaxf(larger[0], larger[1]);
                    larger[0] = fmaxf(larger[0], reduce::shuffle_xor(larger[0], 1));
                    larger[0] = fmaxf(larger[0], reduce::shuffle_xor(larger[0], 2));
                    // A row that has seen no token yet: its weights must be 0, not exp(-inf + inf).
                    const float base = larger[0] == reduce::minus_infinity() ? 0.0f : larger[0];
                    factor[i] = exp2_fast(maximum[i] - base);
                    maximum[i] = larger[0];
                    const float top = base - WEIGHT_EXPONENT<KvT>;
                    float part[2] = {0.0f, 0.0f};
#pragma unroll
                    for (int j = 0; j < 32; ++j) {
                        float& place = scores[j / 2 * 4 + 2 * i + j % 2];
                        place = exp2_fast(place - top);
                        part[j % 2] += place;
                    }
                    sum[i] = fmaf(sum[i], factor[i], part[0] + part[1]);
                }
            };
            const auto round_weights = [&] {
#pragma unroll
                for (int i = 0; i < 32; ++i) {
                    weights[i / 4][i % 4] = pack_pair<KvT>(scores[2 * i], scores[2 * i + 1]);
                }
            };

            float factor[2];
            barrier_wait(&filled[0][key_turn.stage], key_turn.parity);
            fence_for_wgmma();
            wgmma_begin();
            score();
            wgmma_wait<0>();
            hold(scores);
            release(&emptied[0][key_turn.stage]);
            key_turn.next();
            weigh(tile.begin, factor);
            round_weights();
            for (int first = tile.begin + TILE_TOKENS; first < tile.end; first += TILE_TOKENS) {
                barrier_wait(&filled[0][key_turn.stage], key_turn.parity);
                if constexpr (CONSUMERS > 1) sync_threads_of<256>(1 + group);
                fence_for_wgmma();
                wgmma_begin();
                score();
                barrier_wait(&filled[1][value_turn.stage], value_turn.parity);
                fence_for_wgmma();
                wgmma_begin();
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
            // They arrive beside the last product.
            if (tile_index(round + 1) < shape.num_items()) load_queries(tile_index(round + 1));
            barrier_wait(&filled[1][value_turn.stage], value_turn.parity);
            fence_for_wgmma();
            wgmma_begin();
            mix();
            wgmma_wait<0>();
            hold(mixed);
            release(&emptied[1][value_turn.stage]);
            value_turn.next();
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float total = sum[i];
                total += reduce::shuffle_xor(total, 1);
                total += reduce::shuffle_xor(total, 2);
                const float inverse = 1.0f / total;
                const int row = tile.first_row + own_row + 8 * i, query = position[i] - shape.start;
                if (row > last_row) continue;
                const int of_token = tile.kv_head * shape.group_size + row - query * shape.group_size;
                const int num_heads = shape.group_size * shape.num_key_value_heads;
                float* place = out + (size_t(query) * num_heads + of_token) * HEAD_DIM + 2 * t;
#pragma unroll
                for (int j = 0; j < HEAD_DIM / 8; ++j) {
                    *reinterpret_cast<float2*>(place + 8 * j) =
                        make_float2(mixed[4 * j + 2 * i] * inverse, mixed[4 * j + 2 * i + 1] * inverse);
                }
            }
        }
    }
}
