// repack: weights, scales and zero points as a checkpoint stores them -> tiles (common/tile.cuh)
//           Source: compressed_tensors pack_quantized; design 3
// Shapes:   source rows of num_inputs weights SourceT or codes (int4: two a byte), row_bytes apart, any alignment that
//           SourceT has; tiles [.][units][1024] bytes; scales: source [num_rows, source_groups] T -> [.][groups][16] T;
//           zero points: source [ceil(num_rows * BITS / 32), source_groups] int32 -> [.][groups][16] uint8 flags int32
//           [1] in-out: |= 1 for a value that is not finite, |= 2 for one that no longer is in the new type, |= 4 for a
//           scale that fp16 lacks, or null; repack_scales: [2], the second the largest magnitude's bits as a float
// Requires: tiles 16-byte aligned; source aligned to its element (codes: a byte). The source's rows 8i .. 8i+7 go to
//           the half tile first_half + i * half_step: half h is the rows 8 * (h % 2) .. of tile h / 2
// Launch:   grid (ceil(elements / 256)), block (256); repack: an element is 16 bytes of tiles; repack_scales,
//           repack_zero_points: one value
// Traffic:  source read once, destination written once; a warp stores 512 contiguous bytes and reads 64 of each of 8
//           rows
// Numerics: codes (int4 in another order, common/tile.cuh) and unconverted weights keep their bits; a conversion rounds
//           to nearest even. Padding: codes of zero, zeros, scales 0
// Choice:   one thread a 16-byte vector of the destination: stores are whole, sources are whole sectors; runs once, at
//           load
#include "common/tile.cuh"

constexpr int BLOCK_SIZE = 256;
constexpr int NOT_FINITE = 1, OUT_OF_RANGE = 2, NOT_HALF = 4;

struct SourceShape {
    int num_rows, num_inputs, num_units, num_halves, first_half, half_step;
    unsigned long long row_bytes;
};
struct GroupShape {
    int num_rows, source_groups, source_group_size, num_groups, group_size, num_halves, first_half, half_step;
};

template <typename T>
struct SourceBits {
    static constexpr int VALUE = 8 * sizeof(T);
};
template <>
struct SourceBits<Int4> {
    static constexpr int VALUE = 4;
};

template <typename T>
constexpr bool IS_HALF = false;
template <>
constexpr bool IS_HALF<__half> = true;

template <typename T>
__device__ __forceinline__ bool is_finite(T value) {
    return isfinite(to_float(value));
}

// 16 bytes of codes from an address of any alignment; of the last ones only `count` exist and the rest are `padding`.
__device__ __forceinline__ uint4 load_codes(const unsigned char* source, int count, unsigned padding) {
    const unsigned long long address = reinterpret_cast<unsigned long long>(source);
    if (count >= 16 && address % 16 == 0) return *reinterpret_cast<const uint4*>(source);
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        words[i] = padding;
        if (count >= 4 * i + 4 && address % 4 == 0) {
            words[i] = *reinterpret_cast<const unsigned*>(source + 4 * i);
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (4 * i + j < count) {
                    const unsigned byte = source[4 * i + j];
                    words[i] = (words[i] & ~(0xffu << (8 * j))) | byte << (8 * j);
                }
            }
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

template <typename SourceT, typename WeightT>
struct Vector {
    // 16 bytes of WeightT from the `count` weights that exist.
    __device__ __forceinline__ static uint4 load(const unsigned char* source, int count, int& flags) {
        constexpr int SIZE = 16 / sizeof(WeightT);
        const SourceT* values = reinterpret_cast<const SourceT*>(source);
        Pack<WeightT> result;
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            const SourceT value = i < count ? values[i] : from_float<SourceT>(0.0f);
            result.values[i] = from_float<WeightT>(to_float(value));
            if (!is_finite(value)) {
                flags |= NOT_FINITE;
            } else if (!is_finite(result.values[i])) {
                flags |= OUT_OF_RANGE;
            }
        }
        return *reinterpret_cast<const uint4*>(&result);
    }
};
template <typename T>
struct Vector<T, T> {
    __device__ __forceinline__ static uint4 load(const unsigned char* source, int count, int& flags) {
        constexpr int SIZE = 16 / sizeof(T);
        Pack<T> result;
        if (count >= SIZE && reinterpret_cast<unsigned long long>(source) % 16 == 0) {
            result = Pack<T>::load(reinterpret_cast<const T*>(source));
        } else {
#pragma unroll
            for (int i = 0; i < SIZE; ++i) {
                result.values[i] = i < count ? reinterpret_cast<const T*>(source)[i] : from_float<T>(0.0f);
            }
        }
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            if (!is_finite(result.values[i])) flags |= NOT_FINITE;
        }
        return *reinterpret_cast<const uint4*>(&result);
    }
};
template <>
struct Vector<Int8, Int8> {
    __device__ __forceinline__ static uint4 load(const unsigned char* source, int count, int& flags) {
        return load_codes(source, count, 0x80808080u);
    }
};
template <>
struct Vector<Fp8, Fp8> {
    __device__ __forceinline__ static uint4 load(const unsigned char* source, int count, int& flags) {
        const uint4 codes = load_codes(source, count, 0);
        const unsigned words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // NaN has all bits but the sign, and nothing is infinite.
            if (__vcmpeq4(words[i] & 0x7f7f7f7fu, 0x7f7f7f7fu) != 0) flags |= NOT_FINITE;
        }
        return codes;
    }
};
template <>
struct Vector<Int4, Int4> {
    __device__ __forceinline__ static uint4 load(const unsigned char* source, int count, int& flags) {
        uint4 result = load_codes(source, (count + 1) / 2, 0x88888888u);
        result.x = end_codes(result.x, count);
        result.y = end_codes(result.y, count - 8);
        result.z = end_codes(result.z, count - 16);
        result.w = end_codes(result.w, count - 24);
        return make_uint4(in_pairs(result.x), in_pairs(result.y), in_pairs(result.z), in_pairs(result.w));
    }
    // From the inputs in order to pairs of neighbours 16 bits apart (common/tile.cuh).
    __device__ __forceinline__ static unsigned in_pairs(unsigned word) {
        unsigned result = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) result |= (word >> (4 * i) & 0xfu) << (4 * nibble_of(i));
        return result;
    }
    // With an odd count the last byte holds one code.
    __device__ __forceinline__ static unsigned end_codes(unsigned word, int count) {
        if (count <= 0 || count >= 8 || count % 2 == 0) return word;
        return (word & ~(0xfu << (4 * count))) | 8u << (4 * count);
    }
};

template <typename SourceT, typename WeightT>
__global__ void __launch_bounds__(BLOCK_SIZE)
    repack(const unsigned char* __restrict__ source, unsigned char* __restrict__ tiles, int* flags, SourceShape shape) {
    constexpr int VECTOR_INPUTS = TileFormat<WeightT>::UNIT_INPUTS / 4;
    const size_t element = static_cast<size_t>(blockIdx.x) * BLOCK_SIZE + threadIdx.x;
    const int lane = element % 32;
    const int unit = static_cast<int>(element / 32 % shape.num_units);
    const int half = static_cast<int>(element / 32 / shape.num_units);
    if (half >= shape.num_halves) return;
    const int row = half * HALF_ROWS + lane / 4;
    const int input = unit * TileFormat<WeightT>::UNIT_INPUTS + lane % 4 * VECTOR_INPUTS;
    const int count = row < shape.num_rows ? max(min(shape.num_inputs - input, VECTOR_INPUTS), 0) : 0;
    // Addresses past the end of a row are computed, never read.
    const size_t byte = static_cast<size_t>(input) * SourceBits<SourceT>::VALUE / 8;
    int found = 0;
    const uint4 value = Vector<SourceT, WeightT>::load(source + row * shape.row_bytes + byte, count, found);
    const int destination = shape.first_half + half * shape.half_step;
    const size_t unit_index = static_cast<size_t>(destination / 2) * shape.num_units + unit;
    reinterpret_cast<uint4*>(tiles)[unit_index * UNIT_VECTORS + 32 * (destination % 2) + lane] = value;
    if (found != 0 && flags != nullptr) atomicOr(flags, found);
}

// Where a value of [tile][group][16] comes from: row `row` and group `group` of the source, if it exists there.
struct GroupPlace {
    size_t destination;
    int half, row, group;
    bool exists;
};
// A half tile has A_HALF values of a group, from as many rows of the source.
template <int A_HALF>
__device__ __forceinline__ GroupPlace group_place(const GroupShape& shape) {
    const size_t element = static_cast<size_t>(blockIdx.x) * BLOCK_SIZE + threadIdx.x;
    const int row_in_half = element % A_HALF;
    const int group = element / A_HALF % shape.num_groups;
    GroupPlace place;
    place.half = static_cast<int>(element / A_HALF / shape.num_groups);
    place.row = place.half * A_HALF + row_in_half;
    // A stored group is a part of a source group; groups of padded inputs have no source.
    const long long input = static_cast<long long>(group) * shape.group_size;
    place.group = static_cast<int>(input / shape.source_group_size);
    place.exists = place.row < shape.num_rows && place.group < shape.source_groups;
    const int half = shape.first_half + place.half * shape.half_step;
    const size_t group_index = static_cast<size_t>(half / 2) * shape.num_groups + group;
    place.destination = group_index * 2 * A_HALF + half % 2 * A_HALF + row_in_half;
    return place;
}

template <typename T>
__global__ void __launch_bounds__(BLOCK_SIZE)
    repack_scales(const T* __restrict__ source, T* __restrict__ scales, int* flags, GroupShape shape) {
    const GroupPlace place = group_place<SCALES_A_HALF<T>>(shape);
    if (place.half >= shape.num_halves) return;
    const size_t index = static_cast<size_t>(place.row) * shape.source_groups + place.group;
    const T value = place.exists ? source[index] : from_float<T>(0.0f);
    scales[place.destination] = value;
    // Whether fp16 has the scale, exactly; and the largest magnitude.
    const float size = fabsf(to_float(value));
    int found = 0;
    if (size != 0.0f && (size < 0x1p-17f || size > 65504.0f) && !IS_HALF<T>) found |= NOT_HALF;
    if (!is_finite(value)) found |= NOT_FINITE;
    if (flags == nullptr) return;
    if (found != 0) atomicOr(flags, found);
    if (__float_as_int(size) > flags[1]) atomicMax(flags + 1, __float_as_int(size));  // mostly it is not
}

// A group's scales become lifted ones (common/wide_weights.cuh), in pairs of the rows g and g + 8, where they lie.
template <typename T>
__global__ void __launch_bounds__(BLOCK_SIZE) lift_scales(T* scales, int num_groups, float lift) {
    const int group = blockIdx.x * BLOCK_SIZE + threadIdx.x;
    if (group >= num_groups) return;
    T* of_group = scales + static_cast<size_t>(group) * TILE_ROWS;
    __half lifted[TILE_ROWS];
#pragma unroll
    for (int row = 0; row < TILE_ROWS; ++row) {
        lifted[scale_place<LiftedScale>(row)] = __float2half_rn(__fmul_rn(to_float(of_group[row]), lift));
    }
#pragma unroll
    for (int i = 0; i < TILE_ROWS; ++i) reinterpret_cast<__half*>(of_group)[i] = lifted[i];
}

template <int BITS>
__global__ void __launch_bounds__(BLOCK_SIZE)
    repack_zero_points(const unsigned* __restrict__ source, unsigned char* __restrict__ zero_points, GroupShape shape) {
    const GroupPlace place = group_place<HALF_ROWS>(shape);
    if (place.half >= shape.num_halves) return;
    constexpr int PER_WORD = 32 / BITS;
    unsigned value = 0;
    if (place.exists) {
        const unsigned word = source[static_cast<size_t>(place.row / PER_WORD) * shape.source_groups + place.group];
        value = word >> (BITS * (place.row % PER_WORD)) & ((1u << BITS) - 1);
    }
    zero_points[place.destination] = static_cast<unsigned char>(value);
}
