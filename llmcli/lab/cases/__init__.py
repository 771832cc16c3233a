"""Cases of the engine's kernels, one module a kernel; those of rms_norm are next to its problem."""
