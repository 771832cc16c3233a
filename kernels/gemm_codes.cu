// gemm_codes: y[n,m] = f(factors[n] * sum_k x[n,k] * W[m,k] + bias[m]) for 9 and more rows of digits
//           Source: kernels/gemv.cu, whose bits it gives; PTX ISA, wgmma
// Shapes:   tiles [num_tiles][units][1024] bytes of codes, scales [num_tiles][groups][16] ScaleT, zero_points alike
//           uint8 or null (common/tile.cuh); image and factors as stage_digits writes them; biases [16 * num_tiles]
//           float or null; out [num_rows, out_stride] float. Epilogues as in gemv
// Requires: a group is whole spans or the whole row; sm_90a; tiles, scales, zero_points, image 16-byte aligned
// Launch:   grid (4, ceil(num_rows / TOKENS), ceil(num_tiles / 8)), block (288), clusters of 4, dynamic shared memory
//           by llmcli/kernels/gemm_codes.py; may overlap the kernel in front
// Traffic:  codes, scales and zero points once for every TOKENS rows, side by side so that L2 serves all but the
//           first; the image once for every 128 outputs
// Numerics: those of gemv with codes, bit for bit: digits times codes are summed exactly in integers, and fp32 sums
//           have gemv's order. So a row's bits do not depend on how many rows run with it
// Choice:   A block is 8 tiles x TOKENS rows x a quarter of gemv's chunks of spans. Eight warps multiply, one a tile; a
//           ninth copies for all, since a warp that copied too held up its three neighbours, who multiply with it. Sums
//           of a span leave the tensor cores as two digits, and become floats beside the other warps' products. 64
//           rows go in two passes of 32: their accumulators take half the registers. Sums of chunks wait in shared
//           memory, where the cluster's other blocks fetch them. With many rows L2 is the bound: it gives all
//           multiprocessors 4.65 TB/s.
//           Rejected (docs/log/2026-11-24-codes.md): multicast, larger blocks, ones that stay
#include "common/cluster.cuh"
#include "common/digit_image.cuh"
#include "common/gemv_output.cuh"
#include "common/launch.cuh"
#include "common/wgmma.cuh"

constexpr int BLOCK_TILES = 8;
constexpr int CONSUMERS = 32 * BLOCK_TILES;   // threads that multiply, one warp a tile
constexpr int BLOCK_SIZE = CONSUMERS + 32;  // one more warp copies
constexpr int QUARTERS = 4, CHUNKS = 8;  // of gemv's warps, which share a tile

struct CodesShape {
    int num_rows, num_inputs, num_outputs, out_stride, epilogue;

    __device__ __forceinline__ int tile_outputs() const { return epilogue == SWIGLU ? HALF_ROWS : TILE_ROWS; }
    __device__ __forceinline__ int num_tiles() const {
        return epilogue == SWIGLU ? (num_outputs + HALF_ROWS - 1) / HALF_ROWS
                                  : (num_outputs + TILE_ROWS - 1) / TILE_ROWS;
    }
};

// The spans of a chunk in gemv's order: chunk w has the spans w, w + CHUNKS, ... A quarter is two chunks.
__device__ __forceinline__ int chunk_spans(int chunk, int num_spans) {
    return (num_spans - chunk + CHUNKS - 1) / CHUNKS;
}

__device__ __forceinline__ float4 add(const float4& a, const float4& b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

// Walks over the spans of a quarter, chunk by chunk.
struct SpanWalk {
    int span, chunk;

    __device__ __forceinline__ explicit SpanWalk(int quarter) : span(2 * quarter), chunk(2 * quarter) {}
    __device__ __forceinline__ void next(int num_spans) {
        span += CHUNKS;
        if (span >= num_spans) span = ++chunk;
    }
};

template <typename WeightT, typename ScaleT, int GROUP_SIZE, bool IS_SYMMETRIC, int TOKENS, int STAGES,
          int HOST_STAGE_BYTES>
__global__ void __launch_bounds__(BLOCK_SIZE, TOKENS > 16 ? 2 : 3)
#if __CUDA_ARCH__ >= 900
    __cluster_dims__(QUARTERS, 1, 1)
#endif
        gemm_codes(const unsigned char* __restrict__ tiles, const ScaleT* __restrict__ scales,
                   const unsigned char* __restrict__ zero_points, const unsigned char* image, const float* factors,
                   const float* __restrict__ biases, float* out, CodesShape shape) {
    using Image = DigitImage<WeightT, IS_SYMMETRIC, TOKENS>;
    using G = Groups<WeightT, GROUP_SIZE>;
    static_assert(G::PER_SPAN == 1, "groups smaller than a span are not for this kernel");
    constexpr int UNITS = SPAN_UNITS<WeightT>, CODES_BYTES = UNITS * UNIT_BYTES, CODES_VECTORS = CODES_BYTES / 16;
    constexpr int SCALE_VECTORS = G::IS_GROUPED ? static_cast<int>(sizeof(ScaleT)) : 0;
    constexpr int ZERO_VECTORS = IS_SYMMETRIC ? 0 : 1;
    static_assert(BLOCK_TILES * SCALE_VECTORS <= 32, "a lane copies one vector of scales");
    constexpr int SLOT_BYTES = (CODES_BYTES + 16 * (SCALE_VECTORS + ZERO_VECTORS) + 127) / 128 * 128;
    constexpr int IMAGE_BYTES = (Image::SPAN_BYTES + 127) / 128 * 128;
    constexpr int STAGE_BYTES = IMAGE_BYTES + BLOCK_TILES * SLOT_BYTES;
    static_assert(HOST_STAGE_BYTES == STAGE_BYTES, "gemm_codes.py plans another size");
    // Columns that a warp multiplies at once: two digits of 64 rows, with their sums, would take too many registers.
    constexpr int COLUMNS = TOKENS < 32 ? TOKENS : 32, PASSES = TOKENS / COLUMNS;
    constexpr int COLUMN_TILES = TOKENS / 8, PASS_TILES = COLUMNS / 8;
    constexpr bool HAS_CHANNEL_SCALE = GROUP_SIZE == 0;

    // Shared memory: stages of a span's digits and [tile] slots; sums of chunks [column tile][thread].
    alignas(128) extern __shared__ uint4 shared[];
    unsigned char* memory = reinterpret_cast<unsigned char*>(shared);
    const auto sums_of = [&](int thread) { return reinterpret_cast<float4*>(memory + STAGES * STAGE_BYTES) + thread; };
    float4* sums = sums_of(threadIdx.x);
    __shared__ unsigned long long filled[STAGES], emptied[STAGES];

    // Equal in all lanes of a warp, which the compiler must know: products in divergent code wait for each other.
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int quarter = blockIdx.x;
    const int num_spans = spans_of<WeightT>(shape.num_inputs);
    const int first_count = chunk_spans(2 * quarter, num_spans);
    const int count = first_count + chunk_spans(2 * quarter + 1, num_spans);
    if (warp == BLOCK_TILES) {
        if (lane < STAGES) {
            barrier_init(&filled[lane], 32 + 1);  // each lane's codes, and the digits
            barrier_init(&emptied[lane], BLOCK_TILES);
        }
        barrier_init_fence();
        __syncwarp();
    }
    grid_dependency_launch();
    __syncthreads();  // barriers are initialised
    if (warp == BLOCK_TILES) {
        const unsigned char* digits = image + static_cast<size_t>(blockIdx.y) * num_spans * Image::SPAN_BYTES;
        // Counted in vectors of 16 bytes. Tiles past the last one repeat it.
        const int first = blockIdx.z * BLOCK_TILES, last = shape.num_tiles() - 1 - first;
        const unsigned tile_vectors = num_spans * CODES_VECTORS, tile_groups = G::count(num_spans * UNITS);
        const auto copy_codes = [&](int stage, int span) {
            const unsigned slots = shared_address(memory + stage * STAGE_BYTES) + IMAGE_BYTES;
            const uint4* source =
                reinterpret_cast<const uint4*>(tiles) + first * tile_vectors + span * CODES_VECTORS + lane;
#pragma unroll
            for (int i = 0; i < BLOCK_TILES; ++i) {
                const uint4* of_tile = source + min(i, last) * tile_vectors;
#pragma unroll
                for (int v = 0; v < CODES_VECTORS; v += 32) {
                    copy_async(slots + i * SLOT_BYTES + 16 * (lane + v), of_tile + v);
                }
            }
            const auto group_of = [&](int i) { return (first + min(i, last)) * tile_groups + G::first(span * UNITS); };
            if (lane < BLOCK_TILES * SCALE_VECTORS) {
                const int i = lane / SCALE_VECTORS, vector = lane % SCALE_VECTORS;
                copy_async(slots + i * SLOT_BYTES + CODES_BYTES + 16 * vector,
                           reinterpret_cast<const uint4*>(scales) + group_of(i) * SCALE_VECTORS + vector);
            }
            if (lane < BLOCK_TILES * ZERO_VECTORS) {
                copy_async(slots + lane * SLOT_BYTES + CODES_BYTES + 16 * SCALE_VECTORS,
                           reinterpret_cast<const uint4*>(zero_points) + group_of(lane));
            }
            barrier_arrive_behind_copies(&filled[stage]);
        };
        const auto copy_digits = [&](int stage, int span) {
            if (lane != 0) return;
            barrier_expect(&filled[stage], Image::SPAN_BYTES);
            copy_bulk(shared_address(memory + stage * STAGE_BYTES),
                      digits + static_cast<size_t>(span) * Image::SPAN_BYTES, Image::SPAN_BYTES, &filled[stage]);
            barrier_arrive(&filled[stage]);
        };
        // No kernel writes codes: their copies run while this block waits for the digits.
        SpanWalk codes_at(quarter), digits_at(quarter);
        const int ahead = min(count, STAGES);
        for (int i = 0; i < ahead; ++i, codes_at.next(num_spans)) copy_codes(i, codes_at.span);
        grid_dependency_wait();
        for (int i = 0; i < ahead; ++i, digits_at.next(num_spans)) copy_digits(i, digits_at.span);
        unsigned parity = 0;
        for (int i = ahead; i < count; parity ^= 1) {
            for (int stage = 0; stage < STAGES && i < count; ++stage, ++i, codes_at.next(num_spans)) {
                barrier_wait(&emptied[stage], parity);
                copy_digits(stage, codes_at.span);
                copy_codes(stage, codes_at.span);
            }
        }
        cluster_sync();  // all quarters are written
        cluster_arrive();
        cluster_wait();  // every block has read these sums
        return;
    }

#pragma unroll
    for (int c = 0; c < COLUMN_TILES; ++c) sums[c * CONSUMERS] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    grid_dependency_wait();
    float running[4 * COLUMN_TILES];
#pragma unroll
    for (int i = 0; i < 4 * COLUMN_TILES; ++i) running[i] = 0.0f;
    const auto multiply = [&](int stage, unsigned parity, int done) {
        const unsigned char* digits = memory + stage * STAGE_BYTES;
        const unsigned char* slot = digits + IMAGE_BYTES + warp * SLOT_BYTES;
        barrier_wait(&filled[stage], parity);
        uint4 low_codes[UNITS], high_codes[UNITS];
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            low_codes[unit] = reinterpret_cast<const uint4*>(slot)[unit * UNIT_VECTORS + lane];
            high_codes[unit] = reinterpret_cast<const uint4*>(slot)[unit * UNIT_VECTORS + 32 + lane];
        }
        unsigned a[Image::PARTS][2][4];
#pragma unroll
        for (int part = 0; part < Image::PARTS; ++part) Image::operands(low_codes, high_codes, part, a[part]);
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            int high[4 * PASS_TILES], low[4 * PASS_TILES];
            const unsigned long long columns =
                columns_at(shared_address(digits) + pass * 16 * COLUMNS, Image::PIECE_BYTES);
            wgmma_begin();
#pragma unroll
            for (int step = 0; step < 2 * Image::PARTS; ++step) {
                constexpr int STEP = 2 * Image::PIECE_BYTES / 16, DIGIT = Image::DIGIT_BYTES / 16;
                wgmma_bytes<IS_SYMMETRIC>(high, a[step / 2][step % 2], columns + step * STEP, step > 0);
                wgmma_bytes<IS_SYMMETRIC>(low, a[step / 2][step % 2], columns + step * STEP + DIGIT, step > 0);
            }
            wgmma_commit();
            // In each pass: no registers are free to keep them.
            float low_scale = 1.0f, high_scale = 1.0f;
            if constexpr (G::IS_GROUPED) {
                const ScaleT* unit_scales = reinterpret_cast<const ScaleT*>(slot + CODES_BYTES);
                low_scale = to_float(unit_scales[g]);
                high_scale = to_float(unit_scales[g + 8]);
            }
            int low_zero = 0, high_zero = 0;
            if constexpr (!IS_SYMMETRIC) {
                const unsigned char* zeros = slot + CODES_BYTES + 16 * SCALE_VECTORS;
                low_zero = zeros[g];
                high_zero = zeros[g + 8];
            }
            wgmma_wait<0>();
#pragma unroll
            for (int c = 0; c < PASS_TILES; ++c) {
                const int column_tile = pass * PASS_TILES + c;
                const float2 scale = reinterpret_cast<const float2*>(digits + Image::SCALES_AT)[4 * column_tile + t];
                int2 sum = make_int2(0, 0);
                if constexpr (!IS_SYMMETRIC) {
                    sum = reinterpret_cast<const int2*>(digits + Image::SUMS_AT)[4 * column_tile + t];
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    // Exact: below 2^30. gemv rounds the same integer once, too.
                    int value = high[4 * c + i] * 256 + low[4 * c + i];
                    if constexpr (!IS_SYMMETRIC) {
                        value -= (i < 2 ? low_zero : high_zero) * (i % 2 == 0 ? sum.x : sum.y);
                    }
                    float factor = i % 2 == 0 ? scale.x : scale.y;
                    if constexpr (G::IS_GROUPED) factor = __fmul_rn(factor, i < 2 ? low_scale : high_scale);
                    float& total = running[4 * column_tile + i];
                    total = __fmaf_rn(factor, __int2float_rn(value), total);
                }
            }
        }
        fence_async_side();
        __syncwarp();  // every lane has read the digits' scales
        if (lane == 0) barrier_arrive(&emptied[stage]);
        if (done == first_count || done == count) {  // a chunk ends
#pragma unroll
            for (int c = 0; c < COLUMN_TILES; ++c) {
                float4& sum = sums[c * CONSUMERS];
                sum = add(sum, make_float4(running[4 * c], running[4 * c + 1], running[4 * c + 2], running[4 * c + 3]));
                running[4 * c] = running[4 * c + 1] = running[4 * c + 2] = running[4 * c + 3] = 0.0f;
            }
        }
    };
    // Two rounds of all stages at a time: addresses and parities are constants. With 64 rows no registers are left.
    constexpr int STEP = TOKENS > 32 ? 1 : 2 * STAGES;
#pragma unroll 1
    for (int done = 0; done < count; done += STEP) {
#pragma unroll
        for (int i = 0; i < STEP; ++i) {
            const int place = STEP > 1 ? i : done;
            if (done + i < count) multiply(place % STAGES, place / STAGES % 2, done + i + 1);
        }
    }
    cluster_sync();  // all quarters are written

    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));  // recomputed here, so that no register keeps it
    const int index = blockIdx.z * BLOCK_TILES + warp;
    const int column = index * shape.tile_outputs() + g;
    float low_factor = 1.0f, high_factor = 1.0f, low_bias = 0.0f, high_bias = 0.0f;
    if (index < shape.num_tiles()) {
        if constexpr (HAS_CHANNEL_SCALE) {
            low_factor = to_float(scales[index * TILE_ROWS + g]);
            high_factor = to_float(scales[index * TILE_ROWS + g + 8]);
        }
        if (biases != nullptr) {
            low_bias = biases[index * TILE_ROWS + g];
            high_bias = biases[index * TILE_ROWS + g + 8];
        }
    }
#pragma unroll 1
    for (int c = quarter; c < COLUMN_TILES; c += QUARTERS) {
        float4 total = load_from(sums_of(thread) + c * CONSUMERS, 0);
#pragma unroll
        for (int q = 1; q < QUARTERS; ++q) {
            total = add(total, load_from(sums_of(thread) + c * CONSUMERS, q));
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = blockIdx.y * TOKENS + 8 * c + 2 * t + i;
            if (row >= shape.num_rows || index >= shape.num_tiles()) continue;
            const float factor = __ldcg(factors + row);
            const float low_sum = i == 0 ? total.x : total.y, high_sum = i == 0 ? total.z : total.w;
            const float first = __fadd_rn(__fmul_rn(__fmul_rn(low_sum, low_factor), factor), low_bias);
            const float second = __fadd_rn(__fmul_rn(__fmul_rn(high_sum, high_factor), factor), high_bias);
            float* place = out + static_cast<size_t>(row) * shape.out_stride + column;
            if (shape.epilogue == SWIGLU) {
                if (column < shape.num_outputs) *place = swiglu_of(first, second);
            } else {
                const bool adds = shape.epilogue == ADD;
                if (column < shape.num_outputs) *place = adds ? __fadd_rn(__ldcg(place), first) : first;
                if (column + 8 < shape.num_outputs) place[8] = adds ? __fadd_rn(__ldcg(place + 8), second) : second;
            }
        }
    }
    cluster_arrive();
    cluster_wait();  // every block has read these sums
}
