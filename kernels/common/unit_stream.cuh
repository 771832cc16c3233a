// unit_stream: one warp's way through the weights of a block's items, as asynchronous copies into its ring of slots.
#pragma once

#include "common/mma.cuh"
#include "common/tile.cuh"

// One warp's units in the order of their use: chunk by chunk, tile by tile, the units warp, warp + NUM_WARPS, ...
template <typename WeightT, typename ScaleT, int GROUP_SIZE, bool IS_SYMMETRIC, int ITEM_TILES, int NUM_WARPS>
struct UnitStream {
    using G = Groups<WeightT, GROUP_SIZE>;
    static constexpr int SCALE_VECTORS = G::IS_GROUPED ? G::PER_UNIT * static_cast<int>(sizeof(ScaleT)) : 0;
    static constexpr int ZERO_VECTORS = G::IS_GROUPED && !IS_SYMMETRIC ? G::PER_UNIT : 0;
    static constexpr int SLOT_BYTES = UNIT_BYTES + 16 * (SCALE_VECTORS + ZERO_VECTORS);

    static constexpr int AUX_VECTORS = SCALE_VECTORS + ZERO_VECTORS, AUX_COPIES = (AUX_VECTORS + 31) / 32;

    const unsigned char* tiles;
    const ScaleT* scales;
    const unsigned char* zero_points;
    int num_tiles, num_units, num_groups, chunk_units;
    unsigned long long policy;
    int tile, chunk_begin, unit;
    const unsigned char* source;  // this lane's bytes of the unit
    const unsigned char* aux[AUX_COPIES > 0 ? AUX_COPIES : 1];  // and of its scales and zero points

    __device__ __forceinline__ void begin(int warp, int lane) {
        tile = blockIdx.x * ITEM_TILES;
        chunk_begin = 0;
        unit = warp;
        find_sources(lane);
    }

    // Starts the copies of the next unit, if there is one, as one group. `slot` is this lane's place.
    __device__ __forceinline__ void copy_next(unsigned slot, int warp, int lane) {
        if (unit < num_units) {
            copy_async_streaming(slot, source, policy);
            copy_async_streaming(slot + 512, source + 512, policy);
#pragma unroll
            for (int i = 0; i < AUX_COPIES; ++i) {
                if (32 * i + lane < AUX_VECTORS) copy_async(slot + UNIT_BYTES + 512 * i, aux[i]);
            }
            unit += NUM_WARPS;
            source += NUM_WARPS * UNIT_BYTES;
            if (unit >= min(chunk_begin + chunk_units, num_units)) {
                next_tile(warp);
                find_sources(lane);
            } else {
                constexpr int NEXT_GROUPS = NUM_WARPS / G::UNITS * G::PER_UNIT;
                if constexpr (G::UNITS <= NUM_WARPS) {
#pragma unroll
                    for (int i = 0; i < AUX_COPIES; ++i) {
                        const int bytes = 32 * i + lane < SCALE_VECTORS ? static_cast<int>(sizeof(ScaleT)) : 1;
                        aux[i] += NEXT_GROUPS * TILE_ROWS * bytes;
                    }
                } else {
                    find_sources(lane);
                }
            }
        }
        copy_async_commit();
    }

  private:
    __device__ __forceinline__ void next_tile(int warp) {
        const bool is_last_of_item = ITEM_TILES == 1 || tile % 2 == 1;
        tile += is_last_of_item ? 1 + ITEM_TILES * (static_cast<int>(gridDim.x) - 1) : 1;
        if (tile >= num_tiles) {
            tile = blockIdx.x * ITEM_TILES;
            chunk_begin += chunk_units;
        }
        unit = chunk_begin + warp;  // in the end past the last one
    }
    __device__ __forceinline__ void find_sources(int lane) {
        source = tiles + static_cast<size_t>(tile * num_units + unit) * UNIT_BYTES + 16 * lane;
        const size_t group = tile * num_groups + G::first(unit);
#pragma unroll
        for (int i = 0; i < AUX_COPIES; ++i) {
            const int vector = 32 * i + lane;
            aux[i] = vector < SCALE_VECTORS
                         ? reinterpret_cast<const unsigned char*>(scales + group * TILE_ROWS) + 16 * vector
                         : zero_points + group * TILE_ROWS + 16 * (vector - SCALE_VECTORS);
        }
    }
};
