"""The CUDA runner: weights, KV cache and workspace on one card; prefill, and decode as a CUDA graph. No torch."""
