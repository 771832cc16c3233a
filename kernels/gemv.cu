// gemv: y[r,m] = f(sum_k x'[r,k] * W[m,k] + bias[m]), x' = x or w * x / sqrt(mean(x^2) + eps)
//           Source: design 3; HF LlamaRMSNorm, LlamaMLP
// Shapes:   tiles [num_tiles][units][1024] bytes, scales [num_tiles][groups][16] ScaleT, zero_points alike uint8 or
//           null (common/tile.cuh); x [num_rows, x_stride] float of which num_inputs count; norm_weight [num_inputs]
//           float or null; bias [16 * num_tiles] float or null; out [num_rows, out_stride] float. EPILOGUE 0: out = y;
//           1: out += y; 2: tiles alternate gate, up and out = silu(gate) * up
// Requires: 1 <= num_rows <= 8; num_rows * Groups::ACROSS_LANES <= 4 * COLUMN_TILES (fp32: num_rows <= 4 *
//           COLUMN_TILES); out does not alias x; chunk_units * UNIT_INPUTS a multiple of 2048, or one chunk holds all
//           inputs; tiles, scales, zero_points, norm_weight 16-byte aligned
// Launch:   grid (at most one block an item of 1 or 2 tiles), block (256), dynamic shared memory by
//           llmcli/kernels/gemv.py; may overlap the kernel before
// Traffic:  weights, scales and zero points once for all rows; x 4 * num_inputs bytes a row from L2 in every block; out
//           once
// Numerics: fp32 accumulation in the tensor cores of exact weights and x as hi + lo (common/activations.cuh): |error|
//           <= (sqrt(K) * 2^-24 + 2^-22) * S (bf16: 2^-18), S = sum|x' * W|. Warp w sums units w, w + 8, ... of a tile,
//           the warps are added in order: fixed, so equal runs give equal bits, and a row's bits depend neither on the
//           other rows nor on COLUMN_TILES, STAGES, chunks or the grid (columns of an mma are independent)
// Choice:   a ring of cp.async copies of a warp's own bytes keeps 8 KiB to 32 KiB a block in flight over barriers and
//           tile ends at few registers, and starts before the wait for the kernel in front; rejected: loads into
//           registers, whose ring must be unrolled against the tile ends
#include "common/activations.cuh"
#include "common/launch.cuh"
#include "common/tile_sum.cuh"

constexpr int BLOCK_SIZE = 256;
constexpr int NUM_WARPS = BLOCK_SIZE / 32;
constexpr int MAX_ROWS = 8;
constexpr int STORE = 0, ADD = 1, SWIGLU = 2;

struct GemvShape {
    int num_rows, num_inputs, num_outputs, x_stride, out_stride, chunk_units;
    float eps;
};

// One warp's units in the order of their use: of every tile of the block's items the units warp, warp + NUM_WARPS, ...
template <typename WeightT, typename ScaleT, int GROUP_SIZE, bool IS_SYMMETRIC, int ITEM_TILES>
struct UnitStream {
    using G = Groups<WeightT, GROUP_SIZE>;
    static constexpr int SCALE_VECTORS = G::IS_GROUPED ? G::PER_UNIT * static_cast<int>(sizeof(ScaleT)) : 0;
    static constexpr int ZERO_VECTORS = G::IS_GROUPED && !IS_SYMMETRIC ? G::PER_UNIT : 0;
    static constexpr int SLOT_BYTES = UNIT_BYTES + 16 * (SCALE_VECTORS + ZERO_VECTORS);

    const unsigned char* tiles;
    const ScaleT* scales;
    const unsigned char* zero_points;
    int num_tiles, num_units, num_groups;
    int tile, unit;
    unsigned long long policy;

    // Starts the copies of the next unit, if there is one, as one group.
    __device__ __forceinline__ void copy_next(unsigned slot, int warp, int lane) {
        if (tile < num_tiles) {
            const size_t place = static_cast<size_t>(tile) * num_units + unit;
            const unsigned char* source = tiles + place * UNIT_BYTES + 16 * lane;
            copy_async_streaming(slot + 16 * lane, source, policy);
            copy_async_streaming(slot + 512 + 16 * lane, source + 512, policy);
            if constexpr (G::IS_GROUPED) {
                const size_t group = static_cast<size_t>(tile) * num_groups + G::first(unit);
#pragma unroll
                for (int v = 0; v < SCALE_VECTORS + ZERO_VECTORS; v += 32) {
                    const int vector = v + lane;
                    const unsigned char* from =
                        vector < SCALE_VECTORS
                            ? reinterpret_cast<const unsigned char*>(scales + group * TILE_ROWS) + 16 * vector
                            : zero_points + group * TILE_ROWS + 16 * (vector - SCALE_VECTORS);
                    if (vector < SCALE_VECTORS + ZERO_VECTORS) copy_async(slot + UNIT_BYTES + 16 * vector, from);
                }
            }
            unit += NUM_WARPS;
            if (unit >= num_units) {
                unit = warp;
                const bool is_last_of_item = ITEM_TILES == 1 || tile % 2 == 1;
                tile += is_last_of_item ? 1 + ITEM_TILES * (static_cast<int>(gridDim.x) - 1) : 1;
            }
        }
        copy_async_commit();
    }
};

template <typename WeightT, typename ScaleT, int GROUP_SIZE, bool IS_SYMMETRIC, int COLUMN_TILES, int EPILOGUE,
          int STAGES>
__global__ void __launch_bounds__(BLOCK_SIZE, COLUMN_TILES > 4 ? 1 : 2)
    gemv(const unsigned char* __restrict__ tiles, const ScaleT* __restrict__ scales,
         const unsigned char* __restrict__ zero_points, const float* x, const float* __restrict__ norm_weight,
         const float* __restrict__ bias, float* out, GemvShape shape) {
    constexpr int ITEM_TILES = EPILOGUE == SWIGLU ? 2 : 1;
    constexpr int UNIT_INPUTS = TileFormat<WeightT>::UNIT_INPUTS;
    constexpr bool HAS_CHANNEL_SCALE = GROUP_SIZE == 0 && TileFormat<WeightT>::OFFSET != 0;
    using G = Groups<WeightT, GROUP_SIZE>;
    using Rows = Activations<WeightT, BLOCK_SIZE>;
    using Stream = UnitStream<WeightT, ScaleT, GROUP_SIZE, IS_SYMMETRIC, ITEM_TILES>;

    extern __shared__ uint4 shared[];
    __shared__ float2 measures[MAX_ROWS][NUM_WARPS];
    __shared__ RowFactors row_factors[MAX_ROWS];
    const int num_rows = shape.num_rows;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int num_items = (shape.num_outputs + TILE_ROWS - 1) / TILE_ROWS;
    const int num_units = (shape.num_inputs + UNIT_INPUTS - 1) / UNIT_INPUTS;
    const int unit_vectors = UNIT_INPUTS / 4 * num_rows;
    uint4* ring = shared + shape.chunk_units * unit_vectors;
    constexpr int SLOT_VECTORS = Stream::SLOT_BYTES / 16;
    float* partials = reinterpret_cast<float*>(ring + NUM_WARPS * STAGES * SLOT_VECTORS);
    ring += warp * STAGES * SLOT_VECTORS;

    // Weights depend on no kernel before: their copies run while this block waits for the activations.
    Stream stream = {tiles, scales, zero_points, num_items * ITEM_TILES, num_units, G::count(num_units),
                     static_cast<int>(blockIdx.x) * ITEM_TILES, warp, streaming_policy()};
    if (warp >= num_units) stream.tile = stream.num_tiles;
#pragma unroll
    for (int s = 0; s < STAGES; ++s) stream.copy_next(shared_address(ring + s * SLOT_VECTORS), warp, lane);
    grid_dependency_launch();
    grid_dependency_wait();

    const int chunk_inputs = shape.chunk_units * UNIT_INPUTS;
    const int padded_inputs = num_units * UNIT_INPUTS;
    const auto load = [&](int row, int first, float& largest, float& squares) {
        Rows::load_row(reinterpret_cast<float4*>(shared), x + static_cast<size_t>(row) * shape.x_stride, norm_weight,
                       shape.num_inputs, first, min(chunk_inputs, padded_inputs - first), row, num_rows, largest,
                       squares);
    };
    const auto split = [&](int row, int first) {
        Rows::split_row(reinterpret_cast<float4*>(shared), min(chunk_inputs, padded_inputs - first), row, num_rows,
                        row_factors[row].scale);
    };
    for (int row = 0; row < num_rows; ++row) {
        float largest = 0.0f, squares = 0.0f;
        for (int first = 0; first < padded_inputs; first += chunk_inputs) load(row, first, largest, squares);
        largest = warp_max(largest);
        squares = warp_sum(squares);
        if (lane == 0) measures[row][warp] = make_float2(largest, squares);
    }
    __syncthreads();  // measures are written
    if (threadIdx.x < num_rows) {
        float2 all = measures[threadIdx.x][0];
#pragma unroll
        for (int w = 1; w < NUM_WARPS; ++w) {
            const float2 one = measures[threadIdx.x][w];
            all = make_float2(fmaxf(all.x, one.x), __fadd_rn(all.y, one.y));
        }
        row_factors[threadIdx.x] = Rows::factors(all.x, all.y, norm_weight != nullptr, shape.num_inputs, shape.eps);
    }
    __syncthreads();  // row_factors are written
    const bool is_one_chunk = chunk_inputs >= padded_inputs;
    if (is_one_chunk) {
        for (int row = 0; row < num_rows; ++row) split(row, 0);
        __syncthreads();  // all activations stand
    }

    // Thread -> one output of an item: row output_row, number output_lane of the tile.
    const int output_row = threadIdx.x / TILE_ROWS, output_lane = threadIdx.x % TILE_ROWS;
    int slot = 0, buffer = 0;
    for (int item = blockIdx.x; item < num_items; item += gridDim.x, buffer ^= 1) {
        const int output = item * TILE_ROWS + output_lane;
        const bool has_output = output_row < num_rows && output < shape.num_outputs;
        float* destination = out + static_cast<size_t>(output_row) * shape.out_stride + output;
        float factors[ITEM_TILES], biases[ITEM_TILES];
#pragma unroll
        for (int i = 0; i < ITEM_TILES; ++i) {  // asked for now, needed at the item's end
            const int index = (item * ITEM_TILES + i) * TILE_ROWS + output_lane;
            factors[i] = HAS_CHANNEL_SCALE && has_output ? to_float(scales[index]) : 1.0f;
            biases[i] = bias != nullptr && has_output ? bias[index] : 0.0f;
        }
        const float before = EPILOGUE == ADD && has_output ? load_fresh_one(destination) : 0.0f;
        float* item_partials = partials + buffer * ITEM_TILES * NUM_WARPS * num_rows * TILE_ROWS;

#pragma unroll 1
        for (int i = 0; i < ITEM_TILES; ++i) {
            TileSum<WeightT, ScaleT, GROUP_SIZE, IS_SYMMETRIC, COLUMN_TILES> sum;
            sum.clear();
#pragma unroll 1
            for (int first = 0; first < num_units; first += shape.chunk_units) {
                if (!is_one_chunk) {
                    __syncthreads();  // the chunk before is read
                    float unused = 0.0f;
                    for (int row = 0; row < num_rows; ++row) {
                        load(row, first * UNIT_INPUTS, unused, unused);
                        split(row, first * UNIT_INPUTS);
                    }
                    __syncthreads();  // this chunk stands
                }
                const int end = min(first + shape.chunk_units, num_units);
#pragma unroll 1
                for (int unit = first + warp; unit < end; unit += NUM_WARPS) {
                    copy_async_wait<STAGES - 1>();
                    __syncwarp();  // scales were copied by other lanes
                    uint4* bytes = ring + slot * SLOT_VECTORS;
                    const uint4 low = bytes[lane], high = bytes[32 + lane];
                    sum.add_unit(low, high, reinterpret_cast<unsigned char*>(bytes + UNIT_VECTORS),
                                 shared + (unit - first) * unit_vectors, num_rows, lane);
                    __syncwarp();  // every lane has read the slot
                    stream.copy_next(shared_address(bytes), warp, lane);
                    slot = slot + 1 == STAGES ? 0 : slot + 1;
                }
            }
            sum.write(item_partials + (i * NUM_WARPS + warp) * num_rows * TILE_ROWS, num_rows, lane);
        }
        __syncthreads();  // the item's partials are written; the other buffer is read until the next barrier
        if (!has_output) continue;
        float results[ITEM_TILES];
#pragma unroll
        for (int i = 0; i < ITEM_TILES; ++i) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < NUM_WARPS; ++w) {
                const int of_warp = (i * NUM_WARPS + w) * num_rows * TILE_ROWS;
                sum = __fadd_rn(sum, item_partials[of_warp + threadIdx.x]);
            }
            results[i] = __fadd_rn(__fmul_rn(__fmul_rn(sum, factors[i]), row_factors[output_row].factor), biases[i]);
        }
        if constexpr (EPILOGUE == STORE) *destination = results[0];
        if constexpr (EPILOGUE == ADD) *destination = __fadd_rn(before, results[0]);
        if constexpr (EPILOGUE == SWIGLU) {
            const float sigmoid = __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-results[0])));
            *destination = __fmul_rn(__fmul_rn(results[0], sigmoid), results[ITEM_TILES - 1]);
        }
    }
    copy_async_wait<0>();
}
