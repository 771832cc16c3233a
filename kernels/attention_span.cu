// attention_span: attention_decode for lanes of which several belong to one row: each sees those before it
//           Source: arXiv 2307.08691, flash-decoding; HF LlamaAttention
// Shapes:   as in attention_decode, but partials [R, num_attention_heads, max_splits, HEAD_DIM + 4] and counters [R,
//           num_attention_heads]
// Requires: what attention_decode requires without is_cached, but for the rows: lanes of one row, at most MAX_SPAN of
//           at most 32, lie side by side and hold consecutive tokens. KvT of 16 bits or a code; keys and values
//           aligned to 16. STAGES and SHARED_BYTES as the launcher works them out
// Launch:   grid (num_blocks), block (160; with COLUMNS 32 384), SHARED_BYTES dynamic shared memory, or so much that a
//           block is alone on its multiprocessor; may overlap the kernel in front of it. With COLUMNS 8 num_blocks is
//           at least that of splits, each for 8 columns of a head; with COLUMNS 32 at most that of multiprocessors
// Traffic:  that of attention_decode for one lane of each row, times ceil(lanes of it * group / COLUMNS), the further
//           ones mostly from L2
// Numerics: those of attention_decode, bit by bit, with the same max_splits: the same splits, the same tiles for each
//           of four warps, the same sums in the same order. What a token does not see has weight 0; a NaN among the
//           values of a later new token, which no sound model has, so reaches those before it
// Choice:   With lanes by themselves the cache is read anew for each new token, and a launch in front has to append
//           them all. Here pairs of a new token and a head are columns of one product. Some warps copy tiles into a
//           ring of shared memory for others that attend. The new tokens' tiles are made in shared memory: blocks need
//           not wait until others have appended them, and earlier tokens are asked for before the kernel in front has
//           ended. Up to 8 columns three small blocks share a multiprocessor, and each has a split. For more, two teams
//           of warps of one large block take 16 columns each of the same tiles, so that the cache is read once. It goes
//           through its share of all splits and copies ahead, as nothing else runs while a split ends. In short rows
//           a split has fewer columns, so that more blocks take part. Sixteen columns of a team are the rows of its
//           products (common/kv_ring.cuh). The large blocks that have many splits of the same columns wait for
//           each other and put a share of them together each; few splits are put together by the block that ends last,
//           as those of small blocks are. All large blocks run at once: there is at most one a multiprocessor, and a
//           process has one stream on a card (llmcli/kernels/device.py); those of the kernels in front that have not
//           ended run too, and wait for none after them; and those of the next kernel start when all of these have
//           called grid_dependency_launch or ended. On Hopper the warps that copy hand registers to those that attend.
//           Figures: docs/log/2026-11-27-attention.md
#include "common/span_prepare.cuh"

// Some warps copy the tiles of all pieces into the ring, ahead of those that attend. A copier always fills the same
// stages, and the tiles of a warp that attends to a part all come from one copier. So a warp that waits for a stage
// knows that the phase before is over: a parity does not identify earlier phases. If several copiers did not share out
// the stages evenly, one could be a whole ring ahead of another.
template <typename Memory>
__device__ __forceinline__ void copy_pieces(const SpanCall<typename Memory::KvT>& call, Memory& shared) {
    constexpr int TILE = PAGE_TOKENS, STAGES = Memory::STAGES, COPIERS = Memory::COPIERS;
    static_assert(STAGES % COPIERS == 0 && (COPIERS == 1 || COPIERS == WARPS), "a stage has one copier");
    const int lane = threadIdx.x % 32, copier = threadIdx.x / 32 - Memory::ATTENDING_WARPS;
    unsigned index = 0;  // of a tile
    SpanShare pieces(shared.table);
    for (bool is_last = false; !is_last;) {
        const SpanPiece piece = pieces.next(shared.table);
        const Span& span = piece.span;
        is_last = piece.is_last;
        for (int split = piece.first_split; split < piece.end_split; ++split) {
            for (int from = 0; from < span.num_tokens;) {
                const SpanPart part(piece, from, split);
                const int end = part.ring_end(span);
                for (int begin = part.begin; begin < end; begin += 32 * TILE) {
                    const int number = begin / TILE + lane;
                    const int page = number * TILE < end ? load_here(call.pages(span.row) + number) : 0;
                    for (int token = begin; token < min(end, begin + 32 * TILE); token += TILE, ++index) {
                        const int its_page = __shfl_sync(0xffffffffu, page, (token - begin) / TILE);
                        if (index % COPIERS != copier) continue;
                        const unsigned stage = index % STAGES, use = index / STAGES;
                        if (use > 0) barrier_wait(&shared.emptied[stage], (use - 1) % 2);
                        call.template copy_page<Memory::HEAD_DIM>(shared.stage(index), its_page, piece.kv_head,
                                                                  max(0, part.visible - token), TILE, lane);
                        barrier_arrive_behind_copies(&shared.filled[stage]);
                    }
                }
                from = part.to;
                if (Memory::MIXES_IN_RING) sync_threads_of<Memory::THREADS>(BLOCK_BARRIER);  // the ring is free again
            }
        }
    }
    copy_async_commit();
    copy_async_wait<0>();
}

// Merges the warps' parts of a split, as `publish` left them: a result if the column has one split.
template <typename Memory>
__device__ __forceinline__ void mix_part(const SpanCall<typename Memory::KvT>& call, Memory& shared,
                                         const SpanPiece& piece, const SpanPart& part, int split) {
    constexpr int HEAD_DIM = Memory::HEAD_DIM, COLUMNS = Memory::COLUMNS, STRIDE = Memory::STRIDE;
    constexpr int VECTORS = HEAD_DIM / 4, PART = PART_SIZE<HEAD_DIM>;
    for (int i = number_here(threadIdx.x); i < COLUMNS * VECTORS; i += Memory::ATTENDING) {
        const int place = i / VECTORS, vector = i % VECTORS;
        const SpanColumn column = shared.columns[place];
        if (column.token < part.from || column.token >= part.to) continue;
        const int count = piece.splits[column.token].count;
        if (split >= count) continue;
        const WarpMerge<COLUMNS> merge(shared.maxima, shared.sums, place);
        const float* weighted = shared.weighted_values() + place * STRIDE + 4 * vector;
        const float4 mixed = merge.mix(weighted, COLUMNS * STRIDE);
        const size_t head = call.head_of(piece.span, column);
        if (count == 1) {
            call.out.store(
                head * HEAD_DIM + 4 * vector,
                make_float4(mixed.x / merge.sum, mixed.y / merge.sum, mixed.z / merge.sum, mixed.w / merge.sum));
        } else {
            float* its_part = call.partials + (head * call.max_splits + split) * PART;
            *reinterpret_cast<float4*>(its_part + 4 * vector) = mixed;
            if (vector == 0) *reinterpret_cast<float2*>(its_part + HEAD_DIM) = make_float2(merge.maximum, merge.sum);
        }
    }
}

// A warp attends from its team's columns to its tiles of a part of a split. The team has sixteen columns if SIXTEEN,
// else up to eight. Without any, the warp only frees the tiles.
template <bool SIXTEEN, typename Memory>
__device__ __forceinline__ void attend_tiles(const SpanCall<typename Memory::KvT>& call, Memory& shared,
                                             const SpanPiece& piece, const SpanPart& part, unsigned first_index,
                                             bool has_columns) {
    using Tile = Either<SIXTEEN, typename Memory::Sixteen, typename Memory::Eight>;
    constexpr int TILE = PAGE_TOKENS, STAGES = Memory::STAGES, STRIDE = Memory::STRIDE;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % WARPS, team = threadIdx.x / (32 * WARPS);
    const int first_place = team * (Memory::COLUMNS / Memory::TEAMS), new_begin = piece.span.new_begin();
    const auto place_of = [&](int i) { return first_place + (SIXTEEN ? lane / 4 + 8 * i : 2 * (lane % 4) + i); };
    Tile tile;
    tile.clear();
    if (warp == 0) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int place = number_here(place_of(i));
            if (!shared.has_own[place]) continue;
            const float* value = shared.own_values[shared.columns[place].token];
            if constexpr (SIXTEEN) {
                tile.start_column_with(i, shared.own_scores[place], value);
            } else {
                tile.start_column_with(0, i, shared.own_scores[place], value);
            }
        }
    }
    for (int token = part.begin + warp * TILE; token < part.end; token += WARPS * TILE) {
        const bool is_new = token >= new_begin;
        const unsigned index = first_index + (token - part.begin) / TILE, stage = index % STAGES;
        if (!is_new) barrier_wait(&shared.filled[stage], index / STAGES % 2);
        const unsigned char* kept = is_new ? shared.new_tiles[(token - new_begin) / TILE] : shared.stage(index);
        const auto is_seen = [&](int i, int place) {
            const int seen_end = shared.seen_end[place_of(i)];
            return token + place < seen_end && token + place > seen_end - call.window;
        };
        const int begin = max(0, part.visible - token), end = min(part.end - token, TILE);
        if constexpr (SIXTEEN) {
            tile.take(shared.queries[team].sixteen, kept, begin, end, is_seen);
        } else if (has_columns) {
            take_from_ring<true>(tile, shared.queries[team].eight, kept, begin, end,
                                               [&](int, int i, int place) { return is_seen(i, place); });
        }
        __syncwarp();
        if (!is_new && lane == 0) barrier_arrive(&shared.emptied[stage]);
    }
    if (Memory::MIXES_IN_RING) sync_threads_of<Memory::ATTENDING>(ATTENDING_BARRIER);  // no warp reads the ring
    if (!has_columns) return;
    tile.template publish<STRIDE>(shared.maxima[warp] + first_place, shared.sums[warp] + first_place,
                                  shared.weighted_values() + (warp * Memory::COLUMNS + first_place) * STRIDE);
}

// Each team of four warps attends from its columns to a part of a split. `first_index` is that of its first tile.
template <typename Memory>
__device__ __forceinline__ void attend_part(const SpanCall<typename Memory::KvT>& call, Memory& shared,
                                            const SpanPiece& piece, const SpanPart& part, int split,
                                            unsigned first_index) {
    if (threadIdx.x < Memory::COLUMNS) {
        const int token = shared.columns[threadIdx.x].token;
        const int count = token >= part.from && token < part.to ? piece.splits[token].count : 0;
        shared.seen_end[threadIdx.x] = split < count ? piece.span.position + token : 0;
        shared.has_own[threadIdx.x] = split == count - 1;
    }
    sync_threads_of<Memory::ATTENDING>(ATTENDING_BARRIER);  // what the columns see is written
    const int tiles = piece.template tiles_of<Memory::TEAMS>(threadIdx.x / (32 * WARPS));
    if (Memory::TEAMS > 1 && tiles > 1) {
        attend_tiles<(Memory::TEAMS > 1)>(call, shared, piece, part, first_index, true);
    } else {
        attend_tiles<false>(call, shared, piece, part, first_index, tiles > 0);
    }
    sync_threads_of<Memory::ATTENDING>(ATTENDING_BARRIER);  // every warp's part is written
    mix_part(call, shared, piece, part, split);
}

template <typename Memory>
__device__ __forceinline__ void attend_pieces(const SpanCall<typename Memory::KvT>& call, Memory& shared) {
    unsigned index = 0;  // of a tile in the ring
    const SpanPiece& piece = shared.piece;
    if (threadIdx.x == 0) shared.pieces = SpanShare(shared.table);
    do {
        sync_threads_of<Memory::ATTENDING>(ATTENDING_BARRIER);  // the piece before is no longer needed
        if (threadIdx.x < 32) {
            SpanShare pieces = shared.pieces;
            const SpanPiece next = pieces.next(shared.table);
            if (threadIdx.x == 0) shared.piece = next, shared.pieces = pieces;
        }
        sync_threads_of<Memory::ATTENDING>(ATTENDING_BARRIER);  // the piece is written
        prepare(call, shared, piece);
        for (int split = piece.first_split; split < piece.end_split; ++split) {
            for (int from = 0; from < piece.span.num_tokens;) {
                const SpanPart part(piece, from, split);
                attend_part(call, shared, piece, part, split, index);
                index += max(0, part.ring_end(piece.span) - part.begin) / PAGE_TOKENS;
                from = part.to;
                if (Memory::MIXES_IN_RING) sync_threads_of<Memory::THREADS>(BLOCK_BARRIER);  // the ring is free again
            }
        }
        if (piece.most_splits > 1) merge_piece(call, shared, piece);
    } while (!piece.is_last);
}

// Arrays that the previous kernel writes are not __restrict__: the compiler might move their loads before the wait.
template <typename KvT, int HEAD_DIM, int COLUMNS, int STAGES, int SHARED_BYTES, int BLOCKS>
__global__ void __launch_bounds__(SpanShared<KvT, HEAD_DIM, COLUMNS, STAGES>::THREADS, BLOCKS)
    attention_span(const float* q, const float* k, const float* v, int qkv_stride, const float* __restrict__ q_norm,
                   const float* __restrict__ k_norm, float eps, float scale, const float2* __restrict__ cos_sin,
                   const int* rows, const int* positions, const int* page_table, int num_lanes, int pages_per_row,
                   KvT* keys, KvT* values, float* key_scales, float* value_scales, int window, int num_attention_heads,
                   int num_key_value_heads, int max_splits, float* partials, unsigned* __restrict__ counters,
                   void* out_data, int out_is_float) {
    using Memory = SpanShared<KvT, HEAD_DIM, COLUMNS, STAGES>;
    static_assert(Memory::Eight::TILE_TOKENS == PAGE_TOKENS, "a tile is a page");
    static_assert(sizeof(Memory) == SHARED_BYTES, "the launcher knows the size");
    static_assert(!Memory::MOVES_REGISTERS || BLOCKS == 1, "with a second block warps wait for registers forever");
    extern __shared__ __align__(128) unsigned char dynamic[];
    Memory& shared = *reinterpret_cast<Memory*>(dynamic);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == Memory::ATTENDING_WARPS) {
        shared.table.template fill<COLUMNS>(rows, positions, num_lanes, window, max_splits, num_key_value_heads,
                                            num_attention_heads / num_key_value_heads);
    } else if (warp < Memory::ATTENDING_WARPS) {  // zeros in unused places
        if (warp == 0 && lane < STAGES) {
            barrier_init(&shared.filled[lane], 32);
            barrier_init(&shared.emptied[lane], Memory::TEAMS);
        }
        unsigned* words = reinterpret_cast<unsigned*>(&shared.queries);
        for (int i = threadIdx.x; i < sizeof(shared.queries) / 4; i += Memory::ATTENDING) words[i] = 0;
    }
    __syncthreads();
    if (shared.table.num_items() == 0) grid_dependency_wait();  // all lanes are unused; rule 1 of launch.cuh
    if (SpanShare(shared.table).is_over()) return;
    const SpanCall<KvT> call = {{q, k, v, qkv_stride, q_norm, k_norm, eps, scale, cos_sin, page_table, pages_per_row,
                                 keys, values, key_scales, value_scales, window, num_attention_heads,
                                 num_key_value_heads, max_splits, partials, counters, {out_data, out_is_float}}};
    if (warp < Memory::ATTENDING_WARPS) {
        if constexpr (Memory::MOVES_REGISTERS) registers_up_to<Memory::MOST_REGISTERS>();
        attend_pieces(call, shared);
    } else {
        if constexpr (Memory::MOVES_REGISTERS) registers_down_to<Memory::FEWEST_REGISTERS>();
        copy_pieces(call, shared);
    }
}
