"""The kernel lab: what a kernel has to compute, studies of several kernels for it, checks, times, tables."""
