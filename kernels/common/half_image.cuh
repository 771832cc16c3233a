// half_image: activations as pairs of 16-bit numbers (product_halves.cuh), in the order in which wgmma takes them, for
// TOKENS rows.
//
// A unit of TOKENS rows: pairs [piece][column][16 bytes], row r in the columns 2r (hi) and 2r + 1 (lo); then for fp16
// the inverse of each row's scale (float). A piece is half of a k-step; it has two inputs of each lane t, since weights
// stand in a unit as 16 bytes of each lane. So a k-step has the inputs that it has in gemv.
#pragma once

#include "common/product_halves.cuh"

template <typename T, int TOKENS>
struct HalfImage {
    using Halves = HalfProduct<T, 1>;
    static constexpr int COLUMNS = 2 * TOKENS, PIECES = 4, STEPS = 2;
    static constexpr int PIECE_BYTES = 16 * COLUMNS, STEP_BYTES = 2 * PIECE_BYTES;
    static constexpr int SCALES_AT = PIECES * PIECE_BYTES;
    static constexpr int UNIT_BYTES = SCALES_AT + (HAS_UNIT_SCALE<T> ? 4 * TOKENS : 0);
    static constexpr int SPAN_VECTORS = UNIT_BYTES / 16;
    static constexpr int MAX_DEPTH = Halves::MAX_DEPTH;
    static_assert(UNIT_BYTES % 32 == 0, "two blocks copy halves of a unit, in vectors");

    // Eight inputs of the row blockIdx.x.
    struct Staged : Halves::Staged {
        using Halves::Staged::Staged;

        __device__ __forceinline__ void store(uint4* unit, int eighth, int) const {
            const int token = blockIdx.x % TOKENS;
            unsigned char* bytes = reinterpret_cast<unsigned char*>(unit);
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece) {
                unsigned* words = reinterpret_cast<unsigned*>(bytes + piece * PIECE_BYTES) + eighth;
                words[4 * (2 * token)] = this->hi[piece];
                words[4 * (2 * token + 1)] = this->lo[piece];
            }
            if (HAS_UNIT_SCALE<T> && eighth == 0) {
                reinterpret_cast<float*>(bytes + SCALES_AT)[token] = this->power.inverse;
            }
        }
    };
};
