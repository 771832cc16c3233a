"""Texts with a schema: the options, the schema in a model's tokens, and cut texts.

The schema is made while the weights load.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from llmcli.cli import lazy
from llmcli.cli.command import option
from llmcli.cli.output.base import Output
from llmcli.cli.prompt import refuse_undecoded
from llmcli.cli.session import Session, TokenTree
from llmcli.cli.terminal import terminal
from llmcli.engine.request import Finished
from llmcli.errors import UnfinishedTextError, UsageError
from llmcli.reading import GRAMMAR, SCHEMA, parse_json

schema_option = partial(option, rich_help_panel="Schema")
_BOM = "\ufeff"  # some editors begin a text in UTF-8 with it

KEPT_SCHEMAS = 64  # the latest; the lines of a batch, and a server's requests, may each have their own


@dataclass(frozen=True)
class SchemaOptions:
    """The schema of texts. Raises: UsageError for more than one schema, and for options that need one"""

    schema: str | None = schema_option(None, "Write JSON that fits this JSON Schema.", metavar="FILE|JSON")
    json_output: bool = schema_option(False, "Write any JSON value.")
    regex: str | None = schema_option(None, "Write a text that matches this.", metavar="RE")
    choice: list[str] | None = schema_option(None, "Write one of these; repeatable.", metavar="TEXT")
    grammar: Path | None = schema_option(None, "Write a text of a grammar (Lark or GBNF).")
    schema_whitespace: bool = schema_option(False, "Allow line breaks and more than one space in JSON.", hidden=True)
    schema_strict: bool = schema_option(False, "Refuse unknown keywords and formats of a schema.", hidden=True)
    require_complete: bool = schema_option(False, "Fail if a text is cut before it is complete.")

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
                refuse_undecoded(text, flag)

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

    def read(self, *, ignore_eos: bool = False) -> lazy.grammar.Grammar | None:
        """The grammar; None if no text has a schema.

        Raises: UsageError for one that cannot be kept exactly, or that no text fits; as `SmallFile.read_text`.
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
            grammar = lazy.grammar.json_schema_grammar(
                name, text, any_space=self.schema_whitespace, is_strict=self.schema_strict
            )
            for note in grammar.notes:
                terminal.info(f"{name}: {note}")
            return grammar
        if self.regex is not None:
            return lazy.grammar.regex_grammar("--regex", self.regex)
        if self.choice:
            return lazy.grammar.choice_grammar("--choice", self.choice)
        if self.grammar is not None:
            return lazy.grammar.lark_grammar(str(self.grammar), GRAMMAR.read_text(self.grammar).removeprefix(_BOM))
        return lazy.grammar.any_json_grammar("--json-output", any_space=self.schema_whitespace)


def _is_json(text: str) -> bool:
    """Whether the value is a schema, not a file's name; a damaged one is recognized by its brace."""
    if text.lstrip().startswith("{"):
        return True
    try:
        parse_json(text)
    except ValueError:
        return False
    return not Path(text).exists()


class Schemas:
    """Grammars in the tokens of a model.

    The tree of its tokens is built once, in a thread, while the weights load.
    """

    def __init__(self, session: Session):
        self._session = session
        self._tree = session.token_tree
        self._made = lru_cache(KEPT_SCHEMAS)(self._make)
        self._vocabulary = lru_cache(KEPT_SCHEMAS)(self._make_vocabulary)
        self._tokens = lru_cache(KEPT_SCHEMAS)(self._make_tokens)

    def prepare(self, grammar: lazy.grammar.Grammar | None, sampler: lazy.params.Sampler) -> None:
        """Start building the tree, if there is a grammar.

        Raises: UsageError for settings that stop a text from ending
        """
        if grammar is None:
            return
        if sampler.ignore_eos:
            raise UsageError(f"ignore_eos and {grammar.name} cannot be combined: the text could not end")
        if sampler.params.min_new_tokens:
            raise UsageError(
                f"min_new_tokens is {sampler.params.min_new_tokens}, and {grammar.name} says where a text may end; "
                "set min_new_tokens to 0"
            )
        if self._tree is None:
            self._tree = TokenTree(self._session.model.checkpoint.folder, self._session.model.config.vocab_size)
        self._tree.start(self._session.tokenizer)

    def schema(
        self,
        grammar: lazy.grammar.Grammar,
        sampler: lazy.params.Sampler,
        shown_token_ids: frozenset[int] = frozenset(),
    ) -> lazy.schema.Schema:
        """Wait for the tree. The strings of these special tokens count as text.

        Raises: UsageError, as `prepare` too
        """
        self.prepare(grammar, sampler)
        return self._made(grammar, sampler.eos_token_ids, shown_token_ids)

    def hold(self, request: lazy.request.Request, grammar: lazy.grammar.Grammar | None) -> lazy.request.Request:
        """The request with the grammar, if there is one. Raises: as `schema`"""
        if grammar is None:
            return request
        return replace(request, schema=self.schema(grammar, request.sampler, request.shown_token_ids))

    def _make(
        self, grammar: lazy.grammar.Grammar, eos_token_ids: frozenset[int], shown: frozenset[int]
    ) -> lazy.schema.Schema:
        return lazy.schema.Schema(grammar, self._vocabulary(eos_token_ids, shown))

    def _make_vocabulary(self, eos_token_ids: frozenset[int], shown: frozenset[int]) -> lazy.schema.Vocabulary:
        vocab_size, tokenizer = self._session.model.config.vocab_size, self._session.tokenizer
        return lazy.schema.Vocabulary(tokenizer, eos_token_ids, vocab_size, self._tokens(shown))

    def _make_tokens(self, shown: frozenset[int]) -> lazy.library.Tokens:
        assert self._tree is not None
        tokens, special_text = self._tree.tokens(), self._session.tokenizer.special_text
        if not shown:
            return tokens
        return lazy.library.Tokens(tokens.pieces.with_pieces({one: special_text(one).encode() for one in shown}))


class CompletenessNotice(Output):
    """Counts texts that were cut before they fitted their schema, and reports them in a line at the end."""

    def __init__(self) -> None:
        self._num_held = 0
        self._reasons: list[str] = []  # why texts were cut

    def finish(self, finished: Sequence[Finished]) -> None:
        """Count all texts, and say how many are unfinished."""
        for one in finished:
            self.count(one)
        self.show_count()

    def count(self, finished: Finished) -> None:
        """Count a text that has ended."""
        self._num_held += finished.is_complete is not None
        if finished.is_complete is False:
            self._reasons.append(finished.finish_reason)

    def count_kept(self, cut: Sequence[str | None]) -> None:
        """Count an earlier run's texts with a schema, given the reason why each was cut, None for a whole one."""
        self._num_held += len(cut)
        self._reasons += [reason for reason in cut if reason is not None]

    def show_count(self) -> None:
        """Say on stderr how many texts are unfinished, and why."""
        if self._reasons:
            reasons = ", ".join(sorted(set(self._reasons)))
            what = "the text is" if self._num_held == 1 else f"{len(self._reasons)} of {self._num_held} texts are"
            terminal.info(f"{what} unfinished ({reasons}): what the schema asks for is not complete")

    def require_complete(self) -> None:
        """Raises: UnfinishedTextError if a text was unfinished"""
        if self._reasons:
            what = "a text is" if len(self._reasons) == 1 else f"{len(self._reasons)} texts are"
            raise UnfinishedTextError(f"{what} unfinished; {remedy_of(self._reasons)}")


def remedy_of(reasons: Iterable[str]) -> str:
    """The remedy for texts cut for these reasons."""
    is_short = not {"length", "context"}.isdisjoint(reasons)
    return "give more room with --max-new-tokens or --context" if is_short else "leave out --stop"
