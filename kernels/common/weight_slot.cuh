// weight_slot: a span of 128 inputs of a tile in shared memory: how a warp copies it there early, and takes it out.
#pragma once

#include "common/wide_weights.cuh"

constexpr int SPAN_SHIFT = 7;  // log2 of a span's inputs

// [weights of a span][groups][scales of the tile's rows][groups][zero points]
template <typename WeightT, typename ScaleT, int WIDENING>
struct WeightSlot {
    using Weights = WideWeights<WeightT, ScaleT, WIDENING>;
    static constexpr bool HAS_SCALES = TileFormat<WeightT>::HAS_SCALES;
    static constexpr bool IS_BLOCK = SCALES_A_HALF<ScaleT> == 1;  // a scale for each half tile
    static constexpr bool HAS_ZEROS = HAS_SCALES && WIDENING != LIFTED && TileFormat<WeightT>::OFFSET > 0;
    static constexpr int MOST_GROUPS = WIDENING == LIFTED || IS_BLOCK ? 1 : 8;  // of 16 inputs or more
    static constexpr int GROUP_BYTES = SCALES_A_TILE<ScaleT> * static_cast<int>(sizeof(ScaleT));  // of scales
    static constexpr int SCALES_AT = Weights::SPAN_BYTES, ZEROS_AT = SCALES_AT + HAS_SCALES * MOST_GROUPS * GROUP_BYTES;
    // Whole lines of 128 bytes: copies that straddle two lines slow down all of DRAM.
    static constexpr int BYTES = (ZEROS_AT + HAS_ZEROS * MOST_GROUPS * TILE_ROWS + 127) / 128 * 128;

    // Starts a warp's copies of a span's scales and zero points. `group` is the span's first one in the tile.
    __device__ __forceinline__ static void copy_scales(const ScaleT* scales, const unsigned char* zero_points,
                                                       int group, int group_shift, bool has_zeros, unsigned slot,
                                                       int lane) {
        if constexpr (HAS_SCALES) {
            const int num_groups = MOST_GROUPS == 1 ? 1 : max(1 << SPAN_SHIFT >> min(group_shift, SPAN_SHIFT), 1);
            const unsigned char* source = reinterpret_cast<const unsigned char*>(scales) + group * GROUP_BYTES;
            if constexpr (IS_BLOCK) {
                if (lane == 0) copy_async_small<GROUP_BYTES>(slot + SCALES_AT, source, true);
            } else {
                static_assert(MOST_GROUPS * GROUP_BYTES <= 512, "a lane copies one vector at most");
                if (lane < num_groups * (GROUP_BYTES / 16)) copy_async(slot + SCALES_AT + lane * 16, source + lane * 16);
            }
            if (HAS_ZEROS && has_zeros && lane < num_groups) {
                copy_async(slot + ZEROS_AT + lane * 16, zero_points + (group + lane) * TILE_ROWS);
            }
        }
    }

    // Fetches a step's words, and its scales, unless those of the span's first step serve both.
    __device__ __forceinline__ static void take(Weights& weights, const unsigned char* slot, int step, int group_shift,
                                                bool has_span_scales, bool has_zeros, int lane) {
        weights.take_words(slot + step * Weights::STEP_BYTES + lane * 16);
        if constexpr (HAS_SCALES) {
            if (step > 0 && has_span_scales) return;
            const unsigned input =
                lane % 4 * (Weights::UNIT_INPUTS / 4) + step * (Weights::IS_INT4 ? 16 : STEP_INPUTS);
            const unsigned group = MOST_GROUPS == 1 ? 0 : input >> min(group_shift, SPAN_SHIFT);
            const ScaleT* scales = reinterpret_cast<const ScaleT*>(slot + SCALES_AT + group * GROUP_BYTES);
            weights.take_scales(scales + scale_place<ScaleT>(lane / 4), slot + ZEROS_AT + group * TILE_ROWS + lane / 4,
                                has_zeros);
        }
    }

    // Whether a lane needs one scale a row for a span: a group has the whole span, or (int4) the lane's part of it.
    __device__ __forceinline__ static bool has_span_scales(int group_shift) {
        return MOST_GROUPS == 1 || group_shift >= (Weights::IS_INT4 ? 5 : SPAN_SHIFT);
    }
};
