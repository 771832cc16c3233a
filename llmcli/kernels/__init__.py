"""CUDA kernels and the machine they run on. With runners/cuda the only room that imports CuPy."""
