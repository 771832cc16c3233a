"""What kernels of the lab compute: one function a computation, from the first problems to a layer of a model."""
