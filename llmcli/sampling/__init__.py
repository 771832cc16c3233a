"""Sampling: from logits to one token id, as a pure function of logits, history, parameters and seed."""
