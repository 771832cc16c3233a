"""Cases of the engine's kernels: small and odd ones, which every card must get right, and a typical one."""
