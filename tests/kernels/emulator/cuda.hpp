// cuda: the words of CUDA C++ that kernels use, for a C++ compiler: types of 16 bits, vectors, intrinsics.
// Roundings are those of the card, but of approximate functions (__expf, rsqrtf, ...), which are exact here.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __restrict__

using std::isfinite;
using std::isinf;
using std::isnan;
using std::max;
using std::min;

struct dim3 { unsigned x = 1, y = 1, z = 1; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename To, typename From>
To bits_as(From value) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To result;
    std::memcpy(&result, &value, sizeof(To));
    return result;
}
inline float __uint_as_float(unsigned bits) { return bits_as<float>(bits); }
inline float __int_as_float(int bits) { return bits_as<float>(bits); }
inline unsigned __float_as_uint(float value) { return bits_as<unsigned>(value); }
inline int __float_as_int(float value) { return bits_as<int>(value); }

struct __half { _Float16 value; };
struct __nv_bfloat16 { uint16_t bits; };
struct alignas(4) __half2 { __half x, y; };
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
inline float __half2float(__half value) { return static_cast<float>(value.value); }
inline __half __float2half_rn(float value) { return {static_cast<_Float16>(value)}; }
inline __half __int2half_rn(int value) { return {static_cast<_Float16>(value)}; }
inline __half __ushort_as_half(unsigned short bits) { return bits_as<__half>(bits); }
inline unsigned short __half_as_ushort(__half value) { return bits_as<unsigned short>(value); }
inline float __bfloat162float(__nv_bfloat16 value) { return __uint_as_float(static_cast<unsigned>(value.bits) << 16); }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    const unsigned bits = __float_as_uint(value);
    if (value != value) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline __half2 __half2half2(__half value) { return {value, value}; }
inline __half2 __float2half2_rn(float value) { return __half2half2(__float2half_rn(value)); }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline float2 __half22float2(__half2 pair) { return {__half2float(pair.x), __half2float(pair.y)}; }
inline __half2 __low2half2(__half2 pair) { return {pair.x, pair.x}; }
inline __half2 __high2half2(__half2 pair) { return {pair.y, pair.y}; }
inline float __low2float(__half2 pair) { return __half2float(pair.x); }
template <typename Operation>
__half2 of_halves(__half2 a, __half2 b, Operation operation) {
    return __floats2half2_rn(operation(__half2float(a.x), __half2float(b.x)),
                             operation(__half2float(a.y), __half2float(b.y)));
}
inline __half2 __hsub2(__half2 a, __half2 b) {
    return of_halves(a, b, [](float x, float y) { return x - y; });
}
inline __half2 __hmul2(__half2 a, __half2 b) {
    return of_halves(a, b, [](float x, float y) { return x * y; });
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    const auto exact = [](__half x, __half y, __half z) {
        return __half{static_cast<_Float16>(static_cast<double>(x.value) * static_cast<double>(y.value) +
                                            static_cast<double>(z.value))};
    };
    return {exact(a.x, b.x, c.x), exact(a.y, b.y, c.y)};
}

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __expf(float a) { return std::exp(a); }
inline float card_logf(float a) { return std::log(a); }
#define __logf card_logf  // the C library has a function of that name
inline float rsqrtf(float a) { return 1.0f / std::sqrt(a); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
inline float __int2float_rn(int a) { return static_cast<float>(a); }
inline double __ll2double_rn(long long a) { return static_cast<double>(a); }
inline double __ull2double_rn(unsigned long long a) { return static_cast<double>(a); }
inline int __ffs(int a) { return __builtin_ffs(a); }
inline int __popc(unsigned a) { return __builtin_popcount(a); }
inline int __clz(int a) { return a ? __builtin_clz(static_cast<unsigned>(a)) : 32; }
inline unsigned long long __double2ull_rn(double a) { return static_cast<unsigned long long>(std::nearbyint(a)); }
inline long long __double2ll_rn(double a) { return static_cast<long long>(std::nearbyint(a)); }
inline float __ull2float_rn(unsigned long long a) { return static_cast<float>(a); }
inline float __double2float_rn(double a) { return static_cast<float>(a); }
inline float __double2float_ru(double a) {
    const float nearest = static_cast<float>(a);
    return nearest < a ? std::nextafter(nearest, INFINITY) : nearest;
}
inline double __longlong_as_double(long long bits) { return bits_as<double>(bits); }
inline long long __double_as_longlong(double value) { return bits_as<long long>(value); }
inline unsigned __vcmpeq4(unsigned a, unsigned b) {
    unsigned same = 0;
    for (int i = 0; i < 32; i += 8) same |= (a >> i & 0xff) == (b >> i & 0xff) ? 0xffu << i : 0;
    return same;
}
inline int __float2int_rn(float a) { return static_cast<int>(std::nearbyint(a)); }
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; ++i) c += static_cast<int8_t>(a >> 8 * i) * static_cast<int8_t>(b >> 8 * i);
    return c;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= (bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
template <typename T>
T __ldcg(const T* address) { return *address; }
template <typename T>
T __ldcs(const T* address) { return *address; }
template <typename T>
T __ldg(const T* address) { return *address; }
template <typename T>
void __stcs(T* address, T value) { *address = value; }
template <typename T>
T atomicAdd(T* place, T value) {
    const T before = *place;
    *place += value;
    return before;
}
template <typename T>
T atomicOr(T* place, T value) {
    const T before = *place;
    *place |= value;
    return before;
}
template <typename T>
T atomicMax(T* place, T value) {
    const T before = *place;
    *place = max(before, value);
    return before;
}
inline void __threadfence() {}
inline void __threadfence_system() {}
