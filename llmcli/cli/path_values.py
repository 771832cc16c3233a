"""Options and arguments that name a file or a folder. An empty one is refused: pathlib takes it for the current folder.

A script gives one where its variable is not set, and a command that replaces a folder would replace this one.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, get_args

from llmcli.errors import UsageError

_PATH_WORDS = frozenset({"FILE", "IN", "OUT"})  # metavars of paths that may also be a word, such as `-`


def refuse_empty_paths(params: Iterable[Any]) -> None:
    """Make each param that takes a path raise a UsageError for an empty one."""
    for param in params:
        annotation = param.type_descriptor.annotation
        if Path in (annotation, *get_args(annotation)) or param.metavar in _PATH_WORDS:
            param.process_value = partial(_process_value, param, param.process_value)


def _process_value(param: Any, process_value: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    if not ctx.resilient_parsing and (value == "" or (isinstance(value, list | tuple) and "" in value)):
        name = param.metavar if param.param_type_name == "argument" else max(param.opts, key=len)
        raise UsageError(f"{name} is empty; give it a path")
    return process_value(ctx, value)
