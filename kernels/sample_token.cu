// sample_token: a row's next token, by the whole sampler chain       Source: llmcli/sampling/chain.py and what it cites
// Shapes:   logits [num_tokens, vocab_size] float; rows, positions, token_ids [num_tokens] int; history [num_rows,
//           max_seq_len] int; state [num_rows, row_bytes] (common/sample_state.cuh); results [num_rows, NUM_RESULTS]
//           64-bit words of host memory. positions, token_ids, history, state are changed.
// Requires: rows all different; positions[i] that of the row's last token; vocab_size <= 2^19; grid no larger than the
//           number of multiprocessors, so that all blocks run at once; state zero before the first run but for what
//           the host packs
// Launch:   grid (blocks per row, num_tokens), block 512, 25 KiB static shared memory; waits by itself when overlapped
// Traffic:  per row 4 * vocab_size bytes; above temperature 0 also 8 * vocab_size written, and read back from L2 in
//           each pass: temperature 2, top_k and top_p 2 each, typical_p 3, XTC 2 or 3 where it acts
// Numerics: scores rounded one by one as on the host; probabilities are integers of 2^-44 of the largest, whose sums
//           have no order: the same bits with any number of blocks. The token is the host's unless two of its sums or
//           races lie within about 1e-11 of each other.
// Choice:   one launch whose blocks wait for each other, so that a step that is off costs nothing; rejected: a kernel
//           a step (about 12 in the graph, most of them empty), sorting (many passes over what one histogram tells)
#include "common/launch.cuh"
#include "common/philox.cuh"
#include "common/reduce.cuh"
#include "common/sample_scores.cuh"
#include "common/sample_select.cuh"
#include "common/sample_state.cuh"

namespace sampling {

// Move the highest score to 0 and divide by the temperature.
__device__ __forceinline__ void temper(const Row& row) {
  const double highest = value_of(__ldcg(&row.state().highest));
  const double temperature = row.sampler().temperature;
  for (int id = blockIdx.x * BLOCK_SIZE + threadIdx.x; id < row.vocab_size; id += gridDim.x * BLOCK_SIZE) {
    const Word key = row.keys()[id];
    if (key != 0) row.keys()[id] = key_of(__ddiv_rn(__dadd_rn(value_of(key), -highest), temperature));
  }
}

// The highest score of all that are kept.
__device__ __forceinline__ double find_highest(Row& row, const Kept& kept) {
  Word highest = 0;
  for (int id = blockIdx.x * BLOCK_SIZE + threadIdx.x; id < row.vocab_size; id += gridDim.x * BLOCK_SIZE) {
    const Word key = row.keys()[id];
    if (kept.holds_before_xtc(key, id)) highest = LargerWord::combine(highest, key);
  }
  highest = reduce::over_block<LargerWord, BLOCK_SIZE>(highest);
  if (threadIdx.x == 0) atomicMax(&row.current().highest, highest);
  row.end_round();
  return value_of(__ldcg(&row.previous().highest));
}

struct Sums {
  double total;   // of exp(score - kept.highest)
  double moment;  // of that times kept.highest - score
};

__device__ __forceinline__ Sums sum_masses(Row& row, const Kept& kept) {
  Word total = 0, moment = 0;
  for (int id = blockIdx.x * BLOCK_SIZE + threadIdx.x; id < row.vocab_size; id += gridDim.x * BLOCK_SIZE) {
    const Word key = row.keys()[id];
    if (!kept.holds_before_xtc(key, id)) continue;
    const double score = __dadd_rn(value_of(key), -kept.highest);
    const Word mass = mass_of(score);
    total += mass;
    if (mass != 0) moment += __double2ull_rn(__dmul_rn(exp(score) * MASS_ONE, -score));
  }
  total = reduce::over_block<AddWords, BLOCK_SIZE>(total);
  moment = reduce::over_block<AddWords, BLOCK_SIZE>(moment);
  if (threadIdx.x == 0) {
    atomicAdd(&row.current().total, total);
    atomicAdd(&row.current().moment, moment);
  }
  row.end_round();
  return Sums{__ull2double_rn(__ldcg(&row.previous().total)) / MASS_ONE,
              __ull2double_rn(__ldcg(&row.previous().moment)) / MASS_ONE};
}

// Exclude all tokens of at least the threshold but the least probable of them, unless one of them ends the text.
__device__ __forceinline__ void exclude_top_choices(Row& row, Kept& kept) {
  if (kept.reach < infinity()) kept.highest = find_highest(row, kept);  // else it is 0
  kept.total = sum_masses(row, kept).total;
  const double threshold = row.sampler().xtc_threshold;
  Word least_viable = 0, likeliest_end = 0;
  for (int id = blockIdx.x * BLOCK_SIZE + threadIdx.x; id < row.vocab_size; id += gridDim.x * BLOCK_SIZE) {
    const Word key = row.keys()[id];
    if (!kept.holds_before_xtc(key, id)) continue;
    const double probability = kept.probability(key);
    const Word bits = __double_as_longlong(probability);  // in the order of the numbers, none being negative
    if (probability >= threshold) least_viable = LargerWord::combine(least_viable, ~bits);
    if (row.sampler().uses_ends && row.marks()[id] & IS_END) likeliest_end = LargerWord::combine(likeliest_end, bits);
  }
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

enum Filter { TOP_K, TOP_P, MIN_P, TYPICAL_P, NUM_FILTERS };

__device__ __forceinline__ bool is_on(const RowSampler& sampler, int filter, int vocab_size) {
  if (filter == TOP_K) return sampler.top_k > 0 && sampler.top_k < vocab_size;
  if (filter == TOP_P) return sampler.top_p < 1;
  return filter == MIN_P ? sampler.log_min_p > -infinity() : sampler.typical_p < 1;
}

// The filters, in the order of the chain.
__device__ __forceinline__ Kept filter_candidates(
    Row& row, const philox::Stream& stream, Scratch& scratch, Crossing& crossing) {
  const RowSampler& sampler = row.sampler();
  Kept kept{1, ~0u, 0.0, infinity(), 0.0, 1.0, infinity()};
#pragma unroll 1  // one copy of the long code of a selection
  for (int filter = TOP_K; filter < NUM_FILTERS; ++filter) {
    if (!is_on(sampler, filter, row.vocab_size)) continue;
    if (filter == MIN_P) {  // the highest score, 0, is always left
      const Word least_key = key_of(sampler.log_min_p);
      if (least_key > kept.least_key) kept.last_id = ~0u;
      kept.least_key = max(kept.least_key, least_key);
      continue;
    }
    if (filter == TYPICAL_P) {
      const Sums sums = sum_masses(row, kept);
      kept.center = -sums.moment / sums.total;
    }
    const Selection selection{filter == TYPICAL_P, filter == TOP_K, filter == TOP_P};
    const double fraction = filter == TOP_P ? sampler.top_p : sampler.typical_p;
    const End end = select(row, kept, selection, fraction, filter == TOP_K ? sampler.top_k : 0, scratch, crossing);
    if (filter == TYPICAL_P) {
      kept.reach = __longlong_as_double(end.order);
    } else {
      kept.least_key = ~end.order;
      kept.last_id = end.token_id;
    }
  }
  const unsigned long long coin = philox::random_bits(stream, 0, philox::PURPOSE_XTC);
  if (philox::uniform(coin) < sampler.xtc_probability) exclude_top_choices(row, kept);
  return kept;
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
  for (int id = blockIdx.x * BLOCK_SIZE + threadIdx.x; id < row.vocab_size; id += gridDim.x * BLOCK_SIZE) {
    const Word key = row.keys()[id];
    if (!kept.holds(key, id)) continue;
    const unsigned long long bits = philox::random_bits(stream, id, philox::PURPOSE_NOISE);
    const float estimate = static_cast<float>(value_of(key)) + philox::gumbel_estimate(bits);
    if (estimate > likeliest || likeliest_id < 0) {
      second = likeliest;
      likeliest = estimate;
      likeliest_id = id;
    } else {
      second = fmaxf(second, estimate);
    }
  }
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

// Whether this block is the last of its row to end; it alone then sees `finalists` complete.
__device__ __forceinline__ bool is_last_block(const Row& row, const Best& best) {
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    row.finalists()[blockIdx.x] = best;
    is_last = arrive(&row.state().finished, ~0u) == gridDim.x - 1;
  }
  __syncthreads();  // the answer is there
  return is_last;
}

}  // namespace sampling

// A block has its multiprocessor to itself; unless told so, compilers before CUDA 13.4 keep to 64 registers and spill.
__global__ void __launch_bounds__(sampling::BLOCK_SIZE, 1) sample_token(
    const float* __restrict__ logits, const int* __restrict__ rows, int* __restrict__ positions,
    int* __restrict__ token_ids, int* __restrict__ history, unsigned char* __restrict__ state,
    unsigned long long* __restrict__ results, int vocab_size, int max_seq_len, unsigned long long row_bytes) {
  using namespace sampling;
  __shared__ Scratch scratch;
  __shared__ Crossing crossing;
  grid_dependency_wait();
  grid_dependency_launch();  // all blocks run by now, so what starts next cannot keep one of them out
  const int index = blockIdx.y;
  const int kv_row = rows[index];
  Row row{state + kv_row * row_bytes, vocab_size, 0, 0};
  history += static_cast<size_t>(kv_row) * max_seq_len;
  const int length = positions[index] + 1;

  if (uses_history(row.sampler())) {
    scan_history(row, history, length);
    row.barrier();
  }
  Best best = score_tokens(row, logits + static_cast<size_t>(index) * vocab_size, length);
  best = reduce::over_block<Better, BLOCK_SIZE>(best);
  if (row.sampler().temperature > 0) {
    if (threadIdx.x == 0) atomicMax(&row.state().highest, best.key);
    row.barrier();
    if (first_problem(__ldcg(&row.state().problems)) == 0) {
      temper(row);
      const philox::Stream stream{row.sampler().seed, row.sampler().sample_index, static_cast<unsigned>(length)};
      const Kept kept = filter_candidates(row, stream, scratch, crossing);
      best = reduce::over_block<Better, BLOCK_SIZE>(draw(row, kept, stream));
    }
  }

  if (!is_last_block(row, best)) return;
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
  const unsigned problem = first_problem(__ldcg(&row.state().problems));
  const unsigned token_id = static_cast<unsigned>(best.token_id);
  if (problem == 0 && length < max_seq_len) {  // of a full row the token is only told
    history[length] = token_id;
    token_ids[index] = token_id;
    positions[index] = length;
  }
  const unsigned step = row.sampler().step + 1;
  row.sampler().step = step;
  // One store, so that the host sees the token whenever it sees the step.
  *static_cast<volatile Word*>(&results[kv_row * NUM_RESULTS + step % NUM_RESULTS]) =
      static_cast<Word>(step) << 32 | (problem != 0 ? IS_PROBLEM | problem : token_id);
  row.state() = RowState{};
}
