// gemm_mma: y[n,m] = f(row_scales[n] * sum_k x[n,k] * W[m,k] + bias[m]) where wgmma does not serve, W in 4 to 16 bits
//           Source: kernels/gemm_narrow.cu, whose bits it gives; PTX ISA, mma.m16n8k16, ldmatrix, cp.async
// Shapes:   as in gemm_wide
// Requires: as gemm_wide, but sm_80; scales and zero_points 16-byte aligned
// Launch:   any number of blocks (256); dynamic shared memory by llmcli/kernels/gemm_mma.py; may overlap the kernel in
//           front
// Traffic:  weights once for every TOKENS tokens, and the image once for every 128 outputs; L2 serves most of it
// Numerics: those of gemm_wide, bit for bit: the same weights in the same order of sums
// Choice:   A block multiplies 8 tiles, one a warp, with TOKENS tokens. All threads copy the next spans of tokens and
//           of weights to shared memory while the current one is multiplied: one barrier a span. A warp widens a step's
//           weights once for all tokens. Blocks take pieces in turn, those of the same tiles first, so that weights are
//           read from memory once
#include "common/launch.cuh"
#include "common/weight_slot.cuh"
#include "common/wide_output.cuh"

constexpr int TILES = 8, NUM_THREADS = 32 * TILES;
constexpr int SWIGLU_TILES = 16;  // whose 128 outputs are a span of the next product's inputs

// A block's work at a time: a part of the inputs of some tiles and tokens.
template <int TOKENS>
struct PieceOf {
    int part, first_token, tile;  // of this warp

    __device__ __forceinline__ PieceOf(int piece, const WideShape& shape, int num_token_blocks, int warp) {
        const int item = piece / shape.num_parts;
        part = piece % shape.num_parts, first_token = item % num_token_blocks * TOKENS;
        tile = item / num_token_blocks * TILES + warp;
    }
};

// STAGES: spans of tokens and weights in shared memory.
template <typename WeightT, typename ScaleT, int WIDENING, int TOKENS, int STAGES, int HOST_SHARED_BYTES>
__global__ void __launch_bounds__(NUM_THREADS, 1)
    gemm_mma(const unsigned char* __restrict__ tiles, const ScaleT* __restrict__ scales,
             const unsigned char* __restrict__ zero_points, const unsigned char* image, const float* row_scales,
             const float* __restrict__ biases, void* out, float* others, WideShape shape) {
    using Slot = WeightSlot<WeightT, ScaleT, WIDENING>;
    using Weights = typename Slot::Weights;
    using Piece = PieceOf<TOKENS>;
    constexpr int STEP_BYTES = TOKENS * TOKEN_BYTES, STAGE_BYTES = 2 * STEP_BYTES + TILES * Slot::BYTES;
    static_assert(HOST_SHARED_BYTES == STAGES * STAGE_BYTES, "gemm_wide.py plans another size");
    static_assert(IMAGE_TOKENS % TOKENS == 0, "a block's tokens lie side by side");

    alignas(128) extern __shared__ uint4 shared[];
    unsigned char* memory = reinterpret_cast<unsigned char*>(shared);
    __shared__ __align__(8) float token_scales[TOKENS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int num_tiles = shape.num_tiles(), num_steps = wide_steps(shape.num_inputs), num_spans = num_steps / 2;
    const int num_token_blocks = (shape.num_tokens + TOKENS - 1) / TOKENS;
    const int tile_blocks = SWIGLU_TILES / TILES * ((num_tiles + SWIGLU_TILES - 1) / SWIGLU_TILES);
    const int num_pieces = tile_blocks * num_token_blocks * shape.num_parts;
    const bool has_span_scales = Slot::has_span_scales(shape.group_shift), has_zeros = zero_points != nullptr;
    grid_dependency_wait();

#pragma unroll 1
    for (int piece = blockIdx.x; piece < num_pieces; piece += gridDim.x) {
        const Piece current(piece, shape, num_token_blocks, warp);
        const int first_token = current.first_token, source_tile = min(current.tile, num_tiles - 1);
        const int begin = num_spans * current.part / shape.num_parts;
        const int end = num_spans * (current.part + 1) / shape.num_parts;
        const unsigned char* weights_from =
            tiles + static_cast<size_t>(source_tile) * num_spans * Weights::SPAN_BYTES + lane * 16;
        const size_t first_group = static_cast<size_t>(source_tile) * shape.num_groups * SCALES_A_TILE<ScaleT>;
        const size_t first_zero = static_cast<size_t>(source_tile) * shape.num_groups * TILE_ROWS;
        const unsigned char* tokens_from = image + first_token % IMAGE_TOKENS * TOKEN_BYTES;
        tokens_from += static_cast<size_t>(first_token / IMAGE_TOKENS) * num_steps * IMAGE_STEP_BYTES;
        // Starts copying a span, and closes a group of copies, which is empty if no span is left.
        const auto copy = [&](int span) {
            if (span < end) {
                const unsigned stage = shared_address(memory + span % STAGES * STAGE_BYTES);
                const unsigned slot = stage + 2 * STEP_BYTES + warp * Slot::BYTES;
#pragma unroll
                for (int byte = 0; byte < Weights::SPAN_BYTES; byte += 512) {
                    copy_async(slot + byte + lane * 16,
                               weights_from + static_cast<size_t>(span) * Weights::SPAN_BYTES + byte);
                }
                Slot::copy_scales(scales + first_group, zero_points + first_zero, span, shape.group_shift, has_zeros,
                                  slot, lane);
#pragma unroll
                for (int step = 0; step < 2; ++step) {
                    const unsigned char* from =
                        tokens_from + static_cast<size_t>(2 * span + step) * IMAGE_STEP_BYTES;
#pragma unroll
                    for (int byte = threadIdx.x * 16; byte < STEP_BYTES; byte += NUM_THREADS * 16) {
                        copy_async(stage + step * STEP_BYTES + byte, from + byte);
                    }
                }
            }
            copy_async_commit();
        };
        __syncthreads();  // the piece before is written, and no stage is read
#pragma unroll
        for (int i = 0; i < STAGES - 1; ++i) copy(begin + i);
        for (int token = threadIdx.x; token < TOKENS; token += NUM_THREADS) {
            const bool exists = first_token + token < shape.num_tokens;
            token_scales[token] = exists ? __ldcg(row_scales + first_token + token) * shape.power : 1.0f;
        }

        float sums[TOKENS / 2];
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) sums[i] = 0.0f;
        typename Weights::Scales by;
#pragma unroll 1
        for (int span = begin; span < end; ++span) {
            copy_async_wait<STAGES - 2>();
            __syncthreads();  // the span is there, and the one before has been read
            copy(span + STAGES - 1);
            const unsigned char* stage = memory + span % STAGES * STAGE_BYTES;
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                Weights weights;
                unsigned a[4][4];
                Slot::take(weights, stage + 2 * STEP_BYTES + warp * Slot::BYTES, 0, step, shape.group_shift,
                           has_span_scales, has_zeros, lane);
                if (step == 0 || !has_span_scales) by.prepare(weights, !has_zeros);
                weights.widen(a, by);
                // Lane 8i + j gives the row of token j in piece i: the two halves of a k-step, then those of the next.
                const unsigned char* row = stage + step * STEP_BYTES + lane % 8 * TOKEN_BYTES;
#pragma unroll
                for (int first = 0; first < 4; first += 2) {
                    const unsigned char* of_piece = row + ((2 * first + lane / 8) ^ lane % 8) * 16;
#pragma unroll
                    for (int eight = 0; eight < TOKENS / 8; ++eight) {
                        unsigned b[4];
                        load_matrices(b, of_piece + eight * 8 * TOKEN_BYTES);
                        float(&of_eight)[4] = *reinterpret_cast<float(*)[4]>(sums + 4 * eight);
#pragma unroll
                        for (int k = 0; k < 2; ++k) {
                            const unsigned(&of_k)[4] = a[first + k];
                            mma<__half>(of_eight, of_k[0], of_k[1], of_k[2], of_k[3], b[2 * k], b[2 * k + 1]);
                        }
                    }
                }
            }
        }
        const Piece done(number_here(piece), shape, num_token_blocks, warp);  // no register is kept for it
        if (shape.epilogue == SWIGLU) {
            unsigned char* word = static_cast<unsigned char*>(out) +
                                  wide_place(shape.down_unit_inputs, done.first_token + lane / 4,
                                             done.tile * HALF_ROWS + lane % 4 * 2, wide_steps(shape.num_outputs));
            write_gated<TOKENS>(sums, token_scales, biases, word, shape, done.tile);
        } else {
            float* place = static_cast<float*>(out);
            if (done.part > 0) {
                place = others + static_cast<size_t>(done.part - 1) * shape.num_tokens * shape.num_outputs;
            }
            write_floats<TOKENS>(sums, token_scales, biases, place, shape, done.tile, done.first_token, done.part == 0);
        }
    }
}
