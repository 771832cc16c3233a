// Vectors of 16 rows, and what is done with them, for AVX2, AVX-512 and AVX-512 with VNNI: the one file that names
// instructions. All forms give the same bits.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

typedef int32_t Ints __attribute__((vector_size(64), aligned(4)));
typedef float Floats __attribute__((vector_size(64), aligned(4)));
typedef int8_t Bytes __attribute__((vector_size(16), aligned(1)));
typedef int16_t Halves __attribute__((vector_size(32), aligned(2)));  // one number of 16 bits for each of 16 inputs

template <typename T>
inline T load(const void* from) {
    T value;
    memcpy(&value, from, sizeof value);
    return value;
}

#if defined(__AVX512BW__)
constexpr bool IS_AVX512 = true;

using Shorts = __m512i;  // 32 numbers of 16 bits: two inputs of each row

inline Ints add_pairs(Ints sums, Shorts a, Shorts b) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpwssd_epi32((__m512i)sums, a, b);
#else
    return sums + (Ints)_mm512_madd_epi16(a, b);
#endif
}

inline Floats add_product(Floats sum, Floats a, Floats b) {
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
}

inline Shorts broadcast(int32_t pair) { return _mm512_set1_epi32(pair); }

inline Shorts widen(__m256i bytes) { return _mm512_cvtepi8_epi16(bytes); }
#else
constexpr bool IS_AVX512 = false;

struct Shorts {
    __m256i half[2];
};

inline Ints add_pairs(Ints sums, Shorts a, Shorts b) {
    __m256i halves[2] = {_mm256_madd_epi16(a.half[0], b.half[0]), _mm256_madd_epi16(a.half[1], b.half[1])};
    return sums + load<Ints>(halves);
}

inline Floats add_product(Floats sum, Floats a, Floats b) {
    __m256 halves[2];
    for (int i = 0; i < 2; i++) {
        halves[i] = _mm256_fmadd_ps(load<__m256>((float*)&a + 8 * i), load<__m256>((float*)&b + 8 * i),
                                    load<__m256>((float*)&sum + 8 * i));
    }
    return load<Floats>(halves);
}

inline Shorts broadcast(int32_t pair) { return {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)}; }

inline Shorts widen(__m256i bytes) {
    return {_mm256_cvtepi8_epi16(_mm256_castsi256_si128(bytes)),
            _mm256_cvtepi8_epi16(_mm256_extracti128_si256(bytes, 1))};
}
#endif
