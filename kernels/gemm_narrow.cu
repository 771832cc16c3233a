// gemm_narrow: y[n,m] = f(row_scales[n] * sum_k x[n,k] * W[m,k] + bias[m]) for up to 64 tokens, W in 4 to 16 bits
//           Source: kernels/gemm_wide.cu, whose bits it gives; CUTLASS, sm90 mixed-input products; PTX ISA, wgmma
// Shapes:   as in gemm_wide, with up to TOKENS tokens
// Requires: as gemm_wide; scales and zero_points 16-byte aligned
// Launch:   clusters of 2 blocks (32 for each tile of a block, and 128), any number of them; dynamic shared memory by
//           llmcli/kernels/gemm_wide.py; may overlap the kernel in front
// Traffic:  weights once; the image once for the tiles of a cluster, which L2 serves. Each block takes all of it in
// Numerics: those of gemm_wide, bit for bit: the same weights in the same order of sums
// Choice:   The tensor cores need few clocks for few tokens, so memory sets the time. It gives its full rate only with
//           more bytes under way than registers hold: each warp copies its own tile's weights into a ring in shared
//           memory, some spans early. It fetches a step's words from there before it multiplies the step in front, so
//           that nothing waits for shared memory (but see TAKES_LATE). For few tokens blocks are small, so that each
//           multiprocessor gets as many as the others. More tokens take as many bytes as weights do, and what L2 gives
//           a multiprocessor is the bound: larger blocks fetch them half as often. From 33 tokens on
//           llmcli/kernels/wide_plan.py chooses between both for each product. The next kernel
//           starts when this one ends: at once is 1 to 3 % slower.
//           Rejected (docs/log/2026-11-27-wide.md): bulk copies of weights (the copy engine takes too long to begin
//           each); weights in registers two steps early, as gemm_wide has them; the next product's weights fetched
//           into L2; SwiGLU in parts, by a kernel of its own
#include "common/launch.cuh"
#include "common/cluster.cuh"
#include "common/weight_slot.cuh"
#include "common/wide_output.cuh"

// Each warp has a ring of slots for its own tile. It copies weights there some spans early, and no other warp reads
// them. Tokens lie in stages, which all warps of both blocks of a cluster read. One thread of each block copies them.

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

// A warp for each tile, and four more, one of which copies tokens.
template <int TILES>
constexpr int BLOCK_SIZE = 32 * (TILES + 4);

// Registers of a thread with which BLOCKS blocks start on a multiprocessor.
template <int TILES, int BLOCKS>
constexpr int START_REGISTERS = 65536 / (BLOCKS * BLOCK_SIZE<TILES>) / 8 * 8;
constexpr int FEWEST_REGISTERS = 24;  // kept by the four warps
// The warps that multiply get these: a scheduler has every fourth warp, so one of the four and TILES / 4 others.
template <int TILES, int BLOCKS>
constexpr int MOST_REGISTERS =
    (START_REGISTERS<TILES, BLOCKS> * (TILES / 4 + 1) - FEWEST_REGISTERS) / (TILES / 4) / 8 * 8;

// TILES: of a block. BLOCKS: that share a multiprocessor. STAGES, SLOTS: of the rings of tokens and of weights.
template <typename WeightT, typename ScaleT, int WIDENING, int TOKENS, int TILES, int BLOCKS, int STAGES, int SLOTS,
          int HOST_SHARED_BYTES>
__global__ void __launch_bounds__(BLOCK_SIZE<TILES>, BLOCKS)
#if __CUDA_ARCH__ >= 900
    __cluster_dims__(NARROW_SHARERS, 1, 1)
#endif
        gemm_narrow(const unsigned char* __restrict__ tiles, const ScaleT* __restrict__ scales,
                    const unsigned char* __restrict__ zero_points, const unsigned char* image, const float* row_scales,
                    const float* __restrict__ biases, void* out, float* others, WideShape shape) {
    using Slot = WeightSlot<WeightT, ScaleT, WIDENING>;
    using Weights = typename Slot::Weights;
    constexpr int STEP_BYTES = TOKENS * TOKEN_BYTES, STAGE_BYTES = 2 * STEP_BYTES;
    static_assert(HOST_SHARED_BYTES == STAGES * STAGE_BYTES + SLOTS * TILES * Slot::BYTES,
                  "gemm_narrow.py plans another size");
    // With floats, and in large blocks with lifted codes, no registers are free for the words of a step while those of
    // the step before are multiplied.
    constexpr bool TAKES_LATE =
        TOKENS == 64 && (TileFormat<WeightT>::OFFSET == 0 || (TILES == 8 && WIDENING == LIFTED));
    static_assert(TILES % 4 == 0, "four warps hand on registers, and multiply, together");
    static_assert(STAGES >= 2 && SLOTS >= 2, "one is given back while the next one is read");

    alignas(1024) extern __shared__ uint4 shared[];
    unsigned char* memory = reinterpret_cast<unsigned char*>(shared);
    __shared__ unsigned long long filled[STAGES], emptied[STAGES];
    __shared__ __align__(8) float token_scales[TOKENS];

    // The assembler must see that this number is equal in all lanes of a warp (gemm_wide.cu).
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    const int lane = threadIdx.x % 32;
    const NarrowWork<TILES> work(shape, cluster_rank<NARROW_SHARERS>());

    if (threadIdx.x < STAGES) {
        barrier_init(&filled[threadIdx.x], 1);
        barrier_init(&emptied[threadIdx.x], NARROW_SHARERS * TILES);
    }
    barrier_init_fence();
    __syncthreads();  // barriers are initialised, here
    cluster_arrive();
    cluster_wait();  // and in the block that shares tokens

    if (warp >= TILES) {
        registers_down_to<FEWEST_REGISTERS>();
        if (warp == TILES && lane == 0) {
            grid_dependency_wait();
            copy_spans_of_tokens<TOKENS, STAGES>(work, image, memory, filled, emptied);
        }
        __syncwarp();
        cluster_arrive();  // as the other warps
        cluster_wait();
        return;
    }

    registers_up_to<MOST_REGISTERS<TILES, BLOCKS>>();
    unsigned char* slots = memory + STAGES * STAGE_BYTES + warp * SLOTS * Slot::BYTES;
    const unsigned slots_at = shared_address(slots);
    NarrowSource<WeightT, ScaleT, WIDENING, TILES> source(work, shape, warp, tiles, scales, zero_points);
    const auto copy_next = [&](int slot) { source.copy_next(work, shape, warp, slots_at + slot * Slot::BYTES); };
#pragma unroll
    for (int i = 0; i < SLOTS - 1; ++i) copy_next(i);

    Weights weights[2];  // of a span's steps
    unsigned a[2][4][4];
    typename Weights::Scales by;
    const bool has_span_scales = Slot::MOST_GROUPS == 1 || (TOKENS < 64 && Slot::has_span_scales(shape.group_shift));
    const auto take = [&](int slot, int step) {
        Slot::take(weights[step], slots + slot * Slot::BYTES, 0, step, shape.group_shift, has_span_scales,
                   zero_points != nullptr, lane);
    };
    // Waits for the oldest running copies, whose span is in this slot, and fetches its first step.
    const auto take_first = [&](int slot) {
        copy_async_wait<SLOTS - 2>();
        __syncwarp();
        take(slot, 0);
    };
    const auto widen = [&](int step) {
        if (step == 0 || !has_span_scales) by.prepare(weights[step], zero_points == nullptr);
        weights[step].widen(a[step], by);
    };
    float sums[TOKENS / 2];
    // Starts the products of a step, and waits for those of the step before, whose weights the next ones replace.
    const auto multiply = [&](unsigned tokens_at, unsigned(&now)[4][4]) {
        const unsigned long long columns = swizzled_at(tokens_at, 0);
        wgmma_begin();
#pragma unroll
        for (int s = 0; s < 4; ++s) wgmma_halves<__half>(sums, now[s], columns + 2 * s, true);
        wgmma_commit();
        wgmma_wait<1>();
    };
    const unsigned filled_at = shared_address(filled), stages_at = shared_address(memory);
    // Of a sharer; the lane is its number.
    const unsigned emptied_at = address_in_block(shared_address(emptied), min(lane, NARROW_SHARERS - 1));
    // Frees the stage of the span before, whose products are done. The last ones are kept: no block waits for them.
    // When such an arrival comes, the other block may have ended, and a later block's barriers may be in its place.
    unsigned before_at = 0;
    int num_left = work.num_own_spans();  // with the current one
    const auto release = [&] {
        if (lane < NARROW_SHARERS && before_at != 0 && num_left >= STAGES) barrier_arrive_there(before_at);
    };

    int stage = 0, slot = 0;
    unsigned parity = 0;
    take_first(0);
    grid_dependency_wait();
    if (threadIdx.x < TOKENS) {
        const bool exists = threadIdx.x < shape.num_tokens;
        token_scales[threadIdx.x] = exists ? row_scales[threadIdx.x] * shape.power : 1.0f;
    }
    sync_threads_of<32 * TILES>(1);
#pragma unroll 1
    for (int piece = work.first; piece < work.num_pieces; piece += work.stride) {
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) sums[i] = 0.0f;
        const int end = work.end(piece);
#pragma unroll 1
        for (int span = work.begin(piece); span < end; ++span, --num_left) {
            const unsigned tokens_at = stages_at + stage * STAGE_BYTES;
            widen(0);
            if (!TAKES_LATE) take(slot, 1);
            barrier_wait(filled_at + 8 * stage, parity);
            multiply(tokens_at, a[0]);
            if (TAKES_LATE) take(slot, 1);
            release();
            copy_next(slot == 0 ? SLOTS - 1 : slot - 1);  // all lanes have read the slot's old contents
            widen(1);
            if (++slot == SLOTS) slot = 0;
            if (!TAKES_LATE) take_first(slot);
            multiply(tokens_at + STEP_BYTES, a[1]);
            if (TAKES_LATE) take_first(slot);
            before_at = emptied_at + 8 * stage;
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        wgmma_wait<0>();
        const int tile = work.tile_of(piece, warp), part = piece % shape.num_parts;
        if (shape.epilogue == SWIGLU) {
            const int column = tile * HALF_ROWS + lane % 4 * 2, steps = wide_steps(shape.num_outputs);
            const size_t place = wide_place(shape.down_unit_inputs, lane / 4, column, steps);
            write_gated<TOKENS>(sums, token_scales, biases, static_cast<unsigned char*>(out) + place, shape, tile);
        } else {
            float* place = static_cast<float*>(out);
            if (part > 0) place = others + static_cast<size_t>(part - 1) * shape.num_tokens * shape.num_outputs;
            write_floats<TOKENS>(sums, token_scales, biases, place, shape, tile, 0, part == 0);
        }
    }
    cluster_arrive();  // no block writes into one that has ended
    cluster_wait();
}
