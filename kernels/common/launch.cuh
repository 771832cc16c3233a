// launch: programmatic dependent launch. A kernel launched with `overlaps` starts while the previous kernel still runs.
// From sm_90 on; before it both functions do nothing.
//
// gemv, gemv_float, stage_wide, gemm_wide, gemm_narrow, gemm_mma, add_parts, gather_columns, append_tokens,
// attention_decode, attention_rows, attention_span, attention_prefill_wgmma and sample_token overlap.
// All other kernels start when every previous kernel has ended, and call neither function.
// The rules for a kernel that overlaps:
// 1. At least one of its blocks waits. So when it ends, every previous kernel has ended too, and the next kernel need
//    only wait for this one.
// 2. It may overlap several kernels, back to the last one that does not overlap: gemv, stage_wide, add_parts and the
//    second launch of gemm_narrow's SwiGLU let the next one start before they wait themselves.
// 3. Before it waits, a thread writes no global memory, and reads only what none of these kernels writes. gemv reads
//    weights, also the norm's, gemm_wide and gemm_narrow their weights; gather_columns reads the order. append_tokens,
//    attention_decode, attention_rows and attention_span read rows, positions, page_table and cos_sin, and
//    attention_prefill_wgmma reads pages. The three that attend from lanes also read earlier tokens of the cache;
//    attention_decode not with is_cached.
// 4. embedding must not overlap. It is the first kernel of a step. In the step before, sample_token wrote positions and
//    attention wrote the cache. Because embedding starts after their end, the reads of rule 3 find what they wrote.
#pragma once

// Waits until the previous kernels have ended and their writes are visible. A thread calls it before it reads what they
// write, and before it writes what they read. In a kernel that does not overlap it costs nothing.
__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start, if it overlaps, once every block has called this or ended. One thread of a block is
// enough. The next kernel's grid_dependency_wait still waits for the end of this one. Before that wait only rule 3
// protects what it reads.
__device__ __forceinline__ void grid_dependency_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
