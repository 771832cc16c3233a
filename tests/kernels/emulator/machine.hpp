// machine: the threads of a cluster as fibers of one thread of the host, in random order; shared memory, barriers.
// Clusters run one after the other. Of a kernel that may wait for other blocks as many run at once as the card has room
// for, some slower than others.
//
// A thread runs until it waits: for its warp, for a barrier, for copies. Then another one runs. Copies of the
// asynchronous kind land at once, or late and in any order (`late`). Until they land, their place holds 0xEE. Shared
// memory begins as 0xEE. A fault ends the launch with a message: a deadlock, too many arrivals, addresses that
// are not aligned, collectives in which a warp's threads differ. Not found: missing fences, races of plain loads and
// stores without a wait in between, accesses outside global arrays.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda.hpp"

namespace emulator {

constexpr size_t SHARED_BYTES = 256 * 1024, STACK_BYTES = 128 * 1024;
constexpr unsigned SPEEDS = 8;
using Action = std::function<void()>;

struct Fiber {
    ucontext_t beginning;
    jmp_buf place;  // where it waits
    bool has_begun = false;
    dim3 thread;
    int rank = 0, lane = 0, warp = 0;  // rank: the block's number among those that run
    bool is_done = false;
    std::vector<Action> copies;            // asked for, and not yet in a group
    std::deque<std::vector<Action>> groups;
    std::vector<Action> stores;    // to global memory, in bulk
    std::vector<Action> products;  // of the tensor cores: they take effect when somebody waits for them
    std::deque<std::vector<Action>> product_groups;
    int num_products = 0;
};
struct Warp {
    int arrived = 0;
    unsigned turn = 0;
    const char* what = nullptr;
    uint64_t given[2][32] = {};
    std::map<int, std::vector<unsigned>> fragments;  // of each product: what every lane holds
};
struct Named { int arrived = 0; unsigned turn = 0; };
struct Block {
    unsigned char* shared = nullptr;
    size_t used = 0;
    std::map<const void*, size_t> places;
    std::vector<Warp> warps;
    Named named[16];
    dim3 index;
    int any = 0;
    unsigned slowness = 0;  // chances in SPEEDS that a warp sits a turn out
};
struct Barrier { int count, pending; long bytes; unsigned phase; };

inline std::vector<Fiber> fibers;
inline std::vector<Block> blocks;
inline Fiber* current = nullptr;
inline jmp_buf scheduler;
inline std::mt19937 random_numbers;
inline std::map<std::pair<int, unsigned>, Barrier> barriers;  // by block and address
inline std::vector<Action> under_way;                         // copies that land late
inline Named whole_cluster;
inline std::map<Fiber*, unsigned> cluster_turns;
inline dim3 grid_size, block_size;
inline int cluster_size = 1;
inline unsigned resident = 1;  // blocks of a kernel on a multiprocessor
inline bool is_late = false, is_probe = false, waits_for_blocks = false;
inline bool goes_on = false;  // somebody who waited need not wait any more
inline const Action* body = nullptr;

inline std::string problem;  // of the current launch; empty if there is none

// Threads take turns by setjmp and longjmp: swapcontext would also ask the system for the signal mask, at every turn.
inline void yield() {
    if (_setjmp(current->place) == 0) _longjmp(scheduler, 1);
}
[[noreturn]] void fail(const std::string& what);
inline Block& block() { return blocks[current->rank]; }
inline Warp& warp() { return block().warps[current->warp]; }
template <typename Ready>
void wait_until(Ready ready) {
    while (!ready()) yield();
}

// Values of all 32 lanes, which call it together.
const uint64_t* collect(uint64_t value, const char* what);
void arrive(Named& one, int count, bool waits);

// Memory of the block for a variable that all its threads share; `key` distinguishes variables.
template <typename T>
T& shared(const void* key) {
    Block& own = block();
    auto found = own.places.find(key);
    if (found == own.places.end()) {
        const size_t place = (own.used + 127) / 128 * 128;
        own.used = place + sizeof(T);
        if (own.used > SHARED_BYTES) fail("no shared memory is left");
        found = own.places.emplace(key, place).first;
    }
    return *reinterpret_cast<T*>(own.shared + found->second);
}
inline unsigned char* at(unsigned address, int rank) {
    if (address >= SHARED_BYTES) fail("an address outside shared memory");
    return blocks[rank].shared + address;
}

Barrier& barrier(unsigned address, int rank);
void arrive_at(unsigned address, int rank);
void count_bytes(unsigned address, int rank, long num_bytes);
void land(const Action& action);

template <typename... Parameters, size_t... I>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_cv_t<Parameters>*>(arguments[I])...);
}
// Starts all blocks; returns what went wrong, or null. `run_thread` begins by telling the size of the kernel's clusters,
// how many blocks a multiprocessor has, and whether they may wait for each other.
const char* launch(const Action& run_thread, dim3 grid, dim3 threads, size_t dynamic_bytes, bool late, unsigned seed,
                   unsigned multiprocessors);
template <typename... Parameters>
const char* launch(void (*kernel)(Parameters...), void** arguments, dim3 grid, dim3 threads, size_t dynamic_bytes,
                   bool late, unsigned seed, unsigned multiprocessors) {
    const Action run = [&] { call(kernel, arguments, std::index_sequence_for<Parameters...>()); };
    return launch(run, grid, threads, dynamic_bytes, late, seed, multiprocessors);
}
// The first statement of a kernel; true where nothing else is wanted.
inline bool tells_launch(int size, unsigned blocks, bool waits) {
    cluster_size = size, resident = blocks, waits_for_blocks = waits;
    return is_probe;
}

}  // namespace emulator

#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::block().index)
#define blockDim (emulator::block_size)
#define gridDim (emulator::grid_size)

inline size_t __cvta_generic_to_shared(const void* pointer) {
    const size_t place = static_cast<const unsigned char*>(pointer) - emulator::block().shared;
    if (place >= emulator::SHARED_BYTES) emulator::fail("a pointer that is not to shared memory");
    return place;
}
inline void __syncthreads() {
    const dim3 size = emulator::block_size;
    emulator::arrive(emulator::block().named[0], static_cast<int>(size.x * size.y * size.z), true);
}
inline int __syncthreads_or(int value) {
    int& any = emulator::block().any;
    __syncthreads();  // everybody has read what was there before
    any = 0;
    __syncthreads();
    any |= value;
    __syncthreads();
    return any;
}
inline void __syncwarp() { emulator::collect(0, "__syncwarp"); }
template <typename T>
uint64_t in_word(T value) {
    uint64_t word = 0;
    std::memcpy(&word, &value, sizeof(T));
    return word;
}
template <typename T>
T shuffled(T value, int lane, const char* what) {
    const uint64_t word = emulator::collect(in_word(value), what)[lane];
    T result;
    std::memcpy(&result, &word, sizeof(T));
    return result;
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) { return shuffled(value, lane % 32, "__shfl_sync"); }
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    return shuffled(value, emulator::current->lane ^ mask, "__shfl_xor_sync");
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int by) {
    const int lane = emulator::current->lane;
    return shuffled(value, lane >= by ? lane - by : lane, "__shfl_up_sync");
}
template <typename T>
T __shfl_down_sync(unsigned, T value, int by) {
    const int lane = emulator::current->lane;
    return shuffled(value, lane + by < 32 ? lane + by : lane, "__shfl_down_sync");
}
template <typename T, typename Combine>
T over_warp(T value, const char* what, Combine combine) {
    const uint64_t* words = emulator::collect(in_word(value), what);
    T all[32], result;
    for (int lane = 0; lane < 32; ++lane) std::memcpy(&all[lane], &words[lane], sizeof(T));
    result = all[0];
    for (int lane = 1; lane < 32; ++lane) result = combine(result, all[lane]);
    return result;
}
inline unsigned __ballot_sync(unsigned, bool is_true) {
    const unsigned bit = static_cast<unsigned>(is_true) << emulator::current->lane;
    return over_warp(bit, "__ballot_sync", [](unsigned a, unsigned b) { return a | b; });
}
inline bool __any_sync(unsigned mask, bool is_true) { return __ballot_sync(mask, is_true) != 0; }
inline bool __all_sync(unsigned mask, bool is_true) { return __ballot_sync(mask, is_true) == 0xffffffffu; }
template <typename T>
unsigned __match_any_sync(unsigned, T value) {
    const uint64_t* words = emulator::collect(in_word(value), "__match_any_sync");
    unsigned same = 0;
    for (int lane = 0; lane < 32; ++lane) same |= static_cast<unsigned>(words[lane] == in_word(value)) << lane;
    return same;
}
template <typename T>
T __reduce_max_sync(unsigned, T value) {
    return over_warp(value, "__reduce_max_sync", [](T a, T b) { return max(a, b); });
}
template <typename T>
T __reduce_add_sync(unsigned, T value) {
    return over_warp(value, "__reduce_add_sync", [](T a, T b) { return a + b; });
}
template <typename T>
T __reduce_or_sync(unsigned, T value) {
    return over_warp(value, "__reduce_or_sync", [](T a, T b) { return a | b; });
}
template <typename T>
T __reduce_xor_sync(unsigned, T value) {
    return over_warp(value, "__reduce_xor_sync", [](T a, T b) { return a ^ b; });
}
