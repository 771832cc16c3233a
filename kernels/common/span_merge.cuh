// span_merge: how blocks of attention_span put the parts of a head's splits together, as attention_decode does.
#pragma once

#include "common/arrival.cuh"
#include "common/span_prepare.cuh"

// This block puts the vectors begin ... end - 1 of a piece's columns together, whose parts are all visible.
template <typename Memory>
__device__ __forceinline__ void merge_vectors(const SpanCall<typename Memory::KvT>& call, const Memory& shared,
                                              const SpanPiece& piece, int begin, int end) {
    constexpr int HEAD_DIM = Memory::HEAD_DIM, VECTORS = HEAD_DIM / 4;
    for (int i = begin + number_here(threadIdx.x); i < end; i += Memory::ATTENDING) {
        const SpanColumn column = SpanColumn::of(i / VECTORS, piece, shared.table.group);
        const int count = piece.splits[column.token].count, vector = i % VECTORS;
        if (count == 1) continue;
        const size_t head = call.head_of(piece.span, column);
        *reinterpret_cast<float4*>(call.out + head * HEAD_DIM + 4 * vector) =
            merge_splits<HEAD_DIM>(call.partials + head * call.max_splits * PART_SIZE<HEAD_DIM>, count, vector);
    }
}

// What a block does when it has written its parts of a piece of several splits. Where they are few, or blocks are small
// and do not all run at once, the block whose parts are the last to be written puts all of them together. Large blocks
// run at once and share out many splits. Those that have work behind this piece only tell that their parts are written;
// the others wait until all are. To wait costs half a microsecond, which few splits do not make up for.
template <typename Memory>
__device__ __forceinline__ void merge_piece(const SpanCall<typename Memory::KvT>& call, Memory& shared,
                                            const SpanPiece& piece) {
    constexpr bool ALL_RUN = Memory::TEAMS > 1;
    sync_threads_of<Memory::ATTENDING>(ATTENDING_BARRIER);  // the block's parts are written
    unsigned* counter = call.counters + call.head_of(piece.span, shared.columns[0]);
    const unsigned arriving = piece.end_split - piece.first_split, most = piece.most_splits;
    const int vectors = piece.columns * (Memory::HEAD_DIM / 4);
    if (ALL_RUN && most > PARTS_AT_ONCE) {
        if (piece.has_all_splits()) return merge_vectors(call, shared, piece, 0, vectors);
        if (threadIdx.x == 0) announce(counter, arriving);
        if (!piece.is_last) return;
        const SpanMergers mergers(shared.table, piece);
        if (threadIdx.x == 0) {
            wait_for_arrivals(counter, most);
            leave(counter, most + mergers.count - 1);  // 0 again for the next launch, when all have seen this
        }
        sync_threads_of<Memory::ATTENDING>(ATTENDING_BARRIER);
        merge_vectors(call, shared, piece, vectors * mergers.rank / mergers.count,
                      vectors * (mergers.rank + 1) / mergers.count);
    } else {
        if (threadIdx.x == 0) {
            shared.is_last = arrive_with(counter, arriving) + arriving == most;
            if (shared.is_last) *counter = 0;  // for the next launch
        }
        sync_threads_of<Memory::ATTENDING>(ATTENDING_BARRIER);
        if (shared.is_last) merge_vectors(call, shared, piece, 0, vectors);
    }
}
