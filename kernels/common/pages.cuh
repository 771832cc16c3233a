// pages: the KV cache is made of pages of 16 tokens. A layer's is [num_pages, num_key_value_heads, PAGE_TOKENS,
// head_dim]. Entry i of a row's page table is the page of its tokens 16 * i ... 16 * i + 15. So a row's pages may lie
// in any order, and two rows may share one.
#pragma once

constexpr int PAGE_TOKENS = 16;  // also in llmcli/kernels/qkv.py; a test lets the compiler compare them

// Consecutive tokens of one head in one page; scales only with codes.
template <typename KvT>
struct HeadTokens {
    const KvT* elements;  // [tokens, HEAD_DIM]
    const float* scales;  // [tokens]
};

// The index of a token of one head in [num_pages, num_key_value_heads, PAGE_TOKENS].
__device__ __forceinline__ size_t token_place(int page, int num_key_value_heads, int kv_head, int position) {
    const size_t page_head = size_t(page) * num_key_value_heads + kv_head;
    return page_head * PAGE_TOKENS + position % unsigned(PAGE_TOKENS);
}
