"""LoRA adapters in PEFT's layout: their files, what they change of a base model, and their check against it."""
