"""Options that may stand alone or take a word: `--stats` and `--stats start`.

Typer has no such options. A word that is not one of the option's own stays what it was, such as the prompt.
"""

from collections.abc import Iterator, Sequence

# What the option means alone, and the words that it takes. They are declared as options with a value.
OPTIONAL_VALUES = {"--stats": ("run", ("start",))}


def with_values(arguments: Sequence[str], taking: set[str]) -> Iterator[tuple[str, bool]]:
    """The arguments with `--stats=run` for `--stats`, each with whether it may be an option: not one's value.

    `taking` are the other options that take a value.
    """
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            yield from ((one, False) for one in (argument, *rest))
            return
        if argument in OPTIONAL_VALUES:
            alone, words = OPTIONAL_VALUES[argument]
            argument = f"{argument}={rest.pop(0) if rest and rest[0] in words else alone}"
        yield argument, True
        if argument in taking and rest:
            yield rest.pop(0), False
