// span_prepare: what a block of attention_span does before it attends, with queries and the new tokens' keys and
// values; and what it does after it: merge splits.
#pragma once

#include "common/arrival.cuh"
#include "common/launch.cuh"
#include "common/span_block.cuh"

constexpr int BLOCK_BARRIER = 1, ATTENDING_BARRIER = 2;  // of all threads, and of those that attend

template <typename KvT>
struct SpanCall : LaneCall<KvT> {
    // The place in `partials` and `out` of a column's head.
    __device__ __forceinline__ size_t head_of(const Span& span, const SpanColumn& column) const {
        return size_t(span.first_lane + column.token) * this->num_attention_heads + column.head;
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
    if (older_end > 0) older_page = load_here(call.pages(span.row) + span.new_begin() / PAGE_TOKENS);
#pragma unroll
    for (int i = 0; i < NEW; ++i) {
        Pairs::load_angles(call.cos_sin, span.position + (exists(i) ? new_token(i) : 0), new_angles[i]);
        const int number = (span.position + new_token(i)) / PAGE_TOKENS;
        new_pages[i] = exists(i) ? load_here(call.pages(span.row) + number) : 0;
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

// How blocks merge the parts of a head's splits, as attention_decode does.

// This block merges the splits of all columns of a piece; their parts are visible.
template <typename Memory>
__device__ __forceinline__ void merge_all(const SpanCall<typename Memory::KvT>& call, const Memory& shared,
                                          const SpanPiece& piece) {
    constexpr int HEAD_DIM = Memory::HEAD_DIM, VECTORS = HEAD_DIM / 4;
    for (int i = number_here(threadIdx.x); i < piece.columns * VECTORS; i += Memory::ATTENDING) {
        const SpanColumn column = SpanColumn::of(i / VECTORS, piece, shared.table.group);
        const int count = piece.splits[column.token].count, vector = i % VECTORS;
        if (count == 1) continue;
        const size_t head = call.head_of(piece.span, column);
        const float* parts = call.partials + head * call.max_splits * PART_SIZE<HEAD_DIM>;
        call.out.store(head * HEAD_DIM + 4 * vector, merge_splits<HEAD_DIM>(parts, count, vector));
    }
}

// This block merges its share of a piece's columns and dimensions; all parts are visible. A warp takes 32 dimensions of
// a column at a time. The ring is free now, and the warp fills its share of it with their parts. Mostly all of them
// fit, so it waits for one round trip.
template <typename Memory>
__device__ __forceinline__ void merge_share(const SpanCall<typename Memory::KvT>& call, Memory& shared,
                                            const SpanPiece& piece, const SpanMergers& mergers) {
    constexpr int HEAD_DIM = Memory::HEAD_DIM, UNITS = HEAD_DIM / 32, PART = PART_SIZE<HEAD_DIM>;
    static_assert(HEAD_DIM % 32 == 0, "warps take whole units");
    constexpr int UNIT_BYTES = 32 * sizeof(float) + sizeof(float2);  // of a part: values; maximum and sum
    constexpr int ROOM = Memory::RING_BYTES / (Memory::ATTENDING_WARPS * UNIT_BYTES);
    constexpr int AT_ONCE = ROOM / PARTS_AT_ONCE * PARTS_AT_ONCE;  // parts
    static_assert(AT_ONCE > 0, "the ring has room");
    const int warp = number_here(threadIdx.x) / 32, lane = threadIdx.x % 32;
    float* values = reinterpret_cast<float*>(shared.ring + warp * AT_ONCE * UNIT_BYTES);  // [AT_ONCE][32]
    float2* found = reinterpret_cast<float2*>(values + AT_ONCE * 32);                     // [AT_ONCE]
    const int units = piece.columns * UNITS, end = units * (mergers.rank + 1) / mergers.count;
    for (int unit = units * mergers.rank / mergers.count + warp; unit < end; unit += Memory::ATTENDING_WARPS) {
        const SpanColumn column = SpanColumn::of(unit / UNITS, piece, shared.table.group);
        const int count = piece.splits[column.token].count, begin = unit % UNITS * 32;
        if (count == 1) continue;
        const size_t head = call.head_of(piece.span, column);
        const float* parts = call.partials + head * call.max_splits * PART;
        SplitMerge merged;
        for (int first = 0; first < count; first += AT_ONCE) {
            const int some = min(AT_ONCE, count - first);
            for (int i = lane; i < 8 * some; i += 32) {
                const float* part = parts + (first + i / 8) * PART;
                copy_async(shared_address(values + 4 * i), part + begin + 4 * (i % 8));
            }
            for (int i = lane; i < some; i += 32) {
                const float* part = parts + (first + i) * PART;
                copy_async_small<sizeof(float2)>(shared_address(found + i), part + HEAD_DIM, true);
            }
            copy_async_commit();
            copy_async_wait<0>();
            __syncwarp();
            for (int done = 0; done < some; done += PARTS_AT_ONCE) {
                merged.add(
                    some - done, [&](int j) { return found[done + j]; },
                    [&](int j) { return make_float4(values[32 * (done + j) + lane], 0.0f, 0.0f, 0.0f); });
            }
            __syncwarp();  // before others are copied
        }
        call.out.store(head * HEAD_DIM + begin + lane, merged.result().x);
    }
}

// What a block does when it has written its parts of a piece of several splits. If there are few, or if blocks are
// small and do not all run at once, the block that writes its parts last merges all of them. Large blocks run at once
// and share many splits. Those with work after this piece only signal that their parts are written; the others wait
// until all are. Waiting costs half a microsecond, which does not pay for few splits.
template <typename Memory>
__device__ __forceinline__ void merge_piece(const SpanCall<typename Memory::KvT>& call, Memory& shared,
                                            const SpanPiece& piece) {
    constexpr bool ALL_RUN = Memory::TEAMS > 1;
    sync_threads_of<Memory::ATTENDING>(ATTENDING_BARRIER);  // the block's parts are written
    unsigned* counter = call.counters + call.head_of(piece.span, shared.columns[0]);
    const unsigned arriving = piece.end_split - piece.first_split, most = piece.most_splits;
    if constexpr (ALL_RUN) {
        if (piece.has_all_splits()) return merge_all(call, shared, piece);
        if (most > PARTS_AT_ONCE) {
            if (threadIdx.x == 0) announce(counter, arriving);
            if (!piece.is_last) return;
            const SpanMergers mergers(shared.table, piece);
            if (threadIdx.x == 0) {
                wait_for_arrivals(counter, most);
                leave(counter, most + mergers.count - 1);  // 0 again for the next launch, when all have seen this
            }
            sync_threads_of<Memory::ATTENDING>(ATTENDING_BARRIER);
            return merge_share(call, shared, piece, mergers);
        }
    }
    if (threadIdx.x == 0) {
        shared.is_last = arrive_with(counter, arriving) + arriving == most;
        if (shared.is_last) *counter = 0;  // for the next launch
    }
    sync_threads_of<Memory::ATTENDING>(ATTENDING_BARRIER);
    if (shared.is_last) merge_all(call, shared, piece);
}
