// sample_state: what the sampler keeps on the card for each KV row, and how a row's blocks wait for each other.
//
// A row's state is one stretch of bytes, laid out by struct Row. llmcli/kernels/sample_token.py knows its size, and
// where the host writes: the RowSampler, and bias and marks of each token.
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

constexpr unsigned SEEN = 1u << 31;  // in `seen`; the bits below count the occurrences in the generated text
constexpr unsigned char IS_END = 1;  // in `marks`
constexpr unsigned char IS_BREAKER = 2;

// In RowState::problems: what the row's logits are and what bias and bans left of them.
constexpr unsigned HAS_NAN = 1, HAS_INFINITE = 2, HAS_FINITE = 4, HAS_UNBANNED = 8, HAS_LEFT = 16;
// A result is step << 32 | token id, or with this bit | number of the problem.
constexpr unsigned IS_PROBLEM = 1u << 31;

// A row's parameters as the host packs them; a step that is off has its neutral value.
struct RowSampler {
  double temperature, top_p, log_min_p, typical_p, xtc_probability, xtc_threshold;
  double repetition_penalty, presence_penalty, frequency_penalty;
  double dry_amounts[NUM_DRY_AMOUNTS];  // what to add for each further repeated token: -multiplier * base^i
  Word seed;
  unsigned sample_index;
  int top_k, penalty_window, num_prompt_tokens, min_new_tokens;
  int dry_window, dry_allowed_length, uses_dry;
  int uses_bias, uses_ends, ignores_ends;
  unsigned step;  // runs since the host packed this; counted by the device
};
static_assert(sizeof(RowSampler) == 648, "sample_token.py packs this many bytes");

// Zero between runs.
struct RowState {
  Word highest;       // the largest key
  unsigned arrivals;  // of blocks at barriers
  unsigned finished;  // blocks
  unsigned problems;
  unsigned unused[27];
};
static_assert(sizeof(RowState) == 128, "a line of its own");

// What the blocks of a row add up between two barriers. Only integers: their sums do not depend on the order.
struct Round {
  Word masses[NUM_BINS];
  unsigned counts[NUM_BINS];
  Word highest;        // key of a survivor
  Word total, moment;  // of all survivors: mass, and mass times -score
  Word least_viable;   // complement of the bits of a probability
  Word likeliest_end;  // bits of a probability
  unsigned num_members, unused;
  Word padding[10];
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

  static constexpr size_t STATE = 768;  // behind the sampler
  static constexpr size_t ROUNDS = STATE + sizeof(RowState);
  static constexpr size_t MEMBERS = ROUNDS + 3 * sizeof(Round);
  static constexpr size_t FINALISTS = MEMBERS + MAX_MEMBERS * sizeof(Member);
  static constexpr size_t TOKENS = FINALISTS + MAX_BLOCKS * sizeof(Best);
  static_assert(sizeof(RowSampler) <= STATE && TOKENS == 88320, "sample_token.py reserves this many bytes");

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

  __device__ __forceinline__ RowSampler& sampler() const { return *reinterpret_cast<RowSampler*>(memory); }
  __device__ __forceinline__ RowState& state() const { return *reinterpret_cast<RowState*>(memory + STATE); }
  __device__ __forceinline__ Round* rounds() const { return reinterpret_cast<Round*>(memory + ROUNDS); }
  __device__ __forceinline__ Member* members() const { return reinterpret_cast<Member*>(memory + MEMBERS); }
  __device__ __forceinline__ Best* finalists() const { return reinterpret_cast<Best*>(memory + FINALISTS); }

  __device__ __forceinline__ Round& current() const { return rounds()[num_rounds % 3]; }
  __device__ __forceinline__ Round& previous() const { return rounds()[(num_rounds + 2) % 3]; }

  // All writes before it, of all blocks of the row, are seen by all of them after it. All run at once, since the grid
  // has no more blocks than there are multiprocessors.
  __device__ __forceinline__ void barrier() {
    ++num_barriers;
    __syncthreads();  // the writes of the whole block are before thread 0's arrival
    if (threadIdx.x == 0) arrive_and_wait(&state().arrivals, num_barriers * gridDim.x);
    __syncthreads();  // nobody reads before thread 0 has seen all arrive
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
struct AddWords {
  static __device__ __forceinline__ Word combine(Word a, Word b) { return a + b; }
  static __device__ __forceinline__ void set_identity(Word& value) { value = 0; }
};

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

}  // namespace sampling
