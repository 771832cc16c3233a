// attention_rows: attention_decode for many lanes in one launch, with the same bits
//           Source: arXiv 2307.08691, flash-decoding; HF LlamaAttention
// Shapes:   as in attention_decode, but partials [num_blocks, min(group, HEAD_TILE), max_splits, HEAD_DIM + 4] float;
//           counters [num_blocks] zeros, zeros again at the end. With unit_inputs out is an image for a matrix with
//           such units (common/wide_image.cuh), without scales, in which these lanes are the tokens from first_token
//           on. parts [num_parts, part_size] float, laid out as q, k and v are: added to these first, in order
// Requires: what attention_decode requires without is_cached; KvT of 16 bits or a code; keys and values
//           aligned to 16; num_lanes <= MAX_LANES. STAGES, SHARED_BYTES and HEAD_BYTES as the launcher works them out
// Launch:   grid (num_blocks), block (224), SHARED_BYTES + min(group, HEAD_TILE) * HEAD_BYTES dynamic shared memory;
//           may overlap the kernel in front of it
// Traffic:  as attention_decode
// Numerics: those of attention_decode, bit by bit, with the same max_splits: the same splits, the same tiles for each
//           of four warps, the same sums in the same order (common/attend.cuh, common/splits.cuh)
// Choice:   A block of attention_decode lives for one split, and waits for three round trips before its first keys
//           arrive. Here the blocks that fit the card share all splits evenly (common/rows_block.cuh); each takes its
//           own one after the other. One warp copies tiles into a ring of shared memory, ahead of four that attend,
//           also across the ends of rows. Two warps prepare the next rows' queries meanwhile, and say what there is to
//           do. A split is merged when the next one is published, so no warp waits for another's tiles. Parts of a
//           row's splits stay in shared memory; those of a row that blocks share go through memory. Code is time here:
//           five roles share the instruction cache. Few rows are slower: a block first works out its share. Figures,
//           and what was tried: docs/log/2026-11-27-attention.md
#include "common/arrival.cuh"
#include "common/launch.cuh"
#include "common/rows_block.cuh"

constexpr int COPIER = WARPS, PREPARER = WARPS + 1;  // warps besides those that attend
constexpr int ATTENDING = 32 * WARPS, THREADS = ATTENDING + 32 * (1 + PREPARERS);
constexpr int BLOCK_BARRIER = 1;  // of the threads that attend

// Waits for the threads that merge vectors of the same heads.
template <int HEAD_DIM>
__device__ __forceinline__ void sync_heads() {
    if constexpr (32 % SharedHeads<HEAD_DIM>::VECTORS == 0) {
        __syncwarp();
    } else {
        sync_threads_of<ATTENDING>(BLOCK_BARRIER);
    }
}

// The warps that attend merge what they have published of a split, number `turn`, and write results. What they need for
// that is worked out here, as no registers are free to keep it.
template <typename KvT, int HEAD_DIM, int HEAD_TILE, int STAGES>
__device__ __forceinline__ void merge_split(const Call<KvT>& call, Shared<KvT, HEAD_DIM, HEAD_TILE, STAGES>& shared,
                                            unsigned char* heads_at, const MixedOutputs& out, const Work& of, int split,
                                            unsigned turn) {
    using Heads = SharedHeads<HEAD_DIM>;
    constexpr int PART = PART_SIZE<HEAD_DIM>;
    const unsigned side = turn % 2;
    const int most_heads = min(number_here(call.group), HEAD_TILE), slot = split % PARTS_AT_ONCE;
    const Heads merging(heads_at, most_heads);
    const int count = of.splits.count, num_vectors = of.heads * Heads::VECTORS;
    // [most_heads][max_splits][PART]
    float* parts = call.partials + size_t(of.home) * most_heads * call.max_splits * PART;
    barrier_wait(&shared.published[side], turn / 2 % 2);
    sync_heads<HEAD_DIM>();  // what was found before has been read
#pragma unroll 1
    for (int i = threadIdx.x; i < num_vectors; i += ATTENDING) {
        const int head = i / Heads::VECTORS, vector = i % Heads::VECTORS;
        const WarpMerge<HEAD_TILE> merge(shared.maxima[side], shared.sums[side], head);
        const float* weighted =
            merging.weighted_values + side * WARPS * merging.warp_stride + head * Heads::STRIDE + 4 * vector;
        const float4 mixed = merge.mix(weighted, merging.warp_stride);
        const float2 found = make_float2(merge.maximum, merge.sum);
        if (of.is_whole()) {
            merging.parts[slot * merging.num_vectors + i] = mixed;
            if (vector == 0) shared.found[slot][head] = found;
        } else {
            float* part = parts + (head * call.max_splits + split) * PART;
            *reinterpret_cast<float4*>(part + 4 * vector) = mixed;
            if (vector == 0) *reinterpret_cast<float2*>(part + HEAD_DIM) = found;
        }
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&shared.merged[side]);

    const bool ends_row = split == count - 1;
    if (of.is_whole()) {
        if (slot < PARTS_AT_ONCE - 1 && !ends_row) return;
        sync_heads<HEAD_DIM>();  // shared.found is written
    } else {
        if (split < of.end_split - 1) return;
        sync_threads_of<ATTENDING>(BLOCK_BARRIER);  // the block's parts are written
        if (threadIdx.x == 0) {
            const unsigned arriving = of.end_split - of.first_split;
            const unsigned before = arrive_with(call.counters + of.home, arriving);
            shared.is_last = before + arriving == count;
            if (shared.is_last) call.counters[of.home] = 0;  // for the next launch
        }
        sync_threads_of<ATTENDING>(BLOCK_BARRIER);
        if (!shared.is_last) return;
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < num_vectors; i += ATTENDING) {
        const int head = i / Heads::VECTORS, vector = i % Heads::VECTORS;
        float4 result;
        if (!of.is_whole()) {
            result = merge_splits<HEAD_DIM>(parts + head * call.max_splits * PART, count, vector);
        } else if (count == 1) {
            const float4 mixed = merging.parts[i];
            const float sum = shared.found[0][head].y;
            result = make_float4(mixed.x / sum, mixed.y / sum, mixed.z / sum, mixed.w / sum);
        } else if (count == 2) {
            result = merge_two(shared.found[0][head], shared.found[1][head], merging.parts[i],
                               merging.parts[merging.num_vectors + i]);
        } else {
            SplitMerge merged;
            if (split >= PARTS_AT_ONCE) {
                merged.found = merging.merged_found[i], merged.mixed = merging.merged_values[i];
            }
            merged.add(
                slot + 1, [&](int j) { return shared.found[j][head]; },
                [&](int j) { return merging.parts[j * merging.num_vectors + i]; });
            if (!ends_row) {
                merging.merged_found[i] = merged.found, merging.merged_values[i] = merged.mixed;
                continue;
            }
            result = merged.result();
        }
        out.store(of.token, of.column + 4 * i, result);
    }
}

// Four warps attend, split by split. A split is merged after the next one is published: no warp waits for one that has
// more tiles of a split.
template <typename KvT, int HEAD_DIM, int HEAD_TILE, int STAGES>
__device__ __forceinline__ void attend(const Call<KvT>& call, Shared<KvT, HEAD_DIM, HEAD_TILE, STAGES>& shared,
                                       unsigned char* heads_at, const MixedOutputs& out) {
    using Tile = Attend<KvT, HEAD_DIM, HEAD_TILE>;
    constexpr int TILE = Tile::TILE_TOKENS;
    unsigned first_index = 0;       // of the split's first tile
    unsigned turn = 0, number = 0;  // of a split, of a piece
    int split = -1;                 // -1: a piece begins
    for (;; ++turn) {
        const bool begins = split < 0;
        if (begins) barrier_wait(&shared.prepared[number % 2], number / 2 % 2);
        const Work& work = shared.works[number % WORKS];
        const bool exists = work.heads > 0;
        if (exists) {
            if (begins) split = work.first_split;
            const unsigned buffer = number % 2, side = turn % 2;
            const int first = work.splits.begin(split), end = work.splits.end(split), visible = work.splits.visible;
            Tile tile;
            tile.clear();
            if (split == work.splits.count - 1 && threadIdx.x < 32) {
                tile.start_with(shared.own_scores[buffer], shared.own_value[buffer]);
            }
            const int warp = number_here(threadIdx.x / 32), lane = number_here(threadIdx.x % 32);
            for (int token = first + warp * TILE; token < end; token += WARPS * TILE) {
                const unsigned index = first_index + (token - first) / TILE, stage = index % STAGES;
                barrier_wait(&shared.filled[stage], index / STAGES % 2);
                const int tile_begin = max(0, visible - token), tile_end = min(end - token, TILE);
                take_from_ring<false>(
                    tile, shared.queries[buffer], shared.ring[stage], tile_begin, tile_end,
                    [&](int, int, int place) { return place >= tile_begin && place < tile_end; });
                __syncwarp();
                if (lane == 0) barrier_arrive(&shared.emptied[stage]);
            }
            first_index += (max(0, end - first) + TILE - 1) / TILE;

            if (turn >= 2) barrier_wait(&shared.merged[side], (turn / 2 - 1) % 2);
            const SharedHeads<HEAD_DIM> merging(heads_at, min(number_here(call.group), HEAD_TILE));
            tile.template publish<SharedHeads<HEAD_DIM>::STRIDE>(
                shared.maxima[side][warp], shared.sums[side][warp],
                merging.weighted_values + (side * WARPS + warp) * merging.warp_stride, work.heads);
            __syncwarp();
            if (lane == 0) barrier_arrive(&shared.published[side]);
        }
        if (turn > 0) {
            const Work& before = shared.works[(begins ? number - 1 : number) % WORKS];
            merge_split(call, shared, heads_at, out, before, begins ? before.end_split - 1 : split - 1, turn - 1);
        }
        if (!exists) break;
        if (++split < work.end_split) continue;
        if (threadIdx.x % 32 == 0) barrier_arrive(&shared.used[number % 2]);
        ++number, split = -1;
    }
}

// Arrays that the previous kernel writes are not __restrict__: the compiler might move their loads before the wait.
template <typename KvT, int HEAD_DIM, int HEAD_TILE, int STAGES, int SHARED_BYTES, int HEAD_BYTES>
__global__ void __launch_bounds__(THREADS, HEAD_DIM > 128 || HEAD_DIM % 32 != 0 || HEAD_TILE > 8 ? 1 : 2)
    attention_rows(const float* q, const float* k, const float* v, int qkv_stride, const float* __restrict__ q_norm,
                   const float* __restrict__ k_norm, float eps, float scale, const float2* __restrict__ cos_sin,
                   const int* rows, const int* positions, const int* page_table, int num_lanes, int pages_per_row,
                   KvT* keys, KvT* values, float* key_scales, float* value_scales, int window,
                   int num_attention_heads, int num_key_value_heads, int max_splits, float* partials,
                   unsigned* counters, void* out_data, int out_is_float, int unit_inputs, int first_token,
                   const float* parts, int num_parts, int part_size) {
    using Tile = Attend<KvT, HEAD_DIM, HEAD_TILE>;
    using Memory = Shared<KvT, HEAD_DIM, HEAD_TILE, STAGES>;
    constexpr int TILE = Tile::TILE_TOKENS;
    static_assert(TILE == PAGE_TOKENS, "a tile is a page");
    static_assert(sizeof(Memory) == SHARED_BYTES, "the launcher knows the size");
    static_assert(SharedHeads<HEAD_DIM>::HEAD_BYTES == HEAD_BYTES, "the launcher knows the size");
    extern __shared__ __align__(128) unsigned char dynamic[];
    Memory& shared = *reinterpret_cast<Memory*>(dynamic);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int group = num_attention_heads / num_key_value_heads, tiles = (group + HEAD_TILE - 1) / HEAD_TILE;
    if (warp == COPIER) {
        shared.table.fill(rows, positions, num_lanes, [&](int position) {
            return Share<TILE, MAX_LANES>::length_of(Splits<TILE>(position, window, max_splits));
        });
    } else if (warp == PREPARER) {
        if (lane < STAGES) {
            barrier_init(&shared.filled[lane], 32);
            barrier_init(&shared.emptied[lane], 1);
        }
        if (lane < 2) {
            barrier_init(&shared.prepared[lane], 1);
            barrier_init(&shared.used[lane], WARPS);
            barrier_init(&shared.published[lane], WARPS);
            barrier_init(&shared.merged[lane], WARPS);
        }
    } else if (warp < WARPS) {  // zeros for heads and dimensions that do not exist
        unsigned* words = reinterpret_cast<unsigned*>(shared.queries);
        for (int i = threadIdx.x; i < sizeof(shared.queries) / 4; i += ATTENDING) words[i] = 0;
        if (threadIdx.x < 2 * HEAD_TILE) shared.own_scores[0][threadIdx.x] = 0.0f;
    }
    __syncthreads();
    if (warp != COPIER) grid_dependency_wait();  // copies of earlier tokens begin before
    if (warp != COPIER) grid_dependency_launch();
    if (shared.table.ends[num_lanes - 1] == 0) return;  // all lanes are unused
    const Share<TILE, MAX_LANES> share(shared.table, num_lanes, num_key_value_heads * tiles, window, max_splits);
    const Call<KvT> call = {{q, k, v, qkv_stride, q_norm, k_norm, eps, scale, cos_sin, page_table, pages_per_row, keys,
                             values, key_scales, value_scales, window, num_attention_heads, num_key_value_heads,
                             max_splits, partials, counters, {out_data, out_is_float}},
                            parts, num_parts, part_size, group, tiles};
    if (warp == COPIER) {
        copy_tiles(call, shared, share);
    } else if (warp >= PREPARER) {
        prepare_queries(call, shared, share, warp - PREPARER, first_token);
    } else {
        const MixedOutputs out = {call.out, unit_inputs, num_attention_heads * HEAD_DIM};
        attend(call, shared, dynamic + sizeof(Memory), out);
    }
}
