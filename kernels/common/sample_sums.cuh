// sample_sums: passes of a row's blocks over its candidates. They find the highest or lowest score, and sums of masses
// and of distances from the highest. Any number of blocks gives the same bits.
#pragma once

#include "common/reduce.cuh"
#include "common/sample_select.cuh"
#include "common/sample_state.cuh"

namespace sampling {

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
    for (int id = blockIdx.x * BLOCK_SIZE + threadIdx.x; id < row.vocab_size; id += gridDim.x * BLOCK_SIZE) {
        const Word key = row.keys()[id];
        if (!kept.starts_with(key, id)) continue;
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
    }
    sums = reduce::over_block<AddSums, BLOCK_SIZE>(sums);
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
