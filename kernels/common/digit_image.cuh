// digit_image: activations as digits (product_codes.cuh), in the order in which wgmma takes them, for TOKENS rows.
//
// A span of TOKENS rows: digits [high, low][piece][token][16 bytes], then the scale of each token (float), and with
// zero points 256 times the sum of the high digits plus that of the low ones (int). A piece is half of a k-step; it has
// four inputs of each lane t, since a unit has codes as 16 bytes of each lane. A span of int8 has the pieces of both
// its units.
#pragma once

#include "common/product_codes.cuh"

template <typename WeightT, bool IS_SYMMETRIC, int TOKENS>
struct DigitImage {
    using Codes = CodeProduct<WeightT, float, 0, IS_SYMMETRIC, 1>;
    static constexpr bool IS_INT4 = Codes::IS_INT4;
    static constexpr int UNITS = SPAN_UNITS<WeightT>;
    static constexpr int PIECES = SPAN_INPUTS_OF<WeightT> / 16, PARTS = PIECES / 4;
    static constexpr int PIECE_BYTES = 16 * TOKENS, DIGIT_BYTES = PIECES * PIECE_BYTES;
    static constexpr int SCALES_AT = 2 * DIGIT_BYTES, SUMS_AT = SCALES_AT + 4 * TOKENS;
    static constexpr int SPAN_BYTES = SUMS_AT + (IS_SYMMETRIC ? 0 : 4 * TOKENS);
    static constexpr int SPAN_VECTORS = SPAN_BYTES / 16;
    static constexpr int MAX_DEPTH = IS_SYMMETRIC ? 3 : 1;
    static_assert(SPAN_BYTES % 16 == 0, "a span is copied in vectors");

    // Eight inputs of the row blockIdx.x.
    struct Staged : Codes::Staged {
        using Codes::Staged::Staged;

        __device__ __forceinline__ void store(uint4* span, int eighth, int) const {
            const int token = blockIdx.x % TOKENS;
            unsigned char* bytes = reinterpret_cast<unsigned char*>(span);
            const int t = IS_INT4 ? eighth / 4 : eighth / 2 % 4;
#pragma unroll
            for (int digit = 0; digit < 2; ++digit) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int step = IS_INT4 ? eighth / 2 % 2 * 2 + half : eighth / 8 * 2 + eighth % 2;
                    const int piece = 2 * step + (IS_INT4 ? eighth % 2 : half);
                    unsigned char* place = bytes + digit * DIGIT_BYTES + piece * PIECE_BYTES + 16 * token + 4 * t;
                    *reinterpret_cast<unsigned*>(place) = this->words[digit][half];
                }
            }
            if (eighth == 0) {
                reinterpret_cast<float*>(bytes + SCALES_AT)[token] = this->scale;
                if (!IS_SYMMETRIC) reinterpret_cast<int*>(bytes + SUMS_AT)[token] = 256 * this->sums[0] + this->sums[1];
            }
        }
    };

    // One part of a lane's codes of the rows g and g + 8 of each unit, as operands of two steps of wgmma.
    __device__ __forceinline__ static void operands(const uint4 (&low)[UNITS], const uint4 (&high)[UNITS], int part,
                                                    unsigned (&a)[2][4]) {
        if constexpr (IS_INT4) {
            const uint4 &first = low[0], &second = high[0];
            const unsigned words[4] = {part == 0 ? first.x : first.z, part == 0 ? second.x : second.z,
                                       part == 0 ? first.y : first.w, part == 0 ? second.y : second.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                a[0][i] = Codes::even(words[i]);
                a[1][i] = Codes::odd(words[i]);
            }
        } else {
            constexpr unsigned SIGNS = IS_SYMMETRIC ? 0x80808080u : 0;
            const uint4 &l = low[part], &h = high[part];
            a[0][0] = l.x ^ SIGNS, a[0][1] = h.x ^ SIGNS, a[0][2] = l.y ^ SIGNS, a[0][3] = h.y ^ SIGNS;
            a[1][0] = l.z ^ SIGNS, a[1][1] = h.z ^ SIGNS, a[1][2] = l.w ^ SIGNS, a[1][3] = h.w ^ SIGNS;
        }
    }
};
