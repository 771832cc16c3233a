"""Text to token ids and back: tokenizer.json, tokenizer.model and an incremental decoder for streamed output.

Owns every rule about beginning-of-sequence tokens, special tokens and leading spaces. Refuses tokenizers of unknown
kinds by name, and knows nothing of tensors, models or prompts that do not fit.
"""
