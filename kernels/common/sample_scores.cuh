// sample_scores: applies mask, biases, bans and penalties to one row's logits, as llmcli/sampling/penalties.py does.
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
    return (sampler.presence_penalty != 0) | (sampler.frequency_penalty != 0);
}

// The steps before the filters that act on the token after `length` others. Every thread has the same.
struct Before {
    bool is_forced;  // then only the mask acts, of the others
    bool uses_mask, uses_history, uses_bias, suppresses_begin, bans_ends;

    // With | instead of ||, so that no read waits for another.
    __device__ __forceinline__ Before(const RowSampler& sampler, int length) {
        const int num_new_tokens = length - sampler.num_prompt_tokens;
        const bool is_penalized = (sampler.repetition_penalty != 1) | (sampler.encoder_repetition_penalty != 1) |
                                  counts_generated(sampler) | (sampler.uses_dry != 0);
        is_forced = length == sampler.forced_position;
        uses_mask = sampler.uses_mask != 0;
        uses_history = (is_penalized | (sampler.num_sequences > 0)) & !is_forced;
        uses_bias = sampler.uses_bias != 0;
        suppresses_begin = (sampler.suppresses_begin != 0) & (num_new_tokens == 0);
        bans_ends =
            (sampler.uses_ends != 0) & ((sampler.ignores_ends != 0) | (num_new_tokens < sampler.min_new_tokens));
    }
    __device__ __forceinline__ bool is_any() const {
        return uses_mask | is_forced | uses_history | uses_bias | suppresses_begin | bans_ends;
    }
    __device__ __forceinline__ bool uses_marks() const { return is_forced | suppresses_begin | bans_ends; }
};

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

// Whether the text ends in the token ids begin ... end - 1 of the table.
__device__ __forceinline__ bool ends_in(const Row& row, const int* history, int length, int begin, int end) {
    const int num_ids = end - begin;
    if (num_ids > length) return false;
    for (int i = 0; i < num_ids; ++i) {
        if (history[length - num_ids + i] != row.sequence_ids()[begin + i]) return false;
    }
    return true;
}

// For each token that ends a sequence begun by the text: put the sum of the sequences' biases into `keys`, which are
// overwritten later. The thread of a token's first sequence adds up all of them, in their order.
__device__ __forceinline__ void match_sequences(const Row& row, const int* history, int length, int first_thread,
                                                int num_threads) {
    const Sequence* sequences = row.sequences();
    const int num_sequences = row.sampler().num_sequences;
    for (int i = first_thread; i < num_sequences; i += num_threads) {
        const int token_id = sequences[i].token_id;
        if (i > 0 && sequences[i - 1].token_id == token_id) continue;
        double amount = 0;
        bool is_any = false;
        for (int j = i; sequences[j].token_id == token_id; ++j) {  // the last one's token is none
            if (!ends_in(row, history, length, sequences[j].ids_begin, sequences[j + 1].ids_begin)) continue;
            amount = __dadd_rn(amount, sequences[j].bias);
            is_any = true;
        }
        if (!is_any) continue;
        row.keys()[token_id] = __double_as_longlong(amount);
        atomicOr(&row.seen()[token_id], HAS_SEQUENCE);
    }
}

// Fill `seen` and `repeats`, which must be zero, for each token of the history.
__device__ __forceinline__ void scan_history(const Row& row, const int* history, int length) {
    const RowSampler& sampler = row.sampler();
    const int first_thread = blockIdx.x * BLOCK_SIZE + threadIdx.x;
    const int num_threads = gridDim.x * BLOCK_SIZE;
    if (sampler.num_sequences > 0) match_sequences(row, history, length, first_thread, num_threads);
    if (sampler.encoder_repetition_penalty != 1) {
        const int num_prompt_tokens = min(length, sampler.num_prompt_tokens);
        for (int i = first_thread; i < num_prompt_tokens; i += num_threads)
            atomicOr(&row.seen()[history[i]], IN_PROMPT);
    }
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

__device__ __forceinline__ double weaken(double score, double penalty) {
    return add_clipped(score < 0 ? __dmul_rn(score, penalty) : __ddiv_rn(score, penalty), 0.0);
}

// The four penalties and DRY; leaves `repeats` zero.
__device__ __forceinline__ double penalize(const Row& row, int token_id, unsigned seen, double score) {
    const RowSampler& sampler = row.sampler();
    if (seen & IN_PROMPT) score = weaken(score, __ddiv_rn(1.0, sampler.encoder_repetition_penalty));
    if (seen & SEEN) score = weaken(score, sampler.repetition_penalty);
    const unsigned count = seen & COUNT_MASK;
    if (count != 0) {
        score = add_clipped(score, -sampler.presence_penalty);
        score = add_clipped(score, __dmul_rn(-sampler.frequency_penalty, static_cast<double>(count)));
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

// Apply the steps before the filters to a token's score, and return whether it may still be chosen. Note in `problems`
// which of these steps left the token.
__device__ __forceinline__ double weigh(const Row& row, const Before& before, int token_id, double score, bool& is_left,
                                        unsigned& problems) {
    const unsigned char mark = before.uses_marks() ? row.marks()[token_id] : 0;
    if (before.uses_mask) is_left = is_left && row.mask()[token_id / 32] >> token_id % 32 & 1;
    problems |= is_left ? LEFT_BY_MASK : 0;
    if (before.is_forced) {
        problems |= is_left ? LEFT_BY_BANS : 0;
        is_left = is_left && mark & IS_FORCED;
        return 0;
    }
    if (before.uses_bias && is_left) {
        const double bias = row.bias()[token_id];
        is_left = bias > -infinity();
        score = add_clipped(score, bias);
    }
    problems |= is_left ? LEFT_BY_BIAS : 0;
    unsigned seen = 0;
    if (before.uses_history) {
        seen = __ldcg(&row.seen()[token_id]);
        if (seen != 0) row.seen()[token_id] = 0;
        if (seen & HAS_SEQUENCE) {
            const double bias = __longlong_as_double(__ldcg(&row.keys()[token_id]));
            is_left =
                is_left && bias > -infinity();  // biases of both infinities add up to NaN, which bans as on the host
            score = add_clipped(score, bias);
        }
    }
    problems |= is_left ? LEFT_BY_SEQUENCES : 0;
    is_left = is_left && !(before.suppresses_begin && mark & IS_SUPPRESSED);
    problems |= is_left ? LEFT_BY_BEGIN : 0;
    is_left = is_left && !(before.bans_ends && mark & IS_END);
    problems |= is_left ? LEFT_BY_ENDS : 0;
    return before.uses_history ? penalize(row, token_id, seen, score) : score;
}

// What a logit shows about its row.
__device__ __forceinline__ unsigned problems_of(float logit) {
    return (logit > -infinity() ? HAS_FINITE : logit != logit ? HAS_NAN : 0) |
           (logit == infinity() ? HAS_INFINITE : 0);
}

// Note what a warp has found in RowState::problems; without steps before the filters, none of them bans a token.
template <bool HAS_STEPS_BEFORE>
__device__ __forceinline__ void note_problems(const Row& row, unsigned problems) {
    if (!HAS_STEPS_BEFORE && problems & HAS_LEFT) problems |= LEFT_BY_BANS;
    problems = __reduce_or_sync(0xffffffffu, problems);
    if (threadIdx.x % 32 == 0 && problems != 0) atomicOr(&row.state().problems, problems);
}

// Write the key of every token's score, 0 for those that must not be chosen, note problems, and return this thread's
// best. Without steps before the filters nothing comes between the reads.
template <bool HAS_STEPS_BEFORE>
__device__ __forceinline__ Best score_tokens(const Row& row, const Before& before, const float* logits) {
    const bool is_greedy = row.sampler().temperature == 0;
    unsigned problems = 0;
    Best best{0, ~0ull};
#pragma unroll(HAS_STEPS_BEFORE ? 1 : 4)
    for (int id = blockIdx.x * BLOCK_SIZE + threadIdx.x; id < row.vocab_size; id += gridDim.x * BLOCK_SIZE) {
        const float logit = logits[id];
        double score = logit;
        bool is_left = logit > -infinity();  // false for NaN
        problems |= problems_of(logit);
        if (HAS_STEPS_BEFORE) score = weigh(row, before, id, score, is_left, problems);
        const Word key = is_left ? key_of(score) : 0;
        problems |= is_left ? HAS_LEFT : 0;
        if (!is_greedy) row.keys()[id] = key;
        best = Better::combine(best, Best{key, static_cast<Word>(id)});
    }
    note_problems<HAS_STEPS_BEFORE>(row, problems);
    return best;
}

// Does what score_tokens<false> does for a greedy row, in four instructions a token. Rows begin at multiples of 16
// bytes if the vocabulary is a multiple of 4: then a thread takes four neighbouring tokens at a time.
__device__ __forceinline__ Best find_highest(const Row& row, const float* logits) {
    float highest = -infinity(), unusual = 0.0f;
    int highest_id = -1;
    const auto take = [&](int id, float logit) {
        unusual = __fmaf_rn(logit, 0.0f, unusual);  // NaN once there was a NaN or an infinity
        if (logit > highest) highest = logit, highest_id = id;
    };
    const int width = row.vocab_size % 4 == 0 ? 4 : 1;
    const int first = width * (blockIdx.x * BLOCK_SIZE + threadIdx.x), stride = width * gridDim.x * BLOCK_SIZE;
    if (width == 4) {
#pragma unroll 4
        for (int id = first; id < row.vocab_size; id += stride) {
            const float4 four = *reinterpret_cast<const float4*>(logits + id);
            take(id, four.x), take(id + 1, four.y), take(id + 2, four.z), take(id + 3, four.w);
        }
    } else {
#pragma unroll 4
        for (int id = first; id < row.vocab_size; id += stride) take(id, logits[id]);
    }
    unsigned problems = highest_id < 0 ? 0 : HAS_FINITE | HAS_LEFT;
    if (unusual != unusual) {  // look again at this thread's own tokens
        for (int id = first; id < row.vocab_size; id += stride) {
            for (int i = 0; i < width; ++i) problems |= problems_of(logits[id + i]);
        }
    }
    note_problems<false>(row, problems);
    if (highest_id < 0) return Best{0, ~0ull};
    return Best{key_of(highest), static_cast<Word>(highest_id)};
}

// The number of the problem that stops the row, or 0: NaN, infinite or only -inf logits; the ban that left nothing.
__device__ __forceinline__ unsigned first_problem(unsigned problems) {
    if (problems & HAS_NAN) return 1;
    if (problems & HAS_INFINITE) return 2;
    unsigned number = 3;
    for (unsigned stage = HAS_FINITE; stage <= HAS_LEFT; stage *= 2, ++number) {
        if (!(problems & stage)) return number;
    }
    return 0;
}

}  // namespace sampling
