// sample_state: the sampler's state on the card for each KV row, and the barrier of a row's blocks.
//
// A row's state is one stretch of bytes, laid out by struct Row. llmcli/kernels/sample_token.py has its size, and where
// the host writes: the RowSampler, bias, marks and mask of each token, and the sequences that have a bias.
#pragma once

#include "common/arrival.cuh"

namespace sampling {

using Word = unsigned long long;

constexpr int BLOCK_SIZE = 512;
constexpr int NUM_BINS = 2048;
constexpr int MAX_MEMBERS = BLOCK_SIZE;
constexpr int MAX_BLOCKS = 64;
constexpr int NUM_DRY_AMOUNTS = 65;
constexpr int NUM_RESULTS = 16;
constexpr int MAX_SEQUENCE_IDS = 8192;  // of all sequences of a row

// In `seen`: in the penalty's window, in the prompt, with a bias in `keys`; below, the occurrences in generated text.
constexpr unsigned SEEN = 1u << 31, IN_PROMPT = 1u << 30, HAS_SEQUENCE = 1u << 29;
constexpr unsigned COUNT_MASK = HAS_SEQUENCE - 1;
// In `marks`.
constexpr unsigned char IS_END = 1, IS_BREAKER = 2, IS_SUPPRESSED = 4, IS_FORCED = 8;

// Bits of RowState::problems: what the row's logits contain; then, for each ban in order, whether it left a token.
constexpr unsigned HAS_NAN = 1, HAS_INFINITE = 2, HAS_FINITE = 4;
constexpr unsigned LEFT_BY_MASK = 8, LEFT_BY_BIAS = 16, LEFT_BY_SEQUENCES = 32, LEFT_BY_BEGIN = 64, LEFT_BY_ENDS = 128;
constexpr unsigned HAS_LEFT = 256;
constexpr unsigned LEFT_BY_BANS = LEFT_BY_MASK | LEFT_BY_BIAS | LEFT_BY_SEQUENCES | LEFT_BY_BEGIN | LEFT_BY_ENDS;
// A result is step << 32 | token id, or with this bit | number of the problem.
constexpr unsigned IS_PROBLEM = 1u << 31;

// The steps at a temperature above 0. TEXT_SURPRISE follows mirostat: the drawn token moves its mu.
enum Step : unsigned char {
  NO_STEP, TEMPERATURE, TOP_N_SIGMA, TOP_K, TOP_P, MIN_P, TYPICAL_P, XTC, MIROSTAT, TEXT_SURPRISE
};
constexpr int MAX_STEPS = 16;

// A row's parameters as the host packs them; a step that is off has its neutral value.
struct RowSampler {
  double temperature, dynatemp_low, dynatemp_high, dynatemp_exponent, top_n_sigma, top_p, log_min_p, typical_p;
  double xtc_probability, xtc_threshold, mirostat_tau, mirostat_eta;
  double mirostat_mu;  // before the next draw; the device updates it
  double encoder_repetition_penalty, repetition_penalty, presence_penalty, frequency_penalty;
  double dry_amounts[NUM_DRY_AMOUNTS];  // what to add for each further repeated token: -multiplier * base^i
  Word seed;
  unsigned sample_index;
  int top_k, penalty_window, num_prompt_tokens, min_new_tokens;
  int dry_window, dry_allowed_length, uses_dry;
  int uses_bias, uses_ends, ignores_ends, suppresses_begin;
  int forced_position;  // -1: nowhere
  int num_sequences;
  int uses_mask;  // the host sends it and a mask before each run that has one
  unsigned step;  // of the last run, modulo 2^32; the device adds one, the host sets where it continues
  Step steps[MAX_STEPS];  // those that are on, in their order; NO_STEP ends them
};
static_assert(sizeof(RowSampler) == 744, "sample_token.py packs this many bytes");

// A sequence with a bias. The table is in the order of token ids and ends with one more, of token id -1.
struct Sequence {
  double bias;
  int token_id;   // its last
  int ids_begin;  // where the ids before the last begin; they end where the next sequence's begin
};
static_assert(sizeof(Sequence) == 16, "sample_token.py packs this many bytes");

// Zero between runs.
struct RowState {
  Word highest;       // the largest key
  unsigned arrivals;  // of blocks at barriers
  unsigned finished;  // blocks
  unsigned problems;
  unsigned unused[27];
};
static_assert(sizeof(RowState) == 128, "a line of its own");

// A sum of numbers from 0 to 1, in units of 2^-44; the rest that this rounds off, in units of 2^-87. The sum of 2^19
// numbers fits, and is as good as exact.
struct FixedSum {
  Word whole, rest;

  __device__ __forceinline__ void add(double value) {
    const double units = value * 0x1p44;
    const Word nearest = __double2ull_rn(units);
    whole += nearest;
    rest += static_cast<Word>(__double2ll_rn((units - __ull2double_rn(nearest)) * 0x1p43));
  }
  __device__ __forceinline__ FixedSum operator+(const FixedSum& other) const {
    return {whole + other.whole, rest + other.rest};
  }
  __device__ __forceinline__ double value() const {
    return __ull2double_rn(whole) * 0x1p-44 + __ll2double_rn(static_cast<long long>(rest)) * 0x1p-87;
  }
};

// The sums over all survivors of a row.
struct Sums {
  FixedSum total, moment;
  Word count;

  __device__ __forceinline__ Sums operator+(const Sums& other) const {
    return {total + other.total, moment + other.moment, count + other.count};
  }
};

// The sums of a row's blocks between two barriers. Only integers: their sums do not depend on the order.
struct Round {
  Word masses[NUM_BINS];
  unsigned counts[NUM_BINS];
  Word extreme;        // key of the highest survivor, or complement of that of the lowest
  Sums sums;
  Word least_viable;   // complement of the bits of a probability
  Word likeliest_end;  // bits of a probability
  unsigned num_members, unused;
  Word padding[7];
};
static_assert(sizeof(Round) == 24704 && sizeof(Round) % 128 == 0, "sample_token.py reserves this many bytes");

// A token that may be the one at which a selection ends.
struct Member {
  Word order, mass;
  unsigned token_id, unused;
};

// A score or race with its token; no token has key 0.
struct Best {
  Word key;
  Word token_id;
};

// One row's state, seen by one of the blocks that work on it. Its parts are found by their offsets: pointers to all of
// them would fill the registers.
struct Row {
  unsigned char* memory;
  int vocab_size;
  unsigned num_barriers;
  unsigned num_rounds;  // that are over

  static constexpr size_t STATE = 768;  // after the sampler
  static constexpr size_t ROUNDS = STATE + sizeof(RowState);
  static constexpr size_t MEMBERS = ROUNDS + 3 * sizeof(Round);
  static constexpr size_t FINALISTS = MEMBERS + MAX_MEMBERS * sizeof(Member);
  static constexpr size_t SEQUENCES = FINALISTS + MAX_BLOCKS * sizeof(Best);
  static constexpr size_t SEQUENCE_IDS = SEQUENCES + (MAX_SEQUENCE_IDS + 1) * sizeof(Sequence);
  static constexpr size_t TOKENS = SEQUENCE_IDS + MAX_SEQUENCE_IDS * sizeof(int) + 112;
  static_assert(sizeof(RowSampler) <= STATE, "the state is behind it");
  static_assert(SEQUENCES == 88320 && SEQUENCE_IDS == 219408 && TOKENS == 252288, "sample_token.py knows these");
  static_assert(TOKENS % 128 == 0, "the arrays begin with a line of their own");

  // What a row holds for each token; the arrays have room for a multiple of 16 tokens, which keeps them aligned.
  template <typename T>
  __device__ __forceinline__ T* of_tokens(size_t bytes_before) const {
    const size_t num_tokens = (static_cast<size_t>(vocab_size) + 15) / 16 * 16;
    return reinterpret_cast<T*>(memory + TOKENS + bytes_before * num_tokens);
  }
  __device__ __forceinline__ Word* keys() const { return of_tokens<Word>(0); }
  __device__ __forceinline__ const double* bias() const { return of_tokens<double>(8); }
  __device__ __forceinline__ unsigned* seen() const { return of_tokens<unsigned>(16); }
  __device__ __forceinline__ int* repeats() const { return of_tokens<int>(20); }
  __device__ __forceinline__ const unsigned char* marks() const { return of_tokens<unsigned char>(24); }
  // Bit t % 32 of word t / 32: whether the schema allows token t.
  __device__ __forceinline__ const unsigned* mask() const { return of_tokens<unsigned>(25); }

  __device__ __forceinline__ RowSampler& sampler() const { return *reinterpret_cast<RowSampler*>(memory); }
  __device__ __forceinline__ RowState& state() const { return *reinterpret_cast<RowState*>(memory + STATE); }
  __device__ __forceinline__ Round* rounds() const { return reinterpret_cast<Round*>(memory + ROUNDS); }
  __device__ __forceinline__ Member* members() const { return reinterpret_cast<Member*>(memory + MEMBERS); }
  __device__ __forceinline__ Best* finalists() const { return reinterpret_cast<Best*>(memory + FINALISTS); }
  __device__ __forceinline__ const Sequence* sequences() const {
    return reinterpret_cast<const Sequence*>(memory + SEQUENCES);
  }
  __device__ __forceinline__ const int* sequence_ids() const {
    return reinterpret_cast<const int*>(memory + SEQUENCE_IDS);
  }

  // Gives this thread's tokens and their keys to `take`.
  template <typename Take>
  __device__ __forceinline__ void each(Take take) const {
    for (int id = blockIdx.x * BLOCK_SIZE + threadIdx.x; id < vocab_size; id += gridDim.x * BLOCK_SIZE) {
      take(id, keys()[id]);
    }
  }

  __device__ __forceinline__ Round& current() const { return rounds()[num_rounds % 3]; }
  __device__ __forceinline__ Round& previous() const { return rounds()[(num_rounds + 2) % 3]; }

  // All writes before it, of all blocks of the row, are seen by all of them after it. All run at once, since the grid
  // has no more blocks than there are multiprocessors.
  __device__ __forceinline__ void barrier() {
    ++num_barriers;
    __syncthreads();  // the writes of the whole block are before thread 0's arrival
    if (threadIdx.x == 0) {
      announce(&state().arrivals, 1);
      wait_for_arrivals(&state().arrivals, num_barriers * gridDim.x);
    }
    __syncthreads();  // no thread reads before thread 0 has seen all arrive
  }

  // The end of the current round: `previous` may be read until the next end. Three rounds take turns: the one cleared
  // here was read before the last barrier, and is added to after this one.
  __device__ __forceinline__ void end_round() {
    Word* cleared = reinterpret_cast<Word*>(&rounds()[(num_rounds + 1) % 3]);
    const int num_words = sizeof(Round) / sizeof(Word);
    for (int i = blockIdx.x * BLOCK_SIZE + threadIdx.x; i < num_words; i += gridDim.x * BLOCK_SIZE) cleared[i] = 0;
    barrier();
    ++num_rounds;
  }
};

// Whether this block is the last of its row to end; it alone then sees `finalists` complete.
__device__ __forceinline__ bool is_last_block(const Row& row, const Best& best) {
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    row.finalists()[blockIdx.x] = best;
    is_last = arrive(&row.state().finished, ~0u) == gridDim.x - 1;
  }
  __syncthreads();  // the answer is written
  return is_last;
}

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// Keys order doubles as unsigned integers: a larger number has a larger key, and -0 that of 0. No number has key 0.
__device__ __forceinline__ Word key_of(double value) {
  const Word bits = __double_as_longlong(__dadd_rn(value, 0.0));  // -0 + 0 is 0
  return bits >> 63 ? ~bits : bits | 1ull << 63;
}

__device__ __forceinline__ double value_of(Word key) {
  return __longlong_as_double(key >> 63 ? key & ~(1ull << 63) : ~key);
}

// Operations for reduce.cuh.
struct LargerWord {
  static __device__ __forceinline__ Word combine(Word a, Word b) { return a > b ? a : b; }
  static __device__ __forceinline__ void set_identity(Word& value) { value = 0; }
};

// The higher key wins, of equals the lower token id.
struct Better {
  static __device__ __forceinline__ Best combine(Best a, Best b) {
    return a.key > b.key || (a.key == b.key && a.token_id < b.token_id) ? a : b;
  }
  static __device__ __forceinline__ void set_identity(Best& value) { value = Best{0, ~0ull}; }
};

__device__ __forceinline__ Best shuffle_xor(Best value, int mask) {
  return Best{__shfl_xor_sync(0xffffffffu, value.key, mask), __shfl_xor_sync(0xffffffffu, value.token_id, mask)};
}
__device__ __forceinline__ FixedSum shuffle_xor(const FixedSum& value, int mask) {
  return FixedSum{__shfl_xor_sync(0xffffffffu, value.whole, mask), __shfl_xor_sync(0xffffffffu, value.rest, mask)};
}
__device__ __forceinline__ Sums shuffle_xor(const Sums& value, int mask) {
  return Sums{shuffle_xor(value.total, mask), shuffle_xor(value.moment, mask),
              __shfl_xor_sync(0xffffffffu, value.count, mask)};
}

}  // namespace sampling
