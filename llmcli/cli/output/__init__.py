"""The forms of output of `generate`. Each takes the engine's events as they come."""
