// attention_span: attention_decode for lanes of which several belong to one row: each sees those before it
//           Source: arXiv 2307.08691, flash-decoding; HF LlamaAttention
// Shapes:   as in attention_decode, but counters [num_spans, grid y] zeros, zeros again at the end
// Requires: what attention_decode requires without is_cached, but for the rows: lanes of one row, at most MAX_SPAN of
//           at most 32, lie side by side and hold consecutive tokens. KvT of 16 bits or a code; keys and values
//           aligned to 16. STAGES and SHARED_BYTES as the launcher works them out
// Launch:   grid (num_splits, num_key_value_heads * ceil(columns / 8), num_spans), block (160), SHARED_BYTES dynamic
//           shared memory; may overlap the kernel in front of it. `columns` are the most lanes of a row times group
// Traffic:  that of attention_decode for one lane of each row, times ceil(columns / 8), the further ones mostly from L2
// Numerics: those of attention_decode, bit by bit, if its grid has as many splits: the same splits, the same tiles for
//           each of four warps, the same sums in the same order. What a token does not see has weight 0; a NaN among
//           the values of a later new token, which no sound model has, so reaches those before it
// Choice:   With lanes by themselves the cache is read anew for each new token, and a launch in front has to append
//           them all. Here pairs of a new token and a head are columns of one product. One warp copies tiles into a
//           ring of shared memory for four that attend. The new tokens' tiles are made in shared memory: blocks need
//           not wait until others have appended them, and earlier tokens are asked for before the kernel in front has
//           ended. Rejected, with figures in docs/performance/attention.md: 16 and 32 columns in a block
#include "common/arrival.cuh"
#include "common/launch.cuh"
#include "common/span_block.cuh"

constexpr int COPIER = WARPS, ATTENDING = 32 * WARPS, THREADS = ATTENDING + 32;
constexpr int BLOCK_BARRIER = 1, ATTENDING_BARRIER = 2;  // of all threads, and of those that attend

// Arrays that the kernel in front writes are not __restrict__: the compiler might move their loads before the wait.
template <typename KvT, int HEAD_DIM, int STAGES, int SHARED_BYTES, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    attention_span(const float* q, const float* k, const float* v, int qkv_stride, const float* __restrict__ q_norm,
                   const float* __restrict__ k_norm, float eps, float scale, const float2* __restrict__ cos_sin,
                   const int* rows, const int* positions, const int* page_table, int num_lanes, int pages_per_row,
                   KvT* keys, KvT* values, float* key_scales, float* value_scales, int window, int num_attention_heads,
                   int num_key_value_heads, float* partials, unsigned* __restrict__ counters,
                   float* __restrict__ out) {
    using Tile = Attend<KvT, HEAD_DIM, COLUMNS>;
    using Pairs = Head<HEAD_DIM>;
    using Memory = SpanShared<KvT, HEAD_DIM, STAGES>;
    constexpr int TILE = Tile::TILE_TOKENS, PART = PART_SIZE<HEAD_DIM>;
    constexpr int VECTORS = HEAD_DIM / 4, STRIDE = Memory::STRIDE;
    static_assert(TILE == PAGE_TOKENS, "a tile is a page");
    static_assert(sizeof(Memory) == SHARED_BYTES, "the launcher knows the size");
    extern __shared__ __align__(128) unsigned char dynamic[];
    Memory& shared = *reinterpret_cast<Memory*>(dynamic);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, split = blockIdx.x;
    const int its_group = num_attention_heads / num_key_value_heads, tiles = gridDim.y / num_key_value_heads;
    const int its_first_column = blockIdx.y % tiles * COLUMNS;
    const Span its_span(rows, positions, num_lanes, blockIdx.z);
    const int its_columns = min(COLUMNS, its_span.num_tokens * its_group - its_first_column);
    if (its_columns <= 0) {  // no such span, or a short one; still wait: rule 1 of launch.cuh
        grid_dependency_wait();
        return;
    }
    const Splits<TILE> its_splits(its_span.position + min(lane, its_span.num_tokens - 1), window, gridDim.x);
    const int its_most_splits = __reduce_max_sync(0xffffffffu, its_splits.count);
    if (split >= its_most_splits) return;  // other blocks of this row wait for the kernel in front
    // Whether this split ends with one of the new tokens, or has tokens of their tiles: a window may begin a page later
    // for the later ones, and then an earlier split of theirs does.
    const bool has_new = __any_sync(
        0xffffffffu, split >= its_splits.count - 1 || its_splits.end(split) > its_span.new_begin());
    if (warp == COPIER && lane < STAGES) {
        barrier_init(&shared.filled[lane], 32);
        barrier_init(&shared.emptied[lane], 1);
        if (lane == 0) barrier_init(&shared.older, 32);
    }
    if (warp == 0) {
        if (lane < its_span.num_tokens) shared.splits[lane] = its_splits;
        if (lane < COLUMNS) shared.tokens[lane] = (its_first_column + lane) / its_group;
        if (lane == 0) {
            shared.span = its_span;
            shared.group = its_group, shared.kv_head = blockIdx.y / tiles;
            shared.first_column = its_first_column, shared.columns = its_columns, shared.most_splits = its_most_splits;
        }
    }
    __syncthreads();
    const Span& span = shared.span;
    const int &kv_head = shared.kv_head, &first_column = shared.first_column, &columns = shared.columns;
    const auto pages = [&] { return page_table + size_t(span.row) * pages_per_row; };
    const auto place_of = [&](int page, int token) { return token_place(page, num_key_value_heads, kv_head, token); };

    if (warp == COPIER) {
        const auto copy = [&](unsigned char* to, int page, int begin, int end, unsigned long long* barrier) {
            const size_t place = place_of(page, 0);
            copy_tile<KvT, HEAD_DIM>(to, {keys + place * HEAD_DIM, key_scales + place},
                                     {values + place * HEAD_DIM, value_scales + place}, begin, end, barrier);
        };
        unsigned index = 0;
        for (int from = 0; from < span.num_tokens;) {
            const SpanPart part(shared.splits, span.num_tokens, from, split);
            const int end = min(part.end, span.new_begin());
            for (int begin = part.begin; begin < end; begin += 32 * TILE) {
                const int page = begin + lane * TILE < end ? load_here(pages() + begin / TILE + lane) : 0;
                for (int token = begin; token < min(end, begin + 32 * TILE); token += TILE, ++index) {
                    const unsigned use = index / STAGES;
                    if (use > 0) barrier_wait(&shared.emptied[index % STAGES], (use - 1) % 2);
                    copy(shared.stage(index), __shfl_sync(0xffffffffu, page, (token - begin) / TILE),
                         max(0, part.visible - token), TILE, &shared.filled[index % STAGES]);
                }
            }
            if (from == 0) {  // older tokens in the tile of the first new one
                const int token = span.new_begin(), end_of_older = has_new ? span.position - token : 0;
                const int page = end_of_older > 0 ? load_here(pages() + token / TILE) : 0;
                copy(shared.new_tiles[0], page, max(0, part.visible - token), end_of_older, &shared.older);
            }
            from = part.to;
            if (from < span.num_tokens) sync_threads_of<THREADS>(BLOCK_BARRIER);  // the ring is free again
        }
        copy_async_commit();
        copy_async_wait<0>();
        return;
    }

    // New keys, values and queries are shared out over the warps, and asked for together.
    constexpr int NEW = 2 * MAX_SPAN / WARPS, QUERIES = COLUMNS / WARPS;
    float2 new_angles[NEW][Pairs::PAIRS], query_angles[QUERIES][Pairs::PAIRS];
    Pairs made[NEW], queries[QUERIES];
    const auto new_token = [&](int i) { return (warp + i * WARPS) % MAX_SPAN; };
    const auto is_value = [&](int i) { return warp + i * WARPS >= MAX_SPAN; };
    const auto exists = [&](int i) { return has_new && new_token(i) < span.num_tokens; };
    const auto column_of = [&](int i) { return min(warp + i * WARPS, columns - 1); };
    const auto head_of = [&](int column) {
        return kv_head * shared.group + first_column + column - shared.tokens[column] * shared.group;
    };
#pragma unroll
    for (int i = 0; i < NEW; ++i) {
        Pairs::load_angles(cos_sin, span.position + (exists(i) ? new_token(i) : 0), new_angles[i]);
    }
#pragma unroll
    for (int i = 0; i < QUERIES; ++i) {
        Pairs::load_angles(cos_sin, span.position + shared.tokens[column_of(i)], query_angles[i]);
    }
    int new_pages[NEW];
#pragma unroll
    for (int i = 0; i < NEW; ++i) {
        new_pages[i] = exists(i) ? load_here(pages() + (span.position + new_token(i)) / PAGE_TOKENS) : 0;
    }
    unsigned* words = reinterpret_cast<unsigned*>(&shared.queries);  // zeros in places that there are not
    for (int i = threadIdx.x; i < sizeof(shared.queries) / 4; i += ATTENDING) words[i] = 0;
    grid_dependency_wait();
    grid_dependency_launch();
#pragma unroll
    for (int i = 0; i < NEW; ++i) {
        const size_t lane_begin = (span.first_lane + new_token(i)) * size_t(qkv_stride);
        made[i].load((is_value(i) ? v : k) + lane_begin + kv_head * HEAD_DIM, exists(i));
    }
#pragma unroll
    for (int i = 0; i < QUERIES; ++i) {
        const int column = column_of(i);
        const size_t lane_begin = (span.first_lane + shared.tokens[column]) * size_t(qkv_stride);
        queries[i].load(q + lane_begin + head_of(column) * HEAD_DIM, true);
    }
#pragma unroll
    for (int i = 0; i < NEW; ++i) {
        if (!exists(i)) continue;
        const int token = new_token(i), position = span.position + token, place = position % PAGE_TOKENS;
        const bool stores = first_column == 0 && split == shared.splits[token].count - 1;
        const size_t cached = place_of(new_pages[i], position);
        unsigned char* tile = shared.new_tiles[(position - span.new_begin()) / TILE];
        if (is_value(i)) {
            round_into_tile<false>(made[i], tile, place, values + cached * HEAD_DIM, value_scales + cached, stores);
        } else {
            made[i].norm_and_rotate(k_norm, eps, new_angles[i]);
            round_into_tile<true>(made[i], tile, place, keys + cached * HEAD_DIM, key_scales + cached, stores);
        }
        float* own = is_value(i) ? shared.own_values[token] : shared.own_keys[token];
#pragma unroll
        for (int pair = 0; pair < Pairs::PAIRS; ++pair) {
            if (!Pairs::has(pair)) continue;
            own[Pairs::index(pair)] = made[i].first[pair];
            own[Pairs::index(pair) + Pairs::HALF] = made[i].second[pair];
        }
    }
    sync_threads_of<ATTENDING>(ATTENDING_BARRIER);  // own keys and values are there, and zeros
#pragma unroll
    for (int i = 0; i < QUERIES; ++i) {
        const int column = warp + i * WARPS, token = shared.tokens[column_of(i)];
        if (column >= columns) break;
        Pairs& query = queries[i];
        query.norm_and_rotate(q_norm, eps, query_angles[i]);
#pragma unroll
        for (int pair = 0; pair < Pairs::PAIRS; ++pair) {
            query.first[pair] *= scale;
            query.second[pair] *= scale;
            if (!Pairs::has(pair)) continue;
            shared.queries.store(column, Pairs::index(pair), query.first[pair]);
            shared.queries.store(column, Pairs::index(pair) + Pairs::HALF, query.second[pair]);
        }
        if (split == shared.splits[token].count - 1) {
            Pairs own_key;
#pragma unroll
            for (int pair = 0; pair < Pairs::PAIRS; ++pair) {
                const bool has = Pairs::has(pair);
                own_key.first[pair] = has ? shared.own_keys[token][Pairs::index(pair)] : 0.0f;
                own_key.second[pair] = has ? shared.own_keys[token][Pairs::index(pair) + Pairs::HALF] : 0.0f;
            }
            const float own_score = query.dot(own_key);
            if (lane == 0) shared.own_scores[column] = own_score;
        }
    }
    sync_threads_of<ATTENDING>(ATTENDING_BARRIER);  // queries and own scores are there

    unsigned first_index = 0;  // of a part's tiles in the ring
    for (int from = 0; from < span.num_tokens;) {
        const SpanPart part(shared.splits, span.num_tokens, from, split);
        Tile tile;
        tile.clear();
        if (threadIdx.x < COLUMNS) {
            const int token = shared.tokens[threadIdx.x], column = threadIdx.x;
            const bool is_in_part = column < columns && token >= part.from && token < part.to;
            const int count = is_in_part ? shared.splits[token].count : 0;
            shared.seen_end[column] = split < count ? span.position + token : 0;
            shared.has_own[column] = split == count - 1;
        }
        sync_threads_of<ATTENDING>(ATTENDING_BARRIER);  // what the columns see is there
        if (warp == 0) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int column = 2 * (lane % 4) + i;
                if (!shared.has_own[column]) continue;
                tile.start_column_with(0, i, shared.own_scores[column], shared.own_values[shared.tokens[column]]);
            }
        }
        const int new_begin = span.new_begin();
        for (int token = part.begin + warp * TILE; token < part.end; token += WARPS * TILE) {
            const bool is_new = token >= new_begin;
            const unsigned index = first_index + (token - part.begin) / TILE, stage = index % STAGES;
            barrier_wait(is_new ? &shared.older : &shared.filled[stage], is_new ? 0 : index / STAGES % 2);
            take_from_ring<true>(
                tile, shared.queries,
                is_new ? shared.new_tiles[(token - new_begin) / TILE] : shared.stage(index),
                max(0, part.visible - token), min(part.end - token, TILE),
                [&](int, int i, int place) {
                    const int seen_end = shared.seen_end[2 * (lane % 4) + i];
                    return token + place < seen_end && token + place > seen_end - window;
                },
                [&] {
                    __syncwarp();
                    if (!is_new && lane == 0) barrier_arrive(&shared.emptied[stage]);
                });
        }
        first_index += max(0, min(part.end, new_begin) - part.begin) / TILE;

        sync_threads_of<ATTENDING>(ATTENDING_BARRIER);  // nobody reads the ring
        float* weighted_values = shared.weighted_values();
        tile.template publish<STRIDE>(shared.maxima[warp], shared.sums[warp],
                                      weighted_values + warp * COLUMNS * STRIDE);
        sync_threads_of<ATTENDING>(ATTENDING_BARRIER);  // every warp's part is there
        for (int i = threadIdx.x; i < columns * VECTORS; i += ATTENDING) {
            const int column = i / VECTORS, vector = i % VECTORS, token = shared.tokens[column];
            const int count = shared.splits[token].count;
            if (token < part.from || token >= part.to || split >= count) continue;
            const WarpMerge<COLUMNS> merge(shared.maxima, shared.sums, column);
            const float* weighted = weighted_values + column * STRIDE + 4 * vector;
            const float2 low = merge.mix_pair(weighted, COLUMNS * STRIDE);
            const float2 high = merge.mix_pair(weighted + 2, COLUMNS * STRIDE);
            const size_t head = size_t(span.first_lane + token) * num_attention_heads + head_of(column);
            if (count == 1) {
                *reinterpret_cast<float4*>(out + head * HEAD_DIM + 4 * vector) =
                    make_float4(low.x / merge.sum, low.y / merge.sum, high.x / merge.sum, high.y / merge.sum);
            } else {
                float* its_part = partials + (head * gridDim.x + split) * PART;
                *reinterpret_cast<float4*>(its_part + 4 * vector) = make_float4(low.x, low.y, high.x, high.y);
                if (vector == 0) {
                    *reinterpret_cast<float2*>(its_part + HEAD_DIM) = make_float2(merge.maximum, merge.sum);
                }
            }
        }
        from = part.to;
        if (from < span.num_tokens) sync_threads_of<THREADS>(BLOCK_BARRIER);  // the ring is free again
    }
    if (shared.most_splits == 1) return;

    sync_threads_of<ATTENDING>(ATTENDING_BARRIER);
    if (threadIdx.x == 0) {  // the counter is 0 again for the next launch
        const unsigned last = shared.most_splits - 1;
        shared.is_last = arrive(counters + blockIdx.z * gridDim.y + blockIdx.y, last) == last;
    }
    sync_threads_of<ATTENDING>(ATTENDING_BARRIER);
    if (!shared.is_last) return;
    for (int i = threadIdx.x; i < columns * VECTORS; i += ATTENDING) {
        const int column = i / VECTORS, vector = i % VECTORS, token = shared.tokens[column];
        const int count = shared.splits[token].count;
        const size_t head = size_t(span.first_lane + token) * num_attention_heads + head_of(column);
        if (count == 1) continue;
        *reinterpret_cast<float4*>(out + head * HEAD_DIM + 4 * vector) =
            merge_splits<HEAD_DIM>(partials + head * gridDim.x * PART, count, vector);
    }
}
