// kv_append: keys[h, positions[i]] = k[i,h]; values[h, positions[i]] = v[i,h], of the row that has these pages
//           Source: HF DynamicCache.update
// Shapes:   k, v [n, num_key_value_heads, HEAD_DIM] float in rows of stride; pages [pages_per_row], positions [n] int;
//           keys, values [num_pages, num_key_value_heads, PAGE_TOKENS, HEAD_DIM] KvT, in-out; key_scales, value_scales
//           [num_pages, num_key_value_heads, PAGE_TOKENS] float, in-out, or null where KvT is no code
// Requires: HEAD_DIM % 8 == 0; k, v and stride in multiples of 16 bytes; 0 <= positions < pages_per_row * PAGE_TOKENS;
//           no position twice
// Launch:   grid (n, ceil(2 * num_key_value_heads * LANES / BLOCK_SIZE)), block (BLOCK_SIZE); LANES threads a head: its
//           vectors of 16 bytes, or of 8 codes, then rounded up to a power of two
// Traffic:  2 * n * num_key_value_heads * HEAD_DIM * (4 + sizeof(KvT)) bytes, and 8 * n * num_key_value_heads of scales
// Numerics: one rounding to nearest even, fp16 and codes saturated at 65504; codes: scale = largest / 127, x / scale to
//           nearest even, both IEEE divisions, as the torch runner; deterministic
// Choice:   16 bytes a store, keys and values in one launch; decode does this inside attention_decode, spans with
//           append_tokens
#include "common/kv_code.cuh"
#include "common/types.cuh"

constexpr int BLOCK_SIZE = 128;

// A thread stores one vector; the LANES threads of a head are as many as it takes, of codes a power of two.
template <typename KvT, int HEAD_DIM>
struct Append : KvFormat<KvT> {
    using Vector = Pack<KvT>;
    static constexpr int VECTOR = Vector::SIZE, LANES = HEAD_DIM / VECTOR;
};
template <int HEAD_DIM>
struct Append<KvCode, HEAD_DIM> : KvFormat<KvCode> {
    struct alignas(8) Vector {
        KvCode values[8];
    };
    static constexpr int VECTOR = 8;
    static __host__ __device__ constexpr int lanes(int vectors) {
        return vectors <= 1 ? 1 : 2 * lanes((vectors + 1) / 2);
    }
    static constexpr int LANES = lanes(HEAD_DIM / VECTOR);
};

template <typename KvT, int HEAD_DIM>
__global__ void __launch_bounds__(BLOCK_SIZE) kv_append(const float* __restrict__ k, const float* __restrict__ v,
                                                        int stride, const int* __restrict__ pages,
                                                        const int* __restrict__ positions, KvT* __restrict__ keys,
                                                        KvT* __restrict__ values, float* __restrict__ key_scales,
                                                        float* __restrict__ value_scales, int num_key_value_heads) {
    using Format = Append<KvT, HEAD_DIM>;
    const int index = blockIdx.y * BLOCK_SIZE + threadIdx.x;
    const int head = index / Format::LANES, first = Format::VECTOR * (index % Format::LANES);
    const bool exists = head < 2 * num_key_value_heads && first < HEAD_DIM;
    if (!Format::HAS_SCALES && !exists) return;  // a scale is found by all lanes
    const bool is_value = head >= num_key_value_heads;
    const int kv_head = is_value ? head - num_key_value_heads : head;
    const float* source = (is_value ? v : k) + blockIdx.x * size_t(stride) + kv_head * HEAD_DIM + first;
    float elements[Format::VECTOR] = {};
#pragma unroll
    for (int i = 0; i < Format::VECTOR; i += 4) {
        if (!exists) break;
        const Pack<float> part = Pack<float>::load(source + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) elements[i + j] = within_range<typename Format::MmaT>(part.values[j]);
    }
    typename Format::Vector rounded;
    float scale = 0.0f;
    if constexpr (Format::HAS_SCALES) {
        float larger = 0.0f;
#pragma unroll
        for (int i = 0; i < Format::VECTOR; ++i) larger = reduce::Max::combine(larger, fabsf(elements[i]));
        scale = code_scale(Format::LANES > 1 ? warp_max<Format::LANES>(larger) : larger);
        if (!exists) return;
#pragma unroll
        for (int i = 0; i < Format::VECTOR; ++i) rounded.values[i] = encode(elements[i], scale);
    } else {
#pragma unroll
        for (int i = 0; i < Format::VECTOR; ++i) rounded.values[i] = from_float<KvT>(elements[i]);
    }
    const int position = positions[blockIdx.x];
    const int page = pages[position / unsigned(PAGE_TOKENS)];
    const size_t token = token_place(page, num_key_value_heads, kv_head, position);
    KvT* place = (is_value ? values : keys) + token * HEAD_DIM + first;
    *reinterpret_cast<typename Format::Vector*>(place) = rounded;
    if (Format::HAS_SCALES && first == 0) (is_value ? value_scales : key_scales)[token] = scale;
}
