"""What runs on the CPU with any library: the forward pass, its device and KV cache, memory, predicted speed."""
