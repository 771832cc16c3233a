// The skeleton that 2026-11-28-one-arithmetic.md measured; no part of llmcli. It goes once gemv.cu is built this way.
// chain: one or eight rows times a tiled matrix by the three rules (skeleton): an activation row in fp16 with one power
// of two, a weight widened to one fp16, P contiguous chunks of the inputs, each one chain of mma.m16n8k16 in order.
#include "common/barrier.cuh"
#include "common/cluster.cuh"
#include "common/launch.cuh"
#include "common/load.cuh"
#include "common/mma.cuh"
#include "common/silu.cuh"
#include "common/tile.cuh"

constexpr int STORE = 0, ADD = 1, SWIGLU = 2;
constexpr int IMAGE = 0, PLAIN = 1, NORM = 2, SQUARES = 3;  // where x comes from
constexpr int SPAN = 128, SPAN_OCTETS = 16;
constexpr float LARGEST = 32768.0f;

struct ChainShape {
    int num_inputs, num_outputs, out_stride, epilogue, num_rows, next_inputs;
    float eps;
};

// Scales: fp16, [tile][group of 128][row g][2]: of the rows g and g + 8, times 2^LIFT where codes are used as they lie.
template <typename W>
struct Form;
template <>
struct Form<Int8> {
    static constexpr int BYTES = 2048, UNITS = 2;
    static constexpr bool SCALED = true;
    static __device__ __forceinline__ int octet_place(int j) { return (j / 8 * 2 + j % 2) * 4 + j % 8 / 2; }  // 4q + t
};
template <>
struct Form<Fp8> : Form<Int8> {};
template <>
struct Form<Int4> {
    static constexpr int BYTES = 1024, UNITS = 1;
    static constexpr bool SCALED = true;
    static __device__ __forceinline__ int octet_place(int j) { return j % 4 * 4 + j / 4; }
};
template <>
struct Form<__half> {
    static constexpr int BYTES = 4096, UNITS = 4;
    static constexpr bool SCALED = false;
    static __device__ __forceinline__ int octet_place(int j) { return j; }
};
template <>
struct Form<__nv_bfloat16> : Form<__half> {};

// S: 0: each lane copies 16 bytes at a time, scales lie apart; 1: one bulk copy a slot, a span's scales follow it;
// 2: as 1, by 16 bytes a lane.
template <typename W, int G, int S>
constexpr int SLOT_BYTES_OF = S >= 1 ? (Form<W>::BYTES / 2 * G + (Form<W>::SCALED ? 16 * G : 0) + 127) / 128 * 128
                                     : Form<W>::BYTES / 2 * G + (Form<W>::SCALED ? 128 : 0);

__device__ __forceinline__ unsigned word_of(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
__device__ __forceinline__ unsigned fma2(unsigned a, __half2 s, __half2 l) { return as_bits(__hfma2(as_half2(a), s, l)); }
__device__ __forceinline__ unsigned mul2(unsigned a, __half2 s) { return as_bits(__hmul2(as_half2(a), s)); }

// A span's scales as they multiply.
template <typename W, int ORDER>
struct By {
    __half2 scale[2], less[2], high[2];
    __device__ __forceinline__ explicit By(unsigned pair) {
        const __half2 both = as_half2(pair);
        scale[0] = __low2half2(both), scale[1] = __high2half2(both);
        // -2^-17: 128 * 2^-24, or 8 * 2^-20; in the other order of int4 scales are lifted by 2^24: 8 * 2^-24.
        const __half2 minus = __hmul2(both, as_half2(ORDER == 1 ? 0x80088008u : 0x80808080u));
        less[0] = __low2half2(minus), less[1] = __high2half2(minus);
        const __half2 sixteenth = __hmul2(both, as_half2(0x2c002c00u));
        high[0] = __low2half2(sixteenth), high[1] = __high2half2(sixteenth);
    }
};

// The four inputs of k-step s of step j of row g + 8v.
template <typename W, int ORDER>
__device__ __forceinline__ void widen(const uint4 (&w)[Form<W>::UNITS], int v, int j, int s, const By<W, ORDER>& by,
                                      unsigned& first, unsigned& last);
template <>
__device__ __forceinline__ void widen<Int8, 0>(const uint4 (&w)[2], int v, int j, int s, const By<Int8, 0>& by,
                                               unsigned& first, unsigned& last) {
    const unsigned word = word_of(w[j], s);
    first = fma2(__byte_perm(word, 0, 0x4140), by.scale[v], by.less[v]);
    last = fma2(__byte_perm(word, 0, 0x4342), by.scale[v], by.less[v]);
}
template <>
__device__ __forceinline__ void widen<Fp8, 0>(const uint4 (&w)[2], int v, int j, int s, const By<Fp8, 0>& by,
                                              unsigned& first, unsigned& last) {
    widen_fp8(word_of(w[j], s), first, last);
    first = mul2(first, by.scale[v]), last = mul2(last, by.scale[v]);
}
// Scales at the outputs: exact numbers.
template <>
__device__ __forceinline__ void widen<Fp8, 2>(const uint4 (&w)[2], int v, int j, int s, const By<Fp8, 2>& by,
                                              unsigned& first, unsigned& last) {
    widen_fp8(word_of(w[j], s), first, last);
}
// As gemm_wide: inputs in order.
template <>
__device__ __forceinline__ void widen<Int4, 0>(const uint4 (&w)[1], int v, int j, int s, const By<Int4, 0>& by,
                                               unsigned& first, unsigned& last) {
    const unsigned word = word_of(w[0], 2 * j + s / 2), lifted = word << 4, bytes = s % 2 * 0x2222;
    first = fma2(__byte_perm(lifted, word, 0x4400 + bytes) & 0x00f000f0u, by.scale[v], by.less[v]);
    last = fma2(__byte_perm(lifted, word, 0x5511 + bytes) & 0x00f000f0u, by.scale[v], by.less[v]);
}
// A k-step has the inputs 0 4 1 5 of a word of eight, then 2 6 3 7.
template <>
__device__ __forceinline__ void widen<Int4, 1>(const uint4 (&w)[1], int v, int j, int s, const By<Int4, 1>& by,
                                               unsigned& first, unsigned& last) {
    const unsigned word = word_of(w[0], 2 * j + s / 2);
    const unsigned pairs = s % 2 == 0 ? word : word >> 8;
    first = fma2(pairs & 0x000f000fu, by.scale[v], by.less[v]);
    last = fma2(pairs & 0x00f000f0u, by.high[v], by.less[v]);
}
template <>
__device__ __forceinline__ void widen<__half, 0>(const uint4 (&w)[4], int v, int j, int s, const By<__half, 0>& by,
                                                 unsigned& first, unsigned& last) {
    const uint4& unit = w[2 * j + s / 2];
    first = word_of(unit, s % 2 * 2), last = word_of(unit, s % 2 * 2 + 1);
}
__device__ __forceinline__ unsigned bf16_to_fp16(unsigned pair) {
    unsigned result;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;"
        : "=r"(result)
        : "f"(__uint_as_float(pair & 0xffff0000u)), "f"(__uint_as_float(pair << 16)));
    return result;
}
template <>
__device__ __forceinline__ void widen<__nv_bfloat16, 0>(const uint4 (&w)[4], int v, int j, int s,
                                                        const By<__nv_bfloat16, 0>& by, unsigned& first, unsigned& last) {
    const uint4& unit = w[2 * j + s / 2];
    first = bf16_to_fp16(word_of(unit, s % 2 * 2)), last = bf16_to_fp16(word_of(unit, s % 2 * 2 + 1));
}

// Without widening: wrong, for what it costs.
template <>
__device__ __forceinline__ void widen<Int8, 3>(const uint4 (&w)[2], int v, int j, int s, const By<Int8, 3>& by,
                                               unsigned& first, unsigned& last) {
    first = word_of(w[j], s) & 0x3bff3bffu, last = word_of(w[j], s ^ 1) & 0x3bff3bffu;
}
template <>
__device__ __forceinline__ void widen<Int4, 3>(const uint4 (&w)[1], int v, int j, int s, const By<Int4, 3>& by,
                                               unsigned& first, unsigned& last) {
    first = word_of(w[0], 2 * j + s / 2) & 0x3bff3bffu, last = word_of(w[0], (2 * j + s / 2) ^ 1) & 0x3bff3bffu;
}

// Place of the inputs of an octet in a vector of 8.
template <int ORDER>
__device__ __forceinline__ constexpr int octet_order(int i) {  // which input lies at place i
    return ORDER == 1 ? i % 2 * 4 + i / 2 : i;
}

template <typename W, int ROWS, int P, int CL, int NW, int SLOTS, int PENDING, int G, int X, int ORDER, int EARLY, int S>
__global__ void __launch_bounds__(NW * 32 + (X == IMAGE ? 32 : 0), 1) __cluster_dims__(CL, 1, 1)
    chain(const unsigned char* __restrict__ tiles, const unsigned char* __restrict__ scales, const void* x,
          const float* __restrict__ norm_weight, const float* squares, const float* row_scales,
          const float* __restrict__ biases, float* out, __half* image_out, float* squares_out, ChainShape shape) {
    using F = Form<W>;
    constexpr int SLOT_BYTES = SLOT_BYTES_OF<W, G, S>, UNITS = F::UNITS, WEIGHT_BYTES = F::BYTES / 2 * G;
    constexpr int H = G == 1 ? 1 : 2, H_UNITS = UNITS * H / 2;  // steps at a time
    static_assert(G == 1 ? !F::SCALED : G % 2 == 0, "");
    constexpr int OWN_CHUNKS = P / CL, PARTS = NW / OWN_CHUNKS, THREADS = NW * 32, BUFFERS = 2;
    constexpr int CHUNK_FLOATS = ROWS * 16, SPAN_VECTORS = 16 * ROWS;  // of x
    constexpr int FIRST = SLOTS <= 3 ? 1 : SLOTS - 2;
    static_assert(P % CL == 0 && NW % OWN_CHUNKS == 0 && PENDING <= SLOTS - 2, "");

    constexpr int SPAN_STRIDE = F::BYTES + (S >= 1 && F::SCALED ? 32 : 0), PAYLOAD = SPAN_STRIDE / 2 * G;
    alignas(1024) extern __shared__ uint4 shared[];
    __shared__ unsigned long long filled[S == 1 ? NW : 1][SLOTS];
    __shared__ unsigned long long written[PARTS][BUFFERS], image_barrier[OWN_CHUNKS], scales_barrier;
    __shared__ float warp_sums[16], factors[8], scales_of_rows[8];
    unsigned char* memory = reinterpret_cast<unsigned char*>(shared);
    // Not from a shuffle: with a place in a uniform register NVRTC 13.0 writes LDGSTS with a policy as an illegal
    // instruction (seen on a card).
    const int warp = static_cast<int>(threadIdx.x / 32), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int rank = cluster_rank<CL>(), part = warp / OWN_CHUNKS, own = warp % OWN_CHUNKS;
    const int chunk = rank * OWN_CHUNKS + own;
    const int num_tiles = shape.epilogue == SWIGLU ? shape.num_outputs / 8 : shape.num_outputs / 16;
    const int num_spans = shape.num_inputs / SPAN, chunk_spans = num_spans / P, block_spans = num_spans / CL;
    const int num_clusters = gridDim.x / CL, tile_step = PARTS * num_clusters;
    const int first_tile = blockIdx.x / CL + part * num_clusters;
    unsigned char* slots = memory + warp * SLOTS * SLOT_BYTES;
    uint4* inputs = reinterpret_cast<uint4*>(memory + NW * SLOTS * SLOT_BYTES);
    float* partials = reinterpret_cast<float*>(inputs + block_spans * SPAN_VECTORS);

    // The stream of this warp: its chunk of each of its tiles.
    const unsigned long long policy = streaming_policy();
    const int chunk_slots = chunk_spans * 2 / G;
    const bool is_helper = X == IMAGE && warp == NW;
    int c_tile = is_helper ? num_tiles : first_tile, c_left = chunk_slots;
    int c_total = c_tile < num_tiles ? (num_tiles - c_tile + tile_step - 1) / tile_step * chunk_slots : 0;
    const unsigned char *c_source, *c_scales;
    const auto seek = [&] {
        const size_t span = static_cast<size_t>(c_tile) * num_spans + chunk * chunk_spans;
        c_source = tiles + span * SPAN_STRIDE + (S == 1 ? 0 : lane * 16);
        c_scales = scales + span * 32 + lane * 16;
    };
    seek();
    const unsigned slots_at = shared_address(slots) + (S == 1 ? 0 : lane * 16);
    if (S == 1 && !is_helper && lane < SLOTS) barrier_init(&filled[warp][lane], 1);
    if (S == 1) { barrier_init_fence(); asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); __syncwarp(); }
    const auto copy_next = [&](unsigned at, int to) {
        if (S == 1) {
            if (c_tile < num_tiles) {
                if (lane == 0) {
                    const unsigned barrier = shared_address(&filled[warp][to]);
                    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "n"(PAYLOAD) : "memory");
                    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(at), "l"(c_source), "n"(PAYLOAD), "r"(barrier), "l"(policy) : "memory");
                }
                c_source += PAYLOAD;
                if (--c_left == 0) {
                    c_tile += tile_step, c_left = chunk_slots;
                    seek();
                }
            }
            return;
        }
        if (S == 2) {
            if (c_total > 0) {
                --c_total;
#pragma unroll
                for (int i = 0; i + 512 <= PAYLOAD; i += 512) copy_async_streaming(at + i, c_source + i, policy);
                if (PAYLOAD % 512 != 0 && lane < PAYLOAD % 512 / 16) copy_async_streaming(at + PAYLOAD / 512 * 512, c_source + PAYLOAD / 512 * 512, policy);
                c_source += PAYLOAD;
                if (--c_left == 0) {
                    c_tile += tile_step, c_left = chunk_slots;
                    seek();
                }
            }
            copy_async_commit();
            return;
        }
        if (c_tile < num_tiles) {
#pragma unroll
            for (int i = 0; i < WEIGHT_BYTES; i += 512) copy_async_streaming(at + i, c_source + i, policy);
            if (F::SCALED && lane < G) copy_async(at + WEIGHT_BYTES, c_scales);
            c_source += WEIGHT_BYTES, c_scales += 16 * G;
            if (--c_left == 0) {
                c_tile += tile_step, c_left = chunk_slots;
                seek();
            }
        }
        copy_async_commit();
    };
#pragma unroll
    for (int s = 0; s < FIRST; ++s) copy_next(slots_at + s * SLOT_BYTES, s);

    if (threadIdx.x < PARTS * BUFFERS) barrier_init(&written[0][threadIdx.x], 32 * OWN_CHUNKS);
    if (X == IMAGE && threadIdx.x < OWN_CHUNKS) barrier_init(&image_barrier[threadIdx.x], 1);
    if (X == IMAGE && threadIdx.x == 32) barrier_init(&scales_barrier, 1);
    if (CL > 1 || X == IMAGE) barrier_init_fence();
    grid_dependency_launch();
    __syncthreads();
    if constexpr (CL > 1) cluster_arrive();

    const auto fill = [&] {
#pragma unroll
        for (int s = FIRST; s < SLOTS; ++s) copy_next(slots_at + s * SLOT_BYTES, s);
    };
    if constexpr (X == IMAGE) {
        grid_dependency_wait();
        if (is_helper) {
            if (lane == 0) {
                const int bytes = chunk_spans * SPAN_VECTORS * 16;
                const unsigned char* source = static_cast<const unsigned char*>(x) + static_cast<size_t>(rank) * OWN_CHUNKS * bytes;
#pragma unroll
                for (int c = 0; c < OWN_CHUNKS; ++c) {
                    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(&image_barrier[c])), "r"(bytes) : "memory");
                    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                                     shared_address(inputs) + c * bytes), "l"(source + static_cast<size_t>(c) * bytes), "r"(bytes), "r"(shared_address(&image_barrier[c])) : "memory");
                }
            }
            // The norm's factor of each row, from the squares of tiles of 16; nobody needs it before a tile's end.
#pragma unroll 2
            for (int row = 0; row < ROWS; ++row) {
                float scale = row_scales != nullptr ? __ldcg(row_scales + row) : 1.0f;
                if (squares != nullptr) {
                    const float4* place = reinterpret_cast<const float4*>(squares + row * 256 + lane * 8);
                    const float4 low = __ldcg(place), high = __ldcg(place + 1);
                    float sum = ((low.x + low.y) + (low.z + low.w)) + ((high.x + high.y) + (high.z + high.w));
#pragma unroll
                    for (int m = 16; m > 0; m /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, m);
                    scale *= rsqrtf(sum / static_cast<float>(shape.num_inputs) + shape.eps);
                }
                if (lane == 0) scales_of_rows[row] = scale;
            }
            if (lane == 0) barrier_arrive(&scales_barrier);
            if constexpr (CL > 1) cluster_wait();
            return;
        }
        fill();
    } else {
        // Octets of the block's inputs, row by row.
        const float* rows = static_cast<const float*>(x);
        const int row_octets = block_spans * SPAN_OCTETS, first_input = rank * block_spans * SPAN;
        const int all = shape.num_rows * row_octets;
        constexpr int DEPTH = 4;
        const unsigned inverse = (1u << 26) / row_octets + 1;
        const auto row_of = [&](int octet) { return ROWS == 1 ? 0 : static_cast<int>(octet * inverse >> 26); };
        float factor_of_one = 1.0f;
        bool is_large = false;
        const auto store = [&](int octet, float (&values)[8], const float factor) {
            const int row = row_of(octet), in_row = octet - row * row_octets;
            unsigned words[4];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                values[i] = X == PLAIN ? values[i] * factor : values[i] * factor;
                is_large |= !(fabsf(values[i]) <= LARGEST);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                words[i] = as_bits(__floats2half2_rn(values[octet_order<ORDER>(2 * i)], values[octet_order<ORDER>(2 * i + 1)]));
            }
            const int place = F::octet_place(in_row % 16);
            inputs[(in_row / 16) * SPAN_VECTORS + (place / 4 * ROWS + row) * 4 + place % 4] =
                make_uint4(words[0], words[1], words[2], words[3]);
        };
        const auto load = [&](const float* base, int input, float (&values)[8], bool fresh) {
            const float4* v = reinterpret_cast<const float4*>(base + input);
            const float4 a = fresh ? __ldcg(v) : __ldg(v), b = fresh ? __ldcg(v + 1) : __ldg(v + 1);
            values[0] = a.x, values[1] = a.y, values[2] = a.z, values[3] = a.w;
            values[4] = b.x, values[5] = b.y, values[6] = b.z, values[7] = b.w;
        };
        const auto input_of = [&](int octet) { return first_input + (octet - row_of(octet) * row_octets) * 8; };
        const auto row_at = [&](int octet) { return rows + row_of(octet) * shape.num_inputs; };
        bool waited = false;
        for (int first = threadIdx.x; first < all; first += DEPTH * THREADS) {
            float values[DEPTH][8], weights[DEPTH][8];
            if constexpr (X != PLAIN) {
#pragma unroll
                for (int d = 0; d < DEPTH; ++d) {
                    const int octet = first + d * THREADS;
                    // Of eight rows an octet of weights serves several where a row is a multiple of the threads.
                    if (octet < all && (ROWS == 1 || d == 0 || row_octets % THREADS != 0)) load(norm_weight, input_of(octet), weights[d], false);
                }
            }
            if (!waited) grid_dependency_wait();
            float partial[8];
            if constexpr (X == SQUARES) {
                if (!waited && (ROWS == 1 || warp < ROWS)) load(squares + (ROWS == 1 ? 0 : warp) * 256, lane * 8, partial, true);
            }
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                const int octet = first + d * THREADS;
                if (octet < all) load(row_at(octet), input_of(octet), values[d], true);
            }
            if (!waited) {
                fill();
                waited = true;
                if constexpr (X == SQUARES) {
                    float sum = 0.0f;
#pragma unroll
                    for (int i = 0; i < 8; ++i) sum += partial[i];
#pragma unroll
                    for (int m = 16; m > 0; m /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, m);
                    factor_of_one = rsqrtf(sum / static_cast<float>(shape.num_inputs) + shape.eps);
                    if (ROWS > 1) {
                        if (warp < ROWS && lane == 0) factors[warp] = factor_of_one;
                        __syncthreads();
                    }
                }
                if constexpr (X == NORM) {  // ROWS 1, at most DEPTH octets a thread
                    float sum = 0.0f;
#pragma unroll
                    for (int d = 0; d < DEPTH; ++d) {
                        if (first + d * THREADS < all) {
#pragma unroll
                            for (int i = 0; i < 8; ++i) sum = fmaf(values[d][i], values[d][i], sum);
                        }
                    }
#pragma unroll
                    for (int m = 16; m > 0; m /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, m);
                    if (lane == 0) warp_sums[warp] = sum;
                    __syncthreads();
                    sum = 0.0f;
#pragma unroll
                    for (int w = 0; w < NW; ++w) sum += warp_sums[w];
                    factor_of_one = rsqrtf(sum / static_cast<float>(shape.num_inputs) + shape.eps);
                }
            }
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                const int octet = first + d * THREADS;
                if (octet >= all) break;
                if constexpr (X != PLAIN) {
                    const int from = ROWS == 1 || row_octets % THREADS != 0 ? d : 0;
#pragma unroll
                    for (int i = 0; i < 8; ++i) values[d][i] *= weights[from][i];
                }
                store(octet, values[d], ROWS == 1 ? factor_of_one : X == SQUARES ? factors[row_of(octet)] : 1.0f);
            }
        }
        if (!waited) {  // more threads than octets
            grid_dependency_wait();
            fill();
            if (X == NORM) {
                if (lane == 0) warp_sums[warp] = 0.0f;
                __syncthreads();
            }
        }
        if (threadIdx.x < 8) scales_of_rows[threadIdx.x] = 1.0f;
        if (__syncthreads_or(is_large)) __trap();  // the real one finds the row's power of two, and does it again
    }
    if constexpr (CL > 1) cluster_wait();

    uint4 v[4] = {};
    int slot = 0, local = 0;
    const bool has_row = ROWS == 8 || g == 0;
    const uint4* const own_inputs = inputs + own * chunk_spans * SPAN_VECTORS + (ROWS == 8 ? lane : t);
    if (X == IMAGE && first_tile < num_tiles) barrier_wait(&image_barrier[own], 0);
    unsigned parity = 0;
    int left = first_tile < num_tiles ? (num_tiles - first_tile + tile_step - 1) / tile_step * chunk_slots : 0;
    if (S == 1) {
        if (left > 0) barrier_wait(&filled[warp][0], 0);
    } else {
        copy_async_wait<SLOTS - 1>();
    }
    __syncwarp();
    uint4 w[2][UNITS];
    unsigned pair = 0;
    const unsigned char* place = slots;
    const uint4* span_inputs = own_inputs;
    // Fetches steps h and on of the slot at hand.
    const auto take = [&](int h) {
        const unsigned char* words = place + SPAN_STRIDE / 2 * h + lane * 16;
#pragma unroll
        for (int u = 0; u < H_UNITS; ++u) {
            w[0][u] = *reinterpret_cast<const uint4*>(words + u * 1024);
            w[1][u] = *reinterpret_cast<const uint4*>(words + u * 1024 + 512);
        }
        if (F::SCALED && ORDER != 2) pair = *reinterpret_cast<const unsigned*>(place + (S >= 1 ? SPAN_STRIDE / 2 * h + F::BYTES : WEIGHT_BYTES + h * 16) + g * 4);
        if (has_row) {
#pragma unroll
            for (int q = 0; q < 2 * H; ++q) v[q] = span_inputs[q * 4 * ROWS];
        }
        span_inputs += H * SPAN_VECTORS / 2;
    };
    take(0);
#pragma unroll 1
    for (int tile = first_tile; tile < num_tiles; tile += tile_step, ++local) {
        const int home = CL == 1 ? 0 : (part + local) % CL;
        const bool finishes = P > 1 && own == 0 && home == rank;
        // What the finisher needs, besides the sums.
        constexpr int OUTPUTS = ROWS == 8 ? 4 : 1;
        float before[OUTPUTS], bias = 0.0f, next_weight = 1.0f;
        if (finishes) {
            if (biases != nullptr) bias = biases[tile * 16 + lane % 16];
            if (X == IMAGE && shape.epilogue == ADD && norm_weight != nullptr) next_weight = norm_weight[tile * 16 + lane % 16];
#pragma unroll
            for (int i = 0; i < OUTPUTS; ++i) {
                const int row = lane / 16 + 2 * i;
                if (shape.epilogue == ADD && row < shape.num_rows) before[i] = __ldcg(out + row * shape.out_stride + tile * 16 + lane % 16);
            }
        }
        float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
        for (int n = 0; n < chunk_slots; ++n) {
            const auto next = [&] {
                if (S != 1) copy_async_wait<PENDING>();
                __syncwarp();  // and every lane has fetched what lies in the slot at hand
                const unsigned at = slots_at + slot * SLOT_BYTES;
                const int to = slot;
                slot = slot + 1 == SLOTS ? 0 : slot + 1;
                if (S == 1) {
                    copy_next(at, to);
                    if (slot == 0) parity ^= 1;
                    if (--left > 0) barrier_wait(&filled[warp][slot], parity);
                }
                place = slots + slot * SLOT_BYTES;
                if (n + 1 == chunk_slots) span_inputs = own_inputs;
                if (EARLY != 2) take(0);
                if (S != 1) copy_next(at, to);
                if (EARLY == 2) take(0);
            };
#pragma unroll
            for (int h = 0; h < G; h += H) {
                const By<W, ORDER> by(pair);
                unsigned a[4 * H][4];
                if (EARLY == 1) {  // all widened: the words are free for the next ones before the products
#pragma unroll
                    for (int k = 0; k < 4 * H; ++k) {
                        widen<W, ORDER>(w[0], 0, k / 4, k % 4, by, a[k][0], a[k][2]);
                        widen<W, ORDER>(w[1], 1, k / 4, k % 4, by, a[k][1], a[k][3]);
                    }
                }
#pragma unroll
                for (int k = 0; k < 4 * H; ++k) {
                    if (EARLY != 1) {
                        widen<W, ORDER>(w[0], 0, k / 4, k % 4, by, a[k][0], a[k][2]);
                        widen<W, ORDER>(w[1], 1, k / 4, k % 4, by, a[k][1], a[k][3]);
                    }
                    const uint4& b = v[k / 2];
                    mma<__half>(d, a[k][0], a[k][1], a[k][2], a[k][3], k % 2 ? b.z : b.x, k % 2 ? b.w : b.y);
                }
                if (h + H < G) take(h + H);
            }
            next();
        }
        if constexpr (P == 1) {
            if (X == IMAGE) barrier_wait(&scales_barrier, 0);
            const float bias_low = biases != nullptr ? biases[tile * 16 + g] : 0.0f;
            const float bias_high = biases != nullptr ? biases[tile * 16 + g + 8] : 0.0f;
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int row = ROWS == 8 ? 2 * t + c : 0;
                if (ROWS == 1 && (c > 0 || t > 0)) continue;
                if (row >= shape.num_rows) continue;
                const float low = __fmaf_rn(d[c], scales_of_rows[row], bias_low);
                const float high = __fmaf_rn(d[2 + c], scales_of_rows[row], bias_high);
                if (shape.epilogue == SWIGLU) {
                    const float result = __fmul_rn(silu_fast(low), high);
                    if (image_out != nullptr) {
                        int order = 0;
#pragma unroll
                        for (int i = 0; i < 8; ++i) if (octet_order<ORDER>(i) == g) order = i;
                        const int octet = F::octet_place(tile % 16);
                        image_out[(static_cast<size_t>(tile / 16) * SPAN_VECTORS + (octet / 4 * ROWS + row) * 4 + octet % 4) * 8 + order] = __float2half_rn(result);
                    } else {
                        out[row * shape.out_stride + tile * 8 + g] = result;
                    }
                } else {
                    float* at = out + row * shape.out_stride + tile * 16 + g;
                    at[0] = shape.epilogue == ADD ? __fadd_rn(__ldcg(at), low) : low;
                    at[8] = shape.epilogue == ADD ? __fadd_rn(__ldcg(at + 8), high) : high;
                }
            }
        } else {
            float* sums = partials + ((part * BUFFERS + local % BUFFERS) * P + chunk) * CHUNK_FLOATS;
            unsigned long long* barrier = &written[part][local % BUFFERS];
            // The finisher has read what lies in this buffer. Across blocks that would take a barrier: two tiles at most there.
            if (CL == 1 && local >= BUFFERS) sync_threads_of<32 * OWN_CHUNKS>(1 + part);
            const bool writes = ROWS == 8 || t == 0;
            if (CL == 1 || home == rank) {
                if (writes) {
                    float* at = sums + (ROWS == 8 ? 32 * t : 0) + g;
                    at[0] = d[0], at[8] = d[2];
                    if (ROWS == 8) at[16] = d[1], at[24] = d[3];
                }
                if (CL > 1 && own == 0 && lane == 0) barrier_expect(barrier, OWN_CHUNKS * CHUNK_FLOATS * 4);
                barrier_arrive(barrier);
            } else if (writes) {
                float* at = sums + (ROWS == 8 ? 32 * t : 0) + g;
                store_async(at, d[0], barrier, home), store_async(at + 8, d[2], barrier, home);
                if (ROWS == 8) store_async(at + 16, d[1], barrier, home), store_async(at + 24, d[3], barrier, home);
            }
            if (finishes) {
                if (X == IMAGE) barrier_wait(&scales_barrier, 0);
                barrier_wait(barrier, local / BUFFERS % 2);
                const float* of_tile = partials + (part * BUFFERS + local % BUFFERS) * P * CHUNK_FLOATS;
#pragma unroll
                for (int i = 0; i < OUTPUTS; ++i) {
                    const int row = ROWS == 8 ? lane / 16 + 2 * i : 0;
                    float sum = of_tile[row * 16 + lane % 16];
#pragma unroll
                    for (int c = 1; c < P; ++c) sum = __fadd_rn(sum, of_tile[c * CHUNK_FLOATS + row * 16 + lane % 16]);
                    float result = __fmaf_rn(sum, scales_of_rows[row], bias);
                    if (shape.epilogue == ADD) result = __fadd_rn(before[i], result);
                    const bool exists = row < shape.num_rows && (ROWS == 8 || lane < 16);
                    if (shape.epilogue == SWIGLU) {
                        const float up = __shfl_down_sync(0xffffffffu, result, 8);
                        result = __fmul_rn(silu_fast(result), up);
                        const int column = lane % 16;
                        if (exists && column < 8) {
                            if (image_out != nullptr) {
                                int order = 0;
#pragma unroll
                                for (int e = 0; e < 8; ++e) if (octet_order<ORDER>(e) == column) order = e;
                                const int octet = F::octet_place(tile % 16);
                                image_out[(static_cast<size_t>(tile / 16) * SPAN_VECTORS + (octet / 4 * ROWS + row) * 4 + octet % 4) * 8 + order] = __float2half_rn(result);
                            } else {
                                out[row * shape.out_stride + tile * 8 + column] = result;
                            }
                        }
                    } else if (exists) {
                        out[row * shape.out_stride + tile * 16 + lane % 16] = result;
                        if (shape.epilogue == ADD && image_out != nullptr) {
                            const int column = lane % 8;
                            int order = 0;
#pragma unroll
                            for (int e = 0; e < 8; ++e) if (octet_order<ORDER>(e) == column) order = e;
                            const int number = tile * 2 + lane % 16 / 8, octet = F::octet_place(number % 16);
                            image_out[(static_cast<size_t>(number / 16) * SPAN_VECTORS + (octet / 4 * ROWS + row) * 4 + octet % 4) * 8 + order] = __float2half_rn(result * next_weight);
                        }
                    }
                    if (squares_out != nullptr) {
                        float square = result * result;
#pragma unroll
                        for (int m = 8; m > 0; m /= 2) square += __shfl_xor_sync(0xffffffffu, square, m);
                        if (exists && lane % 16 == 0) squares_out[row * 256 + tile] = square;
                    }
                }
            }
        }
    }
}

// The plain chain: one warp a tile and chunk, weights fp16 [num_rows, num_inputs] as they multiply, x fp16 [8, num_inputs];
// sums [P][8][num_rows]. kind: 0 int8, 1 int4 in order, 2 int4 in the other order, 3 sixteen bits.
extern "C" __global__ void plain_chain(const __half* weights, const __half* x, float* sums, int num_rows, int num_inputs,
                                       int num_chunks, int kind) {
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4, tile = blockIdx.x, chunk = blockIdx.y;
    const int spans = num_inputs / 128 / num_chunks;
    float d[4] = {};
    for (int span = chunk * spans; span < (chunk + 1) * spans; ++span) {
        for (int k = 0; k < 8; ++k) {
            int at[4];
            for (int i = 0; i < 4; ++i) {
                const int j = k / 4, s = k % 4, n = 4 * s + i;
                int input = 64 * j + 16 * t + n;
                if (kind == 1) input = 32 * t + 16 * j + n;
                if (kind == 2) input = 32 * t + 16 * j + s / 2 * 8 + s % 2 * 2 + i / 2 + i % 2 * 4;
                if (kind == 3) input = 64 * j + s / 2 * 32 + 8 * t + s % 2 * 4 + i;
                at[i] = span * 128 + input;
            }
            const auto pair = [&](const __half* row, int i) {
                return static_cast<unsigned>(__half_as_ushort(row[at[i]])) | static_cast<unsigned>(__half_as_ushort(row[at[i + 1]])) << 16;
            };
            const __half* low = weights + static_cast<size_t>(tile * 16 + g) * num_inputs;
            const __half* high = low + static_cast<size_t>(8) * num_inputs;
            const __half* column = x + static_cast<size_t>(g) * num_inputs;
            mma<__half>(d, pair(low, 0), pair(high, 0), pair(low, 2), pair(high, 2), pair(column, 0), pair(column, 2));
        }
    }
    float* place = sums + static_cast<size_t>(chunk) * 8 * num_rows + tile * 16 + g;
    for (int c = 0; c < 2; ++c) {
        place[static_cast<size_t>(2 * t + c) * num_rows] = d[c];
        place[static_cast<size_t>(2 * t + c) * num_rows + 8] = d[2 + c];
    }
}
