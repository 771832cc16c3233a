"""What the runners of the CPU share: the device over a model, what it takes of the memory, how fast it will be."""
