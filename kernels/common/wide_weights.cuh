// wide_weights: a lane's part of a tile's step of 64 inputs: loaded early, and widened to fp16 when it is needed.
//
// Lane 4g + t has 16 neighbours of the rows g and g + 8. They have one scale each, as groups are of 16 inputs or more.
// Widened they are exact codes times the scale, rounded to fp32, then to fp16.
// Products are made in fp16, two in one instruction, if the result is the same. The matrix decides that (`widening` in
// llmcli/kernels/tiles.py): a choice for each span would take more instructions than it saves.
#pragma once

#include "common/load.cuh"
#include "common/matrix.cuh"
#include "common/tile.cuh"
#include "common/wide_image.cuh"

// BY_FLOATS: any scales. BY_HALVES: fp16 has the scales. It then multiplies as fp32 does: 8 bits of a code times 11 of
// the scale are exact there, so the only rounding is that to fp16. LIFTED: codes without zero points, with one scale
// for a span, in 16 bits. Weights are divided by one power of two of the matrix, so that all scales are below 2^-8:
// then fp16 has them times 2^24, and a code need not become a number first.
constexpr int BY_FLOATS = 0, BY_HALVES = 1, LIFTED = 2;

// What a lane keeps of the scales of the rows g and g + 8.
template <typename ScaleT>
struct ScalePair {
    ScaleT values[2];  // not yet floats: converting would wait for them
};
template <>
struct ScalePair<LiftedScale> {
    unsigned bits;
};

__device__ __forceinline__ void take_words_of(const unsigned char* place, unsigned (&words)[4]) {
    const uint4 all = *reinterpret_cast<const uint4*>(place);
    words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
}
__device__ __forceinline__ void take_words_of(const unsigned char* place, unsigned (&words)[2]) {
    const uint2 all = *reinterpret_cast<const uint2*>(place);
    words[0] = all.x, words[1] = all.y;
}

// Which tile, and where its scales and zero points begin.
template <typename ScaleT>
struct WideSource {
    const unsigned char* weights;  // of this lane
    const ScaleT* scales;          // of row g
    const unsigned char* zero_points;
};

template <typename WeightT, typename ScaleT, int WIDENING>
struct WideScales;

template <typename WeightT, typename ScaleT, int WIDENING>
struct WideWeights {
    static constexpr int UNIT_INPUTS = TileFormat<WeightT>::UNIT_INPUTS;
    static constexpr bool IS_INT4 = UNIT_INPUTS == 128, IS_LIFTED = WIDENING == LIFTED;
    static constexpr int WORDS = IS_INT4 ? 2 : 4;
    // From a span's first step to its second one, and to the next span.
    static constexpr int STEP_BYTES = IS_INT4 ? 8 : UNIT_BYTES, SPAN_BYTES = IS_INT4 ? UNIT_BYTES : 2 * UNIT_BYTES;
    static constexpr int OFFSET = TileFormat<WeightT>::OFFSET;
    static_assert(!IS_LIFTED || OFFSET > 0, "codes may be lifted");
    using Scales = WideScales<WeightT, ScaleT, WIDENING>;

    unsigned words[2][WORDS];  // of the rows g and g + 8
    ScalePair<ScaleT> scales;
    int zeros[2];

    __device__ __forceinline__ void load_words(const unsigned char* place) {
        load_words_here(place, words[0]);
        load_words_here(place + UNIT_BYTES / 2, words[1]);
    }
    __device__ __forceinline__ void load_scales(const WideSource<ScaleT>& source, unsigned group) {
        const size_t place = static_cast<size_t>(group) * TILE_ROWS;
        if constexpr (IS_LIFTED) {
            scales.bits = load_stored_here(source.scales + place);
            return;
        } else {
            scales.values[0] = load_stored_here(source.scales + place);
            scales.values[1] = load_stored_here(source.scales + place + 8);
        }
        if (source.zero_points != nullptr) {
            zeros[0] = load_stored_here(source.zero_points + place);
            zeros[1] = load_stored_here(source.zero_points + place + 8);
        }
    }

    // The same from shared memory.
    __device__ __forceinline__ void take_words(const unsigned char* place) {
        take_words_of(place, words[0]);
        take_words_of(place + UNIT_BYTES / 2, words[1]);
    }
    __device__ __forceinline__ void take_scales(const ScaleT* place, const unsigned char* zero_points, bool has_zeros) {
        if constexpr (IS_LIFTED) {
            scales.bits = *reinterpret_cast<const unsigned*>(place);
        } else {
            scales.values[0] = place[0], scales.values[1] = place[SCALES_A_HALF<ScaleT>];
            if (has_zeros) zeros[0] = zero_points[0], zeros[1] = zero_points[8];
        }
    }

    // As a of the four k-steps.
    __device__ __forceinline__ void widen(unsigned (&a)[4][4], const Scales& by) const {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            if constexpr (IS_LIFTED) {
                widen_lifted(0, step, by, a[step][0], a[step][2]);
                widen_lifted(1, step, by, a[step][1], a[step][3]);
            } else if constexpr (WIDENING == BY_HALVES) {
                widen_four(0, step, by.zeros[0], __low2half2(by.halves), a[step][0], a[step][2]);
                widen_four(1, step, by.zeros[1], __high2half2(by.halves), a[step][1], a[step][3]);
            } else {
                widen_four(0, step, by.zeros[0], by.wide[0], a[step][0], a[step][2]);
                widen_four(1, step, by.zeros[1], by.wide[1], a[step][1], a[step][3]);
            }
        }
    }

private:
    // As an fp16 a code of int8 is (c + 128) * 2^-24, one of int4 (c + 8) * 2^-24, or in bits 4 to 7 (c + 8) * 2^-20.
    // That times the lifted scale, less 128 or 8 scales, rounds once: to c scales. (Of a scale 2^7 below the largest
    // one or smaller, those 128 or 8 scales may be rounded to a multiple of 2^-24 too.)
    __device__ __forceinline__ void widen_lifted(int v, int step, const Scales& by, unsigned& first,
                                                 unsigned& last) const {
        const unsigned word = words[v][IS_INT4 ? step / 2 : step];
        const auto of_row = [&](__half2 pair) { return v == 0 ? __low2half2(pair) : __high2half2(pair); };
        __half2 scale_of_last = of_row(by.halves);
        if constexpr (IS_INT4) {
            const unsigned pairs = step % 2 == 0 ? word : word >> 8;
            first = pairs & 0x000f000fu;
            last = pairs & 0x00f000f0u;
            scale_of_last = of_row(by.sixteenth);
        } else {
            first = __byte_perm(word, 0, 0x4140);
            last = __byte_perm(word, 0, 0x4342);
        }
        first = as_bits(__hfma2(as_half2(first), of_row(by.halves), of_row(by.less)));
        last = as_bits(__hfma2(as_half2(last), scale_of_last, of_row(by.less)));
    }

    // The four inputs of a k-step, two and two.
    template <typename T>
    __device__ __forceinline__ void widen_four(int v, int step, int zero_point, T scale, unsigned& first,
                                               unsigned& last) const {
        if constexpr (IS_INT4) {
            const unsigned word = words[v][step / 2] >> (step % 2 * 8);
            const CodeZero zero(zero_point);
            const __half2 sixteenth = as_half2(0x2c002c00u);
            const __half2 low = __hsub2(as_half2(nibbles_of_1024<0x000f000fu>(word)), zero.low);
            const __half2 high = __hfma2(as_half2(nibbles_of_1024<0x00f000f0u>(word)), sixteenth, zero.high);
            first = scaled(low, scale);
            last = scaled(high, scale);
        } else if constexpr (OFFSET == 0) {
            widen_fp8(words[v][step], first, last);
            first = scaled(as_half2(first), scale);
            last = scaled(as_half2(last), scale);
        } else {
            const __half2 zero = as_half2(0x64006400u + static_cast<unsigned>(zero_point) * 0x00010001u);  // 1024 + z
            const unsigned word = words[v][step];
            first = scaled(__hsub2(as_half2(__byte_perm(word, 0x64646464u, 0x4140)), zero), scale);
            last = scaled(__hsub2(as_half2(__byte_perm(word, 0x64646464u, 0x4342)), zero), scale);
        }
    }

    __device__ __forceinline__ static unsigned scaled(__half2 numbers, float scale) {
        const float2 wide = __half22float2(numbers);
        return as_bits(__floats2half2_rn(__fmul_rn(wide.x, scale), __fmul_rn(wide.y, scale)));
    }
    __device__ __forceinline__ static unsigned scaled(__half2 numbers, __half2 scale) {
        return as_bits(__hmul2(numbers, scale));
    }
};

template <typename T>
constexpr bool IS_BFLOAT16 = false;
template <>
constexpr bool IS_BFLOAT16<__nv_bfloat16> = true;

// 16-bit floats, which become fp16: bf16 exactly from 2^-17 to 65504. They have no scales.
template <typename WeightT>
struct WideFloats {
    static constexpr int UNIT_INPUTS = TileFormat<WeightT>::UNIT_INPUTS;
    static constexpr int STEP_BYTES = 2 * UNIT_BYTES, SPAN_BYTES = 2 * STEP_BYTES;
    static constexpr bool IS_INT4 = false;
    // The compiler does not know that this is one. Without a multiplication it copies words into the registers of the
    // tensor cores' operands, while these still read the words before (seen in the machine code, and in wrong sums).
    struct Scales {
        unsigned one;

        __device__ __forceinline__ void prepare(const WideFloats&, bool is_symmetric) {
            one = is_symmetric ? 0x3c003c00u : 0;
        }
    };

    unsigned words[2][2][4];  // of the units and of the rows g and g + 8

    __device__ __forceinline__ void load_words(const unsigned char* place) {
#pragma unroll
        for (int i = 0; i < 4; ++i) load_words_here(place + i * (UNIT_BYTES / 2), words[i / 2][i % 2]);
    }
    __device__ __forceinline__ void load_scales(const WideSource<float>&, unsigned) {}
    __device__ __forceinline__ void take_words(const unsigned char* place) {
#pragma unroll
        for (int i = 0; i < 4; ++i) take_words_of(place + i * (UNIT_BYTES / 2), words[i / 2][i % 2]);
    }
    __device__ __forceinline__ void widen(unsigned (&a)[4][4], const Scales& by) const {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[step][i] = as_fp16(words[step / 2][i % 2][step % 2 * 2 + i / 2], by.one);
        }
    }

private:
    __device__ __forceinline__ static unsigned as_fp16(unsigned pair, unsigned one) {
        if constexpr (IS_BFLOAT16<WeightT>) {
            return pack_within_range(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
        } else {
            return as_bits(__hmul2(as_half2(pair), as_half2(one)));
        }
    }
};
template <>
struct WideWeights<__half, float, BY_FLOATS> : WideFloats<__half> {};
template <>
struct WideWeights<__nv_bfloat16, float, BY_FLOATS> : WideFloats<__nv_bfloat16> {};

// The scales and zero points of a lane's rows g and g + 8, in the form in which they multiply.
template <typename WeightT, typename ScaleT, int WIDENING>
struct WideScales {
    using Weights = WideWeights<WeightT, ScaleT, WIDENING>;
    __half2 halves, sixteenth, less;
    float wide[2];
    int zeros[2];

    __device__ __forceinline__ void prepare(const Weights& weights, bool is_symmetric) {
        if constexpr (Weights::IS_LIFTED) {
            halves = as_half2(weights.scales.bits);
            if constexpr (Weights::IS_INT4) sixteenth = __hmul2(halves, as_half2(0x2c002c00u));
            less = __hmul2(halves, as_half2(Weights::IS_INT4 ? 0x80088008u : 0x80808080u));  // -2^-21, -2^-17
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                wide[i] = to_float(weights.scales.values[i]);
                zeros[i] = is_symmetric ? Weights::OFFSET : weights.zeros[i];
            }
            if constexpr (WIDENING == BY_HALVES) halves = __floats2half2_rn(wide[0], wide[1]);
        }
    }
};
