"""Options that hold a text to a schema, and what becomes of them: a grammar at once, masks while the weights load."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmcli.cli import lazy
from llmcli.cli.prompt import refuse_undecoded
from llmcli.cli.terminal import terminal
from llmcli.engine.events import Event, Finished
from llmcli.errors import UnfinishedTextError, UsageError
from llmcli.reading import GRAMMAR, SCHEMA

if TYPE_CHECKING:
    from concurrent.futures import Future

    from llmcli.cli.run import Run
    from llmcli.sampling.sampler import Sampler
    from llmcli.schema.grammar import Grammar
    from llmcli.schema.schema import Schema

SCHEMA_PANEL = "Schema"


@dataclass(frozen=True)
class SchemaOptions:
    """What texts are held to.

    Raises: UsageError for more than one schema, and for options that need one.
    """

    schema: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|JSON",
            help="Write JSON that fits this JSON Schema.",
            rich_help_panel=SCHEMA_PANEL,
        ),
    ] = None
    json_output: Annotated[
        bool, typer.Option("--json-output", help="Write any JSON value.", rich_help_panel=SCHEMA_PANEL)
    ] = False
    regex: Annotated[
        str | None,
        typer.Option(metavar="RE", help="Write a text that matches this.", rich_help_panel=SCHEMA_PANEL),
    ] = None
    choice: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Write one of these; repeatable.", rich_help_panel=SCHEMA_PANEL),
    ] = None
    grammar: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a text of a grammar in Lark's syntax.", rich_help_panel=SCHEMA_PANEL),
    ] = None
    schema_whitespace: Annotated[
        bool,
        typer.Option(
            "--schema-whitespace",
            help="Allow line breaks and more than one space in JSON.",
            hidden=True,
            rich_help_panel=SCHEMA_PANEL,
        ),
    ] = False
    require_complete: Annotated[
        bool,
        typer.Option(
            "--require-complete", help="Fail if a text is cut before it is complete.", rich_help_panel=SCHEMA_PANEL
        ),
    ] = False

    def __post_init__(self) -> None:
        given = self._given
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given[:2])} cannot be combined")
        if self.schema_whitespace and given not in (["--schema"], ["--json-output"]):
            raise UsageError("--schema-whitespace needs --schema or --json-output")
        if self.require_complete and not given:
            raise UsageError("--require-complete needs --schema, --json-output, --regex, --choice or --grammar")
        for flag, texts in (("--schema", [self.schema]), ("--regex", [self.regex]), ("--choice", self.choice or [])):
            for text in texts:
                refuse_undecoded(text or "", flag)

    @property
    def _given(self) -> list[str]:
        named = {
            "--schema": self.schema,
            "--json-output": self.json_output or None,
            "--regex": self.regex,
            "--choice": self.choice or None,
            "--grammar": self.grammar,
        }
        return [flag for flag, value in named.items() if value is not None]

    def read(self, *, ignore_eos: bool = False) -> Grammar | None:
        """The grammar; None if no text is held to anything.

        Raises: UsageError for one that cannot be held exactly, or that no text fits; as `SmallFile.read_text`.
        """
        if not self._given:
            return None
        if ignore_eos:
            raise UsageError(f"--ignore-eos and {self._given[0]} cannot be combined: the text could not end")
        if self.schema is not None:
            is_json = self.schema.lstrip().startswith("{") or self.schema.strip() in ("true", "false")
            text = self.schema if is_json else SCHEMA.read_text(Path(self.schema))
            name = "--schema" if is_json else self.schema
            return lazy.json_schema_grammar(name, text, any_space=self.schema_whitespace)
        if self.regex is not None:
            return lazy.regex_grammar("--regex", self.regex)
        if self.choice:
            return lazy.choice_grammar("--choice", self.choice)
        if self.grammar is not None:
            return lazy.lark_grammar(str(self.grammar), GRAMMAR.read_text(self.grammar))
        return lazy.any_json_grammar("--json-output", any_space=self.schema_whitespace)


class SchemaInMaking:
    """A schema in the tokens of a model, made in a thread: its tokens take a while, as the weights do."""

    def __init__(self, grammar: Grammar, run: Run, sampler: Sampler):
        """Raises: UsageError for settings that forbid an end."""
        if sampler.params.min_new_tokens:
            raise UsageError(
                f"min_new_tokens is {sampler.params.min_new_tokens}, and {grammar.name} says where a text may end; "
                "give --min-new-tokens 0"
            )
        self._pool = ThreadPoolExecutor(1)
        self._future: Future[Schema] = self._pool.submit(self._make, grammar, run, sampler)

    def result(self) -> Schema:
        """Wait for it. Raises: UsageError"""
        self._pool.shutdown()
        return self._future.result()

    @staticmethod
    def _make(grammar: Grammar, run: Run, sampler: Sampler) -> Schema:
        session = run.session
        vocabulary = lazy.Vocabulary(session.tokenizer, sampler.eos_token_ids, session.model.config.vocab_size)
        return lazy.Schema(grammar, vocabulary)


class CompletenessNotice:
    """An `Output` of one line on stderr for texts that are not complete."""

    def __init__(self) -> None:
        self._num_unfinished = 0

    def show(self, event: Event) -> None:
        """Texts are not cut before they end."""

    def finish(self, finished: Sequence[Finished]) -> None:
        """Say how many are unfinished, and why."""
        unfinished = [one for one in finished if one.is_complete is False]
        self._num_unfinished = len(unfinished)
        if unfinished:
            reasons = ", ".join(sorted({one.finish_reason for one in unfinished}))
            what = "the text is" if len(finished) == 1 else f"{len(unfinished)} of {len(finished)} texts are"
            terminal.info(f"{what} unfinished ({reasons}): what the schema asks for is not complete")

    def require_complete(self) -> None:
        """Raises: UnfinishedTextError if a text was unfinished"""
        if self._num_unfinished:
            what = "a text is" if self._num_unfinished == 1 else f"{self._num_unfinished} texts are"
            raise UnfinishedTextError(f"{what} unfinished; give more room with --max-new-tokens or --context")
