// token_operators: what stands between the products of a decoded token: RMSNorm, attention, SwiGLU, on the processor
//           Source: arXiv 1910.07467, equation 4; arXiv 2104.09864; arXiv 2002.05202; the operators of
//           llmcli/runners/torch/operators.py, whose place these take. exp: Cephes, expf.c
// Shapes:   rms_norm: x, y [num_rows][size] float, weight [size] float. swiglu: gate, up, y [size] float.
//           attend: query, y [num_heads][head_dim], key, value [num_kv_heads][head_dim] float, of one token; cos, sin
//           [head_dim / 2] float, or null; keys, values [num_kv_heads][num_pages][PAGE_TOKENS][head_dim] bfloat16, of a
//           layer; pages [position / PAGE_TOKENS + 1] numbers of pages
// Requires: attend: head_dim a multiple of 16; begin <= position. query and key are overwritten
// Launch:   one call each, from one thread; OpenMP's threads share the key-value heads of a long row, and rows
// Traffic:  the keys and values of the tokens seen once for each group of query heads that shares them
// Numerics: all in float. A token's key and value are rounded to bfloat16, nearest even, and seen as they are stored.
//           Bits depend on the token and on those it sees, neither on the pages they lie in, nor on threads, nor on
//           instructions: compile with -ffp-contract=off. exp to 2 units in the last place. NaN stays NaN
// Choice:   torch has a call for each step, and each costs more than its numbers: of a token's 57 ms at 1B they took 8.
//           A page of 16 tokens gives a vector of scores, so no sum across a vector is made alone
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

#include "vectors.h"

namespace {

constexpr int PAGE_TOKENS = 16;
constexpr int LANES = 16;
// Below this many numbers read, a second thread costs more than it saves.
constexpr int64_t SHARED_NUMBERS = 1 << 16;

inline Floats all(float value) { return Floats{} + value; }

// The first `count` numbers, then zeros.
inline Floats load_part(const float* from, int count) {
    Floats part = {};
    memcpy(&part, from, (count < LANES ? count : LANES) * sizeof(float));
    return part;
}

inline void store_part(float* to, Floats values, int count) {
    memcpy(to, &values, (count < LANES ? count : LANES) * sizeof(float));
}

inline float sum_of(Floats values) {
    for (int width = LANES / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; i++) values[i] += values[i + width];
    }
    return values[0];
}

// 2^n * e^r with |r| <= ln 2 / 2. Where it would overflow, about 1e38; where it would underflow, about 1e-38.
inline Floats exp_of(Floats x) {
    x = x > all(87.5f) ? all(87.5f) : x;
    x = x < all(-87.0f) ? all(-87.0f) : x;
    const Floats shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23 leaves the integer in the lowest bits
    const Floats n = shifted - 12582912.0f;
    const Floats r = x - n * 0.693359375f - n * -2.12194440e-4f;
    Floats sum = all(1.9875691500e-4f);
    const float factors[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5e-1f};
    for (const float factor : factors) sum = add_product(all(factor), sum, r);
    sum = add_product(r, sum, r * r) + 1.0f;
    const Ints power = ((Ints)shifted - 0x4b400000 + 127) << 23;
    return sum * (Floats)power;
}

inline Floats widen_bfloat16(const uint16_t* from) {
    typedef uint16_t Words __attribute__((vector_size(32), aligned(2)));
    return (Floats)(__builtin_convertvector(load<Words>(from), Ints) << 16);
}

// Rounded to nearest even.
inline void store_bfloat16(uint16_t* to, Floats values) {
    const Ints bits = (Ints)values, odd = (bits >> 16) & 1;
    const Ints is_number = values == values;
    const Ints rounded = is_number ? (bits + 0x7fff + odd) >> 16 : Ints{} + 0x7fc0;
    const Halves narrow = __builtin_convertvector(rounded, Halves);
    memcpy(to, &narrow, sizeof narrow);
}

void norm_row(const float* x, const float* weight, float eps, int size, float* y) {
    Floats squares = {};
    for (int i = 0; i < size; i += LANES) {
        const Floats part = load_part(x + i, size - i);
        squares = add_product(squares, part, part);
    }
    const float factor = 1.0f / sqrtf(sum_of(squares) / size + eps);
    for (int i = 0; i < size; i += LANES) {
        store_part(y + i, load_part(weight + i, size - i) * (load_part(x + i, size - i) * factor), size - i);
    }
}

// The pairs are (i, i + head_dim / 2).
void rotate(float* x, const float* cos, const float* sin, int head_dim) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; i++) {
        const float first = x[i], second = x[i + half];
        x[i] = first * cos[i] - second * sin[i];
        x[i + half] = second * cos[i] + first * sin[i];
    }
}

// The sums of 16 vectors, in order. `sums` is overwritten.
inline Floats sums_of(Floats* sums) {
    for (int width = LANES / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; i++) {
            const Floats a = sums[i], b = sums[i + width];
            // Runs of `width` lanes: they come from a and b in turn.
            Floats low, high;
            if (width == 8) {
                low = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
                high = __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
            } else if (width == 4) {
                low = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
                high = __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
            } else if (width == 2) {
                low = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
                high = __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
            } else {
                low = __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
                high = __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
            }
            sums[i] = low + high;
        }
    }
    return sums[0];
}

}  // namespace

// Attention of a layer. Source of the layout: llmcli/runners/torch/token_operators.py
struct TokenAttention {
    uint16_t* keys;
    uint16_t* values;
    const float* query_norm;  // weights [head_dim] of the norms of each head, or null
    const float* key_norm;
    float eps;
    int32_t num_heads, num_kv_heads, head_dim, num_pages;
};

namespace {

// The tokens from `begin` to `position` of a page, as places in it.
struct Places {
    int first, last;
};

inline Places places_of(int page, int begin, int position) {
    const int first = begin - page * PAGE_TOKENS, last = position - page * PAGE_TOKENS;
    return {first > 0 ? first : 0, last < PAGE_TOKENS - 1 ? last : PAGE_TOKENS - 1};
}

// The query heads that share a key-value head, one after the other. scores has room for all visible pages.
void attend_head(const TokenAttention& layer, const float* query, size_t head, const int64_t* pages, int begin,
                 int position, float* scores, float* y) {
    const int head_dim = layer.head_dim, first_page = begin / PAGE_TOKENS, last_page = position / PAGE_TOKENS;
    const size_t page_numbers = (size_t)PAGE_TOKENS * head_dim, first = head * layer.num_pages * page_numbers;
    const float scale = 1.0f / sqrtf(head_dim);
    Floats largest = all(-INFINITY);
    for (int page = first_page; page <= last_page; page++) {
        const uint16_t* keys = layer.keys + first + pages[page] * page_numbers;
        const Places places = places_of(page, begin, position);
        Floats sums[PAGE_TOKENS] = {};
        for (int t = places.first; t <= places.last; t++) {
            for (int i = 0; i < head_dim; i += LANES) {
                sums[t] = add_product(sums[t], load<Floats>(query + i), widen_bfloat16(keys + t * head_dim + i));
            }
        }
        Floats found = sums_of(sums) * scale;
        for (int t = 0; t < places.first; t++) found[t] = -INFINITY;
        for (int t = places.last + 1; t < PAGE_TOKENS; t++) found[t] = -INFINITY;
        largest = found > largest ? found : largest;
        memcpy(scores + (page - first_page) * PAGE_TOKENS, &found, sizeof found);
    }
    float top = largest[0];
    for (int i = 1; i < LANES; i++) top = largest[i] > top ? largest[i] : top;
    Floats total = {};
    memset(y, 0, head_dim * sizeof(float));
    for (int page = first_page; page <= last_page; page++) {
        const uint16_t* values = layer.values + first + pages[page] * page_numbers;
        const Places places = places_of(page, begin, position);
        Floats weights = exp_of(load<Floats>(scores + (page - first_page) * PAGE_TOKENS) - top);
        for (int t = 0; t < places.first; t++) weights[t] = 0.0f;
        for (int t = places.last + 1; t < PAGE_TOKENS; t++) weights[t] = 0.0f;
        total += weights;
        for (int i = 0; i < head_dim; i += LANES) {
            Floats sum = load<Floats>(y + i);
            for (int t = places.first; t <= places.last; t++) {
                sum = add_product(sum, all(weights[t]), widen_bfloat16(values + t * head_dim + i));
            }
            memcpy(y + i, &sum, sizeof sum);
        }
    }
    const float divisor = sum_of(total);
    for (int i = 0; i < head_dim; i++) y[i] /= divisor;
}

}  // namespace

extern "C" void rms_norm(const float* x, const float* weight, float eps, int num_rows, int size, float* y,
                         int num_threads) {
#pragma omp parallel for num_threads(num_threads) if ((int64_t)num_rows * size > SHARED_NUMBERS)
    for (int row = 0; row < num_rows; row++) {
        norm_row(x + (size_t)row * size, weight, eps, size, y + (size_t)row * size);
    }
}

// y = gate / (1 + e^-gate) * up
extern "C" void swiglu(const float* gate, const float* up, int64_t size, float* y, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (size > SHARED_NUMBERS)
    for (int64_t i = 0; i < size; i += LANES) {
        const int count = size - i < LANES ? size - i : LANES;
        const Floats part = load_part(gate + i, count);
        store_part(y + i, part / (exp_of(-part) + 1.0f) * load_part(up + i, count), count);
    }
}

// Norms and rotates the heads of a token, stores its key and value, and attends to the tokens from `begin` on.
extern "C" void attend(const TokenAttention* layer, float* query, float* key, const float* value, const float* cos,
                       const float* sin, const int64_t* pages, int begin, int position, float* y, int num_threads) {
    const int head_dim = layer->head_dim, num_heads = layer->num_heads, num_kv_heads = layer->num_kv_heads;
    const int group_size = num_heads / num_kv_heads, num_seen_pages = position / PAGE_TOKENS - begin / PAGE_TOKENS + 1;
    const int64_t num_read = (int64_t)num_seen_pages * PAGE_TOKENS * head_dim * num_heads;
    const size_t room = (size_t)num_seen_pages * PAGE_TOKENS;
    const std::unique_ptr<float[]> scores(new float[room * num_heads]);
    const int64_t place = pages[position / PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS;
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_read > SHARED_NUMBERS)
    for (int kv_head = 0; kv_head < num_kv_heads; kv_head++) {
        float* own_key = key + kv_head * head_dim;
        if (layer->key_norm != nullptr) norm_row(own_key, layer->key_norm, layer->eps, head_dim, own_key);
        if (cos != nullptr) rotate(own_key, cos, sin, head_dim);
        const size_t stored = ((size_t)kv_head * layer->num_pages * PAGE_TOKENS + place) * head_dim;
        for (int i = 0; i < head_dim; i += LANES) {
            store_bfloat16(layer->keys + stored + i, load<Floats>(own_key + i));
            store_bfloat16(layer->values + stored + i, load<Floats>(value + kv_head * head_dim + i));
        }
        for (int head = kv_head * group_size; head < (kv_head + 1) * group_size; head++) {
            float* own = query + (size_t)head * head_dim;
            if (layer->query_norm != nullptr) norm_row(own, layer->query_norm, layer->eps, head_dim, own);
            if (cos != nullptr) rotate(own, cos, sin, head_dim);
            attend_head(*layer, own, kv_head, pages, begin, position, scores.get() + head * room,
                        y + (size_t)head * head_dim);
        }
    }
}
