// gemm_halves: y[n,m] = f(factors[n] * sum_k x[n,k] * W[m,k] + bias[m]) for 9 and more rows and floats of 8 and 16 bits
//           Source: kernels/gemv.cu, whose bits it gives; PTX ISA, wgmma and cp.async.bulk
// Shapes:   tiles [num_tiles][units][1024] bytes of weights (common/tile.cuh); scales [num_tiles][groups][16] ScaleT,
//           or null for 16 bits; image and factors as stage_halves writes them; biases [16 * num_tiles] float or null;
//           out [num_rows, out_stride] float. Epilogues as in gemv
// Requires: sm_90a; tiles, image 16-byte aligned
// Launch:   clusters of QUARTERS * SHARERS blocks (384); one for each item of work with QUARTERS = 4, else any number
//           of them; dynamic shared memory by llmcli/kernels/gemm_halves.py; may overlap the kernel in front
// Traffic:  weights once for every TOKENS rows, side by side so that L2 serves all but the first; the image once for
//           every SHARERS blocks of 16 * TILES outputs
// Numerics: those of gemv, bit for bit: each chunk of units is one chain of k-steps with the same inputs (for fp16 and
//           8 bits each unit), wgmma rounds as mma does, and fp32 sums have gemv's order. So a row's bits do not depend
//           on how many rows run with it
// Choice:   A block multiplies TILES tiles with TOKENS rows: two groups of four warps hold weights in registers, and
//           while one fetches its next unit the tensor cores work for the other. Four more warps copy, weights by small
//           copies of each lane: bulk copies of a kilobyte start one after the other, which took longer than the rest.
//           With QUARTERS = 1 a block stays and takes one item of work after the other; where there are too few of
//           them, four blocks share one and add their quarters of the chunks at the end. SHARERS blocks fetch the rows
//           together
#include "common/cluster.cuh"
#include "common/half_image.cuh"
#include "common/halves_output.cuh"
#include "common/launch.cuh"
#include "common/wgmma.cuh"

constexpr int COPIERS = 4, BLOCK_SIZE = NUM_THREADS + 32 * COPIERS;

template <typename WeightT, typename ScaleT, int GROUP_SIZE, int TOKENS, int QUARTERS, int SHARERS, int TILES,
          int STAGES, int HOST_SHARED_BYTES>
__global__ void __launch_bounds__(BLOCK_SIZE, 1)
#if __CUDA_ARCH__ >= 900
    __cluster_dims__(QUARTERS* SHARERS, 1, 1)
#endif
        gemm_halves(const unsigned char* __restrict__ tiles, const ScaleT* __restrict__ scales,
                    const unsigned char* image, const float* factors, const float* __restrict__ biases, float* out,
                    HalvesShape shape) {
    using Image = HalfImage<WeightT, TOKENS>;
    using G = Groups<WeightT, GROUP_SIZE>;
    using ActivationT = typename TileFormat<WeightT>::ActivationT;
    constexpr bool HAS_SCALE = HAS_UNIT_SCALE<WeightT>;
    constexpr bool HAS_CHANNEL_SCALE = GROUP_SIZE == 0 && TileFormat<WeightT>::HAS_SCALES;
    // Chunk w is the work of warp w of a tile in gemv: the spans w, w + CHUNKS, ...
    constexpr int CHUNKS = TileFormat<WeightT>::HAS_SCALES ? 8 : 16, QUARTER_CHUNKS = CHUNKS / 4;
    constexpr int CLUSTER = QUARTERS * SHARERS;
    constexpr int TILES_A_WARP = TILES / MULTIPLIERS, COLUMN_TILES = Image::COLUMNS / 8;
    // Of a thread that multiplies, and of one that copies. Whole groups of four warps give and take registers.
    constexpr int MOST_REGISTERS = TILES_A_WARP > 1 ? 240 : 232, FEWEST_REGISTERS = TILES_A_WARP > 1 ? 24 : 40;
    constexpr int IMAGE_BYTES = (Image::UNIT_BYTES + 127) / 128 * 128;
    constexpr int STAGE_BYTES = IMAGE_BYTES + TILES * UNIT_BYTES;
    // Sums wait in shared memory, two rows of a lane in a vector: those of all quarters so far, and with a unit scale
    // those of this quarter, whose chunks then take all registers.
    constexpr int ROW_VECTORS = COLUMN_TILES / 2, VECTORS = TILES_A_WARP * ROW_VECTORS;
    constexpr int BUFFERS = HAS_SCALE && QUARTERS == 1 ? 2 : 1;
    static_assert(HOST_SHARED_BYTES == STAGES * STAGE_BYTES + BUFFERS * VECTORS * NUM_THREADS * 16,
                  "gemm_halves.py plans another size");

    alignas(128) extern __shared__ uint4 shared[];
    unsigned char* memory = reinterpret_cast<unsigned char*>(shared);
    float4* results = reinterpret_cast<float4*>(memory + STAGES * STAGE_BYTES) + threadIdx.x;
    float4* quarters = results + (BUFFERS - 1) * VECTORS * NUM_THREADS;
    __shared__ unsigned long long filled[STAGES], emptied[STAGES];

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int rank = cluster_rank<CLUSTER>(), quarter = rank / SHARERS, sharer = rank % SHARERS;
    const int num_tiles = (shape.num_outputs + shape.tile_outputs() - 1) / shape.tile_outputs();
    const int num_spans = spans_of<WeightT>(shape.num_inputs), num_units = num_spans * Image::UNITS;
    const int num_row_blocks = (shape.num_rows + TOKENS - 1) / TOKENS;
    const int num_items = num_row_blocks * ((num_tiles + SHARERS * TILES - 1) / (SHARERS * TILES));
    const int first_item = blockIdx.x / CLUSTER, item_step = gridDim.x / CLUSTER;
    const int first_chunk = quarter * QUARTER_CHUNKS, end_chunk = first_chunk + CHUNKS / QUARTERS;
    const auto next_unit = [](int unit) {
        return unit + 1 + ((unit + 1) % Image::UNITS == 0 ? (CHUNKS - 1) * Image::UNITS : 0);
    };
    const auto first_tile = [&](int item) { return (item / num_row_blocks * SHARERS + sharer) * TILES; };

    if (threadIdx.x < STAGES) {
        barrier_init(&filled[threadIdx.x], COPIERS * 32 + 1);
        barrier_init(&emptied[threadIdx.x], MULTIPLIERS * SHARERS);
    }
    barrier_init_fence();
    grid_dependency_launch();
    __syncthreads();  // barriers are initialised, here
    cluster_arrive();
    cluster_wait();  // and in the blocks that share rows

    if (warp >= MULTIPLIERS) {
        registers_down_to<FEWEST_REGISTERS>();
        // A warp copies its share of the tiles, and the first warp the rows too.
        constexpr int OWN_TILES = TILES / COPIERS, PART_BYTES = Image::UNIT_BYTES / SHARERS;
        const int own = warp - MULTIPLIERS;
        unsigned own_tiles[OWN_TILES];  // this lane's first vector of each; no registers are free for pointers
        const unsigned char* rows = nullptr;
        const auto copy_tiles = [&](int stage, int unit) {
            const unsigned slot =
                shared_address(memory) + stage * STAGE_BYTES + IMAGE_BYTES + own * UNIT_BYTES + 16 * lane;
#pragma unroll
            for (int i = 0; i < OWN_TILES; ++i) {
                const uint4* source = reinterpret_cast<const uint4*>(tiles) + own_tiles[i] + unit * UNIT_VECTORS;
                copy_async(slot + i * COPIERS * UNIT_BYTES, source);
                copy_async(slot + i * COPIERS * UNIT_BYTES + 512, source + 32);
            }
            barrier_arrive_behind_copies(&filled[stage]);
        };
        const auto copy_rows = [&](int stage, int unit) {
            if (own > 0 || lane > 0) return;
            barrier_expect(&filled[stage], Image::UNIT_BYTES);
            copy_bulk_to_sharers<SHARERS>(shared_address(memory + stage * STAGE_BYTES + sharer * PART_BYTES),
                                          rows + static_cast<size_t>(unit) * Image::UNIT_BYTES, PART_BYTES,
                                          &filled[stage], ((1 << SHARERS) - 1) << (quarter * SHARERS));
            barrier_arrive(&filled[stage]);
        };
        // First the weights of the first stages, which no kernel writes, while the rows are still being written. Then
        // their rows, and everything else.
        int stage = 0;
        unsigned parity = 1;
        bool is_first_round = true;
#pragma unroll 1
        for (int pass = 0; pass < 2; ++pass) {
            const int most = pass == 0 ? STAGES : num_items * num_units;  // units
            int count = 0;
#pragma unroll 1
            for (int item = first_item; item < num_items && count < most; item += item_step) {
#pragma unroll
                for (int i = 0; i < OWN_TILES; ++i) {
                    const int tile = min(first_tile(item) + own + i * COPIERS, num_tiles - 1);
                    own_tiles[i] = static_cast<unsigned>(tile * num_units) * UNIT_VECTORS + lane;
                }
                rows = image + static_cast<size_t>(item % num_row_blocks) * num_units * Image::UNIT_BYTES +
                       sharer * PART_BYTES;
#pragma unroll 1
                for (int chunk = first_chunk; chunk < min(end_chunk, num_spans); ++chunk) {
                    int unit = chunk * Image::UNITS;
#pragma unroll 1
                    for (; unit < num_units && count < most; unit = next_unit(unit), ++count) {
                        if (pass == 1 && !is_first_round) barrier_wait(&emptied[stage], parity);
                        if (pass == 0 || !is_first_round) copy_tiles(stage, unit);
                        if (pass == 1) {
                            copy_rows(stage, unit);
                            if (stage == STAGES - 1) parity ^= 1, is_first_round = false;
                        }
                        if (++stage == STAGES) stage = 0;
                    }
                }
            }
            if (pass == 0) grid_dependency_wait();
            stage = 0;
        }
        // As often as the other warps.
        if constexpr (QUARTERS > 1) {
            cluster_arrive();
            cluster_wait();
        }
        cluster_arrive();
        cluster_wait();
        return;
    }

    registers_up_to<MOST_REGISTERS>();
    grid_dependency_wait();
    int stage = 0;
    unsigned parity = 0;
    float products[TILES_A_WARP][4 * COLUMN_TILES];
    float sums[TILES_A_WARP][2 * COLUMN_TILES];  // of a chunk with a unit scale, else of a quarter
    float weight_scales[TILES_A_WARP][2];  // of a span; loaded while its first unit is multiplied
#pragma unroll
    for (int m = 0; m < TILES_A_WARP; ++m) weight_scales[m][0] = weight_scales[m][1] = 1.0f;
    const auto clear_sums = [&] {
#pragma unroll
        for (int m = 0; m < TILES_A_WARP; ++m) {
#pragma unroll
            for (int i = 0; i < 2 * COLUMN_TILES; ++i) sums[m][i] = 0.0f;
        }
    };
    // Adds this lane's sums to those in shared memory, or stores them.
    const auto leave_sums = [&](float4* place, bool is_first) {
#pragma unroll
        for (int m = 0; m < TILES_A_WARP; ++m) {
#pragma unroll
            for (int v = 0; v < ROW_VECTORS; ++v) {
                float4& vector = place[(m * ROW_VECTORS + v) * NUM_THREADS];
                float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
                if (!is_first) sum = vector;
                sum.x = __fadd_rn(sum.x, sums[m][4 * v]);
                sum.y = __fadd_rn(sum.y, sums[m][4 * v + 1]);
                sum.z = __fadd_rn(sum.z, sums[m][4 * v + 2]);
                sum.w = __fadd_rn(sum.w, sums[m][4 * v + 3]);
                vector = sum;
            }
        }
    };
    // A chain of products begins with each chunk; where inputs have scales, with each unit.
    const auto multiply = [&](int item, int unit, bool begins_chain) {
        const unsigned char* place = memory + stage * STAGE_BYTES;
        const uint4* weights = reinterpret_cast<const uint4*>(place + IMAGE_BYTES) + warp * UNIT_VECTORS + lane;
        const unsigned long long columns = columns_at(shared_address(place), Image::PIECE_BYTES);
#pragma unroll
        for (int m = 0; m < TILES_A_WARP && G::IS_GROUPED && unit % Image::UNITS == 0; ++m) {
            const size_t tile = min(first_tile(item) + m * MULTIPLIERS + warp, num_tiles - 1);
            const ScaleT* group = scales + (tile * G::count(num_units) + G::first(unit)) * SCALES_A_TILE<ScaleT>;
            weight_scales[m][0] = to_float(group[scale_place<ScaleT>(g)]);
            weight_scales[m][1] = to_float(group[scale_place<ScaleT>(g + 8)]);
        }
        barrier_wait(&filled[stage], parity);
        unsigned a[TILES_A_WARP][Image::STEPS][4];
#pragma unroll
        for (int m = 0; m < TILES_A_WARP; ++m) {
            unpack_unit(weights[m * MULTIPLIERS * UNIT_VECTORS], weights[m * MULTIPLIERS * UNIT_VECTORS + 32], a[m]);
        }
        wgmma_begin();
#pragma unroll
        for (int step = 0; step < Image::STEPS; ++step) {
#pragma unroll
            for (int m = 0; m < TILES_A_WARP; ++m) {
                wgmma_halves<ActivationT>(products[m], a[m][step], columns + step * (Image::STEP_BYTES / 16),
                                          step > 0 || !begins_chain);
            }
        }
        wgmma_commit();
        wgmma_wait<0>();
        if constexpr (HAS_SCALE) {
            const float* row_scales = reinterpret_cast<const float*>(place + Image::SCALES_AT);
#pragma unroll
            for (int c = 0; c < COLUMN_TILES; ++c) {
                const float scale = row_scales[4 * c + t];
#pragma unroll
                for (int m = 0; m < TILES_A_WARP; ++m) {
                    const float* d = products[m] + 4 * c;
                    float &low = sums[m][2 * c], &high = sums[m][2 * c + 1];
                    low = __fmaf_rn(__fmul_rn(scale, weight_scales[m][0]), __fadd_rn(d[0], d[1]), low);
                    high = __fmaf_rn(__fmul_rn(scale, weight_scales[m][1]), __fadd_rn(d[2], d[3]), high);
                }
            }
            fence_async_side();
            __syncwarp();  // every lane has read the scales
        }
        if constexpr (SHARERS > 1) {
            if (lane < SHARERS) barrier_arrive_at(&emptied[stage], quarter * SHARERS + lane);
        } else {
            if (lane == 0) barrier_arrive(&emptied[stage]);
        }
        if (++stage == STAGES) stage = 0, parity ^= 1;
    };

#pragma unroll 1
    for (int item = first_item; item < num_items; item += item_step) {
#pragma unroll 1
        for (int begin = first_chunk; begin < end_chunk; begin += QUARTER_CHUNKS) {
            asm volatile("" : "+r"(begin));  // or the compiler unrolls this loop too
            clear_sums();
            if (HAS_SCALE) leave_sums(quarters, true);
            // They are not read again, but so no register keeps them until here.
#pragma unroll
            for (int m = 0; m < TILES_A_WARP; ++m) {
#pragma unroll
                for (int i = 0; i < 4 * COLUMN_TILES; ++i) products[m][i] = 0.0f;
            }
#pragma unroll 1
            for (int chunk = begin; chunk < min(begin + QUARTER_CHUNKS, num_spans); ++chunk) {
#pragma unroll 1
                for (int unit = chunk * Image::UNITS; unit < num_units; unit = next_unit(unit)) {
                    multiply(item, unit, HAS_SCALE || unit == chunk);
                }
                if constexpr (HAS_SCALE) {
                    leave_sums(quarters, false);
                    clear_sums();
                } else {
#pragma unroll
                    for (int m = 0; m < TILES_A_WARP; ++m) {
#pragma unroll
                        for (int i = 0; i < 2 * COLUMN_TILES; ++i) {
                            const float sum = __fadd_rn(products[m][2 * i], products[m][2 * i + 1]);
                            sums[m][i] = __fadd_rn(sums[m][i], sum);
                        }
                    }
                }
            }
            if constexpr (!HAS_SCALE) {
                leave_sums(results, begin == first_chunk);
            } else if constexpr (QUARTERS == 1) {
#pragma unroll
                for (int v = 0; v < VECTORS; ++v) {
                    const float4 sum = quarters[v * NUM_THREADS];
                    float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
                    if (begin > first_chunk) total = results[v * NUM_THREADS];
                    total.x = __fadd_rn(total.x, sum.x);
                    total.y = __fadd_rn(total.y, sum.y);
                    total.z = __fadd_rn(total.z, sum.z);
                    total.w = __fadd_rn(total.w, sum.w);
                    results[v * NUM_THREADS] = total;
                }
            }
        }
        if constexpr (QUARTERS > 1) cluster_sync();  // all quarters are written

        write_outputs<TOKENS, TILES_A_WARP, QUARTERS, SHARERS, HAS_CHANNEL_SCALE>(
            results, scales, factors, biases, out, shape, first_tile(item), item % num_row_blocks, quarter, sharer);
    }
    cluster_arrive();
    cluster_wait();  // no block uses this block's memory any more
}
