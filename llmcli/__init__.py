"""llmcli: text from LLaMA-family models on your own machine, at the speed of its memory bus."""

__version__ = "0.1.0"
