// gemv: y[n,m] = f(scale[n] * sum_k x[n,k] * W[m,k] + bias[m]) for up to eight rows, W in 4 to 16 bits
//           Source: docs/log/2026-11-28-one-arithmetic.md; PTX ISA, mma.m16n8k16
// Shapes:   tiles [num_tiles][units][1024] bytes; scales [num_tiles][groups][16] ScaleT; zero_points alike uint8 or
//           null (common/tile.cuh). x __half [num_rows, x_stride] as it is multiplied, to be scaled by row_scales
//           [num_rows] float, or by a norm: sums [num_rows] (common/norm_sums.cuh) of hidden [num_rows, num_inputs]
//           float and norm_weight [num_inputs] float, where x is hidden * norm_weight; or by 1, without both. biases
//           [16 * num_tiles] float or null. IS_GATED (SwiGLU), whose tiles have gate and up in their halves: out
//           [num_rows, out_stride] __half, results / GATED_SCALE. Else out [num_rows, out_stride] float, written or
//           added to; with next_weight [num_outputs] float also next_x __half [num_rows, next_stride] and next_sums:
//           what the next product takes as x and sums
// Requires: 1 <= num_rows <= ROWS, which is 1 or 8; groups of 16 inputs or more, group_shift = log2 of them, 31 for one
//           group a row; num_chunks = 2^chunk_shift, at most the spans of 128 inputs and, with IS_GATED, 1; tiles,
//           scales, zero_points, x and its rows 16-byte aligned, whole vectors of 16 bytes; with sums num_inputs a
//           multiple of 8
// Launch:   clusters of CLUSTER blocks (32 * WARPS), any number of them (with CLUSTER 2 at most num_buffers tiles for
//           the warps of a chunk); dynamic shared memory by llmcli/kernels/gemv.py; may overlap the kernel in front
// Traffic:  weights, scales and zero points once for all rows; x from L2 in every block
// Numerics: those of gemm_wide with num_chunks parts, bit for bit. An activation is rounded to fp16 with one power of
//           two a row (common/norm_sums.cuh), a weight to fp16 (common/wide_weights.cuh). Inputs are cut into
//           num_chunks chunks, each one chain of products with fp32 sums in the tensor cores, which cut towards zero.
//           The chunks' sums times the row's scale are added in order, the first one with the bias, or to `out`. So a
//           row's bits depend on the matrix alone
// Choice:   (1) A warp has a chunk of a tile: a chain advances by one mma at a time, so a multiprocessor needs many. It
//           copies weights into a ring of its own, and widens them next to the products.
//           (2) One block a multiprocessor. It asks for more than half of the shared memory, or blocks of the next
//           kernel would gather on some multiprocessors.
//           (3) Several blocks of a cluster halve the chunks between them: each fetches half of x, and half must fit.
//           (4) x is rounded by the kernel before, and its norm is a scale of the outputs: a norm in here would keep
//           all products waiting, in every block. A row whose power of two is not 1 is rounded again, here: rare.
//           (5) Code is time: four kernels of a layer must fit the instruction caches. So what a host can rule out is
//           not compiled, and what is rare is not unrolled.
//           (6) Rejected (docs/log/2026-11-28-one-arithmetic.md): bulk copies of weights; 16 chunks; all of a span
//           widened before its first product; all slots filled before x is asked for
#include "common/barrier.cuh"
#include "common/cluster.cuh"
#include "common/launch.cuh"
#include "common/matrix.cuh"
#include "common/norm_sums.cuh"
#include "common/rows.cuh"
#include "common/silu.cuh"
#include "common/weight_slot.cuh"
#include "common/wgmma.cuh"

constexpr int MAX_CHUNKS = 8, BUFFERS = 2;

struct GemvShape {
    int num_rows, num_inputs, num_outputs, num_groups, group_shift, x_stride, out_stride, adds, chunk_shift;
    int num_buffers, next_stride;
    int block_tiles, longer_blocks;  // of a cluster; the first ones have one more
    float eps, inverse_inputs, power;  // 1 / num_inputs; of lifted codes
};

// The bytes between two rows of x in shared memory, so that eight lanes read 128 bytes of different banks.
template <typename WeightT>
__device__ __forceinline__ int row_pitch(int num_spans) {
    return num_spans * 256 + (TileFormat<WeightT>::UNIT_INPUTS == 32 ? 64 : 16);
}

// The rows of x, and the spans of them that a block multiplies.
struct BlockInputs {
    const __half* x;
    unsigned char* shared;
    int num_rows, num_inputs, x_stride, pitch, begin, spans;

    // Zeros past the last input, up to whole spans; and what comes after the last whole vector. A warp calls it.
    __device__ __forceinline__ void fill_end(int lane) const {
        const int first = max(num_inputs / 8 * 8, begin * 128), last = (begin + spans) * 128;
#pragma unroll 1
        for (int row = 0; row < num_rows; ++row) {
            __half* place = reinterpret_cast<__half*>(shared + row * pitch) - begin * 128;
            const __half* source = x + static_cast<size_t>(row) * x_stride;
#pragma unroll 1
            for (int i = first + lane; i < last; i += 32) {
                place[i] = i < num_inputs ? __ldcg(source + i) : __float2half_rn(0.0f);
            }
        }
    }
    // The bytes of whole vectors of a row's spans from `first` to `last`.
    __device__ __forceinline__ int num_bytes(int first, int last) const {
        return max(min(last * 256, num_inputs / 8 * 16) - first * 256, 0);
    }
    // Starts the copies of a chunk, which its barrier counts.
    __device__ __forceinline__ void copy(int first, int last, unsigned long long* copied) const {
        const int bytes = num_bytes(first, last);
        barrier_expect(copied, num_rows * bytes);
        barrier_arrive(copied);
        if (bytes == 0) return;
#pragma unroll 1
        for (int row = 0; row < num_rows; ++row) {
            copy_bulk(shared_address(shared) + row * pitch + (first - begin) * 256,
                      x + static_cast<size_t>(row) * x_stride + first * 128, bytes, copied);
        }
    }
    // Without bulk copies: all threads of the block call it, and a __syncthreads follows.
    __device__ __forceinline__ void load(int num_threads) const {
        const int bytes = num_bytes(begin, begin + spans);
        for (int row = 0; row < num_rows; ++row) {
            const uint4* source = reinterpret_cast<const uint4*>(x + static_cast<size_t>(row) * x_stride + begin * 128);
            uint4* place = reinterpret_cast<uint4*>(shared + row * pitch);
            for (int i = threadIdx.x; i < bytes / 16; i += num_threads) place[i] = __ldcg(source + i);
        }
    }
};

// The spans of one warp, tile by tile.
template <typename WeightT, typename ScaleT, int WIDENING, int SPANS>
struct WeightStream {
    using Slot = WeightSlot<WeightT, ScaleT, WIDENING, SPANS>;
    static constexpr int SPAN_BYTES = Slot::Weights::SPAN_BYTES;
    const unsigned char *tiles, *zero_points, *source;
    const ScaleT *scales, *tile_scales;
    const unsigned char* tile_zeros;
    unsigned long long policy;
    int end_tile, num_groups, group_shift, num_spans, begin, end, tile, tile_step, span, lane;

    __device__ __forceinline__ void seek() {
        span = begin;
        source = tiles + static_cast<long long>(tile) * (num_spans * SPAN_BYTES) + (begin * SPAN_BYTES + lane * 16);
        if constexpr (Slot::HAS_SCALES) {
            tile_scales = scales + static_cast<long long>(tile) * (num_groups * SCALES_A_TILE<ScaleT>);
            if (Slot::HAS_ZEROS) tile_zeros = zero_points + static_cast<long long>(tile) * (num_groups * TILE_ROWS);
        }
    }
    // Starts the copies of the chunk's next SPANS spans, and closes their group.
    __device__ __forceinline__ void copy_next(unsigned slot) {
        if (tile < end_tile) {
#pragma unroll
            for (int i = 0; i < SPANS * SPAN_BYTES; i += 512) {
                copy_async_streaming(slot + lane * 16 + i, source + i, policy);
            }
            Slot::copy_scales(tile_scales, tile_zeros, span, group_shift, zero_points != nullptr, slot, lane);
            source += SPANS * SPAN_BYTES, span += SPANS;
#pragma unroll 1
            while (span >= end) {  // once; an `if` would be issued for every slot
                tile += tile_step;
                seek();
            }
        }
        copy_async_commit();
    }
};

template <typename WeightT, typename ScaleT, int WIDENING, int ROWS, bool IS_GATED, int WARPS, int SLOTS, int SPANS,
          int CLUSTER, int HOST_SLOT_BYTES>
__global__ void __launch_bounds__(32 * WARPS, 1)
#if __CUDA_ARCH__ >= 900
    __cluster_dims__(CLUSTER, 1, 1)
#endif
        gemv(const unsigned char* __restrict__ tiles, const ScaleT* __restrict__ scales,
             const unsigned char* __restrict__ zero_points, const __half* x, const float* row_scales,
             const float4* sums, const float* hidden, const float* __restrict__ norm_weight,
             const float* __restrict__ biases, void* out, const float* __restrict__ next_weight, __half* next_x,
             float2* next_sums, GemvShape shape) {
    using Slot = WeightSlot<WeightT, ScaleT, WIDENING, SPANS>;
    using Weights = typename Slot::Weights;
    constexpr int FIRST = SLOTS <= 3 ? SLOTS - 1 : SLOTS - 2;  // slots that are filled first: x would wait for more
    constexpr int SLOT_BYTES = Slot::BYTES;
    static_assert(HOST_SLOT_BYTES == Slot::BYTES, "gemv.py plans another size");
    constexpr int FINISHED = ROWS == 1 ? 1 : ROWS / 2;  // outputs of a lane

    alignas(128) extern __shared__ uint4 shared[];
    __shared__ unsigned long long written[WARPS][BUFFERS], copied[MAX_CHUNKS], checked, scaled;
    __shared__ float scales_of_rows[ROWS];
    unsigned char* memory = reinterpret_cast<unsigned char*>(shared);
    // From a shuffle, the place of a slot would be in a uniform register: NVRTC 13.0 writes a copy with a policy to
    // such a place as an illegal instruction (seen on a card).
    // Both are kept in registers: to work them out again takes longer.
    const int warp = number_here(threadIdx.x / 32), lane = number_here(threadIdx.x % 32), g = lane / 4, t = lane % 4;
    const int rank = cluster_rank<CLUSTER>(), num_chunks = 1 << shape.chunk_shift;
    const int own_shift = shape.chunk_shift - (CLUSTER - 1), own_chunks = 1 << own_shift;
    const int part = warp >> own_shift, own = warp & (own_chunks - 1), chunk = rank * own_chunks + own;
    const int num_parts = WARPS >> own_shift;
    const int num_spans = wide_steps(shape.num_inputs) / 2;
    const auto chunk_begin = [&](int number) { return num_spans * number >> shape.chunk_shift; };
    const int block_begin = chunk_begin(rank * own_chunks);
    const int block_spans = chunk_begin((rank + 1) * own_chunks) - block_begin;
    // A block's tiles are neighbours, so that it reads few pages of memory at a time.
    const int cluster = blockIdx.x / CLUSTER;
    const int block_tile = cluster * shape.block_tiles + min(cluster, shape.longer_blocks);
    const int end_tile = block_tile + shape.block_tiles + (cluster < shape.longer_blocks);
    const int first_tile = part < num_parts ? block_tile + part : end_tile;
    // Shared memory: slots [warp][slot]; rows of x; sums [part][buffer][chunk][row][16].
    unsigned char* const slots = memory + warp * SLOTS * SLOT_BYTES;
    unsigned char* const inputs = memory + WARPS * SLOTS * SLOT_BYTES;
    const int pitch = row_pitch<WeightT>((num_spans + CLUSTER - 1) / CLUSTER);  // the same in all blocks
    float* const sums_of_block = reinterpret_cast<float*>(inputs + shape.num_rows * pitch);

    WeightStream<WeightT, ScaleT, WIDENING, SPANS> stream;
    stream.tiles = tiles, stream.scales = scales, stream.zero_points = zero_points, stream.policy = streaming_policy();
    stream.end_tile = end_tile, stream.num_groups = shape.num_groups, stream.group_shift = shape.group_shift;
    stream.num_spans = num_spans;
    stream.begin = chunk_begin(chunk), stream.end = chunk_begin(chunk + 1);
    stream.tile = first_tile, stream.tile_step = num_parts, stream.lane = lane;
    stream.seek();
    const unsigned slots_at = shared_address(slots);
    const auto fill = [&](int begin, int end) {
#pragma unroll 1  // short code starts sooner
        for (int s = begin; s < end; ++s) stream.copy_next(slots_at + s * SLOT_BYTES);
    };
    fill(0, FIRST);
    if (lane < BUFFERS) barrier_init(&written[warp][lane], 32 * own_chunks);
    if (threadIdx.x < MAX_CHUNKS) barrier_init(&copied[threadIdx.x], 1);
    if (threadIdx.x < 2) barrier_init(threadIdx.x == 0 ? &checked : &scaled, shape.num_rows);
    barrier_init_fence();
    grid_dependency_launch();
    __syncthreads();
    if (CLUSTER > 1) cluster_arrive();

    // x comes to shared memory; a warp finds a row's scale meanwhile. The last warps have the fewest tiles.
    const BlockInputs of_block = {x, inputs, shape.num_rows, shape.num_inputs, shape.x_stride, pitch, block_begin,
                                  block_spans};
    grid_dependency_wait();
    if (warp == WARPS - 1) {
        if (shape.num_inputs % 128 != 0) of_block.fill_end(lane);
        __syncwarp();
        if (CAN_COPY_BULK && lane < own_chunks) {
            const int first = rank * own_chunks + lane;
            of_block.copy(chunk_begin(first), chunk_begin(first + 1), &copied[lane]);
        }
    }
    if (!CAN_COPY_BULK) of_block.load(32 * WARPS);
    if (!CAN_COPY_BULK) __syncthreads();
    const int num_sums = norm_pairs(shape.num_inputs);
#pragma unroll 1
    for (int row = (2 * WARPS - 2 - warp) % WARPS; row < shape.num_rows; row += WARPS) {
        float scale = row_scales != nullptr ? __ldcg(row_scales + row) : 1.0f;
        if (sums != nullptr) {
            constexpr int LOADED = 4;  // pairs of a lane at a time
            SumMax found = {0.0f, 0.0f};
#pragma unroll 1
            for (int begin = lane; begin < num_sums; begin += 32 * LOADED) {
                float4 pairs[LOADED] = {};
#pragma unroll
                for (int i = 0; i < LOADED; ++i) {
                    if (begin + 32 * i < num_sums) pairs[i] = __ldcg(sums + row * num_sums + begin + 32 * i);
                }
#pragma unroll
                for (int i = 0; i < LOADED; ++i) include_tiles(found, pairs[i]);
            }
            const RowScale power = row_power(largest_of_lanes(found.maximum));
            if (power.scale != 1.0f) {
                if (CAN_COPY_BULK) {
#pragma unroll 1
                    for (int c = 0; c < own_chunks; ++c) barrier_wait(&copied[c], 0);
                }
#pragma unroll 1
                for (int octet = lane; octet < block_spans * 16; octet += 32) {
                    float values[8], weights[8];
                    load_octet(hidden + static_cast<size_t>(row) * shape.num_inputs, block_begin * 16 + octet,
                               shape.num_inputs, values);
                    load_octet(norm_weight, block_begin * 16 + octet, shape.num_inputs, weights);
#pragma unroll
                    for (int i = 0; i < 8; ++i) values[i] *= weights[i];
                    *reinterpret_cast<uint4*>(inputs + row * pitch + octet * 16) = rounded_octet(values, power.inverse);
                }
                __syncwarp();
            }
            if (lane == 0) barrier_arrive(&checked);
            scale = power.scale * inverse_rms(found.sum, shape.inverse_inputs, shape.eps);
        }
        if (lane == 0) {
            scales_of_rows[row] = scale * shape.power;
            barrier_arrive(&scaled);
        }
    }
    fill(FIRST, SLOTS);
    copy_async_wait<SLOTS - 1>();  // the first slot
    __syncwarp();
    if (CLUSTER > 1) cluster_wait();
    if (first_tile >= end_tile) return;
    if (CAN_COPY_BULK) barrier_wait(&copied[own], 0);
    if (sums != nullptr) barrier_wait(&checked, 0);

    // What a warp multiplies next: taken from its slot, and from x, before the copy into that slot starts.
    Weights weights[2];
    typename Weights::Scales by;
    uint4 v[4] = {};
    const int group_shift = shape.group_shift;
    const bool has_span_scales = Slot::has_span_scales(group_shift), has_row = g < shape.num_rows;
    // A lane's inputs of a span: 16 neighbours of each step, of int4 32, of 16 bits 8 of each unit.
    constexpr int LANE_BYTES = Weights::UNIT_INPUTS / 2, STEP_AT = Weights::IS_INT4 ? 32 : 128;
    constexpr int HALF_AT = Weights::UNIT_INPUTS == 32 ? 64 : 16;
    const unsigned char* const own_inputs =
        inputs + (has_row ? g : 0) * pitch + (stream.begin - block_begin) * 256 + t * LANE_BYTES;
    const unsigned char* span_inputs = own_inputs;
    int slot = 0;
    const auto take = [&](int i) {  // span i of the slot
        const unsigned char* place = slots + slot * SLOT_BYTES;
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            Slot::take(weights[step], place, i, step, group_shift, has_span_scales, zero_points != nullptr, lane);
        }
        if (has_row) {
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                v[q] = *reinterpret_cast<const uint4*>(span_inputs + q / 2 * STEP_AT + q % 2 * HALF_AT);
            }
        }
        span_inputs += 256;
    };
    const int end = chunk_begin(chunk + 1);
    take(0);
    int local = 0;  // number of the tile in this part
#pragma unroll 1
    for (int tile = first_tile; tile < end_tile; tile += num_parts, ++local) {
        // A buffer of a tile is in one block; the blocks take tiles in turn. One warp finishes a tile, and loads what
        // is needed besides the sums before it multiplies.
        const int home = CLUSTER == 1 ? 0 : (part + local) % CLUSTER;
        const bool finishes = home == rank && own == 0;
        const int own_output = tile * TILE_ROWS + lane % TILE_ROWS;
        float before[FINISHED], own_bias = 0.0f, own_next = 0.0f;
        if (!IS_GATED && finishes) {
            if (next_x != nullptr && own_output < shape.num_outputs) own_next = next_weight[own_output];
            if (biases != nullptr) own_bias = biases[own_output];
#pragma unroll
            for (int i = 0; i < FINISHED; ++i) {
                const int row = lane / TILE_ROWS + 2 * i;
                const bool exists = shape.adds && row < shape.num_rows && own_output < shape.num_outputs;
                const float* place = static_cast<const float*>(out) + static_cast<size_t>(row) * shape.out_stride;
                before[i] = exists ? __ldcg(place + own_output) : 0.0f;
            }
        }
        float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
        for (int span = chunk_begin(chunk); span < end; span += SPANS) {
#pragma unroll
            for (int i = 0; i < SPANS; ++i) {
#pragma unroll
                for (int step = 0; step < 2; ++step) {
                    unsigned a[4][4];
                    if (step == 0 || !has_span_scales) by.prepare(weights[step], zero_points == nullptr);
                    weights[step].widen(a, by);
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        const uint4& b = v[2 * step + k / 2];
                        mma<__half>(d, a[k][0], a[k][1], a[k][2], a[k][3], k % 2 ? b.z : b.x, k % 2 ? b.w : b.y);
                    }
                }
                if (i + 1 < SPANS) take(i + 1);
            }
            copy_async_wait<SLOTS - 2>();
            __syncwarp();  // every lane has taken what lies in the slot at hand
            const unsigned at = slots_at + slot * SLOT_BYTES;
            slot = slot + 1 == SLOTS ? 0 : slot + 1;
            if (span + SPANS >= end) span_inputs = own_inputs;
            take(0);
            stream.copy_next(at);
        }
        if (IS_GATED || finishes) barrier_wait(&scaled, 0);
        if constexpr (IS_GATED) {
#pragma unroll
            for (int c = 0; c < (ROWS == 1 ? 1 : 2); ++c) {
                const int row = 2 * t + c, column = tile * HALF_ROWS + g;
                if (row >= shape.num_rows) break;
                const float of_gate = biases != nullptr ? biases[tile * TILE_ROWS + g] : 0.0f;
                const float of_up = biases != nullptr ? biases[tile * TILE_ROWS + g + 8] : 0.0f;
                const float gate = __fmaf_rn(d[c], scales_of_rows[row], of_gate);
                const float up = __fmaf_rn(d[2 + c], scales_of_rows[row], of_up);
                __half* place = static_cast<__half*>(out) + static_cast<size_t>(row) * shape.out_stride + column;
                if (column < shape.num_outputs) *place = gated_half(gate, up);
            }
            continue;
        }
        const int buffer = CLUSTER == 1 ? local % BUFFERS : local, chunk_floats = shape.num_rows * TILE_ROWS;
        float* const of_tile = sums_of_block + (part * shape.num_buffers + buffer) * num_chunks * chunk_floats;
        float* const sums_of_chunk = of_tile + chunk * chunk_floats;
        unsigned long long* barrier = &written[part * own_chunks][local % BUFFERS];
        // The finisher has read what lies in this buffer.
        if (CLUSTER == 1 && local >= BUFFERS) {
            if (num_chunks > 1) sync_threads_of(1 + part, 32 * own_chunks);
            else __syncwarp();
        }
        if (CLUSTER > 1 && home == rank && own == 0 && lane == 0) {
            barrier_expect(barrier, own_chunks * chunk_floats * 4);
        }
#pragma unroll
        for (int c = 0; c < (ROWS == 1 ? 1 : 2); ++c) {
            const int row = 2 * t + c;
            if (row >= shape.num_rows) break;
            float* at = sums_of_chunk + row * TILE_ROWS + g;
            if (CLUSTER == 1 || home == rank) {
                at[0] = d[c], at[8] = d[2 + c];
            } else {
                store_async(at, d[c], barrier, home), store_async(at + 8, d[2 + c], barrier, home);
            }
        }
        if (CLUSTER == 1 || home == rank) barrier_arrive(barrier);
        if (!finishes) continue;
        barrier_wait(barrier, local / BUFFERS % 2);
#pragma unroll
        for (int i = 0; i < FINISHED; ++i) {
            const int row = lane / TILE_ROWS + 2 * i;
            const bool exists = row < shape.num_rows && own_output < shape.num_outputs;
            float result = 0.0f;
            if (exists) {
                const float* of_row = of_tile + row * TILE_ROWS + lane % TILE_ROWS;
                const float scale = scales_of_rows[row];
                result = __fmaf_rn(of_row[0], scale, own_bias);
                if (shape.adds) result = __fadd_rn(before[i], result);
#pragma unroll
                for (int c = 1; c < MAX_CHUNKS; ++c) {
                    if (c >= num_chunks) break;
                    result = __fadd_rn(result, __fmaf_rn(of_row[c * chunk_floats], scale, 0.0f));
                }
                static_cast<float*>(out)[static_cast<size_t>(row) * shape.out_stride + own_output] = result;
            }
            if (next_x == nullptr) continue;
            const float normed = result * own_next;
            const SumMax found = tile_sum(result, normed);
            if (exists) next_x[static_cast<size_t>(row) * shape.next_stride + own_output] = __float2half_rn(normed);
            if (row < shape.num_rows && lane % TILE_ROWS == 0) {
                next_sums[row * 2 * norm_pairs(shape.num_outputs) + tile] = make_float2(found.sum, found.maximum);
            }
        }
    }
}
