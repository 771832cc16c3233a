// dequantize: W[m,k] = (code[m,k] - zero_point[m,k/group]) * scale[m,k/group], or W[m,k] as stored
//           Source: compressed_tensors pack_quantized
// Shapes:   tiles [num_tiles][units][1024] bytes, scales [num_tiles][groups][16] ScaleT, zero_points alike uint8 or
//           null (common/tile.cuh), all from the first tile wanted; out [16 * num_tiles, out_stride] PlainT, of
//           which num_inputs are written
// Requires: tiles 16-byte aligned; group_shift = log2 of the inputs of a group, 31 for one group a row
// Launch:   grid (ceil(num_tiles * units * 64 / 256)), block (256), no shared memory
// Traffic:  tiles, scales and zero points read once, out written once; a warp writes 4 * UNIT_INPUTS / 4 neighbours of
//           8 rows
// Numerics: codes minus zero points and 8-bit floats are exact; the product is rounded to fp32, then to fp16. Floats
//           keep their bits, but bf16 may become fp16: exact from 2^-17 to 65504, saturated above, to within 2^-25
//           below
// Choice:   One thread takes a 16-byte vector of the tiles, 4 to 32 neighbours of one row, so loads and stores are
//           whole sectors. With bf16 as fp16, activations keep 11 bits in the product instead of 8, and the weights
//           lose nothing that counts
#include "common/tile.cuh"

constexpr int BLOCK_SIZE = 256;

struct DequantizeShape {
    int num_tiles, num_inputs, num_units, num_groups, group_shift, out_stride;
    float unlift;  // of lifted scales
};

template <typename T>
__device__ __forceinline__ void copy_floats(const Pack<T>& stored, Pack<T>& values) {
    values = stored;
}
__device__ __forceinline__ void copy_floats(const Pack<__nv_bfloat16>& stored, Pack<__half>& values) {
#pragma unroll
    for (int i = 0; i < Pack<__half>::SIZE; ++i) {
        const float value = fminf(fmaxf(to_float(stored.values[i]), -65504.0f), 65504.0f);
        values.values[i] = from_float<__half>(value);
    }
}

// Eight inputs of a part from 16 bytes of codes, as integers.
template <typename WeightT>
__device__ __forceinline__ int code_at(const uint4& bytes, int index);
template <>
__device__ __forceinline__ int code_at<Int8>(const uint4& bytes, int index) {
    const unsigned words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
    return words[index / 4] >> (8 * (index % 4)) & 0xffu;
}
template <>
__device__ __forceinline__ int code_at<Int4>(const uint4& bytes, int index) {
    const unsigned words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
    return words[index / 8] >> (4 * nibble_of(index % 8)) & 0xfu;
}

// The weight at an index of these, without its scale.
template <typename WeightT>
__device__ __forceinline__ float value_at(const uint4& bytes, int index, int zero) {
    return static_cast<float>(code_at<WeightT>(bytes, index) - zero);
}
template <>
__device__ __forceinline__ float value_at<Fp8>(const uint4& bytes, int index, int) {
    unsigned first, last;
    widen_fp8(code_at<Int8>(bytes, index), first, last);
    return __low2float(as_half2(first));
}

template <typename WeightT, typename ScaleT, typename PlainT>
__global__ void __launch_bounds__(BLOCK_SIZE)
    dequantize(const unsigned char* __restrict__ tiles, const ScaleT* __restrict__ scales,
               const unsigned char* __restrict__ zero_points, PlainT* __restrict__ out, DequantizeShape shape) {
    using T = PlainT;
    constexpr int VECTOR_INPUTS = TileFormat<WeightT>::UNIT_INPUTS / 4;
    constexpr int STEP = Pack<T>::SIZE < VECTOR_INPUTS ? Pack<T>::SIZE : VECTOR_INPUTS;
    const size_t element = static_cast<size_t>(blockIdx.x) * BLOCK_SIZE + threadIdx.x;
    const int vector = element % UNIT_VECTORS, lane = vector % 32;
    const size_t unit_index = element / UNIT_VECTORS;
    const int unit = static_cast<int>(unit_index % shape.num_units);
    const int tile = static_cast<int>(unit_index / shape.num_units);
    if (tile >= shape.num_tiles) return;
    const int row_in_tile = lane / 4 + 8 * (vector / 32);
    const int first = unit * TileFormat<WeightT>::UNIT_INPUTS + lane % 4 * VECTOR_INPUTS;
    const uint4 bytes = reinterpret_cast<const uint4*>(tiles)[element];
    T* row = out + (static_cast<size_t>(tile) * TILE_ROWS + row_in_tile) * shape.out_stride;
    const bool is_aligned = reinterpret_cast<unsigned long long>(row) % 16 == 0;
#pragma unroll
    for (int begin = 0; begin < VECTOR_INPUTS; begin += STEP) {
        const int input = first + begin;
        if (input >= shape.num_inputs) return;
        Pack<T> values;
        if constexpr (TileFormat<WeightT>::HAS_SCALES) {
            // A group has at least 8 inputs, as a step has.
            const int group = input >> shape.group_shift;
            const size_t group_index = static_cast<size_t>(tile) * shape.num_groups + group;
            const size_t index = group_index * TILE_ROWS + row_in_tile;
            const size_t scale_index = group_index * SCALES_A_TILE<ScaleT> + scale_place<ScaleT>(row_in_tile);
            const float scale = __fmul_rn(to_float(scales[scale_index]), shape.unlift);
            const int zero = zero_points != nullptr ? zero_points[index] : TileFormat<WeightT>::OFFSET;
#pragma unroll
            for (int i = 0; i < STEP; ++i) {
                values.values[i] = from_float<T>(__fmul_rn(value_at<WeightT>(bytes, begin + i, zero), scale));
            }
        } else {
            copy_floats(*reinterpret_cast<const Pack<WeightT>*>(&bytes), values);
        }
        if (is_aligned && input + STEP <= shape.num_inputs) {
            values.store(row + input);
        } else {
#pragma unroll
            for (int i = 0; i < STEP; ++i) {
                if (input + i < shape.num_inputs) row[input + i] = values.values[i];
            }
        }
    }
}
