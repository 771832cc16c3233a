// woven_inputs: puts a warp's share of several fp32 rows into shared memory, a little at a time between two products.
//
// stage_spans (activations.cuh) stages all inputs before a block multiplies any; with several rows that takes longer
// than the ring of copies lasts. Here the warps that multiply the same spans stage them in turns, each some rows of
// each span, while they multiply the first tile. The loads of a turn run during the turn before.
#pragma once

#include "common/activations.cuh"

// A block has PARTS warps that multiply the same spans, first, first + TILE_WARPS, ...; warp `part` of them stages
// ROWS / PARTS rows. The lanes of a warp stage eight inputs each, of TURN_SPANS of these spans at once.
template <typename Product, int ROWS, int SPAN_INPUTS, int NUM_WARPS, int TILE_WARPS, int PARTS>
struct WovenInputs {
    static constexpr int LANES = SPAN_INPUTS / 8, SPANS_A_WARP = 32 / LANES, OWN_ROWS = ROWS / PARTS;
    static constexpr int PASS_ROWS = OWN_ROWS < SPANS_A_WARP ? OWN_ROWS : SPANS_A_WARP;
    static constexpr int TURN_SPANS = SPANS_A_WARP / PASS_ROWS, PASSES = OWN_ROWS / PASS_ROWS;
    static_assert(ROWS % PARTS == 0 && PASSES * PASS_ROWS == OWN_ROWS, "all warps of a span stage as many rows");

    float values[PASSES][8], weights[8];  // of the next turn

    // The norm's weights and the rows of the turn whose spans begin with `span`; zeros from `end` on.
    __device__ __forceinline__ void load_weights(const InputRows& rows, int span, int end, int lane) {
        if (rows.norm_weight != nullptr) rows.load_weights(input_of(rows, span, end, lane), weights);
    }
    __device__ __forceinline__ void load_rows(const InputRows& rows, int span, int end, int part, int lane) {
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            rows.load(row_of(pass, part, lane), input_of(rows, span, end, lane), values[pass]);
        }
    }

    // Stages this turn from `place` on, where its first span lies, and starts the loads of the next one. Later its
    // squares go to `squares`: every warp that reads the digits waits for them.
    __device__ __forceinline__ void stage(uint4* place, int span_vectors, const InputRows& rows, int span, int end,
                                          float (&sums)[PASSES], int part, int lane) {
        const int eighth = lane % LANES;
        float current[PASSES][8];
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            sums[pass] = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                current[pass][i] = values[pass][i];
                if (rows.norm_weight != nullptr) {
                    sums[pass] = __fmaf_rn(current[pass][i], current[pass][i], sums[pass]);
                    current[pass][i] = __fmul_rn(current[pass][i], weights[i]);
                }
            }
        }
        load_weights(rows, span + TURN_SPANS * TILE_WARPS, end, lane);
        load_rows(rows, span + TURN_SPANS * TILE_WARPS, end, part, lane);
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const typename Product::Staged staged(current[pass], eighth);
            if (span_of(span, lane) < end) {
                staged.store(place + turn_span(lane) * span_vectors, eighth, row_of(pass, part, lane));
            }
        }
    }

    // Span by span, so that the sum does not depend on where a chunk begins.
    __device__ __forceinline__ static void add_squares(float (&sums)[PASSES], float (*squares)[NUM_WARPS], int span,
                                                       int part, int lane) {
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const float sum = warp_sum<LANES>(sums[pass]);
#pragma unroll
            for (int s = 0; s < TURN_SPANS; ++s) {
                if (turn_span(lane) == s && lane % LANES == 0) {
                    float& total = squares[row_of(pass, part, lane)][span_of(span, lane) % NUM_WARPS];
                    total = __fadd_rn(total, sum);
                }
                __syncwarp();
            }
        }
    }

private:
    __device__ __forceinline__ static int turn_span(int lane) { return lane / (LANES * PASS_ROWS); }
    __device__ __forceinline__ static int span_of(int span, int lane) { return span + turn_span(lane) * TILE_WARPS; }
    __device__ __forceinline__ static int row_of(int pass, int part, int lane) {
        return part * OWN_ROWS + pass * PASS_ROWS + lane / LANES % PASS_ROWS;
    }
    __device__ __forceinline__ static int input_of(const InputRows& rows, int span, int end, int lane) {
        const int own = span_of(span, lane);
        return own < end ? own * SPAN_INPUTS + 8 * (lane % LANES) : rows.num_inputs;
    }
};
