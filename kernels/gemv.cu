// gemv: y[r,m] = f(sum_k x'[r,k] * W[m,k] + bias[m]), x' = x or w * x / sqrt(mean(x^2) + eps)
//           Source: design 3; HF LlamaRMSNorm, LlamaMLP
// Shapes:   tiles [num_tiles][units][1024] bytes, scales [num_tiles][groups][16] ScaleT, zero_points alike uint8 or
//           null (common/tile.cuh); x [num_rows, x_stride] float, of which num_inputs count; norm_weight [num_inputs]
//           float or null; bias [16 * num_tiles] float or null; out [num_rows, out_stride] float. epilogue 0: out = y;
//           1: out += y; 2: a tile has 8 rows of gate and the same 8 of up, and out = silu(gate) * up
// Requires: 1 <= num_rows <= ROWS <= 8; out does not alias x; chunk_spans a multiple of 16, or one chunk holds all
//           spans; tiles, scales, zero_points, norm_weight 16-byte aligned
// Launch:   grid (a multiple of BLOCKS), block (512), dynamic shared memory by llmcli/kernels/gemv.py, clusters of
//           BLOCKS, two for more than two rows from sm_90 on; may overlap the kernel in front
// Traffic:  weights, scales and zero points once for all rows; x 4 * num_inputs bytes a row from L2 in every cluster;
//           out once
// Numerics: Weights are exact: codes in integers, floats of 8 and 16 bits in the tensor cores. x' has a relative error
//           e = 2^-22 (bf16 2^-18). With codes its error is e = 1 / 63000 of the largest magnitude in its span of 128
//           inputs; that largest is clamped to 2^-100 from below, and gives NaN from 2^126 on. Sums are fp32: |error|
//           <= sqrt(K) * 2^-24 * S + e * T, S = sum|x' * W|, T = S, or with codes sum max|x' of the span| * |W|. The
//           order is fixed: of a tile's N = 16 warps (codes and 8-bit floats: 8) warp w sums the spans w, w + N, ...,
//           then each quarter of the warps is added in order, then the quarters. So equal runs give equal bits. A row's
//           bits depend neither on the other rows nor on ROWS, STAGES, BLOCKS, chunks or the grid (columns of an mma
//           are independent)
// Choice:   (1) One block of 16 warps a multiprocessor: all on one tile, or (with scales) one half on each of two.
//           (2) A warp works on a span as soon as it has landed. It asks for the next one only when at most PENDING are
//           under way.
//           (3) The rest of the ring carries a warp over a stall. It is filled while the block waits for the kernel in
//           front and for x.
//           (4) With one or two rows a warp (with scales: a pair) stages its own inputs. Warps take turns at writing
//           outputs, a tile later. With a norm they then wait, once, for the squares of all warps.
//           (5) With more rows two blocks halve every tile's inputs between them, so that each fetches half of x. They
//           finish tiles in turn. Sums cross over as asynchronous stores; a fence would take 1 us a tile. Warps stage
//           inputs while they multiply the first tile (common/woven_inputs.cuh).
//           (6) Rejected (docs/log/2026-11-27-products.md): two blocks of 8 warps, registers for a second block
//           beside, other orders of the spans, two rows over a cluster, a 17th warp for outputs, codes as fp16
#include "common/barrier.cuh"
#include "common/cluster.cuh"
#include "common/gemv_output.cuh"
#include "common/launch.cuh"
#include "common/products.cuh"
#include "common/span_stream.cuh"
#include "common/woven_inputs.cuh"

constexpr int BLOCK_SIZE = 512;
constexpr int NUM_WARPS = BLOCK_SIZE / 32;

// Blocks of a cluster. Two blocks halve every tile's inputs between them: several rows wait for x, and so each
// multiprocessor fetches only half of it.
template <int ROWS>
constexpr int BLOCKS_OF = CAN_CLUSTER && ROWS > 2 ? 2 : 1;

// The block of a cluster that collects the sums of a part's tile number `local` and writes its outputs.
template <int BLOCKS>
__device__ __forceinline__ constexpr int home_of(int local, int part) {
    return (local + part) % BLOCKS;
}

// Synchronises the warps `own` of all parts of a block. They multiply the same inputs; each has staged some of them.
template <int PARTS>
__device__ __forceinline__ void sync_sharers(int own) {
    if constexpr (PARTS == 1) {
        __syncwarp();
    } else {
        sync_threads_of<32 * PARTS>(1 + own);
    }
}

// The sizes with which llmcli/kernels/gemv.py plans shared memory; a static_assert compares them.
template <int SLOT_BYTES_, int SPAN_BYTES_, int NUM_SUMS_, int NUM_BUFFERS_, int TILE_WARPS_>
struct HostSizes {
    static constexpr int SLOT_BYTES = SLOT_BYTES_, SPAN_BYTES = SPAN_BYTES_, NUM_SUMS = NUM_SUMS_;
    static constexpr int NUM_BUFFERS = NUM_BUFFERS_, TILE_WARPS = TILE_WARPS_;
};

template <typename WeightT, typename ScaleT, int GROUP_SIZE, bool IS_SYMMETRIC, int ROWS, int STAGES, typename HostT>
__global__ void __launch_bounds__(BLOCK_SIZE, 1)
#if __CUDA_ARCH__ >= 900
    __cluster_dims__(BLOCKS_OF<ROWS>, 1, 1)
#endif
        gemv(const unsigned char* __restrict__ tiles, const ScaleT* __restrict__ scales,
             const unsigned char* __restrict__ zero_points, const float* x, const float* __restrict__ norm_weight,
             const float* __restrict__ biases, float* out, GemvShape shape) {
    constexpr int SPAN_INPUTS = SPAN_INPUTS_OF<WeightT>, UNITS = SPAN_UNITS<WeightT>;
    constexpr bool HAS_SCALES = TileFormat<WeightT>::HAS_SCALES, HAS_CHANNEL_SCALE = GROUP_SIZE == 0 && HAS_SCALES;
    using G = Groups<WeightT, GROUP_SIZE>;
    using Product = typename ProductOf<WeightT, ScaleT, GROUP_SIZE, IS_SYMMETRIC, ROWS>::Type;
    // TILE_WARPS warps share a tile, in all blocks of a cluster. A tile has a fixed cost for each warp. With
    // scales a span has more inputs, so a tile has fewer spans, and gets half as many warps.
    constexpr int TILE_WARPS = HAS_SCALES ? 8 : 16, BLOCKS = BLOCKS_OF<ROWS>;
    constexpr bool WEAVES = ROWS > 2 && Product::IS_WOVEN;  // stages inputs while it multiplies its first tiles
    // A part: the warps of a block that share a tile.
    constexpr int PART_WARPS = TILE_WARPS / BLOCKS, PARTS = NUM_WARPS / PART_WARPS;
    static_assert(PARTS == 1 || PART_WARPS <= 15, "each warp of a part has a barrier, besides __syncthreads");
    using Stream = SpanStream<WeightT, ScaleT, GROUP_SIZE, IS_SYMMETRIC, NUM_WARPS, TILE_WARPS, BLOCKS>;
    constexpr bool IS_SHORT = HAS_SCALES && UNITS == 1;  // spans of int4: more copies may run, but no more start first
    constexpr int FIRST_STAGES = STAGES <= 3 ? 1 : IS_SHORT ? 2 : STAGES - 2;  // before anything else
    // Whether the next span must have arrived when this one is done. A ring of two slots has no room for that.
    constexpr bool LANDS_AHEAD = STAGES > 2;
    // The most running copies of a warp when it starts the next one; measured.
    constexpr int PENDING = STAGES < 5 ? STAGES - 2 : HAS_SCALES && !IS_SHORT ? 2 : 3;

    using Woven = WovenInputs<Product, WEAVES ? ROWS : PARTS, SPAN_INPUTS, NUM_WARPS, TILE_WARPS, PARTS>;
    using Out = Output<ROWS, TILE_WARPS>;
    // A part has buffers for the sums of NUM_BUFFERS tiles. The blocks own them, and finish tiles, in turn.
    constexpr int NUM_BUFFERS = ROWS > 2 ? 2 : 4, OWN_BUFFERS = NUM_BUFFERS / BLOCKS;
    constexpr int WARP_FLOATS = ROWS * TILE_ROWS, BUFFER_FLOATS = TILE_WARPS * WARP_FLOATS;
    static_assert(NUM_BUFFERS % BLOCKS == 0, "a buffer is always in the same block");
    static_assert(PART_WARPS % Out::NUM_FINISHERS == 0, "warps of one part finish a tile");
    static_assert(WARP_FLOATS <= 4 * 32, "a lane sends one vector");
    static_assert(HostT::SLOT_BYTES == Stream::SLOT_BYTES && HostT::SPAN_BYTES == 16 * Product::SPAN_VECTORS &&
                      HostT::NUM_SUMS == Product::NUM_SUMS && HostT::NUM_BUFFERS == NUM_BUFFERS &&
                      HostT::TILE_WARPS == TILE_WARPS,
                  "gemv.py plans other sizes");

    alignas(128) extern __shared__ uint4 shared[];  // as slots are
    __shared__ float squares[ROWS][NUM_WARPS];
    __shared__ unsigned long long all_written[PARTS][NUM_BUFFERS], all_taken[PARTS][NUM_BUFFERS], squared;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = cluster_rank<BLOCKS>();
    const int part = warp / PART_WARPS, own = warp % PART_WARPS, of_tile = rank * PART_WARPS + own;
    unsigned long long* const written = all_written[part];
    unsigned long long* const taken = all_taken[part];
    const int num_tiles = (shape.num_outputs + shape.tile_outputs() - 1) / shape.tile_outputs();
    const int num_spans = spans_of<WeightT>(shape.num_inputs);
    // Shared memory: slots [stage][warp]; a chunk of x; sums of tiles [part][own buffer][warp of the tile]; each warp's
    // sums on their way to the other block; sums of every lane (LaneSums).
    constexpr int SLOT_VECTORS = Stream::SLOT_BYTES / 16, STAGE_VECTORS = NUM_WARPS * SLOT_VECTORS;
    uint4* inputs = shared + STAGES * STAGE_VECTORS;
    const int chunk_places = (shape.chunk_spans + TILE_WARPS - 1) / TILE_WARPS * PART_WARPS;
    float* all_partials = reinterpret_cast<float*>(inputs + chunk_places * Product::SPAN_VECTORS);
    float* partials = all_partials + part * OWN_BUFFERS * BUFFER_FLOATS;
    float* scratch = all_partials + PARTS * OWN_BUFFERS * BUFFER_FLOATS + (BLOCKS > 1 ? warp * WARP_FLOATS : 0);
    float* lane_sums = all_partials + PARTS * OWN_BUFFERS * BUFFER_FLOATS + (BLOCKS > 1 ? NUM_WARPS * WARP_FLOATS : 0) +
                       warp * Product::NUM_SUMS * 32 + lane;

    // No kernel writes weights: their copies run while this block waits for the activations.
    Stream stream = {
        tiles, scales, zero_points, num_tiles, num_spans, G::count(num_spans * UNITS), shape.chunk_spans,
        streaming_policy()};
    stream.begin(of_tile, lane);
#pragma unroll
    for (int s = 0; s < FIRST_STAGES; ++s) {
        stream.copy_next(shared_address(shared + s * STAGE_VECTORS + warp * SLOT_VECTORS + lane), of_tile, lane);
    }
    if (threadIdx.x < PARTS * NUM_BUFFERS) {
        barrier_init(&all_written[0][threadIdx.x], 32 * PART_WARPS);
        // When a warp has finished a tile, all its lanes arrive in its own block, and one lane in the other block.
        const bool is_home = home_of<BLOCKS>(threadIdx.x % NUM_BUFFERS, threadIdx.x / NUM_BUFFERS) == rank;
        barrier_init(&all_taken[0][threadIdx.x], (is_home ? 32 : 1) * Out::NUM_FINISHERS);
    }
    if (threadIdx.x == 0) barrier_init(&squared, BLOCK_SIZE);
    if constexpr (BLOCKS > 1) barrier_init_fence();
    if (threadIdx.x < ROWS * NUM_WARPS) {
        const int w = threadIdx.x % NUM_WARPS;
        if (w % TILE_WARPS / PART_WARPS == rank) squares[threadIdx.x / NUM_WARPS][w] = 0.0f;  // others are stored there
    }
    grid_dependency_launch();
    __syncthreads();                             // barriers and squares are initialised
    if constexpr (BLOCKS > 1) cluster_arrive();  // the other block's barriers too

    const bool has_norm = norm_weight != nullptr;
    Out output;
    float norm_factor = 0.0f;  // not known yet
    const auto finishes = [&](int local) {
        return home_of<BLOCKS>(local, part) == rank &&
               local / BLOCKS % (PART_WARPS / Out::NUM_FINISHERS) == own / Out::NUM_FINISHERS;
    };
    const auto finish = [&](int local, bool is_last) {
        const int buffer = local % NUM_BUFFERS;
        if (norm_factor == 0.0f) {
            if (has_norm) barrier_wait(&squared, 0);  // all warps have added theirs
            const int row = min(Out::row(own, lane), ROWS - 1);
            norm_factor = has_norm ? norm_factor_of<NUM_WARPS>(squares[row], shape) : 1.0f;
        }
        barrier_wait(&written[buffer], local / NUM_BUFFERS % 2);  // for the slowest warp: no other work is left
        output.write(partials + buffer / BLOCKS * BUFFER_FLOATS, norm_factor, out, shape, own, lane);
        barrier_arrive(&taken[buffer]);
        if (BLOCKS > 1 && !is_last) {  // else no block waits for it, and the other block may have ended
            __syncwarp();
            if (lane == 0) barrier_arrive_at(&taken[buffer], 1 - rank);
        }
    };
    const InputRows rows = {x, norm_weight, shape.num_rows, shape.num_inputs, shape.x_stride};
    const int num_clusters = gridDim.x / BLOCKS, tile_step = PARTS * num_clusters;
    const bool is_chunked = shape.chunk_spans < num_spans;
    int slot = warp * SLOT_VECTORS + lane;  // this lane's vector in the next one
#pragma unroll 1
    for (int begin = 0; begin < num_spans; begin += shape.chunk_spans) {
        const int end = min(begin + shape.chunk_spans, num_spans);
        if (begin > 0) sync_sharers<PARTS>(own);  // every lane has read the chunk before
        // No kernel writes the norm's weights either: their loads, and all addresses, come before the wait.
        const auto await_activations = [&] {
            if (begin == 0) grid_dependency_wait();
            if (BLOCKS > 1 && begin == 0) cluster_wait();
        };
        // Everything waits for the activations, so the last slots are copied after their loads.
        const auto fill_last_slots = [&] {
#pragma unroll
            for (int s = FIRST_STAGES; begin == 0 && s < STAGES; ++s) {
                stream.copy_next(shared_address(shared + slot + s * STAGE_VECTORS), of_tile, lane);
            }
        };
        Woven woven;
        if constexpr (WEAVES) {
            woven.load_weights(rows, begin + of_tile, end, lane);
            await_activations();
            woven.load_rows(rows, begin + of_tile, end, part, lane);
            fill_last_slots();
        } else {
            stage_spans<Product, ROWS, SPAN_INPUTS, NUM_WARPS, TILE_WARPS, BLOCKS>(
                inputs, rows, begin, end, squares, warp, lane, await_activations, fill_last_slots);
        }
        copy_async_wait<STAGES - 1>();
        sync_sharers<PARTS>(own);  // and sees the new one, and the first span
        const auto tell_squares = [&] {
            if (!has_norm || end < num_spans) return;
            if constexpr (WEAVES) sync_sharers<PARTS>(own);  // has added what it staged
            if (BLOCKS > 1 && threadIdx.x == 0) barrier_expect(&squared, ROWS * NUM_WARPS / BLOCKS * sizeof(float));
            barrier_arrive(&squared);
            // The first part sends the squares of all. `number` is recomputed here, so that no register keeps it.
            int thread = threadIdx.x;
            asm volatile("" : "+r"(thread));
            const int number = thread % 32;
            if (BLOCKS > 1 && thread < 32 * PART_WARPS && number < ROWS * NUM_WARPS / TILE_WARPS) {
                float* sum = &squares[number % ROWS][number / ROWS * TILE_WARPS + of_tile];
                store_async(sum, *sum, &squared, 1 - rank);
            }
        };
        if constexpr (!WEAVES) tell_squares();
        int local = 0;  // number of the tile in this part
#pragma unroll 1
        for (int tile = blockIdx.x / BLOCKS + part * num_clusters;; tile += tile_step, ++local) {
            const bool stages = WEAVES && local == 0, exists = tile < num_tiles;
            if (!exists && !stages) break;
            const int buffer = local % NUM_BUFFERS, use = local / NUM_BUFFERS;
            Product product;
            float* sums = lane_sums + (is_chunked ? local * NUM_WARPS * Product::NUM_SUMS * 32 : 0);
            product.sums.begin(sums, begin == 0);
            uint4* span_inputs = inputs + own * Product::SPAN_VECTORS;
#pragma unroll 1
            for (int span = begin + of_tile; span < end;
                 span += TILE_WARPS, span_inputs += PART_WARPS * Product::SPAN_VECTORS) {
                if (stages && (span - begin - of_tile) / TILE_WARPS % Woven::TURN_SPANS == 0) {
                    float of_squares[Woven::PASSES];
                    constexpr int STEP_VECTORS = PART_WARPS * Product::SPAN_VECTORS;
                    woven.stage(span_inputs, STEP_VECTORS, rows, span, end, of_squares, part, lane);
                    sync_sharers<PARTS>(own);
                    if (norm_weight != nullptr) woven.add_squares(of_squares, squares, span, part, lane);
                }
                if (!exists) continue;
                if constexpr (!LANDS_AHEAD) {
                    copy_async_wait<STAGES - 1>();
                    __syncwarp();
                }
                uint4 low[UNITS], high[UNITS];
#pragma unroll
                for (int unit = 0; unit < UNITS; ++unit) {
                    low[unit] = shared[slot + unit * UNIT_VECTORS];
                    high[unit] = shared[slot + unit * UNIT_VECTORS + 32];
                }
                const auto* span_scales =
                    reinterpret_cast<const unsigned char*>(shared + slot - lane + Stream::SPAN_VECTORS);
                product.add_span(low, high, span_scales, span_inputs, lane);
                // After these two the next span has arrived, and not too many copies run. Every lane has read the
                // slot, and sees the scales that other lanes copied.
                if constexpr (LANDS_AHEAD) copy_async_wait<PENDING>();
                __syncwarp();
                stream.copy_next(shared_address(shared + slot), of_tile, lane);
                slot += slot < (STAGES - 1) * STAGE_VECTORS ? STAGE_VECTORS : -(STAGES - 1) * STAGE_VECTORS;
            }
            if (stages) tell_squares();
            if (!exists) break;
            if (end < num_spans) {
                product.sums.leave(sums);
                continue;
            }
            if (use > 0) barrier_wait(&taken[buffer], (use - 1) % 2);
            float* tile_sums = partials + buffer / BLOCKS * BUFFER_FLOATS + of_tile * WARP_FLOATS;
            const int home = home_of<BLOCKS>(local, part);
            if (home == rank) {
                product.write(tile_sums, lane);
                if (BLOCKS > 1 && own == 0 && lane == 0) {
                    barrier_expect(&written[buffer], (TILE_WARPS - PART_WARPS) * WARP_FLOATS * sizeof(float));
                }
                barrier_arrive(&written[buffer]);  // every lane for itself, so that its own sums are seen
            } else {
                __syncwarp();  // every lane has read what it sent before
                product.write(scratch, lane);
                __syncwarp();
                if (4 * lane < WARP_FLOATS) {
                    const float4 sums_of_lane = reinterpret_cast<const float4*>(scratch)[lane];
                    store_async(tile_sums + 4 * lane, sums_of_lane, &written[buffer], home);
                }
            }
            // One tile late, when all warps have long arrived.
            if (local > 0 && finishes(local - 1)) {
                finish(local - 1, tile + (NUM_BUFFERS - 1) * tile_step >= num_tiles);
            }
            if (finishes(local)) output.template begin<HAS_CHANNEL_SCALE>(tile, scales, biases, out, shape, own, lane);
        }
        if (end == num_spans && local > 0 && finishes(local - 1)) finish(local - 1, true);
    }
    if (BLOCKS > 1 && has_norm) barrier_wait(&squared, 0);  // stored here, even if not read
}
