"""What runs: a step's forward pass, its sampling, and the passes of prompts."""
