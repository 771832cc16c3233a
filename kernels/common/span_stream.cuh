// span_stream: copies one warp's weights, asynchronously and span by span, into the warp's ring of slots.
#pragma once

#include "common/mma.cuh"
#include "common/tile.cuh"

// A warp uses spans chunk by chunk and, within a chunk, tile by tile: the spans warp, warp + TILE_WARPS, ... All blocks
// of a cluster share each tile: TILE_WARPS / BLOCKS of a block's NUM_WARPS warps work on it. `warp` is the number of
// this warp among those of the tile.
template <typename WeightT, typename ScaleT, int GROUP_SIZE, bool IS_SYMMETRIC, int NUM_WARPS, int TILE_WARPS,
          int BLOCKS>
struct SpanStream {
    using G = Groups<WeightT, GROUP_SIZE>;
    static constexpr int PART_WARPS = TILE_WARPS / BLOCKS;
    // Scales of half tiles are 8 bytes a group, copied by one lane; `aux` then counts groups.
    static constexpr bool SHARES_SCALES = SCALES_A_HALF<ScaleT> == 1;
    static constexpr int SCALE_BYTES = SCALES_A_TILE<ScaleT> * static_cast<int>(sizeof(ScaleT));  // of a group
    static constexpr int SCALE_VECTORS = !G::IS_GROUPED ? 0 : SHARES_SCALES ? 1 : G::PER_SPAN * SCALE_BYTES / 16;
    static constexpr int GROUP_VECTORS = SHARES_SCALES ? 1 : SCALE_BYTES / 16;
    static_assert(!SHARES_SCALES || (G::IS_GROUPED && G::PER_SPAN == 1 && IS_SYMMETRIC), "blocks are whole spans");
    static constexpr int ZERO_VECTORS = G::IS_GROUPED && !IS_SYMMETRIC ? G::PER_SPAN : 0;
    static constexpr int AUX_VECTORS = SCALE_VECTORS + ZERO_VECTORS, AUX_COPIES = (AUX_VECTORS + 31) / 32;
    static constexpr int SPAN_BYTES = SPAN_UNITS<WeightT> * UNIT_BYTES, SPAN_VECTORS = SPAN_BYTES / 16;
    // Whole lines of 128 bytes: a copy that straddles two lines takes two transactions, which slows down all of DRAM.
    static constexpr int SLOT_BYTES = (SPAN_BYTES + 16 * AUX_VECTORS + 127) / 128 * 128;

    const unsigned char* tiles;
    const ScaleT* scales;
    const unsigned char* zero_points;
    int num_tiles, num_spans, num_groups, chunk_spans;
    unsigned long long policy;
    int tile, chunk_begin, span;
    // Places of this lane's 16 bytes in the weights, and in scales and zero points, counted in vectors of 16 bytes. No
    // registers are free for pointers.
    unsigned source, aux[AUX_COPIES > 0 ? AUX_COPIES : 1];

    __device__ __forceinline__ void begin(int warp, int lane) {
        tile = first_tile();
        chunk_begin = 0;
        span = tile < num_tiles ? warp : num_spans;  // a block may have none
        find_sources(lane);
    }

    // Starts the copies of the next span, if there is one, and closes their group. `slot` is this lane's place in it.
    __device__ __forceinline__ void copy_next(unsigned slot, int warp, int lane) {
        if (span < num_spans) {
            const uint4* vectors = reinterpret_cast<const uint4*>(tiles) + source;
#pragma unroll
            for (int i = 0; i < SPAN_VECTORS; i += 32) copy_async_streaming(slot + 16 * i, vectors + i, policy);
#pragma unroll
            for (int i = 0; i < AUX_COPIES; ++i) {
                const void* base = is_scale(i, lane) ? static_cast<const void*>(scales) : zero_points;
                if constexpr (SHARES_SCALES) {
                    const size_t offset = static_cast<size_t>(SCALE_BYTES) * aux[i];
                    const auto* bytes = static_cast<const unsigned char*>(base) + offset;
                    if (lane == 0) copy_async_small<SCALE_BYTES>(slot + SPAN_BYTES, bytes, true);
                } else if (32 * i + lane < AUX_VECTORS) {
                    copy_async(slot + SPAN_BYTES + 512 * i, static_cast<const uint4*>(base) + aux[i]);
                }
            }
            span += TILE_WARPS;
            source += TILE_WARPS * SPAN_VECTORS;
            if (span >= min(chunk_begin + chunk_spans, num_spans)) {
                next_tile(warp);
                find_sources(lane);
            } else {
                constexpr int NEXT_UNITS = TILE_WARPS * SPAN_UNITS<WeightT>;
                constexpr int NEXT_GROUPS = NEXT_UNITS / G::UNITS * G::PER_UNIT;
                if constexpr (G::UNITS <= NEXT_UNITS) {
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
    __device__ __forceinline__ static int first_tile() {  // recomputed: no register is free for it
        return blockIdx.x / BLOCKS + threadIdx.x / (32 * PART_WARPS) * (gridDim.x / BLOCKS);
    }
    __device__ __forceinline__ void next_tile(int warp) {
        tile += NUM_WARPS / PART_WARPS * (gridDim.x / BLOCKS);
        if (tile >= num_tiles) {
            tile = first_tile();
            chunk_begin += chunk_spans;
        }
        span = chunk_begin + warp;  // at last beyond the last one
    }
    __device__ __forceinline__ static bool is_scale(int i, int lane) {
        return ZERO_VECTORS == 0 || 32 * i + lane < SCALE_VECTORS;
    }
    __device__ __forceinline__ void find_sources(int lane) {
        source = static_cast<unsigned>(tile * num_spans + span) * SPAN_VECTORS + lane;
        const unsigned group = tile * num_groups + G::first(span * SPAN_UNITS<WeightT>);
#pragma unroll
        for (int i = 0; i < AUX_COPIES; ++i) {
            const int vector = 32 * i + lane;
            aux[i] = is_scale(i, lane) ? group * GROUP_VECTORS + vector : group + vector - SCALE_VECTORS;
        }
    }
};
