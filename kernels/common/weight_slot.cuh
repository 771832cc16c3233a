// weight_slot: some spans of 128 inputs of a tile in shared memory: how a warp copies their scales there early, and
// takes the weights out.
#pragma once

#include "common/mma.cuh"
#include "common/wide_weights.cuh"

constexpr int SPAN_SHIFT = 7;  // log2 of a span's inputs

// [span][weights], then of each span [groups][scales of the tile's rows][groups][zero points]
template <typename WeightT, typename ScaleT, int WIDENING, int SPANS = 1>
struct WeightSlot {
    using Weights = WideWeights<WeightT, ScaleT, WIDENING>;
    static constexpr bool HAS_SCALES = TileFormat<WeightT>::HAS_SCALES;
    static constexpr bool IS_BLOCK = SCALES_A_HALF<ScaleT> == 1;  // a scale for each half tile
    static constexpr bool HAS_ZEROS = HAS_SCALES && WIDENING != LIFTED && TileFormat<WeightT>::OFFSET > 0;
    static constexpr int MOST_GROUPS = WIDENING == LIFTED || IS_BLOCK ? 1 : 8;  // of 16 inputs or more
    static constexpr int GROUP_BYTES = SCALES_A_TILE<ScaleT> * static_cast<int>(sizeof(ScaleT));  // of scales
    static constexpr int SCALES_AT = SPANS * Weights::SPAN_BYTES, ZEROS_AT = HAS_SCALES * MOST_GROUPS * GROUP_BYTES;
    static constexpr int SCALES_BYTES = ZEROS_AT + HAS_ZEROS * MOST_GROUPS * TILE_ROWS;  // of a span, and zero points
    // Whole lines of 128 bytes: copies that straddle two lines slow down all of DRAM.
    static constexpr int BYTES = (SCALES_AT + SPANS * SCALES_BYTES + 127) / 128 * 128;

    // Starts a warp's copies of the scales and zero points of the slot's spans of a tile, from `span` on.
    __device__ __forceinline__ static void copy_scales(const ScaleT* scales, const unsigned char* zero_points, int span,
                                                       int group_shift, bool has_zeros, unsigned slot, int lane) {
        if constexpr (!HAS_SCALES) return;
        const unsigned at = slot + SCALES_AT;
        const unsigned char* bytes = reinterpret_cast<const unsigned char*>(scales);
        if constexpr (WIDENING == LIFTED) {
            // One vector a lane, for all spans.
            constexpr int VECTORS = GROUP_BYTES / 16;
            const int group = (span + lane / VECTORS) << SPAN_SHIFT >> group_shift;
            if (lane < SPANS * VECTORS) {
                copy_async(at + lane * 16, bytes + (group * GROUP_BYTES + lane % VECTORS * 16));
            }
        } else {
            for (int i = 0; i < SPANS; ++i) {
                const int group = (span + i) << SPAN_SHIFT >> group_shift;
                const int num_groups =
                    MOST_GROUPS == 1 ? 1 : max(1 << SPAN_SHIFT >> min(group_shift, SPAN_SHIFT), 1);
                if constexpr (IS_BLOCK) {
                    if (lane == 0) {
                        copy_async_small<GROUP_BYTES>(at + i * SCALES_BYTES, bytes + group * GROUP_BYTES, true);
                    }
                } else {
                    static_assert(MOST_GROUPS * GROUP_BYTES <= 512, "a lane copies one vector at most");
                    if (lane < num_groups * (GROUP_BYTES / 16)) {
                        copy_async(at + i * SCALES_BYTES + lane * 16, bytes + (group * GROUP_BYTES + lane * 16));
                    }
                }
                if (HAS_ZEROS && has_zeros && lane < num_groups) {
                    copy_async(at + i * SCALES_BYTES + ZEROS_AT + lane * 16, zero_points + (group + lane) * TILE_ROWS);
                }
            }
        }
    }

    // Fetches a step's words of a span, and its scales, unless those of the span's first step serve both.
    __device__ __forceinline__ static void take(Weights& weights, const unsigned char* slot, int span, int step,
                                                int group_shift, bool has_span_scales, bool has_zeros, int lane) {
        weights.take_words(slot + span * Weights::SPAN_BYTES + step * Weights::STEP_BYTES + lane * 16);
        if constexpr (HAS_SCALES) {
            if (step > 0 && has_span_scales) return;
            const unsigned input =
                lane % 4 * (Weights::UNIT_INPUTS / 4) + step * (Weights::IS_INT4 ? 16 : STEP_INPUTS);
            const unsigned group = MOST_GROUPS == 1 ? 0 : input >> min(group_shift, SPAN_SHIFT);
            const unsigned char* place = slot + SCALES_AT + span * SCALES_BYTES;
            const ScaleT* scales = reinterpret_cast<const ScaleT*>(place + group * GROUP_BYTES);
            weights.take_scales(scales + scale_place<ScaleT>(lane / 4), place + ZEROS_AT + group * TILE_ROWS + lane / 4,
                                has_zeros);
        }
    }

    // Whether a lane needs one scale a row for a span: a group has the whole span, or (int4) the lane's part of it.
    __device__ __forceinline__ static bool has_span_scales(int group_shift) {
        return MOST_GROUPS == 1 || group_shift >= (Weights::IS_INT4 ? 5 : SPAN_SHIFT);
    }
};
