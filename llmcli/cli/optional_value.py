"""Options that may stand alone or take a word: `--stats` and `--stats start`.

Typer has no such options. A word that is not one of the option's own stays what it was, such as the prompt.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from typer.core import TyperCommand, TyperOption

# What the option means alone, and the words that it takes.
OPTIONAL_VALUES = {"--stats": ("run", ("start",))}


class OptionalValueCommand(TyperCommand):
    """A command some of whose options are in OPTIONAL_VALUES; they are declared as options with a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give those that stand alone their value."""
        options = [param for param in self.get_params(ctx) if isinstance(param, TyperOption)]
        taking = {name for option in options if not option.is_flag for name in option.opts} - OPTIONAL_VALUES.keys()
        return super().parse_args(ctx, list(with_values(args, taking)))


def with_values(arguments: Sequence[str], taking: set[str]) -> Iterator[str]:
    """The arguments with `--stats=run` for `--stats`; `taking` are the other options that take a value."""
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            yield argument
            yield from rest
            return
        if argument in OPTIONAL_VALUES:
            alone, words = OPTIONAL_VALUES[argument]
            argument = f"{argument}={rest.pop(0) if rest and rest[0] in words else alone}"
        yield argument
        if argument in taking and rest:
            yield rest.pop(0)
