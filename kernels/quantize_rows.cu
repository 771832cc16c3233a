// quantize_rows: code[r,i] = clip(rint(w[r,i] / scale[r,g]) + zero[r,g]), packed, and how far that is from w
//                                                          Source: llmcli/quantization/rounding.py; design 3
// Shapes:   weights [num_rows, num_inputs] T; scales f32, zero_points uint8 [num_rows, groups], groups = num_inputs /
//           group_size, zero_points null for symmetric codes; packed uint32 [num_rows, ceil(num_inputs * BITS / 32)];
//           squares f64 [num_rows, 2], sums of (w - dequantized w)^2 and w^2; num_saturated int32 [num_rows], codes at
//           either end of their range
// Requires: group_size divides num_inputs; weights 16-byte aligned; scales are written first; a group with NaN or
//           infinity, or too large for scale_type (0 f32, 1 f16, 2 bf16), gets a scale that is not finite
// Launch:   group_scales: THREADS 32: grid (ceil(num_groups / 4)), block (128); else grid (num_groups), block THREADS;
//           quantize_rows: grid (num_rows), block (BLOCK_SIZE)
// Traffic:  num_rows * (num_inputs * (2 * sizeof(T) + BITS / 8) + groups * (8 or 10) + 20) bytes; the weights' second
//           reading is served by L2 where a block of rows fits it
// Numerics: bit for bit what numpy gives: scales in f64, rounded up to their type; quotients in f32 for 16-bit weights
//           and f64 for f32; one rounding each. Only the f64 sums of squares have an order of their own: fixed tree, no
//           atomics, last bits unlike numpy's
// Choice:   two kernels, since a packed word may hold codes of several groups; a thread makes 8 codes. The bus to the
//           card is over ten times slower than either, so nothing here is traded for speed
#include "common/reduce.cuh"
#include "common/types.cuh"

enum ScaleType { F32_SCALES = 0, F16_SCALES = 1, BF16_SCALES = 2 };
constexpr int CODES_PER_THREAD = 8;

// The smallest value of the scales' type that is not below `value` and is a normal number. value >= 0.
__device__ __forceinline__ float round_up(double value, int scale_type) {
    const float up = __double2float_ru(value);
    if (scale_type == F16_SCALES) {
        __half half = __float2half_rn(up);
        // A positive float's bits grow with its value; after the largest comes infinity.
        if (__half2float(half) < up) half = __ushort_as_half(static_cast<unsigned short>(__half_as_ushort(half) + 1));
        return fmaxf(__half2float(half), 6.103515625e-05f);  // 2^-14
    }
    unsigned bits = __float_as_uint(up);
    if (scale_type == BF16_SCALES) bits = (bits + 0xffffu) >> 16 << 16;
    return fmaxf(__uint_as_float(bits), 1.17549435e-38f);  // 2^-126
}

// One group's scale, and its zero point unless `zero_points` is null.
template <typename T, int THREADS>
__global__ void __launch_bounds__(THREADS < 128 ? 128 : THREADS)
    group_scales(const T* __restrict__ weights, float* __restrict__ scales, unsigned char* __restrict__ zero_points,
                 int num_groups, int group_size, double steps_above, double steps_below, int scale_type) {
    const int group = THREADS == 32 ? blockIdx.x * 4 + threadIdx.x / 32 : blockIdx.x;
    if (group >= num_groups) return;
    weights += static_cast<size_t>(group) * group_size;
    // Both by Max, which keeps NaN.
    float highest = reduce::minus_infinity(), negated_lowest = reduce::minus_infinity();
#pragma unroll 4
    for (int i = threadIdx.x % THREADS; i < group_size; i += THREADS) {
        const float weight = to_float(weights[i]);
        highest = reduce::Max::combine(highest, weight);
        negated_lowest = reduce::Max::combine(negated_lowest, -weight);
    }
    const float2 extremes = reduce::over_row<reduce::Max, THREADS>(make_float2(highest, negated_lowest));
    if (threadIdx.x % THREADS != 0) return;

    const float infinity = -reduce::minus_infinity();
    if (!(fabsf(extremes.x) < infinity && fabsf(extremes.y) < infinity)) {
        scales[group] = infinity;
        if (zero_points != nullptr) zero_points[group] = 0;
        return;
    }
    const double above = extremes.x, below = extremes.y;
    const bool is_symmetric = zero_points == nullptr;
    const double exact = is_symmetric ? fmax(__ddiv_rn(above, steps_above), __ddiv_rn(below, steps_below))
                                      : __ddiv_rn(__dadd_rn(fmax(above, 0.0), fmax(below, 0.0)), steps_above);
    const float scale = exact == 0.0 ? 1.0f : round_up(exact, scale_type);
    scales[group] = scale;
    if (!is_symmetric) {
        const double zero = fmin(fmax(__ddiv_rn(below, static_cast<double>(scale)), 0.0), steps_above);
        zero_points[group] = static_cast<unsigned char>(rint(zero));
    }
}

// Quotients near a tie are right in f32 for 16-bit weights and scales, but only in f64 for f32.
template <typename T>
struct Quotient {
    using Type = float;
};
template <>
struct Quotient<float> {
    using Type = double;
};

// The weights from `first` on; 0 past the end of the row.
template <typename T>
__device__ __forceinline__ void load_weights(const T* row, int first, int num_inputs, float (&values)[8]) {
    constexpr int SIZE = Pack<T>::SIZE;
    if (num_inputs % SIZE == 0 && first + CODES_PER_THREAD <= num_inputs) {
#pragma unroll
        for (int part = 0; part < CODES_PER_THREAD; part += SIZE) {
            const Pack<T> pack = Pack<T>::load(row + first + part);
#pragma unroll
            for (int i = 0; i < SIZE; ++i) values[part + i] = to_float(pack.values[i]);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < CODES_PER_THREAD; ++i) values[i] = first + i < num_inputs ? to_float(row[first + i]) : 0.0f;
}

template <typename T, int BITS, int BLOCK_SIZE>
__global__ void __launch_bounds__(BLOCK_SIZE)
    quantize_rows(const T* __restrict__ weights, const float* __restrict__ scales,
                  const unsigned char* __restrict__ zero_points, unsigned* __restrict__ packed,
                  double* __restrict__ squares, int* __restrict__ num_saturated, int num_inputs, int group_size,
                  int lowest_code, int offset) {
    using P = typename Quotient<T>::Type;
    constexpr int HIGHEST_CODE = (1 << BITS) - 1;
    constexpr int WORD_CODES = 32 / BITS;
    constexpr int WORDS = CODES_PER_THREAD / WORD_CODES;
    const size_t row = blockIdx.x;
    const int num_groups = num_inputs / group_size;
    const int num_words = (num_inputs + WORD_CODES - 1) / WORD_CODES;
    weights += row * num_inputs;
    scales += row * num_groups;
    if (zero_points != nullptr) zero_points += row * num_groups;
    packed += row * num_words;

    double error_square = 0.0, weight_square = 0.0;
    int saturated = 0;
#pragma unroll 1
    for (int first = CODES_PER_THREAD * threadIdx.x; first < num_inputs; first += CODES_PER_THREAD * BLOCK_SIZE) {
        float values[CODES_PER_THREAD];
        load_weights(weights, first, num_inputs, values);
        int group = first / group_size;
        int left = group_size - first % group_size;
        float scale = scales[group];
        int zero = zero_points == nullptr ? offset : zero_points[group];
        unsigned words[WORDS] = {};
#pragma unroll
        for (int i = 0; i < CODES_PER_THREAD; ++i) {
            if (first + i < num_inputs) {
                if (left == 0) {
                    ++group;
                    left = group_size;
                    scale = scales[group];
                    zero = zero_points == nullptr ? offset : zero_points[group];
                }
                --left;
                const P steps = static_cast<P>(values[i]) / static_cast<P>(scale);
                const P low = static_cast<P>(lowest_code - zero), high = static_cast<P>(HIGHEST_CODE - zero);
                const P nearest = fmin(fmax(rint(steps), low), high);
                const int code = static_cast<int>(nearest) + zero;
                words[i / WORD_CODES] |= static_cast<unsigned>(code) << (BITS * (i % WORD_CODES));
                saturated += code == lowest_code || code == HIGHEST_CODE;
                const double error = static_cast<double>(steps - nearest) * scale;
                const double weight = static_cast<double>(steps) * scale;
                error_square += error * error;
                weight_square += weight * weight;
            }
        }
#pragma unroll
        for (int word = 0; word < WORDS; ++word) {
            const int place = first / WORD_CODES + word;
            if (place < num_words) packed[place] = words[word];
        }
    }
    error_square = block_sum<BLOCK_SIZE>(error_square);
    weight_square = block_sum<BLOCK_SIZE>(weight_square);
    saturated = block_sum<BLOCK_SIZE>(saturated);
    if (threadIdx.x == 0) {
        squares[2 * row] = error_square;
        squares[2 * row + 1] = weight_square;
        num_saturated[row] = saturated;
    }
}
