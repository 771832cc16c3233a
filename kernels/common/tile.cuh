// tile: the layout of weights on the card, and how its codes become numbers.
//
// Tiles of 16 rows are cut along the inputs into units of 1 KiB: 64 bytes of each row. A unit is [v = 0, 1]
// [lane 4g + t][16 bytes]; these are bytes 16t .. 16t+15 of the unit's 64 of row g + 8v, as the checkpoint has them. So
// a warp reads 512 bytes at once, and a lane's two vectors belong to the rows that mma.m16n8k16 gives to it.
// A lane's 16 bytes fall into PARTS parts of 8 inputs; a part is two k-steps of the mma (for fp32 no mma exists).
// Scales and zero points are [tile][group][16 rows]; a unit holds whole groups, or a group whole units. Scales of
// blocks of 8-bit floats (BlockScale) are [tile][group][2]: the rows of a half tile share one.
#pragma once

#include "common/types.cuh"

constexpr int TILE_ROWS = 16;
constexpr int HALF_ROWS = TILE_ROWS / 2;
constexpr int UNIT_BYTES = 1024;
constexpr int UNIT_VECTORS = UNIT_BYTES / 16;

// Codes q + 128, and q + 8. An asymmetric scheme has zero points instead. A word of eight int4 has the inputs 0 2 4 6 1
// 3 5 7, from its low bits on: so pairs of neighbours lie 16 bits apart, as pairs of fp16 do.
struct Int8 {};
struct Int4 {};
// 8-bit floats (e4m3), a byte each as the checkpoint has them, with scales. NaN does not occur.
struct Fp8 {};

// Which four bits of a word of int4 have an input.
__device__ __forceinline__ constexpr int nibble_of(int input) { return input / 2 + input % 2 * 4; }

// OFFSET: the code of zero, 0 for floats. HAS_SCALES: they have scales.
template <int INPUTS, int ZERO, bool SCALED>
struct Format {
    static constexpr int UNIT_INPUTS = INPUTS, OFFSET = ZERO;
    static constexpr bool HAS_SCALES = SCALED;
};
template <typename WeightT>
struct TileFormat;
template <>
struct TileFormat<Int8> : Format<64, 128, true> {};
template <>
struct TileFormat<Int4> : Format<128, 8, true> {};
template <>
struct TileFormat<Fp8> : Format<64, 0, true> {};
template <>
struct TileFormat<__half> : Format<32, 0, false> {};
template <>
struct TileFormat<__nv_bfloat16> : Format<32, 0, false> {};
template <>
struct TileFormat<float> : Format<16, 0, false> {};

// The scales of a group that a half tile has, and a tile; and the place of a row's among those of its tile.
template <typename ScaleT>
constexpr int SCALES_A_HALF = HALF_ROWS;
template <>
constexpr int SCALES_A_HALF<BlockScale> = 1;
template <typename ScaleT>
constexpr int SCALES_A_TILE = 2 * SCALES_A_HALF<ScaleT>;
template <typename ScaleT>
__device__ __forceinline__ constexpr int scale_place(int row) {
    return row * SCALES_A_HALF<ScaleT> / HALF_ROWS;
}
// Lifted ones lie in pairs, of the rows g and g + 8.
template <>
__device__ __forceinline__ constexpr int scale_place<LiftedScale>(int row) {
    return row % HALF_ROWS * 2 + row / HALF_ROWS;
}

// The units of a span: 128 inputs, or of 32-bit weights 16. A matrix has whole spans.
template <typename WeightT>
constexpr int SPAN_UNITS = 128 / TileFormat<WeightT>::UNIT_INPUTS;
template <>
constexpr int SPAN_UNITS<float> = 1;

template <typename WeightT>
__device__ __forceinline__ int units_of(int num_inputs) {
    constexpr int SPAN_INPUTS = SPAN_UNITS<WeightT> * TileFormat<WeightT>::UNIT_INPUTS;
    return (num_inputs + SPAN_INPUTS - 1) / SPAN_INPUTS * SPAN_UNITS<WeightT>;
}

__device__ __forceinline__ unsigned as_bits(__half2 value) { return *reinterpret_cast<unsigned*>(&value); }
__device__ __forceinline__ __half2 as_half2(unsigned bits) { return *reinterpret_cast<__half2*>(&bits); }

// The four e4m3 codes of a word as fp16, the first two and the last two. fp16 has all of these numbers.
__device__ __forceinline__ void widen_fp8(unsigned word, unsigned& first, unsigned& last) {
#if __CUDA_ARCH__ >= 890
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(first), "=r"(last)
        : "r"(word));
#else
    // Exponent and mantissa at the places of fp16's, whose bias is 8 more; the product corrects that.
    const __half2 unit = __half2half2(__float2half_rn(256.0f));
    const unsigned low = __byte_perm(word, 0, 0x1404), high = __byte_perm(word, 0, 0x3424);
    first = as_bits(__hmul2(as_half2((low & 0x80008000u) | (low >> 1 & 0x3f803f80u)), unit));
    last = as_bits(__hmul2(as_half2((high & 0x80008000u) | (high >> 1 & 0x3f803f80u)), unit));
#endif
}

// The number to subtract from a row's codes, which nibbles_of_1024 gives as 1024 + code (high nibbles: 64 + code, after
// a division by 16). Integers up to 2047 are exact in fp16, so every difference is exact.
struct CodeZero {
    __half2 low, high;
    __device__ __forceinline__ explicit CodeZero(int zero_point)
        : low(__half2half2(__int2half_rn(1024 + zero_point))), high(__half2half2(__int2half_rn(-64 - zero_point))) {}
};

// (word & MASK) | 0x64006400 in one instruction, which the compiler does not find.
template <unsigned MASK>
__device__ __forceinline__ unsigned nibbles_of_1024(unsigned word) {
    unsigned result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "n"(MASK), "r"(0x64006400u));
    return result;
}
