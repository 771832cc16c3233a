"""Text to token ids and back: tokenizer.json, tokenizer.model and an incremental decoder for streamed output.

Owns every rule about beginning-of-sequence tokens, special tokens and leading spaces. Refuses unknown kinds of
tokenizers by name. Knows nothing of tensors, models or the context limit.
"""
