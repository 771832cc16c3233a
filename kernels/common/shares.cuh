// shares: shares the work of attention of decoding out evenly among the blocks of a grid.
// All splits of all lanes and tiles of heads form a line, lane by lane. The length of each is its tiles of tokens and
// SPLIT_WEIGHT; the last one of a row also has ROW_WEIGHT. A block takes the splits that begin in its part of the line.
// So it takes consecutive splits, and shares at most its first and last row with other blocks.
#pragma once

#include "common/load.cuh"
#include "common/reduce.cuh"
#include "common/splits.cuh"

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
