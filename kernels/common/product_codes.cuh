// product_codes: int8 and int4 codes times fp32 activations in integers, a span at a time, on the int8 tensor cores.
//
// A span is 128 inputs. Its activations become integers; the largest magnitude becomes 32639 = 127 * 256 + 127.
// Each integer is split into two digits to the base 256 in [-128, 127]. Digits times codes are summed exactly in int32:
// no code is converted. So the error of x is 1 / 63000 of the largest in its span. That is 250 times finer than the
// codes of a group are, and moves a trained model's logits less than float16 inputs do. The only other roundings are
// those of fp32 sums of groups, or spans.
// One operation turns four codes of a symmetric scheme into signed bytes: code - 128, or 16 * (code - 8). With zero
// points codes stay unsigned, and zero * sum(x) is subtracted.
//
// Columns of the mma: virtual row v has the columns 2v (high digits) and 2v + 1 (low digits). A row r of activations
// has ACROSS_LANES virtual rows, r * ACROSS_LANES + group: one for each of the groups next to each other in a unit. Its
// digits are zero in the other groups. An mma of 8 columns holds four virtual rows.
// A span in shared memory, in vectors of 16 bytes: digits [part][row][digit][t]; a part is 16 inputs of each lane t in
// the order in which multiply takes them. A span of int8 has two units, and each is a part. Then a symmetric scheme has
// the scale of each row (float); others have [row][group] {sum of each digit, scale, unused}.
#pragma once

#include "common/activations.cuh"
#include "common/mma.cuh"

// d += a * b in int32, b signed bytes and a as IS_SIGNED says. Lane 4g + t holds of a the rows g (a0, a2) and g + 8
// (a1, a3), inputs 4t .. 4t+3 (a0, a1) and 4t+16 .. 4t+19 (a2, a3); of b the column g alike; of d the columns 2t and
// 2t + 1 of row g (d[0], d[1]) and of row g + 8. Source: PTX ISA, mma.m16n8k32.
template <bool IS_SIGNED>
__device__ __forceinline__ void mma_bytes(int (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                          unsigned b1) {
    if constexpr (IS_SIGNED) {
        asm volatile(
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
}

template <typename WeightT, typename ScaleT, int GROUP_SIZE, bool IS_SYMMETRIC, int ROWS>
struct CodeProduct {
    using G = Groups<WeightT, GROUP_SIZE>;
    static constexpr int COLUMN_TILES = (ROWS * G::ACROSS_LANES + 3) / 4;
    static constexpr bool IS_INT4 = TileFormat<WeightT>::UNIT_INPUTS == 128;
    static constexpr int LANES = G::SPAN_INPUTS / 8;  // that stage a span
    static constexpr int GROUP_LANES = LANES / G::PER_SPAN;
    static constexpr int PARTS = 2, UNITS = SPAN_UNITS<WeightT>;
    // Sums that become floats one after the other: those of units, if a group lies in one.
    static constexpr int SEPARATE = IS_INT4 || G::PER_SPAN == 1 ? 1 : UNITS;
    static constexpr int NUM_DIGITS = 2;
    static constexpr int PART_VECTORS = NUM_DIGITS * 4;
    // A span of ROWS rows in shared memory.
    static constexpr int DIGIT_VECTORS = PARTS * ROWS * PART_VECTORS;
    static constexpr int SPAN_VECTORS = DIGIT_VECTORS + (IS_SYMMETRIC ? (ROWS + 3) / 4 : ROWS * G::PER_SPAN);
    static constexpr float CODE_UNIT = IS_SYMMETRIC && IS_INT4 ? 1.0f / 16.0f : 1.0f;

    static constexpr int NUM_SUMS = 2 * COLUMN_TILES;
    // Chains of products, which do not wait for each other. Further column tiles are chains of their own.
    static constexpr int CHAINS = SEPARATE == 1 && G::WITHIN_LANE == 1 && COLUMN_TILES == 1 ? PARTS : 1;
    // With many sums no register is left.
    static constexpr int UNROLL = COLUMN_TILES >= 4 ? 1 : SEPARATE * G::WITHIN_LANE;
    static constexpr int MAX_DEPTH = !IS_SYMMETRIC || G::ACROSS_LANES > 1 ? 1 : ROWS == 1 ? 4 : 2;  // of stage_spans
    // Int4 has no time for staging between products, others no registers.
    static constexpr bool IS_WOVEN = !IS_INT4 && IS_SYMMETRIC && G::ACROSS_LANES == 1;  // WovenInputs
    static constexpr float MOST = 32639.0f;  // whose digits are 127 and 127

    static constexpr bool HAS_SPARE = ROWS * G::ACROSS_LANES % 4 != 0;  // columns without a virtual row
    LaneSums<NUM_SUMS> sums;  // of the rows g and g + 8, of the virtual row t of each column tile
    uint4 inputs[HAS_SPARE ? PARTS : 1] = {};  // spare columns stay zeros, which take less power

    // Eight inputs of one row, as they are staged; lane `eighth` of the span holds the inputs 8 * eighth and on.
    struct Staged {
        unsigned words[NUM_DIGITS][2];
        int sums[NUM_DIGITS] = {0, 0};  // of a group's digits, with zero points
        float scale;

        __device__ __forceinline__ Staged(const float (&values)[8], int eighth) {
            const float largest = largest_of<LANES>(values), bound = fmaxf(largest, 0x1p-100f);
            const float factor = __fdividef(MOST, bound);
            // NaN, infinity, and values without a quotient give NaN.
            scale = largest < 0x1p126f ? __fmul_rn(bound, CODE_UNIT / MOST) : __uint_as_float(0x7fc00000u);
            // value * factor rounded to an integer, plus 128: then the low byte is the low digit plus 128, and the byte
            // above it the high digit. Added to 1.5 * 2^23, an integer stands in the low bits of the float.
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                unsigned bytes[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int input = IS_INT4 ? 2 * i + half : 4 * half + i;  // nibbles: even inputs, then odd ones
                    bytes[i] = __float_as_uint(__fmaf_rn(values[input], factor, 12582912.0f + 128.0f));
                }
                const unsigned first = __byte_perm(bytes[0], bytes[1], 0x5140);
                const unsigned second = __byte_perm(bytes[2], bytes[3], 0x5140);
                words[0][half] = __byte_perm(first, second, 0x7632);
                words[1][half] = __byte_perm(first, second, 0x5410) ^ 0x80808080u;
            }
            if constexpr (!IS_SYMMETRIC) {
#pragma unroll
                for (int digit = 0; digit < NUM_DIGITS; ++digit) {
                    sums[digit] = __dp4a(static_cast<int>(words[digit][0]), 0x01010101, 0);
                    sums[digit] = __dp4a(static_cast<int>(words[digit][1]), 0x01010101, sums[digit]);
#pragma unroll
                    for (int mask = GROUP_LANES / 2; mask > 0; mask /= 2) {
                        sums[digit] += __shfl_xor_sync(0xffffffffu, sums[digit], mask);
                    }
                }
            }
        }
        __device__ __forceinline__ void store(uint4* span, int eighth, int row) const {
            // The lane t that multiplies these inputs, its part, and their places among its 16.
            const int t = IS_INT4 ? eighth / 4 : eighth / 2 % 4, part = IS_INT4 ? eighth / 2 % 2 : eighth / 8;
            uint2* digits = reinterpret_cast<uint2*>(span + (part * ROWS + row) * PART_VECTORS + t);
#pragma unroll
            for (int digit = 0; digit < NUM_DIGITS; ++digit) {
                digits[8 * digit + eighth % 2] = make_uint2(words[digit][0], words[digit][1]);
            }
            if (IS_SYMMETRIC && eighth == 0) reinterpret_cast<float*>(span + DIGIT_VECTORS)[row] = scale;
            if (!IS_SYMMETRIC && eighth % GROUP_LANES == 0) {
                reinterpret_cast<int4*>(span + DIGIT_VECTORS)[row * G::PER_SPAN + eighth / GROUP_LANES] =
                    make_int4(sums[0], sums[1], __float_as_int(scale), 0);
            }
        }
    };

    // `low` and `high` are this lane's bytes of the rows g and g + 8 of each unit; `slot` the span's scales and zero
    // points.
    __device__ __forceinline__ void add_span(const uint4 (&low)[UNITS], const uint4 (&high)[UNITS],
                                             const unsigned char* slot, const uint4* span, int lane) {
        const int g = lane / 4, t = lane % 4;
        const ScaleT* scales = reinterpret_cast<const ScaleT*>(slot);
        const unsigned char* zeros = slot + TILE_ROWS * G::PER_SPAN * sizeof(ScaleT);
#pragma unroll UNROLL
        for (int turn = 0; turn < SEPARATE * G::WITHIN_LANE; ++turn) {
            const int within = turn % G::WITHIN_LANE, separate = turn / G::WITHIN_LANE;
#pragma unroll
            for (int c = 0; c < COLUMN_TILES; ++c) {
                // Column g of b.
                const int virtual_row = 4 * c + g / 2, row = virtual_row / G::ACROSS_LANES;
                const bool has_group = t * G::ACROSS_LANES / 4 == virtual_row % G::ACROSS_LANES;
                const bool has_row = !HAS_SPARE || g < 2 * ROWS * G::ACROSS_LANES;
                // Columns 2t and 2t + 1 of d.
                const int own_row = 4 * c + t;
                const int group =
                    (separate * G::ACROSS_LANES + own_row % G::ACROSS_LANES) * G::WITHIN_LANE + within;
                const int place = min(own_row / G::ACROSS_LANES, ROWS - 1);
                int d[CHAINS][4] = {};
                float scale;
                if constexpr (IS_SYMMETRIC) {
                    scale = reinterpret_cast<const float*>(span + DIGIT_VECTORS)[place];
                } else {
                    const int4* of_groups = reinterpret_cast<const int4*>(span + DIGIT_VECTORS);
                    const int4 digit_sums = of_groups[place * G::PER_SPAN + group];
                    const int zero_low = zeros[group * TILE_ROWS + g], zero_high = zeros[group * TILE_ROWS + g + 8];
                    d[0][0] = -zero_low * digit_sums.x, d[0][1] = -zero_low * digit_sums.y;
                    d[0][2] = -zero_high * digit_sums.x, d[0][3] = -zero_high * digit_sums.y;
                    scale = __int_as_float(digit_sums.z);
                }
                const uint4* digits = span + row * PART_VECTORS + g % 2 * 4 + t;
                multiply(d, low, high, digits, has_group && has_row, separate, within);

                float low_scale = scale, high_scale = scale;
                if constexpr (G::IS_GROUPED) {
                    low_scale = __fmul_rn(scale, to_float(scales[group * TILE_ROWS + g]));
                    high_scale = __fmul_rn(scale, to_float(scales[group * TILE_ROWS + g + 8]));
                }
                sums[2 * c] = __fmaf_rn(low_scale, two_digits(d, 0), sums[2 * c]);
                sums[2 * c + 1] = __fmaf_rn(high_scale, two_digits(d, 2), sums[2 * c + 1]);
                // One column tile after the other: the loads of many at once need too many registers.
                if constexpr (COLUMN_TILES > 2) asm volatile("" ::: "memory");
            }
        }
    }

    // Adds the groups of a row; stores [row][16] of this warp and tile.
    __device__ __forceinline__ void write(float* partials, int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
            const float low = warp_sum<G::ACROSS_LANES>(sums[2 * c]);
            const float high = warp_sum<G::ACROSS_LANES>(sums[2 * c + 1]);
            const int row = (4 * c + t) / G::ACROSS_LANES;
            if (t % G::ACROSS_LANES == 0 && row < ROWS) {
                float* one = partials + row * TILE_ROWS + g;
                one[0] = low;
                one[8] = high;
            }
        }
    }

    // Four of eight nibbles as bytes: signed and times 16 in a symmetric scheme.
    __device__ __forceinline__ static unsigned even(unsigned word) {
        return IS_SYMMETRIC ? signed_nibbles(word << 4) : word & 0x0f0f0f0fu;
    }
    __device__ __forceinline__ static unsigned odd(unsigned word) {
        return IS_SYMMETRIC ? signed_nibbles(word) : word >> 4 & 0x0f0f0f0fu;
    }

private:
    // (word & 0xf0f0f0f0) ^ 0x80808080 in one instruction, which the compiler does not find.
    __device__ __forceinline__ static unsigned signed_nibbles(unsigned word) {
        unsigned result;
        asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(word), "n"(0xf0f0f0f0u), "r"(0x80808080u));
        return result;
    }

    // The sums of this lane's two columns, 256 * first + second, in less than 31 bits, rounded once.
    __device__ __forceinline__ static float two_digits(const int (&d)[CHAINS][4], int first) {
        int sum = 0;
#pragma unroll
        for (int chain = 0; chain < CHAINS; ++chain) sum += 256 * d[chain][first] + d[chain][first + 1];
        return __int2float_rn(sum);
    }

    // Adds a span's codes times digits: those of one unit if sums are separate, of one group if a lane holds two.
    __device__ __forceinline__ void multiply(int (&d)[CHAINS][4], const uint4 (&low)[UNITS], const uint4 (&high)[UNITS],
                                             const uint4* digits, bool has_inputs, int separate, int within) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            if (IS_INT4 && G::WITHIN_LANE == 2 && part != within) continue;
            if (SEPARATE > 1 && part != separate) continue;
            uint4 other = make_uint4(0, 0, 0, 0);
            uint4& v = HAS_SPARE ? inputs[HAS_SPARE ? part : 0] : other;
            if (has_inputs) v = digits[part * ROWS * PART_VECTORS];
            int(&sums_of_part)[4] = d[CHAINS > 1 ? part : 0];
            if constexpr (IS_INT4) {
                // One word of each row after the other: neighbours of v are then an operand as they lie.
                const unsigned a0 = part == 0 ? low[0].x : low[0].z, b0 = part == 0 ? high[0].x : high[0].z;
                const unsigned a1 = part == 0 ? low[0].y : low[0].w, b1 = part == 0 ? high[0].y : high[0].w;
                mma_bytes<IS_SYMMETRIC>(sums_of_part, even(a0), even(b0), odd(a0), odd(b0), v.x, v.y);
                mma_bytes<IS_SYMMETRIC>(sums_of_part, even(a1), even(b1), odd(a1), odd(b1), v.z, v.w);
            } else {
                constexpr unsigned SIGNS = IS_SYMMETRIC ? 0x80808080u : 0;
                const uint4 &a = low[part], &b = high[part];
                if (G::WITHIN_LANE == 1 || within == 0) {
                    mma_bytes<IS_SYMMETRIC>(sums_of_part, a.x ^ SIGNS, b.x ^ SIGNS, a.y ^ SIGNS, b.y ^ SIGNS, v.x, v.y);
                }
                if (G::WITHIN_LANE == 1 || within == 1) {
                    mma_bytes<IS_SYMMETRIC>(sums_of_part, a.z ^ SIGNS, b.z ^ SIGNS, a.w ^ SIGNS, b.w ^ SIGNS, v.z, v.w);
                }
            }
        }
    }
};
