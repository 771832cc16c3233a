// append_tokens: keys[rows[i], h, positions[i]] = rotate(norm(k[i,h])); values[rows[i], h, positions[i]] = v[i,h]
//           Source: HF DynamicCache.update; Qwen3Attention k_norm; arXiv 2104.09864 eq. 34
// Shapes:   qkv [R, ...] float in rows of qkv_stride, raw projections: a row has keys [num_key_value_heads, HEAD_DIM]
//           at k_offset and values alike at v_offset; parts [num_parts, R, qkv_stride] float, what gemm_wide leaves of
//           qkv in parts, which is added first, or null. The first num_query_heads queries of a row, at 0, are in-out:
//           their sums, normed and, with rotates_queries, rotated. q_norm, k_norm [HEAD_DIM] float or null; cos_sin
//           [max_seq_len, HEAD_DIM / 2] float2 or null (no rotary); rows, positions [R] int, row -1: an unused lane;
//           page_table [num_rows, pages_per_row] int; keys, values [num_pages, num_key_value_heads, PAGE_TOKENS,
//           HEAD_DIM] KvT, in-out; key_scales, value_scales [num_pages, num_key_value_heads, PAGE_TOKENS] float,
//           in-out, or null where KvT is not a code
// Requires: HEAD_DIM % 8 == 0; heads aligned to 16 bytes (codes: 8); 0 <= positions < max_seq_len; no (row, position)
//           twice; no two rows share the page of a new token. The kernel in front, and those that it overlaps, write
//           none of rows, positions and page_table
// Launch:   grid (R, ceil((2 * num_key_value_heads + num_query_heads) / 4)), block (128), a warp a head, no shared
//           memory; may overlap the kernel in front of it
// Traffic:  2 * R * num_key_value_heads * HEAD_DIM * (4 + sizeof(KvT)) bytes, and 8 * R * num_key_value_heads of
//           scales. With parts each of them once; queries read and written
// Numerics: norm and rotary in fp32, one rounding to KvT. The bits are those that attention_decode would append: both
//           call Head::norm_and_rotate and round_head, which write every operation out: the compiler cannot join
//           them in only one of the kernels. Parts are added one after the other, each sum is rounded
// Choice:   One launch for tokens of any rows: in front of attention_decode, where lanes of one row see each other's
//           tokens, and for all prompts that run side by side. It adds the parts, as it reads most of them anyway, and
//           norms and rotates the queries of prompts: launches less in front of attention, where nothing else runs. On
//           sm_90 attention_prefill_wgmma rotates the queries that it loads, which costs no pass over memory
#include "common/head.cuh"
#include "common/launch.cuh"

constexpr int WARPS = 4;

// Arrays that the previous kernel writes are not __restrict__: the compiler might move their loads before the wait.
template <typename KvT, int HEAD_DIM>
__global__ void __launch_bounds__(32 * WARPS)
    append_tokens(float* qkv, int k_offset, int v_offset, int qkv_stride, const float* parts, int num_parts,
                  const float* __restrict__ q_norm, const float* __restrict__ k_norm, float eps,
                  const float2* __restrict__ cos_sin, const int* rows, const int* positions, const int* page_table,
                  int pages_per_row, KvT* keys, KvT* values, float* key_scales, float* value_scales,
                  int num_key_value_heads, int num_query_heads, int rotates_queries) {
    using Pairs = Head<HEAD_DIM>;
    const int row = load_here(rows + blockIdx.x), position = load_here(positions + blockIdx.x);
    const int head = blockIdx.y * WARPS + threadIdx.x / 32;
    if (row < 0 || head >= 2 * num_key_value_heads + num_query_heads) {  // still wait: rule 1 of launch.cuh
        grid_dependency_wait();
        return;
    }
    const bool is_query = head >= 2 * num_key_value_heads, is_value = !is_query && head >= num_key_value_heads;
    const int number = head - (is_query ? 2 * num_key_value_heads : is_value ? num_key_value_heads : 0);
    const int page = __ldcg(page_table + size_t(row) * pages_per_row + position / unsigned(PAGE_TOKENS));
    const size_t place = token_place(page, num_key_value_heads, number, position);
    float2 angles[Pairs::PAIRS];
    Pairs::load_angles(is_query && !rotates_queries ? nullptr : cos_sin, position, angles);
    grid_dependency_wait();
    grid_dependency_launch();

    const int first_column = is_query ? 0 : is_value ? v_offset : k_offset;
    const size_t begin = blockIdx.x * size_t(qkv_stride) + first_column + number * HEAD_DIM;
    Pairs vector;
    vector.load(qkv + begin, true);
    vector.add(parts + begin, num_parts, gridDim.x * size_t(qkv_stride));
    if (is_query) {
        vector.norm_and_rotate(q_norm, eps, angles);
        vector.store(qkv + begin);
    } else if (is_value) {
        round_head(vector, values + place * HEAD_DIM, value_scales + place, true);
    } else {
        vector.norm_and_rotate(k_norm, eps, angles);
        round_head(vector, keys + place * HEAD_DIM, key_scales + place, true);
    }
}
