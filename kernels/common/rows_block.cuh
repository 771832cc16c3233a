// rows_block: a block of attention_rows: its share of the work, its shared memory, and the warps that copy tiles and
// prepare queries.
#pragma once

#include "common/kv_ring.cuh"
#include "common/splits.cuh"

// The work is shared out evenly among the blocks of the grid. All splits of all lanes and tiles of heads form a line,
// lane by lane. The length of each is its tiles of tokens and SPLIT_WEIGHT; the last one of a row also has ROW_WEIGHT.
// A block takes the splits that begin in its part of the line. So it takes consecutive splits, and shares at most its
// first and last row with other blocks.

// The cost of a split, and of a row, besides their tiles, in tiles.
constexpr int SPLIT_WEIGHT = 1, ROW_WEIGHT = 2;
// If a row begins or ends this close to a part's end, the end moves there: a row that several blocks share costs each
// of them one more round trip.
constexpr int REACH = 8;

// Consecutive splits of one lane and tile of heads.
struct Piece {
    int lane, row, position, tile;
    int first_split, end_split;
    int begin;  // of the lane and tile's first split, in the line
};

// Every lane's row and position, and where it begins in a line of one tile of heads.
template <int MAX_LANES>
struct LaneTable {
    int rows[MAX_LANES], positions[MAX_LANES], ends[MAX_LANES];

    // One warp calls it. Unused lanes have no length.
    template <typename LengthOf>
    __device__ __forceinline__ void fill(const int* all_rows, const int* all_positions, int num_lanes,
                                         LengthOf length_of) {
        constexpr int AT_ONCE = MAX_LANES / 32;
        int some_rows[AT_ONCE], some_positions[AT_ONCE], some_ends[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (32 * i >= num_lanes) break;
            const int lane = 32 * i + threadIdx.x % 32;
            some_rows[i] = lane < num_lanes ? load_here(all_rows + lane) : -1;
            some_positions[i] = lane < num_lanes ? load_here(all_positions + lane) : 0;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (32 * i >= num_lanes) break;
            int end = some_rows[i] >= 0 ? length_of(some_positions[i]) : 0;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                const int other = __shfl_up_sync(0xffffffffu, end, distance);
                if (threadIdx.x % 32 >= distance) end += other;
            }
            some_ends[i] = end;
        }
        int before = 0;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (32 * i >= num_lanes) break;
            const int lane = 32 * i + threadIdx.x % 32;
            rows[lane] = some_rows[i];
            positions[lane] = some_positions[i];
            ends[lane] = before + some_ends[i];
            before += __shfl_sync(0xffffffffu, some_ends[i], 31);
        }
    }
};

// Walks over the pieces of this block.
template <int TILE_TOKENS, int MAX_LANES>
struct Share {
    const LaneTable<MAX_LANES>& table;
    int num_lanes, num_tiles, window, max_splits;
    int part, longer;  // length of a block's part of the line; the first `longer` blocks' parts are longer by 1
    int end;           // of this block's part
    int lane, tile, split;

    static __device__ __forceinline__ int length_of(const Splits<TILE_TOKENS>& splits) {
        return (splits.cached() + TILE_TOKENS - 1) / TILE_TOKENS + splits.count * SPLIT_WEIGHT + ROW_WEIGHT;
    }
    // From one split to the next.
    static __device__ __forceinline__ int distance_of(const Splits<TILE_TOKENS>& splits) {
        return splits.tokens / TILE_TOKENS + SPLIT_WEIGHT;
    }
    __device__ __forceinline__ Splits<TILE_TOKENS> splits_of(int position) const {
        return Splits<TILE_TOKENS>(position, window, max_splits);
    }
    // The block that has the first split of a row which several blocks share.
    __device__ __forceinline__ int home_of(int row_begin) const {
        const int in_longer = longer * (part + 1);
        const int block =
            row_begin < in_longer ? row_begin / (part + 1) : longer + (row_begin - in_longer) / max(1, part);
        return part_begin(block + 1) - row_begin <= reach() ? block + 1 : block;
    }

    // All lanes of a warp call it together.
    __device__ __forceinline__ Share(const LaneTable<MAX_LANES>& lane_table, int lanes, int tiles, int row_window,
                                     int splits_at_most)
        : table(lane_table), num_lanes(lanes), num_tiles(tiles), window(row_window), max_splits(splits_at_most) {
        const int length = table.ends[num_lanes - 1] * num_tiles, blocks = gridDim.x;
        part = length / blocks;
        longer = length - part * blocks;
        int begin = part_begin(blockIdx.x);
        end = part_begin(blockIdx.x + 1);
        int end_lane = 0;
        lane = 0;
        for (int i = threadIdx.x % 32; i < num_lanes; i += 32) {  // lanes that end before these places
            lane += table.ends[i] * num_tiles <= begin;
            end_lane += table.ends[i] * num_tiles <= end;
        }
        lane = warp_sum(lane);
        end_lane = warp_sum(end_lane);
        if (end < length) end = shifted(end, end_lane);
        const int shifted_begin = begin < length ? shifted(begin, lane) : begin;
        if (shifted_begin >= end) {
            lane = num_lanes;
            return;
        }
        const Splits<TILE_TOKENS> splits = splits_of(table.positions[lane]);
        const int distance = distance_of(splits), before = begin - lane_begin(lane);
        tile = before / length_of(splits);
        split = (shifted_begin - lane_begin(lane) - tile * length_of(splits) + distance - 1) / distance;
        if (split >= splits.count) next_tile();
    }

    // The next piece, if there is one.
    __device__ __forceinline__ bool next(Piece& piece) {
        if (lane >= num_lanes) return false;
        piece.lane = lane, piece.tile = tile;
        piece.row = table.rows[lane], piece.position = table.positions[lane];
        const Splits<TILE_TOKENS> splits = splits_of(piece.position);
        const int distance = distance_of(splits);
        piece.begin = lane_begin(lane) + tile * length_of(splits);
        const int left = end - piece.begin;
        if (left <= split * distance) return false;
        piece.first_split = split;
        const int taken = (left + distance - 1) / distance;
        piece.end_split = left >= length_of(splits) ? splits.count : min(splits.count, taken);
        next_tile();
        return true;
    }

private:
    __device__ __forceinline__ int part_begin(int block) const { return block * part + min(block, longer); }
    // Shorter than a part, so that at most one end of a part moves to the same place.
    __device__ __forceinline__ int reach() const { return min(REACH, part / 2); }
    __device__ __forceinline__ int lane_begin(int of_lane) const {
        return of_lane == 0 ? 0 : table.ends[of_lane - 1] * num_tiles;
    }
    // The end of a part, or the end of a row within its reach.
    __device__ __forceinline__ int shifted(int place, int of_lane) const {
        const int row_length = length_of(splits_of(table.positions[of_lane]));
        const int before = (place - lane_begin(of_lane)) % row_length;
        if (before <= reach()) return place - before;
        return row_length - before <= reach() ? place + row_length - before : place;
    }
    __device__ __forceinline__ void next_tile() {
        split = 0;
        if (++tile < num_tiles) return;
        tile = 0;
        do ++lane;
        while (lane < num_lanes && table.rows[lane] < 0);
    }
};

constexpr int MAX_LANES = 256;
// Query heads whose loads run together.
constexpr int HEADS_AT_ONCE = 4;
constexpr int PREPARERS = 2;  // warps

// A piece as the warps that attend need it. `token` and `column` are those of its first output; `home` is the block
// that has the row's first split. The last piece is followed by one without heads.
struct Work {
    Splits<PAGE_TOKENS> splits;
    int first_split, end_split, heads, token, column, home;
    __device__ __forceinline__ bool is_whole() const { return end_split - first_split == splits.count; }
};
// While a piece's last split is merged, one piece may be attended to and two more prepared.
constexpr unsigned WORKS = 4;

// The beginning of a block's shared memory. Queries are prepared for one row while those of another are used.
template <typename KvT, int HEAD_DIM, int HEAD_TILE, int STAGES>
struct Shared {
    alignas(128) unsigned char ring[STAGES][RingTile<KvT, HEAD_DIM>::BYTES];
    typename Attend<KvT, HEAD_DIM, HEAD_TILE>::Queries queries[2];
    float maxima[2][WARPS][HEAD_TILE], sums[2][WARPS][HEAD_TILE];
    Work works[WORKS];
    float2 found[PARTS_AT_ONCE][HEAD_TILE];  // maxima and sums of splits
    float own_scores[2][HEAD_TILE], own_value[2][HEAD_DIM];
    LaneTable<MAX_LANES> table;
    unsigned long long filled[STAGES], emptied[STAGES], prepared[2], used[2], published[2], merged[2];
    int is_last;
};

// The rest of it, for the query heads that exist.
template <int HEAD_DIM>
struct SharedHeads {
    static constexpr int VECTORS = HEAD_DIM / 4;
    static constexpr int STRIDE = HEAD_DIM + 2;  // two rows of a pair of heads in different banks
    static constexpr int HEAD_BYTES = (PARTS_AT_ONCE + 1) * 4 * HEAD_DIM + 8 * VECTORS + 2 * WARPS * 4 * STRIDE;
    int num_vectors, warp_stride;
    float4 *parts, *merged_values;  // [PARTS_AT_ONCE][num_vectors], [num_vectors]
    float2* merged_found;           // [num_vectors]
    float* weighted_values;         // [2][WARPS][heads][STRIDE]

    __device__ __forceinline__ SharedHeads(unsigned char* place, int heads) {
        num_vectors = heads * VECTORS;
        warp_stride = heads * STRIDE;
        parts = reinterpret_cast<float4*>(place);
        merged_values = parts + PARTS_AT_ONCE * num_vectors;
        merged_found = reinterpret_cast<float2*>(merged_values + num_vectors);
        weighted_values = reinterpret_cast<float*>(merged_found + num_vectors);
    }
};

// The arguments of a launch, and values derived from them.
template <typename KvT>
struct Call : LaneCall<KvT> {
    const float* parts;  // [num_parts][part_size], each as q, k and v are
    int num_parts, part_size;
    int group, tiles;  // query heads that share a key-value head; tiles of heads in a group
};

// One warp copies the tiles of all pieces into the ring.
template <typename KvT, int HEAD_DIM, int HEAD_TILE, int STAGES>
__device__ __forceinline__ void copy_tiles(const Call<KvT>& call, Shared<KvT, HEAD_DIM, HEAD_TILE, STAGES>& shared,
                                           Share<PAGE_TOKENS, MAX_LANES> share) {
    constexpr int TILE = PAGE_TOKENS;
    const int lane = threadIdx.x % 32;
    Piece piece;
    // Up to 32 tiles of a piece at a time. Their pages are loaded before the earlier tiles are copied.
    int next_token = 0, next_end = 0, next_page = 0;
    bool has_next = true;
    const auto find_next = [&] {
        next_token += 32 * TILE;
        while (next_token >= next_end) {
            has_next = share.next(piece);
            if (!has_next) return;
            const Splits<TILE> splits = share.splits_of(piece.position);
            next_token = splits.begin(piece.first_split);
            next_end = splits.end(piece.end_split - 1);
        }
        const int page = next_token / TILE + lane;
        if (page * TILE < next_end) next_page = load_here(call.pages(piece.row) + page);
    };
    find_next();
    unsigned index = 0;  // of a tile
    while (has_next) {
        const int kv_head = piece.tile / call.tiles, visible = max(0, piece.position + 1 - call.window);
        const int page = next_page, token = next_token, end = min(next_end, token + 32 * TILE);
        find_next();
        for (int first = token; first < end; first += TILE, ++index) {
            const unsigned stage = index % STAGES, use = index / STAGES;
            const int this_page = __shfl_sync(0xffffffffu, page, (first - token) / TILE);
            if (use > 0) barrier_wait(&shared.emptied[stage], (use - 1) % 2);
            call.template copy_page<HEAD_DIM>(shared.ring[stage], this_page, kv_head, visible - first,
                                              min(end - first, TILE), lane);
            barrier_arrive_behind_copies(&shared.filled[stage]);
        }
    }
    copy_async_commit();
    copy_async_wait<0>();
}

// One of PREPARERS warps prepares its pieces' queries, and appends the rows' own tokens.
template <typename KvT, int HEAD_DIM, int HEAD_TILE, int STAGES>
__device__ __forceinline__ void prepare_queries(const Call<KvT>& call, Shared<KvT, HEAD_DIM, HEAD_TILE, STAGES>& shared,
                                                Share<PAGE_TOKENS, MAX_LANES> share, unsigned preparer,
                                                int first_token) {
    using Pairs = Head<HEAD_DIM>;
    const int lane = threadIdx.x % 32;
    Piece piece;
    for (unsigned number = 0;; ++number) {
        const bool exists = share.next(piece);
        if (number % PREPARERS != preparer) {
            if (!exists) break;
            continue;
        }
        const unsigned buffer = number % 2;
        Work& work = shared.works[number % WORKS];
        if (!exists) {
            if (number >= 2) barrier_wait(&shared.used[buffer], (number / 2 - 1) % 2);
            if (lane == 0) work.heads = 0, barrier_arrive(&shared.prepared[buffer]);
            break;
        }
        const Splits<PAGE_TOKENS> splits = share.splits_of(piece.position);
        const int kv_head = piece.tile / call.tiles, first_in_group = piece.tile % call.tiles * HEAD_TILE;
        const int heads = min(HEAD_TILE, call.group - first_in_group);
        const bool has_own = piece.end_split == splits.count;
        // Load everything that is needed before the first of it is used.
        float2 angles[Pairs::PAIRS];
        Pairs::load_angles(call.cos_sin, piece.position, angles);
        const size_t lane_begin = piece.lane * size_t(call.qkv_stride);
        const float* new_q = call.q + lane_begin + (kv_head * call.group + first_in_group) * HEAD_DIM;
        const float* new_k = call.k + lane_begin + kv_head * HEAD_DIM;
        const float* new_v = call.v + lane_begin + kv_head * HEAD_DIM;
        const int own_page = has_own ? load_here(call.pages(piece.row) + piece.position / PAGE_TOKENS) : 0;
        Pairs own_key, new_value, own_queries[HEADS_AT_ONCE];
        own_key.load(new_k, has_own);
        new_value.load(new_v, has_own);
#pragma unroll
        for (int i = 0; i < HEADS_AT_ONCE; ++i) own_queries[i].load(new_q + i * HEAD_DIM, i < heads);
        // The sums of a product's chunks are added in order.
#pragma unroll 1
        for (int i = 0; i < call.num_parts; ++i) {
            const float* part = call.parts + i * size_t(call.part_size);
            Pairs more_key, more_value, more_queries[HEADS_AT_ONCE];
            more_key.load(part + (new_k - call.q), has_own);
            more_value.load(part + (new_v - call.q), has_own);
#pragma unroll
            for (int j = 0; j < HEADS_AT_ONCE; ++j) {
                more_queries[j].load(part + (new_q - call.q) + j * HEAD_DIM, j < heads);
            }
            own_key.add(more_key), new_value.add(more_value);
#pragma unroll
            for (int j = 0; j < HEADS_AT_ONCE; ++j) own_queries[j].add(more_queries[j]);
        }
        if (number >= 2) barrier_wait(&shared.used[buffer], (number / 2 - 1) % 2);
        if (lane == 0) {
            work = {splits,
                    piece.first_split,
                    piece.end_split,
                    heads,
                    first_token + piece.lane,
                    (kv_head * call.group + first_in_group) * HEAD_DIM,
                    piece.first_split == 0 ? static_cast<int>(blockIdx.x) : share.home_of(piece.begin)};
        }
        if (has_own) {
            const bool stores = first_in_group == 0;
            const size_t place = call.place_of(own_page, kv_head, piece.position);
            own_key.norm_and_rotate(call.k_norm, call.eps, angles);
            round_head(own_key, call.keys + place * HEAD_DIM, call.key_scales + place, stores);
            round_head(new_value, call.values + place * HEAD_DIM, call.value_scales + place, stores);
            new_value.store(shared.own_value[buffer]);
        }
        for (int begin = 0; begin < heads; begin += HEADS_AT_ONCE) {
#pragma unroll
            for (int i = 0; i < HEADS_AT_ONCE; ++i) {
                if (begin == 0) continue;
                const float* more = new_q + (begin + i) * HEAD_DIM;
                own_queries[i].load(more, begin + i < heads);
                if (begin + i < heads) own_queries[i].add(call.parts + (more - call.q), call.num_parts, call.part_size);
            }
#pragma unroll
            for (int i = 0; i < HEADS_AT_ONCE; ++i) {
                const int head = begin + i;
                if (head >= heads) break;
                Pairs& query = own_queries[i];
                query.norm_and_rotate(call.q_norm, call.eps, angles);
                query.scale(call.scale);
                query.each([&](int dimension, float value) { shared.queries[buffer].store(head, dimension, value); });
                if (has_own) {
                    const float own_score = query.dot(own_key);
                    if (lane == 0) shared.own_scores[buffer][head] = own_score;
                }
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.prepared[buffer]);
    }
}
