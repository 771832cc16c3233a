// attention_decode: out[r,h] = sum_j softmax_j(scale * q[r,h] . K[j]) V[j]
//           Source: arXiv 2307.08691, flash-decoding; HF LlamaAttention
// Shapes:   q [R, num_attention_heads, HEAD_DIM], k, v [R, num_key_value_heads, HEAD_DIM] float in rows of qkv_stride;
//           q_norm, k_norm [HEAD_DIM] float or null; cos_sin [max_seq_len, HEAD_DIM / 2] float2 or null (no rotary);
//           rows, positions [R] int; row -1: an unused lane, which reads and writes nothing else; page_table
//           [num_rows, pages_per_row] int; keys, values [num_pages, num_key_value_heads, PAGE_TOKENS, HEAD_DIM] KvT,
//           in-out; key_scales, value_scales [num_pages, num_key_value_heads, PAGE_TOKENS] float, in-out, or null where
//           KvT is not a code; partials [R, num_attention_heads, max_splits, HEAD_DIM + 4] float; counters [R, grid y]
//           zeros, zeros again at the end; out [R, num_attention_heads * HEAD_DIM]
// Requires: HEAD_DIM % 8 == 0; heads aligned to 16 bytes (codes: 8); 0 <= positions < max_seq_len; window >= 1;
//           HEAD_TILE 8 or 16, with KvT float 4 or 2. The cache holds every earlier token that the window shows. The
//           kernel in front, and those that it overlaps, write none of rows, positions and page_table. With is_cached
//           the cache also holds the new tokens, written by append_tokens, and several lanes may belong to one row.
//           Without it rows differ, no two rows share the page of a new token, and those kernels write no earlier token
// Launch:   grid (max(ceil(max_splits / SPLITS), blocks_a_head), num_key_value_heads * ceil(group / HEAD_TILE), R),
//           block (128 * SPLITS), dynamic shared memory for 4 * SPLITS * HEAD_TILE * (HEAD_DIM + 2) floats; may overlap
//           the kernel in front of it. SPLITS is 1, or fills a multiprocessor (splits_at_once); blocks_a_head: those
//           over which a row's splits are spread, one a block if they are few
// Traffic:  2 * num_key_value_heads * min(position, window) * (HEAD_DIM * sizeof(KvT), of codes + 4) bytes a row, times
//           ceil(group / HEAD_TILE)
// Numerics: fp32 sums (truncated, not rounded, in the tensor cores) and softmax (base 2, error 2^-22). Norm and rotary
//           in fp32. k and v are rounded to KvT, and the row's own token takes part as rounded. With 16-bit KvT q and
//           the weights are split into two 16-bit parts: relative error 2^-16 for bfloat16, 2^-22 for fp16 and codes.
//           Sums have fixed trees, and splits depend on the position alone, so a row's bits depend neither on R nor on
//           pages nor on SPLITS. A new token takes part with the same bits with and without is_cached, so a span has
//           the bits of single steps
// Choice:   One key-value head a block, so that a group's K and V are read once. Where rows and heads are few, a block
//           has its multiprocessor to itself, with room for as many splits as run there at once. It has one of a short
//           row: a split is 64 KB, which one multiprocessor takes half a microsecond to fetch, and small blocks gather
//           on the first multiprocessor that is free. Splits of one block are put together in shared memory. Where rows
//           and heads are many, a block has one split, and several share a multiprocessor. It has more than ten
//           parameters: norm, rotary, append and combining the splits would each be a launch next to a 5 us kernel.
//           It asks for earlier tokens before it waits for the previous kernel, which ends meanwhile. It combines eight
//           splits in one round trip to L2. A tile lies in one page, so a warp looks up one page a tile, a tile ahead.
//           It guesses the first tile's page: a third round trip would cost 1 % of a 1B model's step. What it reads at
//           the start, and after the wait, is asked for together (common/load.cuh). The next kernel starts when a
//           warp of each block is past its tiles: steps took the least time then. Rejected, with figures in
//           docs/log/2026-11-27-attention.md: clusters that hand each other their parts; other places for that start.
//           Speed: scripts/benchmark_attention.py
#include "common/mixed.cuh"
#include "common/arrival.cuh"
#include "common/attend.cuh"
#include "common/launch.cuh"
#include "common/splits.cuh"

// Splits that a multiprocessor attends to at once: three with warps of 168 registers; two with 255, where a warp holds
// more; four with 128 for codes, whose loads in flight take half the registers.
__host__ __device__ constexpr int splits_at_once(int head_dim, int head_tile, bool has_scales) {
    return head_dim > (head_tile == 8 ? 128 : head_tile == 4 ? 64 : 0) ? 2 : has_scales ? 4 : 3;
}

// Arrays that the previous kernel writes are not __restrict__: the compiler might move their loads before the wait.
template <typename KvT, int HEAD_DIM, int HEAD_TILE, int SPLITS>
__global__ void __launch_bounds__(32 * WARPS * SPLITS,
                                  splits_at_once(HEAD_DIM, HEAD_TILE, KvFormat<KvT>::HAS_SCALES) / SPLITS)
    attention_decode(const float* q, const float* k, const float* v, int qkv_stride, const float* __restrict__ q_norm,
                     const float* __restrict__ k_norm, float eps, float scale, const float2* __restrict__ cos_sin,
                     const int* rows, const int* positions, const int* page_table, int num_rows, int pages_per_row,
                     KvT* keys, KvT* values, float* key_scales, float* value_scales, int window, int is_cached,
                     int num_attention_heads, int num_key_value_heads, int max_splits, int blocks_a_head,
                     float* partials, unsigned* __restrict__ counters, void* out_data, int out_is_float) {
    const MixedRows out = {out_data, out_is_float};
    using Tile = Attend<KvT, HEAD_DIM, HEAD_TILE>;
    static_assert(PAGE_TOKENS % Tile::TILE_TOKENS == 0, "a tile lies in one page");
    constexpr int NUM_WARPS = WARPS * SPLITS;
    constexpr int STEP = WARPS * Tile::TILE_TOKENS;  // from one tile of a warp to its next
    constexpr int PART = PART_SIZE<HEAD_DIM>, VECTORS = HEAD_DIM / 4;
    constexpr int STRIDE = HEAD_DIM + 2;  // two rows of a pair of heads in different banks
    extern __shared__ __align__(16) float weighted_values[];  // [SPLITS][WARPS][HEAD_TILE][STRIDE]
    __shared__ typename Tile::Queries queries;
    __shared__ float maxima[SPLITS][WARPS][HEAD_TILE], sums[SPLITS][WARPS][HEAD_TILE];
    __shared__ float own_scores[HEAD_TILE], own_value[HEAD_DIM];
    __shared__ bool is_last;

    const int block_warp = threadIdx.x / 32, its_split = block_warp / WARPS, warp = block_warp % WARPS;
    const int lane = threadIdx.x % 32;
    const int group = num_attention_heads / num_key_value_heads, tiles = (group + HEAD_TILE - 1) / HEAD_TILE;
    const int kv_head = blockIdx.y / tiles, first_in_group = blockIdx.y % tiles * HEAD_TILE;
    const int first_head = kv_head * group + first_in_group, heads = min(HEAD_TILE, group - first_in_group);
    const int row = load_here(rows + blockIdx.z), position = load_here(positions + blockIdx.z);
    // Guess the page of this warp's first tile: the row has the lane's number, there is no window, splits are the
    // shortest, and a block has one, or one block has all. This load overlaps those of row and position, and saves a
    // round trip to L2.
    const int guessed_row = min(static_cast<int>(blockIdx.z), num_rows - 1);
    const int guessed_split = static_cast<int>(blockIdx.x) + its_split;
    const int guess = min(guessed_split * (MIN_SPLIT_TOKENS / PAGE_TOKENS) + warp, pages_per_row - 1);
    const int guessed_page = load_here(page_table + size_t(guessed_row) * pages_per_row + guess);

    const Splits<Tile::TILE_TOKENS> splits(position, window, max_splits);
    const int visible = splits.visible, num_splits = splits.count;
    int share = 1;  // the splits of a block
    if (SPLITS > 1 && num_splits > blocks_a_head) {
        share = min(SPLITS, (num_splits + blocks_a_head - 1) / blocks_a_head);
    }
    const int first_split = blockIdx.x * share, count = min(share, num_splits - first_split);
    if (count <= 0) return;  // other blocks of this row wait for the previous kernel
    if (row < 0) {           // an unused lane; still wait: rule 1 of launch.cuh
        grid_dependency_wait();
        return;
    }
    const bool has_own = first_split + count == num_splits;
    const int split = first_split + its_split, end = its_split < count ? splits.end(split) : 0;

    const int* pages = page_table + size_t(row) * pages_per_row;
    const auto page_of = [&](int token) { return load_here(pages + token / unsigned(PAGE_TOKENS)); };
    const auto place_of = [&](int page, int token) { return token_place(page, num_key_value_heads, kv_head, token); };
    const auto load_keys = [&](Tile& tile, size_t place, int begin, int count) {
        tile.load_keys(HeadTokens<KvT>{keys + place * HEAD_DIM, key_scales + place}, begin, count);
    };
    const auto load_values = [&](Tile& tile, size_t place, int begin, int count) {
        tile.load_values(HeadTokens<KvT>{values + place * HEAD_DIM, value_scales + place}, begin, count);
    };
    const int own_page = has_own ? page_of(position) : 0;
    if (is_cached) grid_dependency_wait();  // the previous kernel has appended what is read here
    Tile tile;
    tile.clear();
    int first = splits.begin(split) + warp * Tile::TILE_TOKENS;
    int begin = max(0, visible - first);  // of this tile; every other one of this warp begins with its first token
    int next_page = 0;                    // of the tile after this one, known before its keys are loaded
    if (first < end) {  // loads run while the previous kernel ends and the queries are prepared
        const bool is_guessed = row == guessed_row && first / PAGE_TOKENS == guess;
        const size_t place = place_of(is_guessed ? guessed_page : page_of(first), first);
        if (first + STEP < end) next_page = page_of(first + STEP);
        load_keys(tile, place, begin, end - first);
        load_values(tile, place, begin, end - first);
    }

    using Pairs = Head<HEAD_DIM>;
    float2 angles[Pairs::PAIRS];
    Pairs::load_angles(cos_sin, position, angles);
    constexpr int HEADS = (HEAD_TILE + NUM_WARPS - 1) / NUM_WARPS;  // of this warp: block_warp + i * NUM_WARPS
    const size_t lane_begin = blockIdx.z * size_t(qkv_stride);
    const float* new_k = k + lane_begin + kv_head * HEAD_DIM;
    const float* new_v = v + lane_begin + kv_head * HEAD_DIM;
    const float* new_q = q + lane_begin + (first_head + block_warp) * HEAD_DIM;
    grid_dependency_wait();

    // Load everything that the previous kernel has written before the first of it is used.
    Pairs own_key, new_value, own_queries[HEADS];
    own_key.load(new_k, has_own);  // in every warp: no barrier before the scores
    new_value.load(new_v, has_own && block_warp == NUM_WARPS - 1);
#pragma unroll
    for (int i = 0; i < HEADS; ++i) {
        own_queries[i].load(new_q + i * NUM_WARPS * HEAD_DIM, block_warp + i * NUM_WARPS < heads);
    }
    if (has_own) {
        const bool stores = !is_cached && first_in_group == 0;
        const size_t own_place = place_of(own_page, position);
        own_key.norm_and_rotate(k_norm, eps, angles);
        round_head(own_key, keys + own_place * HEAD_DIM, key_scales + own_place, stores && block_warp == 0);
        if (block_warp == NUM_WARPS - 1) {
            round_head(new_value, values + own_place * HEAD_DIM, value_scales + own_place, stores);
            new_value.store(own_value);
        }
    }
#pragma unroll
    for (int i = 0; i < HEADS; ++i) {
        const int head = block_warp + i * NUM_WARPS;
        if (head >= HEAD_TILE) break;
        Pairs& query = own_queries[i];
        query.norm_and_rotate(q_norm, eps, angles);
        query.scale(scale);
        query.each([&](int dimension, float value) { queries.store(head, dimension, value); });
        if (lane < Tile::QUERY_SIZE - HEAD_DIM) queries.store(head, HEAD_DIM + lane, 0.0f);
        if (has_own) {
            const float own_score = query.dot(own_key);
            if (lane == 0) own_scores[head] = own_score;
        }
    }
    __syncthreads();  // queries, own_scores and own_value are written

    if (has_own && block_warp == (count - 1) * WARPS) tile.start_with(own_scores, own_value);
    while (first < end) {
        const int next = first + STEP;
        const size_t place = place_of(next_page, next);
        tile.take(queries, begin, end - first, [&] {
            if (next < end) load_keys(tile, place, 0, end - next);
        });
        if (next + STEP < end) next_page = page_of(next + STEP);
        if (next < end) load_values(tile, place, 0, end - next);
        first = next;
        begin = 0;
    }
    tile.template publish<STRIDE>(maxima[its_split][warp], sums[its_split][warp],
                                  weighted_values + block_warp * HEAD_TILE * STRIDE);
    grid_dependency_launch();
    __syncthreads();  // every warp's part is written

    // Partials of this row and tile of heads: [heads][max_splits][PART].
    const size_t first_row = size_t(blockIdx.z) * num_attention_heads + first_head;
    float* const parts = partials + first_row * max_splits * PART;
    for (int i = threadIdx.x; i < heads * VECTORS; i += 32 * NUM_WARPS) {
        const int head = i / VECTORS, vector = i % VECTORS;
        float2 found[SPLITS];
        float4 mixed[SPLITS];
#pragma unroll
        for (int j = 0; j < SPLITS; ++j) {
            if (j >= count) break;
            const WarpMerge<HEAD_TILE> merge(maxima[j], sums[j], head);
            const float* weighted = weighted_values + (j * WARPS * HEAD_TILE + head) * STRIDE + 4 * vector;
            found[j] = make_float2(merge.maximum, merge.sum);
            mixed[j] = merge.mix(weighted, HEAD_TILE * STRIDE);
        }
        const size_t result = (first_row + head) * HEAD_DIM + 4 * vector;
        if (num_splits == 1) {
            const float sum = found[0].y;
            out.store(result, make_float4(mixed[0].x / sum, mixed[0].y / sum, mixed[0].z / sum, mixed[0].w / sum));
        } else if (num_splits == count) {
            SplitMerge merged;
            merged.add(
                count, [&](int j) { return found[min(j, SPLITS - 1)]; },
                [&](int j) { return mixed[min(j, SPLITS - 1)]; });
            out.store(result, merged.result());
        } else {
#pragma unroll
            for (int j = 0; j < SPLITS; ++j) {
                if (j >= count) break;
                float* part = parts + (head * max_splits + first_split + j) * PART;
                *reinterpret_cast<float4*>(part + 4 * vector) = mixed[j];
                if (vector == 0) *reinterpret_cast<float2*>(part + HEAD_DIM) = found[j];
            }
        }
    }
    if (num_splits == count) return;

    __syncthreads();
    if (threadIdx.x == 0) {  // the counter is 0 again for the next launch
        const unsigned last = (num_splits - 1) / share;
        is_last = arrive(counters + blockIdx.z * gridDim.y + blockIdx.y, last) == last;
    }
    __syncthreads();
    if (!is_last) return;

    for (int i = threadIdx.x; i < heads * VECTORS; i += 32 * NUM_WARPS) {
        const int head = i / VECTORS, vector = i % VECTORS;
        out.store((first_row + head) * HEAD_DIM + 4 * vector,
                  merge_splits<HEAD_DIM>(parts + head * max_splits * PART, num_splits, vector));
    }
}
