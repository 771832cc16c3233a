// gemm_codes: y[n,m] = f(factors[n] * sum_k x[n,k] * W[m,k] + bias[m]) for 9 and more rows of digits
//           Source: kernels/gemv.cu, whose bits it gives; PTX ISA, wgmma
// Shapes:   tiles [num_tiles][units][1024] bytes of codes, scales [num_tiles][groups][16] ScaleT, zero_points alike
//           uint8 or null (common/tile.cuh); image and factors as stage_digits writes them; biases [16 * num_tiles]
//           float or null; out [num_rows, out_stride] float. Epilogues as in gemv
// Requires: a group is whole units or the whole row; sm_90a; tiles, scales, zero_points, image 16-byte aligned
// Launch:   grid (4, ceil(num_rows / TOKENS), ceil(num_tiles / 8)), block (256), clusters of 4, dynamic shared memory
//           by llmcli/kernels/gemm_codes.py; may overlap the kernel in front
// Traffic:  codes, scales and zero points once for every TOKENS rows, side by side so that L2 serves all but the
//           first; the image once for every 128 outputs
// Numerics: those of gemv with codes, bit for bit: digits times codes are summed exactly in integers, and fp32 sums
//           have gemv's order. So a row's bits do not depend on how many rows run beside it
// Choice:   A block is 8 tiles x TOKENS rows x a quarter of gemv's chunks of units. Each warp copies its own tile's
//           units, as in gemv; one thread copies the digits for all. Integer sums of a unit leave the tensor cores as
//           two digits, and become floats beside the other warps' products. Sums of chunks wait in shared memory, where
//           the cluster's other blocks fetch them
#include "common/cluster.cuh"
#include "common/digit_image.cuh"
#include "common/gemv_output.cuh"
#include "common/launch.cuh"
#include "common/wgmma.cuh"

constexpr int BLOCK_SIZE = 256;
constexpr int BLOCK_TILES = 8;
constexpr int QUARTERS = 4;

struct CodesShape {
    int num_rows, num_inputs, num_outputs, out_stride, epilogue;

    __device__ __forceinline__ int tile_outputs() const { return epilogue == SWIGLU ? HALF_ROWS : TILE_ROWS; }
};

// The units of a quarter of the chunks, in gemv's order: chunk w has the units w, w + CHUNKS, ...
template <int CHUNKS>
struct UnitWalk {
    int unit, chunk;

    __device__ __forceinline__ explicit UnitWalk(int quarter)
        : unit(quarter * (CHUNKS / QUARTERS)), chunk(quarter * (CHUNKS / QUARTERS)) {}
    __device__ __forceinline__ bool ends_chunk(int num_units) const { return unit + CHUNKS >= num_units; }
    __device__ __forceinline__ void next(int num_units) {
        unit += CHUNKS;
        if (unit >= num_units) unit = ++chunk;
    }
    // How many there are.
    __device__ __forceinline__ static int count(int quarter, int num_units) {
        int count = 0;
#pragma unroll
        for (int i = 0; i < CHUNKS / QUARTERS; ++i) {
            count += max(num_units - (quarter * (CHUNKS / QUARTERS) + i) + CHUNKS - 1, 0) / CHUNKS;
        }
        return count;
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
    static_assert(G::PER_UNIT == 1, "groups smaller than a unit are not for this kernel");
    constexpr int UNIT_INPUTS = TileFormat<WeightT>::UNIT_INPUTS;
    constexpr int CHUNKS = UNIT_INPUTS == 128 ? 8 : 16;  // gemv's warps of a tile
    constexpr int SCALE_VECTORS = G::IS_GROUPED ? static_cast<int>(sizeof(ScaleT)) : 0;
    constexpr int ZERO_VECTORS = IS_SYMMETRIC ? 0 : 1;
    constexpr int SLOT_BYTES = (UNIT_BYTES + 16 * (SCALE_VECTORS + ZERO_VECTORS) + 127) / 128 * 128;
    constexpr int IMAGE_BYTES = (Image::UNIT_BYTES + 127) / 128 * 128;
    constexpr int STAGE_BYTES = IMAGE_BYTES + BLOCK_TILES * SLOT_BYTES;
    static_assert(STAGES >= 3, "digits are two units behind");
    static_assert(HOST_STAGE_BYTES == STAGE_BYTES, "gemm_codes.py plans another size");
    constexpr int COLUMN_TILES = TOKENS / 8;
    constexpr bool HAS_CHANNEL_SCALE = GROUP_SIZE == 0;

    // Shared memory: stages of a unit's digits and [warp] slots; sums of chunks [column tile][thread].
    alignas(128) extern __shared__ uint4 shared[];
    unsigned char* memory = reinterpret_cast<unsigned char*>(shared);
    float4* sums = reinterpret_cast<float4*>(memory + STAGES * STAGE_BYTES) + threadIdx.x;
    __shared__ unsigned long long filled[STAGES], emptied[STAGES];

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int quarter = cluster_rank<QUARTERS>();
    const int num_tiles = (shape.num_outputs + shape.tile_outputs() - 1) / shape.tile_outputs();
    const int num_units = (shape.num_inputs + UNIT_INPUTS - 1) / UNIT_INPUTS;
    const int tile = min(static_cast<int>(blockIdx.z) * BLOCK_TILES + warp, num_tiles - 1);
    // Counted in vectors of 16 bytes: no registers are left for pointers.
    const unsigned own_tile = static_cast<unsigned>(tile * num_units) * UNIT_VECTORS + lane;
    const unsigned own_groups = tile * G::count(num_units);
    const unsigned char* digits = image + static_cast<size_t>(blockIdx.y) * num_units * Image::UNIT_BYTES;
    const unsigned own_slot = shared_address(memory) + IMAGE_BYTES + warp * SLOT_BYTES + 16 * lane;

    int left = UnitWalk<CHUNKS>::count(quarter, num_units);

    // The quarter's unit `ahead` units from the current one: this lane's 16 bytes of it, twice, and of its scales and
    // zero points.
    UnitWalk<CHUNKS> codes_ahead(quarter), digits_ahead(quarter);
    const auto copy_codes = [&](int stage, int ahead) {
        const unsigned slot = own_slot + stage * STAGE_BYTES;
        if (left > ahead) {
            const uint4* source = reinterpret_cast<const uint4*>(tiles) + own_tile + codes_ahead.unit * UNIT_VECTORS;
            copy_async(slot, source);
            copy_async(slot + 512, source + 32);
            const unsigned group = own_groups + G::first(codes_ahead.unit);
            if (lane < SCALE_VECTORS) {
                copy_async(slot + UNIT_BYTES, reinterpret_cast<const uint4*>(scales) + group * SCALE_VECTORS + lane);
            } else if (lane < SCALE_VECTORS + ZERO_VECTORS) {
                copy_async(slot + UNIT_BYTES, reinterpret_cast<const uint4*>(zero_points) + group);
            }
            codes_ahead.next(num_units);
        }
        copy_async_commit();
    };
    // One warp calls it.
    const auto copy_digits = [&](int stage, int ahead) {
        if (left <= ahead) return;
        if (lane == 0) {
            barrier_expect(&filled[stage], Image::UNIT_BYTES);
            copy_bulk(shared_address(memory + stage * STAGE_BYTES),
                      digits + static_cast<size_t>(digits_ahead.unit) * Image::UNIT_BYTES, Image::UNIT_BYTES,
                      &filled[stage]);
            barrier_arrive(&filled[stage]);
        }
        digits_ahead.next(num_units);
    };

#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) copy_codes(s, s);
    if (threadIdx.x < STAGES) {
        barrier_init(&filled[threadIdx.x], 1);
        barrier_init(&emptied[threadIdx.x], BLOCK_TILES);
    }
    barrier_init_fence();
#pragma unroll
    for (int c = 0; c < COLUMN_TILES; ++c) sums[c * BLOCK_SIZE] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    grid_dependency_launch();
    __syncthreads();  // barriers stand
    grid_dependency_wait();
    if (warp == 0) {
#pragma unroll
        for (int s = 0; s < STAGES - 2; ++s) copy_digits(s, s);
    }

    float running[4 * COLUMN_TILES];
#pragma unroll
    for (int i = 0; i < 4 * COLUMN_TILES; ++i) running[i] = 0.0f;
    UnitWalk<CHUNKS> at(quarter);
    unsigned parity = 0;
    // The unit before left its stage to the next codes, the one before that to the next digits, for which all warps
    // must have left. Beside the product this costs nothing, but with 64 rows no registers are left for it there.
    constexpr bool COPIES_FIRST = TOKENS > 32;
    const auto copy_ahead = [&](int stage) {
        copy_codes((stage + STAGES - 1) % STAGES, STAGES - 1);
        if (warp == 0) {
            // In the first round nobody has used these stages: the phase before the first one counts as over.
            const int behind = (stage + STAGES - 2) % STAGES;
            barrier_wait(&emptied[behind], stage < 2 ? parity ^ 1 : parity);
            copy_digits(behind, STAGES - 2);
        }
    };
    const auto multiply = [&](int stage) {
        copy_async_wait<STAGES - 2>();
        __syncwarp();  // this unit's codes have landed for all lanes, and those before it are read
        if constexpr (COPIES_FIRST) copy_ahead(stage);
        const unsigned char* unit = memory + stage * STAGE_BYTES;
        const unsigned char* slot = unit + IMAGE_BYTES + warp * SLOT_BYTES;
        const uint4 low_codes = reinterpret_cast<const uint4*>(slot)[lane];
        const uint4 high_codes = reinterpret_cast<const uint4*>(slot)[32 + lane];
        barrier_wait(&filled[stage], parity);
        int high[4 * COLUMN_TILES], low[4 * COLUMN_TILES];
        const unsigned long long columns = columns_at(shared_address(unit), Image::PIECE_BYTES);
#pragma unroll
        for (int part = 0; part < Image::PARTS; ++part) {
            unsigned a[2][4];
            Image::operands(low_codes, high_codes, part, a);
            wgmma_begin();
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                constexpr int STEP = 2 * Image::PIECE_BYTES / 16, DIGIT = Image::DIGIT_BYTES / 16;
                const int step = 2 * part + i;
                wgmma_bytes<IS_SYMMETRIC>(high, a[i], columns + step * STEP, step > 0);
                wgmma_bytes<IS_SYMMETRIC>(low, a[i], columns + step * STEP + DIGIT, step > 0);
            }
            wgmma_commit();
            // With 64 rows no registers are left for both parts of int4.
            if (TOKENS > 32 && part + 1 < Image::PARTS) wgmma_wait<0>();
        }
        if constexpr (!COPIES_FIRST) copy_ahead(stage);
        float low_scale = 1.0f, high_scale = 1.0f;
        if constexpr (G::IS_GROUPED) {
            const ScaleT* unit_scales = reinterpret_cast<const ScaleT*>(slot + UNIT_BYTES);
            low_scale = to_float(unit_scales[g]);
            high_scale = to_float(unit_scales[g + 8]);
        }
        wgmma_wait<0>();
        int low_zero = 0, high_zero = 0;
        if constexpr (!IS_SYMMETRIC) {
            const unsigned char* zeros = slot + UNIT_BYTES + 16 * SCALE_VECTORS;
            low_zero = zeros[g];
            high_zero = zeros[g + 8];
        }
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
            const float2 scale = reinterpret_cast<const float2*>(unit + Image::SCALES_AT)[4 * c + t];
            int2 sum = make_int2(0, 0);
            if constexpr (!IS_SYMMETRIC) sum = reinterpret_cast<const int2*>(unit + Image::SUMS_AT)[4 * c + t];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                // Exact: below 2^30. gemv rounds the same integer once, too.
                int value = high[4 * c + i] * 256 + low[4 * c + i];
                if constexpr (!IS_SYMMETRIC) value -= (i < 2 ? low_zero : high_zero) * (i % 2 == 0 ? sum.x : sum.y);
                float factor = i % 2 == 0 ? scale.x : scale.y;
                if constexpr (G::IS_GROUPED) factor = __fmul_rn(factor, i < 2 ? low_scale : high_scale);
                running[4 * c + i] = __fmaf_rn(factor, __int2float_rn(value), running[4 * c + i]);
            }
        }
        __syncwarp();  // every lane has read the digits' scales
        if (lane == 0) barrier_arrive(&emptied[stage]);
        if (at.ends_chunk(num_units)) {
#pragma unroll
            for (int c = 0; c < COLUMN_TILES; ++c) {
                float4 sum = sums[c * BLOCK_SIZE];
                sum.x = __fadd_rn(sum.x, running[4 * c]);
                sum.y = __fadd_rn(sum.y, running[4 * c + 1]);
                sum.z = __fadd_rn(sum.z, running[4 * c + 2]);
                sum.w = __fadd_rn(sum.w, running[4 * c + 3]);
                sums[c * BLOCK_SIZE] = sum;
                running[4 * c] = running[4 * c + 1] = running[4 * c + 2] = running[4 * c + 3] = 0.0f;
            }
        }
        at.next(num_units);
    };
    // A round of all stages at a time: their addresses are constants. With 64 rows no registers are left for that.
    constexpr int UNROLL = TOKENS > 32 ? 1 : STAGES;
#pragma unroll 1
    for (; left > 0; parity ^= 1) {
#pragma unroll UNROLL
        for (int stage = 0; stage < STAGES; ++stage, --left) {
            if (left > 0) multiply(stage);
        }
    }
    copy_async_wait<0>();
    cluster_sync();  // all quarters stand

    const int index = blockIdx.z * BLOCK_TILES + warp;
    const int column = index * shape.tile_outputs() + g;
    float low_factor = 1.0f, high_factor = 1.0f, low_bias = 0.0f, high_bias = 0.0f;
    if (index < num_tiles) {
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
        float4 total = load_from(sums + c * BLOCK_SIZE, 0);
#pragma unroll
        for (int q = 1; q < QUARTERS; ++q) {
            const float4 other = load_from(sums + c * BLOCK_SIZE, q);
            total.x = __fadd_rn(total.x, other.x);
            total.y = __fadd_rn(total.y, other.y);
            total.z = __fadd_rn(total.z, other.z);
            total.w = __fadd_rn(total.w, other.w);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = blockIdx.y * TOKENS + 8 * c + 2 * t + i;
            if (row >= shape.num_rows || index >= num_tiles) continue;
            const float factor = __ldcg(factors + row);
            const float low_sum = i == 0 ? total.x : total.y, high_sum = i == 0 ? total.z : total.w;
            const float first = __fadd_rn(__fmul_rn(__fmul_rn(low_sum, low_factor), factor), low_bias);
            const float second = __fadd_rn(__fmul_rn(__fmul_rn(high_sum, high_factor), factor), high_bias);
            float* place = out + static_cast<size_t>(row) * shape.out_stride + column;
            if (shape.epilogue == SWIGLU) {
                const float sigmoid = __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-first)));
                if (column < shape.num_outputs) *place = __fmul_rn(__fmul_rn(first, sigmoid), second);
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
