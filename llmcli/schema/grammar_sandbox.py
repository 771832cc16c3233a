"""The program of the child process that reads a stranger's schema; `GrammarProcess` bounds its time.

Only the child imports this module.
"""

from dataclasses import asdict
from typing import Any

from llmcli.errors import UsageError
from llmcli.schema.constraint import Constraint
from llmcli.schema.grammar import grammar_of
from llmcli.tokenizer.sandbox import printable, serve

MEMORY_LIMIT_MB = 1024


def main() -> None:
    """Answer the fields of a `Constraint` with those of its `Grammar`, or with its error."""
    serve(_answer, lambda error: printable(str(error)) or type(error).__name__, MEMORY_LIMIT_MB)


def _answer(request: dict[str, Any]) -> dict[str, Any] | str:
    try:
        return asdict(grammar_of(Constraint(**request)))
    except UsageError as error:
        return str(error)
