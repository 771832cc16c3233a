"""What is decided before a byte is read: where weights, activations and the cache lie, and which kernels multiply."""
