// sample_token: a row's next token, by the whole sampler chain       Source: llmcli/sampling/chain.py and what it cites
// Shapes:   logits [num_tokens, vocab_size] float; rows, positions [num_tokens] int, row -1: an unused lane,
//           which reads and writes nothing else; token_ids [num_rows], history [num_rows, max_seq_len] int; state
//           [num_rows, row_bytes] (common/sample_state.cuh); results [num_rows, 2, NUM_RESULTS] 64-bit words of host
//           memory; next_row, draft int or null. positions, token_ids, history, state and next_row are changed.
// Requires: rows all different but for -1; positions[i] is that of the row's last token; vocab_size <= 2^19. With
//           several blocks a row the grid has at most as many as there are multiprocessors, so that all run at once.
//           Before the first run the state is zero but for what the host packs. With next_row there is one lane
// Launch:   grid (blocks per row, num_tokens), block 512, 25 KiB static shared memory; waits by itself when overlapped
// Traffic:  per row 4 * vocab_size bytes; above temperature 0 also 8 * vocab_size written, and read back from L2 in
//           each pass: temperature 2 (dynamic 3), top_n_sigma 3, top_k and top_p 2 each, typical_p 3, XTC 2 where it
//           acts, mirostat 2, and one before a step that follows typical_p or XTC
// Numerics: scores rounded one by one as on the host; probabilities are integers of 2^-44 of the largest, whose sums
//           have no order: the same bits with any number of blocks. The token is the host's unless two of its sums or
//           races lie within about 1e-11 of each other.
// Choice:   One launch whose blocks wait for each other, so a step that is off costs nothing. Rejected: a kernel a step
//           (about 12 in the graph, most of them empty); sorting (many passes where one histogram is enough)
#include "common/launch.cuh"
#include "common/load.cuh"
#include "common/philox.cuh"
#include "common/reduce.cuh"
#include "common/sample_scores.cuh"
#include "common/sample_select.cuh"
#include "common/sample_state.cuh"

namespace sampling {

constexpr double LN_2 = 0.6931471805599453;

// After typical_p or XTC: set the key of every removed token to 0, so `kept` is again a highest score and a least key.
__device__ __forceinline__ void settle(Row& row, Kept& kept) {
  Word highest = 0;
  row.each([&](int id, Word key) {
    if (key == 0) return;
    if (kept.holds(key, id)) {
      highest = LargerWord::combine(highest, key);
    } else {
      row.keys()[id] = 0;
    }
  });
  kept = Kept::all(value_of(find_extreme(row, highest)));
}

// Move the highest score to 0 and divide by the temperature.
__device__ __forceinline__ void temper(Row& row, Kept& kept, const Sums& sums) {
  const RowSampler& sampler = row.sampler();
  double temperature = sampler.temperature;
  if (sums.count > 1) temperature = dynamic_temperature(sampler, sums);
  row.each([&](int id, Word key) {
    if (key == 0) return;
    const double score = kept.relative(key);
    // A dynamic temperature may be 0: all but the highest become -inf.
    const Word tempered = key_of(score == 0 ? 0.0 : __ddiv_rn(score, temperature));
    row.keys()[id] = kept.starts_with(key, id) ? tempered : 0;
  });
  kept = Kept::all(0.0);
}

// Keep the scores of at least the highest minus n times the standard deviation of those that are finite.
__device__ __forceinline__ void keep_near_highest(Row& row, Kept& kept) {
  Word complement = 0;
  row.each([&](int id, Word key) {
    if (kept.starts_with(key, id) && value_of(key) > -infinity()) {
      complement = LargerWord::combine(complement, ~key);
    }
  });
  const double largest = fmax(-kept.relative(~find_extreme(row, complement)), 1.0);
  const Sums sums = sum_up(row, kept, DISTANCES, largest, 0.0);
  const double count = __ull2double_rn(sums.count);
  const double mean = __ddiv_rn(sums.total.value(), count);
  const double variance = __ddiv_rn(sum_up(row, kept, DEVIATIONS, largest, mean).total.value(), count);
  const double sigma = __dmul_rn(__dsqrt_rn(variance), largest);
  kept.raise(key_of(__dadd_rn(kept.highest, -__dmul_rn(row.sampler().top_n_sigma, sigma))));
}

// Exclude all tokens of at least the threshold but the least probable of them, unless one of them ends the text.
__device__ __forceinline__ void exclude_top_choices(Row& row, Kept& kept) {
  const double threshold = row.sampler().xtc_threshold;
  Word least_viable = 0, likeliest_end = 0;
  row.each([&](int id, Word key) {
    if (!kept.starts_with(key, id)) return;
    const double probability = kept.probability(key);
    const Word bits = __double_as_longlong(probability);  // in the order of the numbers, none being negative
    if (probability >= threshold) least_viable = LargerWord::combine(least_viable, ~bits);
    if (row.sampler().uses_ends && row.marks()[id] & IS_END) likeliest_end = LargerWord::combine(likeliest_end, bits);
  });
  least_viable = reduce::over_block<LargerWord, BLOCK_SIZE>(least_viable);
  likeliest_end = reduce::over_block<LargerWord, BLOCK_SIZE>(likeliest_end);
  if (threadIdx.x == 0) {
    atomicMax(&row.current().least_viable, least_viable);
    atomicMax(&row.current().likeliest_end, likeliest_end);
  }
  row.end_round();
  const Word complement = __ldcg(&row.previous().least_viable);
  if (complement != 0 && __ldcg(&row.previous().likeliest_end) <= ~complement) {
    kept.most = __longlong_as_double(~complement);
  }
}

// top_k, top_p, typical_p: keep this many tokens, or this much of the mass.
__device__ __forceinline__ void keep_until(
    Row& row, Kept& kept, Step step, const Sums& sums, Scratch& scratch, Crossing& crossing) {
  const RowSampler& sampler = row.sampler();
  if (step == TYPICAL_P) kept.center = __dadd_rn(kept.highest, -__ddiv_rn(sums.moment.value(), kept.total));
  const Selection selection{step == TYPICAL_P, step == TOP_K, step == TOP_P};
  const double fraction = step == TOP_P ? sampler.top_p : sampler.typical_p;
  const End end = select(row, kept, selection, fraction, step == TOP_K ? sampler.top_k : 0, scratch, crossing);
  if (step == TYPICAL_P) {
    kept.reach = __longlong_as_double(end.order);
  } else {
    kept.raise(~end.order, end.token_id);
  }
}

// The temperature and the filters that are on, in the row's order. All blocks of the row must call it.
__device__ __forceinline__ Kept filter_candidates(
    Row& row, const philox::Stream& stream, double highest, Scratch& scratch, Crossing& crossing) {
  const RowSampler& sampler = row.sampler();
  Kept kept = Kept::all(highest);
#pragma unroll 1  // one copy of the long code of a selection
  for (int i = 0; i < MAX_STEPS; ++i) {
    const Step step = sampler.steps[i];
    if (step == NO_STEP) break;
    if (step == XTC) {
      const unsigned long long coin = philox::random_bits(stream, 0, philox::PURPOSE_XTC);
      if (philox::uniform(coin) >= sampler.xtc_probability) continue;
    }
    if (!kept.is_settled()) settle(row, kept);
    Sums sums{};
    const bool is_weighing = step == TYPICAL_P || step == XTC || step == MIROSTAT || step == TEXT_SURPRISE;
    if (is_weighing || (step == TEMPERATURE && sampler.dynatemp_low != sampler.dynatemp_high)) {
      sums = sum_up(row, kept, MASSES, 1.0, 0.0);
      kept.total = sums.total.value();
    }
    if (step == TEMPERATURE) {
      temper(row, kept, sums);
    } else if (step == TOP_N_SIGMA) {
      keep_near_highest(row, kept);
    } else if (step == MIN_P) {  // the highest score always stays
      kept.raise(key_of(__dadd_rn(kept.highest, sampler.log_min_p)));
    } else if (step == XTC) {
      exclude_top_choices(row, kept);
    } else if (step == MIROSTAT) {
      // Keep the tokens whose surprise is at most mu; if there is none, keep the likeliest.
      const double cut = __dadd_rn(log(kept.total), -__dmul_rn(sampler.mirostat_mu, LN_2));
      kept.raise(key_of(__dadd_rn(kept.highest, fmin(cut, 0.0))));
    } else if (step != TEXT_SURPRISE) {
      keep_until(row, kept, step, sums, scratch, crossing);
    }
  }
  return kept;
}

// Mirostat's next mu: mu - eta * (surprise - tau). The surprise is the token's, in bits, among the kept ones.
__device__ __forceinline__ double next_mu(const Row& row, const Kept& kept, unsigned token_id) {
  const RowSampler& sampler = row.sampler();
  const double score = kept.relative(__ldcg(&row.keys()[token_id]));
  const double surprise = __ddiv_rn(__dadd_rn(log(kept.total), -score), LN_2);
  const double excess = __dadd_rn(surprise, -sampler.mirostat_tau);
  return add_clipped(sampler.mirostat_mu, -__dmul_rn(sampler.mirostat_eta, excess));
}

__device__ __forceinline__ Best run_race(const Row& row, const philox::Stream& stream, int id) {
  const double noise = philox::gumbel(philox::random_bits(stream, id, philox::PURPOSE_NOISE));
  return Best{key_of(__dadd_rn(value_of(row.keys()[id]), noise)), static_cast<Word>(id)};
}

// The highest score plus noise among this thread's candidates, if it can be the block's: the logarithms in double
// precision are taken only where an estimate leaves a chance, which is once or twice a block.
__device__ __forceinline__ Best draw(const Row& row, const Kept& kept, const philox::Stream& stream) {
  float likeliest = -infinity(), second = -infinity();
  int likeliest_id = -1;
  row.each([&](int id, Word key) {
    if (!kept.holds(key, id)) return;
    const unsigned long long bits = philox::random_bits(stream, id, philox::PURPOSE_NOISE);
    const float estimate = static_cast<float>(kept.relative(key)) + philox::gumbel_estimate(bits);
    if (estimate > likeliest || likeliest_id < 0) {
      second = likeliest;
      likeliest = estimate;
      likeliest_id = id;
    } else {
      second = fmaxf(second, estimate);
    }
  });
  const float least = block_max<BLOCK_SIZE>(likeliest) - 2 * philox::GUMBEL_ERROR;
  Best best{0, ~0ull};
  if (likeliest_id >= 0 && likeliest >= least) {
    best = run_race(row, stream, likeliest_id);
    if (second >= least) {
      for (int id = blockIdx.x * BLOCK_SIZE + threadIdx.x; id < row.vocab_size; id += gridDim.x * BLOCK_SIZE) {
        if (kept.holds(row.keys()[id], id)) best = Better::combine(best, run_race(row, stream, id));
      }
    }
  }
  return best;
}

}  // namespace sampling

// A block has its multiprocessor to itself; unless told so, compilers before CUDA 13.4 use 64 registers and spill.
__global__ void __launch_bounds__(sampling::BLOCK_SIZE, 1) sample_token(
    const float* __restrict__ logits, const int* __restrict__ rows, int* __restrict__ positions,
    int* __restrict__ token_ids, int* __restrict__ history, unsigned char* __restrict__ state,
    unsigned long long* __restrict__ results, int* next_row, const int* draft, int vocab_size, int max_seq_len,
    unsigned long long row_bytes) {
  using namespace sampling;
  __shared__ Scratch scratch;
  __shared__ Crossing crossing;
  grid_dependency_wait();
  grid_dependency_launch();  // takes effect when all blocks run, so the next kernel keeps none of them out
  const int index = blockIdx.y;
  const int kv_row = load_here(rows + index), length = load_here(positions + index) + 1;
  if (kv_row < 0) {
    if (next_row != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *next_row = -1;
    return;
  }
  Row row{state + kv_row * row_bytes, vocab_size, 0, 0};
  history += static_cast<size_t>(kv_row) * max_seq_len;

  const Before before(row.sampler(), length);
  if (before.uses_history) {
    scan_history(row, history, length);
    row.barrier();
  }
  logits += static_cast<size_t>(index) * vocab_size;
  const bool is_greedy = row.sampler().temperature == 0;
  Best best = before.is_any() ? score_tokens<true>(row, before, logits)
              : is_greedy     ? find_highest(row, logits)
                              : score_tokens<false>(row, before, logits);
  best = reduce::over_block<Better, BLOCK_SIZE>(best);
  Kept kept = Kept::all(0.0);
  if (row.sampler().temperature > 0) {
    if (threadIdx.x == 0) atomicMax(&row.state().highest, best.key);
    row.barrier();
    if (first_problem(__ldcg(&row.state().problems)) == 0) {
      const philox::Stream stream{row.sampler().seed, row.sampler().sample_index, static_cast<unsigned>(length)};
      kept = filter_candidates(row, stream, value_of(__ldcg(&row.state().highest)), scratch, crossing);
      best = reduce::over_block<Better, BLOCK_SIZE>(draw(row, kept, stream));
    }
  }

  if (!is_last_block(row, best)) return;
  // Load everything left to read together: drafts are chosen one after the other, so round trips add up.
  const bool is_told = threadIdx.x == 0, has_draft = is_told && next_row != nullptr;
  const int problems = is_told ? load_here(reinterpret_cast<const int*>(&row.state().problems)) : 0;
  const int steps_before = is_told ? load_here(reinterpret_cast<const int*>(&row.sampler().step)) : 0;
  const int draft_id = has_draft ? load_here(draft) : 0;
  best = Best{0, ~0ull};
  if (threadIdx.x < gridDim.x) {
    const Best* finalist = &row.finalists()[threadIdx.x];
    best = Best{__ldcg(&finalist->key), __ldcg(&finalist->token_id)};
  }
  best = reduce::over_block<Better, BLOCK_SIZE>(best);
  if (row.num_rounds > 0) {  // the next run begins with this one
    Word* first_round = reinterpret_cast<Word*>(&row.rounds()[0]);
    for (int i = threadIdx.x; i < sizeof(Round) / sizeof(Word); i += BLOCK_SIZE) first_round[i] = 0;
  }
  if (threadIdx.x != 0) return;
  const unsigned problem = first_problem(problems);
  const unsigned token_id = static_cast<unsigned>(best.token_id);
  const bool moves = problem == 0 && length < max_seq_len;  // a full row only reports its token
  if (has_draft && !(moves && static_cast<int>(token_id) == draft_id)) *next_row = -1;
  if (moves) {
    history[length] = token_id;
    token_ids[kv_row] = token_id;
    positions[index] = length;
  }
  const unsigned step = steps_before + 1;
  row.sampler().step = step;
  Word* result = &results[kv_row * 2 * NUM_RESULTS + step % NUM_RESULTS];
  if (problem == 0 && row.sampler().mirostat_tau != 0 && row.sampler().temperature > 0) {
    const double mu = next_mu(row, kept, token_id);
    row.sampler().mirostat_mu = mu;
    *static_cast<volatile Word*>(&result[NUM_RESULTS]) = __double_as_longlong(mu);
    __threadfence_system();  // the host sees mu whenever it sees the token
  }
  // One store, so that the host sees the token whenever it sees the step.
  *static_cast<volatile Word*>(result) =
      static_cast<Word>(step) << 32 | (problem != 0 ? IS_PROBLEM | problem : token_id);
  row.state() = RowState{};
}
