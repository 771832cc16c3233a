// launch: what it costs to start kernels that do nothing  Source: PMPP chapter 5
// Shapes:  done [1] i32, set by the last kernel
// Problem: launches
// Sizes:   num_blocks 1, 1024, 16384
// Check:   num_blocks 1, 77
// Claim:   one < eight at num_blocks 1: each kernel waits until the one in front has ended and its writes are seen
// Claim:   eight < eight_by_stream at num_blocks 1: a graph gives the card all launches at once
// Claim:   sixty_four < sixty_four_by_stream at num_blocks 1: the host needs longer to start a kernel than the card
// Claim:   overlapping < sixty_four at num_blocks 1: blocks are in place before the kernel in front has ended (sm_90)
// Claim:   one < one_of_1024_threads at num_blocks 16384: a block of 32 warps takes longer to place than one of 1
// Note:    No kernel can be faster than an empty one, and a step of decoding starts hundreds. That is why short kernels
//          are fused. Divide a rung's time by its number of kernels; a grid of many blocks costs time by itself.

#include "common/launch.cuh"

__global__ void empty() {}

__global__ void finish(int* done) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *done = 1;
}

// rung one: one kernel. One thread of it writes one number, so that we know that it ran.
// launch: finish<<<num_blocks, 32>>>

// rung one_of_1024_threads: the same with the largest block there is.
// launch: finish<<<num_blocks, 1024>>>

// rung eight: seven empty kernels in front of it.
// launch: empty<<<num_blocks, 32>>> 7 times
// launch: finish<<<num_blocks, 32>>>

// rung sixty_four: 63 in front of it. The graph holds them in a chain.
// launch: empty<<<num_blocks, 32>>> 63 times
// launch: finish<<<num_blocks, 32>>>

// rung eight_by_stream: eight again, without a graph: the host starts each kernel by a call of the driver.
// launch: empty<<<num_blocks, 32>>> 7 times
// launch: finish<<<num_blocks, 32>>>
// start: stream

// rung sixty_four_by_stream: 64 again, without a graph.
// launch: empty<<<num_blocks, 32>>> 63 times
// launch: finish<<<num_blocks, 32>>>
// start: stream

// rung overlapping: 64 in a graph; each lets the next one start at once, and waits for the one in front before it ends.
//   Real kernels read their weights before they wait. Before sm_90 this is the rung sixty_four.
// launch: empty_overlapping<<<num_blocks, 32>>> 63 times overlapping
// launch: finish_overlapping<<<num_blocks, 32>>> overlapping
__global__ void empty_overlapping() {
    grid_dependency_launch();
    grid_dependency_wait();
}

__global__ void finish_overlapping(int* done) {
    grid_dependency_launch();
    grid_dependency_wait();
    if (blockIdx.x == 0 && threadIdx.x == 0) *done = 1;
}
