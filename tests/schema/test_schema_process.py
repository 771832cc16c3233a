"""A stranger's schema is read in a child process: the same grammar, the same refusals, and an end for endless ones."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from llmcli.errors import LLMCliError, TokenizerError, UsageError
from llmcli.schema import grammar as grammar_process
from llmcli.schema.constraint import Constraint
from llmcli.schema.grammar import Grammar, GrammarProcess, grammar_of


@pytest.fixture(scope="module")
def process() -> GrammarProcess:
    return GrammarProcess()


def read(how: Callable[[Constraint], Grammar], constraint: Constraint) -> Grammar | str:
    """The grammar, or the reason for none."""
    try:
        return how(constraint)
    except UsageError as error:
        return str(error)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("schema", {"type": "object", "properties": {"a": {"type": "integer"}}}),
        ("schema", {"uniqueItems": True}),
        ("json_output", True),
        ("regex", "[a-z]+"),
        ("regex", "(?=a)"),
        ("choice", ["yes", "no"]),
        ("choice", [""]),
        ("grammar", 'start: "a"'),
        ("grammar", "start: <|end|>"),
    ],
)
def test_it_reads_what_is_read_here(process: GrammarProcess, kind: Any, value: Any) -> None:
    constraint = Constraint(kind, f"the {kind}", value)
    assert read(process.grammar, constraint) == read(grammar_of, constraint)


def test_what_has_no_end_is_refused_and_others_are_read(
    process: GrammarProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An automaton of 7 * 11 * 13 * 17 * 19 * 23 states."""
    schema = {"type": "integer", "allOf": [{"multipleOf": prime} for prime in (7, 11, 13, 17, 19, 23)]}
    monkeypatch.setattr(grammar_process, "LIMIT_SECONDS", 0.5)
    start_time = time.monotonic()
    with pytest.raises(TokenizerError, match=r"the schema failed: it does not end within 0.5 s; give a simpler"):
        process.grammar(Constraint("schema", "schema", schema))
    assert time.monotonic() - start_time < 5
    monkeypatch.undo()
    assert process.grammar(Constraint("regex", "regex", "a")).name == "regex"


def test_a_text_that_is_no_unicode_is_refused(process: GrammarProcess) -> None:
    with pytest.raises(LLMCliError, match=r"^choice: .*hex escape"):
        process.grammar(Constraint("choice", "choice", ["\ud800"]))
