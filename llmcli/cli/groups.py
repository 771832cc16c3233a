"""Groups of options, declared once: a command's parameter whose type is a dataclass stands for one option a field.

A group is a frozen dataclass; its fields are annotated as a command's parameters are, or are groups themselves.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from typer.models import OptionInfo


@dataclass(frozen=True)
class OptionEach:
    """Marks a parameter that takes a dict: one option for each name, with this annotation; None if it is not given."""

    annotations: Mapping[str, Any]


# Makes the value of a parameter out of all options' values.
_Build = Callable[[Mapping[str, Any]], Any]


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each field of its groups, in their order."""
    signature = inspect.signature(command, eval_str=True)
    expanded = {
        parameter.name: _expand(parameter.name, parameter.annotation, parameter.default)
        for parameter in signature.parameters.values()
    }
    options = [option for part, _ in expanded.values() for option in part]

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        command(**{name: build(values) for name, (_, build) in expanded.items()})

    with_options.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]
    with_options.__annotations__ = {option.name: option.annotation for option in options}
    return with_options


def given_options(group: Any) -> list[str]:
    """The options of a group whose value is not the default, as they are written on the command line."""
    hints = get_type_hints(type(group), include_extras=True)
    given = []
    for field in fields(group):
        value = getattr(group, field.name)
        if is_dataclass(value):
            given += given_options(value)
        elif value != field.default:
            infos = [info for info in hints[field.name].__metadata__ if isinstance(info, OptionInfo)]
            # With Annotated the first name stands where a default would.
            words = [word for info in infos for word in (info.default, *(info.param_decls or ()))]
            names = [word for word in words if isinstance(word, str) and word.startswith("--")]
            given.append(names[0] if names else f"--{field.name.replace('_', '-')}")
    return given


def _expand(name: str, annotation: Any, default: Any) -> tuple[list[inspect.Parameter], _Build]:
    """The options that a parameter stands for, and how its value is made of theirs."""
    if is_dataclass(annotation):
        hints = get_type_hints(annotation, include_extras=True)
        parts = {field.name: _expand(field.name, hints[field.name], field.default) for field in fields(annotation)}
        make: Any = annotation
        return (
            [option for part, _ in parts.values() for option in part],
            lambda values: make(**{key: build(values) for key, (_, build) in parts.items()}),
        )
    each = next((mark for mark in getattr(annotation, "__metadata__", ()) if isinstance(mark, OptionEach)), None)
    if each is not None:
        names = tuple(each.annotations)
        return (
            [_option(key, option, None) for key, option in each.annotations.items()],
            lambda values: {key: values[key] for key in names},
        )
    return [_option(name, annotation, default)], lambda values: values[name]


def _option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    empty = inspect.Parameter.empty
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=empty if default is MISSING else default,
        annotation=annotation,
    )
