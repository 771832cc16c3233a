"""llmcli: text from LLaMA-family models on your own machine, at the speed of its memory bus.

The names of `llmcli.api` are imported at their first use; `__init__.pyi` has their types.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ("GeneratedText", "LLMCliError", "Model", "Piece", "Text", "load")


def __getattr__(name: str) -> Any:
    """A name of `llmcli.api`."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("llmcli.api"), name)


def __dir__() -> list[str]:
    """All names, for completion in a notebook."""
    return sorted({*globals(), *__all__})
