// philox: random numbers as a function of (seed; token id, position, sample index, purpose), and Gumbel noise of them.
//
// The words are those of llmcli/sampling/chain.py bit for bit, the noise agrees to the rounding of log and log1p.
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3
#pragma once

namespace philox {

constexpr unsigned PURPOSE_NOISE = 0;  // Gumbel noise, one number per token
constexpr unsigned PURPOSE_XTC = 1;    // whether XTC acts, one number per position: the token id is 0

// What all numbers of one row and step have in common.
struct Stream {
    unsigned long long seed;
    unsigned sample_index;
    unsigned position;
};

// 64 random bits: words 0 (low) and 1 (high) of the block.
__device__ __forceinline__ unsigned long long random_bits(const Stream& stream, unsigned token_id, unsigned purpose) {
    unsigned key_0 = static_cast<unsigned>(stream.seed);
    unsigned key_1 = static_cast<unsigned>(stream.seed >> 32);
    unsigned word_0 = token_id, word_1 = stream.position, word_2 = stream.sample_index, word_3 = purpose;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned long long product_0 = 0xD2511F53ull * word_0;
        const unsigned long long product_1 = 0xCD9E8D57ull * word_2;
        word_0 = static_cast<unsigned>(product_1 >> 32) ^ word_1 ^ key_0;
        word_1 = static_cast<unsigned>(product_1);
        word_2 = static_cast<unsigned>(product_0 >> 32) ^ word_3 ^ key_1;
        word_3 = static_cast<unsigned>(product_0);
        key_0 += 0x9E3779B9u;
        key_1 += 0xBB67AE85u;
    }
    return static_cast<unsigned long long>(word_1) << 32 | word_0;
}

// -log(-log(1 - u)) with u = (bits + 1/2) / 2^64, at most the largest double below 1.
__device__ __forceinline__ double gumbel(unsigned long long bits) {
    const double uniform = (__ull2double_rn(bits) + 0.5) * 0x1p-64;
    return -log(-log1p(-fmin(uniform, 1.0 - 0x1p-53)));
}

// The same to within GUMBEL_ERROR, in single precision: enough to see which tokens cannot win. It is off by 1e-4 at
// most but where u is within 2^-40 of 1: there the double's u is coarse itself, and the noise (-3.3) loses anyway.
constexpr float GUMBEL_ERROR = 0.5f;

__device__ __forceinline__ float gumbel_estimate(unsigned long long bits) {
    const float uniform = (__ull2float_rn(bits) + 0.5f) * 0x1p-64f;
    const float rest = (__ull2float_rn(~bits) + 0.5f) * 0x1p-64f;  // 1 - u, precise near 0
    // -log(1 - u): its series where u is small, which the logarithm of a number near 1 would lose.
    const float exponential = uniform < 0.01f ? uniform * (1.0f + 0.5f * uniform) : -__logf(rest);
    return -__logf(exponential);
}

// Uniform in [0, 1): the upper 53 of 64 bits.
__device__ __forceinline__ double uniform(unsigned long long bits) { return __ull2double_rn(bits >> 11) * 0x1p-53; }

}  // namespace philox
