// products: the product of a span of weights with rows of activations, by the type of the weights.
#pragma once

#include "common/product_codes.cuh"
#include "common/product_floats.cuh"
#include "common/product_fp8.cuh"
#include "common/product_halves.cuh"

template <typename WeightT, typename ScaleT, int GROUP_SIZE, bool IS_SYMMETRIC, int ROWS>
struct ProductOf {
    using Type = CodeProduct<WeightT, ScaleT, GROUP_SIZE, IS_SYMMETRIC, ROWS>;
};
template <typename ScaleT, int GROUP_SIZE, int ROWS>
struct ProductOf<Fp8, ScaleT, GROUP_SIZE, true, ROWS> {
    using Type = Fp8Product<ScaleT, GROUP_SIZE, ROWS>;
};
template <typename ScaleT, int ROWS>
struct ProductOf<__half, ScaleT, 0, true, ROWS> {
    using Type = HalfProduct<__half, ROWS>;
};
template <typename ScaleT, int ROWS>
struct ProductOf<__nv_bfloat16, ScaleT, 0, true, ROWS> {
    using Type = HalfProduct<__nv_bfloat16, ROWS>;
};
template <typename ScaleT, int ROWS>
struct ProductOf<float, ScaleT, 0, true, ROWS> {
    using Type = FloatProduct<ROWS>;
};
