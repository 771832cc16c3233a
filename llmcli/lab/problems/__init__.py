"""What kernels of the lab compute: one module a computation."""
