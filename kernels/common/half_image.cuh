// half_image: activations as pairs of 16-bit numbers (product_halves.cuh, product_fp8.cuh), in the order in which wgmma
// takes them, for TOKENS rows.
//
// A unit of TOKENS rows: pairs [piece][column][16 bytes], row r in the columns 2r (hi) and 2r + 1 (lo); then for fp16
// and 8-bit floats the inverse of each row's scale (float). A piece is half of a k-step; it has two inputs of each lane
// t, since a unit has weights as 16 bytes of each lane. So a k-step has the same inputs as in gemv.
#pragma once

#include "common/product_fp8.cuh"
#include "common/product_halves.cuh"

template <typename T>
struct PairsOf {
    using Type = HalfProduct<T, 1>;
};
template <>
struct PairsOf<Fp8> {
    using Type = Fp8Product<float, 0, 1>;
};

template <typename T, int TOKENS>
struct HalfImage {
    using Pairs = typename PairsOf<T>::Type;
    // A part: 8 inputs of a lane, as in tile.cuh.
    static constexpr int UNITS = SPAN_UNITS<T>, PARTS = TileFormat<T>::UNIT_INPUTS / 32;
    static constexpr int COLUMNS = 2 * TOKENS, PIECES = 4 * PARTS, STEPS = 2 * PARTS;
    static constexpr int PIECE_BYTES = 16 * COLUMNS, STEP_BYTES = 2 * PIECE_BYTES;
    static constexpr int SCALES_AT = PIECES * PIECE_BYTES;
    static constexpr int UNIT_BYTES = SCALES_AT + (HAS_UNIT_SCALE<T> ? 4 * TOKENS : 0);
    static constexpr int SPAN_VECTORS = UNITS * UNIT_BYTES / 16;
    static constexpr int MAX_DEPTH = 3;
    static_assert(UNIT_BYTES % 32 == 0, "two blocks copy halves of a unit, in vectors");

    // Eight inputs of the row blockIdx.x.
    struct Staged : Pairs::Staged {
        using Pairs::Staged::Staged;

        __device__ __forceinline__ void store(uint4* span, int eighth, int) const {
            const int token = blockIdx.x % TOKENS, part = eighth % PARTS, t = eighth / PARTS % 4;
            unsigned char* bytes = reinterpret_cast<unsigned char*>(span) + eighth / (4 * PARTS) * UNIT_BYTES;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                unsigned* words = reinterpret_cast<unsigned*>(bytes + (4 * part + i) * PIECE_BYTES) + t;
                words[4 * (2 * token)] = this->hi[i];
                words[4 * (2 * token + 1)] = this->lo[i];
            }
            if (HAS_UNIT_SCALE<T> && eighth % (4 * PARTS) == 0) {
                reinterpret_cast<float*>(bytes + SCALES_AT)[token] = this->power.inverse;
            }
        }
    };
};

// A unit's bytes of the rows g and g + 8 as a of its k-steps.
__device__ __forceinline__ void unpack_unit(const uint4& low, const uint4& high, unsigned (&a)[2][4]) {
    a[0][0] = low.x, a[0][1] = high.x, a[0][2] = low.y, a[0][3] = high.y;
    a[1][0] = low.z, a[1][1] = high.z, a[1][2] = low.w, a[1][3] = high.w;
}
__device__ __forceinline__ void unpack_unit(const uint4& low, const uint4& high, unsigned (&a)[4][4]) {
    widen_fp8_part(low, high, 0, a[0], a[1]);
    widen_fp8_part(low, high, 1, a[2], a[3]);
}
