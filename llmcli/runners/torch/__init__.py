"""The torch runner: LLaMA in plain torch on the CPU, the reference for every other runner. The only room with torch."""
