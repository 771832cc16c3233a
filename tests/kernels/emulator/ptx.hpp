// ptx: what the assembler's instructions in kernels do, one function each. translate.py calls them with the operands of
// an asm statement, results first. Source: PTX ISA.
#pragma once

#include "machine.hpp"

namespace ptx {

using emulator::Action;
using emulator::current;

inline float to_float(bool is_half, unsigned bits) {
    const uint16_t low = static_cast<uint16_t>(bits);
    return is_half ? __half2float(bits_as<__half>(low)) : __bfloat162float(bits_as<__nv_bfloat16>(low));
}

// Loads, atomics, arithmetic
template <typename T, typename Address>
void load(T& value, const Address* address) { value = *reinterpret_cast<const T*>(address); }
inline void load_words(unsigned& a, unsigned& b, const void* address) {
    if (reinterpret_cast<uintptr_t>(address) % 8) emulator::fail("a load that is not aligned");
    a = static_cast<const unsigned*>(address)[0], b = static_cast<const unsigned*>(address)[1];
}
inline void load_words(unsigned& a, unsigned& b, unsigned& c, unsigned& d, const void* address) {
    if (reinterpret_cast<uintptr_t>(address) % 16) emulator::fail("a load that is not aligned");
    load_words(a, b, address);
    load_words(c, d, static_cast<const unsigned*>(address) + 2);
}
inline void load_byte(unsigned& value, const unsigned char* address) { value = *address; }
inline void atomic_inc(unsigned& before, unsigned* counter, unsigned last) {
    before = *counter;
    *counter = before >= last ? 0 : before + 1;
}
inline void atomic_add(unsigned& before, unsigned* counter, unsigned count) { before = *counter, *counter += count; }
inline void reduce_add(unsigned* counter, unsigned count) { *counter += count; }
inline void reduce_inc(unsigned* counter, unsigned last) { *counter = *counter >= last ? 0 : *counter + 1; }
inline void load_acquire(unsigned& found, unsigned* counter) {
    emulator::yield();  // who polls it waits for others
    found = *counter;
}
inline void max_nan(float& result, float a, float b) { result = a != a || b != b ? NAN : a > b ? a : b; }
inline void max_nan(float& result, float other) { max_nan(result, result, other); }
inline void exp2(float& power, float x) { power = std::exp2(x); }
inline void reciprocal(float& inverse, float x) { inverse = 1.0f / x; }
inline void and_or(unsigned& result, unsigned word, unsigned mask, unsigned bits) { result = (word & mask) | bits; }
inline void and_xor(unsigned& result, unsigned word, unsigned mask, unsigned bits) { result = (word & mask) ^ bits; }
inline void widen_e4m3(unsigned& first, unsigned& last, unsigned word) {
    const auto wide = [&](int i) {
        const unsigned code = word >> 8 * i & 0xff, exponent = code >> 3 & 15, mantissa = code & 7;
        const float size = exponent ? std::ldexp(8.0f + mantissa, static_cast<int>(exponent) - 10)
                                    : std::ldexp(static_cast<float>(mantissa), -9);
        return static_cast<unsigned>(bits_as<uint16_t>(__float2half_rn(code & 0x80 ? -size : size)));
    };
    first = wide(0) | wide(1) << 16, last = wide(2) | wide(3) << 16;
}
inline void pack_within_range(unsigned& pair, float high, float low) {
    const auto half = [](float value) {
        const float most = 65504.0f, within = value > most ? most : value < -most ? -most : value;
        return static_cast<unsigned>(bits_as<uint16_t>(__float2half_rn(within)));
    };
    pair = half(low) | half(high) << 16;
}

// Matrices of 8 x 8 elements of 16 bits
inline void load_matrices(unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned address, bool is_transposed) {
    const uint64_t* rows = emulator::collect(address, "ldmatrix");
    const int g = current->lane / 4, t = current->lane % 4;
    unsigned* const results[4] = {&a, &b, &c, &d};
    for (int i = 0; i < 4; ++i) {
        const auto element = [&](int row, int column) -> unsigned {
            const unsigned place = static_cast<unsigned>(rows[8 * i + row]);
            if (place % 16) emulator::fail("a row of ldmatrix that is not aligned");
            return reinterpret_cast<const uint16_t*>(emulator::at(place, current->rank))[column];
        };
        *results[i] = is_transposed ? element(2 * t, g) | element(2 * t + 1, g) << 16
                                    : element(g, 2 * t) | element(g, 2 * t + 1) << 16;
    }
}
inline void transpose(unsigned& result, unsigned pair) {
    const uint64_t* all = emulator::collect(pair, "movmatrix");
    const int g = current->lane / 4, t = current->lane % 4;
    const auto element = [&](int row, int column) -> unsigned {
        return all[4 * row + column / 2] >> 16 * (column % 2) & 0xffff;
    };
    result = element(2 * t, g) | element(2 * t + 1, g) << 16;
}

// All pairs of elements that meet in a product of 16 x 8, where a register holds WIDTH elements: `take` gets which of the
// thread's four sums a pair belongs to, and both elements in the low bits.
template <int WIDTH, typename Take>
inline void each_pair(unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1, Take take) {
    uint64_t given[3][32];
    const uint64_t mine[3] = {static_cast<uint64_t>(a1) << 32 | a0, static_cast<uint64_t>(a3) << 32 | a2,
                              static_cast<uint64_t>(b1) << 32 | b0};
    for (int i = 0; i < 3; ++i) std::memcpy(given[i], emulator::collect(mine[i], "mma"), sizeof(given[i]));
    const int g = current->lane / 4, t = current->lane % 4;
    for (int v = 0; v < 2; ++v) {
        for (int j = 0; j < 2; ++j) {
            for (int k = 0; k < 8 * WIDTH; ++k) {
                const int half = k / (4 * WIDTH), lane = k / WIDTH % 4, shift = 32 / WIDTH * (k % WIDTH);
                take(2 * v + j, static_cast<unsigned>(given[half][4 * g + lane] >> 32 * v) >> shift,
                     static_cast<unsigned>(given[2][4 * (2 * t + j) + lane] >> 32 * half) >> shift);
            }
        }
    }
}

// mma.m16n8k16 of 16-bit numbers: d = a * b + c
inline void mma(bool is_half, float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1, unsigned a2,
                unsigned a3, unsigned b0, unsigned b1) {
    double sums[4] = {d0, d1, d2, d3};
    each_pair<2>(a0, a1, a2, a3, b0, b1, [&](int output, unsigned a, unsigned b) {
        sums[output] += static_cast<double>(to_float(is_half, a)) * to_float(is_half, b);
    });
    d0 = static_cast<float>(sums[0]), d1 = static_cast<float>(sums[1]);
    d2 = static_cast<float>(sums[2]), d3 = static_cast<float>(sums[3]);
}

// mma.m16n8k32 of bytes: a signed or not, b signed
inline void mma_bytes(bool is_signed, int& d0, int& d1, int& d2, int& d3, unsigned a0, unsigned a1, unsigned a2,
                      unsigned a3, unsigned b0, unsigned b1) {
    int* const d[4] = {&d0, &d1, &d2, &d3};
    each_pair<4>(a0, a1, a2, a3, b0, b1, [&](int output, unsigned a, unsigned b) {
        *d[output] += (is_signed ? static_cast<int8_t>(a) : static_cast<int>(a & 0xff)) * static_cast<int8_t>(b);
    });
}

// wgmma: b is read when the product takes effect, as late as a wait allows
// The element of a column that lies `byte` bytes from its first one; with rows that are inputs that of `byte` / 2.
inline const unsigned char* element_of(unsigned long long place, int column, int byte, bool rows_are_inputs) {
    const unsigned start = (place & 0x3fff) << 4, next_piece = (place >> 16 & 0x3fff) << 4;
    const unsigned next_columns = (place >> 32 & 0x3fff) << 4;
    const bool is_swizzled = place >> 62 == 1;
    unsigned at = start + column / 8 * next_columns;
    if (rows_are_inputs) {
        if (!is_swizzled) emulator::fail("rows of inputs without a swizzle");
        const int input = byte / 2;
        at = start + column / 64 * next_piece + input / 8 * next_columns + input % 8 * 128 + column % 64 * 2;
        at ^= (at >> 7 & 7) << 4;
    } else if (is_swizzled) {
        at += column % 8 * 128 + byte;
        at ^= (at >> 7 & 7) << 4;
    } else {
        at += byte / 16 * next_piece + column % 8 * 16 + byte % 16;
    }
    return emulator::at(at, current->rank);
}
// Every lane's part of a, once all four that share its rows have come here.
inline void keep_fragment(const unsigned (&a)[4]) {
    auto& kept = emulator::warp().fragments[current->num_products++];
    kept.resize(32 * 5);
    std::memcpy(&kept[5 * current->lane], a, sizeof(a));
    kept[5 * current->lane + 4] = 1;
}
inline const unsigned* fragment_of(int number, int lane) {
    const auto& kept = emulator::warp().fragments[number];
    emulator::wait_until([&] { return kept[5 * lane + 4] == 1; });
    return &kept[5 * lane];
}
// Every factor becomes a number once: `of_word` takes one of a, `of_place` one of b.
template <typename T, int NUM_VALUES, typename OfWord, typename OfPlace>
void multiply_later(T (&d)[NUM_VALUES], const unsigned (&a)[4], unsigned long long b, bool adds, int step_inputs,
                    bool rows_are_inputs, OfWord of_word, OfPlace of_place) {
    const int number = current->num_products, inputs_a_word = step_inputs / 8;
    keep_fragment(a);
    T* sums = d;
    current->products.push_back([=] {
        const int g = current->lane / 4, t = current->lane % 4, item_bytes = 4 / inputs_a_word;
        double rows[2][32];
        for (int k = 0; k < step_inputs; ++k) {
            const int half = k / (step_inputs / 2), within = k % (step_inputs / 2);
            const unsigned* words = fragment_of(number, 4 * g + within / inputs_a_word);
            const int shift = 8 * item_bytes * (within % inputs_a_word);
            for (int v = 0; v < 2; ++v) rows[v][k] = of_word(words[v + 2 * half] >> shift);
        }
        for (int i = 0; i < NUM_VALUES / 4; ++i) {
            for (int j = 0; j < 2; ++j) {
                T* const of_rows[2] = {sums + 4 * i + j, sums + 4 * i + 2 + j};
                double found[2] = {};
                for (int v = 0; v < 2 && adds; ++v) found[v] = static_cast<double>(*of_rows[v]);
                for (int k = 0; k < step_inputs; ++k) {
                    const double other = of_place(element_of(b, 8 * i + 2 * t + j, item_bytes * k, rows_are_inputs));
                    for (int v = 0; v < 2; ++v) found[v] += rows[v][k] * other;
                }
                for (int v = 0; v < 2; ++v) *of_rows[v] = static_cast<T>(found[v]);
            }
        }
    });
}
template <int NUM_VALUES>
void wgmma_halves(bool is_half, bool rows_are_inputs, float (&d)[NUM_VALUES], const unsigned (&a)[4],
                  unsigned long long b, bool adds) {
    const auto of_word = [=](unsigned word) { return static_cast<double>(to_float(is_half, word)); };
    const auto of_place = [=](const unsigned char* place) {
        return static_cast<double>(to_float(is_half, *reinterpret_cast<const uint16_t*>(place)));
    };
    multiply_later(d, a, b, adds, 16, rows_are_inputs, of_word, of_place);
}
inline void wgmma_commit() {
    current->product_groups.push_back(std::move(current->products));
    current->products.clear();
}
inline void wgmma_wait(int pending) {
    while (static_cast<int>(current->product_groups.size()) > pending) {
        for (const Action& product : current->product_groups.front()) product();
        current->product_groups.pop_front();
    }
    emulator::collect(0, "wgmma.wait_group");  // the warp goes on together
}

// Copies of a thread, in groups
inline void copy(unsigned destination, const void* source, int width, int num_bytes) {
    if (destination % width || (num_bytes && reinterpret_cast<uintptr_t>(source) % width)) {
        emulator::fail("a copy that is not aligned");
    }
    unsigned char* place = emulator::at(destination, current->rank);
    std::memset(place, 0xEE, width);
    current->copies.push_back([=] {
        std::memset(place, 0, width);
        if (num_bytes) std::memcpy(place, source, num_bytes);
    });
}
inline void copy_commit() {
    current->groups.push_back(std::move(current->copies));
    current->copies.clear();
}
inline void copy_wait(int pending) {
    while (static_cast<int>(current->groups.size()) > pending) {
        for (const Action& action : current->groups.front()) action();
        current->groups.pop_front();
    }
}
// Arrives when what this thread has asked for and not committed is there.
inline void arrive_behind_copies(unsigned barrier) {
    const int rank = current->rank;
    const std::vector<Action> copies = std::move(current->copies);
    current->copies.clear();
    emulator::land([=] {
        for (const Action& action : copies) action();
        emulator::arrive_at(barrier, rank);
    });
}

// mbarriers, and copies that count themselves there
inline void init(unsigned barrier, int count) { emulator::barriers[{current->rank, barrier}] = {count, count, 0, 0}; }
inline void arrive(unsigned long long&, unsigned barrier) { emulator::arrive_at(barrier, current->rank); }
// An address in another block: its rank lies above all bits of addresses in a block.
inline void address_in_block(unsigned& there, unsigned address, int rank) { there = address | rank << 24; }
inline void arrive_there(unsigned there) { emulator::arrive_at(there & 0xffffff, static_cast<int>(there >> 24)); }
inline void is_over(unsigned& result, unsigned barrier, unsigned parity) {
    emulator::yield();
    result = (emulator::barrier(barrier, current->rank).phase & 1) != parity;
}
inline void expect(unsigned barrier, int num_bytes) { emulator::barrier(barrier, current->rank).bytes += num_bytes; }
template <typename Value>
void store_there(unsigned place, unsigned barrier, Value value, int rank) {
    unsigned char* there = emulator::at(place, rank);
    emulator::land([=] {
        std::memcpy(there, &value, sizeof(Value));
        emulator::count_bytes(barrier, rank, sizeof(Value));
    });
}
inline void store_there(unsigned place, unsigned barrier, float x, float y, float z, float w, int rank) {
    store_there(place, barrier, make_float4(x, y, z, w), rank);
}
inline void copy_bulk(unsigned destination, const void* source, int num_bytes, unsigned barrier, unsigned blocks) {
    if (destination % 16 || num_bytes % 16 || reinterpret_cast<uintptr_t>(source) % 16) {
        emulator::fail("a bulk copy that is not aligned");
    }
    for (int rank = 0; rank < emulator::cluster_size; ++rank) {
        if (!(blocks >> rank & 1)) continue;
        unsigned char* place = emulator::at(destination, rank);
        std::memset(place, 0xEE, num_bytes);
        emulator::land([=] {
            std::memcpy(place, source, num_bytes);
            emulator::count_bytes(barrier, rank, num_bytes);
        });
    }
}
inline void copy_bulk(unsigned destination, const void* source, int num_bytes, unsigned barrier) {
    copy_bulk(destination, source, num_bytes, barrier, 1u << current->rank);
}

// Copies to global memory, which read shared memory when somebody waits for them
inline void store_bulk(void* destination, unsigned source, int num_bytes) {
    if (source % 16 || num_bytes % 16 || reinterpret_cast<uintptr_t>(destination) % 16) {
        emulator::fail("a bulk copy that is not aligned");
    }
    const unsigned char* place = emulator::at(source, current->rank);
    current->stores.push_back([=] { std::memcpy(destination, place, num_bytes); });
}
inline void store_bulk_wait() {
    for (const Action& store : current->stores) store();
    current->stores.clear();
}

// Barriers of some warps and of a cluster
inline void sync(int id, int num_threads) { emulator::arrive(emulator::block().named[id], num_threads, true); }
inline void arrive_named(int id, int num_threads) { emulator::arrive(emulator::block().named[id], num_threads, false); }
inline void rank(unsigned& result) { result = current->rank; }
inline void cluster_arrive() {
    emulator::cluster_turns[current] = emulator::whole_cluster.turn;
    emulator::arrive(emulator::whole_cluster, static_cast<int>(emulator::fibers.size()), false);
}
inline void cluster_wait() {
    const unsigned turn = emulator::cluster_turns[current];
    emulator::wait_until([=] { return emulator::whole_cluster.turn != turn; });
}

}  // namespace ptx
