// sample_select: which candidates top_k, top_p and typical_p keep, without sorting them; the highest or lowest score,
// and sums of masses and of distances from the highest.
//
// A selection orders the candidates (by score, highest first, or by distance from the mean score, nearest first) and
// asks for the one at which their masses, summed in this order, reach a target. Candidates fall into bins of 1/64; the
// bin where the sum crosses the target is gathered, and its few members are compared with each other. A bin that is too
// full is split first, by digits of the number and of the token id. Masses are integers, so every sum is exact.
#pragma once

#include "common/reduce.cuh"
#include "common/sample_state.cuh"

namespace sampling {

constexpr int DIGIT_BITS = 11;
constexpr int ID_BITS = 22;
static_assert(1 << DIGIT_BITS == NUM_BINS, "a digit is a bin");

// 2^44: the masses of 2^19 tokens stay below 2^63.
constexpr double MASS_ONE = 0x1p44;

// The candidates that the filters so far have left, besides those with key 0.
struct Kept {
    double highest;  // score; those that a filter starts from include it
    Word least_key;  // of this key the token ids up to last_id
    unsigned last_id;
    double center, reach;  // |score - center| <= reach; infinite while typical_p has not acted
    double total, most;    // exp(score - highest) / total <= most; infinite while XTC has not acted

    static __device__ __forceinline__ Kept all(double highest) {
        return Kept{highest, 1, ~0u, 0.0, infinity(), 1.0, infinity()};
    }
    // Whether it does. What a filter starts from has no bounds but the least key; see settle.
    __device__ __forceinline__ bool is_settled() const { return !(reach < infinity() || most < infinity()); }
    __device__ __forceinline__ bool starts_with(Word key, unsigned token_id) const {
        return key > least_key || (key == least_key && token_id <= last_id);
    }
    __device__ __forceinline__ bool holds(Word key, unsigned token_id) const {
        return starts_with(key, token_id) && (!(reach < infinity()) || fabs(value_of(key) - center) <= reach) &&
               (!(most < infinity()) || probability(key) <= most);
    }
    // Keep what lies above this key as well, and of the key itself the token ids up to this one.
    __device__ __forceinline__ void raise(Word key, unsigned token_id = ~0u) {
        if (key > least_key) {
            least_key = key;
            last_id = token_id;
        } else if (key == least_key) {
            last_id = min(last_id, token_id);
        }
    }
    __device__ __forceinline__ double relative(Word key) const { return __dadd_rn(value_of(key), -highest); }
    __device__ __forceinline__ double probability(Word key) const { return __ddiv_rn(exp(relative(key)), total); }
};

// Of a score relative to the highest; what is below exp(-31.5) rounds to 0.
__device__ __forceinline__ Word mass_of(double score) {
    return score < -31.5 ? 0 : __double2ull_rn(exp(score) * MASS_ONE);
}

struct Selection {
    bool by_distance;  // else by score
    bool by_count;     // every candidate has mass 1
    bool splits_ties;  // of equal candidates the lower token ids come first; else their order does not matter

    __device__ __forceinline__ Word order_of(Word key, const Kept& kept) const {
        return by_distance ? __double_as_longlong(fabs(value_of(key) - kept.center)) : ~key;
    }
    __device__ __forceinline__ int bin_of(Word key, const Kept& kept) const {
        const double value = value_of(key);
        const double bin = by_distance ? fabs(value - kept.center) * 64.0 : fma(value, -64.0, kept.highest * 64.0);
        return bin < NUM_BINS ? static_cast<int>(bin) : NUM_BINS - 1;
    }
    __device__ __forceinline__ Word mass_of_key(Word key, const Kept& kept) const {
        return by_count ? 1 : mass_of(kept.relative(key));
    }
};

// The first digits of the candidates among which the sum crosses the target: bin, bits of order, bits of token id.
struct Prefix {
    int bin, order_bits, id_bits;
    Word order;
    unsigned id;

    __device__ __forceinline__ bool fits(int other_bin, Word other_order, unsigned other_id) const {
        return bin < 0 || (bin == other_bin && (order_bits == 0 || other_order >> (64 - order_bits) == order) &&
                           (id_bits == 0 || other_id >> (ID_BITS - id_bits) == id));
    }
    __device__ __forceinline__ int order_digit_bits() const { return min(DIGIT_BITS, 64 - order_bits); }
    __device__ __forceinline__ int digit(int other_bin, Word other_order, unsigned other_id) const {
        if (bin < 0) return other_bin;
        if (order_bits == 64) return other_id >> (ID_BITS - id_bits - DIGIT_BITS) & (NUM_BINS - 1);
        const int width = order_digit_bits();
        return static_cast<int>(other_order >> (64 - order_bits - width) & ((1ull << width) - 1));
    }
    __device__ __forceinline__ void append(int digit) {
        if (bin < 0) {
            bin = digit;
        } else if (order_bits < 64) {
            const int width = order_digit_bits();
            order = order << width | digit;
            order_bits += width;
        } else {
            id = id << DIGIT_BITS | digit;
            id_bits += DIGIT_BITS;
        }
    }
};

// Where a selection ends: up to this order and, of equal order, this token id.
struct End {
    Word order;
    unsigned token_id;
};

// Shared memory of a selection: first the block's part of the histogram, later the members and what was found.
union Scratch {
    struct {
        Word masses[NUM_BINS];
        unsigned counts[NUM_BINS];
    } histogram;
    Member members[MAX_MEMBERS];
};

struct Crossing {
    Word warp_sums[BLOCK_SIZE / 32];
    Word before;
    unsigned count;
    int digit;
    End end;
};

// Add the candidates that fit the prefix to the round's histogram over the next digit.
__device__ __forceinline__ void count_digits(const Row& row, const Kept& kept, const Selection& selection,
                                             const Prefix& prefix, Scratch& scratch) {
    for (int i = threadIdx.x; i < NUM_BINS; i += BLOCK_SIZE) {
        scratch.histogram.masses[i] = 0;
        scratch.histogram.counts[i] = 0;
    }
    __syncthreads();  // before the first addition
    // The last bin holds all of the far tail, up to the whole vocabulary: one addition a thread, not one a token.
    unsigned num_far = 0;
    Word far_mass = 0;
    row.each([&](int id, Word key) {
        if (!kept.starts_with(key, id)) return;
        const int bin = selection.bin_of(key, kept);
        const Word order = selection.order_of(key, kept);
        if (!prefix.fits(bin, order, id)) return;
        const Word mass = selection.mass_of_key(key, kept);
        const int digit = prefix.digit(bin, order, id);
        if (digit == NUM_BINS - 1) {
            ++num_far;
            far_mass += mass;
            return;
        }
        atomicAdd(&scratch.histogram.counts[digit], 1u);
        if (mass != 0) atomicAdd(&scratch.histogram.masses[digit], mass);
    });
    if (num_far != 0) {
        atomicAdd(&scratch.histogram.counts[NUM_BINS - 1], num_far);
        atomicAdd(&scratch.histogram.masses[NUM_BINS - 1], far_mass);
    }
    __syncthreads();  // all additions are in
    Round& round = row.current();
    for (int i = threadIdx.x; i < NUM_BINS; i += BLOCK_SIZE) {
        const unsigned count = scratch.histogram.counts[i];
        const Word mass = scratch.histogram.masses[i];
        if (count != 0) atomicAdd(&round.counts[i], count);
        if (mass != 0) atomicAdd(&round.masses[i], mass);
    }
}

// The digit at which `before` plus the sums of the last round's histogram crosses the target; `before` becomes the sum
// up to it. In a selection's first histogram the target is still 0, and found from the total. Every thread gets all.
__device__ __forceinline__ int find_crossing(const Row& row, double fraction, int num_kept, Word& target, Word& before,
                                             unsigned& count, Crossing& crossing) {
    constexpr int PER_THREAD = NUM_BINS / BLOCK_SIZE;
    const int first = threadIdx.x * PER_THREAD;
    Word masses[PER_THREAD];
    Word sum = 0;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        masses[i] = __ldcg(&row.previous().masses[first + i]);
        sum += masses[i];
    }
    Word up_to = sum;  // of this thread's lane and those below
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const Word other = __shfl_up_sync(0xffffffffu, up_to, distance);
        if (threadIdx.x % 32 >= distance) up_to += other;
    }
    if (threadIdx.x % 32 == 31) crossing.warp_sums[threadIdx.x / 32] = up_to;
    __syncthreads();  // the sums of all warps are written
    Word running = before + up_to - sum;
    Word total = 0;
    for (int warp = 0; warp < BLOCK_SIZE / 32; ++warp) {
        const Word warp_sum = crossing.warp_sums[warp];
        running += warp < threadIdx.x / 32 ? warp_sum : 0;
        total += warp_sum;
    }
    if (target == 0) {
        // As on the host, the product is rounded to a double: p times a total of ties must come out alike.
        const Word wanted =
            num_kept > 0 ? num_kept : static_cast<Word>(ceil(__dmul_rn(fraction, __ull2double_rn(total))));
        target = min(max(wanted, 1ull), total);
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        if (running < target && target <= running + masses[i]) {
            crossing.digit = first + i;
            crossing.before = running;
            crossing.count = __ldcg(&row.previous().counts[first + i]);
        }
        running += masses[i];
    }
    __syncthreads();  // the one thread has written
    before = crossing.before;
    count = crossing.count;
    return crossing.digit;
}

// Put the candidates that fit the prefix into the row's list.
__device__ __forceinline__ void gather_members(const Row& row, const Kept& kept, const Selection& selection,
                                               const Prefix& prefix) {
    row.each([&](int id, Word key) {
        if (!kept.starts_with(key, id)) return;
        const Word order = selection.order_of(key, kept);
        if (!prefix.fits(selection.bin_of(key, kept), order, id)) return;
        const unsigned place = atomicAdd(&row.current().num_members, 1u);
        row.members()[place] = Member{order, selection.mass_of_key(key, kept), static_cast<unsigned>(id), 0};
    });
}

// Which of the listed members crosses the target: each thread sums what precedes its own.
__device__ __forceinline__ End find_member(const Row& row, Word target, Word before, Scratch& scratch,
                                           Crossing& crossing) {
    const int num_members = static_cast<int>(__ldcg(&row.previous().num_members));
    const Word* source = reinterpret_cast<const Word*>(row.members());
    Word* copy = reinterpret_cast<Word*>(scratch.members);
    for (int i = threadIdx.x; i < num_members * 3; i += BLOCK_SIZE) copy[i] = __ldcg(&source[i]);
    __syncthreads();  // the copy is complete
    if (threadIdx.x < num_members) {
        const Member own = scratch.members[threadIdx.x];
        for (int i = 0; i < num_members; ++i) {
            const Member& other = scratch.members[i];
            const bool precedes =
                other.order < own.order || (other.order == own.order && other.token_id < own.token_id);
            before += precedes ? other.mass : 0;
        }
        if (before < target && target <= before + own.mass) crossing.end = End{own.order, own.token_id};
    }
    __syncthreads();  // the one thread has written
    return crossing.end;
}

// The candidate at which the selection reaches `num_kept` candidates or, if that is 0, a fraction of their mass; where
// ties are not split, with the largest token id. All blocks of the row must call it, and all get the same.
__device__ __forceinline__ End select(Row& row, const Kept& kept, const Selection& selection, double fraction,
                                      int num_kept, Scratch& scratch, Crossing& crossing) {
    Prefix prefix{-1, 0, 0, 0, 0};
    Word target = 0, before = 0;
    unsigned count;
    do {
        if (prefix.order_bits == 64 && !selection.splits_ties) return End{prefix.order, ~0u};
        count_digits(row, kept, selection, prefix, scratch);
        row.end_round();
        prefix.append(find_crossing(row, fraction, num_kept, target, before, count, crossing));
    } while (count > MAX_MEMBERS);
    gather_members(row, kept, selection, prefix);
    row.end_round();
    const End end = find_member(row, target, before, scratch, crossing);
    return End{end.order, selection.splits_ties ? end.token_id : ~0u};
}

// Passes of a row's blocks over its candidates. Any number of blocks gives the same bits.

// The largest word of all threads of the row. All blocks of the row must call it, and all get the same.
__device__ __forceinline__ Word find_extreme(Row& row, Word own) {
    own = reduce::over_block<LargerWord, BLOCK_SIZE>(own);
    if (threadIdx.x == 0) atomicMax(&row.current().extreme, own);
    row.end_round();
    return __ldcg(&row.previous().extreme);
}

// With d = kept.highest - score:
//   MASSES      total: exp(-d); moment: exp(-d) * d
//   DISTANCES   total: d / scale, of finite scores
//   DEVIATIONS  total: (d / scale - mean)^2, of finite scores
enum Quantity { MASSES, DISTANCES, DEVIATIONS };

// Sums over all candidates that `kept` holds; it must be settled. `scale` is at least the largest finite d. All blocks
// of the row must call it, and all get the same.
__device__ __forceinline__ Sums sum_up(Row& row, const Kept& kept, Quantity quantity, double scale, double mean) {
    Sums sums{};
    row.each([&](int id, Word key) {
        if (!kept.starts_with(key, id)) return;
        const double distance = -kept.relative(key);
        if (quantity == MASSES) {
            const double mass = exp(-distance);
            sums.total.add(mass);
            if (mass > 0) sums.moment.add(__dmul_rn(mass, distance));  // 0 * infinity is NaN
            ++sums.count;
        } else if (distance < infinity()) {
            double share = __ddiv_rn(distance, scale);
            if (quantity == DEVIATIONS) {
                const double deviation = __dadd_rn(share, -mean);
                share = __dmul_rn(deviation, deviation);
            }
            sums.total.add(share);
            ++sums.count;
        }
    });
    sums = reduce::over_block<reduce::Sum, BLOCK_SIZE>(sums);
    if (threadIdx.x == 0) {
        Sums& all = row.current().sums;
        atomicAdd(&all.total.whole, sums.total.whole);
        atomicAdd(&all.total.rest, sums.total.rest);
        atomicAdd(&all.moment.whole, sums.moment.whole);
        atomicAdd(&all.moment.rest, sums.moment.rest);
        atomicAdd(&all.count, sums.count);
    }
    row.end_round();
    const Sums& all = row.previous().sums;
    return Sums{{__ldcg(&all.total.whole), __ldcg(&all.total.rest)},
                {__ldcg(&all.moment.whole), __ldcg(&all.moment.rest)},
                __ldcg(&all.count)};
}

// low + (high - low) * (entropy / log(count))^exponent, from the MASSES of at least two candidates.
__device__ __forceinline__ double dynamic_temperature(const RowSampler& sampler, const Sums& masses) {
    const double total = masses.total.value();
    const double entropy = __dadd_rn(log(total), __ddiv_rn(masses.moment.value(), total));
    const double doubt = fmin(fmax(__ddiv_rn(entropy, log(__ull2double_rn(masses.count))), 0.0), 1.0);
    const double exponent = sampler.dynatemp_exponent;
    const double rise = exponent == 1 ? doubt : exp(__dmul_rn(exponent, log(doubt)));
    const double range = __dadd_rn(sampler.dynatemp_high, -sampler.dynatemp_low);
    return __dadd_rn(sampler.dynatemp_low, __dmul_rn(range, rise));
}

}  // namespace sampling
