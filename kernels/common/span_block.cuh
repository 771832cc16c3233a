// span_block: a block of attention_span: which tokens it attends from, and its shared memory.
#pragma once

#include "common/head.cuh"
#include "common/kv_ring.cuh"
#include "common/load.cuh"
#include "common/splits.cuh"

constexpr int MAX_SPAN = 8;  // new tokens of a row; llmcli/runners/base.py knows it too
constexpr int COLUMNS = 8;   // of a block: pairs of a new token and a query head, token * group + head

// The new tokens of one row: lanes first_lane, first_lane + 1, ..., at positions position, position + 1, ...
struct Span {
    int row, first_lane, position, num_tokens;

    // The span `number` of the launch; without tokens if there are fewer. All lanes of a warp must call it.
    __device__ __forceinline__ Span(const int* rows, const int* positions, int num_lanes, int number) {
        const int lane = threadIdx.x % 32;
        const int its_row = lane < num_lanes ? load_here(rows + lane) : -1;
        const int its_position = lane < num_lanes ? load_here(positions + lane) : 0;
        const int row_before = __shfl_up_sync(0xffffffffu, its_row, 1);
        unsigned starts = __ballot_sync(0xffffffffu, its_row >= 0 && (lane == 0 || its_row != row_before));
        for (int i = 0; i < number; ++i) starts &= starts - 1;
        num_tokens = 0;
        if (starts == 0) return;
        first_lane = __ffs(starts) - 1;
        row = __shfl_sync(0xffffffffu, its_row, first_lane);
        position = __shfl_sync(0xffffffffu, its_position, first_lane);
        num_tokens = __popc(__ballot_sync(0xffffffffu, its_row == row));
    }
    // The tile in which the first new token lies begins here.
    __device__ __forceinline__ int new_begin() const { return position / PAGE_TOKENS * PAGE_TOKENS; }
};

// The new tokens from ... to - 1, which have their splits begin at the same places: all but once in a long while. And
// what they see of a split: the cached tokens begin ... end - 1; `visible` is the first that any of them sees.
struct SpanPart {
    int from, to, begin, end, visible;

    __device__ __forceinline__ SpanPart(const Splits<PAGE_TOKENS>* splits, int num_tokens, int first, int split) {
        from = first;
        for (to = from + 1; to < num_tokens; ++to) {
            if (splits[to].start != splits[from].start || splits[to].tokens != splits[from].tokens) break;
        }
        begin = splits[from].begin(split);
        end = splits[to - 1].end(split);
        visible = splits[from].visible;
    }
};

template <typename KvT, int HEAD_DIM, int STAGES>
struct SpanShared {
    using Ring = RingTile<KvT, HEAD_DIM>;
    static constexpr int STRIDE = HEAD_DIM + 2;  // two rows of a pair of columns in different banks
    static constexpr int RING_BYTES = STAGES * Ring::BYTES, MIXED_BYTES = WARPS * COLUMNS * STRIDE * 4;

    // The ring; at the end of a part the warps' weighted values.
    alignas(128) unsigned char ring[RING_BYTES > MIXED_BYTES ? RING_BYTES : MIXED_BYTES];
    alignas(128) unsigned char new_tiles[2][Ring::BYTES];  // those in which new tokens lie
    typename Attend<KvT, HEAD_DIM, COLUMNS>::Queries queries;
    float own_keys[MAX_SPAN][HEAD_DIM], own_values[MAX_SPAN][HEAD_DIM];
    float own_scores[COLUMNS];
    float maxima[WARPS][COLUMNS], sums[WARPS][COLUMNS];
    Span span;
    int group, kv_head, first_column, columns, most_splits;
    Splits<PAGE_TOKENS> splits[MAX_SPAN];  // of what each new token sees
    int tokens[COLUMNS];                   // the new token of each column
    int seen_end[COLUMNS];                 // the end of what it sees of a part, 0 if it sees nothing
    bool has_own[COLUMNS];                 // whether the part ends with the token itself
    unsigned long long filled[STAGES], emptied[STAGES], older;
    int is_last;

    __device__ __forceinline__ float* weighted_values() { return reinterpret_cast<float*>(ring); }
    __device__ __forceinline__ unsigned char* stage(unsigned index) { return ring + index % STAGES * Ring::BYTES; }
};

// Rounds a new key or value as the cache holds it; stores it in its place of a tile in shared memory, and in the cache
// if `stores`. All lanes must call it.
template <bool IS_KEYS, typename KvT, int HEAD_DIM>
__device__ __forceinline__ void round_into_tile(Head<HEAD_DIM>& head, unsigned char* tile, int token, KvT* row,
                                                float* row_scale, bool stores) {
    using Tokens = RingTokens<KvT, HEAD_DIM, IS_KEYS>;
    const Tokens tokens(tile);
    const float scale = round_head_with<KvT>(head, [&](int dimension, KvT rounded) {
        const int place = Tokens::offset(token, dimension / 8) + dimension % 8 * static_cast<int>(sizeof(KvT));
        *reinterpret_cast<KvT*>(const_cast<unsigned char*>(tokens.elements) + place) = rounded;
        if (stores) row[dimension] = rounded;
    });
    if constexpr (KvFormat<KvT>::HAS_SCALES) {
        if (threadIdx.x % 32 == 0) {
            const_cast<float*>(tokens.scales)[token] = scale;
            if (stores) *row_scale = scale;
        }
    }
}
