"""Options that hold texts to a schema."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmcli.cli import lazy
from llmcli.cli.prompt import refuse_undecoded
from llmcli.cli.terminal import terminal
from llmcli.errors import UsageError
from llmcli.reading import GRAMMAR, SCHEMA, parse_json

if TYPE_CHECKING:
    from llmcli.schema.grammar import Grammar

SCHEMA_PANEL = "Schema"
_BOM = "\ufeff"  # some editors begin a text in UTF-8 with it


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
        typer.Option(
            readable=False,
            metavar="FILE",
            help="Write a text of a grammar (Lark or GBNF).",
            rich_help_panel=SCHEMA_PANEL,
        ),
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
    schema_strict: Annotated[
        bool,
        typer.Option(
            "--schema-strict",
            help="Refuse unknown keywords and formats of a schema.",
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
        if self.schema_strict and given != ["--schema"]:
            raise UsageError("--schema-strict needs --schema")
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
            if not self.schema.strip():
                raise UsageError("--schema is empty; give it a file or a JSON Schema")
            is_json = _is_json(self.schema)
            text = self.schema if is_json else SCHEMA.read_text(Path(self.schema)).removeprefix(_BOM)
            name = "--schema" if is_json else self.schema
            grammar = lazy.json_schema_grammar(
                name, text, any_space=self.schema_whitespace, is_strict=self.schema_strict
            )
            for note in grammar.notes:
                terminal.info(f"{name}: {note}")
            return grammar
        if self.regex is not None:
            return lazy.regex_grammar("--regex", self.regex)
        if self.choice:
            return lazy.choice_grammar("--choice", self.choice)
        if self.grammar is not None:
            return lazy.lark_grammar(str(self.grammar), GRAMMAR.read_text(self.grammar).removeprefix(_BOM))
        return lazy.any_json_grammar("--json-output", any_space=self.schema_whitespace)


def _is_json(text: str) -> bool:
    """Whether it is a schema itself, not the name of a file; one that is damaged is recognized by its brace."""
    if text.lstrip().startswith("{"):
        return True
    try:
        parse_json(text)
    except ValueError:
        return False
    return not Path(text).exists()
