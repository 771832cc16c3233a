"""What a model is (`LlamaConfig`, rotary parameters) and the preset files. Reads dictionaries, never weights."""
