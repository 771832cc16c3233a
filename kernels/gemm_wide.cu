// gemm_wide: y[n,m] = f(row_scales[n] * sum_k x[n,k] * W[m,k] + bias[m]) for many tokens, W in 4 to 16 bits
//           Source: CUTLASS, sm90 mixed-input products; PTX ISA, wgmma and cp.async.bulk
// Shapes:   tiles [num_tiles][units][1024] bytes; scales [num_tiles][num_groups][16] ScaleT; zero_points alike uint8 or
//           null (common/tile.cuh); image fp16 as common/wide_image.cuh has it, of whole blocks of TOKENS; row_scales
//           [num_tokens] float; biases [16 * num_tiles] float or null. STORE, ADD: out [num_tokens, out_stride] float,
//           into which ADD adds; others [num_parts - 1, num_tokens, num_outputs] float or null. SWIGLU, whose tiles
//           have gate and up in their halves: out is the next product's image; results are
//           divided by GATED_SCALE (common/silu.cuh)
// Requires: sm_90a; tiles, image and SWIGLU's out 16-byte aligned; groups of 16 inputs or more, group_shift = log2 of
//           them, 31 for one group a row; of 16-bit weights whole spans of 128 inputs; SWIGLU in one part
// Launch:   clusters of 2 blocks (384), any number of them; dynamic shared memory by llmcli/kernels/gemm_wide.py; may
//           overlap the kernel in front of it.
// Traffic:  weights once for every TOKENS tokens and the image once for every 256 outputs, side by side so that L2
//           serves all but the first
// Numerics: weights as common/wide_weights.cuh widens them, activations as stage_wide rounds; fp32 sums (truncated,
//           not rounded, in the tensor cores), one chain over all inputs in a fixed order, or over those of each part.
//           So a token's bits do not depend on how many tokens run with it. ADD takes numbers below 2^-126 for zero
// Choice:   A block multiplies 8 tiles with TOKENS tokens. Two groups of four warps hold all sums in registers; a warp
//           loads its own tile's weights two steps early, and widens a step while the tensor cores work on the one
//           before. One group runs two steps ahead and never waits for the other: while one writes results, the tensor
//           cores have the other's steps. ADD sends its numbers to be added in L2, since a load would be waited for.
//           A few tokens are too few pieces of work for a card: then each is cut into parts of the inputs, whose
//           results the caller adds up. Rejected: clusters that add up each other's sums, which must run at once.
//           One warp copies tokens, which the two blocks of a cluster share: half comes from each, to both. Of few
//           tokens it also fetches weights into L2. A thread of another warp copies what SWIGLU leaves in shared
//           memory. The next kernel starts when this one ends. Rejected: earlier, as its blocks would gather where this
//           one has none
//           Rejected: weights widened in memory first (a fifth of a prompt's time)
#include "common/launch.cuh"
#include "common/wide_work.cuh"

constexpr int NUM_THREADS = 32 * MULTIPLIERS, GROUP_THREADS = 128, BLOCK_SIZE = NUM_THREADS + 128;

template <typename WeightT, typename ScaleT, int WIDENING, int TOKENS, int STAGES, int HOST_SHARED_BYTES>
__global__ void __launch_bounds__(BLOCK_SIZE, 1)
#if __CUDA_ARCH__ >= 900
    __cluster_dims__(SHARERS, 1, 1)
#endif
        gemm_wide(const unsigned char* __restrict__ tiles, const ScaleT* __restrict__ scales,
                  const unsigned char* __restrict__ zero_points, const unsigned char* image, const float* row_scales,
                  const float* __restrict__ biases, void* out, float* others, WideShape shape) {
    using Weights = WideWeights<WeightT, ScaleT, WIDENING>;
    using Work = WideWork<TOKENS>;
    constexpr int STEP_BYTES = Work::STEP_BYTES;
    // With few tokens a step is so short that weights loaded two steps early come late from memory. With more tokens,
    // and with int4, fetching them into L2 costs more than it saves (measured).
    constexpr bool FETCHES_AHEAD = TOKENS <= 128 && !Weights::IS_INT4;
    // Of a thread that multiplies, and of one that copies.
    constexpr int MOST_REGISTERS = 240, FEWEST_REGISTERS = 24;
    static_assert(HOST_SHARED_BYTES == (STAGES + 1) * STEP_BYTES, "gemm_wide.py plans another size");

    alignas(1024) extern __shared__ uint4 shared[];
    unsigned char* memory = reinterpret_cast<unsigned char*>(shared);
    unsigned char* staging = memory + STAGES * STEP_BYTES;  // for SWIGLU
    __shared__ unsigned long long filled[STAGES], emptied[STAGES + 1], staged, written;
    __shared__ __align__(8) float token_scales[2][TOKENS];  // each group of warps has its own

    // The assembler must see that this number is equal in all lanes of a warp. Then addresses and counts of the loop
    // over steps are uniform too, in registers and instructions of their own, and no branch must reconverge lanes.
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    const int lane = threadIdx.x % 32;
    const Work work(shape, cluster_rank<SHARERS>());

    if (threadIdx.x <= STAGES) {
        if (threadIdx.x < STAGES) barrier_init(&filled[threadIdx.x], 1);
        barrier_init(&emptied[threadIdx.x], MULTIPLIERS * SHARERS);
    }
    if (threadIdx.x == 0) {
        barrier_init(&staged, MULTIPLIERS);
        barrier_init(&written, 1);
    }
    barrier_init_fence();
    __syncthreads();  // barriers are initialised, here
    cluster_arrive();
    cluster_wait();  // and in the block that shares tokens

    if (warp >= MULTIPLIERS) {
        registers_down_to<FEWEST_REGISTERS>();
        grid_dependency_wait();
        if (warp == MULTIPLIERS) {
            copy_tokens<Weights, FETCHES_AHEAD, STAGES>(work, shape, tiles, scales, image, memory, filled, emptied);
        } else if (warp == MULTIPLIERS + 1 && lane == 0 && shape.epilogue == SWIGLU) {
            copy_results(work, shape.num_outputs, staging, static_cast<unsigned char*>(out), &staged, &written);
        }
        cluster_arrive();  // as the other warps
        cluster_wait();
        return;
    }

    registers_up_to<MOST_REGISTERS>();
    // Weights are loaded in one sequence over all items, ahead of the products.
    Weights weights[2];  // of a span's steps
    unsigned a[2][4][4];
    WideSource<ScaleT> source;
    typename Weights::Scales by;
    // Whether a lane has one scale a row for a span: if a group has the whole span, or (int4) the lane's part of it.
    const bool has_span_scales = WIDENING == LIFTED || shape.group_shift >= (Weights::IS_INT4 ? 5 : 7);
    const unsigned lane_input = number_here(lane % 4 * (Weights::UNIT_INPUTS / 4));
    int ahead_piece = work.first;
    unsigned ahead_span = 0, ahead_end = 0;  // of the tile; end: of the piece
    const unsigned char* ahead_words = nullptr;
    const auto seek = [&] {
        const size_t tile = min(work.tile_of(work.item_of(ahead_piece), warp), work.num_tiles - 1);
        const int num_units = work.num_steps * STEP_INPUTS / Weights::UNIT_INPUTS;
        source.weights = tiles + (tile * num_units * UNIT_VECTORS + lane) * 16;
        const size_t groups = tile * shape.num_groups * TILE_ROWS;
        source.scales = scales + groups + scale_place<ScaleT>(lane / 4);
        source.zero_points = WIDENING == LIFTED || zero_points == nullptr ? nullptr : zero_points + groups + lane / 4;
        ahead_span = work.begin(ahead_piece), ahead_end = work.end(ahead_piece);
    };
    const unsigned group_spans_shift = number_here(shape.group_shift - 7);
    // The group of a lane's inputs of the span ahead, `more` inputs further on.
    const auto group_ahead = [&](unsigned more) {
        if (WIDENING == LIFTED) return ahead_span >> group_spans_shift;  // the same for all lanes
        return (ahead_span * 2 * STEP_INPUTS + lane_input + more) >> shape.group_shift;
    };
    // The first step of the span ahead, then its second one.
    const auto load_first = [&] {
        ahead_words = source.weights + static_cast<size_t>(ahead_span) * Weights::SPAN_BYTES;
        weights[0].load_words(ahead_words);
        weights[0].load_scales(source, group_ahead(0));
    };
    const auto load_second = [&] {
        weights[1].load_words(ahead_words + Weights::STEP_BYTES);
        if (!has_span_scales) weights[1].load_scales(source, group_ahead(Weights::IS_INT4 ? 16 : STEP_INPUTS));
        if (++ahead_span == ahead_end) {
            ahead_piece = min(ahead_piece + work.stride, work.num_pieces - 1);
            seek();
        }
    };
    const auto widen = [&](int step) {
        if (step == 0 || !has_span_scales) by.prepare(weights[step], zero_points == nullptr);
        weights[step].widen(a[step], by);
    };

    const int group = warp / 4, thread = threadIdx.x % GROUP_THREADS;
    const unsigned filled_at = number_here(shared_address(filled));
    // Of a sharer; the lane is its number. After the stages lies a barrier that no thread waits for.
    const unsigned emptied_at = address_in_block(shared_address(emptied), min(lane, SHARERS - 1));
    const unsigned memory_at = number_here(shared_address(memory) / 16);
    const unsigned long long no_columns = swizzled_at(0, 0);
    // Of the barriers of the next span's first step, 8 bytes a stage; and where the stages end, or the very first span.
    unsigned offset = 0, stop = 16;
    unsigned parity = 0, written_parity = 1;
    const int sharer = number_here(lane);
    const auto release = [&](unsigned stage_at) {
        if (sharer < SHARERS) barrier_arrive_there(stage_at);
    };
    float sums[TOKENS / 2];
    if (work.first < work.num_pieces) {
        seek();
        load_first();
        load_second();
        grid_dependency_wait();
        if (group == 1) sync_threads_of<NUM_THREADS>(1);  // two steps later than group 0
    }
#pragma unroll 1
    for (int piece = work.first; piece < work.num_pieces; piece += work.stride) {
        const int item = work.item_of(piece), part = piece % shape.num_parts;
        const int first_token = item % work.num_token_blocks * TOKENS;
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) sums[i] = 0.0f;
        // Starts the products of a step, and waits for those of the step before, whose weights the next ones replace.
        const auto multiply = [&](unsigned filled, unsigned first_columns, unsigned (&now)[4][4]) {
            barrier_wait(filled, parity);
            const unsigned long long columns = no_columns | first_columns;
            wgmma_begin();
#pragma unroll
            for (int s = 0; s < 4; ++s) wgmma_halves<__half>(sums, now[s], columns + 2 * s, true);
            wgmma_commit();
            wgmma_wait<1>();
        };
        // The span before, whose second stage is to be freed: at first one that no thread waits for.
        unsigned span_at = emptied_at + 8 * (STAGES - 1);
        const int end = work.end(piece);
#pragma unroll 1
        for (int span = work.begin(piece); span < end; ++span) {
            const unsigned at = number_here(filled_at + offset), columns = memory_at + offset * (STEP_BYTES / 128);
            widen(0);
            load_first();
            multiply(at, columns, a[0]);
            release(span_at + 8);
            widen(1);
            load_second();
            multiply(at + 8, columns + STEP_BYTES / 16, a[1]);
            span_at = emptied_at + offset;
            release(span_at);
            offset += 16;
            if (offset == stop) {
                if (stop == 8 * STAGES) {
                    offset = 0, parity ^= 1;
                } else {
                    if (group == 0) arrive_threads_of<NUM_THREADS>(1);
                    stop = 8 * STAGES;
                }
            }
        }
        constexpr int SCALES = TOKENS / GROUP_THREADS;  // of a thread
        float loaded_scales[SCALES];
#pragma unroll
        for (int i = 0; i < SCALES; ++i) {
            const int token = first_token + i * GROUP_THREADS + thread;
            loaded_scales[i] = token < shape.num_tokens ? row_scales[token] * shape.power : 1.0f;
        }
        wgmma_wait<0>();
        release(span_at + 8);

        const int tile = work.tile_of(item, warp);
        sync_threads_of<GROUP_THREADS>(2 + group);  // the scales of the item before are no longer read
#pragma unroll
        for (int i = 0; i < SCALES; ++i) {
            token_scales[group][i * GROUP_THREADS + thread] = loaded_scales[i];
        }
        sync_threads_of<GROUP_THREADS>(2 + group);
        if (shape.epilogue != SWIGLU) {
            float* place = static_cast<float*>(out);
            if (part > 0) place = others + static_cast<size_t>(part - 1) * shape.num_tokens * shape.num_outputs;
            write_floats<TOKENS>(sums, token_scales[group], biases, place, shape, tile, first_token, part == 0);
            continue;
        }
        barrier_wait(&written, written_parity);
        written_parity ^= 1;
        // These 64 columns of the next product's inputs are one of its steps, which the block leaves in `staging`.
        const bool has_short_units = shape.down_unit_inputs == 32;
        const int g = lane / 4, piece_of_token = 4 * (has_short_units ? group : warp % 2) + lane % 4;
        unsigned char* word = staging + g * TOKEN_BYTES + (piece_of_token ^ g) * 16;
        word += 4 * (has_short_units ? warp % 4 : warp / 2);
        write_gated<TOKENS>(sums, token_scales[group], biases, word, shape, tile);
        fence_async_side();
        __syncwarp();
        if (lane == 0) barrier_arrive(&staged);
    }
    // A block stays until the other one has copied its last tokens there, and has freed its last stage. Relaxed
    // arrivals, as above, do not order that.
    cluster_sync();
}
