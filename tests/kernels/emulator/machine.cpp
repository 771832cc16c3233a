// machine.cpp: what all emulated kernels share, compiled once: whose turn it is, barriers, and the blocks of a launch.
#include "machine.hpp"

namespace emulator {

static void resume(Fiber& one) {
    if (_setjmp(scheduler) != 0) return;
    if (one.has_begun) _longjmp(one.place, 1);
    one.has_begun = true;
    setcontext(&one.beginning);
}
[[noreturn]] void fail(const std::string& what) {
    problem = what;
    if (current == nullptr) throw std::runtime_error(problem);
    problem += " (block " + std::to_string(current->rank) + ", thread " + std::to_string(current->thread.x) + ")";
    for (;;) yield();
}

const uint64_t* collect(uint64_t value, const char* what) {
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
void arrive(Named& one, int count, bool waits) {
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

Barrier& barrier(unsigned address, int rank) {
    const auto found = barriers.find({rank, address});
    if (found == barriers.end()) fail("a barrier that nobody has initialised");
    return found->second;
}
static void end_phase(Barrier& one) {
    if (one.pending == 0 && one.bytes == 0) ++one.phase, one.pending = one.count, goes_on = true;
}
void arrive_at(unsigned address, int rank) {
    Barrier& one = barrier(address, rank);
    if (--one.pending < 0) fail("too many arrivals at a barrier");
    end_phase(one);
}
void count_bytes(unsigned address, int rank, long num_bytes) {
    Barrier& one = barrier(address, rank);
    one.bytes -= num_bytes;
    end_phase(one);
}
void land(const Action& action) {
    if (is_late) {
        under_way.push_back(action);
    } else {
        action();
    }
}

static void entry() {
    (*body)();
    current->is_done = true;
    _longjmp(scheduler, 1);
}
static void start_fiber(Fiber& one, char* stack) {
    getcontext(&one.beginning);
    one.beginning.uc_stack.ss_sp = stack;
    one.beginning.uc_stack.ss_size = STACK_BYTES;
    one.beginning.uc_link = nullptr;
    makecontext(&one.beginning, entry, 0);
}

// The blocks first_block, first_block + 1, ... of one cluster, or of the grid.
static void run_blocks(unsigned first_block, int num_blocks, size_t dynamic_bytes, unsigned seed) {
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

static void start(const Action& run_thread, dim3 grid, dim3 threads, size_t dynamic_bytes, bool late, unsigned seed,
                  unsigned multiprocessors) {
    grid_size = grid, block_size = threads, is_late = late, cluster_size = 1;
    body = &run_thread;
    is_probe = true;
    run_thread();
    is_probe = false;
    const unsigned num_blocks = grid.x * grid.y * grid.z;
    if (num_blocks % cluster_size != 0) fail("a grid of broken clusters");
    if (waits_for_blocks && cluster_size > 1) fail("a grid of clusters that wait for each other");
    const unsigned at_once = waits_for_blocks ? resident * multiprocessors : cluster_size;
    for (unsigned first = 0; first < num_blocks; first += at_once) {
        run_blocks(first, std::min(at_once, num_blocks - first), dynamic_bytes, seed + first);
    }
}

const char* launch(const Action& run_thread, dim3 grid, dim3 threads, size_t dynamic_bytes, bool late, unsigned seed,
                   unsigned multiprocessors) {
    problem.clear();
    current = nullptr;
    try {
        start(run_thread, grid, threads, dynamic_bytes, late, seed, multiprocessors);
    } catch (const std::runtime_error&) {
    }
    return problem.empty() ? nullptr : problem.c_str();
}

}  // namespace emulator
