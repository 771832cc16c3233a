// attention_prefill: out[i,h] = sum_j softmax_j(scale * q[i,h] . K[j]) V[j], j <= start + i
//           Source: arXiv 2307.08691, algorithm 1; HF LlamaAttention
// Shapes:   q [num_tokens, num_attention_heads, HEAD_DIM] float in rows of q_stride, normed and rotated; keys, values
//           [num_pages, num_key_value_heads, PAGE_TOKENS, HEAD_DIM] KvT; key_scales, value_scales [num_pages,
//           num_key_value_heads, PAGE_TOKENS] float, or null where KvT is no code; pages [pages_per_row] int, of the
//           row; out [num_tokens, num_attention_heads * HEAD_DIM] float
// Requires: HEAD_DIM % 8 == 0; 16-byte aligned heads (of codes 8) and q_stride; the row's pages hold the tokens 0 ...
//           start + num_tokens - 1; window >= 1; scale holds a factor log2(e)
// Launch:   grid (num_attention_heads, ceil(num_tokens / BLOCK_QUERIES)), block (128); dynamic shared memory for a
//           block of queries, one of keys and one of values (fp32: one of both, and weights): 68 KiB for 16 bits and
//           HEAD_DIM 128
// Traffic:  q and out once; keys and values once for every block of queries that sees them and every query head, from
//           L2
// Numerics: fp32 sums (truncated, not rounded, in the tensor cores) and softmax (base 2, error 2^-22). 16-bit KvT: q *
//           scale and the weights are rounded to KvT (codes: weights times value scales, to fp16), the sum of weights
//           is not. fp32: no rounding beyond fp32. A token's bits depend on its position alone, neither on the ends of
//           chunks nor on pages: tiles of keys begin at fixed positions, queries share no sums, and a tile that a query
//           does not see multiplies its sums by 1 and adds 0
// Choice:   A warp has two tiles of 16 queries up to HEAD_DIM 128. With one, shared memory is the limit (16 KiB of keys
//           for 64 mma). Blocks with the most keys start first. Rejected: the queries in registers (over 255). Speed:
//           scripts/benchmark_attention.py
#include "common/prefill_mma.cuh"

template <typename KvT, int HEAD_DIM>
__global__ void __launch_bounds__(128, 2)
    attention_prefill(const float* __restrict__ q, int q_stride, const KvT* __restrict__ keys,
                      const KvT* __restrict__ values, const float* __restrict__ key_scales,
                      const float* __restrict__ value_scales, const int* __restrict__ pages,
                      int num_key_value_heads, int num_tokens, int start, int window, float scale,
                      void* out, int out_is_float) {
    using Form = Prefill<KvT, HEAD_DIM>;
    extern __shared__ __align__(16) unsigned char shared_memory[];
    const int head = blockIdx.x, kv_head = head / (gridDim.x / num_key_value_heads);
    const int of_head = kv_head * PAGE_TOKENS, first_query = (gridDim.y - 1 - blockIdx.y) * Form::BLOCK_QUERIES;
    const PrefillBlock<KvT> block = {  // most keys first
        q + head * HEAD_DIM, {out, out_is_float}, head * HEAD_DIM, q_stride, static_cast<int>(gridDim.x * HEAD_DIM),
        {keys + of_head * HEAD_DIM, key_scales + of_head}, {values + of_head * HEAD_DIM, value_scales + of_head},
        pages, num_key_value_heads * PAGE_TOKENS, num_tokens, first_query, start, window, scale};
    Form::run(block, shared_memory);
}
