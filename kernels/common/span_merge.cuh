// span_merge: how blocks of attention_span put the parts of a head's splits together, as attention_decode does.
#pragma once

#include "common/arrival.cuh"
#include "common/span_prepare.cuh"

// This block puts together all splits of a piece, whose parts are visible.
template <typename Memory>
__device__ __forceinline__ void merge_all(const SpanCall<typename Memory::KvT>& call, Memory& shared,
                                          const SpanPiece& piece) {
    constexpr int HEAD_DIM = Memory::HEAD_DIM, VECTORS = HEAD_DIM / 4;
    for (int i = number_here(threadIdx.x); i < Memory::COLUMNS * VECTORS; i += Memory::ATTENDING) {
        const SpanColumn column = shared.columns[i / VECTORS];
        if (column.token < 0) continue;
        const int count = piece.splits[column.token].count;
        const size_t head = call.head_of(piece.span, column);
        if (count == 1) continue;
        *reinterpret_cast<float4*>(call.out + head * HEAD_DIM + 4 * (i % VECTORS)) =
            merge_splits<HEAD_DIM>(call.partials + head * call.max_splits * PART_SIZE<HEAD_DIM>, count, i % VECTORS);
    }
}

// This block puts its share of a piece's columns and vectors together; all parts are visible. A thread asks for as many
// parts of its vector at once as the ring has room for, which is free: mostly for all, so it waits for one round trip.
template <typename Memory>
__device__ __forceinline__ void merge_share(const SpanCall<typename Memory::KvT>& call, Memory& shared,
                                            const SpanPiece& piece, const SpanMergers& mergers) {
    constexpr int HEAD_DIM = Memory::HEAD_DIM, VECTORS = HEAD_DIM / 4;
    constexpr int PART_BYTES = sizeof(float4) + sizeof(float2);  // in the ring: values; maximum and sum
    constexpr int ROOM = Memory::RING_BYTES / (PART_BYTES * PARTS_AT_ONCE);
    const int items = piece.columns * VECTORS;
    const int begin = items * mergers.rank / mergers.count, end = items * (mergers.rank + 1) / mergers.count;
    const int threads = min(min(end - begin, Memory::ATTENDING), ROOM);
    const int at_once = ROOM / max(threads, 1) * PARTS_AT_ONCE;  // parts
    const int thread = number_here(threadIdx.x);
    if (thread >= threads) return;
    float4* values = reinterpret_cast<float4*>(shared.ring);  // [at_once][threads]
    float2* found = reinterpret_cast<float2*>(values + at_once * threads) + thread;
    values += thread;
    for (int i = begin + thread; i < end; i += threads) {
        const SpanColumn column = SpanColumn::of(i / VECTORS, piece, shared.table.group);
        const int count = piece.splits[column.token].count, vector = i % VECTORS;
        if (count == 1) continue;
        const size_t head = call.head_of(piece.span, column);
        const float* parts = call.partials + head * call.max_splits * PART_SIZE<HEAD_DIM>;
        SplitMerge merged;
        merged.clear();
        for (int first = 0; first < count; first += at_once) {
            const int some = min(at_once, count - first);
            for (int j = 0; j < some; ++j) {
                const float* part = parts + size_t(first + j) * PART_SIZE<HEAD_DIM>;
                copy_async(shared_address(values + j * threads), part + 4 * vector);
                copy_async_small<sizeof(float2)>(shared_address(found + j * threads), part + HEAD_DIM, true);
            }
            copy_async_commit();
            copy_async_wait<0>();
            for (int j = 0; j < some; j += PARTS_AT_ONCE) {
                merged.add(
                    some - j, [&](int k) { return found[(j + k) * threads]; },
                    [&](int k) { return values[(j + k) * threads]; });
            }
        }
        *reinterpret_cast<float4*>(call.out + head * HEAD_DIM + 4 * vector) = merged.result();
    }
}

// What a block does when it has written its parts of a piece of several splits. Small blocks do not all run at once.
// The one whose splits are the last to be written puts all of them together. Large blocks run at once. Those that have
// work behind this piece only tell that their parts are written. The others wait until all are, and share them out.
template <typename Memory>
__device__ __forceinline__ void merge_piece(const SpanCall<typename Memory::KvT>& call, Memory& shared,
                                            const SpanPiece& piece) {
    constexpr bool ALL_RUN = Memory::TEAMS > 1;
    sync_threads_of<Memory::ATTENDING>(ATTENDING_BARRIER);  // the block's parts are written
    unsigned* counter = call.counters + call.head_of(piece.span, shared.columns[0]);
    const unsigned arriving = piece.end_split - piece.first_split, most = piece.most_splits;
    if constexpr (ALL_RUN) {
        if (piece.has_all_splits()) return merge_all(call, shared, piece);
        if (threadIdx.x == 0) announce(counter, arriving);
        if (!piece.is_last) return;
        const SpanMergers mergers(shared.table, piece);
        if (threadIdx.x == 0) {
            wait_for_arrivals(counter, most);
            leave(counter, most + mergers.count - 1);  // 0 again for the next launch, when all have seen this
        }
        sync_threads_of<Memory::ATTENDING>(ATTENDING_BARRIER);
        merge_share(call, shared, piece, mergers);
    } else {
        if (threadIdx.x == 0) {
            shared.is_last = arrive_with(counter, arriving) + arriving == most;
            if (shared.is_last) *counter = 0;  // for the next launch
        }
        sync_threads_of<Memory::ATTENDING>(ATTENDING_BARRIER);
        if (shared.is_last) merge_all(call, shared, piece);
    }
}
