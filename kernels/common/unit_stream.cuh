// unit_stream: copies one warp's weights, asynchronously and unit by unit, into the warp's ring of slots.
#pragma once

#include "common/mma.cuh"
#include "common/tile.cuh"

// A warp uses units chunk by chunk and, within a chunk, tile by tile: the units warp, warp + TILE_WARPS, ... All blocks
// of a cluster share each tile: TILE_WARPS / BLOCKS of a block's NUM_WARPS warps work on it. `warp` is the number of
// this warp among those of the tile.
template <typename WeightT, typename ScaleT, int GROUP_SIZE, bool IS_SYMMETRIC, int NUM_WARPS, int TILE_WARPS,
          int BLOCKS>
struct UnitStream {
    using G = Groups<WeightT, GROUP_SIZE>;
    static constexpr int PART_WARPS = TILE_WARPS / BLOCKS;
    static constexpr int SCALE_VECTORS = G::IS_GROUPED ? G::PER_UNIT * static_cast<int>(sizeof(ScaleT)) : 0;
    static constexpr int GROUP_VECTORS = TILE_ROWS * sizeof(ScaleT) / 16;  // scales of a group
    static constexpr int ZERO_VECTORS = G::IS_GROUPED && !IS_SYMMETRIC ? G::PER_UNIT : 0;
    static constexpr int AUX_VECTORS = SCALE_VECTORS + ZERO_VECTORS, AUX_COPIES = (AUX_VECTORS + 31) / 32;
    // Whole lines of 128 bytes: a copy that straddles two lines takes two transactions, which slows down all of DRAM.
    static constexpr int SLOT_BYTES = (UNIT_BYTES + 16 * AUX_VECTORS + 127) / 128 * 128;

    const unsigned char* tiles;
    const ScaleT* scales;
    const unsigned char* zero_points;
    int num_tiles, num_units, num_groups, chunk_units;
    unsigned long long policy;
    int tile, chunk_begin, unit;
    // Places of this lane's 16 bytes in the weights, and in scales and zero points, counted in vectors of 16 bytes. No
    // registers are left for pointers.
    unsigned source, aux[AUX_COPIES > 0 ? AUX_COPIES : 1];

    __device__ __forceinline__ void begin(int warp, int lane) {
        tile = first_tile();
        chunk_begin = 0;
        unit = tile < num_tiles ? warp : num_units;  // a block may have none
        find_sources(lane);
    }

    // Starts the copies of the next unit, if there is one, and closes their group. `slot` is this lane's place in it.
    __device__ __forceinline__ void copy_next(unsigned slot, int warp, int lane) {
        if (unit < num_units) {
            const uint4* vectors = reinterpret_cast<const uint4*>(tiles) + source;
            copy_async_streaming(slot, vectors, policy);
            copy_async_streaming(slot + 512, vectors + 32, policy);
#pragma unroll
            for (int i = 0; i < AUX_COPIES; ++i) {
                const void* base = is_scale(i, lane) ? static_cast<const void*>(scales) : zero_points;
                if (32 * i + lane < AUX_VECTORS) {
                    copy_async(slot + UNIT_BYTES + 512 * i, static_cast<const uint4*>(base) + aux[i]);
                }
            }
            unit += TILE_WARPS;
            source += TILE_WARPS * UNIT_VECTORS;
            if (unit >= min(chunk_begin + chunk_units, num_units)) {
                next_tile(warp);
                find_sources(lane);
            } else {
                constexpr int NEXT_GROUPS = TILE_WARPS / G::UNITS * G::PER_UNIT;
                if constexpr (G::UNITS <= TILE_WARPS) {
#pragma unroll
                    for (int i = 0; i < AUX_COPIES; ++i) {
                        aux[i] += NEXT_GROUPS * (is_scale(i, lane) ? GROUP_VECTORS : 1);
                    }
                } else {
                    find_sources(lane);
                }
            }
        }
        copy_async_commit();
    }

private:
    __device__ __forceinline__ static int first_tile() {  // computed anew: no register is left for it
        return blockIdx.x / BLOCKS + threadIdx.x / (32 * PART_WARPS) * (gridDim.x / BLOCKS);
    }
    __device__ __forceinline__ void next_tile(int warp) {
        tile += NUM_WARPS / PART_WARPS * (gridDim.x / BLOCKS);
        if (tile >= num_tiles) {
            tile = first_tile();
            chunk_begin += chunk_units;
        }
        unit = chunk_begin + warp;  // in the end past the last one
    }
    __device__ __forceinline__ static bool is_scale(int i, int lane) {
        return ZERO_VECTORS == 0 || 32 * i + lane < SCALE_VECTORS;
    }
    __device__ __forceinline__ void find_sources(int lane) {
        source = static_cast<unsigned>(tile * num_units + unit) * UNIT_VECTORS + lane;
        const unsigned group = tile * num_groups + G::first(unit);
#pragma unroll
        for (int i = 0; i < AUX_COPIES; ++i) {
            const int vector = 32 * i + lane;
            aux[i] = is_scale(i, lane) ? group * GROUP_VECTORS + vector : group + vector - SCALE_VECTORS;
        }
    }
};
