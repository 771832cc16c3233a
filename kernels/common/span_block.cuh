// span_block: a block of attention_span: the work of a launch, a block's share of it, and its shared memory.
#pragma once

#include "common/kv_ring.cuh"
#include "common/splits.cuh"

constexpr int MAX_SPAN = 8;   // new tokens of a row; also in llmcli/runners/base.py
constexpr int MAX_LANES = 32;
constexpr int TILE_COLUMN_BITS = 3, TILE_COLUMNS = 1 << TILE_COLUMN_BITS;  // of one product

// The new tokens of one row: lanes first_lane, first_lane + 1, ..., at positions position, position + 1, ...
struct Span {
    int row, first_lane, position, num_tokens;

    // The tile in which the first new token lies begins here.
    __device__ __forceinline__ int new_begin() const { return position / PAGE_TOKENS * PAGE_TOKENS; }
};

// All spans of a launch, and their work. The data of a span lie at its first lane. An item is a split of a span for one
// key-value head and up to `columns` columns, which are pairs of a new token and a query head: token * group + head.
// All items form a line: span by span, then head by head, tile of columns by tile, split by split.
struct SpanTable {
    Splits<PAGE_TOKENS> splits[MAX_LANES];  // of every token, also its position
    int rows[MAX_LANES], num_tokens[MAX_LANES];
    int most_splits[MAX_LANES];  // that one of its tokens has
    int ends[MAX_LANES];         // of its items
    unsigned cuts;               // bits of the lanes whose splits do not begin where those of the lane before do
    int column_bits, group;

    __device__ __forceinline__ int columns() const { return 1 << column_bits; }  // of an item at most

    // One warp calls it. Fewer columns an item, down to TILE_COLUMNS, while every block still has at most one.
    template <int MOST_COLUMNS>
    __device__ __forceinline__ void fill(const int* all_rows, const int* all_positions, int num_lanes, int window,
                                         int max_splits, int heads, int its_group) {
        const int lane = threadIdx.x % 32;
        const int row = lane < num_lanes ? load_here(all_rows + lane) : -1;
        const int position = lane < num_lanes ? load_here(all_positions + lane) : 0;
        const Splits<PAGE_TOKENS> its_splits(row >= 0 ? position : 0, window, max_splits);
        const bool is_other = __shfl_up_sync(0xffffffffu, row, 1) != row || lane == 0;
        const unsigned others = __ballot_sync(0xffffffffu, is_other), behind = others & ~((2u << lane) - 1);
        const bool is_first = row >= 0 && is_other;
        const int tokens = (behind == 0 ? 32 : __ffs(behind) - 1) - lane;  // from this lane on
        const bool starts_elsewhere = __shfl_up_sync(0xffffffffu, its_splits.start, 1) != its_splits.start;
        const bool has_other_length = __shfl_up_sync(0xffffffffu, its_splits.tokens, 1) != its_splits.tokens;
        int most = its_splits.count;
#pragma unroll
        for (int distance = 1; distance < MAX_SPAN; distance *= 2) {
            const int other = __shfl_down_sync(0xffffffffu, most, distance);
            if (__shfl_down_sync(0xffffffffu, row, distance) == row) most = max(most, other);
        }
        const int all_columns = tokens * its_group, per_tile = is_first ? heads * most : 0;
        int bits = TILE_COLUMN_BITS, items;
        while (true) {
            items = per_tile * (((all_columns - 1) >> bits) + 1);
            if (1 << bits == MOST_COLUMNS || __reduce_add_sync(0xffffffffu, items) <= gridDim.x) break;
            ++bits;
        }
        int end = items;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, end, distance);
            if (lane >= distance) end += other;
        }
        splits[lane] = its_splits;
        rows[lane] = row;
        num_tokens[lane] = tokens;
        most_splits[lane] = most;
        ends[lane] = end;
        const unsigned its_cuts = __ballot_sync(0xffffffffu, is_other || starts_elsewhere || has_other_length);
        if (lane == 0) cuts = its_cuts, column_bits = bits, group = its_group;
    }
    __device__ __forceinline__ int num_items() const { return ends[MAX_LANES - 1]; }
};

// Consecutive splits of a span for one key-value head and tile of columns.
struct SpanPiece {
    Span span;
    int kv_head, first_column, columns;
    int first_split, end_split, most_splits;
    bool is_last;                       // of the block
    unsigned cuts;                      // bits of the span's tokens: see SpanTable
    const Splits<PAGE_TOKENS>* splits;  // of the span's tokens

    __device__ __forceinline__ bool has_split(int split) const { return split >= first_split && split < end_split; }
    __device__ __forceinline__ bool has_all_splits() const { return end_split - first_split == most_splits; }
    // How many tiles of its columns a team takes: every TEAMS-th.
    template <int TEAMS>
    __device__ __forceinline__ int tiles_of(int team) const {
        return ((columns + TILE_COLUMNS - 1) / TILE_COLUMNS - team + TEAMS - 1) / TEAMS;
    }
    // Whether it ends with one of the new tokens, or has tokens of their tiles: a window may begin a page later for the
    // later ones, and then an earlier split of theirs does. All lanes of a warp call it.
    __device__ __forceinline__ bool has_new() const {
        const Splits<PAGE_TOKENS>& its = splits[min(static_cast<int>(threadIdx.x) % 32, span.num_tokens - 1)];
        return __any_sync(0xffffffffu, end_split >= its.count || its.end(end_split - 1) > span.new_begin());
    }
};

// The line of items, cut into a share for each block, as evenly as possible.
struct SpanCut {
    int part, longer;  // items of a share; the first `longer` blocks have one more

    __device__ __forceinline__ explicit SpanCut(const SpanTable& table) {
        const int blocks = number_here(gridDim.x), items = table.num_items();  // no registers are free to keep it
        part = items <= blocks ? items == blocks : items / blocks;  // few items need no division
        longer = items - part * blocks;
    }
    __device__ __forceinline__ int begin(int block) const { return block * part + min(block, longer); }
    __device__ __forceinline__ int block_of(int item) const {
        const int in_longer = longer * (part + 1);
        return item < in_longer ? item / (part + 1) : longer + (item - in_longer) / part;
    }
};

// Walks over the pieces of this block.
struct SpanShare {
    int item, end;

    __device__ __forceinline__ explicit SpanShare(const SpanTable& table) {
        const SpanCut cut(table);
        const int block = number_here(blockIdx.x);
        item = cut.begin(block);
        end = cut.begin(block + 1);
    }
    __device__ __forceinline__ bool is_over() const { return item >= end; }
    // The next piece; there is one. All lanes of a warp call it.
    __device__ __forceinline__ SpanPiece next(const SpanTable& table) {
        SpanPiece piece;
        const int lane = __popc(__ballot_sync(0xffffffffu, table.ends[threadIdx.x % 32] <= item));
        piece.span = {table.rows[lane], lane, table.splits[lane].position, table.num_tokens[lane]};
        piece.splits = table.splits + lane;
        piece.cuts = table.cuts >> lane;
        piece.most_splits = table.most_splits[lane];
        const int in_span = item - (lane == 0 ? 0 : table.ends[lane - 1]), tile = in_span / piece.most_splits;
        const int all_columns = piece.span.num_tokens * table.group;
        const int tiles = ((all_columns - 1) >> table.column_bits) + 1;
        piece.kv_head = tiles == 1 ? tile : tile / tiles;
        piece.first_column = (tile - piece.kv_head * tiles) << table.column_bits;
        piece.columns = min(table.columns(), all_columns - piece.first_column);
        piece.first_split = in_span - tile * piece.most_splits;
        piece.end_split = min(piece.most_splits, piece.first_split + end - item);
        item += piece.end_split - piece.first_split;
        piece.is_last = is_over();
        return piece;
    }
};

// The blocks that merge the splits of this block's last piece: those that have some of them as their last items. The
// next block may have some too, but continues with others.
struct SpanMergers {
    int rank, count;  // this block among them

    __device__ __forceinline__ SpanMergers(const SpanTable& table, const SpanPiece& piece) {
        const SpanCut cut(table);
        const int block = number_here(blockIdx.x);
        const int begin = cut.begin(block + 1) - piece.end_split, end = begin + piece.most_splits;
        const int first = cut.block_of(begin), last = cut.block_of(end - 1);
        rank = block - first;
        count = last - first + (cut.begin(last + 1) == end);
    }
};

// The new tokens from ... to - 1, whose splits nearly always begin at the same places. And what they see of a split:
// the cached tokens begin ... end - 1; `visible` is the first that any of them sees.
struct SpanPart {
    int from, to, begin, end, visible;

    __device__ __forceinline__ SpanPart(const SpanPiece& piece, int first, int split) {
        const Splits<PAGE_TOKENS>* splits = piece.splits;
        const unsigned cuts = piece.cuts & ~((2u << first) - 1);  // after `first`
        from = first;
        to = cuts == 0 ? piece.span.num_tokens : min(__ffs(cuts) - 1, piece.span.num_tokens);
        begin = splits[from].begin(split);
        end = splits[to - 1].end(split);
        visible = splits[from].visible;
    }
    // What lies in the cache and not in the new tokens' tiles ends here.
    __device__ __forceinline__ int ring_end(const Span& span) const { return min(end, span.new_begin()); }
};

// A column as the block keeps it; token -1 for an unused one. The first tile of columns goes to the first team of
// warps, the second to the second, and so on in turns; a team's columns are adjacent.
struct SpanColumn {
    int token, head;  // of the span's tokens, of all query heads

    template <int COLUMNS, int TEAMS>
    static __device__ __forceinline__ SpanColumn at(int place, const SpanPiece& piece, int group) {
        constexpr int TEAM_TILES = COLUMNS / TEAMS / TILE_COLUMNS;
        const int tile = place / TILE_COLUMNS;
        return of((tile % TEAM_TILES * TEAMS + tile / TEAM_TILES) * TILE_COLUMNS + place % TILE_COLUMNS, piece, group);
    }
    // The piece's column of this number.
    static __device__ __forceinline__ SpanColumn of(int number, const SpanPiece& piece, int group) {
        const int column = piece.first_column + number, token = column / group;
        if (number >= piece.columns) return {-1, 0};
        return {token, piece.kv_head * group + column - token * group};
    }
};

// The first type if CHOOSES_FIRST, else the second.
template <bool CHOOSES_FIRST, typename First, typename Second>
struct EitherType {
    using Type = First;
};
template <typename First, typename Second>
struct EitherType<false, First, Second> {
    using Type = Second;
};
template <bool CHOOSES_FIRST, typename First, typename Second>
using Either = typename EitherType<CHOOSES_FIRST, First, Second>::Type;

template <typename KvType, int HEAD_SIZE, int MOST_COLUMNS, int NUM_STAGES>
struct SpanShared {
    using KvT = KvType;
    using Ring = RingTile<KvT, HEAD_SIZE>;
    static constexpr int HEAD_DIM = HEAD_SIZE, COLUMNS = MOST_COLUMNS, STAGES = NUM_STAGES;
    // Teams of WARPS warps share each tile of tokens, and take different columns.
    static constexpr int TEAMS = COLUMNS > TILE_COLUMNS ? 2 : 1, COPIERS = COLUMNS > TILE_COLUMNS ? 4 : 1;
    static constexpr int ATTENDING_WARPS = TEAMS * WARPS, ATTENDING = 32 * ATTENDING_WARPS;
    static constexpr int THREADS = ATTENDING + 32 * COPIERS;
    // Large blocks are whole groups of four warps. Those that copy leave registers to those that attend. The block has
    // 168 registers a thread, and redistributes all of them.
    static constexpr bool MOVES_REGISTERS = TEAMS > 1;
    static constexpr int MOST_REGISTERS = 216, FEWEST_REGISTERS = 72;
    static_assert(!MOVES_REGISTERS || ATTENDING * MOST_REGISTERS + 32 * COPIERS * FEWEST_REGISTERS <= THREADS * 168,
                  "a block has 168 registers a thread");
    // How a team of up to eight columns attends, and one of sixteen.
    using Eight = Attend<KvT, HEAD_DIM, TILE_COLUMNS>;
    using Sixteen = AttendColumns<KvT, HEAD_DIM>;
    union WideQueries {
        typename Eight::Queries eight;
        typename Sixteen::Queries sixteen;
    };
    struct NarrowQueries {
        typename Eight::Queries eight;
    };
    static constexpr int STRIDE = HEAD_DIM + 2;  // two rows of a pair of columns in different banks
    static constexpr int MIXED = ATTENDING_WARPS * COLUMNS / TEAMS * STRIDE;
    // Blocks that share a multiprocessor have no room to copy while the warps' parts are merged.
    static constexpr bool MIXES_IN_RING = TEAMS == 1;
    static constexpr int RING_BYTES = STAGES * Ring::BYTES;

    alignas(128) unsigned char ring[MIXES_IN_RING && 4 * MIXED > RING_BYTES ? 4 * MIXED : RING_BYTES];
    alignas(128) unsigned char new_tiles[2][Ring::BYTES];  // those in which new tokens lie
    Either<(TEAMS > 1), WideQueries, NarrowQueries> queries[TEAMS];
    float mixed[MIXES_IN_RING ? 4 : MIXED];
    unsigned long long filled[STAGES], emptied[STAGES];
    SpanPiece piece;  // that the block attends to; no registers are free for it
    float own_keys[MAX_SPAN][HEAD_DIM], own_values[MAX_SPAN][HEAD_DIM];
    float own_scores[COLUMNS];
    float maxima[WARPS][COLUMNS], sums[WARPS][COLUMNS];
    SpanTable table;
    SpanShare pieces;  // after `piece`
    SpanColumn columns[COLUMNS];
    int seen_end[COLUMNS];  // the end of what a column sees of a part, 0 if it sees nothing
    int has_own[COLUMNS];   // whether the part ends with the column's own token
    int is_last;

    // [WARPS][COLUMNS][STRIDE], at the end of a part
    __device__ __forceinline__ float* weighted_values() {
        return MIXES_IN_RING ? reinterpret_cast<float*>(ring) : mixed;
    }
    __device__ __forceinline__ unsigned char* stage(unsigned index) { return ring + index % STAGES * Ring::BYTES; }
};

// Rounds a new key or value as the cache holds it; stores it in its place of a tile in shared memory, and in the cache
// if `stores`. All lanes must call it.
template <bool IS_KEYS, typename KvT, int HEAD_DIM>
__device__ __forceinline__ void round_into_tile(Head<HEAD_DIM>& head, unsigned char* tile, int token, KvT* row,
                                                float* row_scale, bool stores) {
    using Tokens = RingTokens<KvT, HEAD_DIM, IS_KEYS>;
    const Tokens tokens(tile);
    const float scale = round_head_with<KvT>(head, [&](int dimension, KvT rounded) {
        const int place = Tokens::offset(token, dimension / 8) + dimension % 8 * static_cast<int>(sizeof(KvT));
        *reinterpret_cast<KvT*>(const_cast<unsigned char*>(tokens.elements) + place) = rounded;
        if (stores) row[dimension] = rounded;
    });
    if constexpr (KvFormat<KvT>::HAS_SCALES) {
        if (threadIdx.x % 32 == 0) {
            const_cast<float*>(tokens.scales)[token] = scale;
            if (stores) *row_scale = scale;
        }
    }
}
