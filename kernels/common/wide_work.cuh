// wide_work: how a launch of gemm_wide is cut into work, and the two warps of a block that copy.
#pragma once

#include "common/cluster.cuh"
#include "common/load.cuh"
#include "common/wide_output.cuh"
#include "common/wide_weights.cuh"

constexpr int SHARERS = 2;  // blocks of a cluster, which share tokens

// An item is the product of 256 outputs and TOKENS tokens; a piece is a part of an item's inputs, mostly all of them.
template <int TOKENS>
struct WideWork {
    static constexpr int STEP_BYTES = TOKENS * TOKEN_BYTES;
    int rank, num_steps, num_tiles, num_token_blocks, num_parts, num_pieces, first, stride;
    bool is_split;  // the 64 results of SWIGLU must be a step of the next product's inputs

    __device__ __forceinline__ WideWork(const WideShape& shape, int rank_in_cluster) {
        rank = rank_in_cluster;
        num_steps = wide_steps(shape.num_inputs), num_tiles = shape.num_tiles(), num_parts = shape.num_parts;
        num_token_blocks = (shape.num_tokens + TOKENS - 1) / TOKENS;
        num_pieces = num_parts * num_token_blocks *
                     ((num_tiles + SHARERS * MULTIPLIERS - 1) / (SHARERS * MULTIPLIERS));
        first = blockIdx.x / SHARERS, stride = gridDim.x / SHARERS;
        is_split = shape.epilogue == SWIGLU && shape.down_unit_inputs == 128;
    }
    __device__ __forceinline__ int item_of(int piece) const { return piece / num_parts; }
    __device__ __forceinline__ int first_span(int part) const { return num_steps / 2 * part / num_parts; }
    __device__ __forceinline__ int begin(int piece) const { return first_span(piece % num_parts); }
    __device__ __forceinline__ int end(int piece) const { return first_span(piece % num_parts + 1); }
    __device__ __forceinline__ int tile_of(int item, int warp) const {
        const int block = item / num_token_blocks;
        return block * SHARERS * MULTIPLIERS +
               (is_split ? warp / 2 * 4 + rank * 2 + warp % 2 : rank * MULTIPLIERS + warp);
    }
    // Where `byte` of a step of an item's tokens lies in an image of `steps` steps.
    __device__ __forceinline__ size_t image_place(int item, int step, int steps, int byte) const {
        byte += item % num_token_blocks * STEP_BYTES;
        const size_t image_step = static_cast<size_t>(byte / IMAGE_STEP_BYTES) * steps + step;
        return image_step * IMAGE_STEP_BYTES + byte % IMAGE_STEP_BYTES;
    }
};

// Copies a block's share of tokens, step by step, into the stages of both blocks. A whole warp calls it; with
// FETCHES_AHEAD it also fetches the weights of all warps, so that they are in L2 when these load them.
template <typename Weights, bool FETCHES_AHEAD, int STAGES, int TOKENS, typename ScaleT>
__device__ __forceinline__ void copy_tokens(const WideWork<TOKENS>& work, const WideShape& shape,
                                            const unsigned char* tiles, const ScaleT* scales,
                                            const unsigned char* image, unsigned char* stages,
                                            unsigned long long* filled, unsigned long long* emptied) {
    constexpr int STEP_BYTES = WideWork<TOKENS>::STEP_BYTES, PART_BYTES = STEP_BYTES / SHARERS;
    const int lane = threadIdx.x % 32;
    const bool fetches = FETCHES_AHEAD && lane < MULTIPLIERS && work.num_token_blocks == 1;
    int stage = 0;
    unsigned parity = 1;
#pragma unroll 1
    for (int piece = work.first; piece < work.num_pieces; piece += work.stride) {
        const int item = work.item_of(piece), first = 2 * work.begin(piece), end = 2 * work.end(piece);
        const unsigned char* source = image + work.image_place(item, first, work.num_steps, work.rank * PART_BYTES);
        const size_t tile = min(work.tile_of(item, lane % MULTIPLIERS), work.num_tiles - 1);
        const unsigned char* ahead = tiles + tile * work.num_steps * (STEP_INPUTS * UNIT_BYTES / Weights::UNIT_INPUTS);
        const ScaleT* ahead_scales = scales + tile * shape.num_groups * TILE_ROWS;
#pragma unroll 1
        for (int step = first; step < end; ++step, source += IMAGE_STEP_BYTES) {
            barrier_wait(&emptied[stage], parity);
            if (lane == 0) {
                barrier_expect(&filled[stage], STEP_BYTES);
                copy_bulk_to_sharers<SHARERS>(shared_address(stages + stage * STEP_BYTES + work.rank * PART_BYTES),
                                              source, PART_BYTES, &filled[stage], (1 << SHARERS) - 1);
                barrier_arrive(&filled[stage]);
            }
            if (fetches && step % 2 == 0) {
                prefetch_bulk(ahead + static_cast<size_t>(step / 2) * Weights::SPAN_BYTES, Weights::SPAN_BYTES);
                if (shape.num_groups > 0) {
                    prefetch_line(ahead_scales + (step * STEP_INPUTS >> shape.group_shift) * TILE_ROWS);
                }
            }
            __syncwarp();
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}

// Copies SWIGLU's results from `staging`, item by item, to the next product's image. One thread calls it.
template <int TOKENS>
__device__ __forceinline__ void copy_results(const WideWork<TOKENS>& work, int num_outputs, unsigned char* staging,
                                             unsigned char* out, unsigned long long* staged,
                                             unsigned long long* written) {
    constexpr int STEP_BYTES = WideWork<TOKENS>::STEP_BYTES;
    const int steps = wide_steps(num_outputs);
    unsigned parity = 0;
#pragma unroll 1
    for (int item = work.first; item < work.num_pieces; item += work.stride, parity ^= 1) {  // a piece is a whole one
        const int step = item / work.num_token_blocks * SHARERS + work.rank;
        barrier_wait(staged, parity);
#pragma unroll
        for (int byte = 0; byte < STEP_BYTES; byte += IMAGE_STEP_BYTES) {  // contiguous parts of an image
            store_bulk(out + work.image_place(item, step, steps, byte), shared_address(staging + byte),
                       IMAGE_STEP_BYTES);
        }
        store_bulk_wait_read();
        barrier_arrive(written);
    }
    store_bulk_wait();
}
