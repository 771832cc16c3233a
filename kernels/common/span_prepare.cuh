// span_prepare: what a block of attention_span does before it attends: queries, and the new tokens' keys and values.
#pragma once

#include "common/mixed.cuh"
#include "common/launch.cuh"
#include "common/span_block.cuh"

constexpr int BLOCK_BARRIER = 1, ATTENDING_BARRIER = 2;  // of all threads, and of those that attend

// The arguments of a launch that its parts need, and values derived from them.
template <typename KvT>
struct SpanCall {
    const float *q, *k, *v;
    int qkv_stride;
    const float *q_norm, *k_norm;
    float eps, scale;
    const float2* cos_sin;
    const int* page_table;
    int pages_per_row;
    KvT *keys, *values;
    float *key_scales, *value_scales;
    int window, num_attention_heads, num_key_value_heads, max_splits;
    float* partials;
    unsigned* counters;
    MixedRows out;

    __device__ __forceinline__ const int* pages(const Span& span) const {
        return page_table + size_t(span.row) * pages_per_row;
    }
    __device__ __forceinline__ size_t place_of(int page, int kv_head, int position) const {
        return token_place(page, num_key_value_heads, kv_head, position);
    }
    // One warp starts copying the tokens begin ... end - 1 of a page.
    template <int HEAD_DIM>
    __device__ __forceinline__ void copy_page(unsigned char* tile, int page, int kv_head, int begin, int end,
                                              int lane) const {
        const size_t place = place_of(page, kv_head, 0);
        copy_tile<KvT, HEAD_DIM>(tile, {keys + place * HEAD_DIM, key_scales + place},
                                 {values + place * HEAD_DIM, value_scales + place}, begin, end, lane);
    }
    // The place in `partials` and `out` of a column's head.
    __device__ __forceinline__ size_t head_of(const Span& span, const SpanColumn& column) const {
        return size_t(span.first_lane + column.token) * num_attention_heads + column.head;
    }
};

// The warps that attend prepare a piece: its queries; and if it has new tokens, their tiles, own keys and own values.
// They share the heads, and load all of them together.
template <typename Memory>
__device__ __forceinline__ void prepare(const SpanCall<typename Memory::KvT>& call, Memory& shared,
                                        const SpanPiece& piece) {
    constexpr int HEAD_DIM = Memory::HEAD_DIM, COLUMNS = Memory::COLUMNS, ATTENDING = Memory::ATTENDING;
    constexpr int NUM_WARPS = Memory::ATTENDING_WARPS, TEAM_COLUMNS = COLUMNS / Memory::TEAMS;
    constexpr int NEW = 2 * MAX_SPAN / NUM_WARPS, QUERIES = COLUMNS / NUM_WARPS;
    using Pairs = Head<HEAD_DIM>;
    const int thread = number_here(threadIdx.x), warp = thread / 32, lane = thread % 32, kv_head = piece.kv_head;
    const Span& span = piece.span;
    const bool has_new = piece.has_new();
    const auto column_at = [&](int place) {
        return SpanColumn::at<COLUMNS, Memory::TEAMS>(place, piece, shared.table.group);
    };
    const auto place_of = [&](int i) { return warp + i * NUM_WARPS; };
    const auto new_token = [&](int i) { return (warp + i * NUM_WARPS) % MAX_SPAN; };
    const auto is_value = [&](int i) { return warp + i * NUM_WARPS >= MAX_SPAN; };
    const auto exists = [&](int i) { return has_new && new_token(i) < span.num_tokens; };

    float2 new_angles[NEW][Pairs::PAIRS], query_angles[QUERIES][Pairs::PAIRS];
    Pairs made[NEW], queries[QUERIES];
    SpanColumn columns[QUERIES];
    int new_pages[NEW];
    int older_page = 0;  // of the older tokens in the tile of the first new one
    const int older_end = has_new && warp == NUM_WARPS - 1 ? span.position - span.new_begin() : 0;
    if (older_end > 0) older_page = load_here(call.pages(span) + span.new_begin() / PAGE_TOKENS);
#pragma unroll
    for (int i = 0; i < NEW; ++i) {
        Pairs::load_angles(call.cos_sin, span.position + (exists(i) ? new_token(i) : 0), new_angles[i]);
        const int number = (span.position + new_token(i)) / PAGE_TOKENS;
        new_pages[i] = exists(i) ? load_here(call.pages(span) + number) : 0;
    }
#pragma unroll
    for (int i = 0; i < QUERIES; ++i) {
        columns[i] = column_at(place_of(i));
        Pairs::load_angles(call.cos_sin, span.position + max(0, columns[i].token), query_angles[i]);
    }
    if (thread < COLUMNS) shared.columns[thread] = column_at(thread);
    if (older_end > 0) {
        const int visible = max(0, piece.splits[0].visible - span.new_begin());
        call.template copy_page<HEAD_DIM>(shared.new_tiles[0], older_page, kv_head, visible, older_end, lane);
    }
    grid_dependency_wait();
    grid_dependency_launch();
#pragma unroll
    for (int i = 0; i < NEW; ++i) {
        const size_t lane_begin = (span.first_lane + new_token(i)) * size_t(call.qkv_stride);
        made[i].load((is_value(i) ? call.v : call.k) + lane_begin + kv_head * HEAD_DIM, exists(i));
    }
#pragma unroll
    for (int i = 0; i < QUERIES; ++i) {
        const size_t lane_begin = (span.first_lane + columns[i].token) * size_t(call.qkv_stride);
        queries[i].load(call.q + lane_begin + columns[i].head * HEAD_DIM, columns[i].token >= 0);
    }
#pragma unroll
    for (int i = 0; i < NEW; ++i) {
        if (!exists(i)) continue;
        const int token = new_token(i), position = span.position + token, place = position % PAGE_TOKENS;
        const bool stores = piece.first_column == 0 && piece.has_split(piece.splits[token].count - 1);
        const size_t cached = call.place_of(new_pages[i], kv_head, position);
        unsigned char* tile = shared.new_tiles[(position - span.new_begin()) / PAGE_TOKENS];
        if (is_value(i)) {
            round_into_tile<false>(made[i], tile, place, call.values + cached * HEAD_DIM, call.value_scales + cached,
                                   stores);
        } else {
            made[i].norm_and_rotate(call.k_norm, call.eps, new_angles[i]);
            round_into_tile<true>(made[i], tile, place, call.keys + cached * HEAD_DIM, call.key_scales + cached,
                                  stores);
        }
        made[i].store(is_value(i) ? shared.own_values[token] : shared.own_keys[token]);
    }
    copy_async_commit();
    copy_async_wait<0>();
    sync_threads_of<ATTENDING>(ATTENDING_BARRIER);  // the new tiles are written, and zeros in queries
#pragma unroll
    for (int i = 0; i < QUERIES; ++i) {
        const int token = columns[i].token, place = place_of(i);
        if (token < 0) continue;
        Pairs& query = queries[i];
        query.norm_and_rotate(call.q_norm, call.eps, query_angles[i]);
        const int team = place / TEAM_COLUMNS, column = place % TEAM_COLUMNS;
        const auto store = [&](int dimension, float value) {
            if constexpr (Memory::TEAMS > 1) {
                if (piece.template tiles_of<Memory::TEAMS>(team) > 1) {
                    shared.queries[team].sixteen.store(column, dimension, value);
                    return;
                }
            }
            shared.queries[team].eight.store(column, dimension, value);
        };
        query.scale(call.scale);
        query.each(store);
        if (piece.has_split(piece.splits[token].count - 1)) {
            Pairs own_key;
#pragma unroll
            for (int pair = 0; pair < Pairs::PAIRS; ++pair) {
                const bool has = Pairs::has(pair);
                own_key.first[pair] = has ? shared.own_keys[token][Pairs::index(pair)] : 0.0f;
                own_key.second[pair] = has ? shared.own_keys[token][Pairs::index(pair) + Pairs::HALF] : 0.0f;
            }
            const float own_score = query.dot(own_key);
            if (lane == 0) shared.own_scores[place] = own_score;
        }
    }
    sync_threads_of<ATTENDING>(ATTENDING_BARRIER);  // queries and own scores are written
}
