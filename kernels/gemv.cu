// gemv: y[r,m] = f(sum_k x'[r,k] * W[m,k] + bias[m]), x' = x or w * x / sqrt(mean(x^2) + eps)
//           Source: design 3; HF LlamaRMSNorm, LlamaMLP
// Shapes:   tiles [num_tiles][units][1024] bytes, scales [num_tiles][groups][16] ScaleT, zero_points alike uint8 or
//           null (common/tile.cuh); x [num_rows, x_stride] float of which num_inputs count; norm_weight [num_inputs]
//           float or null; bias [16 * num_tiles] float or null; out [num_rows, out_stride] float. EPILOGUE 0: out = y;
//           1: out += y; 2: a tile has 8 rows of gate and the same 8 of up, and out = silu(gate) * up
// Requires: 1 <= num_rows <= ROWS <= 8; out does not alias x; chunk_units a multiple of 16, or one chunk holds all
//           units; tiles, scales, zero_points, norm_weight 16-byte aligned
// Launch:   grid (a multiple of BLOCKS), block (512), dynamic shared memory by llmcli/kernels/gemv.py, clusters of
//           BLOCKS; may overlap the kernel before
// Traffic:  weights, scales and zero points once for all rows; x 4 * num_inputs bytes a row from L2 in every cluster;
//           out once
// Numerics: codes in exact integers, 16-bit weights exactly in the tensor cores; x' is right to e = 2^-22 (bf16: 2^-18)
//           of itself, or with codes to e = 1 / 63000 of the largest in its unit of 64 (int4: 128) inputs, which below
//           2^-100 counts as that and from 2^126 gives NaN; fp32 sums: |error| <= sqrt(K) * 2^-24 * S + e * T, S =
//           sum|x' * W|, T = S or sum max|x' of the unit| * |W|. Of a tile's N = 16 warps (int4: 8) warp w sums units w,
//           w + N, ..., and the warps are added in order: fixed, so equal runs give equal bits, and a row's bits depend
//           neither on the other rows nor on ROWS, STAGES, BLOCKS, chunks or the grid (columns of an mma are independent)
// Choice:   one block of 16 warps a multiprocessor, all on one tile or (int4) in halves on two; a warp works on a unit
//           as soon as it has landed, but asks for the next only when no more than PENDING are under way, as DRAM slows
//           down with more; the rest of the ring carries a warp over a stall, and is filled while the block waits for
//           the kernel before, and for x; with one or two rows no barrier of the block after the start: a warp stages
//           its own inputs (int4: two warps theirs), and warps take turns at outputs, a tile later; with more, two
//           blocks stage together. Rejected, with figures in docs/performance.md: two blocks of 8 warps, registers for
//           a second block beside, more copies under way, other orders of the units, tiles shared by two blocks, a 17th
//           warp for the outputs, codes as fp16
#include "common/barrier.cuh"
#include "common/launch.cuh"
#include "common/product_codes.cuh"
#include "common/product_floats.cuh"
#include "common/product_halves.cuh"
#include "common/unit_stream.cuh"

constexpr int BLOCK_SIZE = 512;
constexpr int NUM_WARPS = BLOCK_SIZE / 32;
constexpr int STORE = 0, ADD = 1, SWIGLU = 2;

struct GemvShape {
    int num_rows, num_inputs, num_outputs, x_stride, out_stride, chunk_units;
    float eps;
};

// PENDING: copies of a warp that may be under way when it asks for the next. With more of them DRAM delivers less, how
// much less differs from card to card; 16-bit weights, which bring no scales, bear more.
// BLOCKS: those that share the work of staging x. What every multiprocessor fetches of it is what several rows wait
// for; digits are half as many bytes, which pays for a way through the neighbour, and halves are as many.
// TILES: those that a block works on at once, each with its part of the warps. A tile costs a warp so much, however few
// units it has; units of int4 have twice as many inputs, so that there are half as many.
template <typename WeightT, typename ScaleT, int GROUP_SIZE, bool IS_SYMMETRIC, int ROWS>
struct ProductOf {
    using Type = CodeProduct<WeightT, ScaleT, GROUP_SIZE, IS_SYMMETRIC, ROWS>;
    static constexpr int PENDING = Type::IS_INT4 ? 2 : 1;
    static constexpr int BLOCKS = CAN_CLUSTER && ROWS > 2 ? 2 : 1;
    static constexpr int TILES = Type::IS_INT4 ? 2 : 1;
};
template <typename ScaleT, int ROWS>
struct ProductOf<__half, ScaleT, 0, true, ROWS> {
    using Type = HalfProduct<__half, ROWS>;
    static constexpr int PENDING = 3, BLOCKS = 1, TILES = 1;
};
template <typename ScaleT, int ROWS>
struct ProductOf<__nv_bfloat16, ScaleT, 0, true, ROWS> {
    using Type = HalfProduct<__nv_bfloat16, ROWS>;
    static constexpr int PENDING = 3, BLOCKS = 1, TILES = 1;
};
template <typename ScaleT, int ROWS>
struct ProductOf<float, ScaleT, 0, true, ROWS> {
    using Type = FloatProduct<ROWS>;
    static constexpr int PENDING = 3, BLOCKS = 1, TILES = 1;
};

// One lane's output of a tile: of its warp's two rows. NUM_FINISHERS warps turn the sums of a tile into outputs, the
// next ones those of the next tile.
template <int ROWS, int EPILOGUE, int TILE_WARPS>
struct Output {
    static constexpr int NUM_FINISHERS = ROWS > 2 ? ROWS / 2 : 1;
    static constexpr int COLUMNS = EPILOGUE == SWIGLU ? HALF_ROWS : TILE_ROWS;  // of out a tile

    float factor, bias, before;
    int place;  // in out; -1: none

    __device__ __forceinline__ static bool is_of_warp(int local, int warp) {
        return local % (TILE_WARPS / NUM_FINISHERS) == warp / NUM_FINISHERS;
    }
    __device__ __forceinline__ static int row(int warp, int lane) {
        return warp % NUM_FINISHERS * 2 + lane / TILE_ROWS;
    }

    // Asks for what is needed beside the sums.
    template <bool HAS_CHANNEL_SCALE, typename ScaleT>
    __device__ __forceinline__ void begin(int tile, const ScaleT* scales, const float* biases, float* out,
                                          const GemvShape& shape, int warp, int lane) {
        const int own_row = row(warp, lane), index = tile * TILE_ROWS + lane % TILE_ROWS;
        const int column = tile * COLUMNS + lane % TILE_ROWS;
        const bool exists = own_row < shape.num_rows && lane % TILE_ROWS < COLUMNS && column < shape.num_outputs;
        place = exists ? own_row * shape.out_stride + column : -1;
        factor = HAS_CHANNEL_SCALE ? to_float(scales[index]) : 1.0f;
        bias = biases != nullptr ? biases[index] : 0.0f;
        before = EPILOGUE == ADD && exists ? __ldcg(out + place) : 0.0f;
    }

    // `sums` is [warp][row][16] of the tile.
    __device__ __forceinline__ void write(const float* sums, float norm_factor, float* out, int warp, int lane) const {
        const float* of_warp = sums + min(row(warp, lane), ROWS - 1) * TILE_ROWS + lane % TILE_ROWS;
        float result = 0.0f;
#pragma unroll
        for (int w = 0; w < TILE_WARPS; ++w) result = __fadd_rn(result, of_warp[w * ROWS * TILE_ROWS]);
        result = __fadd_rn(__fmul_rn(__fmul_rn(result, factor), norm_factor), bias);
        if constexpr (EPILOGUE == ADD) result = __fadd_rn(before, result);
        if constexpr (EPILOGUE == SWIGLU) {
            const float up = __shfl_down_sync(0xffffffffu, result, HALF_ROWS);
            const float sigmoid = __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-result)));
            result = __fmul_rn(__fmul_rn(result, sigmoid), up);
        }
        if (place >= 0) out[place] = result;
    }
};

// Of the warps `own` of all tiles in work, which multiply the same inputs: each has staged a part of them.
template <int TILES, int TILE_WARPS>
__device__ __forceinline__ void sync_sharers(int own) {
    if constexpr (TILES == 1) {
        __syncwarp();
    } else {
        sync_threads_of<32 * TILES>(1 + own);
    }
}

// 1 / sqrt(mean of the squares + eps), from the warps' sums of them.
__device__ __forceinline__ float norm_factor_of(const float* squares, const GemvShape& shape) {
    float sum = squares[0];
#pragma unroll
    for (int w = 1; w < NUM_WARPS; ++w) sum = __fadd_rn(sum, squares[w]);
    const float mean = __fdiv_rn(sum, static_cast<float>(shape.num_inputs));
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, shape.eps)));
}

template <typename WeightT, typename ScaleT, int GROUP_SIZE, bool IS_SYMMETRIC, int ROWS, int EPILOGUE,
          int STAGES>
__global__ void __launch_bounds__(BLOCK_SIZE, 1)
#if __CUDA_ARCH__ >= 900
__cluster_dims__(ProductOf<WeightT, ScaleT, GROUP_SIZE, IS_SYMMETRIC, ROWS>::BLOCKS, 1, 1)
#endif
    gemv(const unsigned char* __restrict__ tiles, const ScaleT* __restrict__ scales,
         const unsigned char* __restrict__ zero_points, const float* x, const float* __restrict__ norm_weight,
         const float* __restrict__ biases, float* out, GemvShape shape) {
    constexpr int UNIT_INPUTS = TileFormat<WeightT>::UNIT_INPUTS;
    constexpr bool HAS_CHANNEL_SCALE = GROUP_SIZE == 0 && TileFormat<WeightT>::OFFSET != 0;
    using G = Groups<WeightT, GROUP_SIZE>;
    using Choice = ProductOf<WeightT, ScaleT, GROUP_SIZE, IS_SYMMETRIC, ROWS>;
    using Product = typename Choice::Type;
    constexpr int TILES = Choice::TILES, TILE_WARPS = NUM_WARPS / TILES;
    using Stream = UnitStream<WeightT, ScaleT, GROUP_SIZE, IS_SYMMETRIC, TILE_WARPS, TILES>;
    constexpr int BLOCKS = Choice::BLOCKS;
    constexpr int FIRST_STAGES = STAGES > 3 ? STAGES - 2 : 1;  // before anything else
    // A ring of two has no slot for a unit that waits its turn: there only the one in work must have landed.
    constexpr bool LANDS_AHEAD = STAGES > 2;
    constexpr int PENDING = Choice::PENDING < STAGES - 2 ? Choice::PENDING : STAGES - 2;

    using Out = Output<ROWS, EPILOGUE, TILE_WARPS>;
    constexpr int NUM_BUFFERS = ROWS > 2 ? 2 : 4;  // of sums of a tile by warp
    constexpr int BUFFER_FLOATS = TILE_WARPS * ROWS * TILE_ROWS;

    extern __shared__ uint4 shared[];
    __shared__ float squares[ROWS][NUM_WARPS];
    __shared__ unsigned long long all_written[TILES][NUM_BUFFERS], all_taken[TILES][NUM_BUFFERS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int part = warp / TILE_WARPS, own = warp % TILE_WARPS;  // a part's warps work on one tile
    unsigned long long* const written = all_written[part];
    unsigned long long* const taken = all_taken[part];
    const int num_tiles = (shape.num_outputs + Out::COLUMNS - 1) / Out::COLUMNS;
    const int num_units = (shape.num_inputs + UNIT_INPUTS - 1) / UNIT_INPUTS;
    // Shared memory: slots [stage][warp], a chunk of x, tiles' sums by warp, and sums of every lane (LaneSums).
    constexpr int SLOT_VECTORS = Stream::SLOT_BYTES / 16, STAGE_VECTORS = NUM_WARPS * SLOT_VECTORS;
    uint4* inputs = shared + STAGES * STAGE_VECTORS;
    float* all_partials = reinterpret_cast<float*>(inputs + shape.chunk_units * Product::UNIT_VECTORS);
    float* partials = all_partials + part * NUM_BUFFERS * BUFFER_FLOATS;
    float* lane_sums = all_partials + TILES * NUM_BUFFERS * BUFFER_FLOATS + warp * Product::NUM_SUMS * 32 + lane;

    // Weights depend on no kernel before: their copies run while this block waits for the activations.
    Stream stream = {tiles, scales, zero_points, num_tiles, num_units, G::count(num_units),
                     shape.chunk_units, streaming_policy()};
    stream.begin(own, lane);
#pragma unroll
    for (int s = 0; s < FIRST_STAGES; ++s) {
        stream.copy_next(shared_address(shared + s * STAGE_VECTORS + warp * SLOT_VECTORS + lane), own, lane);
    }
    if (threadIdx.x < TILES * NUM_BUFFERS) {
        barrier_init(&all_written[0][threadIdx.x], 32 * TILE_WARPS);
        barrier_init(&all_taken[0][threadIdx.x], 32 * Out::NUM_FINISHERS);
    }
    if (threadIdx.x < ROWS * NUM_WARPS) squares[threadIdx.x / NUM_WARPS][threadIdx.x % NUM_WARPS] = 0.0f;
    grid_dependency_launch();
    __syncthreads();  // barriers and squares stand
    if constexpr (BLOCKS > 1) cluster_arrive();  // ... for the others too
    grid_dependency_wait();

    Out output;
    float norm_factor = 0.0f;  // not known yet
    const auto finish = [&](int local) {
        const int buffer = local % NUM_BUFFERS;
        barrier_wait(&written[buffer], local / NUM_BUFFERS % 2);
        if (norm_factor == 0.0f) {
            const int row = min(Out::row(own, lane), ROWS - 1);
            norm_factor = norm_weight != nullptr ? norm_factor_of(squares[row], shape) : 1.0f;
        }
        output.write(partials + buffer * BUFFER_FLOATS, norm_factor, out, own, lane);
        barrier_arrive(&taken[buffer]);
    };
    const InputRows rows = {x, norm_weight, shape.num_rows, shape.num_inputs, shape.x_stride};
    const bool is_chunked = shape.chunk_units < num_units;
    int slot = warp * SLOT_VECTORS + lane;  // this lane's vector in the next one
#pragma unroll 1
    for (int begin = 0; begin < num_units; begin += shape.chunk_units) {
        const int end = min(begin + shape.chunk_units, num_units);
        // Every lane has read the chunk before.
        if constexpr (BLOCKS > 1) {
            cluster_wait();
        } else {
            sync_sharers<TILES, TILE_WARPS>(own);
        }
        // The last slots' copies queue up behind the loads of the activations, which everything waits for.
        const auto fill_last_slots = [&] {
#pragma unroll
            for (int s = FIRST_STAGES; begin == 0 && s < STAGES; ++s) {
                stream.copy_next(shared_address(shared + slot + s * STAGE_VECTORS), own, lane);
            }
        };
        stage_units<Product, ROWS, UNIT_INPUTS, NUM_WARPS, BLOCKS>(inputs, rows, begin, end, squares, warp, lane,
                                                                   fill_last_slots);
        // And sees the new one, and the first unit.
        copy_async_wait<STAGES - 1>();
        if constexpr (BLOCKS > 1) {
            cluster_arrive();
            cluster_wait();
        } else {
            sync_sharers<TILES, TILE_WARPS>(own);
        }
        int local = 0;  // number of the tile in this part of the block
#pragma unroll 1
        for (int tile = blockIdx.x + part * gridDim.x; tile < num_tiles; tile += TILES * gridDim.x, ++local) {
            const int buffer = local % NUM_BUFFERS, use = local / NUM_BUFFERS;
            Product product;
            float* sums = lane_sums + (is_chunked ? local * NUM_WARPS * Product::NUM_SUMS * 32 : 0);
            product.sums.begin(sums, begin == 0);
            const uint4* unit_inputs = inputs + own * Product::UNIT_VECTORS;
#pragma unroll 1
            for (int unit = begin + own; unit < end; unit += TILE_WARPS) {
                if constexpr (!LANDS_AHEAD) {
                    copy_async_wait<STAGES - 1>();
                    __syncwarp();
                }
                const uint4 low = shared[slot], high = shared[slot + 32];
                const auto* unit_scales = reinterpret_cast<const unsigned char*>(shared + slot - lane + UNIT_VECTORS);
                product.add_unit(low, high, unit_scales, unit_inputs, lane);
                // The next unit is there, and not too many are under way. Every lane has read the slot, and sees the
                // scales that other lanes have copied.
                if constexpr (LANDS_AHEAD) copy_async_wait<PENDING>();
                __syncwarp();
                stream.copy_next(shared_address(shared + slot), own, lane);
                slot += slot < (STAGES - 1) * STAGE_VECTORS ? STAGE_VECTORS : -(STAGES - 1) * STAGE_VECTORS;
                unit_inputs += TILE_WARPS * Product::UNIT_VECTORS;
            }
            if (end < num_units) {
                product.sums.leave(sums);
                continue;
            }
            if (use > 0) barrier_wait(&taken[buffer], (use - 1) % 2);
            product.write(partials + buffer * BUFFER_FLOATS + own * ROWS * TILE_ROWS, lane);
            barrier_arrive(&written[buffer]);  // every lane for itself, so that its own sums are seen
            // One tile late, when no warp is left to wait for.
            if (local > 0 && Out::is_of_warp(local - 1, own)) finish(local - 1);
            if (Out::is_of_warp(local, own)) {
                output.template begin<HAS_CHANNEL_SCALE>(tile, scales, biases, out, shape, own, lane);
            }
        }
        if (end == num_units && local > 0 && Out::is_of_warp(local - 1, own)) finish(local - 1);
        if (BLOCKS > 1 && end < num_units) cluster_arrive();
    }
}
