"""The numpy runner: LLaMA in float32 for small models, which are done before torch is imported. No torch."""
