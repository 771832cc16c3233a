// gemm_packed: y[n,m] = sum_k x[n,k] * (code[m,k] - zero_point[m,k/group]) * scale[m,k/group]
//           Source: design 2.10; arXiv 2408.11743 (Marlin)
// Shapes:   tiles [num_tiles][units][1024] bytes of int8 or int4 codes, scales [num_tiles][groups][16] ScaleT,
//           zero_points alike uint8 or null (common/tile.cuh); x [num_tokens, x_stride] half of which num_inputs count;
//           out [num_tokens, out_stride] float, num_outputs written
// Requires: a group is whole units or the whole row; num_inputs % 8 == 0; x, its rows, tiles, scales and zero_points
//           16-byte aligned
// Launch:   grid (ceil(num_tokens / (8 * TOKEN_TILES)), ceil(num_outputs / 64)), block (256), dynamic shared memory by
//           llmcli/kernels/gemm_packed.py
// Traffic:  codes, scales and zero points once for every 8 * TOKEN_TILES tokens, side by side so that L2 serves all but
//           the first; x once for every 64 rows
// Numerics: codes are exact in fp16, products and sums fp32 in the tensor cores, scales applied in fp32: no weight is
//           rounded; fixed order, equal bits
// Choice:   A block is 64 rows x 16 to 64 tokens. Two sets of four warps split the inputs, so that 4096 rows fill a
//           large card without a second pass. Codes go from shared memory to registers unchanged and are widened
//           there. Rejected: dequantized rows in memory, 5 x the bytes
#include "common/mma.cuh"
#include "common/tile.cuh"

constexpr int BLOCK_SIZE = 256;
constexpr int BLOCK_TILES = 4;
constexpr int STEP_UNITS = 2;  // one for each set of BLOCK_TILES warps
static_assert(BLOCK_TILES * STEP_UNITS * 32 == BLOCK_SIZE, "a warp for each tile and unit of a step");

struct GemmShape {
    int num_tokens, num_inputs, num_outputs, x_stride, out_stride;
    float unlift;  // of lifted scales
};

// Shared memory of one step: x [unit][token][part][t][8 halves], then for each warp its unit of codes, scales, zeros.
// The pitch of a token leaves 64 bytes free, so that the 8 lanes of 2 tokens that read together hit all banks once.
template <typename WeightT, typename ScaleT, int GROUP_SIZE, bool IS_SYMMETRIC, int TOKEN_TILES>
struct GemmStep {
    using G = Groups<WeightT, GROUP_SIZE>;
    static_assert(G::PER_UNIT == 1, "groups smaller than a unit are not for this kernel");
    static constexpr int UNIT_INPUTS = TileFormat<WeightT>::UNIT_INPUTS;
    static constexpr int PARTS = UNIT_INPUTS / 32;
    static constexpr int TOKENS = 8 * TOKEN_TILES;
    static constexpr int TOKEN_BYTES = UNIT_INPUTS * 2 + 64;
    static constexpr int X_BYTES = STEP_UNITS * TOKENS * TOKEN_BYTES;
    static constexpr int SCALE_VECTORS = G::IS_GROUPED ? static_cast<int>(sizeof(ScaleT)) : 0;
    static constexpr int ZERO_VECTORS = IS_SYMMETRIC ? 0 : 1;
    static constexpr int SLOT_BYTES = UNIT_BYTES + 16 * (SCALE_VECTORS + ZERO_VECTORS);
    static constexpr int BYTES = X_BYTES + BLOCK_TILES * STEP_UNITS * SLOT_BYTES;

    // Starts the copies of step `step`; values outside the matrices become zeros.
    __device__ __forceinline__ static void copy(unsigned slot, const unsigned char* tiles, const ScaleT* scales,
                                                const unsigned char* zero_points, const __half* x,
                                                const GemmShape& shape, int step) {
        const int num_units = units_of<WeightT>(shape.num_inputs);
        const int num_tiles = (shape.num_outputs + TILE_ROWS - 1) / TILE_ROWS;
        constexpr int TOKEN_VECTORS = STEP_UNITS * UNIT_INPUTS / 8;
#pragma unroll
        for (int v = threadIdx.x; v < TOKENS * TOKEN_VECTORS; v += BLOCK_SIZE) {
            const int local = v / TOKEN_VECTORS, eighth = v % TOKEN_VECTORS;
            const int token = blockIdx.x * TOKENS + local;
            const int input = step * STEP_UNITS * UNIT_INPUTS + 8 * eighth;
            const bool exists = token < shape.num_tokens && input < shape.num_inputs;
            const __half* source = x + (exists ? static_cast<size_t>(token) * shape.x_stride + input : 0);
            const int unit = eighth / (UNIT_INPUTS / 8), of_unit = eighth % (UNIT_INPUTS / 8);
            const int vector = of_unit % PARTS * 4 + of_unit / PARTS;
            copy_async(slot + (unit * TOKENS + local) * TOKEN_BYTES + 16 * vector, source, exists ? 16 : 0);
        }
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int tile = blockIdx.y * BLOCK_TILES + warp % BLOCK_TILES;
        const int unit = step * STEP_UNITS + warp / BLOCK_TILES;
        const bool exists = tile < num_tiles && unit < num_units;
        const int bytes = exists ? 16 : 0;
        slot += X_BYTES + warp * SLOT_BYTES;
        const size_t place = exists ? static_cast<size_t>(tile) * num_units + unit : 0;
        copy_async(slot + 16 * lane, tiles + place * UNIT_BYTES + 16 * lane, bytes);
        copy_async(slot + 512 + 16 * lane, tiles + place * UNIT_BYTES + 512 + 16 * lane, bytes);
        if constexpr (SCALE_VECTORS + ZERO_VECTORS != 0) {
            const size_t group =
                exists ? (static_cast<size_t>(tile) * G::count(num_units) + G::first(unit)) * TILE_ROWS : 0;
            const unsigned char* source = lane < SCALE_VECTORS
                                              ? reinterpret_cast<const unsigned char*>(scales + group) + 16 * lane
                                              : zero_points + group;
            if (lane < SCALE_VECTORS + ZERO_VECTORS) copy_async(slot + UNIT_BYTES + 16 * lane, source, bytes);
        }
    }
};

// A row's scale, from those of its tile's group.
template <typename ScaleT>
__device__ __forceinline__ float scale_of(const ScaleT* scales, int row, const GemmShape& shape) {
    return __fmul_rn(to_float(scales[scale_place<ScaleT>(row)]), shape.unlift);
}

template <typename WeightT, typename ScaleT, int GROUP_SIZE, bool IS_SYMMETRIC, int TOKEN_TILES, int STAGES,
          int HOST_STEP_BYTES>
__global__ void __launch_bounds__(BLOCK_SIZE, TOKEN_TILES > 4 ? 1 : 2)
    gemm_packed(const unsigned char* __restrict__ tiles, const ScaleT* __restrict__ scales,
                const unsigned char* __restrict__ zero_points, const __half* __restrict__ x, float* __restrict__ out,
                GemmShape shape) {
    using Step = GemmStep<WeightT, ScaleT, GROUP_SIZE, IS_SYMMETRIC, TOKEN_TILES>;
    using G = typename Step::G;
    static_assert(HOST_STEP_BYTES == Step::BYTES, "gemm_packed.py plans another size");
    extern __shared__ uint4 shared[];
    unsigned char* memory = reinterpret_cast<unsigned char*>(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;
    const int num_steps = (shape.num_inputs + STEP_UNITS * Step::UNIT_INPUTS - 1) / (STEP_UNITS * Step::UNIT_INPUTS);

#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        if (s < num_steps) {
            Step::copy(shared_address(memory) + s * Step::BYTES, tiles, scales, zero_points, x, shape, s);
        }
        copy_async_commit();
    }

    float running[TOKEN_TILES][4], total[TOKEN_TILES][4];
#pragma unroll
    for (int c = 0; c < TOKEN_TILES; ++c) {
        running[c][0] = running[c][1] = running[c][2] = running[c][3] = 0.0f;
        total[c][0] = total[c][1] = total[c][2] = total[c][3] = 0.0f;
    }
    int slot = 0;
#pragma unroll 1
    for (int step = 0; step < num_steps; ++step) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();  // this step has arrived for all warps, and all have read the one before
        const int ahead = slot == 0 ? STAGES - 1 : slot - 1;
        if (step + STAGES - 1 < num_steps) {
            Step::copy(shared_address(memory) + ahead * Step::BYTES, tiles, scales, zero_points, x, shape,
                       step + STAGES - 1);
        }
        copy_async_commit();

        const unsigned char* unit = memory + slot * Step::BYTES + Step::X_BYTES + warp * Step::SLOT_BYTES;
        const uint4 low = reinterpret_cast<const uint4*>(unit)[lane];
        const uint4 high = reinterpret_cast<const uint4*>(unit)[32 + lane];
        const ScaleT* unit_scales = reinterpret_cast<const ScaleT*>(unit + UNIT_BYTES);
        const unsigned char* zeros = unit + UNIT_BYTES + 16 * Step::SCALE_VECTORS;
        const CodeZero low_zero(IS_SYMMETRIC ? TileFormat<WeightT>::OFFSET : zeros[g]);
        const CodeZero high_zero(IS_SYMMETRIC ? TileFormat<WeightT>::OFFSET : zeros[g + 8]);
        const unsigned char* tokens =
            memory + slot * Step::BYTES + (warp / BLOCK_TILES * Step::TOKENS + g) * Step::TOKEN_BYTES + 16 * t;
#pragma unroll
        for (int part = 0; part < Step::PARTS; ++part) {
            unsigned a[4], b[4];
            unpack_part<WeightT>(low, part, low_zero, a);
            unpack_part<WeightT>(high, part, high_zero, b);
#pragma unroll
            for (int c = 0; c < TOKEN_TILES; ++c) {
                const uint4 v = *reinterpret_cast<const uint4*>(tokens + c * 8 * Step::TOKEN_BYTES + 64 * part);
                mma<__half>(running[c], a[0], b[0], a[1], b[1], v.x, v.y);
                mma<__half>(running[c], a[2], b[2], a[3], b[3], v.z, v.w);
            }
        }
        if constexpr (G::IS_GROUPED) {
            const float scale_low = scale_of(unit_scales, g, shape), scale_high = scale_of(unit_scales, g + 8, shape);
#pragma unroll
            for (int c = 0; c < TOKEN_TILES; ++c) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    total[c][i] = __fmaf_rn(i < 2 ? scale_low : scale_high, running[c][i], total[c][i]);
                    running[c][i] = 0.0f;
                }
            }
        }
        slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
    copy_async_wait<0>();
    __syncthreads();  // all steps are read: their memory takes the second set's sums

    float (*sums)[4] = G::IS_GROUPED ? total : running;
    const int tile = blockIdx.y * BLOCK_TILES + warp % BLOCK_TILES;
    float4* partials = reinterpret_cast<float4*>(shared) + warp % BLOCK_TILES * TOKEN_TILES * 32 + lane;
    if (warp >= BLOCK_TILES) {
#pragma unroll
        for (int c = 0; c < TOKEN_TILES; ++c) {
            partials[c * 32] = make_float4(sums[c][0], sums[c][1], sums[c][2], sums[c][3]);
        }
    }
    __syncthreads();  // the second set's sums are written
    if (warp >= BLOCK_TILES || tile * TILE_ROWS >= shape.num_outputs) return;
    float scale_low = 1.0f, scale_high = 1.0f;
    if constexpr (!G::IS_GROUPED) {
        scale_low = scale_of(scales + tile * TILE_ROWS, g, shape);
        scale_high = scale_of(scales + tile * TILE_ROWS, g + 8, shape);
    }
#pragma unroll
    for (int c = 0; c < TOKEN_TILES; ++c) {
        const float4 other = partials[c * 32];
        const float others[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = blockIdx.x * Step::TOKENS + 8 * c + 2 * t + i % 2;
            const int output = tile * TILE_ROWS + g + (i < 2 ? 0 : 8);
            if (token < shape.num_tokens && output < shape.num_outputs) {
                const float sum = __fadd_rn(sums[c][i], others[i]);
                out[static_cast<size_t>(token) * shape.out_stride + output] =
                    __fmul_rn(sum, i < 2 ? scale_low : scale_high);
            }
        }
    }
}
