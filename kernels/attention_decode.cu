// attention_decode: out[r,h] = sum_j softmax_j(scale * q[r,h] . K[j]) V[j]
//           Source: arXiv 2307.08691, flash-decoding; HF LlamaAttention
// Shapes:   q [R, num_attention_heads, HEAD_DIM], k, v [R, num_key_value_heads, HEAD_DIM] float in rows of qkv_stride;
//           q_norm, k_norm [HEAD_DIM] float or null; cos_sin [max_seq_len, HEAD_DIM / 2] float2 or null (no rotary);
//           rows, positions [R]; keys, values [num_rows, num_key_value_heads, max_seq_len, HEAD_DIM] KvT, in-out;
//           key_scales, value_scales [num_rows, num_key_value_heads, max_seq_len] float, in-out, or null where KvT is
//           no code; partials [R, num_attention_heads, num_splits, HEAD_DIM + 4] float; counters [R, grid y] zeros,
//           zeros again at the end; out [R, num_attention_heads * HEAD_DIM]
// Requires: HEAD_DIM % 8 == 0; 16-byte aligned heads (of codes 8); 0 <= positions < max_seq_len; rows differ; the cache
//           holds every earlier token that the window shows; of rows, positions and those tokens the kernel in front
//           writes nothing, nor one that it may overlap; HEAD_TILE 8 or 16, with KvT float 4 or 2; window >= 1
// Launch:   grid (num_splits, num_key_value_heads * ceil(group / HEAD_TILE), R), block (128), static shared memory; may
//           overlap the kernel in front of it
// Traffic:  2 * num_key_value_heads * min(position, window) * (HEAD_DIM * sizeof(KvT), of codes + 4) bytes a row, times
//           ceil(group / HEAD_TILE)
// Numerics: fp32 sums (truncated, not rounded, in the tensor cores) and softmax (base 2, error 2^-22). Norm and rotary
//           in fp32; k and v rounded to KvT, and the row's own token takes part as rounded. With 16-bit KvT q and the
//           weights are products of two 16-bit parts: relative 2^-16 for bfloat16, 2^-22 for fp16 and codes. Fixed
//           trees; splits depend on the position alone: a row's bits do not depend on R
// Choice:   one block per key-value head and split, so that a group's K and V are read once; more parameters than ten,
//           as norm, rotary, append and the combining of splits would each be a launch of its own in a 5 us kernel.
//           Asks for earlier tokens before it waits for the kernel in front, which ends meanwhile; combines splits in
//           one round trip to L2 for eight of them. Rejected, with figures in docs/performance.md: clusters that hand
//           each other their parts. Speed: scripts/benchmark_attention.py
#include "common/arrival.cuh"
#include "common/attend.cuh"
#include "common/attend_float.cuh"
#include "common/head.cuh"
#include "common/launch.cuh"

constexpr int WARPS = 4;
// Fewer tokens than this in a split are read sooner than its part is combined with others.
constexpr int MIN_SPLIT_TOKENS = 128;
// Splits whose parts a thread asks for at once.
constexpr int PARTS_AT_ONCE = 8;

// Three blocks of 168 registers a multiprocessor where that is enough, two of 255 where more is held; of codes, whose
// loads in flight take half the registers, four of 128.
__host__ __device__ constexpr int min_blocks(int head_dim, int head_tile, bool has_scales) {
    return head_dim > (head_tile == 8 ? 128 : head_tile == 4 ? 64 : 0) ? 2 : has_scales ? 4 : 3;
}

// What the kernel in front writes is not declared __restrict__: loads of it might be moved before the wait.
template <typename KvT, int HEAD_DIM, int HEAD_TILE>
__global__ void __launch_bounds__(32 * WARPS, min_blocks(HEAD_DIM, HEAD_TILE, KvFormat<KvT>::HAS_SCALES))
    attention_decode(const float* q, const float* k, const float* v, int qkv_stride, const float* __restrict__ q_norm,
                     const float* __restrict__ k_norm, float eps, float scale, const float2* __restrict__ cos_sin,
                     const int* rows, const int* positions, KvT* keys, KvT* values, float* key_scales,
                     float* value_scales, int max_seq_len, int window, int num_attention_heads,
                     int num_key_value_heads, float* partials, unsigned* __restrict__ counters,
                     float* __restrict__ out) {
    using Tile = Attend<KvT, HEAD_DIM, HEAD_TILE>;
    constexpr int STRIDE = HEAD_DIM + 2;  // two rows of a pair of heads in different banks
    __shared__ typename Tile::Queries queries;
    __shared__ alignas(16) float weighted_values[WARPS * HEAD_TILE * STRIDE];  // of every warp
    __shared__ float maxima[WARPS][HEAD_TILE], sums[WARPS][HEAD_TILE];
    __shared__ float own_scores[HEAD_TILE], own_value[HEAD_DIM];
    __shared__ bool is_last;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int group = num_attention_heads / num_key_value_heads, tiles = (group + HEAD_TILE - 1) / HEAD_TILE;
    const int kv_head = blockIdx.y / tiles, first_in_group = blockIdx.y % tiles * HEAD_TILE;
    const int first_head = kv_head * group + first_in_group, heads = min(HEAD_TILE, group - first_in_group);
    const int position = __ldcg(positions + blockIdx.z);

    // Cached tokens [visible, position) in equal splits of whole tiles; the last one also takes the row's own token.
    const int visible = max(0, position + 1 - window), cached = position - visible;
    const int share = max((cached + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x), MIN_SPLIT_TOKENS);
    const int split_tokens = (share + Tile::TILE_TOKENS - 1) / Tile::TILE_TOKENS * Tile::TILE_TOKENS;
    const int num_splits = max(1, (cached + split_tokens - 1) / split_tokens), split = blockIdx.x;
    if (split >= num_splits) return;  // others of this grid wait for the kernel in front
    const bool has_own = split == num_splits - 1;
    const int end = min(position, visible + (split + 1) * split_tokens);

    const size_t head_token = (size_t(__ldcg(rows + blockIdx.z)) * num_key_value_heads + kv_head) * max_seq_len;
    const size_t own_token = head_token + position;
    const HeadRows<KvT> head_keys{keys + head_token * HEAD_DIM, key_scales + head_token};
    const HeadRows<KvT> head_values{values + head_token * HEAD_DIM, value_scales + head_token};
    Tile tile;
    tile.clear();
    int first = visible + split * split_tokens + warp * Tile::TILE_TOKENS;
    if (first < end) {  // under way while the kernel in front ends and the queries are prepared
        tile.load_keys(head_keys, first, end);
        tile.load_values(head_values, first, end);
    }

    using Pairs = Head<HEAD_DIM>;
    float2 angles[Pairs::PAIRS];
#pragma unroll
    for (int pair = 0; pair < Pairs::PAIRS; ++pair) {
        const size_t place = size_t(position) * Pairs::HALF + Pairs::index(pair);
        angles[pair] = cos_sin != nullptr && Pairs::has(pair) ? __ldcg(cos_sin + place) : make_float2(1.0f, 0.0f);
    }
    grid_dependency_wait();
    grid_dependency_launch();

    Pairs own_key;
    if (has_own) {  // in every warp, which spares a barrier before the scores
        own_key.load(k + blockIdx.z * size_t(qkv_stride) + kv_head * HEAD_DIM, true);
        if (k_norm != nullptr) own_key.normalize(k_norm, eps);
        own_key.rotate(angles);
        round_head(own_key, keys + own_token * HEAD_DIM, key_scales + own_token, warp == 0 && first_in_group == 0);
        const float* new_value = v + blockIdx.z * size_t(qkv_stride) + kv_head * HEAD_DIM;
        KvT* stored_value = values + own_token * HEAD_DIM;
        if constexpr (KvFormat<KvT>::HAS_SCALES) {
            if (warp == WARPS - 1) {  // the scale wants the whole vector in one warp
                Pairs value;
                value.load(new_value, true);
                round_head(value, stored_value, value_scales + own_token, first_in_group == 0);
#pragma unroll
                for (int pair = 0; pair < Pairs::PAIRS; ++pair) {
                    if (!Pairs::has(pair)) continue;
                    own_value[Pairs::index(pair)] = value.first[pair];
                    own_value[Pairs::index(pair) + Pairs::HALF] = value.second[pair];
                }
            }
        } else {
            for (int i = threadIdx.x; i < HEAD_DIM; i += 32 * WARPS) {
                const KvT rounded = from_float<KvT>(within_range<KvT>(new_value[i]));
                own_value[i] = to_float(rounded);
                if (first_in_group == 0) stored_value[i] = rounded;
            }
        }
    }
    for (int head = warp; head < HEAD_TILE; head += WARPS) {
        Pairs query;
        query.load(q + blockIdx.z * size_t(qkv_stride) + (first_head + head) * HEAD_DIM, head < heads);
        if (q_norm != nullptr) query.normalize(q_norm, eps);
        query.rotate(angles);
#pragma unroll
        for (int pair = 0; pair < Pairs::PAIRS; ++pair) {
            query.first[pair] *= scale;
            query.second[pair] *= scale;
            if (Pairs::has(pair)) {
                queries.store(head, Pairs::index(pair), query.first[pair]);
                queries.store(head, Pairs::index(pair) + Pairs::HALF, query.second[pair]);
            }
        }
        if (lane < Tile::QUERY_SIZE - HEAD_DIM) queries.store(head, HEAD_DIM + lane, 0.0f);
        if (has_own) {
            const float own_score = query.dot(own_key);
            if (lane == 0) own_scores[head] = own_score;
        }
    }
    __syncthreads();  // queries, own_scores and own_value are there

    if (has_own && warp == 0) tile.start_with(own_scores, own_value);
    while (first < end) {
        const int next = first + WARPS * Tile::TILE_TOKENS;
        tile.take(queries, end - first, [&] {
            if (next < end) tile.load_keys(head_keys, next, end);
        });
        if (next < end) tile.load_values(head_values, next, end);
        first = next;
    }
    tile.template publish<STRIDE>(maxima[warp], sums[warp], weighted_values + warp * HEAD_TILE * STRIDE);
    __syncthreads();  // every warp's part is there

    // Partials of this row and tile of heads: [heads][num_splits = grid x][HEAD_DIM values, maximum, sum, 2 unused].
    constexpr int PART = HEAD_DIM + 4;
    const size_t first_row = size_t(blockIdx.z) * num_attention_heads + first_head;
    for (int i = threadIdx.x; i < heads * HEAD_DIM; i += 32 * WARPS) {
        const int head = i / HEAD_DIM, dimension = i % HEAD_DIM;
        float maximum = maxima[0][head];
#pragma unroll
        for (int part = 1; part < WARPS; ++part) maximum = fmaxf(maximum, maxima[part][head]);
        float weighted = 0.0f, sum = 0.0f;
#pragma unroll
        for (int part = 0; part < WARPS; ++part) {
            const float weight = exp2_fast(maxima[part][head] - maximum);  // 0 for a warp without tokens
            weighted = fmaf(weight, weighted_values[(part * HEAD_TILE + head) * STRIDE + dimension], weighted);
            sum = fmaf(weight, sums[part][head], sum);
        }
        if (num_splits == 1) {
            out[(first_row + head) * HEAD_DIM + dimension] = weighted / sum;
        } else {
            float* part = partials + ((first_row + head) * gridDim.x + split) * PART;
            part[dimension] = weighted;
            if (dimension == 0) *reinterpret_cast<float2*>(part + HEAD_DIM) = make_float2(maximum, sum);
        }
    }
    if (num_splits == 1) return;

    __syncthreads();
    if (threadIdx.x == 0) {  // the counter is 0 again for the next launch
        const unsigned last = num_splits - 1;
        is_last = arrive(counters + blockIdx.z * gridDim.y + blockIdx.y, last) == last;
    }
    __syncthreads();
    if (!is_last) return;

    for (int i = threadIdx.x; i < heads * HEAD_DIM / 4; i += 32 * WARPS) {
        const int head = i / (HEAD_DIM / 4), vector = i % (HEAD_DIM / 4);
        const float* parts = partials + (first_row + head) * gridDim.x * PART;
        float maximum = reduce::minus_infinity(), sum = 0.0f;
        float4 mixed = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
        for (int begin = 0; begin < num_splits; begin += PARTS_AT_ONCE) {
            float2 found[PARTS_AT_ONCE];  // maximum, sum
            float4 values[PARTS_AT_ONCE];
            float larger = maximum;
#pragma unroll
            for (int j = 0; j < PARTS_AT_ONCE; ++j) {
                const float* part = parts + size_t(begin + j) * PART;
                const bool exists = begin + j < num_splits;
                found[j] = exists ? __ldcg(reinterpret_cast<const float2*>(part + HEAD_DIM))
                                  : make_float2(reduce::minus_infinity(), 0.0f);
                values[j] = exists ? __ldcg(reinterpret_cast<const float4*>(part + 4 * vector))
                                   : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
#pragma unroll
            for (int j = 0; j < PARTS_AT_ONCE; ++j) larger = fmaxf(larger, found[j].x);
            const float factor = exp2_fast(maximum - larger);
            maximum = larger;
            sum *= factor;
            mixed.x *= factor, mixed.y *= factor, mixed.z *= factor, mixed.w *= factor;
#pragma unroll
            for (int j = 0; j < PARTS_AT_ONCE; ++j) {
                const float weight = exp2_fast(found[j].x - maximum);
                sum = fmaf(weight, found[j].y, sum);
                mixed.x = fmaf(weight, values[j].x, mixed.x), mixed.y = fmaf(weight, values[j].y, mixed.y);
                mixed.z = fmaf(weight, values[j].z, mixed.z), mixed.w = fmaf(weight, values[j].w, mixed.w);
            }
        }
        const float inverse = 1.0f / sum;
        *reinterpret_cast<float4*>(out + (first_row + head) * HEAD_DIM + 4 * vector) =
            make_float4(mixed.x * inverse, mixed.y * inverse, mixed.z * inverse, mixed.w * inverse);
    }
}
