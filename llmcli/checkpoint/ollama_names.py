"""The hub ids of models that people know by Ollama's names, such as `llama3.2:1b`."""

# Family: its hub id with {} for the size, and the sizes; Ollama takes the first where a name has none.
_FAMILIES = {
    "codellama": ("codellama/CodeLlama-{}-Instruct-hf", "7b 13b 34b 70b"),
    "llama2": ("meta-llama/Llama-2-{}-chat-hf", "7b 13b 70b"),
    "llama3": ("meta-llama/Meta-Llama-3-{}-Instruct", "8B 70B"),
    "llama3.1": ("meta-llama/Llama-3.1-{}-Instruct", "8B 70B 405B"),
    "llama3.2": ("meta-llama/Llama-3.2-{}-Instruct", "3B 1B"),
    "llama3.3": ("meta-llama/Llama-3.3-{}-Instruct", "70B"),
    "mistral": ("mistralai/Mistral-{}-Instruct-v0.3", "7B"),
    "qwen2": ("Qwen/Qwen2-{}-Instruct", "7B 0.5B 1.5B 72B"),
    "qwen2.5": ("Qwen/Qwen2.5-{}-Instruct", "7B 0.5B 1.5B 3B 14B 32B 72B"),
    "qwen2.5-coder": ("Qwen/Qwen2.5-Coder-{}-Instruct", "7B 0.5B 1.5B 3B 14B 32B"),
    "qwen3": ("Qwen/Qwen3-{}", "8B 0.6B 1.7B 4B 14B 32B"),
    "smollm": ("HuggingFaceTB/SmolLM-{}-Instruct", "1.7B 135M 360M"),
    "smollm2": ("HuggingFaceTB/SmolLM2-{}-Instruct", "1.7B 135M 360M"),
    "tinyllama": ("TinyLlama/TinyLlama-{}-Chat-v1.0", "1.1B"),
}


def hub_ids_of(name: str) -> list[str]:
    """The hub id that a name of Ollama's stands for, or all of its family for an unknown size; empty for other names.

    A quantization in the name, as in `llama3.2:1b-instruct-q4_K_M`, is left out.
    """
    family, _, tag = name.lower().partition(":")
    if family not in _FAMILIES:
        return []
    form, words = _FAMILIES[family]
    sizes, asked = words.split(), tag.partition("-")[0]
    if asked in ("", "latest"):
        sizes = sizes[:1]
    meant = [size for size in sizes if size.lower() == asked] or sizes
    return [form.format(size) for size in meant]


def hub_hint(name: str) -> str:
    """What a message adds about a model that was not found; empty if the name is not one of Ollama's."""
    ids = hub_ids_of(name)
    if len(ids) > 1:
        return f"; the hub ids of that family are {', '.join(ids)}"
    return f"; the hub id of that model is {ids[0]}" if ids else ""
