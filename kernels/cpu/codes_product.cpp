// codes_product: y[t][n] = sum over k of x[t][k] * (codes[n][k] - zero_point) * scale, on the processor
//           Source: the products of kernels/gemv.cu, whose activations are integers of 16 bits, too
// Shapes:   x [num_tokens][num_inputs] float; y [num_tokens][num_rows] float, num_rows a multiple of STRIP_ROWS;
//           codes [num_rows / TILE_ROWS][units][TILE_ROWS][2] bytes: a unit is 2 inputs of 8 bits or 4 of 4 bits, the
//           lower half of a byte first; scales [num_rows / TILE_ROWS][groups][TILE_ROWS] float; zero_points likewise
//           bytes, or null if all are 0. A chunk of chunk_inputs has one scale of activations, and a
//           group is group_chunks chunks. zero_points are around 0: of 8 bits less 128, of 4 bits less 8, as codes are
//           when they are multiplied; codes of 8 bits are stored so
// Requires: chunk_inputs a multiple of 16, at most 128; x readable for num_inputs, codes for num_chunks chunks
// Launch:   multiply_codes, from one thread; OpenMP's threads share the strips of rows
// Traffic:  codes and scales once for every 12 tokens, from a cache after the first time; x once
// Numerics: a chunk's activations are integers times its largest value / 32767, rounded to nearest even. Sums of a
//           chunk are exact, below 128 * 255 * 32767 < 2^31; they become floats and are added in the order of chunks. A
//           token's bits depend on that token alone, neither on the tokens beside it, nor on threads, nor on
//           instructions: compile with -ffp-contract=off. NaN or infinity makes its chunk NaN. A chunk below 1e-30
//           counts as zeros
// Choice:   16 rows side by side need no sum across a vector, and their 16-bit activations are read by broadcast.
//           Sums of 16-bit products run at the rate of bfloat16's (one vector a clock on Zen 4), and codes are
//           widened to 16 bits by one instruction for 32 of them, so weights are never written as floats
#include <cstdint>
#include <cstring>
#include <memory>

#include "vectors.h"

namespace {

constexpr int TILE_ROWS = 16;
constexpr int STRIP_TILES = 4;
constexpr int STRIP_ROWS = STRIP_TILES * TILE_ROWS;
// What a thread multiplies with all tokens before it continues: this many inputs, of as many strips as take half of a
// cache of 1 MiB.
constexpr int PANEL_INPUTS = 2048, PANEL_BYTES = 512 * 1024;

// Tiles by tokens whose sums stay in registers: AVX-512 has 32 of 16 sums, AVX2 has 16 of 8.
constexpr int FEW_TOKENS = IS_AVX512 ? 6 : 3, FEW_TILES = IS_AVX512 ? 4 : 2;
constexpr int MOST_TOKENS = IS_AVX512 ? 12 : 6, MANY_TILES = IS_AVX512 ? 2 : 1;

}  // namespace

// One matrix. Source of the layout: llmcli/runners/torch/codes_product.py
struct CodesMatrix {
    const uint8_t* codes;
    const float* scales;
    const int8_t* zero_points;
    int32_t num_bits, num_rows, num_inputs, chunk_inputs, num_chunks, group_chunks, num_groups;
};

// Activations as integers, block of tokens by block: data read together lie together, or caches of few ways keep little
// of it. Shapes of a block: digits [num_chunks][tokens][chunk_inputs]; scales, sums [num_chunks][tokens]
struct Activations {
    int16_t* digits;
    float* scales;
    int32_t* sums;
    int32_t num_tokens;
};

namespace {

// The tokens begin to end, which are multiplied together.
struct Block {
    int begin, end;
};

inline int num_blocks(int num_tokens) { return (num_tokens + MOST_TOKENS - 1) / MOST_TOKENS; }

inline Block block_of(int index, int num_tokens) {
    const int64_t tokens = num_tokens, blocks = num_blocks(num_tokens);
    return {(int)(tokens * index / blocks), (int)(tokens * (index + 1) / blocks)};
}

// Where a block's scale of a chunk for its first token lies; digits lie chunk_inputs times as far.
inline size_t place_of(Block block, int chunk, int num_chunks) {
    return (size_t)block.begin * num_chunks + (size_t)chunk * (block.end - block.begin);
}

// num_inputs activations of a token, to `place`.
void stage_chunk(const float* x, int num_inputs, const CodesMatrix& matrix, const Activations& to, size_t place) {
    float padded[128] = {};
    memcpy(padded, x, num_inputs * sizeof(float));
    Ints largest = {};
    for (int i = 0; i < matrix.chunk_inputs; i += 16) {
        const Ints bits = load<Ints>(padded + i) & 0x7fffffff;  // in the order of the floats, and NaN above all
        largest = bits > largest ? bits : largest;
    }
    int32_t top_bits = 0;
    for (int i = 0; i < 16; i++) top_bits = largest[i] > top_bits ? largest[i] : top_bits;
    const float top = load<float>(&top_bits);
    const bool is_finite = top_bits < 0x7f800000;
    const float per_unit = is_finite && top >= 1e-30f ? 32767.0f / top : 0.0f;
    int16_t* digits = to.digits + place * matrix.chunk_inputs;
    Ints sums = {};
    for (int i = 0; i < matrix.chunk_inputs; i += 16) {
        // 1.5 * 2^23 leaves the integer, rounded to nearest even, in the lowest bits.
        const Floats shifted = (is_finite ? load<Floats>(padded + i) : Floats{}) * per_unit + 12582912.0f;
        const Ints integers = (Ints)shifted - 0x4b400000;
        sums += integers;
        Halves narrow = __builtin_convertvector(integers, Halves);
        if (matrix.num_bits == 4) {  // the lower halves of a unit's two bytes are its inputs 0 and 2
            narrow = __builtin_shufflevector(narrow, narrow, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
        }
        memcpy(digits + i, &narrow, sizeof narrow);
    }
    int32_t sum = 0;
    for (int i = 0; i < 16; i++) sum += sums[i];
    to.scales[place] = is_finite ? top / 32767.0f : __builtin_nanf("");
    to.sums[place] = sum;
}

// Some chunks of a matrix.
struct Chunks {
    int begin, end;
};

// 32 codes of a unit of each row, or of its lower or higher half, around 0.
template <int BITS>
inline Shorts weights_of(__m256i bytes, int half) {
    if constexpr (BITS == 8) return widen(bytes);
    const __m256i codes = _mm256_and_si256(half == 0 ? bytes : _mm256_srli_epi16(bytes, 4), _mm256_set1_epi8(15));
    return widen(_mm256_sub_epi8(codes, _mm256_set1_epi8(8)));
}

// Products of TILES tiles from `row` on with a block of TOKENS tokens, added to those of the chunks before.
template <int BITS, int TILES, int TOKENS>
void multiply(const CodesMatrix& matrix, const Activations& x, int row, Chunks chunks, Block block, float* y) {
    const int tile = row / TILE_ROWS;
    const int unit_inputs = 16 / BITS, units = matrix.chunk_inputs / unit_inputs;
    const size_t chunk_bytes = (size_t)units * 2 * TILE_ROWS, tile_bytes = chunk_bytes * matrix.num_chunks;
    const size_t tile_scales = (size_t)matrix.num_groups * TILE_ROWS;
    const auto place_in_y = [&](int r, int t) {
        return y + (size_t)(block.begin + t) * matrix.num_rows + row + r * TILE_ROWS;
    };
    Floats totals[TILES][TOKENS] = {};
    if (chunks.begin > 0) {
        for (int r = 0; r < TILES; r++) {
            for (int t = 0; t < TOKENS; t++) totals[r][t] = load<Floats>(place_in_y(r, t));
        }
    }
    for (int chunk = chunks.begin; chunk < chunks.end; chunk++) {
        const size_t place = place_of(block, chunk, matrix.num_chunks);
        const int16_t* digits = x.digits + place * matrix.chunk_inputs;
        const uint8_t* codes = matrix.codes + tile * tile_bytes + chunk * chunk_bytes;
        Ints sums[TILES][TOKENS] = {};
        for (int unit = 0; unit < units; unit++) {
            __m256i bytes[TILES];
#pragma GCC unroll 4
            for (int r = 0; r < TILES; r++) {
                bytes[r] = load<__m256i>(codes + r * tile_bytes + unit * 2 * TILE_ROWS);
            }
#pragma GCC unroll 2
            for (int half = 0; half < 8 / BITS; half++) {
                Shorts weights[TILES];
#pragma GCC unroll 4
                for (int r = 0; r < TILES; r++) weights[r] = weights_of<BITS>(bytes[r], half);
#pragma GCC unroll 12
                for (int t = 0; t < TOKENS; t++) {
                    const int16_t* pair = digits + t * matrix.chunk_inputs + unit * unit_inputs + half * 2;
                    const Shorts inputs = broadcast(load<int32_t>(pair));
#pragma GCC unroll 4
                    for (int r = 0; r < TILES; r++) sums[r][t] = add_pairs(sums[r][t], weights[r], inputs);
                }
            }
        }
        const int group = chunk / matrix.group_chunks;
#pragma GCC unroll 4
        for (int r = 0; r < TILES; r++) {
            const size_t of_group = (tile + r) * tile_scales + (size_t)group * TILE_ROWS;
            const Floats scales = load<Floats>(matrix.scales + of_group);
            if (matrix.zero_points != nullptr) {
                const Ints zeros = __builtin_convertvector(load<Bytes>(matrix.zero_points + of_group), Ints);
#pragma GCC unroll 12
                for (int t = 0; t < TOKENS; t++) sums[r][t] -= zeros * x.sums[place + t];
            }
#pragma GCC unroll 12
            for (int t = 0; t < TOKENS; t++) {
                const Floats exact = __builtin_convertvector(sums[r][t], Floats);
                totals[r][t] = add_product(totals[r][t], exact, scales * x.scales[place + t]);
            }
        }
    }
    for (int r = 0; r < TILES; r++) {
        for (int t = 0; t < TOKENS; t++) memcpy(place_in_y(r, t), &totals[r][t], sizeof(Floats));
    }
}

// A strip with a block of at most TOKENS tokens.
template <int BITS, int TILES, int TOKENS, int FEWEST>
void multiply_strip(const CodesMatrix& matrix, const Activations& x, int row, Chunks chunks, Block block, float* y) {
    if constexpr (TOKENS > FEWEST) {
        if (block.end - block.begin < TOKENS) {
            return multiply_strip<BITS, TILES, TOKENS - 1, FEWEST>(matrix, x, row, chunks, block, y);
        }
    }
    for (int tile = 0; tile < STRIP_TILES; tile += TILES) {
        multiply<BITS, TILES, TOKENS>(matrix, x, row + tile * TILE_ROWS, chunks, block, y);
    }
}

// Strips begin to end with all tokens.
template <int BITS>
void multiply_strips(const CodesMatrix& matrix, const Activations& x, int begin, int end, float* y) {
    const int panel_chunks = PANEL_INPUTS / matrix.chunk_inputs;
    for (int chunk = 0; chunk < matrix.num_chunks; chunk += panel_chunks) {
        const int behind = chunk + panel_chunks;
        const Chunks chunks = {chunk, behind < matrix.num_chunks ? behind : matrix.num_chunks};
        for (int index = 0; index < num_blocks(x.num_tokens); index++) {
            const Block block = block_of(index, x.num_tokens);
            for (int strip = begin; strip < end; strip++) {
                const int row = strip * STRIP_ROWS;
                if (block.end - block.begin <= FEW_TOKENS) {
                    multiply_strip<BITS, FEW_TILES, FEW_TOKENS, 1>(matrix, x, row, chunks, block, y);
                } else {
                    multiply_strip<BITS, MANY_TILES, MOST_TOKENS, FEW_TOKENS + 1>(matrix, x, row, chunks, block, y);
                }
            }
        }
    }
}

}  // namespace

// A thread takes the next panel of strips when it is done with one: a thread may lose its core for a while.
extern "C" void multiply_codes(const CodesMatrix* matrix, const float* x, int num_tokens, float* y, int num_threads) {
    const int num_strips = matrix->num_rows / STRIP_ROWS;
    const int cached_strips = PANEL_BYTES / (PANEL_INPUTS * STRIP_ROWS * matrix->num_bits / 8);
    const int shared_strips = num_strips / (4 * num_threads) + 1;
    const int panel = shared_strips < cached_strips ? shared_strips : cached_strips;
    const size_t places = (size_t)num_tokens * matrix->num_chunks;
    const std::unique_ptr<int16_t[]> digits(new int16_t[places * matrix->chunk_inputs]);
    const std::unique_ptr<float[]> scales(new float[places]);
    const std::unique_ptr<int32_t[]> sums(new int32_t[places]);
    const Activations staged = {digits.get(), scales.get(), sums.get(), num_tokens};
    // One token is staged before another thread would wake up.
#pragma omp parallel for collapse(2) schedule(static) num_threads(num_threads) if (num_tokens > 1)
    for (int index = 0; index < num_blocks(num_tokens); index++) {
        for (int chunk = 0; chunk < matrix->num_chunks; chunk++) {
            const Block block = block_of(index, num_tokens);
            const int begin = chunk * matrix->chunk_inputs, left = matrix->num_inputs - begin;
            const size_t place = place_of(block, chunk, matrix->num_chunks);
            for (int token = block.begin; token < block.end; token++) {
                stage_chunk(x + (size_t)token * matrix->num_inputs + begin,
                            left < matrix->chunk_inputs ? left : matrix->chunk_inputs, *matrix, staged,
                            place + token - block.begin);
            }
        }
    }
    const auto multiply_panel = matrix->num_bits == 8 ? multiply_strips<8> : multiply_strips<4>;
#pragma omp parallel for schedule(dynamic) num_threads(num_threads)
    for (int first = 0; first < num_strips; first += panel) {
        const int last = first + panel < num_strips ? first + panel : num_strips;
        multiply_panel(*matrix, staged, first, last, y);
    }
}
