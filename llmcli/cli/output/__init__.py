"""The forms in which `generate` shows what it makes. Each takes the engine's events as they come."""
