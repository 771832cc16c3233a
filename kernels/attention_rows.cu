#include "common/arrival.cuh"
#include "common/attend.cuh"
#include "common/head.cuh"
#include "common/kv_ring.cuh"
#include "common/launch.cuh"
#include "common/load.cuh"
#include "common/shares.cuh"

constexpr int MAX_LANES = 256;
constexpr int THREADS = 32 * (WARPS + 2);
constexpr int LOADER = WARPS, PREPARER = WARPS + 1;
constexpr int HEADS_AT_ONCE = 4;

// The beginning of a block's shared memory. Behind it lie arrays for the heads that there are.
template <typename KvT, int HEAD_DIM, int HEAD_TILE, int STAGES>
struct Shared {
    using Tile = Attend<KvT, HEAD_DIM, HEAD_TILE>;
    alignas(128) unsigned char ring[STAGES][RingTile<KvT, HEAD_DIM>::BYTES];
    typename Tile::Queries queries[2];
    float maxima[2][WARPS][HEAD_TILE], sums[2][WARPS][HEAD_TILE];
    float2 found[PARTS_AT_ONCE][HEAD_TILE];
    float own_scores[2][HEAD_TILE], own_value[2][HEAD_DIM];
    LaneTable<MAX_LANES> table;
    unsigned long long filled[STAGES], emptied[STAGES], prepared[2], used[2];
    int is_last;
};

// What is behind it, of one head: weighted values of two splits of each warp; parts of splits, and what is merged so far.
template <int HEAD_DIM>
struct SharedHead {
    static constexpr int STRIDE = HEAD_DIM + 2;  // two rows of a pair of heads in different banks
    static constexpr int WEIGHTED = 2 * WARPS * STRIDE, PARTS = (PARTS_AT_ONCE + 1) * HEAD_DIM, MERGED = HEAD_DIM / 2;
    static constexpr int FLOATS = WEIGHTED + PARTS + MERGED;
};

template <typename KvT, int HEAD_DIM, int HEAD_TILE, int STAGES, int SHARED_BYTES, int HEAD_BYTES>
__global__ void __launch_bounds__(THREADS, HEAD_DIM > 128 || HEAD_TILE > 8 ? 1 : 2)
    attention_rows(const float* q, const float* k, const float* v, int qkv_stride, const float* __restrict__ q_norm,
                   const float* __restrict__ k_norm, float eps, float scale, const float2* __restrict__ cos_sin,
                   const int* rows, const int* positions, const int* page_table, int num_lanes, int pages_per_row,
                   KvT* keys, KvT* values, float* key_scales, float* value_scales, int window, int is_cached,
                   int num_attention_heads, int num_key_value_heads, int max_splits, float* partials,
                   unsigned* counters, float* __restrict__ out) {
    using Tile = Attend<KvT, HEAD_DIM, HEAD_TILE>;
    using Memory = Shared<KvT, HEAD_DIM, HEAD_TILE, STAGES>;
    using OneHead = SharedHead<HEAD_DIM>;
    using Pairs = Head<HEAD_DIM>;
    constexpr int TILE = Tile::TILE_TOKENS, PART = PART_SIZE<HEAD_DIM>;
    static_assert(TILE == PAGE_TOKENS, "a tile is a page");
    static_assert(sizeof(Memory) == SHARED_BYTES && 4 * OneHead::FLOATS == HEAD_BYTES, "the launcher knows the sizes");
    extern __shared__ __align__(128) unsigned char dynamic[];
    Memory& shared = *reinterpret_cast<Memory*>(dynamic);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int group = num_attention_heads / num_key_value_heads, tiles = (group + HEAD_TILE - 1) / HEAD_TILE;
    if (warp == LOADER) {
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
        }
    } else {
        unsigned* words = reinterpret_cast<unsigned*>(shared.queries);
        for (int i = threadIdx.x; i < sizeof(shared.queries) / 4; i += 32 * WARPS) words[i] = 0;
        if (threadIdx.x < 2 * HEAD_TILE) shared.own_scores[0][threadIdx.x] = 0.0f;
    }
    __syncthreads();
    if (is_cached || warp != LOADER) grid_dependency_wait();
    if (warp != LOADER) grid_dependency_launch();
    if (shared.table.ends[num_lanes - 1] == 0) return;
    Share<TILE, MAX_LANES> share(shared.table, num_lanes, num_key_value_heads * tiles, window, max_splits);
    Piece piece;

    if (warp == LOADER) {
        unsigned index = 0;
        // Pages of up to 32 tiles at a time, known before those in front are copied.
        Piece next = {};
        int next_token = 0, next_end = 0, next_visible = 0, next_page = 0;
        bool has_next = false;
        const auto find_next = [&] {
            next_token += 32 * TILE;
            if (next_token >= next_end) {
                has_next = false;
                do {
                    if (!share.next(next)) return;
                    const Splits<TILE> splits = share.splits_of(next.position);
                    next_token = splits.begin(next.first_split);
                    next_end = splits.end(next.end_split - 1);
                    next_visible = splits.visible;
                } while (next_token >= next_end);
                has_next = true;
            }
            const int page = next_token / TILE + lane;
            if (page * TILE < next_end) {
                next_page = load_here(page_table + size_t(next.row) * pages_per_row + page);
            }
        };
        find_next();
        while (has_next) {
            const int kv_head = next.tile / tiles, token = next_token, visible = next_visible, page = next_page;
            const int end = min(next_end, token + 32 * TILE);
            find_next();
            for (int first = token; first < end; first += TILE, ++index) {
                const unsigned stage = index % STAGES, use = index / STAGES;
                const int this_page = __shfl_sync(0xffffffffu, page, (first - token) / TILE);
                const size_t place = token_place(this_page, num_key_value_heads, kv_head, 0);
                if (use > 0) barrier_wait(&shared.emptied[stage], (use - 1) % 2);
                copy_tile<KvT, HEAD_DIM>(shared.ring[stage], {keys + place * HEAD_DIM, key_scales + place},
                                         {values + place * HEAD_DIM, value_scales + place}, visible - first,
                                         min(end - first, TILE), &shared.filled[stage]);
            }
        }
        copy_async_commit();
        copy_async_wait<0>();
        return;
    }

    if (warp == PREPARER) {
        for (unsigned number = 0; share.next(piece); ++number) {
            const unsigned buffer = number % 2;
            const Splits<TILE> splits = share.splits_of(piece.position);
            const int kv_head = piece.tile / tiles, first_in_group = piece.tile % tiles * HEAD_TILE;
            const int heads = min(HEAD_TILE, group - first_in_group);
            const bool has_own = piece.end_split == splits.count;
            float2 angles[Pairs::PAIRS];
            Pairs::load_angles(cos_sin, piece.position, angles);
            const size_t lane_begin = piece.lane * size_t(qkv_stride);
            const float* new_q = q + lane_begin + (kv_head * group + first_in_group) * HEAD_DIM;
            const int own_page =
                has_own ? load_here(page_table + size_t(piece.row) * pages_per_row + piece.position / PAGE_TOKENS) : 0;
            Pairs own_key, new_value, own_queries[HEADS_AT_ONCE];
            own_key.load(k + lane_begin + kv_head * HEAD_DIM, has_own);
            new_value.load(v + lane_begin + kv_head * HEAD_DIM, has_own);
#pragma unroll
            for (int i = 0; i < HEADS_AT_ONCE; ++i) own_queries[i].load(new_q + i * HEAD_DIM, i < heads);
            if (number >= 2) barrier_wait(&shared.used[buffer], (number / 2 - 1) % 2);
            if (has_own) {
                const bool stores = !is_cached && first_in_group == 0;
                const size_t place = token_place(own_page, num_key_value_heads, kv_head, piece.position);
                own_key.norm_and_rotate(k_norm, eps, angles);
                round_head(own_key, keys + place * HEAD_DIM, key_scales + place, stores);
                round_head(new_value, values + place * HEAD_DIM, value_scales + place, stores);
#pragma unroll
                for (int pair = 0; pair < Pairs::PAIRS; ++pair) {
                    if (!Pairs::has(pair)) continue;
                    shared.own_value[buffer][Pairs::index(pair)] = new_value.first[pair];
                    shared.own_value[buffer][Pairs::index(pair) + Pairs::HALF] = new_value.second[pair];
                }
            }
            for (int begin = 0; begin < heads; begin += HEADS_AT_ONCE) {
#pragma unroll
                for (int i = 0; i < HEADS_AT_ONCE; ++i) {
                    if (begin > 0) own_queries[i].load(new_q + (begin + i) * HEAD_DIM, begin + i < heads);
                }
#pragma unroll
                for (int i = 0; i < HEADS_AT_ONCE; ++i) {
                    const int head = begin + i;
                    if (head >= heads) break;
                    Pairs& query = own_queries[i];
                    query.norm_and_rotate(q_norm, eps, angles);
#pragma unroll
                    for (int pair = 0; pair < Pairs::PAIRS; ++pair) {
                        query.first[pair] *= scale;
                        query.second[pair] *= scale;
                        if (Pairs::has(pair)) {
                            shared.queries[buffer].store(head, Pairs::index(pair), query.first[pair]);
                            shared.queries[buffer].store(head, Pairs::index(pair) + Pairs::HALF, query.second[pair]);
                        }
                    }
                    if (has_own) {
                        const float own_score = query.dot(own_key);
                        if (lane == 0) shared.own_scores[buffer][head] = own_score;
                    }
                }
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(&shared.prepared[buffer]);
        }
        return;
    }

    constexpr int VECTORS = HEAD_DIM / 4;
    const int most_heads = min(group, HEAD_TILE), most_vectors = most_heads * VECTORS;
    float4* split_parts = reinterpret_cast<float4*>(dynamic + sizeof(Memory));  // [PARTS_AT_ONCE][most_vectors]
    float4* merged_values = split_parts + PARTS_AT_ONCE * most_vectors;
    float2* merged_found = reinterpret_cast<float2*>(merged_values + most_vectors);
    float* weighted_values = reinterpret_cast<float*>(merged_found + most_vectors);  // [2][WARPS][most_heads][STRIDE]
    const int warp_stride = most_heads * OneHead::STRIDE;
    Tile tile;
    unsigned begin_index = 0, turn = 0;
    for (unsigned number = 0; share.next(piece); ++number) {
        const unsigned buffer = number % 2;
        const Splits<TILE> splits = share.splits_of(piece.position);
        const int kv_head = piece.tile / tiles, first_in_group = piece.tile % tiles * HEAD_TILE;
        const int heads = min(HEAD_TILE, group - first_in_group);
        float4* result = reinterpret_cast<float4*>(
            out + (size_t(piece.lane) * num_attention_heads + kv_head * group + first_in_group) * HEAD_DIM);
        const bool is_whole = piece.end_split - piece.first_split == splits.count;
        const int home = piece.first_split == 0 ? static_cast<int>(blockIdx.x) : share.home_of(piece.begin);
        float* parts = partials + size_t(home) * most_heads * max_splits * PART;
        barrier_wait(&shared.prepared[buffer], number / 2 % 2);
        for (int split = piece.first_split; split < piece.end_split; ++split) {
            const int first = splits.begin(split), end = splits.end(split);
            tile.clear();
            if (split == splits.count - 1 && warp == 0) {
                tile.start_with(shared.own_scores[buffer], shared.own_value[buffer]);
            }
            for (int token = first + warp * TILE; token < end; token += WARPS * TILE) {
                const unsigned index = begin_index + (token - first) / TILE, stage = index % STAGES;
                const unsigned char* place = shared.ring[stage];
                barrier_wait(&shared.filled[stage], index / STAGES % 2);
                tile.take_from(shared.queries[buffer], RingTokens<KvT, HEAD_DIM, true>(place),
                               RingTokens<KvT, HEAD_DIM, false>(place), max(0, splits.visible - token),
                               min(end - token, TILE), [&] {
                                   __syncwarp();
                                   if (lane == 0) barrier_arrive(&shared.emptied[stage]);
                               });
            }
            begin_index += (max(0, end - first) + TILE - 1) / TILE;
            const unsigned side = turn++ % 2;  // the other side may still be read
            tile.template publish<OneHead::STRIDE>(shared.maxima[side][warp], shared.sums[side][warp],
                                                   weighted_values + (side * WARPS + warp) * warp_stride, heads);
            sync_threads_of<32 * WARPS>(1);  // every warp's part is there
            if (split == piece.end_split - 1 && lane == 0) barrier_arrive(&shared.used[buffer]);
            const int place = split % PARTS_AT_ONCE;
            for (int i = threadIdx.x; i < heads * VECTORS; i += 32 * WARPS) {
                const int head = i / VECTORS, vector = i % VECTORS;
                const WarpMerge<HEAD_TILE> merge(shared.maxima[side], shared.sums[side], head);
                const float* weighted =
                    weighted_values + side * WARPS * warp_stride + head * OneHead::STRIDE + 4 * vector;
                const float2 low = merge.mix_pair(weighted, warp_stride), high = merge.mix_pair(weighted + 2, warp_stride);
                const float4 mixed = make_float4(low.x, low.y, high.x, high.y);
                if (splits.count == 1) {
                    result[i] = make_float4(mixed.x / merge.sum, mixed.y / merge.sum, mixed.z / merge.sum,
                                            mixed.w / merge.sum);
                } else if (is_whole) {
                    split_parts[place * most_vectors + i] = mixed;
                    if (vector == 0) shared.found[place][head] = make_float2(merge.maximum, merge.sum);
                } else {
                    float* part = parts + (head * max_splits + split) * PART;
                    *reinterpret_cast<float4*>(part + 4 * vector) = mixed;
                    if (vector == 0) *reinterpret_cast<float2*>(part + HEAD_DIM) = make_float2(merge.maximum, merge.sum);
                }
            }
            if (!is_whole || splits.count == 1) continue;
            const bool ends_row = split == splits.count - 1;
            if (place < PARTS_AT_ONCE - 1 && !ends_row) continue;
            sync_threads_of<32 * WARPS>(1);  // shared.found is there
            for (int i = threadIdx.x; i < heads * VECTORS; i += 32 * WARPS) {
                SplitMerge merged;
                if (split < PARTS_AT_ONCE) {
                    merged.clear();
                } else {
                    merged.found = merged_found[i], merged.mixed = merged_values[i];
                }
                merged.add(
                    place + 1, [&](int j) { return shared.found[j][i / VECTORS]; },
                    [&](int j) { return split_parts[j * most_vectors + i]; });
                if (ends_row) {
                    result[i] = merged.result();
                } else {
                    merged_found[i] = merged.found, merged_values[i] = merged.mixed;
                }
            }
        }
        if (is_whole) continue;
        sync_threads_of<32 * WARPS>(1);  // the block's parts are written
        if (threadIdx.x == 0) {
            const unsigned some = piece.end_split - piece.first_split;
            const unsigned before = arrive_with(counters + home, some);
            shared.is_last = before + some == splits.count;
            if (shared.is_last) counters[home] = 0;
        }
        sync_threads_of<32 * WARPS>(1);
        if (!shared.is_last) continue;
        for (int i = threadIdx.x; i < heads * VECTORS; i += 32 * WARPS) {
            result[i] = merge_splits<HEAD_DIM>(parts + i / VECTORS * max_splits * PART, splits.count, i % VECTORS);
        }
    }
}
