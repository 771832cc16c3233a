// wide_image: activations rounded to fp16, in the order in which gemm_wide multiplies them.
//
// [block of 128 tokens][step of 64 inputs][token][128 bytes], a block's step in the swizzle of 128 bytes (wgmma.cuh): a
// token's 16 bytes number i lie at i ^ token % 8. So one bulk copy brings a step, or any eight tokens of it.
// A lane t of the tensor cores has 16 neighbouring inputs of a step, a run, because tiles hold weights so. The k-step s
// takes the inputs 4s .. 4s+3 of a run: two pairs, in word t of the 16 bytes 2s and 2s + 1. Units of 64 inputs (8-bit
// weights) are a step: run r belongs to lane r % 4. Units of 128 (int4) are two, and the runs of a lane are neighbours.
// Units of 32 (16 bits) are half of one: a lane's run is 8 neighbours of either unit. Inputs past the last one are
// zeros up to whole spans of 128.
#pragma once

#include "common/types.cuh"

constexpr int IMAGE_TOKENS = 128, STEP_INPUTS = 64, TOKEN_BYTES = 2 * STEP_INPUTS;
constexpr int IMAGE_STEP_BYTES = IMAGE_TOKENS * TOKEN_BYTES;

__device__ __forceinline__ int wide_steps(int num_inputs) { return (num_inputs + 127) / 128 * 2; }

// The byte of a token's pair of inputs `column` and `column` + 1, an even one, in an image for units of `unit_inputs`.
// The second pair of a quad lies 16 bytes after the first, for an odd token before it.
__device__ __forceinline__ size_t wide_place(int unit_inputs, int token, int column, int num_steps) {
    // Units and runs, a lane's neighbours in a unit, are powers of two: a division would take longer than all else.
    const int unit_shift = __ffs(unit_inputs) - 1, run_shift = unit_shift - 2;
    const int in_unit = column & (unit_inputs - 1), in_run = in_unit & ((1 << run_shift) - 1);
    const int k_step = ((column >> unit_shift << run_shift) + in_run) / 4, word = in_unit >> run_shift;
    const int piece = k_step % 4 * 2 + column % 4 / 2;
    const size_t row = (static_cast<size_t>(token / IMAGE_TOKENS) * num_steps + k_step / 4) * IMAGE_TOKENS;
    return (row + token % IMAGE_TOKENS) * TOKEN_BYTES + (piece ^ token % 8) * 16 + word * 4;
}
