// mixed: attention's outputs, in the type of the products that take them: fp16, or fp32 for weights of 32 bits. A mean
// of values is as small as they are, so fp16 needs no scale.
#pragma once

#include "common/matrix.cuh"
#include "common/wide_image.cuh"

// Rows of outputs. The type is a choice at run time: each output is stored once.
struct MixedRows {
    void* data;
    int is_float;

    __device__ __forceinline__ void store(size_t index, float value) const {
        if (is_float) {
            static_cast<float*>(data)[index] = value;
        } else {
            static_cast<__half*>(data)[index] = __float2half_rn(within_range<__half>(value));
        }
    }
    __device__ __forceinline__ void store(size_t index, const float2& values) const {
        if (is_float) {
            *reinterpret_cast<float2*>(static_cast<float*>(data) + index) = values;
        } else {
            *reinterpret_cast<unsigned*>(static_cast<__half*>(data) + index) = pair_of(values.x, values.y);
        }
    }
    __device__ __forceinline__ void store(size_t index, const float4& values) const {
        if (is_float) {
            *reinterpret_cast<float4*>(static_cast<float*>(data) + index) = values;
        } else {
            *reinterpret_cast<uint2*>(static_cast<__half*>(data) + index) =
                make_uint2(pair_of(values.x, values.y), pair_of(values.z, values.w));
        }
    }

    static __device__ __forceinline__ unsigned pair_of(float first, float second) {
        return pack_pair<__half>(within_range<__half>(first), within_range<__half>(second));
    }
};

// Rows of `width` outputs; with unit_inputs the image of them for a matrix with such units, whose data are fp16.
struct MixedOutputs {
    MixedRows rows;
    int unit_inputs, width;

    __device__ __forceinline__ void store(int token, int column, const float4& values) const {
        if (unit_inputs == 0) return rows.store(static_cast<size_t>(token) * width + column, values);
        const size_t place = wide_place(unit_inputs, token, column, wide_steps(width));
        unsigned char* pair = static_cast<unsigned char*>(rows.data) + place;
        *reinterpret_cast<unsigned*>(pair) = MixedRows::pair_of(values.x, values.y);
        *reinterpret_cast<unsigned*>(pair + (token % 2 == 0 ? 16 : -16)) = MixedRows::pair_of(values.z, values.w);
    }
};
