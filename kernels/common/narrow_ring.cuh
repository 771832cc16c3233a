// narrow_ring: how the work of gemm_narrow is cut, and how weights and tokens get to shared memory, a span of 128
// inputs at a time.
//
// Each warp has a ring of slots for its own tile. It copies weights there some spans early, and no other warp reads
// them. Tokens lie in stages, which all warps of both blocks of a cluster read. One thread of each block copies them.
#pragma once

#include "common/cluster.cuh"
#include "common/weight_slot.cuh"
#include "common/wide_output.cuh"

constexpr int NARROW_SHARERS = 2;  // blocks of a cluster
constexpr int SWIGLU_TILES = 16;   // whose 128 outputs are a span of the next product's inputs

// A piece is a cluster's work at a time: TILES of each block, and all inputs or a part of them.
template <int TILES>
struct NarrowWork {
    int rank, num_spans, num_tiles, num_parts, num_pieces, first, stride;

    __device__ __forceinline__ NarrowWork(const WideShape& shape, int rank_in_cluster) {
        rank = rank_in_cluster;
        num_spans = wide_steps(shape.num_inputs) / 2, num_tiles = shape.num_tiles(), num_parts = shape.num_parts;
        // SWIGLU writes whole spans of the next product's inputs.
        num_pieces = num_parts * SWIGLU_TILES / SHARED_TILES * ((num_tiles + SWIGLU_TILES - 1) / SWIGLU_TILES);
        first = blockIdx.x / NARROW_SHARERS, stride = gridDim.x / NARROW_SHARERS;
    }
    __device__ __forceinline__ int begin(int piece) const { return num_spans * (piece % num_parts) / num_parts; }
    __device__ __forceinline__ int end(int piece) const { return num_spans * (piece % num_parts + 1) / num_parts; }
    __device__ __forceinline__ int tile_of(int piece, int warp) const {
        return piece / num_parts * SHARED_TILES + rank * TILES + warp;
    }
    // Spans of all pieces of this cluster.
    __device__ __forceinline__ int num_own_spans() const {
        int count = 0;
        for (int piece = first; piece < num_pieces; piece += stride) count += end(piece) - begin(piece);
        return count;
    }

private:
    static constexpr int SHARED_TILES = NARROW_SHARERS * TILES;
};

// The spans that a warp copies, piece by piece.
template <typename WeightT, typename ScaleT, int WIDENING, int TILES>
struct NarrowSource {
    using Slot = WeightSlot<WeightT, ScaleT, WIDENING>;
    const unsigned char* tiles;
    const ScaleT* scales;
    const unsigned char* zero_points;
    const unsigned char* weights;  // of the current tile and of this lane
    int first_group;               // of the tile
    int piece, span, end;

    __device__ __forceinline__ NarrowSource(const NarrowWork<TILES>& work, const WideShape& shape, int warp,
                                            const unsigned char* all_tiles, const ScaleT* all_scales,
                                            const unsigned char* all_zero_points)
        : tiles(all_tiles), scales(all_scales), zero_points(all_zero_points), piece(work.first) {
        seek(work, shape, warp);
    }

    // Starts copying the next span, and closes a group of copies, which is empty if no span is left.
    __device__ __forceinline__ void copy_next(const NarrowWork<TILES>& work, const WideShape& shape, int warp,
                                              unsigned slot) {
        if (piece < work.num_pieces) {
            copy_span(shape, slot);
            if (++span == end) {
                piece += work.stride;
                if (piece < work.num_pieces) seek(work, shape, warp);
            }
        }
        copy_async_commit();
    }

private:
    __device__ __forceinline__ void seek(const NarrowWork<TILES>& work, const WideShape& shape, int warp) {
        const int tile = min(work.tile_of(piece, warp), work.num_tiles - 1);
        const size_t first_span = static_cast<size_t>(tile) * work.num_spans;
        weights = tiles + first_span * Slot::Weights::SPAN_BYTES + threadIdx.x % 32 * 16;
        first_group = tile * shape.num_groups;
        span = work.begin(piece), end = work.end(piece);
    }
    __device__ __forceinline__ void copy_span(const WideShape& shape, unsigned slot) const {
        const int lane = threadIdx.x % 32;
        const unsigned char* source = weights + static_cast<size_t>(span) * Slot::Weights::SPAN_BYTES;
#pragma unroll
        for (int byte = 0; byte < Slot::Weights::SPAN_BYTES; byte += 512) {
            copy_async(slot + byte + lane * 16, source + byte);
        }
        Slot::copy_scales(scales + first_group * TILE_ROWS, zero_points + first_group * TILE_ROWS, span,
                          shape.group_shift, zero_points != nullptr, slot, lane);
    }
};

// Copies a block's share of tokens, span by span, into the stages of both blocks. One thread calls it.
template <int TOKENS, int STAGES, int TILES>
__device__ __forceinline__ void copy_spans_of_tokens(const NarrowWork<TILES>& work, const unsigned char* image,
                                                     unsigned char* stages, unsigned long long* filled,
                                                     unsigned long long* emptied) {
    constexpr int STEP_BYTES = TOKENS * TOKEN_BYTES, SHARE_BYTES = STEP_BYTES / NARROW_SHARERS;
    const size_t share = work.rank * SHARE_BYTES;
    int stage = 0;
    unsigned parity = 1;
#pragma unroll 1
    for (int piece = work.first; piece < work.num_pieces; piece += work.stride) {
        const int begin = work.begin(piece), end = work.end(piece);
        const unsigned char* source = image + 2 * begin * static_cast<size_t>(IMAGE_STEP_BYTES) + share;
#pragma unroll 1
        for (int span = begin; span < end; ++span) {
            barrier_wait(&emptied[stage], parity);
            barrier_expect(&filled[stage], 2 * STEP_BYTES);
            const unsigned place = shared_address(stages + stage * 2 * STEP_BYTES) + share;
#pragma unroll
            for (int i = 0; i < 2; ++i, source += IMAGE_STEP_BYTES) {
                copy_bulk_to_sharers<NARROW_SHARERS>(place + i * STEP_BYTES, source, SHARE_BYTES, &filled[stage],
                                                     (1 << NARROW_SHARERS) - 1);
            }
            barrier_arrive(&filled[stage]);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}
