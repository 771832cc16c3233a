// Reads lines "major minor threads blocksShared blockShared block registers static dynamic", and writes for each the
// blocks that CUDA's own calculator finds.
#include <cstdio>

#include "cuda_occupancy.h"

int main() {
    int major, minor, threads, multiprocessorShared, blockShared, block, registers, shared, dynamic;
    while (std::scanf("%d %d %d %d %d %d %d %d %d", &major, &minor, &threads, &multiprocessorShared, &blockShared, &block,
                      &registers, &shared, &dynamic) == 9) {
        cudaOccDeviceProp device;
        device.computeMajor = major;
        device.computeMinor = minor;
        device.maxThreadsPerBlock = 1024;
        device.maxThreadsPerMultiprocessor = threads;
        device.regsPerBlock = 65536;
        device.regsPerMultiprocessor = 65536;
        device.warpSize = 32;
        device.sharedMemPerBlock = 48 * 1024;
        device.sharedMemPerMultiprocessor = multiprocessorShared;
        device.numSms = 1;
        device.sharedMemPerBlockOptin = blockShared;
        device.reservedSharedMemPerBlock = 1024;
        cudaOccFuncAttributes function;
        function.maxThreadsPerBlock = 1024;
        function.numRegs = registers;
        function.sharedSizeBytes = shared;
        function.partitionedGCConfig = PARTITIONED_GC_OFF;
        function.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
        function.maxDynamicSharedSizeBytes = dynamic;
        function.numBlockBarriers = 1;
        cudaOccDeviceState state;
        state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
        cudaOccResult result;
        const cudaOccError error = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &function, &state, block, dynamic);
        std::printf("%d %d\n", error, error == CUDA_OCC_SUCCESS ? result.activeBlocksPerMultiprocessor : -1);
    }
}
