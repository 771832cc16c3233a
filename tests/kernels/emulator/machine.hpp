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
inline void resume(Fiber& one) {
    if (_setjmp(scheduler) != 0) return;
    if (one.has_begun) _longjmp(one.place, 1);
    one.has_begun = true;
    setcontext(&one.beginning);
}
[[noreturn]] inline void fail(const std::string& what) {
    problem = what;
    if (current == nullptr) throw std::runtime_error(problem);
    problem += " (block " + std::to_string(current->rank) + ", thread " + std::to_string(current->thread.x) + ")";
    for (;;) yield();
}
inline Block& block() { return blocks[current->rank]; }
inline Warp& warp() { return block().warps[current->warp]; }
template <typename Ready>
void wait_until(Ready ready) {
    while (!ready()) yield();
}

// Values of all 32 lanes, which call it together.
inline const uint64_t* collect(uint64_t value, const char* what) {
    Warp& all = warp();
    const unsigned turn = all.turn;
    if (all.arrived == 0) all.what = what;
    if (std::strcmp(all.what, what) != 0) fail("the threads of a warp do not call the same");
    all.given[turn % 2][current->lane] = value;
    if (++all.arrived == 32) {
        all.arrived = 0;
        ++all.turn;
        goes_on = true;
    } else {
        wait_until([&] { return all.turn != turn; });
    }
    return all.given[turn % 2];
}
inline void arrive(Named& one, int count, bool waits) {
    const unsigned turn = one.turn;
    if (++one.arrived > count) fail("too many threads at a barrier");
    if (one.arrived == count) {
        one.arrived = 0;
        ++one.turn;
        goes_on = true;
    } else if (waits) {
        wait_until([&] { return one.turn != turn; });
    }
}

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

inline Barrier& barrier(unsigned address, int rank) {
    const auto found = barriers.find({rank, address});
    if (found == barriers.end()) fail("a barrier that nobody has initialised");
    return found->second;
}
inline void end_phase(Barrier& one) {
    if (one.pending == 0 && one.bytes == 0) ++one.phase, one.pending = one.count, goes_on = true;
}
inline void arrive_at(unsigned address, int rank) {
    Barrier& one = barrier(address, rank);
    if (--one.pending < 0) fail("too many arrivals at a barrier");
    end_phase(one);
}
inline void count_bytes(unsigned address, int rank, long num_bytes) {
    Barrier& one = barrier(address, rank);
    one.bytes -= num_bytes;
    end_phase(one);
}
inline void land(const Action& action) {
    if (is_late) {
        under_way.push_back(action);
    } else {
        action();
    }
}

inline void entry() {
    (*body)();
    current->is_done = true;
    _longjmp(scheduler, 1);
}
inline void start_fiber(Fiber& one, char* stack) {
    getcontext(&one.beginning);
    one.beginning.uc_stack.ss_sp = stack;
    one.beginning.uc_stack.ss_size = STACK_BYTES;
    one.beginning.uc_link = nullptr;
    makecontext(&one.beginning, entry, 0);
}

// The blocks first_block, first_block + 1, ... of one cluster, or of the grid.
inline void run_blocks(unsigned first_block, int num_blocks, size_t dynamic_bytes, unsigned seed) {
    static std::vector<std::vector<unsigned char>> memory;
    static std::unique_ptr<char[]> stacks;  // pages that nobody writes to take no memory
    static size_t num_stacks = 0;
    random_numbers.seed(seed);
    const unsigned num_threads = block_size.x * block_size.y * block_size.z;
    if (num_threads % 32 != 0) fail("a block of broken warps");
    memory.resize(std::max<size_t>(memory.size(), num_blocks));
    blocks.assign(num_blocks, Block());
    barriers.clear();
    under_way.clear();
    cluster_turns.clear();
    whole_cluster = Named();
    fibers.resize(num_blocks * num_threads);
    if (num_stacks < fibers.size()) stacks.reset(new char[(num_stacks = fibers.size()) * STACK_BYTES]);
    std::vector<int> order;
    for (int rank = 0; rank < num_blocks; ++rank) {
        memory[rank].assign(SHARED_BYTES + 1024, 0xEE);
        Block& one = blocks[rank];
        one.shared = memory[rank].data() + (1024 - reinterpret_cast<uintptr_t>(memory[rank].data()) % 1024);
        one.used = dynamic_bytes;
        one.warps.resize(num_threads / 32);
        one.slowness = waits_for_blocks ? random_numbers() % SPEEDS : SPEEDS / 4;
        const unsigned number = first_block + rank;
        one.index = {number % grid_size.x, number / grid_size.x % grid_size.y, number / grid_size.x / grid_size.y};
    }
    for (unsigned i = 0; i < fibers.size(); ++i) {
        Fiber& one = fibers[i];
        one = Fiber();
        const unsigned thread = i % num_threads;
        one.rank = i / num_threads, one.warp = thread / 32, one.lane = thread % 32;
        const unsigned row = thread / block_size.x;
        one.thread = {thread % block_size.x, row % block_size.y, row / block_size.y};
        start_fiber(one, stacks.get() + i * STACK_BYTES);
    }
    for (unsigned i = 0; i < fibers.size(); i += 32) order.push_back(i);
    size_t num_left = fibers.size();
    for (int num_idle = 0; num_left > 0; num_idle = goes_on ? 0 : num_idle + 1) {
        if (num_idle > 1000) fail("nobody goes on: a deadlock");
        goes_on = false;
        std::shuffle(order.begin(), order.end(), random_numbers);
        for (const int first : order) {
            if (random_numbers() % SPEEDS < blocks[fibers[first].rank].slowness) continue;
            for (int i = 0; i < 32; ++i) {
                current = &fibers[first + i];
                if (current->is_done) continue;
                resume(*current);
                if (!problem.empty()) return;
                if (current->is_done) --num_left, goes_on = true;
            }
        }
        current = nullptr;
        for (int i = 0; i < num_blocks && !under_way.empty(); ++i) {
            if (random_numbers() % 2) continue;
            const size_t chosen = random_numbers() % under_way.size();
            const Action action = under_way[chosen];
            under_way.erase(under_way.begin() + chosen);
            action();
            goes_on = true;
        }
    }
    for (const Action& action : under_way) action();
}

template <typename... Parameters, size_t... I>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_cv_t<Parameters>*>(arguments[I])...);
}
// Starts all blocks. `kernel` begins by telling the size of its clusters, how many blocks a multiprocessor has, and
// whether they may wait for each other.
template <typename... Parameters>
void start(void (*kernel)(Parameters...), void** arguments, dim3 grid, dim3 threads, size_t dynamic_bytes, bool late,
            unsigned seed, unsigned multiprocessors) {
    grid_size = grid, block_size = threads, is_late = late, cluster_size = 1;
    const Action run = [&] { call(kernel, arguments, std::index_sequence_for<Parameters...>()); };
    body = &run;
    is_probe = true;
    run();
    is_probe = false;
    const unsigned num_blocks = grid.x * grid.y * grid.z;
    if (num_blocks % cluster_size != 0) fail("a grid of broken clusters");
    if (waits_for_blocks && cluster_size > 1) fail("a grid of clusters that wait for each other");
    const unsigned at_once = waits_for_blocks ? resident * multiprocessors : cluster_size;
    for (unsigned first = 0; first < num_blocks; first += at_once) {
        run_blocks(first, std::min(at_once, num_blocks - first), dynamic_bytes, seed + first);
    }
}
// The same; what went wrong, or null.
template <typename... Parameters>
const char* launch(void (*kernel)(Parameters...), void** arguments, dim3 grid, dim3 threads, size_t dynamic_bytes,
                   bool late, unsigned seed, unsigned multiprocessors) {
    problem.clear();
    current = nullptr;
    try {
        start(kernel, arguments, grid, threads, dynamic_bytes, late, seed, multiprocessors);
    } catch (const std::runtime_error&) {
    }
    return problem.empty() ? nullptr : problem.c_str();
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
