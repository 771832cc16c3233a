// sample_scores: what bias, bans and penalties make of one row's logits, as llmcli/sampling/penalties.py has them.
//
// Products and sums are rounded one by one, as on the host, so the scores have its bits.
#pragma once

#include "common/sample_state.cuh"

namespace sampling {

constexpr double LARGEST_SCORE = 1e300;

__device__ __forceinline__ double add_clipped(double score, double amount) {
  return fmin(fmax(__dadd_rn(score, amount), -LARGEST_SCORE), LARGEST_SCORE);
}

__device__ __forceinline__ bool counts_generated(const RowSampler& sampler) {
  return sampler.presence_penalty != 0 || sampler.frequency_penalty != 0;
}

__device__ __forceinline__ bool uses_history(const RowSampler& sampler) {
  return sampler.repetition_penalty != 1 || counts_generated(sampler) || sampler.uses_dry;
}

// Where the last `window` of `length` tokens begin; a window of 0 is all.
__device__ __forceinline__ int window_start(int length, int window) {
  return window > 0 && window < length ? length - window : 0;
}

// How many tokens up to `place` equal the last tokens of the text, up to `limit`. A breaker ends it.
__device__ __forceinline__ int repeated_length(const Row& row, const int* history, int length, int place, int limit) {
  int repeated = 0;
  while (repeated < limit) {
    const int token_id = history[length - 1 - repeated];
    if (history[place - repeated] != token_id || row.marks()[token_id] & IS_BREAKER) break;
    ++repeated;
  }
  return repeated;
}

// Note in `seen` and `repeats`, which are zero before, what the penalties need to know of each token of the history.
__device__ __forceinline__ void scan_history(const Row& row, const int* history, int length) {
  const RowSampler& sampler = row.sampler();
  const int first_thread = blockIdx.x * BLOCK_SIZE + threadIdx.x;
  const int num_threads = gridDim.x * BLOCK_SIZE;
  const int start = window_start(length, sampler.penalty_window);
  if (sampler.repetition_penalty != 1) {
    for (int i = start + first_thread; i < length; i += num_threads) atomicOr(&row.seen()[history[i]], SEEN);
  }
  if (counts_generated(sampler)) {
    const int generated = max(start, sampler.num_prompt_tokens);
    for (int i = generated + first_thread; i < length; i += num_threads) atomicAdd(&row.seen()[history[i]], 1u);
  }
  if (sampler.uses_dry) {
    const int dry_start = window_start(length, sampler.dry_window);
    const int longest = sampler.dry_allowed_length + NUM_DRY_AMOUNTS - 1;
    for (int i = dry_start + first_thread; i < length - 1; i += num_threads) {
      const int repeated = repeated_length(row, history, length, i, min(longest, i - dry_start + 1));
      const int following = history[i + 1];
      if (repeated >= sampler.dry_allowed_length && !(row.marks()[following] & IS_BREAKER)) {
        atomicMax(&row.repeats()[following], repeated);
      }
    }
  }
}

// The three penalties and DRY; leaves `seen` and `repeats` zero.
__device__ __forceinline__ double penalize(const Row& row, int token_id, double score) {
  const RowSampler& sampler = row.sampler();
  const unsigned seen = __ldcg(&row.seen()[token_id]);
  if (seen != 0) {
    row.seen()[token_id] = 0;
    if (seen & SEEN) {
      const double penalty = sampler.repetition_penalty;
      score = add_clipped(score < 0 ? __dmul_rn(score, penalty) : __ddiv_rn(score, penalty), 0.0);
    }
    const unsigned count = seen & ~SEEN;
    if (count != 0) {
      score = add_clipped(score, -sampler.presence_penalty);
      score = add_clipped(score, __dmul_rn(-sampler.frequency_penalty, static_cast<double>(count)));
    }
  }
  if (sampler.uses_dry) {
    const int repeated = __ldcg(&row.repeats()[token_id]);
    if (repeated != 0) {
      row.repeats()[token_id] = 0;
      score = add_clipped(score, sampler.dry_amounts[repeated - sampler.dry_allowed_length]);
    }
  }
  return score;
}

// Write the key of every token's score, 0 for those that must not be chosen, note what is wrong in RowState::problems,
// and return this thread's best.
__device__ __forceinline__ Best score_tokens(const Row& row, const float* logits, int length) {
  const RowSampler& sampler = row.sampler();
  const bool is_penalized = uses_history(sampler);
  const int num_new_tokens = length - sampler.num_prompt_tokens;
  const bool bans_ends = sampler.uses_ends && (sampler.ignores_ends || num_new_tokens < sampler.min_new_tokens);
  const bool is_plain = !is_penalized && !sampler.uses_bias && !bans_ends;
  const bool is_greedy = sampler.temperature == 0;
  unsigned problems = 0;
  Best best{0, ~0ull};
#pragma unroll 4
  for (int id = blockIdx.x * BLOCK_SIZE + threadIdx.x; id < row.vocab_size; id += gridDim.x * BLOCK_SIZE) {
    const float logit = logits[id];
    double score = logit;
    bool is_left = logit > -infinity();  // false for NaN
    problems |= is_left ? HAS_FINITE : logit != logit ? HAS_NAN : 0;
    problems |= logit == infinity() ? HAS_INFINITE : 0;
    if (!is_plain) {
      if (sampler.uses_bias && is_left) {
        const double bias = row.bias()[id];
        is_left = bias > -infinity();
        score = add_clipped(score, bias);
      }
      problems |= is_left ? HAS_UNBANNED : 0;
      is_left = is_left && !(bans_ends && row.marks()[id] & IS_END);
      if (is_penalized) score = penalize(row, id, score);
    }
    const Word key = is_left ? key_of(score) : 0;
    problems |= is_left ? HAS_LEFT : 0;
    if (!is_greedy) row.keys()[id] = key;
    best = Better::combine(best, Best{key, static_cast<Word>(id)});
  }
  if (is_plain && problems & HAS_LEFT) problems |= HAS_UNBANNED;
  problems = __reduce_or_sync(0xffffffffu, problems);
  if (threadIdx.x % 32 == 0 && problems != 0) atomicOr(&row.state().problems, problems);
  return best;
}

// The number of the problem that stops the row, or 0: NaN, infinite or only -inf logits; bias or ban leaves nothing.
__device__ __forceinline__ unsigned first_problem(unsigned problems) {
  if (problems & HAS_NAN) return 1;
  if (problems & HAS_INFINITE) return 2;
  if (!(problems & HAS_FINITE)) return 3;
  if (!(problems & HAS_UNBANNED)) return 4;
  return problems & HAS_LEFT ? 0 : 5;
}

}  // namespace sampling
