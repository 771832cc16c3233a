"""What the runners of the CPU share: the device over a model, its memory, its predicted speed."""
