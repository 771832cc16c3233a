// span_merge: how blocks of attention_span merge the parts of a head's splits, as attention_decode does.
#pragma once

#include "common/arrival.cuh"
#include "common/span_prepare.cuh"

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
// a column at a time, and copies as many of their parts at once as fit its share of the ring, which is free. Mostly
// that is all of them, so it waits for one round trip.
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
        merged.clear();
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
